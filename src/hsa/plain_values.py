"""Dataclasses from plain values, as JSON and checkpoints hold them; errors name the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hsa.errors import InvalidInput

T = TypeVar("T")
_WORDS = {int: "an integer", float: "a number", str: "a text", bool: "true or false", dict: "fields", list: "a list"}


def from_plain(kind: type[T], data: Any, where: str) -> T:
    """Build a dataclass from the values of its fields. Lists become tuples and nested dataclasses where it has these.

    Args:
        kind: Dataclass to build.
        data: Values by the names of the fields, as `dataclasses.asdict` returns them.
        where: Name of the file, for errors.

    Raises:
        InvalidInput: A field is missing, unknown or of another type; the message names it.

    >>> from hsa.errors import InvalidInput
    >>> from hsa.training.metrics import Scores
    >>> from_plain(Scores, {"accuracy": 0.75, "f1": 0.5}, "result.json").main
    0.75
    >>> from_plain(Scores, {"accuracy": "high"}, "result.json")
    Traceback (most recent call last):
    hsa.errors.InvalidInput: result.json: accuracy: expected a number, got 'high'
    """
    own = [field for field in fields(kind) if field.init]  # type: ignore[arg-type]
    names = [field.name for field in own]
    if not isinstance(data, Mapping):
        raise InvalidInput(where, got=_shown(data), expected=f"the fields {', '.join(names)}")
    check_fields(data, [f.name for f in own if f.default is MISSING and f.default_factory is MISSING], where)
    if unknown := [str(name) for name in data if name not in names]:
        raise InvalidInput(where, got=f"the unknown field {unknown[0]!r}", expected=f"the fields {', '.join(names)}")
    hints = get_type_hints(kind)
    return kind(**{name: _converted(hints[name], value, f"{where}: {name}") for name, value in data.items()})


def check_fields(data: Any, names: Sequence[str], where: str) -> None:
    """Raise an error unless `data` has all the named fields; `where` names the file."""
    if not isinstance(data, Mapping):
        raise InvalidInput(where, got=_shown(data), expected=f"the fields {', '.join(names)}")
    if missing := [name for name in names if name not in data]:
        raise InvalidInput(where, problem=f"no field {missing[0]!r}", expected=f"the fields {', '.join(names)}")


def _converted(kind: Any, value: Any, where: str) -> Any:
    if is_dataclass(kind):
        return from_plain(kind, value, where)  # type: ignore[arg-type]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        rest = [argument for argument in arguments if argument is not NoneType]
        if value is None and len(rest) < len(arguments):
            return None
        if len(rest) == 1:
            return _converted(rest[0], value, where)
        origin, arguments = Literal, tuple(choice for literal in rest for choice in get_args(literal))
    if origin is Literal:
        return _checked(value in arguments, value, f"one of {', '.join(map(repr, arguments))}", where)
    if origin is list:
        _checked(isinstance(value, list), value, "a list", where)
        return [_converted(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value)]
    if origin is tuple:
        _checked(isinstance(value, list | tuple), value, "a list", where)
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        _checked(len(kinds) == len(value), value, f"{len(kinds)} values", where)
        return tuple(_converted(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True)))
    plain = origin or kind
    if plain is Any:
        return value
    fits = isinstance(value, (int, float) if plain is float else plain) and (plain is bool) == isinstance(value, bool)
    return _checked(fits, value, _WORDS.get(plain, plain.__name__), where)


def _checked(fits: bool, value: Any, expected: str, where: str) -> Any:
    if not fits:
        raise InvalidInput(where, got=_shown(value), expected=expected)
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
