"""Runs that end without a result: they diverge or run out of memory, and the other runs go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import ClassVar, Literal, ParamSpec, TypeVar

import torch

from hsa.errors import HsaError

P = ParamSpec("P")
T = TypeVar("T")
Ending = Literal["diverged", "out of memory"]
_FULL = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
"""What errors of torch's CPU allocator, of a GPU's driver and of its libraries say."""

SMALLER = "fewer --batch-tokens, shorter texts (--max-tokens, or --context of a language model) or a smaller --width"


class NoResult(HsaError):
    """A run has ended without a result."""

    ending: ClassVar[Ending]


class Diverged(NoResult):
    """The loss is no longer a number."""

    ending = "diverged"


class OutOfMemory(NoResult):
    """The memory of the device is full."""

    ending = "out of memory"


OnFailure = Callable[[str, NoResult], None]
"""Told which model has no result, and why."""


def catch_oom(run: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that it raises `OutOfMemory` where memory is full, after the memory it held has been freed.

    In several processes the original error passes: the others wait for this one, so that all have to end.

    >>> catch_oom(torch.empty)(2**60)
    Traceback (most recent call last):
    hsa.training.failures.OutOfMemory: memory is full; try ...
    """

    @wraps(run)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return run(*args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if not _is_full(error) or _waited_for():
                raise
        # Out here the error is gone, and with it the frames that it keeps.
        raise OutOfMemory(f"memory is full; try {SMALLER}")

    return wrapped


def _is_full(error: Exception) -> bool:
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or any(words in str(error) for words in _FULL)


def _waited_for() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


@contextmanager
def reported(name: str, on_failure: OnFailure | None = None) -> Iterator[None]:
    """Inside this context a run may end without a result: `on_failure` is told, and the other runs go on.

    Args:
        name: Name of the model.
        on_failure: Told of a model without a result; by default that is an error.
    """
    try:
        yield
    except NoResult as error:
        if on_failure is None:
            raise
        on_failure(name, error.with_traceback(None))  # whose frames would keep the model


def rows_without_results(failed: Mapping[str, NoResult], columns: int) -> list[list[str]]:
    """Return the table rows of models without a result.

    >>> rows_without_results({"flat": OutOfMemory("memory is full")}, 5)
    [['flat', '–', 'out of memory', '–', '–']]
    """
    return [[name, "–", error.ending, *["–"] * (columns - 3)] for name, error in failed.items()]


def lines_of(failed: Mapping[str, NoResult]) -> list[str]:
    """Return a line per model that says why it has no result."""
    return [f"{name}: {error}" for name, error in failed.items()]


def complain(failed: Mapping[str, NoResult]) -> None:
    """Raise if a model has no result."""
    if failed:
        raise HsaError("; ".join(lines_of(failed)))
