"""Recipes: the options of a training run, from a YAML file or the command line."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hsa.errors import InvalidInput
from hsa.files import load_yaml
from hsa.models.options import ModelOptions
from hsa.training.options import EXTRA_OPTIONS, DataOptions, LanguageOptions, Seq2SeqOptions, TrainingOptions

_PARTS: dict[str, type] = {
    "read": DataOptions,
    "model": ModelOptions,
    "training": TrainingOptions,
    "language": LanguageOptions,
    "seq2seq": Seq2SeqOptions,
}


@dataclass(frozen=True)
class Recipe:
    """Options of one `hsa train` run.

    Args:
        data: File of rows, or folder with one subfolder per class; None for built-in data.
        models: Models to train. The first is the reference; the others are matched to its size.
        read: Options of the data.
        model: Options of the models.
        training: Options of the optimisation.
        language: Options of the task lm.
        seq2seq: Options of the task seq2seq.
        extra: Options of plug-ins, by the name of their group in `EXTRA_OPTIONS`. Missing groups have their defaults.
    """

    data: Path | None = None
    models: tuple[str, ...] = ("hierarchical", "flat", "deepsets")
    read: DataOptions = field(default_factory=DataOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    language: LanguageOptions = field(default_factory=LanguageOptions)
    seq2seq: Seq2SeqOptions = field(default_factory=Seq2SeqOptions)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def group(self, name: str) -> Any:
        """Return the options of a plug-in."""
        return self.extra[name] if name in self.extra else EXTRA_OPTIONS.get(name)()

    def options(self, *parts: str) -> dict[str, Any]:
        """Return the options of these parts by name, and those of plug-ins that define the task or were changed."""
        groups = [getattr(self, part) for part in parts]
        groups += [g for name, g in self.extra.items() if name == self.read.task or g != type(g)()]
        return {name: value for group in groups for name, value in asdict(group).items()}


def load_recipe(path: Path) -> Recipe:
    """Read a recipe file: `data`, `models`, and the options of `hsa train` by name. Paths are relative to the file.

    Raises:
        InvalidInput: The file is not YAML, has an unknown option, or a value of the wrong type.
    """
    values = load_yaml(path)
    data = values.pop("data", None)
    models = _words(values.pop("models", Recipe.models))
    kinds = {**_PARTS, **{name: EXTRA_OPTIONS.get(name) for name in EXTRA_OPTIONS.names()}}
    parts: dict[str, Any] = {}
    for part, kind in kinds.items():
        names = {f.name for f in fields(kind)}
        own = {name: _value(kind, name, values.pop(name), path) for name in sorted(names & set(values))}
        try:
            parts[part] = kind(**own)
        except InvalidInput as error:
            raise error.moved(f"{path}: {error.where}") from None
    if values:
        known = sorted(f.name for kind in kinds.values() for f in fields(kind))
        unknown = min(map(str, values))
        close = difflib.get_close_matches(unknown, ["data", "models", *known], 1, cutoff=0.5)
        raise InvalidInput(
            str(path),
            problem=f"unknown option {unknown!r}",
            expected=f"one of data, models, {', '.join(known)}",
            fix=f"Did you mean {close[0]!r}?" if close else None,
        )
    extra = {name: group for name in EXTRA_OPTIONS.names() if (group := parts.pop(name)) != kinds[name]()}
    return Recipe(None if data is None else path.parent / str(data), models, **parts, extra=extra)


def _value(kind: type, name: str, value: Any, path: Path) -> Any:
    """Convert the value of an option to the option's type. Paths are relative to the recipe."""
    wanted = get_type_hints(kind)[name]
    if get_origin(wanted) is tuple:
        items = value if isinstance(value, list) else [value]
        return tuple(_single(get_args(wanted)[0], item, f"{path}: {name}", path) for item in items)
    if get_origin(wanted) not in (Union, UnionType):
        return _single(wanted, value, f"{path}: {name}", path)
    words = [word for kind in get_args(wanted) for word in get_args(kind)]  # the literals of the union
    if value is None or value in words:
        return value
    try:
        return _single(get_args(wanted)[0], value, f"{path}: {name}", path)
    except InvalidInput as error:
        expected = " or ".join([str(error.expected), *words])
        raise error.moved(error.where, expected=expected) from None


def _single(wanted: Any, value: Any, where: str, path: Path) -> Any:
    expected = f"a value of type {getattr(wanted, '__name__', wanted)}"
    if get_origin(wanted) is Literal:
        value = "no" if value is False else value  # YAML reads `no` as false
        expected = f"one of {', '.join(get_args(wanted))}"
        if value in get_args(wanted):
            return value
    elif type(value) is wanted:
        return value
    elif not isinstance(value, (bool, list, dict, type(None))):
        if wanted is Path:
            return path.parent / str(value)
        if wanted is str:
            return str(value)
        if wanted is float:
            with suppress(ValueError):
                return float(value)  # YAML reads 1e-3 as a string
    raise InvalidInput(where, got=repr(value), expected=expected)


def _words(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, (list, tuple)) else (str(value),)


def overridden(recipe: Recipe, changes: Recipe, named: Collection[str]) -> Recipe:
    """Return the recipe with the `named` options taken from `changes` (those set on the command line)."""

    def merge(base: Any, own: Any) -> Any:
        return replace(base, **{f.name: getattr(own, f.name) for f in fields(own) if f.name in named})

    parts = {part: merge(getattr(recipe, part), getattr(changes, part)) for part in _PARTS}
    extra = {name: merge(recipe.group(name), changes.group(name)) for name in {**recipe.extra, **changes.extra}}
    return Recipe(recipe.data, changes.models if "models" in named else recipe.models, **parts, extra=extra)
