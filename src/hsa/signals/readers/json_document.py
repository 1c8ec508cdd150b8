"""Read a JSON document: the same nesting, with strings split into sentences and tokens."""

from __future__ import annotations

import math
from typing import Any

from hsa.errors import InvalidInput
from hsa.files import parse_json
from hsa.signals.readers.outline import build_signal
from hsa.signals.readers.text import check_text, sentences
from hsa.signals.signal import Leaf, Signal

_LARGEST = 3.4028235e38  # in float32, in which models compute


def read_json(text: str, tokenizer: Any = None, language: str = "en", *, where: str = "json") -> Signal:
    """Read a JSON document: lists become `Sequence`s, objects `Table`s, strings sentences → tokens.

    Numbers, true and false are leaves of modality "number", as floats. Null and empty lists, objects and strings are
    left out. `from_nested` keeps each string whole instead.

    Args:
        text: JSON text.
        tokenizer, language: As in `read_text`.
        where: Name of the document in error messages.

    Raises:
        InvalidInput: For invalid JSON, with line and column; a key that an object has twice; more than 200 levels; a
            number that is not finite; a document without values.

    >>> print(read_json('{"name": "Ada Lovelace", "years": [1815, 1852], "tags": []}').show())
    Table('name', 'years') · 4 leaves · text, number
    ├─ .name Sequence(1) · 2 leaves · text
    │  └─ [0] Sequence(2) · 2 leaves · text · 'Ada' 'Lovelace'
    └─ .years Sequence(2) · 2 leaves · number · 1815.0 1852.0
    """
    outline = _outline(parse_json(check_text(text, where), where), language, where)
    whole = [outline] if isinstance(outline, Leaf) else outline  # a signal has members, a number has none
    return build_signal(whole, tokenizer, where=where, problem="no values", expected="at least one")


def _outline(value: Any, language: str, where: str) -> Any:
    if isinstance(value, dict):
        return {key: _outline(part, language, where) for key, part in value.items()}
    if isinstance(value, list):
        return [_outline(part, language, where) for part in value]
    if isinstance(value, str):
        return sentences(value, language)
    if value is None:
        return []
    return Leaf(finite(value, where), "number")


def finite(value: Any, where: str) -> float:
    """Return a number as a float.

    Raises:
        InvalidInput: For an object that is not a number, or a number that is not finite in float32.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= _LARGEST:
        shown = repr(value)
        got = shown if len(shown) <= 60 else f"{shown[:59]}…"
        fix = "Scale it: models compute in float32, up to 3.4e38" if math.isfinite(number) else None
        raise InvalidInput(where, got=got, expected="a finite number", fix=fix)
    return number
