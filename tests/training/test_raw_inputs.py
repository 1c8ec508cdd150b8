"""Inputs of models that were trained on Python source and on news articles."""

from __future__ import annotations

from pathlib import Path

import pytest

from hsa.errors import InvalidInput
from hsa.signals.readers.python_source import read_python
from hsa.signals.readers.text import read_text
from hsa.training.data.prepare import InputSpec
from hsa.training.data.sources import Columns
from hsa.training.raw_inputs import is_single, raise_error, read_inputs

SOURCE = "def double(x):\n    return 2 * x\n"


def spec(kind, **columns) -> InputSpec:
    return InputSpec(kind, Columns(**columns), max_tokens=0, max_family=0)


def signals(kind, inputs):
    return [example.signal for example in read_inputs(spec(kind), inputs, raise_error)]


def test_strings_are_read_in_the_language_of_the_training(tmp_path):
    assert signals("python", SOURCE) == [read_python(SOURCE)]
    assert signals("folders", [SOURCE]) == [read_text(SOURCE)]
    path = tmp_path / "double.py"
    path.write_text(SOURCE)
    assert signals("python", [path, SOURCE]) == [read_python(SOURCE)] * 2
    assert signals("python", path) == [read_python(SOURCE)]
    assert is_single(spec("python"), path)
    assert not is_single(spec("python"), tmp_path)


def test_bad_inputs_are_reported_and_skipped():
    bad = []
    examples = list(read_inputs(spec("rows", text=("body",)), ["a", "", {"title": "b"}, "c"], bad.append))
    assert [example.where for example in examples] == ["inputs[0]", "inputs[3]"]
    assert [error.where for error in bad] == ["inputs[1]", "inputs[2]"]


@pytest.mark.parametrize("inputs", ["text", ["text"], {"headline": "text"}])
def test_models_of_news_read_files_only(inputs):
    with pytest.raises(InvalidInput, match=r"expected the path of a file, got a (text|row)"):
        signals("news", inputs)


def test_source_that_is_not_python():
    with pytest.raises(InvalidInput, match=r"^inputs\[1\]:1: invalid Python"):
        signals("python", [SOURCE, "def ("])
    with pytest.raises(InvalidInput, match=r"^inputs: expected Python source or the path of a file, or a list of them"):
        signals("python", 3)
    with pytest.raises(InvalidInput, match=r"none\.py: no such file or folder"):
        signals("python", Path("none.py"))
