"""Check the fields of a saved configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hsa.errors import InvalidInput


def known_fields(kind: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `data`; raise unless the dataclass `kind` has all of its fields."""
    unknown = set(data) - {f.name for f in fields(kind)}
    if unknown:
        raise InvalidInput(
            kind.__name__,
            got=f"the unknown field {sorted(unknown)[0]!r}",
            expected="a configuration of this version of hsa",
            fix="Was it saved by another version? Then load it with that one, or train it again",
        )
    return dict(data)
