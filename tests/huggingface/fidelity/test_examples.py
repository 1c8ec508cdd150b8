"""Texts and labels from tables, their tokens, and batches of them."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsa.errors import InvalidInput
from hsa.huggingface.fidelity.examples import Examples, Tokens, load_examples, number_labels, tokenize
from tests.huggingface.fidelity.small import examples, tokenizer
from tests.tables import write_rows


@pytest.fixture
def table(tmp_path):
    def write(rows, name="t.jsonl"):
        return write_rows(tmp_path / name, rows)

    return write


@pytest.mark.parametrize(
    ("columns", "wanted"),
    [
        (["text", "other"], ["text"]),
        (["other", "sentence"], ["sentence"]),
        (["sentence2", "text", "sentence1"], ["sentence1", "sentence2"]),
        (["title", "description"], ["title", "description"]),
        (["text", "title", "description"], ["text"]),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "tsv", "json", "jsonl", "parquet"])
def test_columns_are_found(table, columns, wanted, suffix):
    path = table([{name: f"{name} {i}" for name in columns} for i in range(3)], f"t.{suffix}")
    result = load_examples(path)
    assert result.texts == [tuple(f"{name} {i}" for name in wanted) for i in range(3)]
    assert result.labels is None
    assert (result.name, len(result)) == ("t", 3)


def test_columns_that_are_named_and_joined(table):
    path = table([{"a": "one", "b": "two", "c": "three", "text": "not this"}])
    assert load_examples(path, text=["b"]).texts == [("two",)]
    assert load_examples(path, text=["b", "a"]).texts == [("two", "one")]
    assert load_examples(path, text=["c", "a", "b"], join=True).texts == [("three one two",)]


def test_splits(table):
    rows = [{"text": f"{split} {i}", "split": split} for i in range(2) for split in ("train", "test", "validation")]

    def texts(some, **options):
        return {words[0].split()[0] for words in load_examples(table(some), **options).texts}

    assert texts(rows) == {"validation"}
    assert texts(rows, split="test") == {"test"}
    assert texts(rows, usual=("train", "validation")) == {"train"}
    assert texts([row for row in rows if row["split"] != "validation"]) == {"test"}
    assert texts([row for row in rows if row["split"] == "train"]) == {"train"}  # the only split
    assert len(load_examples(table(rows))) == 2


def test_rows_without_labels_are_left_out(table):
    labels = ["a", None, "b", -1, "-1", "", float("nan"), "a"]
    path = table([{"text": f"row {i}", "label": label} for i, label in enumerate(labels)])
    result = load_examples(path)
    assert result.texts == [("row 0",), ("row 2",), ("row 7",)]
    assert result.labels == ["a", "b", "a"]
    none = load_examples(table([{"text": f"row {i}", "label": -1} for i in range(3)]))
    assert (len(none), none.labels) == (3, None)
    other = load_examples(table([{"text": "x", "label": 1, "mark": 0}]), label="mark")
    assert other.labels == [0]


NAMES = {"neg": 0, "pos": 1, "none": 2}


def test_labels_by_name_and_number():
    def numbers(labels, names=NAMES):
        return number_labels(Examples("t", [("x",)] * len(labels), labels), names, 3).tolist()

    assert numbers(["pos", "neg", "none"]) == [1, 0, 2]
    assert numbers([2, 0, np.int64(1)]) == [2, 0, 1]
    assert numbers(["2", "0"]) == [2, 0]
    assert numbers([1.0, 2.0]) == [1, 2]  # integers in a column with missing values
    assert numbers(["2", 0], {"2": 0, "0": 1, "1": 2}) == [0, 1]  # names take precedence over numbers
    for wrong in (3, -2, "3", "maybe", 1.5):
        with pytest.raises(
            InvalidInput,
            match=rf"t: label: expected one of the model's classes: 'neg'.*, got {re.escape(repr(wrong))}$",
        ):
            numbers(["pos", wrong])
    with pytest.raises(InvalidInput, match=r"t: no labels; expected a label per row.*--label"):
        number_labels(Examples("t", [("x",)]), NAMES, 3)
    with pytest.raises(
        InvalidInput, match=r"model: expected a classification head of 2 or more classes, got a head of 1$"
    ):
        number_labels(Examples("t", [("x",)], [0]), {"LABEL_0": 0}, 1)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            [{"x": "a"}],
            {},
            r"t.jsonl: no text column among \['x'\]; expected one with a usual name, such as 'text'. Pass --text COLUMN",
        ),
        ([{"text": "a"}], {"text": ["tex"]}, "no column 'tex'.*Did you mean 'text'"),
        ([{"text": "a"}], {"label": "mark"}, "no column 'mark'; expected one of 'text'$"),
        ([{"text": "a"}, {"text": " "}], {}, r"row 2 \(line 2\), text: expected a text, got ' '"),
        ([{"text": "a"}, {"text": None}], {}, "row 2.*expected a text, got None"),
        ([{"text": 5}], {}, "row 1.*expected a text, got 5"),
        (
            [{"a": "1", "b": "2", "c": "3"}],
            {"text": ["a", "b", "c"]},
            "text: expected one column, or two .*, got 3 columns",
        ),
        ([{"text": "a"}], {"split": "test"}, "no column 'split'; expected one that contains 'test'"),
        ([{"text": "a", "split": "dev"}], {"split": "test"}, r"split: expected one of \['dev'\], got 'test'"),
    ],
)
def test_tables_that_do_not_fit(table, rows, options, message):
    with pytest.raises(InvalidInput, match=message):
        load_examples(table(rows), **options)


def test_samples_are_always_the_same():
    whole = examples(30)
    some = whole.sample(7)
    assert len(some) == len(set(some.texts)) == 7
    assert some == whole.sample(7) != whole.sample(7, seed=1)
    rows = [whole.texts.index(texts) for texts in some.texts]
    assert some == whole.part(rows)
    assert rows == sorted(rows)
    assert whole.sample(None) is whole.sample(30) is whole


def test_tokens_are_cut_and_padded_on_the_right():
    known = tokenizer()
    some = examples(5, least=3, most=17)
    tokens = tokenize(some, known, 13)
    for ids, (words,) in zip(tokens.ids, some.texts, strict=True):
        assert ids == known(words, truncation=True, max_length=13)["input_ids"]
    assert tokens.lengths.tolist() == [len(ids) for ids in tokens.ids]
    assert tokens.lengths.max() == 13
    chosen = np.array([3, 0, 4])
    batch = tokens.batch(chosen, "cpu")
    for row, i in enumerate(chosen):
        length = len(tokens.ids[i])
        assert batch["input_ids"][row, :length].tolist() == tokens.ids[i]
        assert (batch["input_ids"][row, length:] == known.pad_token_id).all()
        assert batch["attention_mask"][row].tolist() == [1] * length + [0] * (batch["input_ids"].shape[1] - length)
    assert batch["input_ids"].shape[1] == max(len(tokens.ids[i]) for i in chosen)


def test_pairs_have_types():
    known = tokenizer()
    some = examples(3, parts=2, least=3, most=9)
    tokens = tokenize(some, known, 61)
    batch = tokens.batch(np.arange(3), "cpu")
    for row, texts in enumerate(some.texts):
        wanted = known(*texts)
        length = len(wanted["input_ids"])
        assert batch["token_type_ids"][row, :length].tolist() == wanted["token_type_ids"]
        assert batch["token_type_ids"][row, length:].sum() == 0
    assert batch["token_type_ids"].any()


@pytest.mark.parametrize("parts", [1, 2])
def test_a_length_that_leaves_no_room_for_text(parts):
    some, known = examples(2, parts=parts), tokenizer()
    least = known.num_special_tokens_to_add(pair=parts == 2) + parts
    assert tokenize(some, known, least).lengths.tolist() == [least] * 2
    with pytest.raises(InvalidInput, match=f"max_tokens: expected at least {least}, for .*, got {least - 1}$"):
        tokenize(some, known, least - 1)


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40), budget=st.integers(1, 120))
def test_batches_have_every_row_once(lengths, budget):
    tokens = Tokens([[7] * n for n in lengths], None, 0)
    batches = list(tokens.batches(budget))
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    for chosen in batches:
        assert len(chosen) == 1 or len(chosen) * max(lengths[i] for i in chosen) <= budget
