"""Search for settings that keep to a budget.

First, each layer is converted alone with each candidate, to measure its *sensitivity*: the change of the model's answers and
the operations saved. Then layers move step by step from exact attention to cheaper candidates, always by the step with the
smallest change per operation saved. Points along this path are measured, and the budget selects one of them. Finally, each
head gets the bias of pooled nodes that brings its output closest to exact attention, if this also improves the answers.

In half precision the predictions of a language model change by rounding alone, as soon as any layer computes its output in
another way. This *noise* is larger than the effect of faithful settings. It is measured for each layer, with all groups of
keys open, and subtracted.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hsa.errors import InvalidInput
from hsa.files import read_json, write_json
from hsa.huggingface.conversion import convert_as, revert
from hsa.huggingface.fidelity.judge import Answers, Judge
from hsa.huggingface.fidelity.parts import fingerprint
from hsa.huggingface.layers import attention_layers, is_causal, why_not_convert
from hsa.huggingface.observe import probing
from hsa.huggingface.settings import LayerSettings
from hsa.plain_values import check_fields

CANDIDATES: tuple[LayerSettings, ...] = (
    LayerSettings(kind="multiscale", branching=(16, 2), near=1, top_k=0),
    LayerSettings(kind="multiscale", branching=(16, 2), near=1, top_k=4),
    LayerSettings(branching=(16, 4), top_k=1),
    LayerSettings(branching=(16, 4), top_k=2),
    LayerSettings(branching=(8, 4), top_k=2),
    LayerSettings(branching=(8, 4), top_k=4),
    LayerSettings(branching=(8, 2), top_k=4),
    LayerSettings(branching=(8, 2), top_k=6),
    LayerSettings(branching=(8, 2), top_k=8),
    LayerSettings(branching=(8, 2), top_k=12),
    LayerSettings(branching=(8, 2), top_k=16),
)
"""Settings to try in each layer of an encoder."""
CAUSAL_CANDIDATES: tuple[LayerSettings, ...] = tuple(LayerSettings(threshold=1 / 2**i) for i in range(3, 11))
"""Settings to try in each causal layer."""
# All of these can open any group. Layers that read distant keys through pooled nodes only (`kind="multiscale"` without a
# selection) may keep the perplexity of ordinary text, but cannot find a detail in a long prompt.
ALL_OPEN = LayerSettings(threshold=1e-9)
"""Settings of a causal layer that opens every group of keys that matters at all: exact attention up to rounding."""
BIASES = (-1.0, -0.5, 0.0, 0.5)
"""Biases of pooled nodes to try in each head."""
POINTS = 10
"""Number of measured points along the path."""
METRICS: Mapping[str, tuple[str, ...]] = {
    "classification": ("accuracy", "kept", "precision", "recall", "f1", "matthews"),
    "embedding": ("cosine", "spearman"),
    "lm": ("perplexity",),
}
"""Metrics of budgets by task, besides "ops"."""
CALIBRATION_FILE = "calibration.json"
"""Name of the file of measurements in the folder of a search."""
_VERSION = 2  # of what is measured
_BUDGET = re.compile(r"\s*([a-z0-9]+)\s*([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))\s*(x|%|points?)?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Budget:
    """Limit of a search: the factor by which operations must fall (`ops`), or the change of a score that is allowed.

    >>> Budget.parse("ops 10x"), Budget.parse("accuracy -0.5"), Budget.parse("kept 98%")
    (Budget(metric='ops', value=10.0), Budget(metric='accuracy', value=-0.5), Budget(metric='kept', value=98.0))
    """

    metric: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read a budget such as "ops 10x"."""
        match = _BUDGET.fullmatch(text)
        if not match:
            raise InvalidInput(
                "budget",
                expected='a metric and a value, such as "ops 4x", "accuracy -0.5", "kept 98%" or "perplexity +0.5%"',
                got=repr(text),
            )
        budget = cls(match[1].lower(), float(match[2]))
        budget.check([metric for metrics in METRICS.values() for metric in metrics])
        units, possible, expected = budget._form()
        if not possible or (match[3] or "").lower() not in ("", *units):
            raise InvalidInput("budget", expected=expected, got=repr(text))
        return budget

    def _form(self) -> tuple[tuple[str, ...], bool, str]:
        """Return the units of the metric, whether the value is possible, and what is."""
        value = self.value
        match self.metric:
            case "ops":
                return ("x",), value >= 1, "a factor of 1 or more, such as ops 4x"
            case "perplexity":
                return ("%",), value >= 0, "a rise in percent, such as perplexity +0.5%"
            case "kept":
                return ("%",), value == 0 or 1 < value <= 100, "a share of the answers in percent, such as kept 98%"
            case "cosine":
                return (), -1 <= value <= 1, "a number up to 1, such as cosine 0.985"
        return ("%", "point", "points"), value <= 0, f"a loss in points, such as {self.metric} -0.5"

    def check(self, known: Sequence[str]) -> None:
        """Check that the metric is one of these."""
        known = [name for name in known if " " not in name]  # not interval bounds and extremes, such as "kept low"
        if self.metric in ("ops", *known):
            return
        task = next((task for task, metrics in METRICS.items() if self.metric in metrics), None)
        other = task is not None and not set(METRICS[task]) & set(known)
        raise InvalidInput(
            "budget",
            expected=f"one of ops, {', '.join(known)}",
            got=repr(self.metric),
            fix=f"{self.metric} is a budget for the task {task}" if other else None,
        )

    def margin(self, point: Mapping[str, float], original: Mapping[str, float]) -> float:
        """Return how far inside the budget a point is; below 0, how far outside.

        Scores are in points, perplexity and kept answers in percent.
        """
        if self.metric == "ops":
            return point["ops"] - self.value
        if self.metric == "perplexity":
            return self.value - 100 * point["perplexity change"]
        if self.metric == "kept":
            return 100 * point["kept"] - self.value
        if self.metric == "cosine":
            return point["cosine"] - self.value
        return 100 * (point[self.metric] - original[self.metric]) - self.value

    def holds(self, point: Mapping[str, float], original: Mapping[str, float]) -> bool:
        """Return whether a point keeps to the budget."""
        return self.margin(point, original) >= 0

    def reached(self, point: Mapping[str, float], original: Mapping[str, float]) -> str:
        """Return what a point reaches, in words."""
        value, fewer = self.margin(point, original) + self.value, f"{point['ops']:.2f} times fewer operations"
        match self.metric:
            case "ops":
                return fewer
            case "perplexity":
                return f"perplexity {100 * point['perplexity change']:+.2f}% at {fewer}"
            case "kept":
                return f"{value:.1f}% of the answers at {fewer}"
            case "cosine":
                return f"cosine {value:.4f} at {fewer}"
        return f"{self.metric} {value:+.2f} points at {fewer}"

    def limit(self, original: Mapping[str, float]) -> float:
        """Return the value of the metric that just keeps to the budget."""
        match self.metric:
            case "ops" | "cosine":
                return self.value
            case "kept":
                return self.value / 100
            case "perplexity":
                return original["perplexity"] * (1 + self.value / 100)
        return original[self.metric] + self.value / 100

    def too_few(self, examples: int, point: Mapping[str, float] | None = None) -> str | None:
        """Return a warning if so few examples cannot resolve the budget, with the number that would do; else None.

        The change that the budget allows should be at least two of its standard errors. That of a perplexity is
        measured. That of a score is at least the one of the share p of the answers that the budget may cost,
        √(p (1 − p) / n); answers that change in both directions add to it.

        Args:
            examples: Number of examples of the search.
            point: Measurements of the chosen settings; None before the search.
        """
        if self.metric in ("ops", "cosine", "spearman") or not examples:
            return None
        if self.metric == "perplexity":
            change, unit, noun, least = self.value, "%", "pieces", ""
            error = 100 * (point or {}).get("perplexity change error", 0.0)
        else:
            lost = 100 - self.value if self.metric == "kept" else -self.value
            change, noun, least = min(lost, 100.0), "texts", "at least "
            unit = "%" if self.metric == "kept" else " points"
            error = math.sqrt(change * (100 - change) / examples)
        if not change or 2 * error <= change:
            return None
        needed = math.ceil(examples * (2 * error / change) ** 2)
        step = 10 ** max(0, len(str(needed)) - 2)  # two digits are exact enough
        needed = -(-needed // step) * step
        return (
            f"{examples:,} {noun} are too few for this budget: a change of {change:g}{unit} has a standard error of "
            f"{least}{error:.2g}{unit}. About {needed:,} {noun} would do: --calibrate-on {needed}"
        )


@dataclass(frozen=True)
class Calibration:
    """Result of a search.

    Attributes:
        settings: Settings by layer number, for `convert_as`. Layers that are not listed stay exact.
        frontier: Measured points, from the most faithful to the cheapest: `ops` (times fewer), scores, `chosen`.
        sensitivities: `distance` of the answers and `ops` of the layer, as a fraction of exact attention, for each layer and
            candidate.
        holds: Whether the settings keep to the budget. If not, they are the closest to it that were measured.
        reached: What the settings reach on the examples of the search, in words.
        original: Scores of the exact model on the examples of the search.
        examples: Number of examples of the search.
    """

    settings: dict[int, LayerSettings]
    frontier: list[dict[str, Any]]
    sensitivities: list[dict[str, Any]]
    holds: bool
    reached: str = ""
    original: Mapping[str, float] = field(default_factory=dict)
    examples: int = 0


def calibrate(
    model: Any,
    judge: Judge,
    budget: str | Budget,
    *,
    candidates: Sequence[LayerSettings] | None = None,
    every_layer: bool = False,
    exact_until: int | None = None,
    tokenizer: Any = None,
    folder: Path | None = None,
    watch: Callable[[str, int, int], None] | None = None,
) -> Calibration:
    """Search for settings of a model's layers that keep to a budget on the examples of a judge.

    The model is exact afterwards; `convert_as(model, result.settings)` applies the result.

    Args:
        model: Transformers model.
        judge: Examples and task to measure on.
        budget: "ops 10x" selects the most faithful settings with at most a tenth of the operations. "accuracy -0.5" selects
            the cheapest settings that lose at most half a point; likewise "kept 98%" (of the answers), "cosine 0.985",
            "spearman -0.5" and "perplexity +0.5%".
        candidates: Settings to try in each layer, with larger thresholds before smaller ones. Default: `CANDIDATES`, or
            `CAUSAL_CANDIDATES` for a decoder.
        every_layer: Whether to convert every layer.
        exact_until: Number of tokens up to which the candidates for a decoder attend exactly; see `convert`.
        tokenizer: Tokenizer of the model, if a candidate needs it.
        folder: Folder for measurements, from which an interrupted search resumes.
        watch: Function called with the stage, the steps done and the number of steps.

    Raises:
        InvalidInput: The budget is not one that this task can measure.

    >>> import hsa.huggingface
    >>> examples = hsa.huggingface.load_examples("reviews.parquet")  # doctest: +SKIP
    >>> judge = hsa.huggingface.Judge(examples, "classification", model, tokenizer, longest=512)  # doctest: +SKIP
    >>> result = hsa.huggingface.calibrate(model, judge, "kept 98%")  # doctest: +SKIP
    >>> hsa.huggingface.convert_as(model, result.settings)  # doctest: +SKIP
    """
    budget = Budget.parse(budget) if isinstance(budget, str) else budget
    try:
        return _calibrate(
            _Search(model, judge, candidates, exact_until, tokenizer, folder, watch or (lambda *_: None)),
            budget,
            every_layer,
        )
    finally:
        revert(model)


def _calibrate(search: _Search, budget: Budget, every_layer: bool) -> Calibration:
    budget.check(list(search.known_metrics))
    path = search.path(every_layer)
    frontier = search.frontier(path, budget)
    good = [point for point in frontier if budget.holds(point, search.original)]
    if good:  # the frontier runs from faithful to cheap
        chosen = good[0 if budget.metric == "ops" else -1]
    else:
        chosen = max(frontier, key=lambda point: budget.margin(point, search.original))
    settings = search.with_biases(path[chosen["step"]], budget)
    reached = budget.reached(search.measure(settings), search.original)
    shown = [{**point, "chosen": point is chosen} for point in frontier]
    return Calibration(
        settings, shown, search.sensitivity_table(), bool(good), reached, search.original, len(search.judge)
    )


class _Search:
    def __init__(
        self,
        model: Any,
        judge: Judge,
        candidates: Sequence[LayerSettings] | None,
        exact_until: int | None,
        tokenizer: Any,
        folder: Path | None,
        watch: Callable[[str, int, int], None],
    ):
        revert(model)
        self.model = model
        self.judge = judge
        modules = attention_layers(model)
        causal = any(map(is_causal, modules))
        if candidates is None:
            candidates = CAUSAL_CANDIDATES if causal else CANDIDATES
        self.candidates, self.all_open = tuple(candidates), replace(ALL_OPEN, exact_until=exact_until)
        if exact_until is not None:
            in_tiles = (replace(c, exact_until=exact_until) if c.uses_tiles(causal) else c for c in candidates)
            self.candidates = tuple(in_tiles)
        self.tokenizer = tokenizer
        self.watch = watch
        self.layers = [n for n, module in enumerate(modules) if why_not_convert(module) is None]
        total = len(judge)
        done = 0
        watch("exact model", done, total)

        def count(more: int) -> None:
            nonlocal done
            done += more
            watch("exact model", done, total)

        self.before: Answers = judge.ask(model, count)
        self.original = judge.scores(self.before)
        self.known_metrics = [*self.original, *judge.compare(self.before, self.before)]
        self.file = None if folder is None else folder / CALIBRATION_FILE
        self.kept: dict[str, Any] = self._earlier()

    def _earlier(self) -> dict[str, Any]:
        candidates = [candidate.to_json() for candidate in self.candidates]
        made_for = fingerprint(self.judge, self.model, _VERSION, candidates)
        fresh: dict[str, Any] = {"made_for": made_for, "measured": {}}
        if self.file is None or not self.file.exists():
            return fresh
        earlier = read_json(self.file, "an earlier calibration")
        check_fields(earlier, ("made_for", "measured"), str(self.file))
        return earlier if earlier["made_for"] == fresh["made_for"] else fresh

    def measure(self, settings: Mapping[int, LayerSettings]) -> dict[str, Any]:
        """Return scores, distance and operations of the model with these layers converted, measured at most once."""
        key = json.dumps({n: s.to_json() for n, s in sorted(settings.items())})
        if key not in self.kept["measured"]:
            self.apply(settings)
            after = self.judge.ask(self.model, against=self.before)
            counted = after.counted
            exact = sum(counted.exact.values())
            self.kept["measured"][key] = {
                **self.judge.scores(after),
                **self.judge.compare(self.before, after),
                "distance": self.judge.distance(self.before, after),
                "ops": counted.ratio if settings else 1.0,
                "layer ops": {str(n): counted.layers[n].total / exact for n in settings},
                "exact layer ops": {str(n): counted.exact[n] / exact for n in settings},
            }
            if self.file is not None:
                write_json(self.file, self.kept)
        return self.kept["measured"][key]

    def apply(self, settings: Mapping[int, LayerSettings]) -> None:
        convert_as(self.model, settings, tokenizer=self.tokenizer)

    @cached_property
    def sensitivities(self) -> dict[tuple[int, int], dict[str, Any]]:
        """Measurements of each layer alone with each candidate, by layer number and candidate index.

        If a threshold takes as many operations as exact attention, smaller ones are not tried.
        """
        noisy = self.judge.task == "lm" and self.model.dtype in (torch.bfloat16, torch.float16)
        measured: dict[tuple[int, int], dict[str, Any]] = {}
        done, total = 0, len(self.layers) * (len(self.candidates) + noisy)

        def measure(settings: Mapping[int, LayerSettings]) -> dict[str, Any]:
            nonlocal done
            self.watch("each layer alone", done, total)
            done += 1
            return self.measure(settings)

        for number in self.layers:
            noise = measure({number: self.all_open})["distance"] if noisy else 0.0
            costly: LayerSettings | None = None
            for index, candidate in enumerate(self.candidates):
                if costly is not None and _only_opens_more(candidate, costly):
                    done += 1
                    continue
                alone = measure({number: candidate})
                measured[number, index] = {**alone, "distance": max(0.0, alone["distance"] - noise)}
                if alone["layer ops"][str(number)] >= alone["exact layer ops"][str(number)]:
                    costly = candidate
        self.watch("each layer alone", total, total)
        return measured

    def sensitivity_table(self) -> list[dict[str, Any]]:
        return [
            {
                "layer": number,
                "settings": self.candidates[index].to_json(),
                "distance": measured["distance"],
                "ops": measured["layer ops"][str(number)] / measured["exact layer ops"][str(number)],
            }
            for (number, index), measured in self.sensitivities.items()
        ]

    def path(self, every_layer: bool) -> list[dict[int, LayerSettings]]:
        """Return a path from the most faithful settings to the cheapest, on which each step makes one layer cheaper."""
        measured = self.sensitivities
        steps: list[tuple[float, int, LayerSettings]] = []
        start: dict[int, LayerSettings] = {}
        for number in self.layers:
            options = [
                (alone["layer ops"][str(number)], alone["distance"], candidate)
                for index, candidate in enumerate(self.candidates)
                if (alone := measured.get((number, index))) is not None
            ]
            exact = measured[number, 0]["exact layer ops"][str(number)]
            first: tuple[float, float, LayerSettings | None] = (exact, 0.0, None)
            if every_layer:
                first = min(options, key=lambda option: option[1])
                assert first[2] is not None
                start[number] = first[2]
            steps += [(slope, number, settings) for slope, settings in trace_hull(first, options)]
        path = [start]
        for _, number, settings in sorted(steps, key=lambda step: step[:2]):
            path.append({**path[-1], number: settings})
        return path

    def frontier(self, path: list[dict[int, LayerSettings]], budget: Budget) -> list[dict[str, Any]]:
        """Measure points along the path, with more of them around the point where the budget is reached."""
        steps = sorted({round(i * (len(path) - 1) / max(1, POINTS - 1)) for i in range(POINTS)})
        measured: dict[int, dict[str, Any]] = {}

        def measure_step(step: int) -> dict[str, Any]:
            self.watch("along the path", len(measured), POINTS + 3)
            if step not in measured:
                measured[step] = {"step": step, "converted": len(path[step]), **self.measure(path[step])}
            return measured[step]

        holds = [budget.holds(measure_step(step), self.original) for step in steps]
        turn = next((i for i in range(1, len(steps)) if holds[i] != holds[i - 1]), None)
        if turn is not None:
            low, high, side = steps[turn - 1], steps[turn], holds[turn - 1]
            while high - low > 1 and len(measured) < POINTS + 3:
                middle = (low + high) // 2
                if budget.holds(measure_step(middle), self.original) == side:
                    low = middle
                else:
                    high = middle
        self.watch("along the path", POINTS + 3, POINTS + 3)
        return [measured[step] for step in sorted(measured)]

    def with_biases(self, settings: dict[int, LayerSettings], budget: Budget) -> dict[int, LayerSettings]:
        """Add a bias per head if this brings the answers closer to the original and does not break the budget."""
        self.watch("bias of pooled nodes", 0, 1)
        self.apply(settings)
        with probing(BIASES) as errors:
            self.judge.ask(self.model)
        biased = dict(settings)
        for number, error in errors.items():  # only layers that pool
            best = error.argmin(0).tolist()
            biased[number] = replace(settings[number], pooled_bias=tuple(BIASES[i] for i in best))
        after, before = self.measure(biased), self.measure(settings)
        kept = budget.holds(after, self.original) >= budget.holds(before, self.original)
        better = kept and after["distance"] < before["distance"]
        self.watch("bias of pooled nodes", 1, 1)
        return biased if better else settings


def _only_opens_more(candidate: LayerSettings, other: LayerSettings) -> bool:
    """Return whether settings differ from others by a smaller threshold only."""
    mine, its = candidate.threshold, other.threshold
    if not isinstance(mine, float) or not isinstance(its, float):
        return False
    return mine < its and replace(candidate, threshold=its) == other


def trace_hull(
    first: tuple[float, float, LayerSettings | None], options: Sequence[tuple[float, float, LayerSettings]]
) -> list[tuple[float, LayerSettings]]:
    """Return the lower convex hull of options (operations, distance, settings), as steps of rising slope from `first` on.

    >>> options = [(0.8, 0.10, "a"), (0.6, 0.11, "b"), (0.3, 0.5, "c"), (0.5, 0.9, "d")]
    >>> [(round(slope, 1), settings) for slope, settings in trace_hull((1.0, 0.0, None), options)]
    [(0.3, 'b'), (1.3, 'c')]
    """
    hull: list[tuple[float, LayerSettings]] = []
    operations, distance = first[:2]
    while True:
        cheaper = [option for option in options if option[0] < operations]
        if not cheaper:
            return hull
        slopes = [((option[1] - distance) / (operations - option[0]), option) for option in cheaper]
        slope, best = min(slopes, key=lambda pair: (pair[0], pair[1][0]))
        slope = max([slope, *(earlier for earlier, _ in hull[-1:])])  # rounding must not swap steps on a straight line
        hull.append((slope, best[2]))
        operations, distance = best[:2]
