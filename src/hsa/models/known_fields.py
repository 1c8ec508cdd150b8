"""What a saved configuration may hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hsa.errors import InvalidInput


def known_fields(kind: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the data, if a configuration has all of these fields."""
    unknown = set(data) - {f.name for f in fields(kind)}
    if unknown:
        raise InvalidInput(
            kind.__name__,
            given=f"the unknown field {sorted(unknown)[0]!r}",
            expected="a configuration of this version of hsa",
            fix="was it saved by a newer version?",
        )
    return dict(data)
