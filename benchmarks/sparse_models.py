"""Accuracy and sparsity of models with softmax, α = 1.5, α = 2 and learned α, on IMDB and the Python standard library.

    python -m benchmarks.sparse_models run PACKED OUT [--jobs 8] [--data imdb]
    python -m benchmarks.sparse_models time PACKED OUT
    python -m benchmarks.sparse_models write PACKED OUT

PACKED is the output of `benchmarks.document_models pack` for imdb. `run` trains every variant with two learning rates, and
two more seeds with the better one; it resumes where it stopped. `time` measures each model alone on the machine. `write`
makes the table and the pictures of benchmarks/results/. `--examples` limits the data, for a quick try.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import document_models
from benchmarks.measure import RESULTS, Section, medians, write_table
from hsa.analysis.sparse_tree import attention_tree, plot_sparse_tree
from hsa.analysis.sparsity import LevelSparsity, plot_sparsity, visited_fraction
from hsa.cli.runs import complete_recipe
from hsa.files import read_json, write_json
from hsa.models.saved import load_model
from hsa.training.accelerator import make_accelerator
from hsa.training.compare import Compared, Plan, compare_models
from hsa.training.data.prepare import PreparedData, prepare
from hsa.training.recipe import Recipe
from hsa.training.report import leaf_labels

VARIANTS: dict[str, Any] = {"softmax": None, "1.5": 1.5, "2": 2.0, "learned": "learned"}
PLAN = Plan(("hierarchical",), rates=(1e-3, 3e-3), seeds=(0, 1, 2))
TIMED = 64
"""Number of documents in the batch that is timed."""
SHOWN = 0.01
"""Smallest share of the families that a level needs to be shown; below it there is little to average over."""


@dataclass(frozen=True)
class Task:
    question: str
    recipe: Recipe

    def with_alpha(self, variant: str) -> Recipe:
        return replace(self.recipe, model=replace(self.recipe.model, entmax=VARIANTS[variant]))


def tasks() -> dict[str, Task]:
    reviews = document_models.TASKS["imdb"]
    programs = complete_recipe(Recipe(), quick=False)  # the defaults of `hsa train` without data
    same = document_models.recipe(reviews).training
    every = {name: getattr(same, name) for name in ("patience", "mixed_precision", "checkpoint_minutes")}
    programs = replace(programs, training=replace(programs.training, **every))
    return {
        "imdb": Task(reviews.question, document_models.recipe(reviews)),
        "python": Task("Python standard library: which package?", programs),
    }


def load(name: str, packed: Path, examples: int) -> PreparedData:
    read = tasks()[name].recipe.read
    data = document_models.load(name, packed) if name == "imdb" else prepare(None, read)
    if not examples:
        return data
    parts = {part: getattr(data, part) for part in document_models.SPLITS}
    few = {part: all_.select(np.arange(min(examples, len(all_)))) for part, all_ in parts.items()}
    return replace(data, **few)


def run_variant(
    plan: Plan, name: str, variant: str, packed: Path, out: Path, examples: int, data: PreparedData | None = None
) -> Compared:
    """Train all rates and seeds of the plan; finished runs are read from disk."""
    torch.set_num_threads(1 if torch.cuda.is_available() else torch.get_num_threads())
    recipe = tasks()[name].with_alpha(variant)
    accelerator = make_accelerator(recipe.training)
    data = data or load(name, packed, examples)
    (compared,) = compare_models(plan, recipe, data, out / name / variant, accelerator, resume=True)
    return compared


def run_part(plan: Plan, name: str, variant: str, *where: Any) -> str:
    compared = run_variant(plan, name, variant, *where)
    return f"{name}, {variant}: {' '.join(f'{score:.4f}' for score in compared.scores)} (rate {compared.rate})"


def run_all(names: Sequence[str], packed: Path, out: Path, jobs: int, examples: int) -> None:
    for name in names:
        load(name, packed, examples)  # fill the cache that the processes share
    # Slow variants first, so that the last runs are short.
    parts = [(name, variant, packed, out, examples) for variant in reversed(VARIANTS) for name in names]
    document_models.run_in_rounds(run_part, PLAN, parts, jobs)


def time_all(names: Sequence[str], packed: Path, out: Path, examples: int) -> None:
    """Measure the milliseconds to read a document, on the CPU and, if there is one, on a GPU."""
    for name in names:
        data = load(name, packed, examples)
        some = data.test.select(np.arange(min(TIMED, len(data.test))))
        times: dict[str, dict[str, float]] = {}
        for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
            times[device] = _times(name, packed, out, examples, some.batch.to(device), len(some))
        write_json(out / name / "times.json", times)
        print(name, times, flush=True)


def _times(name: str, packed: Path, out: Path, examples: int, batch: Any, documents: int) -> dict[str, float]:
    device = batch.hierarchy.device
    candidates: dict[str, Callable[[], Any]] = {}
    for variant in VARIANTS:
        compared = run_variant(PLAN, name, variant, packed, out, examples)  # finished runs: only reads their results
        model, _ = load_model(compared.runs[0].folder(out / name / variant), device)
        model.encoder.prepare(batch)
        candidates[variant] = partial(_read, model, batch, device)
    return {label: ms / documents for label, ms in medians(candidates, repeats=9).items()}


@torch.inference_mode()
def _read(model: Any, batch: Any, device: torch.device) -> None:
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        model(batch)
    if device.type == "cuda":
        torch.cuda.synchronize()


def write(names: Sequence[str], packed: Path, out: Path, examples: int) -> None:
    sections: list[Section] = []
    for name in names:
        task, data = tasks()[name], load(name, packed, examples)
        compared = {variant: run_variant(PLAN, name, variant, packed, out, examples, data) for variant in VARIANTS}
        times = read_json(out / name / "times.json", "times, from `time`")
        levels = {variant: _over_seeds(one) for variant, one in compared.items() if variant != "softmax"}
        lengths = data.train.lengths
        heading = (
            f"{task.question} {len(data.train):,} documents of {lengths.mean():,.0f} leaves on average, {len(data.test):,} "
            f"to test, {task.recipe.training.epochs} epochs, {task.recipe.model.layers} × {task.recipe.model.width}"
        )
        sections.append((heading, *_scores(compared, levels)))
        sections.append((f"{name}: level by level", *_levels(levels)))
        sections.append((f"{name}: milliseconds to read a document", *_time_table(times)))
        plot_sparsity(RESULTS / f"sparse_models_{name}.png", {_named(variant): own for variant, own in levels.items()})
        _draw(name, data, compared["learned"], out)
    notes = (
        "Accuracy: mean ± standard deviation over three seeds, at the learning rate that was best on validation data "
        "with the first seed. α: mean (range) over heads and seeds. Zeros: share of weights inside families that are "
        "exactly 0, in 256 test documents. Visited: share of (family, head) pairs that get a weight from above. "
        f"Levels with less than {100 * SHOWN:.0f} % of the families are not shown. Times: medians for {TIMED} "
        "documents at once, without gradients."
    )
    command = "python -m benchmarks.sparse_models run, time, write"
    write_table("sparse_models", "Sparse attention in trained models", sections, notes, command=command)


def _named(variant: str) -> str:
    return variant if variant in ("softmax", "learned") else f"α = {variant}"


def _over_seeds(compared: Compared) -> list[LevelSparsity]:
    """Merge the levels of all seeds: all their heads, and the means of their shares."""
    by_level: dict[tuple[int, int], list[LevelSparsity]] = {}
    for result in compared.results:
        for level in result.sparsity:
            by_level.setdefault((level.layer, level.level), []).append(level)
    total = sum(level.families for level in compared.results[0].sparsity if level.layer == 1)
    return [
        LevelSparsity(
            layer,
            height,
            tuple(alpha for level in levels for alpha in level.alpha),
            statistics.fmean(level.zeros for level in levels),
            statistics.fmean(level.visited or 0.0 for level in levels),
            levels[0].families,
        )
        for (layer, height), levels in by_level.items()
        if levels[0].families >= SHOWN * total
    ]


def _scores(compared: dict[str, Compared], levels: dict[str, list[LevelSparsity]]) -> tuple[list[str], list[list[Any]]]:
    rows = []
    for variant, one in compared.items():
        own = levels.get(variant)
        visited = None if own is None else visited_fraction(own)
        rows.append(
            [
                _named(variant),
                f"{one.results[0].parameters:,}",
                f"{one.rate:g}",
                f"{statistics.fmean(one.scores):.4f} ± {statistics.stdev(one.scores):.4f}",
                f"{one.mean(lambda result: float(result.scores.f1 or 0)):.4f}",
                "–" if own is None else f"{100 * statistics.fmean(level.zeros for level in own):.1f} %",
                "100 %" if visited is None else f"{100 * visited:.1f} %",
            ]
        )
    return ["attention", "parameters", "rate", "accuracy", "F1", "zeros, mean over levels", "visited"], rows


def _levels(levels: dict[str, list[LevelSparsity]]) -> tuple[list[str], list[list[Any]]]:
    rows = []
    for variant, own in levels.items():
        for level in own:
            low, high = min(level.alpha), max(level.alpha)
            spread = f" ({low:.2f}–{high:.2f})" if high > low else ""
            rows.append(
                [
                    _named(variant),
                    level.layer,
                    level.level,
                    f"{statistics.fmean(level.alpha):.3f}{spread}",
                    f"{100 * level.zeros:.1f} %",
                    f"{100 * (level.visited or 0):.1f} %",
                ]
            )
    return ["attention", "layer", "level", "α", "zeros", "visited"], rows


def _time_table(times: dict[str, dict[str, float]]) -> tuple[list[str], list[list[Any]]]:
    rows: list[list[Any]] = [
        [device, _named(variant), own[variant], own[variant] / own["softmax"]]
        for device, own in times.items()
        for variant in VARIANTS
    ]
    return ["device", "attention", "ms", "× softmax"], rows


def _draw(name: str, data: PreparedData, compared: Compared, out: Path) -> None:
    """Draw a test document with the attention of the first seed with learned α: the mean, and the leaf with most weight."""
    model, _ = load_model(compared.runs[0].folder(out / name / "learned"))
    fitting = np.flatnonzero(data.test.lengths <= 120)
    if not len(fitting):
        return
    example = data.test.select([fitting[data.test.lengths[fitting].argmax()]])
    mean = attention_tree(model, example.batch)
    top = int(mean.weights[mean.structure.leaf_nodes].argmax())
    labels, title = leaf_labels(example.batch, data), f"{tasks()[name].question} Learned α, first layer"
    plot_sparse_tree(RESULTS / f"sparse_models_{name}_mean.png", mean, labels, title)
    tree = attention_tree(model, example.batch, leaf=top)
    plot_sparse_tree(RESULTS / f"sparse_models_{name}_leaf.png", tree, labels, title)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "time", "write"))
    parser.add_argument("packed", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", default="imdb,python", help="data sets, separated by commas: imdb, python")
    parser.add_argument("--jobs", type=int, default=1, help="number of variants to train at a time")
    parser.add_argument("--examples", type=int, default=0, help="most examples of each part of the data; 0 for all")
    arguments = parser.parse_args()
    names = arguments.data.split(",")
    if arguments.what == "run":
        run_all(names, arguments.packed, arguments.out, arguments.jobs, arguments.examples)
    elif arguments.what == "time":
        time_all(names, arguments.packed, arguments.out, arguments.examples)
    else:
        write(names, arguments.packed, arguments.out, arguments.examples)


if __name__ == "__main__":
    main()
