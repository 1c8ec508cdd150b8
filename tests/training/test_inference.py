import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from hsa.errors import InvalidInput
from hsa.models.options import ModelOptions
from hsa.models.saved import save_model
from hsa.signals.domains import Grid
from hsa.signals.signal import Signal
from hsa.training.accelerator import make_accelerator
from hsa.training.data.prepare import prepare
from hsa.training.experiment import train_models
from hsa.training.inference import LoadedClassifier
from hsa.training.options import DataOptions, TrainingOptions
from tests.sealing import reseal
from tests.tables import mixed_folder, picture, reviews, write_rows
from tests.tasks import classifier

TINY = ModelOptions(width=8, heads=2, position_width=8)
OPTIONS = TrainingOptions(epochs=2, batch_size=8, learning_rate=1e-2)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train(data, folder, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HSA_CACHE", str(folder / "cache"))
        prepared = prepare(data, DataOptions(vocabulary=300, **options))
    (result,) = train_models(["hierarchical"], TINY, prepared, OPTIONS, folder, make_accelerator(OPTIONS, cpu=True))
    return prepared, result


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Folder, data and result of a model trained on rows."""
    folder = tmp_path_factory.mktemp("rows")
    data = write_rows(folder / "reviews.csv", reviews())
    return folder, *train(data, folder, text=("title", "text"), number=("stars",), label="label")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Folder, data and result of a model trained on texts and pictures, a folder per class."""
    folder = tmp_path_factory.mktemp("files")
    return folder, *train(mixed_folder(folder / "data"), folder)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Folder, data and result of a model trained on text files."""
    folder = tmp_path_factory.mktemp("texts")
    for label in ("a", "b"):
        (folder / "data" / label).mkdir(parents=True)
        for i in range(10):
            (folder / "data" / label / f"{i}.txt").write_text(f"{label} {i}")
    return folder, *train(folder / "data", folder)


def stop(error):
    raise error


def test_predictions_equal_those_of_the_training_run(rows, tmp_path):
    folder, prepared, result = rows
    saved = LoadedClassifier.load(folder / "hierarchical")
    assert saved.classes == ("neg", "pos")
    actual = list(saved.predictions(folder / "reviews.csv", on_bad=stop))
    assert [p.where for p in actual] == [f"{folder / 'reviews.csv'}: row {i} (line {i + 1})" for i in range(1, 41)]
    evaluation = saved.evaluate(prepared.test)
    assert evaluation.scores == result.scores
    by_name = {p.where: p for p in actual}
    for name, row in zip(prepared.test.names, evaluation.outputs, strict=True):
        probabilities = torch.tensor(row).softmax(-1).numpy()
        assert by_name[name].label == saved.classes[probabilities.argmax()]
        assert by_name[name].probability == pytest.approx(probabilities.max(), abs=1e-5)
        assert by_name[name].runner_up == saved.classes[probabilities.argmin()]


def test_results_do_not_depend_on_the_batch_size(rows):
    folder = rows[0]
    saved = LoadedClassifier.load(folder / "hierarchical")
    wanted = list(saved.predictions(folder / "reviews.csv", on_bad=stop))
    for size in (1, 7, 40):
        actual = list(saved.predictions(folder / "reviews.csv", on_bad=stop, batch_size=size))
        assert [p.label for p in actual] == [p.label for p in wanted]
        np.testing.assert_allclose([p.probability for p in actual], [p.probability for p in wanted], atol=1e-5)


def test_prediction_needs_no_labels(rows, tmp_path):
    without = [{name: value for name, value in row.items() if name != "label"} for row in reviews(3)]
    actual = list(
        LoadedClassifier.load(rows[0] / "hierarchical").predictions(
            write_rows(tmp_path / "new.jsonl", without), on_bad=stop
        )
    )
    assert len(actual) == 3


def test_evaluation_of_new_data(rows, tmp_path):
    saved = LoadedClassifier.load(rows[0] / "hierarchical")
    data = saved.data_set(write_rows(tmp_path / "new.parquet", reviews(9, seed=5)), stop)
    assert len(data) == 9
    assert 0 <= saved.evaluate(data).scores.accuracy <= 1


def test_evaluation_after_training_in_another_precision(rows):
    make_accelerator(replace(OPTIONS, mixed_precision="bf16"), cpu=True)
    saved = LoadedClassifier.load(rows[0] / "hierarchical")
    assert saved.evaluate(rows[1].test).scores == rows[2].scores


def test_regression(tmp_path):
    data = write_rows(tmp_path / "a.csv", reviews())
    _, result = train(data, tmp_path, text=("text",), label="stars", task="regression")
    saved = LoadedClassifier.load(tmp_path / "hierarchical")
    actual = list(saved.predictions(data, on_bad=stop))
    assert all(isinstance(p.label, float) and p.probability is None and p.runner_up is None for p in actual)
    assert 1 <= np.mean([p.label for p in actual]) <= 5
    assert saved.evaluate(saved.data_set(data, stop)).scores.r2 <= 1
    assert result.scores.r2 is not None


def test_files_and_folders(files, tmp_path):
    folder = files[0]
    saved = LoadedClassifier.load(folder / "hierarchical")
    (one,) = saved.predictions(folder / "data" / "pos" / "0.html", on_bad=stop)
    assert one.where == str(folder / "data" / "pos" / "0.html")
    every = list(saved.predictions(folder / "data", on_bad=stop))
    assert len(every) == 40
    assert {p.label for p in every} <= {"pos", "neg"}
    assert saved.evaluate(saved.data_set(folder / "data", stop)).scores.accuracy >= 0.5
    picture(tmp_path / "new.png", 200)
    assert len(list(saved.predictions(tmp_path / "new.png", on_bad=stop))) == 1


# Inputs that do not fit


def test_missing_columns_in_a_file_are_named(rows, tmp_path):
    saved = LoadedClassifier.load(rows[0] / "hierarchical")
    path = write_rows(tmp_path / "new.csv", [{"txt": "good", "title": "a", "stars": 3}])
    message = "new.csv: no column 'text'; expected one of 'txt', 'title', 'stars'. Did you mean 'txt'?"
    for read in (lambda: list(saved.predictions(path, on_bad=stop)), lambda: saved.data_set(path, stop)):
        with pytest.raises(InvalidInput) as caught:
            read()
        assert message in str(caught.value)


def test_unknown_classes_are_named_with_their_row(rows, tmp_path):
    new = reviews(3)
    new[1]["label"] = "so-so"
    path = write_rows(tmp_path / "new.csv", new)
    with pytest.raises(
        InvalidInput, match=r"new.csv: row 2 \(line 3\): expected one of neg, pos, got the class 'so-so'"
    ):
        LoadedClassifier.load(rows[0] / "hierarchical").data_set(path, stop)


def test_bad_rows_can_be_left_out(rows, tmp_path):
    new = reviews(4)
    new[1] = dict.fromkeys(new[1], "")
    path = write_rows(tmp_path / "new.csv", new)
    saved, skipped = LoadedClassifier.load(rows[0] / "hierarchical"), []
    assert [p.where[-14:] for p in saved.predictions(path, on_bad=skipped.append)] == [
        f"row {i} (line {i + 1})" for i in (1, 3, 4)
    ]
    assert len(saved.data_set(path, skipped.append)) == 3
    assert [error.where for error in skipped] == [
        f"{path}: row 2 (line 3), column {name!r}" for name in ("stars", "label")
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.txt", "expected a file of rows, which the model was trained on: one of .csv, .tsv, .*, got a .txt file"),
        ("", "expected a file of rows, which the model was trained on: .*, got a folder"),
        ("none.csv", "no such file or folder"),
        ("none", "no such file or folder"),
    ],
)
def test_files_that_hold_no_rows(rows, tmp_path, name, message):
    (tmp_path / "a.txt").write_text("good")
    with pytest.raises(InvalidInput, match=message):
        list(LoadedClassifier.load(rows[0] / "hierarchical").predictions(tmp_path / name, on_bad=stop))


def test_files_of_a_modality_that_the_model_was_not_trained_on(texts, tmp_path):
    """The error names the file, which can be left out."""
    saved, skipped = LoadedClassifier.load(texts[0] / "hierarchical"), []
    picture(tmp_path / "a" / "0.png", 70)
    (tmp_path / "a" / "0.txt").write_text("b 3")
    message = r"0.png: expected modalities of the training data: text, got leaves of modality 'patch'"
    with pytest.raises(InvalidInput, match=message):
        list(saved.predictions(tmp_path, on_bad=stop))
    with pytest.raises(InvalidInput, match=message):
        saved.data_set(tmp_path, stop)
    assert len(list(saved.predictions(tmp_path, on_bad=skipped.append))) == 1
    assert [error.where for error in skipped] == [str(tmp_path / "a" / "0.png")]


def test_no_files(files, tmp_path):
    saved = LoadedClassifier.load(files[0] / "hierarchical")
    (tmp_path / "a.xyz").write_text("")
    with pytest.raises(InvalidInput, match="no files to read; expected some of"):
        list(saved.predictions(tmp_path, on_bad=stop))
    with pytest.raises(InvalidInput, match=r"expected one of \.txt, .*, got the suffix '.xyz'"):
        list(saved.predictions(tmp_path / "a.xyz", on_bad=stop))
    with pytest.raises(InvalidInput, match="no such file or folder; expected a file, or a folder of files"):
        list(saved.predictions(tmp_path / "none", on_bad=stop))


# Folders that are no model


def test_the_folder_of_a_run_stands_for_its_first_model(rows):
    assert LoadedClassifier.load(rows[0]).folder == rows[0] / "hierarchical"


def test_no_model(tmp_path):
    with pytest.raises(InvalidInput, match="no such folder; expected a model or a run that hsa train wrote"):
        LoadedClassifier.load(tmp_path / "none")
    with pytest.raises(InvalidInput, match="expected a model or a run that hsa train wrote, got an empty folder"):
        LoadedClassifier.load(tmp_path)


@pytest.fixture
def copy(rows, tmp_path):
    return shutil.copytree(rows[0] / "hierarchical", tmp_path / "model")


def damaged(copy):
    (copy / "model.safetensors").write_bytes(b"nonsense")


def other_weights(copy):
    save_model(copy / "other", classifier())
    (copy / "other" / "model.safetensors").rename(copy / "model.safetensors")
    reseal(copy)


def other_tokenizer(copy):
    from hsa.signals.readers import train_tokenizer

    train_tokenizer(["a b"], 260).save(str(copy / "tokenizer.json"))
    reseal(copy)


def other_config(copy):
    (copy / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (damaged, "model.safetensors: expected .*, got a damaged file"),
        (other_weights, r"model.safetensors: expected shape .*, got .* of shape .*\. They belong to another model"),
        (other_config, "config.json: expected the configuration of a classifier of hsa, got something else"),
        (
            lambda copy: (copy / "config.json").write_text("{"),
            "config.json: expected .*, got a file that cannot be read",
        ),
        (lambda copy: (copy / "model.safetensors").unlink(), "model.safetensors: no such file"),
        (
            lambda copy: (copy / "input_spec.json").unlink(),
            "input_spec.json: no such file; expected the input spec of a model",
        ),
        (
            lambda copy: (copy / "tokenizer.json").unlink(),
            "tokenizer.json: no such file; expected the model's own tokenizer, of .* tokens",
        ),
        (
            lambda copy: (copy / "tokenizer.json").write_text("{}"),
            "tokenizer.json: expected .*, got a file that does not load",
        ),
        (
            other_tokenizer,
            "tokenizer.json: expected the model's own tokenizer, of .*, got a tokenizer of .* tokens. Copy the whole",
        ),
    ],
)
def test_damaged_models(copy, harm, message):
    harm(copy)
    with pytest.raises(InvalidInput, match=message) as caught:
        LoadedClassifier.load(copy)
    assert str(caught.value).startswith(str(copy))
    assert "\n" not in str(caught.value)


def test_a_tree_of_another_kind_is_named(rows):
    """The model was trained on tables and sequences."""
    saved = LoadedClassifier.load(rows[0] / "hierarchical")
    examples = next(saved._examples([{"text": "good", "title": "a", "stars": 1}] * 2, stop, 8))
    grid = replace(examples[1], signal=Signal(Grid((1, 2)), [Signal.of([1, 2], "text"), Signal.of([3], "text")]))
    with pytest.raises(
        InvalidInput, match=r"inputs\[1\]: expected only .*Pass data of the kind that the model was trained"
    ):
        saved._probabilities([examples[0], grid])
