"""Report on the fidelity and savings of a conversion, as tables, JSON and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hsa.analysis.tables import markdown_table
from hsa.files import write_json, write_text
from hsa.huggingface.fidelity.calibrate import Budget, Calibration
from hsa.huggingface.fidelity.judge import Answers, Judge
from hsa.huggingface.fidelity.plots import PARTS, plot_frontier, plot_operations, plot_sensitivity, plot_timing
from hsa.huggingface.fidelity.timing import Timed
from hsa.huggingface.settings import LayerSettings


@dataclass(frozen=True)
class Report:
    """Measurements of a conversion."""

    model: str
    data: str
    task: str
    examples: int
    mean_length: float
    settings: dict[int, LayerSettings]
    original: dict[str, float]
    converted: dict[str, float]
    comparison: dict[str, float]
    layers: list[dict[str, float]]  # operations per example, by purpose
    timed: list[Timed] = field(default_factory=list)
    calibration: Calibration | None = None
    budget: str | None = None

    @classmethod
    def of(
        cls,
        model: str,
        judge: Judge,
        settings: dict[int, LayerSettings],
        before: Answers,
        after: Answers,
        *,
        timed: Sequence[Timed] = (),
        calibration: Calibration | None = None,
        budget: str | None = None,
    ) -> Report:
        """Build the report from the answers before and after a conversion."""
        counted, n = after.counted, len(judge)
        layers = [
            {
                "layer": number,
                **{part: getattr(counted.layers[number], part) / n for part in PARTS},
                "exact": counted.exact[number] / n,
            }
            for number in sorted(counted.layers)
        ]
        return cls(
            model=model,
            data=judge.examples.name,
            task=judge.task,
            examples=n,
            mean_length=float(judge.tokens.lengths.mean()),
            settings=settings,
            original=judge.scores(before),
            converted=judge.scores(after),
            comparison=judge.compare(before, after),
            layers=layers,
            timed=list(timed),
            calibration=calibration,
            budget=budget,
        )

    @property
    def ratio(self) -> float:
        """Factor by which the operations of attention in all layers fall, everything counted."""
        taken = sum(layer[part] for layer in self.layers for part in PARTS)
        return sum(layer["exact"] for layer in self.layers) / taken if taken else 1.0

    @property
    def unit(self) -> str:
        """Noun for an example."""
        return "piece" if self.task == "lm" else "text"

    @property
    def summary(self) -> str:
        converted = f"{len(self.settings)} of {len(self.layers)} layers" if self.settings else "no layer"
        return (
            f"{self.examples:,} {self._lengths}; {converted} converted; {self.ratio:.2f} times fewer operations of "
            "attention, all counted"
        )

    @property
    def _lengths(self) -> str:
        if self.task == "lm":
            return f"pieces of {self.mean_length:,.0f} tokens"
        return f"texts of {self.mean_length:.0f} tokens on average"

    def score_rows(self) -> list[list[str]]:
        rows = [
            [name, f"{value:.4f}", f"{self.converted[name]:.4f}", _change(name, value, self.converted[name])]
            for name, value in self.original.items()
        ]
        if "perplexity change error" in self.comparison:
            error = f" ± {100 * self.comparison['perplexity change error']:.2f} over pieces"
            rows = [[*row[:-1], row[-1] + error * (row[0] == "perplexity")] for row in rows]
        if "kept" in self.comparison:
            interval = f"{100 * self.comparison['kept low']:.1f} to {100 * self.comparison['kept high']:.1f}"
            rows.append(["answers kept", "", f"{100 * self.comparison['kept']:.2f}%", f"95% interval {interval}"])
        if "cosine" in self.comparison:
            lowest = f"lowest {self.comparison['lowest cosine']:.4f}"
            rows.append(["cosine with the original", "", f"{self.comparison['cosine']:.4f}", lowest])
        return rows

    def layer_rows(self) -> list[list[str]]:
        if not self.layers:  # without converted layers nothing is counted
            return []
        rows = []
        for layer in self.layers:
            number = int(layer["layer"])
            total = sum(layer[part] for part in PARTS)
            rows.append(
                [
                    str(number),
                    describe(self.settings[number]) if number in self.settings else "exact",
                    _mega(layer["exact"]),
                    *(_mega(layer[part]) for part in PARTS),
                    f"{layer['exact'] / total:.2f}",
                ]
            )
        exact = sum(layer["exact"] for layer in self.layers)
        sums = [_mega(sum(layer[part] for layer in self.layers)) for part in PARTS]
        return [*rows, ["all", "", _mega(exact), *sums, f"{self.ratio:.2f}"]]

    def time_rows(self) -> list[list[str]]:
        return [
            [
                f"{row.length:,}",
                f"{row.before_ms:.1f}",
                f"{row.after_ms:.1f}",
                f"{row.times_faster:.2f}",
                *("?" if mib is None else f"{mib:.0f}" for mib in (row.before_mib, row.after_mib)),
            ]
            for row in self.timed
        ]

    def frontier_rows(self) -> list[list[str]]:
        if self.calibration is None:
            return []
        names = list_frontier_metrics(self.calibration.frontier, self.budget)
        return [
            [
                f"{point['ops']:.2f}",
                str(point["converted"]),
                *(f"{point[name]:.4f}" for name in names),
                "chosen" if point["chosen"] else "",
            ]
            for point in self.calibration.frontier
        ]

    def remarks(self) -> list[str]:
        """List remarks on results that could be overlooked."""
        remarks = []
        if self.settings and self.ratio < 1.05:
            every = self.settings.values() if self.task == "lm" else ()
            exact = min((settings.exact_length(causal=True) for settings in every), default=0)
            why = "trees pay off on long texts. Convert the model for longer inputs, or use it without conversion."
            if self.mean_length <= exact:
                why = f"the first {exact:,} tokens attend exactly. Pass larger --max-tokens or smaller --exact-until."
            remarks.append(f"Nothing is saved on {self._lengths}: {why}")
        slower = [row for row in self.timed if row.times_faster < 1]
        if slower:
            remarks.append(
                "Fewer operations do not always take less time: the converted model is slower up to "
                f"{max(row.length for row in slower):,} tokens here."
            )
        if self.calibration is not None and self.budget is not None:
            remarks += self._budget_remarks(self.calibration, self.budget)
        return remarks

    def _budget_remarks(self, search: Calibration, text: str) -> list[str]:
        budget, here = Budget.parse(text), {"ops": self.ratio, **self.comparison, **self.converted}
        chosen = next((point for point in search.frontier if point["chosen"]), None)
        too_few = budget.too_few(search.examples, chosen)
        remarks = [] if too_few is None else [f"{too_few}."]
        if not search.holds:
            closest = f"the closest, {search.reached} in the search, were taken"
            return [f"No settings tried keep to the budget {text!r}; {closest}.", *remarks]
        if not self.settings:
            return [f"Only exact attention keeps to the budget {text!r}: no layer was converted.", *remarks]
        if budget.holds(here, self.original):
            return remarks
        return [
            f"The budget {text!r} was kept in the search ({search.reached}), but not on these texts "
            f"({budget.reached(here, self.original)}). Search on more texts: --calibrate-on.",
            *remarks,
        ]


HEADERS = {
    "scores": ["", "original", "converted", "change"],
    "layers": ["layer", "", "exact", *PARTS, "× fewer"],
    "times": ["tokens", "exact ms", "converted ms", "× faster", "exact MiB", "converted MiB"],
}


def list_frontier_metrics(points: Sequence[Mapping[str, Any]], budget: str | None = None) -> list[str]:
    """List the metrics in the table of a search: the usual ones, and that of the budget."""
    own = () if budget is None else (Budget.parse(budget).metric,)
    names = dict.fromkeys(("accuracy", *own, "kept", "cosine", "spearman", "perplexity", "distance"))
    return [name for name in names if name in points[0] and name != "ops"]


def frontier_header(points: Sequence[Mapping[str, Any]], budget: str | None = None) -> list[str]:
    return ["× fewer", "layers", *list_frontier_metrics(points, budget), ""]


def describe(settings: LayerSettings) -> str:
    """Return a short description of settings, without those left at their defaults.

    >>> describe(LayerSettings(threshold=1 / 64)), describe(LayerSettings(kind="multiscale", branching=(16, 2), near=1))
    ('clustered, threshold 1/64', 'multiscale, windows (16, 2), near 1')
    """
    tree = f", {'trees from a function' if callable(settings.tree) else settings.tree}" if settings.tree else ""
    words = [f"{settings.kind}{tree}" + (f" {settings.branching}" if settings.branching else "")]
    if settings.kind == "hierarchical":
        return words[0]
    words += [f"near {settings.near}"] if settings.near else []
    words += [f"threshold {_shares(settings.threshold)}"] if settings.threshold is not None else []
    words += [f"top_k {settings.top_k}"] if settings.top_k is not None else []
    words += [f"exact until {settings.exact_until:,}"] if settings.exact_until is not None else []
    biased = any(settings.pooled_bias) if isinstance(settings.pooled_bias, tuple) else settings.pooled_bias
    return ", ".join([*words, "biased"] if biased else words)


def _shares(threshold: float | tuple[float, ...]) -> str:
    if isinstance(threshold, tuple) and len(set(threshold)) > 1:
        return f"{_share(max(threshold))} to {_share(min(threshold))} by head"
    return _share(threshold[0] if isinstance(threshold, tuple) else threshold)


def _share(threshold: float) -> str:
    return f"1/{round(1 / threshold)}" if 1 / round(1 / threshold) == threshold else f"{threshold:g}"


def write_report(folder: Path, report: Report) -> list[Path]:
    """Write `report.md`, `report.json` and plots, and return the paths of the plots."""
    pictures = []
    if report.layers:
        pictures.append(folder / "operations.png")
        plot_operations(pictures[0], report.layers, f"{report.model}: attention in each layer")
    if report.timed:
        pictures.append(folder / "timing.png")
        plot_timing(pictures[-1], report.timed, report.model)
    search = report.calibration
    if search is not None:
        pictures += [folder / "frontier.png", folder / "sensitivity.png"]
        _plot_search(pictures[-2], search, report)
        _plot_sensitivities(pictures[-1], search)
    write_json(folder / "report.json", _as_json(report))
    write_text(folder / "report.md", "\n".join([*_markdown(report), *(f"![{p.stem}]({p.name})" for p in pictures), ""]))
    return pictures


def _plot_search(path: Path, search: Calibration, report: Report) -> None:
    """Plot the settings tried in the search, by the metric of the budget. All points are of the texts of the search."""
    budget = Budget.parse(report.budget or "ops 1x")
    metric, limits = budget.metric, {"limit": budget.limit(search.original)}
    if metric == "ops":
        metric = next(name for name in list_frontier_metrics(search.frontier) if name != "distance")
        limits = {"least_saved": budget.value}
    original = {"kept": 1.0, "cosine": 1.0, **search.original}[metric]
    title = f"{report.model}: settings tried on the {search.examples:,} {report.unit}s of the search"
    plot_frontier(path, search.frontier, metric, title, original=original, budget=report.budget, **limits)


def _plot_sensitivities(path: Path, search: Calibration) -> None:
    candidates: list[Any] = []
    for row in search.sensitivities:
        candidates += [row["settings"]] if row["settings"] not in candidates else []
    rows = [{**row, "candidate": candidates.index(row["settings"])} for row in search.sensitivities]
    names = [describe(LayerSettings.from_json("candidate", candidate)) for candidate in candidates]
    layers = {row["layer"] for row in rows}
    untried = " (white: no fewer operations than exact)" if len(rows) < len(names) * len(layers) else ""
    plot_sensitivity(path, rows, names, f"One layer converted at a time{untried}")


def _as_json(report: Report) -> dict[str, Any]:
    values = {name: value for name, value in vars(report).items() if name not in ("settings", "timed", "calibration")}
    values["settings"] = {str(number): layer.to_json() for number, layer in report.settings.items()}
    values["timed"] = [asdict(row) for row in report.timed]
    values["times_fewer_operations"] = report.ratio
    if report.calibration is not None:
        values["holds"] = report.calibration.holds
        values["reached"] = report.calibration.reached
        values["frontier"] = report.calibration.frontier
        values["sensitivities"] = report.calibration.sensitivities
    return values


def _markdown(report: Report) -> list[str]:
    lines = [
        f"# {report.model} on {report.data}",
        "",
        f"{report.summary}.",
        "",
    ]
    tables = {"scores": report.score_rows(), "layers": report.layer_rows(), "times": report.time_rows()}
    for name, rows in tables.items():
        if rows:
            lines += [*markdown_table(HEADERS[name], rows), ""]
    if report.calibration is not None:
        lines += [
            *markdown_table(frontier_header(report.calibration.frontier, report.budget), report.frontier_rows()),
            "",
        ]
        searched = f"the {report.calibration.examples:,} {report.unit}s of the search"
        lines += [
            f"The last table and frontier.png: {searched}. The other tables: the {report.unit}s of the report.",
            "",
        ]
    lines += [
        f"Layers: millions of operations per {report.unit}, for attention, pooling, selection of groups and clustering of "
        "keys.",
        "",
    ]
    return [*lines, *(f"- {remark}" for remark in report.remarks()), ""]


def _mega(operations: float) -> str:
    millions = operations / 1e6
    return f"{millions:.0f}" if millions >= 100 else f"{millions:.2f}"


def _change(name: str, before: float, after: float) -> str:
    if name == "perplexity":
        return f"{100 * (after / before - 1):+.2f}%"
    return f"{100 * (after - before):+.2f} points"
