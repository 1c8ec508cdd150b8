"""`hsa.load`: texts, rows and files in, classes, numbers, vectors, answers and texts out."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path

import pytest
import torch

from hsa.cli.generate import generate as generate_command
from hsa.cli.main import run
from hsa.errors import InvalidInput
from hsa.models.language_model import LanguageModel, LanguageModelConfig
from hsa.models.options import ModelOptions
from hsa.models.saved import save_language_model, save_seq2seq
from hsa.models.seq2seq import Seq2Seq
from hsa.signals.readers.tokens import train_tokenizer
from hsa.training.accelerator import make_accelerator
from hsa.training.data.prepare import prepare, save_input_spec
from hsa.training.experiment import train_models
from hsa.training.load import load
from hsa.training.options import DataOptions, LanguageOptions, Seq2SeqOptions, TrainingOptions
from hsa.training.seq2seq.data import prepare_pairs
from hsa.training.seq2seq.loop import seq2seq_config
from tests.sealing import reseal
from tests.tables import picture, reviews, write_rows

TINY = ModelOptions(width=8, heads=2, position_width=8)
OPTIONS = TrainingOptions(epochs=1, batch_size=8, learning_rate=1e-2)


def train(data: Path, folder: Path, models=("hierarchical",), **options) -> Path:
    """Train models into a folder and return it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HSA_CACHE", str(folder / "cache"))
        prepared = prepare(data, DataOptions(vocabulary=300, **options))
    train_models(models, TINY, prepared, OPTIONS, folder / "run", make_accelerator(OPTIONS, cpu=True))
    return folder / "run"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Run of two models of one column of text."""
    folder = tmp_path_factory.mktemp("texts")
    data = write_rows(folder / "reviews.csv", reviews())
    return train(data, folder, ("hierarchical", "flat"), text=("text",), label="label")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Run of a model of two columns of text, a number and a picture."""
    folder = tmp_path_factory.mktemp("rows")
    data = [row | {"photo": picture(folder / f"{i}.png", 9 * i).name} for i, row in enumerate(reviews(20))]
    path = write_rows(folder / "reviews.jsonl", data)
    return train(path, folder, text=("title", "text"), number=("stars",), image=("photo",), label="label")


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """Run of a regression model."""
    folder = tmp_path_factory.mktemp("numbers")
    data = write_rows(folder / "reviews.csv", reviews())
    return train(data, folder, text=("text",), label="stars", task="regression")


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Run of a model of text files, a folder per class, with long documents cut."""
    folder = tmp_path_factory.mktemp("documents")
    for i, row in enumerate(reviews()):
        path = folder / "data" / row["label"] / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{row['text']}\n\n{row['title']}")
    return train(folder / "data", folder, max_tokens=6, max_family=3)


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    """Folder of a language model."""
    folder = tmp_path_factory.mktemp("book") / "multiscale"
    tokenizer = train_tokenizer(["It was a dark and stormy night."], 280)
    config = LanguageModelConfig(tokenizer.get_vocab_size(), width=8, heads=2, layers=1)
    save_language_model(folder, LanguageModel(config), tokenizer)
    return folder


@pytest.fixture(scope="module")
def seq2seq(tmp_path_factory):
    """Folder of an encoder–decoder that reads the column "question"."""
    folder = tmp_path_factory.mktemp("lights")
    data = [{"question": f"The light is {c}. Day {i}.", "answer": "Stop."} for i, c in enumerate(["red", "blue"] * 8)]
    options = DataOptions(text=("question",), label="answer", task="seq2seq", vocabulary=300)
    prepared = prepare_pairs(write_rows(folder / "lights.csv", data), options)
    language = LanguageOptions(branching=(2, 2))
    model = Seq2Seq(seq2seq_config(prepared, "hierarchical", TINY, language, Seq2SeqOptions()))
    save_seq2seq(folder / "model", model)
    save_input_spec(folder / "model", prepared.input_spec)
    return folder / "model"


# Results


def test_texts_give_what_the_same_rows_in_a_file_give(texts, tmp_path):
    model = load(texts)
    new = reviews(40, seed=3)
    path = write_rows(tmp_path / "new.csv", new)
    labels = model.predict([row["text"] for row in new])
    assert labels == [p.label for p in model.predictions(path, on_bad=pytest.fail)]
    assert labels == model.predict(path) == model.predict(new)
    assert set(labels) <= set(model.classes) == {"neg", "pos"}
    of_texts = model.predict_proba([row["text"] for row in new])
    assert torch.equal(of_texts, model.predict_proba(path))
    assert [p.probability for p in model.predictions(path, on_bad=pytest.fail)] == of_texts.amax(1).tolist()


def test_texts_give_what_the_command_prints(texts, tmp_path, capsys):
    new = reviews(7, seed=5)
    path = write_rows(tmp_path / "new.jsonl", new)
    with pytest.raises(SystemExit):
        run(["predict", str(texts), str(path), "--json"])
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    model, inputs = load(texts), [row["text"] for row in new]
    assert [row["label"] for row in printed] == model.predict(inputs)
    assert [row["probability"] for row in printed] == model.predict_proba(inputs).amax(1).tolist()


def test_rows_with_pictures_give_what_the_same_rows_in_a_file_give(rows, monkeypatch):
    model, path = load(rows), rows.parent / "reviews.jsonl"
    new = [json.loads(line) for line in path.read_text().splitlines()]
    monkeypatch.chdir(path.parent)  # paths of pictures are relative to the working directory
    assert model.predict(new) == model.predict(path)
    assert torch.equal(model.embed(new), model.embed(path))
    without = [{**row, "photo": None} for row in new]
    assert len(model.predict(without)) == 20
    assert not torch.equal(model.embed(without), model.embed(path))


def test_documents_are_cut_and_windowed_as_in_training(documents):
    model, data = load(documents), documents.parent / "data"
    files = sorted(data.rglob("*.txt"))
    wanted = model.embed(data)
    torch.testing.assert_close(model.embed([file.read_text() for file in files]), wanted, rtol=0, atol=0)
    assert torch.equal(model.embed(files), wanted)
    assert model.predict(files[0]) == model.predict(files)[0]
    longer = files[0].read_text() + " More words that are cut off."
    torch.testing.assert_close(model.embed(longer), wanted[0])


def test_one_input_gives_one_result(texts, rows):
    model, text = load(texts), "It was lovely."
    assert model.predict(text) == model.predict([text])[0]
    assert model.predict({"text": text}) == model.predict(text)
    assert torch.equal(model.predict_proba(text), model.predict_proba([text])[0])
    assert torch.equal(model.embed(text), model.embed([text])[0])
    assert isinstance(load(rows).predict({"title": "a", "text": text, "stars": 3, "photo": None}), str)


def test_no_inputs_give_empty_results(texts, numbers, seq2seq, language_model):
    model = load(texts)
    assert model.predict([]) == []
    assert model.predict_proba([]).shape == (0, 2)
    assert model.embed([]).shape == (0, 8)
    assert load(numbers).predict([]) == load(seq2seq).predict([]) == load(language_model).generate([]) == []


def test_any_iterable_of_texts(texts):
    model, new = load(texts), [row["text"] for row in reviews(5)]
    assert model.predict(tuple(new)) == model.predict(text for text in new) == model.predict(new)


def test_probabilities_sum_to_one_and_agree_with_predictions(texts):
    model, new = load(texts), [row["text"] for row in reviews(9)]
    probabilities = model.predict_proba(new)
    assert probabilities.shape == (9, 2)
    assert probabilities.dtype == torch.float32
    torch.testing.assert_close(probabilities.sum(1), torch.ones(9))
    assert [model.classes[i] for i in probabilities.argmax(1)] == model.predict(new)


def test_the_head_maps_embeddings_to_logits(texts, numbers):
    new = [row["text"] for row in reviews(7)]
    model = load(texts)
    vectors = model.embed(new)
    assert vectors.shape == (7, 8)
    assert not vectors.requires_grad
    torch.testing.assert_close(model.model.head(vectors).softmax(-1), model.predict_proba(new))
    model = load(numbers)
    config = model.model.config
    wanted = model.model.head(model.embed(new))[:, 0] * config.scale + config.center
    torch.testing.assert_close(torch.tensor(model.predict(new)), wanted)


@pytest.mark.parametrize("size", [1, 3, 11])
def test_results_do_not_depend_on_the_batch(texts, rows, size):
    new = [row["text"] for row in reviews(11)]
    model = load(texts)
    order = torch.randperm(11).tolist()
    shuffled = model.embed([new[i] for i in order], batch_size=size)
    torch.testing.assert_close(shuffled, model.embed(new)[order])
    assert model.predict(new, batch_size=size) == model.predict(new)


def test_regression(numbers):
    model, new = load(numbers), [row["text"] for row in reviews(3)]
    predicted = model.predict(new)
    assert all(isinstance(number, float) for number in predicted)
    assert model.predict(new[1]) == pytest.approx(predicted[1], rel=1e-5)
    assert model.classes == ()
    with pytest.raises(
        InvalidInput, match=r"^predict_proba: expected a classifier, got a regression model, .*Use predict"
    ):
        model.predict_proba(new)


def test_answers_of_an_encoder_decoder(seq2seq):
    model = load(seq2seq)
    prompts = ["The light is red.", "The light is blue. Day 3."]
    answers = model.predict(prompts, max_new_tokens=5)
    assert len(answers) == 2
    assert all(isinstance(answer, str) for answer in answers)
    assert model.predict(prompts[1], max_new_tokens=5) == answers[1]
    assert model.predict([{"question": prompt} for prompt in prompts], batch_size=1, max_new_tokens=5) == answers
    assert len(model.predict(seq2seq.parent / "lights.csv", max_new_tokens=2)) == 16


def test_text_of_a_language_model(language_model):
    model = load(language_model.parent)
    options = {"max_new_tokens": 12, "seed": 3}
    text = model.generate("It was", **options)
    stream = model.stream("It was", **options)
    assert "".join(stream) == text
    assert stream.reason == "tokens"
    assert model.generate(["It was", "a dark"], **options) == [text, model.generate("a dark", **options)]
    sure = model.generate("It was", max_new_tokens=12, temperature=0)
    assert sure == model.generate("It was", max_new_tokens=12, top_k=1, seed=5)
    with pytest.raises(InvalidInput, match="prompt"):
        model.generate(3)


def test_defaults_of_generation_are_those_of_the_command(language_model):
    command = inspect.signature(generate_command).parameters
    model = load(language_model)
    for method in (model.generate, model.stream):
        own = inspect.signature(method).parameters
        for name in ("max_new_tokens", "temperature", "seed", "stop"):
            assert own[name].default == command[name].default
        for name in ("top_k", "top_p"):
            assert own[name].default == command[f"sample_{name}"].default


# Inputs that the model was not trained to read


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["good", ""], r"^inputs\[1\]: expected a text with at least one word, got an empty text"),
        ("  \n", "^input: expected a text with at least one word, got an empty text"),
        (["good", 3], r"^inputs\[1\]: expected a text, or a row with the column text, got a value of type int"),
        (["good", None], r"^inputs\[1\]: expected a text, .* got None"),
        ([b"good"], r"^inputs\[0\]: expected a text, .* got a value of type bytes"),
        (
            b"good",
            "^inputs: expected a text, or a row with the column text, or a list of them, got a value of type bytes",
        ),
        (7, "^inputs: expected a text, .* or a list of them, got a value of type int"),
        (None, "^inputs: expected a text, .* or a list of them, got None"),
        ([{"txt": "good"}], r"^inputs\[0\]: no column 'text'; expected a row with the columns text"),
        ({"text": ["a", "b"]}, "^input, column 'text': expected text, got a list"),
        ({"text": ""}, "^input: no values; expected at least one in 'text'"),
        ([Path("a.txt")], r"^inputs\[0\]: expected a text, or a row with the column text, got a path"),
        (Path("none.csv"), "^none.csv: no such file or folder"),
    ],
)
def test_inputs_that_are_no_texts(texts, inputs, message):
    for method in (load(texts).predict, load(texts).predict_proba, load(texts).embed):
        with pytest.raises(InvalidInput, match=message):
            method(inputs)


def test_a_model_of_several_columns_refuses_plain_texts(rows):
    model = load(rows)
    message = r"expected rows with the columns title, text, stars, photo, got a text"
    for inputs in ("good", ["good"]):
        with pytest.raises(InvalidInput, match=message):
            model.predict(inputs)
    with pytest.raises(
        InvalidInput, match=r"^inputs\[0\]: no column 'photo'; .* Pass None for a value that is missing"
    ):
        model.predict([{"title": "a", "text": "b", "stars": 3, "label": "pos"}])
    with pytest.raises(InvalidInput, match=r"^input, column 'stars': expected a finite number, got an empty cell"):
        model.predict({"title": "a", "text": "b", "stars": None, "photo": None})
    with pytest.raises(InvalidInput, match=r"^input, column 'stars': expected a .*number, got 'three'"):
        model.predict({"title": "a", "text": "b", "stars": "three", "photo": None})
    with pytest.raises(InvalidInput, match=r"^input, column 'photo' \(none.png\)"):
        model.predict({"title": "a", "text": "b", "stars": 3, "photo": "none.png"})


def test_a_model_of_documents_refuses_rows_and_folders_in_lists(documents, tmp_path):
    model = load(documents)
    with pytest.raises(InvalidInput, match=r"^input: expected a text or the path of a file, got a row"):
        model.predict({"text": "good"})
    with pytest.raises(InvalidInput, match=r"^inputs\[0\] \(.*\): a folder in a list; expected a file"):
        model.predict([tmp_path])
    with pytest.raises(InvalidInput, match=r"^inputs\[0\] \(none.txt\): no such file"):
        model.predict([Path("none.txt")])


def test_the_name_of_a_file_is_no_text(texts, tmp_path):
    path = write_rows(tmp_path / "new.csv", reviews(3))
    with pytest.raises(InvalidInput, match=r"^input: expected a text, got the name of a file. Pass pathlib.Path\("):
        load(texts).predict(str(path))
    assert len(load(texts).predict([str(path)])) == 1


def test_data_frames_are_named(texts):
    class Frame(list):
        columns = ("text",)

        def to_dict(self): ...

    with pytest.raises(
        InvalidInput, match=r"got a value of type Frame\. Pass a data frame as frame\.to_dict\('records'\)"
    ):
        load(texts).predict(Frame())


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "8"])
def test_wrong_batch_sizes(texts, size):
    with pytest.raises(InvalidInput, match=f"^batch_size: expected 1 or more, got {size!r}"):
        load(texts).predict(["good"], batch_size=size)


def test_methods_of_other_kinds_of_models(texts, seq2seq, language_model):
    model = load(language_model)
    kinds = "a classifier, a regression model or an encoder–decoder"
    with pytest.raises(
        InvalidInput, match=f"^predict: expected {kinds}, got a language model, .*Use generate or stream"
    ):
        model.predict(["good"])
    with pytest.raises(
        InvalidInput, match=r"^embed: expected a classifier or a regression model of hsa train, got a language model"
    ):
        model.embed(["good"])
    with pytest.raises(
        InvalidInput, match=r"^predict_proba: expected a classifier, got an encoder–decoder, .* Use predict$"
    ):
        load(seq2seq).predict_proba(["good"])
    for method in ("generate", "stream"):
        with pytest.raises(InvalidInput, match=r"^generate: expected a language model, got a classifier, .* or embed$"):
            getattr(load(texts), method)("good")


# Folders


def test_a_run_stands_for_its_first_model(texts):
    assert load(texts).folder == texts / "hierarchical"
    assert load(str(texts / "flat")).folder == texts / "flat"
    assert repr(load(texts)) == f"LoadedClassifier({str(texts / 'hierarchical')!r})"


def test_device(texts):
    model = load(texts, "meta")
    assert model.device.type == "meta"
    assert load(texts, torch.device("cpu")).to("meta").device.type == "meta"


def test_a_model_without_names_of_classes(texts, tmp_path):
    copy = shutil.copytree(texts / "flat", tmp_path / "copy")
    about = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**about, "classes": []}))
    reseal(copy)
    assert load(copy).classes == ("0", "1")
