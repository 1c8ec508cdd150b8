"""Errors survive pickling, as they must to come back from worker processes, and show no addresses of objects."""

import pickle

import pytest
import torch

import hsa
from hsa.errors import InvalidInput, MissingExtra, NonFinite, Unsupported
from hsa.nn.encoder_config import EncoderConfig
from hsa.plain_values import from_plain
from hsa.signals.readers import read_row, read_text
from hsa.training.options import TrainingOptions


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


class Thing:
    """Object whose representation has its address."""

    def method(self):
        """Bound methods have it too."""


X = torch.zeros(2, 3, 5, 8)
TREE = hsa.Hierarchy.from_nested([[3, 2]])
PACKED = torch.zeros(5, 2, 8)
ENTRIES = {
    "near": lambda bad: hsa.multiscale_attention(PACKED, PACKED, PACKED, TREE, near=bad),
    "top_k": lambda bad: hsa.multiscale_attention(PACKED, PACKED, PACKED, TREE, top_k=bad),
    "backend": lambda bad: hsa.hierarchical_attention(PACKED, PACKED, PACKED, TREE, backend=bad),
    "tree": lambda bad: hsa.hierarchical_attention(PACKED, PACKED, PACKED, bad),
    "q": lambda bad: hsa.hierarchical_attention(bad, PACKED, PACKED, TREE),
    "threshold": lambda bad: hsa.clustered_attention(PACKED, PACKED, PACKED, [5], threshold=bad),
    "lengths": lambda bad: hsa.clustered_attention(PACKED, PACKED, PACKED, bad),
    "kind": lambda bad: hsa.scaled_dot_product_attention(X, X, X, kind=bad),
    "flat": lambda bad: hsa.Hierarchy.flat(bad),
    "from_nested": lambda bad: hsa.Hierarchy.from_nested([[bad]]),
    "collate": lambda bad: hsa.collate([bad]),
    "signal": lambda bad: hsa.Signal.of([bad], "text"),
    "config": lambda bad: EncoderConfig(kind=bad),
    "training": lambda bad: TrainingOptions(schedule=bad),
    "convert": lambda bad: hsa.huggingface.convert(bad),
    "read_text": lambda bad: read_text(bad),
    "read_row": lambda bad: read_row({"text": bad}, text=["text"]),
    "from_plain": lambda bad: from_plain(EncoderConfig, {"width": bad}, "config.json"),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_errors_show_no_addresses(entry):
    for bad in (Thing(), Thing().method, lambda: None):
        with pytest.raises(hsa.HsaError) as caught:
            ENTRIES[entry](bad)
        assert "0x" not in str(caught.value)
