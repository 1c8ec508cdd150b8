"""`hsa.load` on classifiers of transformers: fine-tuned, converted, and folders that hold something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hsa.errors import InvalidInput
from hsa.huggingface import convert, settings_of
from hsa.huggingface.loading import save_model
from hsa.huggingface.text_input import TextInput
from hsa.signals import load_rows
from hsa.training.load import load
from hsa.training.text_classifier import LoadedTextClassifier
from tests.huggingface.fidelity.small import LONGEST, classifier, language_model, rows, save, tokenizer
from tests.tables import write_rows

NAMES = {"id2label": {0: "neg", 1: "pos"}, "label2id": {"neg": 0, "pos": 1}}
TEXTS = [row["text"] for row in rows(9)]


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    return save(tmp_path_factory.mktemp("exact"), classifier(**NAMES))


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    model = convert(classifier(**NAMES), kind="multiscale", branching=(4, 2), top_k=0)
    TextInput(("review",), "stars", max_tokens=33).save_in(model)
    return save(tmp_path_factory.mktemp("converted"), model)


def wanted(model, texts, longest=LONGEST):
    """Return the probabilities of one text at a time, by transformers alone."""
    with torch.no_grad():
        read = [tokenizer()(text, truncation=True, max_length=longest, return_tensors="pt") for text in texts]
        return torch.cat([model(**inputs).logits for inputs in read]).softmax(-1)


def test_probabilities_are_those_of_transformers(exact):
    model = load(exact)
    assert isinstance(model, LoadedTextClassifier)
    assert model.classes == ("neg", "pos")
    actual = model.predict_proba(TEXTS, batch_size=4)
    torch.testing.assert_close(actual, wanted(classifier(**NAMES), TEXTS))
    assert model.predict(TEXTS) == [model.classes[i] for i in actual.argmax(1)]
    torch.testing.assert_close(model.predict_proba(TEXTS[3]), actual[3])
    assert model.predict(TEXTS[3]) == model.predict({"text": TEXTS[3]}) == model.predict(TEXTS)[3]
    assert model.predict([]) == []
    (first, *_) = model.predictions(TEXTS, on_bad=pytest.fail)
    assert first.probabilities == pytest.approx(dict(zip(model.classes, actual[0].tolist(), strict=True)))
    assert first.probability == max(first.probabilities.values())
    assert first.runner_up != first.label


def test_a_converted_model_attends_over_its_trees_and_knows_its_columns(converted, tmp_path):
    model = load(converted)
    assert set(settings_of(model.model)) == {0, 1}
    assert model.input == TextInput(("review",), "stars", max_tokens=33)
    own = convert(classifier(**NAMES), kind="multiscale", branching=(4, 2), top_k=0)
    actual = model.predict_proba(TEXTS)
    torch.testing.assert_close(actual, wanted(own, TEXTS, 33))
    assert not torch.allclose(actual, wanted(classifier(**NAMES), TEXTS, 33), atol=1e-6)
    path = write_rows(tmp_path / "new.csv", [{"id": i, "review": text} for i, text in enumerate(TEXTS)])
    for inputs in (path, load_rows(path), [{"review": text} for text in TEXTS]):
        torch.testing.assert_close(model.predict_proba(inputs), actual)
    assert [p.where for p in model.predictions(path, on_bad=pytest.fail)][1] == f"{path}: row 2 (line 3)"


def test_pairs_and_joined_columns(exact):
    model = load(exact)
    pair = {"premise": TEXTS[0], "hypothesis": TEXTS[1]}
    model.input = TextInput(("premise", "hypothesis"))
    both = model.tokenizer(TEXTS[0], TEXTS[1], truncation=True, max_length=LONGEST, return_tensors="pt")
    with torch.no_grad():
        of_transformers = model.model(**both).logits.softmax(-1)[0]
    torch.testing.assert_close(model.predict_proba(pair), of_transformers)
    with pytest.raises(InvalidInput, match=r"^input: expected rows with the columns premise, hypothesis, got a text$"):
        model.predict("a text")
    model.input = TextInput(("premise", "hypothesis"), join=True)
    torch.testing.assert_close(model.predict_proba(pair), model.predict_proba(f"{TEXTS[0]} {TEXTS[1]}"))


def test_labelled_rows_are_scored(exact, tmp_path):
    names = ("neg", "pos")
    data = [{"text": text, "label": names[i % 2]} for i, text in enumerate(TEXTS)]
    path = write_rows(tmp_path / "test.csv", data)
    model = load(exact)
    test = model.data_set(path, pytest.fail)
    assert (len(test), test.split) == (9, None)
    predicted = model.predict(TEXTS)
    evaluation = model.evaluate(test)
    assert evaluation.scores.accuracy == sum(names[i % 2] == p for i, p in enumerate(predicted)) / 9
    assert evaluation.predicted.tolist() == [names.index(p) for p in predicted]
    numbered = write_rows(tmp_path / "numbers.csv", [{**row, "label": i % 2} for i, row in enumerate(data)])
    assert model.evaluate(model.data_set(numbered, pytest.fail)).scores == evaluation.scores


def test_splits(exact, tmp_path):
    data = [{"text": text, "label": "pos", "split": "test" if i < 4 else "train"} for i, text in enumerate(TEXTS)]
    path = write_rows(tmp_path / "all.jsonl", data)
    model = load(exact)
    assert [(len(test), test.split) for s in (None, "train") if (test := model.data_set(path, pytest.fail, s))] == [
        (4, "test"),
        (5, "train"),
    ]
    assert len(model.predict(path)) == 9


def test_operations_of_converted_layers_are_counted(exact, converted):
    for folder, counted in ((exact, False), (converted, True)):
        model = load(folder)
        model.input = TextInput()
        path = write_rows(folder / "test.csv", rows(3))
        assert (model.evaluate(model.data_set(path, pytest.fail)).operations > 0) == counted


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("  ", "^input: expected a text with at least one word, got an empty text$"),
        (
            ["good", None],
            r"^inputs\[1\]: expected a text, or a row with the column review, got a value of type NoneType",
        ),
        ([{"txt": "good"}], r"^inputs\[0\]: no column 'review'; expected a row with the columns review"),
        ([{"review": ""}], r"^inputs\[0\], column 'review': expected a text with at least one word, got an empty text"),
        ([{"review": 3}], r"^inputs\[0\], column 'review': expected a text with at least one word, got 3"),
        (Path("none.csv"), "^none.csv: no such file"),
        (7, "^inputs: expected a text, .* or a list of them, got a value of type int"),
    ],
)
def test_inputs_that_are_no_texts(converted, inputs, message):
    with pytest.raises(InvalidInput, match=message):
        load(converted).predict(inputs)


def test_bad_rows(converted, tmp_path):
    data = [{"review": "a good film", "stars": "pos"}, {"review": " ", "stars": "pos"}, {"review": "a", "stars": "no"}]
    path, model, bad = write_rows(tmp_path / "bad.csv", data), load(converted), []
    assert len(list(model.predictions(path, on_bad=bad.append))) == 2
    assert [error.where for error in bad] == [f"{path}: row 2 (line 3), column 'review'"]
    bad.clear()
    assert len(model.data_set(path, bad.append)) == 1
    assert str(bad[1]) == f"{path}: row 3 (line 4): label: expected one of the model's classes: 'neg', 'pos', got 'no'"
    other = write_rows(tmp_path / "other.csv", [{"reviews": "a", "stars": "pos"}])
    with pytest.raises(InvalidInput, match=r"no column 'review'; expected one of 'reviews', 'stars'. Did you mean"):
        model.predict(other)


def test_columns_with_unusual_names_are_asked_for(exact, tmp_path):
    path = write_rows(tmp_path / "a.csv", [{"body": "good"}])
    with pytest.raises(InvalidInput, match=r"no text column among .'body'.; .* Pass --text COLUMN"):
        load(exact).predict(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            language_model,
            r"got a transformers model \(LlamaForCausalLM\)\. Train a classifier from it with hsa finetune",
        ),
        (lambda: classifier().bert, r"got a transformers model \(BertModel\)"),
        (lambda: classifier(num_labels=1), "got a head with a single output"),
        (lambda: classifier(problem_type="multi_label_classification"), "got a model of several labels per text"),
    ],
)
def test_models_that_are_no_classifiers(tmp_path, make, message):
    save_model(tmp_path, make(), tokenizer())
    with pytest.raises(InvalidInput, match=message):
        load(tmp_path)


def test_a_damaged_record_of_columns(exact, tmp_path):
    save(tmp_path, classifier())
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**about, "hsa_input": {"text": 3}}))
    with pytest.raises(InvalidInput, match=r"hsa_input: text: expected a list, got 3"):
        load(tmp_path)
    with pytest.raises(InvalidInput, match=r"^embed: expected a classifier or a regression model of hsa train, got a"):
        load(exact).embed("good")
