"""`hsa predict` and `hsa evaluate` on texts, tables and files, with models of hsa and of transformers."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from hsa.cli.by_class import ByClass
from hsa.models.options import ModelOptions
from hsa.models.saved import save_seq2seq
from hsa.models.seq2seq import Seq2Seq
from hsa.signals import load_rows
from hsa.training.accelerator import make_accelerator
from hsa.training.data.prepare import prepare, save_input_spec
from hsa.training.experiment import train_models
from hsa.training.load import load
from hsa.training.options import DataOptions, LanguageOptions, Seq2SeqOptions, TrainingOptions
from hsa.training.seq2seq.data import prepare_pairs
from hsa.training.seq2seq.inference import LoadedSeq2Seq
from hsa.training.seq2seq.loop import seq2seq_config
from tests.huggingface.fidelity.small import classifier, save
from tests.tables import reviews, write_rows

TEXT = "the film was lovely. We saw it."
SMALL = ("--cpu", "--width", "8", "--heads", "2", "--epochs", "1", "--vocabulary", "300", "--models", "deepsets")
OPTIONS = TrainingOptions(epochs=1, batch_size=8, learning_rate=1e-2)


def train(folder: Path, **options) -> Path:
    """Train a model of reviews and return its folder."""
    data = write_rows(folder / "reviews.csv", reviews())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HSA_CACHE", str(folder / "cache"))
        prepared = prepare(data, DataOptions(vocabulary=300, **options))
    model = ModelOptions(width=8, heads=2, position_width=8)
    train_models(["hierarchical"], model, prepared, OPTIONS, folder / "run", make_accelerator(OPTIONS, cpu=True))
    return folder / "run"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return train(tmp_path_factory.mktemp("texts"), text=("text",), label="label")


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    return train(tmp_path_factory.mktemp("numbers"), text=("title", "text"), label="stars", task="regression")


@pytest.fixture(scope="module")
def transformer(tmp_path_factory):
    names = {"id2label": {0: "neg", 1: "pos"}, "label2id": {"neg": 0, "pos": 1}}
    return save(tmp_path_factory.mktemp("transformer"), classifier(**names))


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HSA_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def data():
    return write_rows(Path("new.csv"), reviews(6, seed=4))


@pytest.fixture
def pipe(call, monkeypatch):
    """Run a command with these bytes as stdin."""

    def run_it(content, *arguments):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        return call(*arguments)

    return run_it


# Texts


@pytest.mark.parametrize("name", ["texts", "transformer"])
def test_a_text_is_an_argument_a_file_or_stdin(call, pipe, request, name):
    model = request.getfixturevalue(name)
    loaded = load(model)
    by_class = dict(zip(loaded.classes, loaded.predict_proba(TEXT).tolist(), strict=True))
    wanted = "".join(f"{c}  {p:.2f}\n" for c, p in sorted(by_class.items(), key=lambda entry: -entry[1]))
    assert call("predict", model, TEXT) == (0, wanted, "")
    Path("a b.txt").write_text(TEXT)
    assert call("predict", model, "a b.txt") == (0, wanted, "")
    assert pipe(TEXT.encode(), "predict", model, "-") == (0, wanted, "")
    code, out, _ = pipe(TEXT.encode("utf-16"), "predict", model, "-", "--encoding", "utf-16", "--json")
    assert code == 0
    actual = json.loads(out)
    assert (actual["where"], actual["label"]) == ("<stdin>", loaded.predict(TEXT))
    assert actual["probabilities"] == pytest.approx(by_class)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "word",
            "word: no such file or folder; expected a file, a text of several words in quotes, or - for a text from",
        ),
        ("new reviews.csv", "new reviews.csv: no such file or folder"),
        ("my notes.txt", "my notes.txt: no such file or folder"),
        ("", "data: empty; expected a file, a text of several words"),
        ("empty.txt", "empty.txt: expected a text with at least one word, got an empty text"),
        ("empty.csv", "empty.csv: expected rows, got an empty file"),
        ("header.csv", "header.csv: no rows; expected at least one"),
        ("notes.md", "notes.md: expected a file of rows, which the model was trained on: one of .csv, "),
    ],
)
@pytest.mark.parametrize("name", ["texts", "transformer"])
def test_arguments_that_are_no_data(fails, request, name, argument, message):
    for file, content in (("empty.txt", " "), ("empty.csv", ""), ("header.csv", "text,label\n"), ("notes.md", "# a")):
        Path(file).write_text(content)
    assert fails("predict", request.getfixturevalue(name), argument).startswith(message)


def test_a_text_for_a_model_of_several_columns(fails, numbers):
    Path("a.txt").write_text("good")
    for argument, where in (("a good film", "input"), ("a.txt", "a.txt")):
        message = f"{where}: expected rows with the columns title, text, got a text"
        assert fails("predict", numbers, argument) == message


def test_columns_belong_to_classifiers_of_transformers(call, fails, texts, transformer, data):
    body = write_rows(Path("body.csv"), [{"body": row["text"]} for row in reviews(6, seed=4)])
    assert "no text column among ['body']" in fails("predict", transformer, body)
    assert "no column 'bod'; expected one of 'body'" in fails("predict", transformer, body, "--text", "bod")
    wanted = [p.label for p in load(transformer).predictions(data, on_bad=pytest.fail)]
    code, out, _ = call("predict", transformer, body, "--text", "body", "--json")
    assert (code, [json.loads(line)["label"] for line in out.splitlines()]) == (0, wanted)
    message = "text: expected no value for a model of hsa train, got text. Leave it out"
    assert fails("predict", texts, data, "--text", "text") == message


# Tables


def test_rows_are_printed_with_what_the_model_reads(call, texts, numbers, data):
    code, out, err = call("predict", texts, data, columns=60)
    assert (code, err) == (0, "")
    header, *lines = out.splitlines()
    assert header.split() == ["row", "predicted", "probability", "text"]
    assert [line.split()[0] for line in lines] == list("123456")
    predictions = list(load(texts).predictions(data, on_bad=pytest.fail))
    for line, prediction, row in zip(lines, predictions, reviews(6, seed=4), strict=True):
        assert line.split()[1:3] == [prediction.label, f"{prediction.probability:.2f}"]
        excerpt = line.split(maxsplit=3)[3]
        assert row["text"].startswith(excerpt.rstrip("…"))
        assert len(line) <= 60
    header, first, *_ = call("predict", numbers, data)[1].splitlines()
    assert header.split() == ["row", "predicted", "title,", "text"]
    assert float(first.split()[1]) == pytest.approx(load(numbers).predict(data)[0], rel=1e-4)
    assert first.endswith(f"{reviews(6, seed=4)[0]['title']} · {reviews(6, seed=4)[0]['text']}")


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_files_of_predictions_have_the_columns_of_the_data(call, texts, data, suffix):
    code, out, err = call("predict", texts, data, "--out", f"deep/p.{suffix}")
    predictions = list(load(texts).predictions(data, on_bad=pytest.fail))
    labels = [p.label for p in predictions]
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"6 predictions in deep/p.{suffix}"
    assert f"{labels[0]}: {labels.count(labels[0])}" in out.splitlines()
    rows = load_rows(f"deep/p.{suffix}")
    assert rows.columns == ("text", "title", "stars", "label", "predicted", "probability_neg", "probability_pos")
    original = load_rows(data)
    for i, prediction in enumerate(predictions):
        row = rows.row(i)
        assert {name: row[name] for name in original.columns} == original.row(i)
        assert row["predicted"] == prediction.label
        assert float(row["probability_neg"]) == prediction.probabilities["neg"]


def test_files_of_other_predictions(call, texts, numbers, data):
    call("predict", numbers, data, "--out", "numbers.jsonl")
    rows = [json.loads(line) for line in Path("numbers.jsonl").read_text().splitlines()]
    assert list(rows[0]) == ["text", "title", "stars", "label", "predicted"]
    assert [row["predicted"] for row in rows] == load(numbers).predict(data)
    code, out, _ = call("predict", texts, TEXT, "--out", "one.csv")
    assert (code, out.splitlines()[0]) == (0, "1 prediction in one.csv")
    with Path("one.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["text"], row["predicted"]) == (TEXT, load(texts).predict(TEXT))


def test_rows_with_lists_and_bytes(call, texts):
    table = [{"text": "good", "tags": ["a", "b"], "photo": b"x"}, {"text": "bad", "tags": [], "photo": None}]
    path = write_rows(Path("a.parquet"), table)
    for out in ("p.csv", "p.jsonl"):
        code, _, err = call("predict", texts, path, "--out", out)
        assert (code, err) == (0, "left out, because they hold bytes: photo\n")
    with Path("p.csv").open(newline="") as file:
        assert json.loads(next(csv.DictReader(file))["tags"]) == ["a", "b"]
    assert json.loads(Path("p.jsonl").read_text().splitlines()[0])["tags"] == ["a", "b"]


def test_bad_rows_are_left_out_of_files(call, fails, texts):
    path = write_rows(Path("a.csv"), [{"text": text} for text in ("good", "", "bad")])
    assert "Pass --skip-bad" in fails("predict", texts, path, "--out", "p.csv")
    assert not Path("p.csv").exists()
    code, _, err = call("predict", texts, path, "--out", "p.csv", "--skip-bad")
    assert (code, err.startswith("1 skipped, the first: a.csv: row 2 (line 3)")) == (0, True)
    assert load_rows("p.csv").column("text") == ["good", "bad"]
    Path("none.csv").write_text('text\n" "\n')
    assert "no predictions to write" in fails("predict", texts, "none.csv", "--out", "q.csv", "--skip-bad")


def test_files_that_are_not_written(fails, texts, data):
    Path("p.csv").write_text("mine")
    assert fails("predict", texts, data, "--out", "p.csv") == (
        "p.csv: expected a new file, got a file that exists. Delete it, or pass another --out"
    )
    assert Path("p.csv").read_text() == "mine"
    assert fails("predict", texts, data, "--out", "p.xlsx").startswith(
        "out: expected a file that ends in .csv or .jsonl"
    )
    assert fails("predict", texts, data, "--out", "q.csv", "--json").startswith("json: expected one of them")
    taken = write_rows(Path("taken.csv"), [{"text": "good", "predicted": "x"}])
    assert fails("predict", texts, taken, "--out", "q.csv").startswith(
        "taken.csv: expected another name, got the column"
    )
    assert not Path("q.csv").exists()


def test_files_of_a_model_of_folders(call):
    for i, row in enumerate(reviews(20)):
        path = Path("films", row["label"], f"{i}.txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(row["text"])
    assert call("train", "films", *SMALL, "--out", "run")[0] == 0
    code, out, _ = call("predict", "run", "films/pos")
    assert (code, out.splitlines()[0].split()) == (0, ["file", "predicted", "probability"])
    assert out.splitlines()[1].split()[0] == "0.txt"
    assert call("predict", "run", "a good film")[0] == 0
    call("predict", "run", "films", "--out", "p.csv")
    rows = load_rows("p.csv")
    assert (len(rows), rows.columns[:2], rows.row(0)["file"]) == (20, ("file", "predicted"), "films/neg/1.txt")


def test_answers(call, monkeypatch):
    monkeypatch.setitem(LoadedSeq2Seq.predictions.__kwdefaults__, "max_new_tokens", 4)
    table = [{"question": f"The light is red. {i}", "answer": "Stop."} for i in range(9)]
    options = DataOptions(text=("question",), label="answer", task="seq2seq", vocabulary=300)
    prepared = prepare_pairs(write_rows(Path("lights.csv"), table), options)
    sizes = ModelOptions(width=8, heads=2, position_width=8)
    model = Seq2Seq(
        seq2seq_config(prepared, "hierarchical", sizes, LanguageOptions(branching=(2, 2)), Seq2SeqOptions())
    )
    save_seq2seq("model", model)
    save_input_spec(Path("model"), prepared.input_spec)
    data = write_rows(Path("new.csv"), table[:2])
    answers = load("model").predict(data, max_new_tokens=4)
    code, out, _ = call("predict", "model", data, "--json")
    assert (code, [json.loads(line)["label"] for line in out.splitlines()]) == (0, answers)
    assert call("predict", "model", data)[1].splitlines()[0].split() == ["row", "predicted"]
    call("predict", "model", data, "--out", "answers.jsonl")
    assert load_rows("answers.jsonl").column("predicted") == answers


def test_formats_of_data_that_are_no_tables_are_refused(fails):
    for own in (("--example", "python"), ("--task", "lm"), ("--task", "seq2seq")):
        line = fails("train", "--quick", *own, "--delimiter", ";", "--out", "run")
        assert line.startswith("delimiter: expected no value, got ';' for")
    Path("films/pos").mkdir(parents=True)
    Path("films/pos/a.txt").write_text("good")
    assert fails("train", "films", "--encoding", "cp1252", "--out", "run") == (
        "encoding: expected no value, got 'cp1252' for a folder. Leave it out"
    )


# Delimiters and encodings


def test_semicolons_and_other_encodings_from_training_to_evaluation(call, fails):
    lines = ["text;label", *(f"{row['text']} é, ü;{row['label']}" for row in reviews())]
    Path("a.csv").write_text("\n".join(lines), encoding="cp1252")
    columns = ("--text", "text", "--label", "label")
    message = "a.csv: line 2: expected text in utf-8, got the byte 0xe9 at offset"
    assert fails("train", "a.csv", *columns, *SMALL).startswith(message)
    code, out, err = call("train", "a.csv", *columns, *SMALL, "--encoding", "cp1252", "--out", "run")
    assert (code, err) == (0, "")
    assert out.rstrip().endswith("next: hsa predict run/deepsets a.csv --encoding cp1252")
    for command in ("predict", "evaluate"):
        line = fails(command, "run", "a.csv")
        assert line.startswith(message)
        assert line.endswith("Pass its encoding, such as --encoding cp1252")
        assert call(command, "run", "a.csv", "--encoding", "cp1252")[0] == 0
        unfit = fails(command, "run", "a.csv", "--encoding", "cp1252", "--delimiter", "|")
        assert "no column 'text'; expected one of 'text;label'" in unfit
    Path("bar.csv").write_text("text|x\n" + "a film | it was\n" * 2)
    assert call("predict", "run", "bar.csv", "--delimiter", "|")[0] == 0


# Scores by class


def test_evaluation_prints_scores_of_classes_and_the_confusion_matrix(call, texts, data):
    code, out, err = call("evaluate", texts, data)
    assert (code, err) == (0, "")
    _, by_class, matrix = out.rstrip().split("\n\n")
    header, _, *lines = by_class.splitlines()
    assert header.split() == ["class", "precision", "recall", "F1", "support"]
    header, _, *counts = matrix.splitlines()
    assert header.split() == ["true", "\\", "predicted", "neg", "pos"]
    table = np.array([[int(x) for x in line.split()[1:]] for line in counts])
    loaded = load(texts)
    predicted, true = loaded.predict(data), load_rows(data).column("label")
    for i, name in enumerate(loaded.classes):
        own = [p for p, t in zip(predicted, true, strict=True) if t == name]
        right = own.count(name)
        assert table[i].tolist() == [own.count(other) for other in loaded.classes]
        precision, recall = right / max(predicted.count(name), 1), right / len(own)
        assert lines[i].split()[:3] == [name, f"{precision:.3f}", f"{recall:.3f}"]
        assert lines[i].split()[4] == str(len(own))
    facts = json.loads(call("evaluate", texts, data, "--json")[1])
    assert facts["confusion"] == table.tolist()
    assert set(facts["classes"]["neg"]) == {"precision", "recall", "f1", "support"}
    assert facts["f1"] == pytest.approx(np.mean([facts["classes"][name]["f1"] for name in loaded.classes]))


def test_numbers_have_no_classes(call, numbers, data):
    out = call("evaluate", numbers, data)[1]
    assert "precision" not in out
    assert "confusion" not in json.loads(call("evaluate", numbers, data, "--json")[1])


def test_many_classes_are_shown_by_their_confusions(capsys):
    from rich.console import Console

    classes = tuple(f"class {i}" for i in range(60))
    true = np.repeat(np.arange(60), 5)
    predicted = true.copy()
    predicted[:4] = 7  # four of the first class
    scores = ByClass.of(predicted, true, classes)
    scores.print(Console(width=80))
    by_class, confusions = capsys.readouterr().out.strip().split("\n\n")
    assert "--json also lists the other 10" in " ".join(by_class.split())
    assert sum(line.startswith("class ") for line in by_class.splitlines()) == 1 + 50
    assert confusions.splitlines()[2].split("  ")[:1] == ["class 0"]
    assert confusions.splitlines()[2].split()[2:] == ["class", "7", "4", "80%"]
    assert len(confusions.splitlines()) == 4
    assert scores.to_dict()["classes"]["class 7"]["precision"] == 5 / 9
    ByClass.of(true, true, classes).print(Console(width=80))  # no confusions
    assert "true class" not in capsys.readouterr().out


def test_evaluation_of_transformers(call, fails, transformer, texts, data):
    facts = json.loads(call("evaluate", transformer, data, "--json")[1])
    predicted, true = load(transformer).predict(data), load_rows(data).column("label")
    assert facts["accuracy"] == sum(p == t for p, t in zip(predicted, true, strict=True)) / 6
    assert (facts["examples"], "attention_operations" in facts) == (6, False)
    table = [
        {"body": row["text"], "kind": row["label"], "split": ("train", "test")[i > 3]}
        for i, row in enumerate(reviews(6))
    ]
    path = write_rows(Path("body.csv"), table)
    columns = ("--text", "body", "--label", "kind")
    facts = json.loads(call("evaluate", transformer, path, *columns, "--json")[1])
    assert (facts["split"], facts["examples"]) == ("test", 2)
    code, out, _ = call("evaluate", transformer, path, *columns, "--split", "train")
    assert (code, [line.split() for line in out.splitlines()[:2]]) == (0, [["split", "train"], ["examples", "4"]])
    assert fails("evaluate", transformer, data, "--context", "8").startswith(
        "context: expected no value for a classifier"
    )
    unnamed = fails("evaluate", transformer, path, "--text", "body")
    assert (
        unnamed
        == "body.csv: no column 'label'; expected labels in one of 'body', 'kind', 'split'. Name it with --label"
    )
    memory = fails("evaluate", transformer, data, "--test-memory", "0")
    assert memory == "test_memory: expected no value for a classifier of transformers, got 0. Leave it out"
    assert fails("evaluate", texts, data, "--label", "label").startswith("label: expected no value for a classifier")
    assert "no column 'split'" in fails("evaluate", transformer, data, "--split", "train")


def test_fine_tuned_and_converted_models_know_their_columns(call, fails, monkeypatch):
    """Fine-tune, convert, and predict without naming columns again."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    save(Path("base"), classifier())
    table = [{"body": f"{row['text']} été", "kind": row["label"]} for row in reviews(8)]
    path = Path("data.csv")
    path.write_text("body~kind\n" + "".join(f"{row['body']}~{row['kind']}\n" for row in table), encoding="cp1252")
    options = ("--text", "body", "--label", "kind", "--delimiter", "~", "--encoding", "cp1252", "--cpu")
    assert "--encoding cp1252" in fails("finetune", "base", path, "--out", "tuned")
    code, _, err = call("finetune", "base", path, *options, "--out", "tuned", "--epochs", "1", "--max-tokens", "9")
    assert (code, err) == (0, "")
    assert "--encoding cp1252" in fails("convert", "tuned", path, "--out", "converted")
    code, _, err = call("convert", "tuned", path, *options, "--out", "converted", "--lengths", "11")
    assert (code, err) == (0, "")
    table_format = options[4:-1]
    for model in ("tuned", "converted", "converted/model"):
        assert load(model).input.max_tokens == 9
        code, out, _ = call("predict", model, path, *table_format, "--json")
        texts = [row["body"] for row in table]
        assert (code, [json.loads(line)["label"] for line in out.splitlines()]) == (0, load(model).predict(texts))
        assert json.loads(call("evaluate", model, path, *table_format, "--json")[1])["examples"] == 8
