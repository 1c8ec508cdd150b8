"""Report of `hsa compare`: a table, the differences between models, plots, and everything as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hsa.analysis.cost_plots import Cost, cost_table, plot_costs
from hsa.analysis.frontier import on_frontier
from hsa.analysis.tables import TerminalTable, markdown_table, terminal_table
from hsa.files import write_json, write_text
from hsa.models.registry import configure
from hsa.training.compare import Compared, Plan
from hsa.training.data.prepare import PreparedData
from hsa.training.experiment import Result
from hsa.training.failures import SMALLER
from hsa.training.learning import unlearned_lines, why_unlearned
from hsa.training.recipe import Recipe
from hsa.training.reference import Reference, References
from hsa.training.report import describe_gain, fewer_operations, format_known, options_section, words_lines

JSON = "comparison.json"
CAPTION = (
    "±: standard deviation over seeds; operations: attention operations per test example, all layers; train s: per run; "
    "test ms: per example; MiB: peak memory in training; on the frontier: costs for which no other model is better"
)
_OPTIONAL = ("MiB", "parameters", "rate", "F1", "error")
_SAME_SIZE = 0.02
"""Relative difference in parameters below which models count as equally large."""


@dataclass(frozen=True)
class Comparison:
    """Results of a comparison.

    Attributes:
        plan: Models, learning rates and seeds.
        recipe: Options of data, models and training.
        prepared: Data.
        compared: Runs of every model.
        references: Scores of simple answers on the same data.
        costs: Costs by document length; empty if not measured.
        device: Description of the device.
    """

    plan: Plan
    recipe: Recipe
    prepared: PreparedData
    compared: Sequence[Compared]
    references: References
    costs: Sequence[Cost] = ()
    device: str = "this CPU"

    @property
    def score(self) -> str:
        """Name of the main score."""
        return "accuracy" if self.prepared.test.classes else "R²"

    @property
    def finished(self) -> list[Compared]:
        """Models with a result."""
        return [model for model in self.compared if model.results]

    def milliseconds(self, model: Compared) -> float:
        """Return the mean time per test example in milliseconds."""
        return 1e3 * model.test_seconds / len(self.prepared.test)

    @property
    def cost_of(self) -> dict[str, Callable[[Compared], float]]:
        """Functions that return the costs of a model, by name; without training time if that is fixed."""
        training: dict[str, Callable[[Compared], float]] = {"training": lambda model: model.training_seconds}
        others = {"test": self.milliseconds, "operations": lambda model: model.operations}
        return others if self.recipe.training.minutes else training | others

    def frontiers(self) -> dict[str, list[str]]:
        """Return for every model the costs for which no other model is better."""
        names: dict[str, list[str]] = {model.model: [] for model in self.compared}
        for name, cost in self.cost_of.items():
            points = [(cost(model), statistics.fmean(model.scores)) for model in self.finished]
            for model, best in zip(self.finished, on_frontier(points), strict=True):
                if best:
                    names[model.model].append(name)
        return names

    def columns(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and the rows of the table."""
        shown = self.references.constant.scores.shown
        header = ["model", "parameters", "rate", *shown, "operations", "train s", "test ms", "MiB"]
        frontiers = self.frontiers()
        rows = []
        for model in self.compared:
            if not model.results:
                endings = ", ".join(dict.fromkeys(run.state for run in model.failed))
                rows.append([model.model, *["–"] * 2, endings, *["–"] * 6])
                continue
            peak = model.peak_memory
            rows.append(
                [
                    model.model,
                    f"{model.results[0].parameters:,}",
                    f"{model.rate:g}",
                    _with_spread(model.scores),
                    f"{model.mean(self._second):.4f}",
                    f"{model.operations / 1e6:.2f} M" if model.operations else "0",
                    f"{model.training_seconds:.1f}",
                    f"{self.milliseconds(model):.2f}",
                    "–" if peak is None else f"{peak:,.0f}",
                    ", ".join(frontiers[model.model]) or "–",
                ]
            )
        return [*header, "on the frontier"], rows + list(map(self._reference_row, self.references.all))

    def _reference_row(self, reference: Reference) -> list[str]:
        return [
            reference.name,
            format_known(reference.parameters, ","),
            "–",
            *(f"{score:.4f}" for score in reference.scores.shown.values()),
            "–",
            format_known(reference.training_seconds, ".1f"),
            format_known(self._per_example(reference), ".2f"),
            "–",
            "–",
        ]

    def _per_example(self, reference: Reference) -> float | None:
        """Return the mean time per test example in milliseconds."""
        return None if reference.test_seconds is None else 1e3 * reference.test_seconds / len(self.prepared.test)

    def _second(self, result: Result) -> float:
        scores = result.scores
        score = scores.f1 if self.prepared.test.classes else scores.mean_absolute_error
        return float(score or 0.0)

    def table(self) -> TerminalTable:
        """Return the table for the terminal."""
        return terminal_table(*self.columns(), CAPTION, _OPTIONAL)

    def findings(self) -> list[str]:
        """Return models that learned nothing, the gains of the first model, the frontier, and remarks, one line each."""
        lines = []
        if self.finished:
            constant = self.references.constant
            reasons = {m.model: why_unlearned(m.results, self.prepared, constant) for m in self.finished}
            lines = unlearned_lines(reasons, self.prepared, "other --rates")
            first, *others = self.finished
            lines += [self._against(first, o) for o in others if None in (reasons[first.model], reasons[o.model])]
            lines += words_lines(first.model, first.scores, self.references, self.prepared)
            if None in reasons.values():
                cost = next(iter(self.cost_of))
                best = [name for name, costs in self.frontiers().items() if cost in costs]
                lines.append(f"on the frontier of {self.score} and {cost} time: {', '.join(best)}")
        return lines + self._remarks()

    def _against(self, first: Compared, other: Compared) -> str:
        ratio = first.training_seconds / other.training_seconds
        time = f"trains {ratio:.1f} × slower" if ratio > 1 else f"trains {1 / ratio:.1f} × faster"
        if abs(ratio - 1) <= 0.05:
            time = "equal training time"
        operations = fewer_operations(first.operations, other.operations)
        gain = describe_gain(first.scores, other.scores, self.prepared)
        return f"{first.model} against {other.model}: {gain}{operations}, {time}"

    def _remarks(self) -> list[str]:
        """Return limitations of the comparison, one line each."""
        lines, rates = [], sorted(self.plan.rates)
        for rate, which, other in ((rates[-1], "highest", "higher"), (rates[0], "lowest", "lower")):
            at_end = [model.model for model in self.finished if model.rate == rate]
            if at_end and len(rates) > 1:
                lines.append(f"{', '.join(at_end)} did best at the {which} rate, {rate:g}; {other} rates may be better")
        for model in self.compared:
            lines += self._failures(model)
        if any(run.state == "out of memory" for model in self.compared for run in model.failed):
            lines.append(
                "to retry the runs that ran out of memory, free memory and pass --resume; or compare in another folder "
                f"with {SMALLER}"
            )
        minutes = self.recipe.training.minutes
        early = [model.model for model in self.finished if model.training_seconds < 0.95 * 60 * minutes]
        if early:
            lines.append(f"{', '.join(early)} stopped before {minutes:g} min because of --epochs or --patience")
        sizes = {model.model: model.results[0].parameters for model in self.finished}
        first, reference = next(iter(sizes.items()), ("", 0))
        for name, size in sizes.items():
            if abs(size - reference) > _SAME_SIZE * reference:
                more = "more" if size > reference else "fewer"
                why = "its size cannot be matched more closely"
                if self._has_fixed_size(name):
                    why = "it keeps the size of its pre-trained encoder"
                lines.append(f"{name} has {abs(size / reference - 1):.0%} {more} parameters than {first}: {why}")
        return lines

    def _has_fixed_size(self, name: str) -> bool:
        hierarchy = self.prepared.train.batch.hierarchy
        return configure(name, self.recipe.model, self.recipe.extra, hierarchy).has_fixed_size

    @staticmethod
    def _failures(model: Compared) -> list[str]:
        if not model.results and len({run.state for run in model.failed}) == 1:
            all_same = {
                "diverged": "diverged at every rate; try lower ones",
                "out of memory": "ran out of memory at every rate",
            }
            return [f"{model.model} {all_same[model.failed[0].state]}"]
        words = {"diverged": "diverged", "out of memory": "ran out of memory"}
        return [f"{model.model} {words[run.state]} at rate {run.rate:g}, seed {run.seed}" for run in model.failed]

    def to_json(self) -> dict[str, Any]:
        """Return everything in plain values, for scripts."""
        prepared, recipe = self.prepared, self.recipe
        sizes = {name: len(getattr(prepared, name)) for name in ("train", "validation", "test")}
        parts = (recipe.read, recipe.model, *recipe.extra.values(), recipe.training)
        options = {name: _plain(value) for part in parts for name, value in asdict(part).items()}
        return {
            "data": prepared.name,
            "task": prepared.task,
            "examples": sizes,
            "device": self.device,
            "rates": list(self.plan.rates),
            "seeds": list(self.plan.seeds),
            "models": [self._model_json(model) for model in self.compared],
            "references": [self._reference_json(reference) for reference in self.references.all],
            "findings": self.findings(),
            "costs": [
                {"model": c.kind, "length": c.length, "operations": c.operations, "seconds": c.seconds}
                for c in self.costs
            ],
            "options": {name: value for name, value in options.items() if name not in ("learning_rate", "seed")},
        }

    def _reference_json(self, reference: Reference) -> dict[str, Any]:
        return {
            "name": reference.name,
            **{name: score for name, score in asdict(reference.scores).items() if score is not None},
            "parameters": reference.parameters,
            "training_seconds": reference.training_seconds,
            "test_milliseconds": self._per_example(reference),
        }

    def _model_json(self, model: Compared) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "model": model.model,
            "rate": model.rate,
            "validation": {f"{run.rate:g}": None if run.result is None else run.validation[0] for run in model.tried},
            **{
                name: [{"rate": run.rate, "seed": run.seed} for run in model.failed if run.state == state]
                for name, state in (("diverged", "diverged"), ("out_of_memory", "out of memory"))
            },
            "on_frontier": self.frontiers()[model.model],
        }
        if not model.results:
            return entry
        score = "accuracy" if self.prepared.test.classes else "r2"
        second = "f1" if self.prepared.test.classes else "mean_absolute_error"
        return entry | {
            "folder": str(model.runs[0].folder(Path())),
            "parameters": model.results[0].parameters,
            score: statistics.fmean(model.scores),
            f"{score}_std": _spread(model.scores),
            second: model.mean(self._second),
            "operations": model.operations,
            "training_seconds": model.training_seconds,
            "test_milliseconds": self.milliseconds(model),
            "peak_memory_mib": model.peak_memory,
            "runs": [
                {
                    "seed": run.seed,
                    score: run.result.scores.main,
                    second: self._second(run.result),
                    "training_seconds": run.result.training_seconds,
                    "test_seconds": run.result.test_seconds,
                    "peak_memory_mib": run.result.peak_memory,
                    "epochs": run.result.epochs,
                }
                for run in model.runs
                if run.result is not None
            ],
        }

    def write(self, folder: Path) -> list[Path]:
        """Write `comparison.json`, `report.md` and its plots; return the plots."""
        pictures = self._pictures(folder)
        content = self.to_json()
        write_json(folder / JSON, content)
        lines = [f"# {self.prepared.name}: {', '.join(self.plan.models)}", "", *markdown_table(*self.columns())]
        lines += ["", f"{CAPTION[0].upper()}{CAPTION[1:]}.", "", *(f"- {line}" for line in content["findings"]), ""]
        lines += [f"![{picture.stem}]({picture.name})" for picture in pictures]
        lines += ["", f"## Validation {self.score} by learning rate, seed {self.plan.seeds[0]}", ""]
        lines += markdown_table(["model", *(f"{rate:g}" for rate in self.plan.rates)], self._rate_rows())
        if self.costs:
            lines += [
                "",
                f"## Cost by document length: attention operations, time of a forward pass ({self.device})",
                "",
            ]
            lines += markdown_table(*cost_table(self.costs))
        lines += options_section(content["options"])
        write_text(folder / "report.md", "\n".join(lines))
        return pictures

    def _rate_rows(self) -> list[list[str]]:
        return [
            [model.model, *(run.state if run.result is None else f"{run.validation[0]:.4f}" for run in model.tried)]
            for model in self.compared
        ]

    def _pictures(self, folder: Path) -> list[Path]:
        from hsa.analysis.plots import plot_curves
        from hsa.training.compare_plots import Point, plot_frontiers

        pictures = []
        if self.finished:
            names = {
                "training": "training time per run, s",
                "test": "test time per example, ms",
                "operations": "attention operations per example",
            }
            panels = {
                names[name]: [
                    Point(m.model, cost(m), statistics.fmean(m.scores), _spread(m.scores)) for m in self.finished
                ]
                for name, cost in self.cost_of.items()
            }
            pictures += [folder / "frontier.png", folder / "curves.png"]
            plot_frontiers(pictures[0], panels, f"test {self.score}", self.prepared.name)
            plot_curves(pictures[1], {m.model: m.results[0].history for m in self.finished}, self.score)
        if self.costs:
            pictures.append(folder / "costs.png")
            plot_costs(pictures[-1], self.costs, self.device)
        return pictures


def _spread(scores: Sequence[float]) -> float | None:
    return statistics.stdev(scores) if len(scores) > 1 else None


def _with_spread(scores: Sequence[float]) -> str:
    """Format the mean of the scores and their standard deviation.

    >>> _with_spread([0.5, 0.75]), _with_spread([0.5])
    ('0.6250 ± 0.1768', '0.5000')
    """
    spread = _spread(scores)
    return f"{statistics.fmean(scores):.4f}" + ("" if spread is None else f" ± {spread:.4f}")


def _plain(value: Any) -> Any:
    """Convert a path to a string, for JSON."""
    return str(value) if isinstance(value, Path) else value
