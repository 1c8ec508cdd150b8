"""Report of `hsa heads`: tables, JSON, pictures and a summary."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hsa.analysis.tables import markdown_table
from hsa.files import write_json, write_text
from hsa.research.head_kernels.heads import Head
from hsa.research.head_kernels.learning import CONDITIONAL, FLAT, OWN, UNIFORM, Sum
from hsa.research.head_kernels.plots import plot_alignment, plot_pruning, plot_weights
from hsa.research.head_kernels.pruning import BY_CHANCE, BY_REDUNDANCY, BY_WEIGHT, Curve

RESULTS = "heads.json"
POINT = 0.01
"""Largest loss of score that counts as small."""
_IN_ORDER = {BY_REDUNDANCY: "by redundancy", BY_WEIGHT: "by MKL weight", BY_CHANCE: "in random order"}


@dataclass(frozen=True)
class LayerHeads:
    """Measures of the heads of one layer."""

    layer: int
    heads: int
    effective: float  # effective number of distinct heads
    redundancy: float  # highest alignment of a head with another head of the model, averaged
    asymmetric: float | None  # mean asymmetric share of the similarity
    weight: float | None  # sum of the weights


@dataclass(frozen=True)
class HeadReport:
    """Results of a study. Lists over heads are in the order of `heads`."""

    model: str
    data: str
    examples: int
    mean_length: float
    compare: str  # "outputs" or "similarity"
    rows: int  # rows of a Gram matrix: examples or tokens
    heads: list[Head]
    alignment: list[list[float]]
    redundancy: list[float]
    effective: float
    layers: list[LayerHeads]
    weights: list[float] | None
    sums: list[Sum]
    sum_score: str  # score of ridge regression with a sum of kernels
    score: str  # score of pruned models
    pruned_on: int  # examples that pruned models were scored on
    curves: list[Curve]
    seed: int

    @property
    def summary(self) -> str:
        by = "mean outputs of examples" if self.compare == "outputs" else "similarities of tokens"
        return (
            f"{len(self.heads)} heads in {len(self.layers)} layer{'s' * (len(self.layers) > 1)}, compared by {by}; "
            f"{self.examples:,} examples of {self.mean_length:.0f} tokens on average"
        )

    def layer_rows(self) -> list[list[str]]:
        return [
            [
                str(layer.layer),
                str(layer.heads),
                f"{layer.effective:.1f}",
                f"{layer.redundancy:.2f}",
                *([] if layer.asymmetric is None else [f"{100 * layer.asymmetric:.0f}%"]),
                *([] if layer.weight is None else [f"{layer.weight:.2f}"]),
            ]
            for layer in self.layers
        ]

    def layer_header(self) -> list[str]:
        first = self.layers[0]
        more = ["asymmetric"] * (first.asymmetric is not None) + ["MKL weight"] * (first.weight is not None)
        return ["layer", "heads", "distinct", "redundancy", *more]

    def sum_header(self) -> list[str]:
        return ["weights of heads", "alignment", "held out", f"{self.sum_score} held out"]

    def sum_rows(self) -> list[list[str]]:
        return [[s.name, *(_spread(v) for v in (s.learned, s.held, s.score))] for s in self.sums]

    def curve_header(self) -> list[str]:
        return ["heads removed", *(curve.name for curve in self.curves)]

    def curve_rows(self) -> list[list[str]]:
        if not self.curves:
            return []
        return [
            [str(count), *(f"{curve.mean[i]:.3f}" for curve in self.curves)]
            for i, count in enumerate(self.curves[0].removed)
        ]

    def words(self) -> list[str]:
        """Summarise the report in up to three sentences."""
        lines = [
            f"Effective number of distinct heads: {self.effective:.1f} of {len(self.heads)}. The highest alignment of a "
            f"head with another is {_mean(self.redundancy):.2f} on average."
        ]
        if self.curves:
            parts = [f"{curve.removable(POINT) or 'none'} {_IN_ORDER[curve.name]}" for curve in self.curves]
            loss = f"{POINT} of {self.score}" if self.score == "cosine" else f"a point of {self.score}"
            lines.append(f"Heads that can be removed without retraining at a loss of less than {loss}: {_and(parts)}.")
        base = next((s for s in self.sums if s.name == UNIFORM), None)
        if base is not None:
            others = [s for s in self.sums if s.name in (FLAT, CONDITIONAL, OWN)]
            parts = [
                f"{s.name} aligns {_verdict(s.held, base.held)} with the labels ({_mean(s.held):.3f}) and predicts them "
                f"{_verdict(s.score, base.score)} ({_mean(s.score):.3f})"
                for s in others
            ]
            equal = f"({_mean(base.held):.3f} and {_mean(base.score):.3f})"
            lines.append(f"On held-out examples, compared with equal weights {equal}: {'; '.join(parts)}.")
        return lines

    def remarks(self) -> list[str]:
        """Return limitations of the results."""
        lines = []
        if self.curves and self.score == "accuracy":
            share = self.curves[0].mean[0]
            error = (share * (1 - share) / self.pruned_on) ** 0.5
            if error > POINT / 2:
                lines.append(
                    f"Accuracies of pruned models are measured on {self.pruned_on} examples, with a standard error of "
                    f"{100 * error:.1f} points; raise --prune-on to reduce it."
                )
        if self.weights is not None and not self.sums:
            lines.append("Weights were not tested: that takes at least 18 examples, and 2 of each of two classes.")
        if self.weights is None:
            lines.append("There are no labels, so no weights were learned; pass --label COLUMN.")
        return lines


def write_report(folder: Path, report: HeadReport) -> list[Path]:
    """Write `report.md`, `heads.json` and pictures; return the paths of the pictures."""
    pictures = [folder / "alignment.png"]
    plot_alignment(pictures[0], report.alignment, report.heads, f"{report.model}: alignment of heads")
    if report.weights is not None:
        pictures.append(folder / "weights.png")
        plot_weights(pictures[-1], report.weights, report.heads, f"{report.model}: weights by flat MKL")
    if report.curves:
        pictures.append(folder / "pruning.png")
        plot_pruning(pictures[-1], report.curves, report.score, f"{report.model}: score with heads removed")
    write_json(folder / RESULTS, _as_json(report))
    write_text(folder / "report.md", "\n".join([*_markdown(report), *(f"![{p.stem}]({p.name})" for p in pictures), ""]))
    return pictures


def _as_json(report: HeadReport) -> dict[str, Any]:
    return {
        **asdict(report),
        "alignment": [[round(value, 6) for value in row] for row in report.alignment],
        "removable": {curve.name: curve.removable(POINT) for curve in report.curves},
        "words": report.words(),
    }


def _markdown(report: HeadReport) -> list[str]:
    lines = [f"# {report.model} on {report.data}", "", f"{report.summary}.", "", *report.words(), ""]
    lines += [*markdown_table(report.layer_header(), report.layer_rows()), ""]
    for header, rows in ((report.sum_header(), report.sum_rows()), (report.curve_header(), report.curve_rows())):
        if rows:
            lines += [*markdown_table(header, rows), ""]
    return [*lines, *(f"- {remark}" for remark in report.remarks()), ""]


def _spread(values: list[float]) -> str:
    """Format the mean and the standard deviation over splits."""
    mean = _mean(values)
    return f"{mean:.3f} ± {(sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5:.3f}"


def _verdict(values: list[float], base: list[float]) -> str:
    """Return "better" or "worse" only if this holds in every split."""
    if all(a > b for a, b in zip(values, base, strict=True)):
        return "better"
    return "worse" if all(a < b for a, b in zip(values, base, strict=True)) else "about as well"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _and(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
