"""One exception family. Every message says where, what was given, what was expected and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


class HsaError(Exception):
    """Base of every error this library raises on purpose."""


class InvalidInput(HsaError, ValueError):
    """Something the caller passed does not fit.

    >>> print(InvalidInput("q", given="5 rows", expected="7 rows, one per leaf", fix="pass one row per leaf"))
    q: given 5 rows, expected 7 rows, one per leaf; pass one row per leaf
    """

    def __init__(self, where: str, *, given: Any, expected: Any, fix: str | None = None):
        self.where = where
        self.given = given
        self.expected = expected
        self.fix = fix
        message = f"{where}: given {given}, expected {expected}"
        super().__init__(message if fix is None else f"{message}; {fix}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors of worker processes come back pickled; made from its message alone, this one would not."""
        return partial(InvalidInput, given=self.given, expected=self.expected, fix=self.fix), (self.where,)


@contextmanager
def inside(where: str) -> Iterator[None]:
    """Says of what an error names that it stands inside something.

    >>> with inside("recipe"):
    ...     raise InvalidInput("epochs", given=0, expected="1 or more")
    Traceback (most recent call last):
    hsa.errors.InvalidInput: recipe.epochs: given 0, expected 1 or more
    """
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(
            f"{where}.{error.where}", given=error.given, expected=error.expected, fix=error.fix
        ) from None


class Unsupported(HsaError, NotImplementedError):
    """No backend can run this combination of arguments; the message lists the reason of each."""


class NonFinite(HsaError, FloatingPointError):
    """The checking mode found a NaN or an infinity."""


class MissingExtra(HsaError, ImportError):
    """A feature needs a package that is not installed."""

    def __init__(self, package: str, extra: str, purpose: str):
        self.parts = package, extra, purpose
        super().__init__(f"{purpose} needs the package {package!r}; install it with: pip install 'hsa[{extra}]'")

    def __reduce__(self) -> tuple[Any, ...]:
        return MissingExtra, self.parts
