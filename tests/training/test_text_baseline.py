"""Logistic regression on words: the same rows as the models, and rows of every kind of source."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from hsa.errors import MissingExtra
from hsa.training import text_baseline
from hsa.training.data.prepare import prepare, read_texts
from hsa.training.options import DataOptions
from hsa.training.text_baseline import has_texts, train_on_words
from tests.comparisons import prepared as tiny
from tests.tables import mixed_folder, reviews, write_rows

ROWS = DataOptions(text=("text",), label="label", vocabulary=300)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HSA_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def rows(tmp_path):
    return write_rows(tmp_path / "reviews.csv", reviews())


def test_words_tell_the_classes(rows):
    prepared = prepare(rows, ROWS)
    actual = train_on_words(rows, ROWS, prepared, small=False)
    assert actual.scores.accuracy == 1  # there are four test examples, and a word for each class
    assert actual.training_seconds > 0
    words = actual.parameters - 1  # the other parameter is the bias
    assert 20 < words < 200


def check_same_rows(prepared, texts, labels):
    """Check that the text of every example has its label."""
    for part in (prepared.train, prepared.validation, prepared.test):
        for name, target in zip(part.names, part.targets.tolist(), strict=True):
            assert labels[texts[name]] == part.classes[target]


def test_the_rows_are_those_of_the_models(rows, monkeypatch):
    """Class and text come from the same row, also with several columns, and from the cache under another path."""
    options = replace(ROWS, text=("title", "text"))
    prepare(rows, options)
    monkeypatch.chdir(rows.parent)
    data = rows.relative_to(rows.parent)
    prepared, texts = prepare(data, options), read_texts(data, options, small=False)
    parts = (prepared.train, prepared.validation, prepared.test)
    assert sorted(name for part in parts for name in part.names) == sorted(texts)
    check_same_rows(prepared, texts, {f"{row['title']}\n{row['text']}": row["label"] for row in reviews()})


def test_rows_that_are_skipped_and_files_of_each_split(tmp_path):
    bad, others = reviews(), reviews(8, seed=1)
    bad[3]["label"] = ""
    rows, test = write_rows(tmp_path / "a.csv", bad), write_rows(tmp_path / "b.jsonl", others)
    options = replace(ROWS, test=test, skip_bad=True)
    prepared = prepare(rows, options)
    assert (len(prepared.skipped), len(prepared.test)) == (1, 8)
    texts = read_texts(rows, options, small=False)
    check_same_rows(prepared, texts, {row["text"]: row["label"] for row in bad + others})
    assert train_on_words(rows, options, prepared, small=False).scores.accuracy > 0.5


def test_files_in_folders(tmp_path):
    """Images, which have no text, count as empty texts."""
    folder = mixed_folder(tmp_path / "films")
    options = DataOptions(vocabulary=300)
    prepared = prepare(folder, options)
    texts = read_texts(folder, options, small=False)
    assert texts[str(folder / "pos/0.html")].split() == ["good", "The", "film", "was", "good."]
    assert texts[str(folder / "pos/deeper/0.png")] == ""
    assert train_on_words(folder, options, prepared, small=False).scores.accuracy > 0.5


def test_n24news(tmp_path):
    (tmp_path / "news").mkdir()
    for split, count in (("train", 12), ("dev", 2), ("test", 4)):
        articles = [
            {
                "section": word,
                "headline": f"The {word}",
                "abstract": "",
                "caption": "",
                "article": "It was.",
                "image_id": i,
            }
            for i in range(count // 2)
            for word in ("Travel", "Sports")
        ]
        (tmp_path / f"news/nytimes_{split}.json").write_text(json.dumps(articles))
    (tmp_path / "imgs").mkdir()
    options = DataOptions(vocabulary=300, skip_bad=True)
    prepared = prepare(tmp_path, options)
    assert train_on_words(tmp_path, options, prepared, small=False).scores.accuracy == 1


@pytest.mark.slow
def test_the_standard_library():
    """Names are unique even where a file defines a name twice."""
    options = DataOptions(vocabulary=300, max_tokens=16)
    prepared = prepare(None, options, small=True)
    texts = read_texts(None, options, small=True)
    names = [name for part in (prepared.train, prepared.validation, prepared.test) for name in part.names]
    assert (len(set(names)), sorted(names)) == (len(names), sorted(texts))
    for name in names[:50]:
        word = name.rpartition(": ")[2].split(" ")[0]
        assert f"def {word}" in texts[name] or f"class {word}" in texts[name]


def test_a_name_that_a_file_defines_twice(tmp_path):
    from hsa.training.data.sources import _definitions

    body = "    return " + "x" * 80
    (tmp_path / "a.py").write_text(f"def f():\n{body}\n\ndef f():\n{body}\n\ndef g(): ...\n")
    assert [name for name, _ in _definitions(tmp_path / "a.py")] == ["f", "f (2)"]


def test_texts_of_signs_and_texts_without_spaces(tmp_path):
    """Words are no condition: signs count, and Chinese text is read character by character."""
    for number, (good, bad) in enumerate((("!!", "??"), ("这部电影很好", "这部电影很坏"))):
        rows = [{"text": (good, bad)[i % 2], "label": ("pos", "neg")[i % 2]} for i in range(40)]
        data = write_rows(tmp_path / f"{number}.csv", rows)
        assert train_on_words(data, ROWS, prepare(data, ROWS), small=False).scores.accuracy == 1


def test_many_classes_and_long_texts_get_fewer_words(rows, monkeypatch):
    prepared = prepare(rows, ROWS)
    whole = train_on_words(rows, ROWS, prepared, small=False).parameters
    monkeypatch.setattr(text_baseline, "_PAIRS_UP_TO", 10)
    alone = train_on_words(rows, ROWS, prepared, small=False).parameters
    monkeypatch.setattr(text_baseline, "_PARAMETERS", 10)
    assert train_on_words(rows, ROWS, prepared, small=False).parameters == 10 // 2 + 1
    assert 6 < alone < whole


def test_data_without_texts(rows):
    numbers = replace(ROWS, text=(), number=("stars",))
    assert not has_texts(prepare(rows, numbers))
    assert not has_texts(prepare(rows, replace(ROWS, label="stars", task="regression")))
    assert has_texts(prepare(rows, replace(ROWS, number=("stars",))))
    assert has_texts(tiny())
    generated = tiny()
    assert not has_texts(replace(generated, input_spec=replace(generated.input_spec, kind="generated")))
    assert not has_texts(tiny("tokens"))


def test_without_the_package(rows, monkeypatch):
    prepared = prepare(rows, ROWS)
    monkeypatch.setitem(sys.modules, "sklearn.exceptions", None)
    message = "the row TF-IDF + logistic regression needs the package 'scikit-learn'; "
    message += "install it with: pip install 'hsa[tfidf]'"
    with pytest.raises(MissingExtra) as caught:
        train_on_words(rows, ROWS, prepared, small=False)
    assert str(caught.value) == message


def test_the_constant_answer():
    from hsa.training.reference import constant_answer

    data = tiny()
    counts = np.bincount(data.test.targets.numpy())
    most = np.bincount(data.train.targets.numpy()).argmax()
    actual = constant_answer(data)
    assert (actual.name, actual.scores.accuracy) == ("most frequent class", counts[most] / counts.sum())
    numbers = constant_answer(tiny("regression"))
    assert numbers.name == "mean of training data"
    assert -0.5 < numbers.scores.r2 <= 0
