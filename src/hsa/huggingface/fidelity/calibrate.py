"""Search for settings that keep to a budget.

First every layer alone is converted with every candidate (its *sensitivity*): how far the answers move, and how much is
saved. Then the layers take steps from exact attention to ever cheaper candidates, always the step that saves most for what
it moves. Points along that path are measured, and the budget picks one of them. Last, each head of the converted layers gets
the bias of pooled nodes that brings its output nearest to exact attention, if that brings the answers nearer too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hsa.errors import InvalidInput
from hsa.files import read_json, write_json
from hsa.huggingface.conversion import convert_as, revert
from hsa.huggingface.fidelity.judge import Answers, Judge
from hsa.huggingface.layers import attention_layers, is_sliding
from hsa.huggingface.observe import probing
from hsa.huggingface.settings import LayerSettings

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
"""Settings that are tried in each layer."""
BIASES = (-1.0, -0.5, 0.0, 0.5)
POINTS = 10
"""Points of the path that are measured."""
_STATE = "calibration.json"
_BUDGET = re.compile(r"\s*([a-z0-9]+)\s*([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))\s*(x|%|points?)?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Budget:
    """A limit: operations to save (`ops`, times fewer), or a score that may change by so much.

    >>> Budget.parse("ops 10x"), Budget.parse("accuracy -0.5"), Budget.parse("kept 98%")
    (Budget(metric='ops', value=10.0), Budget(metric='accuracy', value=-0.5), Budget(metric='kept', value=98.0))
    """

    metric: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Budget:
        match = _BUDGET.fullmatch(text)
        if not match:
            raise InvalidInput(
                "budget", given=repr(text), expected='such as "ops 4x", "accuracy -0.5", "kept 98%" or "cosine 0.985"'
            )
        return cls(match[1].lower(), float(match[2]))

    def check(self, known: Sequence[str]) -> None:
        known = [name for name in known if " " not in name]  # bounds of intervals and extremes are no budgets
        if self.metric not in ("ops", *known):
            raise InvalidInput("budget", given=repr(self.metric), expected=f"one of ops, {', '.join(known)}")
        if self.metric not in ("ops", "kept", "cosine", "perplexity") and self.value > 0:
            raise InvalidInput(
                "budget",
                given=f"{self.metric} {self.value:+g}",
                expected=f"what it may lose, in points, such as {self.metric} -0.5",
            )

    def holds(self, point: Mapping[str, float], original: Mapping[str, float]) -> bool:
        """Whether a point keeps to the budget: scores in points, perplexity and kept in percent, cosines as they are."""
        if self.metric == "ops":
            return point["ops"] >= self.value
        if self.metric == "perplexity":
            return 100 * point["perplexity change"] <= self.value
        if self.metric == "kept":
            return 100 * point["kept"] >= self.value
        if self.metric == "cosine":
            return point["cosine"] >= self.value
        return 100 * (point[self.metric] - original[self.metric]) >= self.value


@dataclass(frozen=True)
class Calibration:
    """Result of a search.

    Attributes:
        settings: by layer; the others stay exact.
        frontier: points measured, from the most faithful to the cheapest: `ops` (times fewer), scores, `chosen`.
        sensitivities: per layer and candidate: `distance` of the answers, `ops` of the layer as a share of exact attention.
        holds: whether the settings keep to the budget.
    """

    settings: dict[int, LayerSettings]
    frontier: list[dict[str, Any]]
    sensitivities: list[dict[str, Any]]
    holds: bool


def calibrate(
    model: Any,
    judge: Judge,
    budget: str | Budget,
    *,
    candidates: Sequence[LayerSettings] = CANDIDATES,
    every_layer: bool = False,
    tokenizer: Any = None,
    folder: Path | None = None,
    watch: Callable[[str, int, int], None] | None = None,
) -> Calibration:
    """Search settings of a model's layers that keep to a budget on the judge's examples. The model is left unconverted.

    Args:
        budget: "ops 10x": ten times fewer operations, all counted, as faithful as can be; "accuracy -0.5": at most half a
            point lost, as cheap as can be; likewise "kept 98%" of the answers, "cosine 0.985", "spearman -0.5",
            "perplexity +1%".
        candidates: settings that are tried in each layer.
        every_layer: no layer stays exact.
        folder: where measurements are kept: a run that was broken off goes on, and a repeated one is quick.
        watch: called with the stage, the steps done and all steps.
    """
    budget = Budget.parse(budget) if isinstance(budget, str) else budget
    try:
        return _calibrate(
            _Search(model, judge, candidates, tokenizer, folder, watch or (lambda *_: None)), budget, every_layer
        )
    finally:
        revert(model)


def _calibrate(search: _Search, budget: Budget, every_layer: bool) -> Calibration:
    budget.check(list(search.known_metrics))
    path = search.path(every_layer)
    frontier = search.frontier(path, budget)
    good = [point for point in frontier if budget.holds(point, search.original)]
    # The most faithful that is cheap enough; or the cheapest that is faithful enough; else the nearest to that.
    first, last = (good or frontier[-1:])[0], (good or frontier[:1])[-1]
    chosen = first if budget.metric == "ops" else last
    settings = search.with_biases(path[chosen["step"]], budget)
    shown = [{**point, "chosen": point is chosen} for point in frontier]
    return Calibration(settings, shown, search.sensitivity_table(), bool(good))


class _Search:
    def __init__(
        self,
        model: Any,
        judge: Judge,
        candidates: Sequence[LayerSettings],
        tokenizer: Any,
        folder: Path | None,
        watch: Callable[[str, int, int], None],
    ):
        revert(model)
        self.model = model
        self.judge = judge
        self.candidates = tuple(candidates)
        self.tokenizer = tokenizer
        self.watch = watch
        self.layers = [n for n, module in enumerate(attention_layers(model)) if not is_sliding(module)]
        self.before: Answers = judge.ask(model)
        self.original = judge.scores(self.before)
        self.known_metrics = [*self.original, *judge.compare(self.before, self.before)]
        self.file = None if folder is None else folder / _STATE
        self.kept: dict[str, Any] = self._earlier()

    def _fingerprint(self) -> str:
        """Hash all that measurements depend on."""
        labels = None if self.judge.labels is None else self.judge.labels.tolist()
        what = [self.judge.task, self.judge.tokens.ids, labels, [c.to_json() for c in self.candidates]]
        digest = hashlib.blake2b(json.dumps(what).encode(), digest_size=16)
        for weight in self.model.parameters():  # some of each: all change when a model is trained
            some = weight.detach().flatten()[:: max(1, weight.numel() // 64)]
            digest.update(some.float().cpu().numpy().tobytes())
        return digest.hexdigest()

    def _earlier(self) -> dict[str, Any]:
        fresh: dict[str, Any] = {"made_for": self._fingerprint(), "measured": {}}
        if self.file is None or not self.file.exists():
            return fresh
        earlier = read_json(self.file, "an earlier calibration")
        return earlier if earlier.get("made_for") == fresh["made_for"] else fresh

    def measure(self, settings: Mapping[int, LayerSettings]) -> dict[str, Any]:
        """Return scores, distance and operations of the model with these layers converted; each is measured once."""
        key = json.dumps({n: s.to_json() for n, s in sorted(settings.items())})
        if key not in self.kept["measured"]:
            self.apply(settings)
            after = self.judge.ask(self.model)
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

    def sensitivities(self) -> dict[tuple[int, int], dict[str, Any]]:
        """Measure every layer alone with every candidate: by number of the layer and index of the candidate."""
        measured: dict[tuple[int, int], dict[str, Any]] = {}
        total = len(self.layers) * len(self.candidates)
        for number in self.layers:
            for index, candidate in enumerate(self.candidates):
                self.watch("each layer alone", len(measured), total)
                measured[number, index] = self.measure({number: candidate})
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
            for (number, index), measured in self.sensitivities().items()
        ]

    def path(self, every_layer: bool) -> list[dict[int, LayerSettings]]:
        """Trace a path from the most faithful settings to the cheapest: each step makes one layer cheaper."""
        measured = self.sensitivities()
        steps: list[tuple[float, int, LayerSettings]] = []
        start: dict[int, LayerSettings] = {}
        for number in self.layers:
            ways = [
                (measured[number, index]["layer ops"][str(number)], measured[number, index]["distance"], candidate)
                for index, candidate in enumerate(self.candidates)
            ]
            exact = measured[number, 0]["exact layer ops"][str(number)]
            first: tuple[float, float, LayerSettings | None] = (exact, 0.0, None)
            if every_layer:
                first = min(ways, key=lambda way: way[1])
                assert first[2] is not None
                start[number] = first[2]
            steps += [(slope, number, way) for slope, way in trace_hull(first, ways)]
        path = [start]
        for _, number, way in sorted(steps, key=lambda step: step[:2]):
            path.append({**path[-1], number: way})
        return path

    def frontier(self, path: list[dict[int, LayerSettings]], budget: Budget) -> list[dict[str, Any]]:
        """Measure points along the path, more of them around the point where the budget ends."""
        steps = sorted({round(i * (len(path) - 1) / max(1, POINTS - 1)) for i in range(POINTS)})
        measured: dict[int, dict[str, Any]] = {}

        def look(step: int) -> dict[str, Any]:
            self.watch("along the path", len(measured), POINTS + 3)
            if step not in measured:
                measured[step] = {"step": step, "converted": len(path[step]), **self.measure(path[step])}
            return measured[step]

        holds = [budget.holds(look(step), self.original) for step in steps]
        turn = next((i for i in range(1, len(steps)) if holds[i] != holds[i - 1]), None)
        if turn is not None:
            low, high, side = steps[turn - 1], steps[turn], holds[turn - 1]
            while high - low > 1 and len(measured) < POINTS + 3:
                middle = (low + high) // 2
                if budget.holds(look(middle), self.original) == side:
                    low = middle
                else:
                    high = middle
        self.watch("along the path", POINTS + 3, POINTS + 3)
        return [measured[step] for step in sorted(measured)]

    def with_biases(self, settings: dict[int, LayerSettings], budget: Budget) -> dict[int, LayerSettings]:
        """Add a bias per head, if that brings answers nearer and the budget is kept as before."""
        self.watch("bias of pooled nodes", 0, 1)
        self.apply(settings)
        with probing(BIASES) as errors:
            self.judge.ask(self.model)
        biased = dict(settings)
        for number, error in errors.items():  # layers that pool something
            best = error.argmin(0).tolist()
            biased[number] = replace(settings[number], pooled_bias=tuple(BIASES[i] for i in best))
        after, before = self.measure(biased), self.measure(settings)
        kept = budget.holds(after, self.original) >= budget.holds(before, self.original)
        better = kept and after["distance"] < before["distance"]
        self.watch("bias of pooled nodes", 1, 1)
        return biased if better else settings


def trace_hull(
    first: tuple[float, float, LayerSettings | None], ways: Sequence[tuple[float, float, LayerSettings]]
) -> list[tuple[float, LayerSettings]]:
    """Select ways (operations, distance, settings), each cheaper than the one before, at rising cost in distance.

    >>> ways = [(0.8, 0.10, "a"), (0.6, 0.11, "b"), (0.3, 0.5, "c"), (0.5, 0.9, "d")]
    >>> [(round(slope, 1), what) for slope, what in trace_hull((1.0, 0.0, None), ways)]
    [(0.3, 'b'), (1.3, 'c')]
    """
    taken: list[tuple[float, LayerSettings]] = []
    operations, distance = first[:2]
    while True:
        cheaper = [way for way in ways if way[0] < operations]
        if not cheaper:
            return taken
        slopes = [((way[1] - distance) / (operations - way[0]), way) for way in cheaper]
        slope, best = min(slopes, key=lambda pair: (pair[0], pair[1][0]))
        slope = max([slope, *(earlier for earlier, _ in taken[-1:])])  # on a straight line rounding could swap them
        taken.append((slope, best[2]))
        operations, distance = best[:2]
