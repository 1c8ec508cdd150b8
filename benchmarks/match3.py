"""Accuracy of three-way attention on Match3: `python -m benchmarks.match3 FOLDER [--device cuda] [--processes 4]`.

One layer of three-way attention is compared with baselines of equal size, with the options of recipes/match3.yaml. For every
model, validation accuracy with seed 0 chooses the learning rate and the lengths of the training sequences; then three seeds
of weights and data are trained. Finished runs are read from FOLDER. The table and the picture of the cost go to
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import RESULTS, Section, write_table
from hsa.analysis.cost_plots import cost_table, plot_costs
from hsa.models.classifier import equal_parameters
from hsa.research.match3.data import prepare_match3, rules
from hsa.research.trilinear.costs import costs
from hsa.training.accelerator import make_accelerator
from hsa.training.experiment import Result, model_config, train_model
from hsa.training.recipe import Recipe, load_recipe

RECIPE = Path(__file__).parent.parent / "recipes" / "match3.yaml"
MODELS: dict[str, dict[str, Any]] = {
    "three-way, 1 layer": {},
    "pairs, 1 layer": {"kind": "flat"},
    "pairs, 2 layers": {"kind": "flat", "layers": 2},
    "no attention": {"kind": "none"},
}
LONGER = {"pairs, 1 layer": 3}
"""Models that are also trained for longer, and the factor on the epochs."""
RATES = (1e-3, 2e-3)
SEEDS = (0, 1, 2)
NOTES = (
    "Accuracy: per number, mean ± standard deviation over three seeds of weights and data. Short: training sequences "
    "have 3 to 8 numbers; full: 8. Validation and test sequences always have 8. Models of one layer have equal "
    "parameters, by the width of their feed-forward networks; the model of two layers has more. Learning rate and "
    "sequences (short or full) are the best on validation data with seed 0, for each model; longer runs use those of "
    "the shorter. Cost: attention of one layer, 4 heads of 32 channels, on one sequence; operations, and the median "
    "of three forward passes on one CPU thread where they do not take too long."
)


@dataclass(frozen=True)
class Run:
    """One training run."""

    model: str
    rate: float
    short: bool
    epochs: int
    seed: int

    @property
    def folder(self) -> str:
        words = "-".join(self.model.replace(",", "").split())
        return f"{words}-{self.rate:g}-{'short' if self.short else 'full'}-{self.epochs}-{self.seed}"


def trained(run: Run, folder: Path, device: str) -> Result:
    """Return the result of a run; an unfinished run is resumed."""
    torch.set_num_threads(1)
    recipe = load_recipe(RECIPE)
    options3 = recipe.group("match3")
    match3 = replace(options3, shortest=options3.shortest if run.short else options3.length)
    options = replace(recipe.training, learning_rate=run.rate, epochs=run.epochs, seed=run.seed)
    data = prepare_match3(None, match3, seed=run.seed)
    config = model_config(data, recipe.model, "trilinear", "trilinear")
    if changes := MODELS[run.model]:
        # Two layers of attention would leave no parameters for feed-forward networks, so this model may have more.
        wider = replace(config, encoder=replace(config.encoder, **changes))
        config = wider if "layers" in changes else equal_parameters(config, replace(config.encoder, **changes))
    accelerator = make_accelerator(options, cpu=device == "cpu")
    result = train_model(run.model, config, data, options, folder / run.folder, accelerator, resume=True)
    print(f"{run.folder}: validation {best_validation(result):.4f}, test {result.scores.main:.4f}", flush=True)
    return result


def best_validation(result: Result) -> float:
    return max(record.validation for record in result.history)


def accuracy_rows(folder: Path, recipe: Recipe, device: str, pool: ProcessPoolExecutor) -> list[list[Any]]:
    """Return a row per model: the best settings and their accuracy."""
    epochs = recipe.training.epochs
    grid = [Run(name, rate, short, epochs, 0) for name in MODELS for rate in RATES for short in (True, False)]
    tried = dict(zip(grid, pool.map(partial(trained, folder=folder, device=device), grid), strict=True))
    best = {name: max((r for r in grid if r.model == name), key=lambda r: best_validation(tried[r])) for name in MODELS}
    longer = [replace(best[name], epochs=times * epochs) for name, times in LONGER.items()]
    wanted = [replace(run, seed=seed) for run in (*longer, *best.values()) for seed in SEEDS]  # longest first
    finished = dict(zip(wanted, pool.map(partial(trained, folder=folder, device=device), wanted), strict=True))
    rows = []
    for run in sorted((*best.values(), *longer), key=lambda r: list(MODELS).index(r.model)):
        results = [finished[replace(run, seed=seed)] for seed in SEEDS]
        tests = [100 * result.scores.main for result in results]
        accuracy = f"{statistics.mean(tests):.2f} ± {statistics.stdev(tests):.2f}"
        settings = [f"{run.rate:g}", "short" if run.short else "full", run.epochs]
        rows.append([run.model, f"{results[0].parameters:,}", *settings, accuracy, f"{min(tests):.2f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    recipe = load_recipe(RECIPE)
    context = torch.multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, mp_context=context) as pool:
        rows = accuracy_rows(arguments.folder, recipe, arguments.device, pool)
    torch.set_num_threads(1)
    header = [
        "model",
        "parameters",
        "learning rate",
        "sequences",
        "epochs",
        "test accuracy, %",
        "worst seed, %",
    ]
    match3 = recipe.group("match3")
    known = rules(prepare_match3(None, match3), match3.modulus)
    measured = costs(recipe.model.heads, recipe.model.heads * (recipe.model.head_dim or 0))
    plot_costs(RESULTS / "match3.png", measured)
    sections: list[Section] = [
        ("Accuracy", header, rows),
        (
            "Rules that do not look at three numbers",
            ["rule", "test accuracy, %"],
            [[k, f"{100 * v:.2f}"] for k, v in known.items()],
        ),
        ("Cost by length", *cost_table(measured)),
    ]
    command = f"python -m benchmarks.match3 FOLDER --device {arguments.device} --processes {arguments.processes}"
    title = f"Match3: {match3.length} numbers modulo {match3.modulus}"
    write_table("match3", title, sections, f"{NOTES}\n\n![cost](match3.png)", command=command)


if __name__ == "__main__":
    main()
