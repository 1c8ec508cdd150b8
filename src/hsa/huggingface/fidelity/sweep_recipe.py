"""Recipes of sweeps, tasks × variants, in a YAML file:

    title: Title of the report
    tasks:
      rte: {train: glue_rte.parquet, epochs: 5}        # options of a `Task`
    variants:
      hierarchical: {kind: hierarchical, branching: [2, 4, 8, 16], layers: late}

A task with `uses: rte` takes the options and the fine-tuned model of task `rte`, except for the options that it sets.

A variant holds settings of `convert`, and `layers`: numbers, "all", "late" (every other layer from the last, a quarter of
all), or "each start" (one variant per start layer, with every other layer from there). `finetune: {epochs: 1}` trains after
conversion, `fresh: true` trains from new weights, and `exact: true` converts no layers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hsa.errors import InvalidInput, inside
from hsa.files import load_yaml
from hsa.huggingface.fidelity.options import FinetuneOptions
from hsa.huggingface.settings import LayerSettings


@dataclass(frozen=True)
class Task:
    """Data set and options of fine-tuning.

    Args:
        train, test: Files in the data folder, or one file for both if it has a column "split".
        text, test_text, join, label, split: Arguments of `load_examples`.
        max_tokens: Maximum number of tokens per text.
        min_tokens: Minimum number of tokens per test text.
        limit: Maximum number of test texts, drawn at random.
        epochs, batch_size, learning_rate: Options of fine-tuning.
        hub: Checkpoint of the paper.
        hub_layers: Layers that the paper converted in it.
        uses: Task whose fine-tuned model to use.
    """

    train: str | None = None
    test: str | None = None
    text: tuple[str, ...] = ()
    test_text: tuple[str, ...] = ()
    join: bool = False
    label: str | None = None
    split: str | None = None
    max_tokens: int = 256
    min_tokens: int = 0
    limit: int | None = None
    epochs: int = FinetuneOptions.epochs
    batch_size: int = FinetuneOptions.batch_size
    learning_rate: float = FinetuneOptions.learning_rate
    hub: str | None = None
    hub_layers: tuple[int, ...] | None = None
    uses: str | None = None

    @property
    def finetuning(self) -> FinetuneOptions:
        return FinetuneOptions(
            epochs=self.epochs, batch_size=self.batch_size, learning_rate=self.learning_rate, max_tokens=self.max_tokens
        )


@dataclass(frozen=True)
class Variant:
    """Conversion, and training before or after it."""

    name: str
    layers: str | tuple[int, ...] = "all"
    exact: bool = False
    fresh: bool = False
    seed: int = 0
    finetune: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SweepRecipe:
    """Tasks and variants of a sweep."""

    title: str
    tasks: dict[str, Task]
    variants: list[Variant]


def load_sweep(path: Path, only: Collection[str] = ()) -> SweepRecipe:
    """Load a recipe, or only some of its tasks.

    Raises:
        InvalidInput: An entry does not fit; the message names the file and the entry.
    """
    entries = load_yaml(path)
    unknown = sorted(map(str, set(entries) - {"title", "tasks", "variants"}))
    if unknown or not entries.get("tasks") or not entries.get("variants"):
        raise InvalidInput(str(path), expected="title, tasks and variants", got=unknown or sorted(entries))
    tasks: dict[str, Task] = {}
    for name, values in _named(f"{path}: tasks", entries["tasks"]).items():
        tasks[str(name)] = _task(f"{path}: tasks.{name}", values, tasks)
    variants = [
        _variant(f"{path}: variants.{name}", name, values)
        for name, values in _named(f"{path}: variants", entries["variants"]).items()
    ]
    missing = sorted(set(only) - set(tasks))
    if missing:
        raise InvalidInput("tasks", got=missing[0], expected=f"some of {', '.join(tasks)}")
    tasks = {name: task for name, task in tasks.items() if not only or name in only}
    return SweepRecipe(str(entries.get("title", path.stem)), tasks, variants)


def _named(where: str, entries: Any) -> dict[Any, dict[str, Any]]:
    """Check a mapping of names to options, and replace missing options by an empty mapping."""
    if not isinstance(entries, dict):
        raise InvalidInput(where, expected="names, each with its options", got=f"a {type(entries).__name__}")
    for name, values in entries.items():
        if not isinstance(values, (dict, type(None))):
            raise InvalidInput(f"{where}.{name}", expected="options, such as {epochs: 3}", got=repr(values))
    return {name: values or {} for name, values in entries.items()}


def _task(where: str, values: dict[str, Any], earlier: Mapping[str, Task]) -> Task:
    if "uses" in values and values["uses"] not in earlier:
        raise InvalidInput(f"{where}.uses", got=values["uses"], expected=f"an earlier task: one of {sorted(earlier)}")
    own = _values(where, Task, values)
    task = replace(earlier.get(values.get("uses", ""), Task()), **own)
    if "uses" in values:  # the task with the model
        task = replace(task, uses=earlier[values["uses"]].uses or values["uses"])
    with inside(where):
        _ = task.finetuning
    return task


def _values(where: str, kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options converted to the types of their fields."""
    types = get_type_hints(kind)
    unknown = sorted(map(str, set(values) - set(types)))
    if unknown:
        raise InvalidInput(where, got=unknown, expected=f"some of {sorted(types)}")
    converted: dict[str, Any] = {}
    for name, value in values.items():
        wanted = [kind for kind in (get_args(types[name]) or (types[name],)) if kind is not ...]
        if value is None and type(None) in wanted:
            converted[name] = None
        elif get_origin(types[name]) is tuple or any(get_origin(kind) is tuple for kind in wanted):
            inner = int if "int" in str(types[name]) else str
            items = value if isinstance(value, list) else [value]
            converted[name] = tuple(_single(f"{where}.{name}", item, [inner]) for item in items)
        else:
            converted[name] = _single(f"{where}.{name}", value, wanted)
    return converted


def _single(where: str, value: Any, wanted: Collection[type]) -> Any:
    if type(value) in wanted:
        return value
    if float in wanted and not isinstance(value, bool):
        with suppress(TypeError, ValueError):
            return float(value)  # YAML reads 1e-4 as a string
    names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in wanted)
    raise InvalidInput(where, got=repr(value), expected=f"a value of type {names}")


def _variant(where: str, name: str, values: dict[str, Any]) -> Variant:
    own = {f.name for f in fields(Variant)} - {"name", "settings"}
    known = own | set(LayerSettings.__dataclass_fields__)
    if not set(values) <= known:
        raise InvalidInput(where, got=sorted(set(values) - known), expected=f"some of {sorted(known)}")
    options = {key: value for key, value in values.items() if key in own}
    if "layers" in options:
        options["layers"] = _layers(f"{where}.layers", options["layers"])
    for key, kind in (("exact", bool), ("fresh", bool), ("seed", int)):
        if key in options:
            _single(f"{where}.{key}", options[key], [kind])
    if "finetune" in options:
        further = _named(where, {"finetune": options["finetune"]})["finetune"]
        options["finetune"] = _values(f"{where}.finetune", FinetuneOptions, further)
        with inside(f"{where}.finetune"):
            FinetuneOptions(**options["finetune"])
    settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k not in own}
    with inside(where):
        LayerSettings(**settings)
    return Variant(name=str(name), settings=settings, **options)


def _layers(where: str, layers: Any) -> str | tuple[int, ...]:
    if layers in ("all", "late", "each start"):
        return layers
    if isinstance(layers, list) and layers and all(type(number) is int for number in layers):
        return tuple(layers)
    raise InvalidInput(where, expected="a list of numbers, all, late or each start", got=repr(layers))


def select_late_layers(count: int) -> list[int]:
    """Return every other layer counted from the last, a quarter of all.

    >>> select_late_layers(12), select_late_layers(6)
    ([7, 9, 11], [3, 5])
    """
    return list(range(count - 1, -1, -2))[: max(1, math.ceil(count / 4))][::-1]


def expand_variants(
    variants: list[Variant], count: int, sliding: Collection[int] = ()
) -> Iterator[tuple[Variant, list[int]]]:
    """Yield variants and their layer numbers in a model of `count` layers. "all" leaves out layers with a sliding window."""
    for variant in variants:
        layers = variant.layers
        if layers == "each start":
            for start in range(count):
                yield replace(variant, name=f"{variant.name} from {start}"), list(range(start, count, 2))
        elif layers == "late":
            yield variant, select_late_layers(count)
        elif layers == "all":
            yield variant, [number for number in range(count) if number not in sliding]
        else:
            wrong = next((n for n in layers if not isinstance(n, int) or not -count <= n < count), None)
            if wrong is not None:
                expected = f"numbers from 0 to {count - 1}, as the model has {count} layers"
                raise InvalidInput(f"variants.{variant.name}.layers", got=wrong, expected=expected)
            yield variant, sorted({int(number) % count for number in layers})
