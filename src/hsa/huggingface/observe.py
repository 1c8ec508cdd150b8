"""Contexts that observe converted layers: their operations, and their distances from exact attention."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import astuple, dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from hsa.attention.cache import interface
from hsa.attention.flops import Flops
from hsa.huggingface.sequences import Sequences

T = TypeVar("T")


@dataclass
class Counted:
    """Operations of attention in the forward passes inside `counting()`.

    Attributes:
        layers: Operations of each layer, by purpose.
        exact: Operations that exact attention would take in each layer.
    """

    layers: dict[int, Flops] = field(default_factory=dict)
    exact: dict[int, int] = field(default_factory=dict)

    def add(self, layer: int, taken: Flops, exact: int) -> None:
        """Add the operations of one pass of a layer."""
        before = self.layers.get(layer, Flops(0, 0))
        self.layers[layer] = Flops(*map(sum, zip(astuple(before), astuple(taken), strict=True)))
        self.exact[layer] = self.exact.get(layer, 0) + exact

    @property
    def total(self) -> int:
        """Number of operations of all layers."""
        return sum(layer.total for layer in self.layers.values())

    @property
    def ratio(self) -> float:
        """Operations of exact attention divided by those counted; above 1 if operations are saved."""
        return sum(self.exact.values()) / self.total if self.total else math.nan


@dataclass
class Probe:
    """Squared distances from exact attention, summed over tokens, `[biases, heads]` by layer."""

    biases: Sequence[float]
    errors: dict[int, Tensor] = field(default_factory=dict)

    def add(self, layer: int, errors: Tensor) -> None:
        self.errors[layer] = self.errors.get(layer, 0) + errors


COUNTER: ContextVar[Counted | None] = ContextVar("hsa_counter", default=None)
PROBE: ContextVar[Probe | None] = ContextVar("hsa_probe", default=None)


@contextlib.contextmanager
def counting() -> Iterator[Counted]:
    """Count the operations of attention in all forward passes of converted models inside this context.

    Yields:
        A `Counted`: `ratio` (times fewer than exact attention), `total`, and `layers` and `exact` by layer.

    >>> from transformers import BertConfig, BertModel
    >>> from hsa.huggingface import convert
    >>> model = BertModel(BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=3, intermediate_size=8))
    >>> with counting() as counted, torch.no_grad():
    ...     _ = convert(model).eval()(input_ids=torch.arange(500)[None])
    >>> counted.ratio > 2
    True
    """
    with _set(COUNTER, Counted()) as counted:
        yield counted


@contextlib.contextmanager
def probing(biases: Sequence[float]) -> Iterator[dict[int, Tensor]]:
    """Measure the distance of converted layers from exact attention on the same inputs, for each bias of pooled nodes.

    Yields:
        Sums of squared differences by layer, `[biases, heads]`, which forward passes inside this context fill in.
    """
    with _set(PROBE, Probe(biases)) as probe:
        yield probe.errors


@contextlib.contextmanager
def _set(variable: ContextVar[T | None], value: T) -> Iterator[T]:
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def is_observed() -> bool:
    """Return whether operations are counted or distances measured. Both need a whole pass."""
    return COUNTER.get() is not None or PROBE.get() is not None


def count_exact(layer: int, q: Tensor, sequences: Sequences) -> None:
    """Count a layer that attends exactly."""
    counted = COUNTER.get()
    if counted is not None:
        operations = exact_operations(q, sequences)
        counted.add(layer, Flops(operations, 0), operations)


def count_mask(layer: int, q: Tensor, mask: Tensor | None) -> None:
    """Count a layer that attends exactly under any other mask, `[batch, heads or 1, queries, keys]`."""
    counted = COUNTER.get()
    if counted is not None and mask is not None and mask.ndim == 4:
        seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        is_token = seen.diagonal(seen.shape[-1] - seen.shape[-2], -2, -1)  # padded queries do not see themselves
        pairs = int((seen & is_token[..., None]).expand(len(q), *seen.shape[1:]).sum()) // seen.shape[1]
        operations = (4 * q.shape[1] * q.shape[-1] + q.shape[1]) * pairs
        counted.add(layer, Flops(operations, 0), operations)


def count_steps(layer: int, q: Tensor, sequences: Sequences, taken: interface.Counted) -> None:
    """Count a layer that attends to a cache of trees."""
    counted = COUNTER.get()
    if counted is not None:
        dim = q.shape[-1]
        flops = Flops((4 * dim + 1) * taken.entries, taken.pooling, taken.selection, taken.clustering)
        counted.add(layer, flops, exact_operations(q, sequences))


def exact_operations(q: Tensor, sequences: Sequences) -> int:
    """Return the operations of softmax attention, with one entry per query and visible key, as `flops_flat` does."""
    heads, dim = q.shape[1], q.shape[-1]
    pairs = 0
    for queries, keys in zip(sequences.queries.lengths, sequences.keys.lengths, strict=True):
        pairs += queries * keys - (queries * (queries - 1) // 2 if sequences.causal else 0)
    return (4 * heads * dim + heads) * pairs
