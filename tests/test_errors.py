"""Errors survive pickling, as they must to come back from worker processes."""

import pickle

import pytest

from hsa.errors import InvalidInput, MissingExtra, NonFinite, Unsupported


@pytest.mark.parametrize(
    "error",
    [
        InvalidInput("q", got="5 rows", expected="7", fix="Pass one row per leaf"),
        InvalidInput("q", got=5, expected=7),
        InvalidInput("runs", problem="no such folder", expected="a model"),
        MissingExtra("pyarrow", "train", "reading Parquet"),
        Unsupported("no backend"),
        NonFinite("q holds nan"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_pickling(error):
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)
