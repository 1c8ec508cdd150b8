"""Build a signal from a nested outline of texts; all texts of an outline are tokenized in one call.

An outline is one of

- a string: a sentence, a line or a statement, which becomes a family of tokens;
- a list of outlines: a `Sequence`, or a `Set` if the list is `Unordered`;
- a dictionary of outlines: a `Table`;
- a `Signal` or a `Leaf`: itself.

Outlines are only a few levels deep: functions may recurse.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hsa.errors import InvalidInput
from hsa.signals.domains import Domain, Sequence, Set, Table
from hsa.signals.readers.tokens import token_families
from hsa.signals.signal import Leaf, Signal


class Unordered(list):
    """Members whose order has no meaning."""


def build_signal(
    outline: Any,
    tokenizer: Any,
    *,
    where: str,
    problem: str = "no tokens",
    expected: str = "at least one word",
) -> Signal:
    """Return the signal of an outline, without texts that have no tokens and without families that become empty.

    Args:
        outline: Nested texts (see the top of this file).
        tokenizer: As in `read_text`.
        where, problem, expected: Parts of the error message if nothing is left.

    Raises:
        InvalidInput: If nothing is left, or for an object that is not a tokenizer.

    >>> print(build_signal({"title": ["Two cats"], "body": [["They sat."], [""]]}, None, where="page").show())
    Table('title', 'body') · 5 leaves · text
    ├─ .title Sequence(1) · 2 leaves · text
    │  └─ [0] Sequence(2) · 2 leaves · text · 'Two' 'cats'
    └─ .body Sequence(1) · 3 leaves · text
       └─ [0] Sequence(1) · 3 leaves · text
          └─ [0] Sequence(3) · 3 leaves · text · 'They' 'sat' '.'
    """
    texts = list(_texts(outline))
    families = token_families(texts, tokenizer) if texts else []
    signal: Any = _build(outline, iter(families))
    if signal is None:
        raise InvalidInput(where, problem=problem, expected=expected)
    return signal


def _parts(outline: Any) -> Any:
    return outline.values() if isinstance(outline, dict) else outline


def _texts(outline: Any) -> Iterator[str]:
    if isinstance(outline, str):
        yield outline
    elif not isinstance(outline, (Signal, Leaf)):
        for part in _parts(outline):
            yield from _texts(part)


def _build(outline: Any, families: Iterator[Signal | None]) -> Signal | Leaf | None:
    if isinstance(outline, str):
        return next(families)
    if isinstance(outline, (Signal, Leaf)):
        return outline
    built = [_build(part, families) for part in _parts(outline)]
    members = [member for member in built if member is not None]
    if not members:
        return None
    domain: Domain
    if isinstance(outline, dict):
        domain = Table([key for key, member in zip(outline, built, strict=True) if member is not None])
    else:
        domain = (Set if isinstance(outline, Unordered) else Sequence)(len(members))
    return Signal(domain, members)
