"""Exceptions of this library. Messages say where the problem is, what was expected, what was passed and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+(?=>)")
"""Address in the default representation of an object, which means nothing to a reader and differs from run to run."""


class HsaError(Exception):
    """Base class of the library's exceptions.

    >>> import hsa
    >>> try:
    ...     hsa.Hierarchy.flat([3, 0])
    ... except hsa.HsaError as error:
    ...     print(error)
    lengths[1]: expected at least one leaf per tree, got 0. Leave empty sequences out of the batch
    """


class InvalidInput(HsaError, ValueError):
    """An argument, file, row or option with an invalid value.

    Args:
        where: Name of the argument, file, row or option.
        expected: Valid input; a noun phrase.
        got: Input that was passed; a noun phrase.
        problem: Clause in place of `got` where nothing was passed, such as "no such file".
        fix: Advice to the user; a sentence without its full stop.

    >>> print(InvalidInput("q", expected="7 rows, one per leaf", got="5 rows", fix="Pass one row per leaf"))
    q: expected 7 rows, one per leaf, got 5 rows. Pass one row per leaf
    >>> print(InvalidInput("runs/reviews", problem="no such folder", expected="a model that `hsa train` wrote"))
    runs/reviews: no such folder; expected a model that `hsa train` wrote
    """

    def __init__(
        self, where: str, *, expected: Any, got: Any = None, problem: str | None = None, fix: str | None = None
    ):
        self.where, self.expected, self.got, self.problem, self.fix = where, expected, got, problem, fix
        wrong = f"expected {expected}, got {got}" if problem is None else f"{problem}; expected {expected}"
        message = _ADDRESS.sub("", f"{where}: {wrong}")
        super().__init__(message if fix is None else f"{message}. {fix}")

    def moved(self, where: str, **changes: Any) -> InvalidInput:
        """Return the same error at another location; `changes` replace its other texts."""
        return InvalidInput(where, **{**self._texts, **changes})

    @property
    def _texts(self) -> dict[str, Any]:
        return {"expected": self.expected, "got": self.got, "problem": self.problem, "fix": self.fix}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle all texts: errors of worker processes come back pickled, and the message alone cannot rebuild this one."""
        return partial(InvalidInput, **self._texts), (self.where,)


@contextmanager
def inside(where: str) -> Iterator[None]:
    """Prefix the location of an error raised in the block.

    >>> with inside("recipe"):
    ...     raise InvalidInput("epochs", expected="1 or more", got=0)
    Traceback (most recent call last):
    hsa.errors.InvalidInput: recipe.epochs: expected 1 or more, got 0
    """
    try:
        yield
    except InvalidInput as error:
        raise error.moved(f"{where}.{error.where}") from None


class Unsupported(HsaError, NotImplementedError):
    """A combination of arguments that no backend can run; the message lists the reasons of each backend."""


class NonFinite(HsaError, FloatingPointError):
    """A NaN or an infinity, found by `hsa.checking`."""


class MissingExtra(HsaError, ImportError):
    """A package that a feature needs and that is not installed."""

    def __init__(self, package: str, extra: str, purpose: str):
        self.parts = package, extra, purpose
        super().__init__(f"{purpose} needs the package {package!r}; install it with: pip install 'hsa[{extra}]'")

    def __reduce__(self) -> tuple[Any, ...]:
        return MissingExtra, self.parts


class HsaWarning(UserWarning):
    """A condition that the user should know about and that does not stop the work."""
