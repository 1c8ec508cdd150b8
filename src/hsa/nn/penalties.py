"""Penalties: terms that modules add to the loss, collected while a model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_PENALTIES: ContextVar[list[Tensor] | None] = ContextVar("_PENALTIES", default=None)


@contextmanager
def collecting_penalties() -> Iterator[list[Tensor]]:
    """Collect the penalties of the modules that run inside the context in training mode.

        with collecting_penalties() as penalties:
            loss = loss_of(model(batch))
        (loss + sum(penalties)).backward()

    >>> import torch
    >>> with collecting_penalties() as penalties:
    ...     add_penalty(torch.tensor(2.0))
    >>> penalties
    [tensor(2.)]
    """
    penalties: list[Tensor] = []
    token = _PENALTIES.set(penalties)
    try:
        yield penalties
    finally:
        _PENALTIES.reset(token)


def add_penalty(penalty: Tensor) -> None:
    """Add a penalty to those of `collecting_penalties`; without effect outside of it."""
    penalties = _PENALTIES.get()
    if penalties is not None:
        penalties.append(penalty)
