"""Sweeps over the tasks and variants of a recipe: fine-tuning, conversion, evaluation.

Each result is a line in a file. Results that are in the file are not computed again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hsa.attention.flops import flops_flat, flops_regular
from hsa.errors import InvalidInput
from hsa.files import parse_json, write_text
from hsa.huggingface.conversion import convert, revert
from hsa.huggingface.fidelity.examples import Examples, load_examples
from hsa.huggingface.fidelity.finetune import finetune, list_classes, save_finetuned
from hsa.huggingface.fidelity.judge import Answers, Judge
from hsa.huggingface.fidelity.sweep_recipe import SweepRecipe, Task, Variant, expand_variants
from hsa.huggingface.layers import attention_layers, why_not_convert
from hsa.huggingface.loading import load_for_task, load_for_training, most_tokens
from hsa.huggingface.settings import LayerSettings
from hsa.plain_values import check_fields

RESULTS = "results.jsonl"


class Sweep:
    """Sweep of a recipe over a model and a folder of data.

    Args:
        recipe: Tasks and variants.
        model: Encoder to fine-tune: a folder, or a name on the hub.
        data: Folder of the data files.
        out: Folder for results and fine-tuned models.
        given: Fine-tuned models to use, by task.
        from_hub: Whether to use the checkpoints of the paper.
        device: Device to run on.
        limit: Maximum number of test texts per task.
        say: Function called with a short message about each stage.
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
        """Yield a row per task and variant, first those of earlier runs in the same folder."""
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
        whole = text[: text.rfind("\n") + 1]  # an interrupted run may leave half a line
        if whole != text:
            write_text(path, whole)
        return [_row_of(line, f"{path}, line {number}") for number, line in enumerate(whole.splitlines(), start=1)]

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
            return "no training data" + ("" if given else f"; pass a fine-tuned model: --given {name}=FOLDER")
        if self.model is None and (fresh or not given):
            return "no model; pass --model" + ("" if fresh else f", or --given {name}=FOLDER")
        return None if (self.data / task.train).exists() else f"{task.train} is not in {self.data}"

    def _task(self, name: str, task: Task, done: set[str]) -> Iterator[dict[str, Any]]:
        fresh = all(variant.fresh for variant in self.recipe.variants)  # without an original to compare with
        model, tokenizer = self._untrained(task) if fresh else self._classifier(name, task)
        modules = attention_layers(model)
        count, sliding = len(modules), {number for number, module in enumerate(modules) if why_not_convert(module)}
        variants = [
            (v, layers) for v, layers in expand_variants(self.recipe.variants, count, sliding) if v.name not in done
        ]
        if self.from_hub and task.hub_layers:
            variants = [(v, list(task.hub_layers) if v.layers == "late" else layers) for v, layers in variants]
        if not variants:
            return
        test = self._test(name, task, tokenizer)
        if not len(test):
            self._skip(name, f"no test text has at least {task.min_tokens} tokens")
            return
        longest, budget = (
            min(task.max_tokens, most_tokens(model, tokenizer)),
            2**18 if self.device.type == "cuda" else 2**14,
        )
        judge = Judge(test, "classification", model, tokenizer, longest=longest, batch_tokens=budget)
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
        settings = LayerSettings(**variant.settings).resolved(causal=False)
        if (settings.kind, settings.tree) == ("hierarchical", "windows"):
            width, heads, n = config.hidden_size, config.num_attention_heads, round(length)
            assert settings.branching is not None
            row["padded MFLOP per layer"] = flops_regular(n, settings.branching, width, heads) / 1e6
            row["flat MFLOP per layer"] = flops_flat(n, width, heads) / 1e6
        return row

    def _model_of(self, name: str, task: Task) -> str | None:
        """Return the existing fine-tuned model of a task, if there is one."""
        return self.given.get(name) or self.given.get(task.uses or name) or (task.hub if self.from_hub else None)

    def _classifier(self, name: str, task: Task, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
        source = self._model_of(name, task)
        folder = self.out / "models" / (task.uses or name)
        if source is None and not (folder / "config.json").exists():
            assert self.model is not None
            examples = self._training(task)
            self.say(f"{name}: fine-tuning on {len(examples):,} examples")
            torch.manual_seed(0)
            model, tokenizer = load_for_training(self.model, list_classes(examples))
            model.to(self.device)
            finetune(model, tokenizer, examples, task.finetuning, folder=folder)
            save_finetuned(folder, model, tokenizer)
        return load_for_task(source or str(folder), "classification", dtype=dtype or self.dtype, device=self.device)

    def _untrained(self, task: Task) -> tuple[Any, Any]:
        assert self.model is not None
        return load_for_training(self.model, list_classes(self._training(task)), fresh=True)

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
        if task.min_tokens:
            lengths = [
                len(ids) for ids in tokenizer([" ".join(texts) for texts in test.texts], verbose=False)["input_ids"]
            ]
            test = test.part(np.flatnonzero(np.array(lengths) >= task.min_tokens))
        return replace(test.sample(self.limit or task.limit), name=name)

    def _changed(self, name: str, task: Task, variant: Variant, layers: list[int], model: Any, tokenizer: Any) -> Any:
        """Return the model of a variant: the passed one, converted, or a newly trained one."""
        if not variant.fresh and variant.finetune is None:
            return model if variant.exact else convert(model, layers, tokenizer=tokenizer, **variant.settings)
        examples = self._training(task)
        torch.manual_seed(variant.seed)
        trained, _ = self._untrained(task) if variant.fresh else self._classifier(name, task, torch.float32)
        trained.to(self.device)
        if not variant.exact:
            convert(trained, layers, tokenizer=tokenizer, **variant.settings)
        options = replace(task.finetuning, seed=variant.seed, **dict(variant.finetune or {}))
        finetune(trained, tokenizer, examples, options)
        return trained.to(self.dtype)


def _row_of(line: str, where: str) -> dict[str, Any]:
    try:
        row = parse_json(line, where)
    except InvalidInput as error:
        raise error.moved(error.where, fix="Remove the line to compute its result again") from None
    check_fields(row, ("task", "variant"), where)
    return row


def _ranges(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"
