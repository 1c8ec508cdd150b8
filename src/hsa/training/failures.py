"""How a run can end without a result, and how the others of its comparison go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import ClassVar, Literal, ParamSpec, TypeVar

import torch

from hsa.errors import HsaError

P = ParamSpec("P")
T = TypeVar("T")
Ending = Literal["diverged", "no room"]
_FULL = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
"""What errors of torch's CPU allocator, of a GPU's driver and of its libraries say."""

SMALLER = "fewer --batch-tokens, shorter texts (--max-tokens, or --context of a language model) or a smaller --width"


class NoResult(HsaError):
    """A run has ended without a result."""

    ending: ClassVar[Ending]


class Diverged(NoResult):
    """The loss is no longer a number."""

    ending = "diverged"


class NoRoom(NoResult):
    """The memory of the device is full."""

    ending = "no room"


OnFailure = Callable[[str, NoResult], None]
"""Told which model has no result, and why."""


def catch_oom(run: Callable[P, T]) -> Callable[P, T]:
    """The same function, which raises `NoRoom` where memory is full. What it held is free by then, unlike in its own error.

    In several processes the error stays what it is: the others wait for this one, so that all have to end.

    >>> catch_oom(torch.empty)(2**60)
    Traceback (most recent call last):
    hsa.training.failures.NoRoom: memory is full; try ...
    """

    @wraps(run)
    def noticing(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return run(*args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if not _is_full(error) or _waited_for():
                raise
        # Out here the error is gone, and with it the frames that it keeps.
        raise NoRoom(f"memory is full; try {SMALLER}")

    return noticing


def _is_full(error: Exception) -> bool:
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or any(words in str(error) for words in _FULL)


def _waited_for() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def results_of(names: Iterable[str], train: Callable[[str], T], on_failure: OnFailure | None = None) -> list[T]:
    """What comes of every model, but for those without a result.

    Args:
        names: of models.
        train: gives the result of one.
        on_failure: is told of those without; the first one is an error by default.
    """
    results = []
    for name in names:
        try:
            results.append(train(name))
        except NoResult as error:
            if on_failure is None:
                raise
            on_failure(name, error.with_traceback(None))  # whose frames would keep the model
    return results


def rows_without_results(failed: Mapping[str, NoResult], columns: int) -> list[list[str]]:
    """Of a table that begins with names.

    >>> rows_without_results({"flat": NoRoom("memory is full")}, 5)
    [['flat', '–', 'no room', '–', '–']]
    """
    return [[name, "–", error.ending, *["–"] * (columns - 3)] for name, error in failed.items()]


def lines_of(failed: Mapping[str, NoResult]) -> list[str]:
    """Why each has no result."""
    return [f"{name}: {error}" for name, error in failed.items()]


def complain(failed: Mapping[str, NoResult]) -> None:
    """Raises where a model has no result."""
    if failed:
        raise HsaError("; ".join(lines_of(failed)))
