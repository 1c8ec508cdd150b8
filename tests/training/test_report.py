"""Example that a report draws, and the labels of its leaves."""

from types import SimpleNamespace

import numpy as np
import pytest

from hsa.errors import HsaWarning
from hsa.signals import Leaf, Sequence, Signal, Table, collate
from hsa.training import report

WORDS = {1: " big", 2: " cat", 3: "s"}


class Tokenizer:
    def decode(self, ids):
        return "".join(WORDS[i] for i in ids)


def prepared(lengths=(), tokenizer=None):
    test = SimpleNamespace(lengths=np.array(lengths))
    return SimpleNamespace(test=test, input_spec=SimpleNamespace(tokenizer=tokenizer))


def test_the_longest_legible_example_is_drawn():
    assert report._example_to_draw(prepared([500, 30, 79, 81]), 80) == 2
    assert report._example_to_draw(prepared([500, 300, 790]), 80) == 1  # the shortest, if all are long
    with pytest.warns(HsaWarning, match="at most 4,096 leaves, and the shortest test example has 5,000"):
        assert report._example_to_draw(prepared([5000, 6000]), 80) is None


def test_labels_of_text():
    example = collate([Signal(Sequence(2), [Signal.of([1, 2], "text"), Signal.of([2, 3], "text")])])
    assert report.leaf_labels(example, prepared(tokenizer=Tokenizer())) == [" big", " cat", " cat", "s"]


def test_labels_of_columns():
    patches = Signal.of([0.5, 0.25, 0.125], "patch")
    columns = Table(["title", "price", "photo", "tag"])
    row = Signal(columns, [Signal.of([1, 2, 3], "text"), Leaf(3.5, "number"), patches, Signal.of([2], "text")])
    labels = report.leaf_labels(collate([row]), prepared(tokenizer=Tokenizer()))
    assert labels == [" title: big", " cat", "s", " price", " photo: 0", " 1", " 2", " tag: cat"]
    numbers = Signal(Table(["age", "height"]), [Leaf(3.0, "number"), Leaf(1.5, "number")])
    assert report.leaf_labels(collate([numbers]), prepared()) == [" age", " height"]


def test_leaves_without_words_and_columns_have_no_labels():
    assert report.leaf_labels(collate([Signal.of([0.5, 0.25], "patch")]), prepared(tokenizer=Tokenizer())) is None
