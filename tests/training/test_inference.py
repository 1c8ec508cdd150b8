import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from hsa.errors import InvalidInput
from hsa.models.options import ModelOptions
from hsa.models.saved import save_model
from hsa.training.accelerator import make_accelerator
from hsa.training.data.prepare import prepare
from hsa.training.experiment import train_models
from hsa.training.inference import Saved
from hsa.training.options import DataOptions, TrainingOptions
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
    """A model of rows, with all that came of it."""
    folder = tmp_path_factory.mktemp("rows")
    data = write_rows(folder / "reviews.csv", reviews())
    return folder, *train(data, folder, text=("title", "text"), number=("stars",), label="label")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model of a folder per class, texts and pictures."""
    folder = tmp_path_factory.mktemp("files")
    return folder, *train(mixed_folder(folder / "data"), folder)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A model of text files alone."""
    folder = tmp_path_factory.mktemp("texts")
    for label in ("a", "b"):
        (folder / "data" / label).mkdir(parents=True)
        for i in range(10):
            (folder / "data" / label / f"{i}.txt").write_text(f"{label} {i}")
    return folder, *train(folder / "data", folder)


def stop(error):
    raise error


def test_predictions_are_those_of_training(rows, tmp_path):
    folder, prepared, result = rows
    saved = Saved.load(folder / "hierarchical")
    assert saved.classes == ("neg", "pos")
    actual = list(saved.predict(folder / "reviews.csv", stop))
    assert [p.where for p in actual] == [f"{folder / 'reviews.csv'}: row {i} (line {i + 1})" for i in range(1, 41)]
    evaluation = saved.evaluate(prepared.test)
    assert evaluation.scores == result.scores
    said = {p.where: p for p in actual}
    for name, row in zip(prepared.test.names, evaluation.outputs, strict=True):
        chances = torch.tensor(row).softmax(-1).numpy()
        assert said[name].label == saved.classes[chances.argmax()]
        assert said[name].probability == pytest.approx(chances.max(), abs=1e-5)
        assert said[name].runner_up == saved.classes[chances.argmin()]


def test_the_size_of_batches_does_not_matter(rows):
    folder = rows[0]
    saved = Saved.load(folder / "hierarchical")
    wanted = list(saved.predict(folder / "reviews.csv", stop))
    for size in (1, 7, 40):
        actual = list(saved.predict(folder / "reviews.csv", stop, batch=size))
        assert [p.label for p in actual] == [p.label for p in wanted]
        np.testing.assert_allclose([p.probability for p in actual], [p.probability for p in wanted], atol=1e-5)


def test_labels_are_not_needed_to_predict(rows, tmp_path):
    without = [{name: value for name, value in row.items() if name != "label"} for row in reviews(3)]
    actual = list(Saved.load(rows[0] / "hierarchical").predict(write_rows(tmp_path / "new.jsonl", without), stop))
    assert len(actual) == 3


def test_evaluation_of_new_data(rows, tmp_path):
    saved = Saved.load(rows[0] / "hierarchical")
    data = saved.data_set(write_rows(tmp_path / "new.parquet", reviews(9, seed=5)), stop)
    assert len(data) == 9
    assert 0 <= saved.evaluate(data).scores.accuracy <= 1


def test_evaluation_after_training_in_another_precision(rows):
    make_accelerator(replace(OPTIONS, mixed_precision="bf16"), cpu=True)
    saved = Saved.load(rows[0] / "hierarchical")
    assert saved.evaluate(rows[1].test).scores == rows[2].scores


def test_numbers(tmp_path):
    data = write_rows(tmp_path / "a.csv", reviews())
    _, result = train(data, tmp_path, text=("text",), label="stars", task="regression")
    saved = Saved.load(tmp_path / "hierarchical")
    actual = list(saved.predict(data, stop))
    assert all(isinstance(p.label, float) and p.probability is None and p.runner_up is None for p in actual)
    assert 1 <= np.mean([p.label for p in actual]) <= 5
    assert saved.evaluate(saved.data_set(data, stop)).scores.r2 <= 1
    assert result.scores.r2 is not None


def test_files_and_folders(files, tmp_path):
    folder = files[0]
    saved = Saved.load(folder / "hierarchical")
    (one,) = saved.predict(folder / "data" / "pos" / "0.html", stop)
    assert one.where == str(folder / "data" / "pos" / "0.html")
    every = list(saved.predict(folder / "data", stop))
    assert len(every) == 40
    assert {p.label for p in every} <= {"pos", "neg"}
    assert saved.evaluate(saved.data_set(folder / "data", stop)).scores.accuracy >= 0.5
    picture(tmp_path / "new.png", 200)
    assert len(list(saved.predict(tmp_path / "new.png", stop))) == 1


# What does not fit


def test_missing_columns_are_named(rows, tmp_path):
    saved = Saved.load(rows[0] / "hierarchical")
    path = write_rows(tmp_path / "new.csv", [{"txt": "good", "title": "a", "stars": 3}])
    message = "new.csv: given the column 'text', expected one of 'txt', 'title', 'stars'; did you mean 'txt'?"
    for read in (lambda: list(saved.predict(path, stop)), lambda: saved.data_set(path, stop)):
        with pytest.raises(InvalidInput) as caught:
            read()
        assert message in str(caught.value)


def test_unknown_classes_are_named_with_their_row(rows, tmp_path):
    new = reviews(3)
    new[1]["label"] = "so-so"
    path = write_rows(tmp_path / "new.csv", new)
    with pytest.raises(
        InvalidInput, match=r"new.csv: row 2 \(line 3\): given the class 'so-so', expected one of neg, pos"
    ):
        Saved.load(rows[0] / "hierarchical").data_set(path, stop)


def test_bad_rows_can_be_left_out(rows, tmp_path):
    new = reviews(4)
    new[1] = dict.fromkeys(new[1], "")
    path = write_rows(tmp_path / "new.csv", new)
    saved, skipped = Saved.load(rows[0] / "hierarchical"), []
    assert [p.where[-14:] for p in saved.predict(path, skipped.append)] == [
        f"row {i} (line {i + 1})" for i in (1, 3, 4)
    ]
    assert len(saved.data_set(path, skipped.append)) == 3
    assert [error.where for error in skipped] == [f"{path}: row 2 (line 3)", f"{path}: row 2 (line 3), column 'label'"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.txt", "given a .txt file, expected rows, as the model was trained on: one of .csv, .tsv"),
        ("", "given a folder, expected rows, as the model was trained on"),
        ("none.csv", "given no such file or folder"),
        ("none", "given no such file or folder"),
    ],
)
def test_no_rows(rows, tmp_path, name, message):
    (tmp_path / "a.txt").write_text("good")
    with pytest.raises(InvalidInput, match=message):
        list(Saved.load(rows[0] / "hierarchical").predict(tmp_path / name, stop))


def test_kinds_of_leaves_that_the_model_does_not_know(texts, tmp_path):
    """The file is named, and may be left out."""
    saved, skipped = Saved.load(texts[0] / "hierarchical"), []
    picture(tmp_path / "a" / "0.png", 70)
    (tmp_path / "a" / "0.txt").write_text("b 3")
    message = r"0.png: given leaves of modality 'patch', expected what the model was trained on: text"
    with pytest.raises(InvalidInput, match=message):
        list(saved.predict(tmp_path, stop))
    with pytest.raises(InvalidInput, match=message):
        saved.data_set(tmp_path, stop)
    assert len(list(saved.predict(tmp_path, skipped.append))) == 1
    assert [error.where for error in skipped] == [str(tmp_path / "a" / "0.png")]


def test_no_files(files, tmp_path):
    saved = Saved.load(files[0] / "hierarchical")
    (tmp_path / "a.xyz").write_text("")
    with pytest.raises(InvalidInput, match="given no files to read, expected some of"):
        list(saved.predict(tmp_path, stop))
    with pytest.raises(InvalidInput, match=r"given the suffix '.xyz'"):
        list(saved.predict(tmp_path / "a.xyz", stop))
    with pytest.raises(InvalidInput, match="given no such file or folder, expected a file, or a folder of files"):
        list(saved.predict(tmp_path / "none", stop))


# Folders that are no model


def test_the_folder_of_a_run_is_not_that_of_a_model(rows):
    with pytest.raises(InvalidInput, match=rf"given a folder of models, expected one of {rows[0]}/hierarchical"):
        Saved.load(rows[0])


def test_no_model(tmp_path):
    with pytest.raises(InvalidInput, match="given no such folder, expected a model, as hsa train writes it"):
        Saved.load(tmp_path / "none")
    with pytest.raises(InvalidInput, match=r"config.json: given no such file"):
        Saved.load(tmp_path)


@pytest.fixture
def copy(rows, tmp_path):
    return shutil.copytree(rows[0] / "hierarchical", tmp_path / "model")


def damaged(copy):
    (copy / "model.safetensors").write_bytes(b"nonsense")


def other_weights(copy):
    save_model(copy / "other", classifier())
    (copy / "other" / "model.safetensors").rename(copy / "model.safetensors")


def other_tokenizer(copy):
    from hsa.signals.readers import train_tokenizer

    train_tokenizer(["a b"], 260).save(str(copy / "tokenizer.json"))


def other_config(copy):
    (copy / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (damaged, "model.safetensors: given a damaged file"),
        (other_weights, "model.safetensors: given .* they belong to another model"),
        (other_config, "config.json: given something else, expected the configuration of a classifier of hsa"),
        (lambda copy: (copy / "config.json").write_text("{"), "config.json: given a file that cannot be read"),
        (lambda copy: (copy / "model.safetensors").unlink(), "model.safetensors: given no such file"),
        (
            lambda copy: (copy / "input_spec.json").unlink(),
            "input_spec.json: given no such file, expected how a model reads",
        ),
        (
            lambda copy: (copy / "tokenizer.json").unlink(),
            "tokenizer.json: given no such file, expected the model's own",
        ),
        (lambda copy: (copy / "tokenizer.json").write_text("{}"), "tokenizer.json: given a file that does not load"),
        (
            other_tokenizer,
            "tokenizer.json: given a tokenizer of .* tokens, expected the model's own, of .* copy the whole",
        ),
    ],
)
def test_models_that_are_not_whole(copy, harm, message):
    harm(copy)
    with pytest.raises(InvalidInput, match=message) as caught:
        Saved.load(copy)
    assert str(caught.value).startswith(str(copy))
    assert "\n" not in str(caught.value)
