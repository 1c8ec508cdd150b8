"""Recipes: the options of an experiment in a YAML file."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hsa.errors import InvalidInput, MissingExtra
from hsa.training.options import DataOptions, ModelOptions, TrainingOptions

_PATHS = ("validation", "test", "word_vectors")


@dataclass(frozen=True)
class Recipe:
    """What `hsa train` does.

    Args:
        data: a file of rows, a folder per class, or None for the Python standard library.
        models: to train, the first of them the one that is meant.
    """

    data: Path | None = None
    models: tuple[str, ...] = ("hsa", "flat", "deepsets")
    read: DataOptions = field(default_factory=DataOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)


def load_recipe(path: Path) -> Recipe:
    """A recipe file: `data`, `models`, and the options of `hsa train` by their names; paths are relative to the file.

    Raises:
        InvalidInput: naming the file: no YAML, a name that is no option, a value that does not fit.
    """
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise MissingExtra("pyyaml", "train", "reading recipes") from None
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(str(path), given=error.strerror or error, expected="a recipe") from None
    except yaml.YAMLError as error:
        raise InvalidInput(str(path), given=f"no YAML ({' '.join(str(error).split())})", expected="a recipe") from None
    if not isinstance(given, dict):
        raise InvalidInput(str(path), given=f"a {type(given).__name__}", expected="names and values of options")
    data = given.pop("data", None)
    models = _words(given.pop("models", Recipe.models))
    parts = []
    for kind in (DataOptions, ModelOptions, TrainingOptions):
        names = {f.name for f in fields(kind)}
        own = {name: _value(kind, name, given.pop(name), path) for name in sorted(names & set(given))}
        try:
            parts.append(kind(**own))
        except (InvalidInput, TypeError) as error:
            raise InvalidInput(str(path), given=f"a value that does not fit ({error})", expected="another") from None
    if given:
        known = sorted(f.name for kind in (DataOptions, ModelOptions, TrainingOptions) for f in fields(kind))
        raise InvalidInput(
            str(path), given=f"the unknown option {sorted(given)[0]!r}", expected=f"data, models, {', '.join(known)}"
        )
    return Recipe(None if data is None else path.parent / str(data), models, *parts)  # type: ignore[arg-type]


def _value(kind: type, name: str, value: Any, path: Path) -> Any:
    default = getattr(kind, name, None)
    if isinstance(default, tuple):
        return tuple(value) if isinstance(value, list) else _words(value)
    if name in _PATHS and value is not None:
        return path.parent / str(value)
    if isinstance(default, float) and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return float(value)  # YAML takes 1e-3 for a string
        except ValueError:
            return value
    if type(value) is not type(default) and default is not None and not (default is None or value is None):
        raise InvalidInput(f"{path}: {name}", given=repr(value), expected=f"something like {default!r}")
    return value


def _words(value: Any) -> tuple[str, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (str(value),)


def overridden(recipe: Recipe, given: Recipe) -> Recipe:
    """The recipe with every option that was given on the command line, that is, differs from its default."""

    def merge(base: Any, own: Any) -> Any:
        changed = {f.name: getattr(own, f.name) for f in fields(own) if getattr(own, f.name) != _default(f, own)}
        return replace(base, **changed)

    return Recipe(
        recipe.data,
        recipe.models if given.models == Recipe.models else given.models,
        merge(recipe.read, given.read),
        merge(recipe.model, given.model),
        merge(recipe.training, given.training),
    )


def _default(option: Any, owner: Any) -> Any:
    return getattr(type(owner)(), option.name)
