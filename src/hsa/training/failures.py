"""Failures of runs: a run that diverges or runs out of memory has no result, and the other runs continue."""

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
"""Texts in the out-of-memory errors of torch's CPU allocator, the GPU driver and its libraries."""

SMALLER = "a smaller --batch-tokens, --max-tokens (--context for a language model) or --width"
"""Options that need less memory, to follow "try"."""


class NoResult(HsaError):
    """A run that ended without a result."""

    ending: ClassVar[Ending]


class Diverged(NoResult):
    """A run whose loss is no longer a number."""

    ending = "diverged"


class OutOfMemory(NoResult):
    """A run for which the memory of the device was too small."""

    ending = "out of memory"


OnFailure = Callable[[str, NoResult], None]
"""Callback that receives the name of a model without a result, and the reason."""


def catch_oom(run: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that it raises `OutOfMemory` if memory runs out, after its own memory has been freed.

    With several processes the original error is raised: the other processes wait for this one, so all have to end.

    >>> catch_oom(torch.empty)(2**60)
    Traceback (most recent call last):
    hsa.training.failures.OutOfMemory: out of memory; try ...
    """

    @wraps(run)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return run(*args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error) or _has_other_processes():
                raise
        # Outside the except block the error is gone, and with it the frames (and tensors) that it keeps alive.
        raise OutOfMemory(f"out of memory; try {SMALLER}")

    return wrapped


def _is_out_of_memory(error: Exception) -> bool:
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or any(words in str(error) for words in _FULL)


def _has_other_processes() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


@contextmanager
def reported(name: str, on_failure: OnFailure | None = None) -> Iterator[None]:
    """Catch the failure of a run in this context and pass it to `on_failure`, so that the other runs continue.

    Args:
        name: Name of the model.
        on_failure: Callback for a model without a result; by default the error is raised.
    """
    try:
        yield
    except NoResult as error:
        if on_failure is None:
            raise
        on_failure(name, error.with_traceback(None))  # the frames of the traceback would keep the model alive


def rows_without_results(failed: Mapping[str, NoResult], columns: int) -> list[list[str]]:
    """Return the table rows of models without a result.

    >>> rows_without_results({"flat": OutOfMemory("out of memory")}, 5)
    [['flat', '–', 'out of memory', '–', '–']]
    """
    return [[name, "–", error.ending, *["–"] * (columns - 3)] for name, error in failed.items()]


def lines_of(failed: Mapping[str, NoResult]) -> list[str]:
    """Return one line per model with the reason why it has no result."""
    return [f"{name}: {error}" for name, error in failed.items()]


def complain(failed: Mapping[str, NoResult]) -> None:
    """Raise an error if any model has no result."""
    if failed:
        raise HsaError("; ".join(lines_of(failed)))
