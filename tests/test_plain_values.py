"""Dataclasses from plain values: errors name the field."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import pytest

from hsa.errors import InvalidInput
from hsa.plain_values import check_fields, from_plain


@dataclass(frozen=True)
class Inner:
    name: str
    share: float = 0.5


@dataclass
class Outer:
    count: int
    kind: Literal["a"] | Literal["b", "c"]
    inner: Inner
    pair: tuple[float, float] = (1.0, 2.0)
    several: tuple[Inner, ...] = ()
    maybe: float | None = None
    flag: bool = False
    anything: list[Any] = field(default_factory=list)
    records: list[Inner] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


WHOLE = Outer(3, "c", Inner("x"), (0.5, 1), (Inner("y", 1),), 2.5, True, [1, "a"], [Inner("z")], {"b": 1})


@pytest.mark.parametrize("through", [lambda x: x, lambda x: json.loads(json.dumps(x))])
def test_values_come_back(through):
    assert from_plain(Outer, through(asdict(WHOLE)), "file") == WHOLE
    assert from_plain(Outer, {"count": 3, "kind": "a", "inner": {"name": "x"}}, "file") == Outer(3, "a", Inner("x"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "file: expected the fields count, kind, inner, .*, got None"),
        ([], r"file: expected the fields .*, got \[\]"),
        ({"count": ...}, "file: no field 'count'; expected the fields count, kind, inner"),
        ({"colour": 1}, "file: expected the fields count, .*, got the unknown field 'colour'"),
        ({"count": 1.5}, "file: count: expected an integer, got 1.5"),
        ({"count": True}, "file: count: expected an integer, got True"),
        ({"count": None}, "file: count: expected an integer, got None"),
        ({"kind": "d"}, "file: kind: expected one of 'a', 'b', 'c', got 'd'"),
        ({"kind": []}, r"file: kind: expected one of 'a', 'b', 'c', got \[\]"),
        ({"inner": 7}, "file: inner: expected the fields name, share, got 7"),
        ({"inner": {"name": 7}}, "file: inner: name: expected a text, got 7"),
        ({"pair": [1]}, r"file: pair: expected 2 values, got \[1\]"),
        ({"pair": 1}, "file: pair: expected a list, got 1"),
        ({"pair": [1, "x"]}, r"file: pair\[1\]: expected a number, got 'x'"),
        ({"several": [{"share": 1}]}, r"file: several\[0\]: no field 'name'"),
        ({"maybe": "x" * 99}, "file: maybe: expected a number, got 'x+…$"),
        ({"flag": 1}, "file: flag: expected true or false, got 1"),
        ({"records": {}}, "file: records: expected a list, got {}"),
        ({"records": [1]}, r"file: records\[0\]: expected the fields name"),
        ({"options": []}, r"file: options: expected fields, got \[\]"),
    ],
)
def test_fields_that_do_not_fit(change, message):
    data = change
    if isinstance(change, dict):
        data = {name: value for name, value in (asdict(WHOLE) | change).items() if value is not ...}
    with pytest.raises(InvalidInput, match=f"^{message}"):
        from_plain(Outer, data, "file")


def test_missing_fields():
    check_fields({"a": 1, "b": 2}, ("a",), "file")
    with pytest.raises(InvalidInput, match="file: no field 'c'; expected the fields a, c"):
        check_fields({"a": 1}, ("a", "c"), "file")
    with pytest.raises(InvalidInput, match="file: expected the fields a, got 3"):
        check_fields(3, ("a",), "file")
