"""Penalties: terms of the loss that modules contribute while a model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_PENALTIES: ContextVar[list[Tensor] | None] = ContextVar("_PENALTIES", default=None)


@contextmanager
def collecting_penalties() -> Iterator[list[Tensor]]:
    """Collect the penalties of all modules that run inside the block in training mode; add them to your loss.

    Only the fusion "over-heads" has one: it keeps leaves from all preferring the same head.

    >>> from hsa import Signal, collate
    >>> from hsa.nn import EncoderConfig, HierarchicalEncoder, Modality, collecting_penalties
    >>> encoder = HierarchicalEncoder(EncoderConfig(width=16, fusion="over-heads"), {"text": Modality(tokens=10)})
    >>> with collecting_penalties() as penalties:
    ...     x, _ = encoder(collate([Signal.of([3, 1, 4], "text")]))
    >>> (x.square().mean() + sum(penalties)).backward()
    >>> len(penalties)
    1
    """
    penalties: list[Tensor] = []
    token = _PENALTIES.set(penalties)
    try:
        yield penalties
    finally:
        _PENALTIES.reset(token)


def add_penalty(penalty: Tensor) -> None:
    """Add a penalty to the list of `collecting_penalties`, if active."""
    penalties = _PENALTIES.get()
    if penalties is not None:
        penalties.append(penalty)
