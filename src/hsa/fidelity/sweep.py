"""Experiments with conversions: some tasks × some variants, fine-tuned and evaluated, as a recipe says.

A recipe is a YAML file:

    title: what it shows
    tasks:
      rte: {train: glue_rte.parquet, epochs: 5}        # the options of a `Task`
    variants:
      paper: {operator: hierarchical, hierarchy: windows, branching: [2, 4, 8, 16], layers: late}

A task with `uses: rte` takes the options and the fine-tuned model of that one, and changes what it names itself.

A variant holds settings of `convert`, and `layers`: numbers, "all", "late" (every other one from the last, a quarter of
all), or "each start" (one variant per start layer, every other layer from there). `finetune: {epochs: 1}` trains after
converting, `fresh: true` trains from new weights; a variant of `exact: true` converts nothing. Results are kept line by
line and not made again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import torch

from hsa.attention.flops import flops_flat, flops_regular
from hsa.errors import InvalidInput
from hsa.fidelity.examples import Examples, load_examples
from hsa.fidelity.finetuning import class_names, finetune, finish
from hsa.fidelity.judging import Answers, Judge
from hsa.fidelity.options import FinetuneOptions
from hsa.files import write_text
from hsa.huggingface.conversion import convert, revert
from hsa.huggingface.layers import attention_layers, slides
from hsa.huggingface.loading import load_for_task, load_for_training, most_tokens
from hsa.huggingface.settings import LayerSettings
from hsa.training.recipe import load_yaml

RESULTS = "results.jsonl"


@dataclass(frozen=True)
class Task:
    """A data set and how to fine-tune on it.

    Args:
        train, test: files in the data folder; one file for both if it has a column "split".
        text, test_text, join, label, split: as for `load_examples`.
        length: longest input in tokens.
        shortest: only test texts of at least so many tokens.
        limit: at most so many test texts, drawn at random.
        hub: the checkpoint that the paper used.
        hub_layers: the layers that the paper converted in it.
    """

    train: str | None = None
    test: str | None = None
    text: tuple[str, ...] = ()
    test_text: tuple[str, ...] = ()
    join: bool = False
    label: str | None = None
    split: str | None = None
    length: int = 256
    shortest: int = 0
    limit: int | None = None
    epochs: int = 3
    batch_size: int = 32
    learning_rate: float = 5e-5
    hub: str | None = None
    hub_layers: tuple[int, ...] | None = None
    uses: str | None = None


@dataclass(frozen=True)
class Variant:
    """A way to convert."""

    name: str
    layers: str | tuple[int, ...] = "all"
    exact: bool = False
    fresh: bool = False
    seed: int = 0
    finetune: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SweepRecipe:
    title: str
    tasks: dict[str, Task]
    variants: list[Variant]


def load_sweep(path: Path, only: Collection[str] = ()) -> SweepRecipe:
    """A recipe, or only some of its tasks. Raises InvalidInput, naming the file and what in it does not fit."""
    given = load_yaml(path)
    unknown = sorted(map(str, set(given) - {"title", "tasks", "variants"}))
    if unknown or not given.get("tasks") or not given.get("variants"):
        raise InvalidInput(str(path), given=unknown or sorted(given), expected="title, tasks and variants")
    tasks: dict[str, Task] = {}
    for name, values in _named(f"{path}: tasks", given["tasks"]).items():
        tasks[str(name)] = _task(f"{path}: tasks.{name}", values, tasks)
    variants = [
        _variant(f"{path}: variants.{name}", name, values)
        for name, values in _named(f"{path}: variants", given["variants"]).items()
    ]
    missing = sorted(set(only) - set(tasks))
    if missing:
        raise InvalidInput("tasks", given=missing[0], expected=f"some of {', '.join(tasks)}")
    chosen = {name: task for name, task in tasks.items() if not only or name in only}
    return SweepRecipe(str(given.get("title", path.stem)), chosen, variants)


def _named(where: str, given: Any) -> dict[Any, dict[str, Any]]:
    """Names, each with options by name; nothing is no options."""
    if not isinstance(given, dict):
        raise InvalidInput(where, given=f"a {type(given).__name__}", expected="names, each with its options")
    for name, values in given.items():
        if not isinstance(values, (dict, type(None))):
            raise InvalidInput(f"{where}.{name}", given=repr(values), expected="options, such as {epochs: 3}")
    return {name: values or {} for name, values in given.items()}


def _task(where: str, values: dict[str, Any], earlier: Mapping[str, Task]) -> Task:
    if "uses" in values and values["uses"] not in earlier:
        raise InvalidInput(f"{where}.uses", given=values["uses"], expected=f"a task before it: {sorted(earlier)}")
    own = _values(where, Task, values)
    task = replace(earlier.get(values.get("uses", ""), Task()), **own)
    if "uses" in values:  # the one that has the model
        task = replace(task, uses=earlier[values["uses"]].uses or values["uses"])
    with _inside(where):
        _options(task)
    return task


def _values(where: str, kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Options by name, as their types want them."""
    types = get_type_hints(kind)
    unknown = sorted(map(str, set(values) - set(types)))
    if unknown:
        raise InvalidInput(where, given=unknown, expected=f"some of {sorted(types)}")
    found: dict[str, Any] = {}
    for name, value in values.items():
        wanted = [kind for kind in (get_args(types[name]) or (types[name],)) if kind is not ...]
        if value is None and type(None) in wanted:
            found[name] = None
        elif get_origin(types[name]) is tuple or any(get_origin(kind) is tuple for kind in wanted):
            inner = int if "int" in str(types[name]) else str
            items = value if isinstance(value, list) else [value]
            found[name] = tuple(_single(f"{where}.{name}", item, [inner]) for item in items)
        else:
            found[name] = _single(f"{where}.{name}", value, wanted)
    return found


def _single(where: str, value: Any, wanted: Collection[type]) -> Any:
    if type(value) in wanted:
        return value
    if float in wanted and not isinstance(value, bool):
        with suppress(TypeError, ValueError):
            return float(value)  # YAML takes 1e-4 for a string
    names = " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in wanted)
    raise InvalidInput(where, given=repr(value), expected=f"a value of type {names}")


@contextmanager
def _inside(where: str) -> Iterator[None]:
    """Says in which part of a recipe an option stands that does not fit."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(
            f"{where}.{error.where}", given=error.given, expected=error.expected, fix=error.fix
        ) from None


def _variant(where: str, name: str, values: dict[str, Any]) -> Variant:
    own = {f.name for f in fields(Variant)} - {"name", "settings"}
    known = own | set(LayerSettings.__dataclass_fields__)
    if not set(values) <= known:
        raise InvalidInput(where, given=sorted(set(values) - known), expected=f"some of {sorted(known)}")
    options = {key: value for key, value in values.items() if key in own}
    if "layers" in options:
        options["layers"] = _layers(f"{where}.layers", options["layers"])
    for key, kind in (("exact", bool), ("fresh", bool), ("seed", int)):
        if key in options:
            _single(f"{where}.{key}", options[key], [kind])
    if "finetune" in options:
        further = _named(where, {"finetune": options["finetune"]})["finetune"]
        options["finetune"] = _values(f"{where}.finetune", FinetuneOptions, further)
        with _inside(f"{where}.finetune"):
            FinetuneOptions(**options["finetune"])
    settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k not in own}
    with _inside(where):
        LayerSettings(**settings)
    return Variant(name=str(name), settings=settings, **options)


def _layers(where: str, given: Any) -> str | tuple[int, ...]:
    if given in ("all", "late", "each start"):
        return given
    if isinstance(given, list) and given and all(type(number) is int for number in given):
        return tuple(given)
    raise InvalidInput(where, given=repr(given), expected="numbers, all, late or each start")


def late_layers(count: int) -> list[int]:
    """Every other layer from the last, a quarter of them.

    >>> late_layers(12), late_layers(6)
    ([7, 9, 11], [3, 5])
    """
    return list(range(count - 1, -1, -2))[: max(1, math.ceil(count / 4))][::-1]


def expanded(variants: list[Variant], count: int, sliding: Collection[int] = ()) -> Iterator[tuple[Variant, list[int]]]:
    """Variants with their layers as numbers, for a model of so many layers; "all" are those that do not slide."""
    for variant in variants:
        layers = variant.layers
        if layers == "each start":
            for start in range(count):
                yield replace(variant, name=f"{variant.name} from {start}"), list(range(start, count, 2))
        elif layers == "late":
            yield variant, late_layers(count)
        elif layers == "all":
            yield variant, [number for number in range(count) if number not in sliding]
        else:
            wrong = next((n for n in layers if not isinstance(n, int) or not -count <= n < count), None)
            if wrong is not None:
                expected = f"0 to {count - 1}: the model has {count} layers"
                raise InvalidInput(f"variants.{variant.name}.layers", given=wrong, expected=expected)
            yield variant, sorted({int(number) % count for number in layers})


class Sweep:
    """A recipe on a model and a folder of data.

    Args:
        model: the encoder to fine-tune: a folder, or a name on the hub.
        given: task → a fine-tuned model to use for it.
        from_hub: take the checkpoints that the paper used.
        say: told in a few words what is being done.
    """

    def __init__(
        self,
        recipe: SweepRecipe,
        model: str | None,
        data: Path,
        out: Path,
        *,
        given: Mapping[str, str] | None = None,
        from_hub: bool = False,
        device: str = "cpu",
        limit: int | None = None,
        say: Callable[[str], None] = lambda message: None,
    ):
        self.recipe = recipe
        self.model = model
        self.data = data
        self.out = out
        self.given = dict(given or {})
        self.from_hub = from_hub
        self.device = torch.device(device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.limit = limit
        self.say = say
        self.skipped: dict[str, str] = {}

    def run(self) -> Iterator[dict[str, Any]]:
        """The results, a row per task and variant, those of earlier runs in the same folder first."""
        earlier = self._earlier()
        yield from earlier
        for name, task in self.recipe.tasks.items():
            reason = self._why_not(name, task)
            if reason is not None:
                self._skip(name, reason)
                continue
            yield from self._task(name, task, {row["variant"] for row in earlier if row["task"] == name})

    def _skip(self, name: str, reason: str) -> None:
        self.skipped[name] = reason
        self.say(f"{name}: skipped: {reason}")

    def _earlier(self) -> list[dict[str, Any]]:
        path = self.out / RESULTS
        if not path.exists():
            return []
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]  # a run that was broken off may have left half a line
        if whole != text:
            write_text(path, whole)
        return [json.loads(line) for line in whole.splitlines()]

    def _keep(self, row: dict[str, Any]) -> dict[str, Any]:
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / RESULTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        return row

    def _why_not(self, name: str, task: Task) -> str | None:
        test = task.test or task.train
        if test is None or not (self.data / test).exists():
            return f"{test} is not in {self.data}"
        given = self._model_of(name, task) is not None
        fresh = any(variant.fresh for variant in self.recipe.variants)
        if given and not fresh and all(variant.finetune is None for variant in self.recipe.variants):
            return None
        if task.train is None:
            return "there is nothing to train on" + (
                "" if given else f"; give a fine-tuned model: --given {name}=FOLDER"
            )
        if self.model is None and (fresh or not given):
            return "no model: pass --model" + ("" if fresh else f", or --given {name}=FOLDER")
        return None if (self.data / task.train).exists() else f"{task.train} is not in {self.data}"

    def _task(self, name: str, task: Task, done: set[str]) -> Iterator[dict[str, Any]]:
        fresh = all(variant.fresh for variant in self.recipe.variants)  # then there is no original to compare with
        model, tokenizer = self._untrained(task) if fresh else self._classifier(name, task)
        modules = attention_layers(model)
        count, sliding = len(modules), {number for number, module in enumerate(modules) if slides(module)}
        variants = [(v, layers) for v, layers in expanded(self.recipe.variants, count, sliding) if v.name not in done]
        if self.from_hub and task.hub_layers:
            variants = [(v, list(task.hub_layers) if v.layers == "late" else layers) for v, layers in variants]
        if not variants:
            return
        test = self._test(name, task, tokenizer)
        if not len(test):
            self._skip(name, f"no test text has {task.shortest} tokens")
            return
        longest, budget = (
            min(task.length, most_tokens(model, tokenizer)),
            2**18 if self.device.type == "cuda" else 2**14,
        )
        judge = Judge(test, "classify", model, tokenizer, longest=longest, batch_tokens=budget)
        before = None if fresh else judge.ask(model)
        length = float(judge.tokens.lengths.mean())
        if before is not None and "original" not in done:
            yield self._keep(
                {
                    "task": name,
                    "variant": "original",
                    "examples": len(judge),
                    "mean length": length,
                    "layers": [],
                    "layer count": count,
                    **judge.scores(before),
                }
            )
        for variant, layers in variants:
            self.say(f"{name}: {variant.name}, layers {_ranges(layers)}")
            changed = self._changed(name, task, variant, layers, model, tokenizer)
            after = judge.ask(changed)
            yield self._keep(self._row(name, variant, layers, model, judge, before, after, length))
            revert(changed)

    def _row(
        self,
        name: str,
        variant: Variant,
        layers: list[int],
        model: Any,
        judge: Judge,
        before: Answers | None,
        after: Answers,
        length: float,
    ) -> dict[str, Any]:
        config = model.config
        counted = after.counted
        row = {
            "task": name,
            "variant": variant.name,
            "layers": [] if variant.exact else layers,
            "examples": len(judge),
            "mean length": length,
            **judge.scores(after),
            **({} if before is None else judge.compare(before, after)),
        }
        if variant.exact:
            return row
        converted = {n: counted.layers[n] for n in layers}
        exact = sum(counted.exact[n] for n in layers)
        row["ops ratio, converted layers"] = exact / sum(f.total for f in converted.values())
        row["attention ratio, converted layers"] = exact / sum(f.attention for f in converted.values())
        row["ops ratio, all layers"] = counted.ratio
        settings = LayerSettings(**variant.settings)
        if settings.operator == "hierarchical" and settings.hierarchy == "windows":
            width, heads, n = config.hidden_size, config.num_attention_heads, round(length)
            row["padded MFLOP per layer"] = flops_regular(n, settings.branching, width, heads) / 1e6
            row["flat MFLOP per layer"] = flops_flat(n, width, heads) / 1e6
        return row

    def _model_of(self, name: str, task: Task) -> str | None:
        """A fine-tuned model that is there already."""
        return self.given.get(name) or self.given.get(task.uses or name) or (task.hub if self.from_hub else None)

    def _classifier(self, name: str, task: Task, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
        source = self._model_of(name, task)
        folder = self.out / "models" / (task.uses or name)
        if source is None and not (folder / "config.json").exists():
            assert self.model is not None
            examples = self._training(task)
            self.say(f"{name}: fine-tuning on {len(examples):,} examples")
            torch.manual_seed(0)
            model, tokenizer = load_for_training(self.model, class_names(examples))
            model.to(self.device)
            finetune(model, tokenizer, examples, _options(task), folder=folder)
            finish(folder, model, tokenizer)
        return load_for_task(source or str(folder), "classify", dtype=dtype or self.dtype, device=self.device)

    def _untrained(self, task: Task) -> tuple[Any, Any]:
        assert self.model is not None
        return load_for_training(self.model, class_names(self._training(task)), fresh=True)

    def _training(self, task: Task) -> Examples:
        assert task.train is not None
        split = "train" if task.test is None else None
        return load_examples(self.data / task.train, text=task.text, label=task.label, split=split, join=task.join)

    def _test(self, name: str, task: Task, tokenizer: Any) -> Examples:
        test = load_examples(
            self.data / str(task.test or task.train),
            text=task.test_text or task.text,
            label=task.label,
            split=task.split,
            join=task.join,
        )
        if task.shortest:
            lengths = [
                len(ids) for ids in tokenizer([" ".join(texts) for texts in test.texts], verbose=False)["input_ids"]
            ]
            test = test.part(np.flatnonzero(np.array(lengths) >= task.shortest))
        return replace(test.sample(self.limit or task.limit), name=name)

    def _changed(self, name: str, task: Task, variant: Variant, layers: list[int], model: Any, tokenizer: Any) -> Any:
        """The model that a variant describes; the one given, converted, unless it is trained."""
        if not variant.fresh and variant.finetune is None:
            return model if variant.exact else convert(model, layers, tokenizer=tokenizer, **variant.settings)
        examples = self._training(task)
        torch.manual_seed(variant.seed)
        trained, _ = self._untrained(task) if variant.fresh else self._classifier(name, task, torch.float32)
        trained.to(self.device)
        if not variant.exact:
            convert(trained, layers, tokenizer=tokenizer, **variant.settings)
        options = replace(_options(task), seed=variant.seed, **dict(variant.finetune or {}))
        finetune(trained, tokenizer, examples, options)
        return trained.to(self.dtype)


def _options(task: Task) -> FinetuneOptions:
    return FinetuneOptions(
        epochs=task.epochs, batch_size=task.batch_size, learning_rate=task.learning_rate, length=task.length
    )


def _ranges(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"
