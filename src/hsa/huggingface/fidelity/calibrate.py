"""The search for settings that keep to a budget.

First every layer alone is converted in every way that is tried (its *sensitivity*): how far the answers move, and what it
saves. Then the layers take steps from exact attention to ever cheaper ways, always the step that saves most for what it
moves. Points along that path are measured, and the budget picks one of them. Last, each head of the converted layers gets
the bias of its pooled nodes that brings its output nearest to exact attention, if that brings the answers nearer too.
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
from hsa.huggingface.attend import probing
from hsa.huggingface.conversion import convert_as, revert
from hsa.huggingface.fidelity.judge import Answers, Judge
from hsa.huggingface.layers import attention_layers, is_sliding
from hsa.huggingface.settings import LayerSettings

CANDIDATES: tuple[LayerSettings, ...] = (
    LayerSettings(hierarchy="windows", branching=(16, 2), near=1, top_k=0),
    LayerSettings(hierarchy="windows", branching=(16, 2), near=1, top_k=4),
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
"""What is tried in each layer."""
BIASES = (-1.0, -0.5, 0.0, 0.5)
POINTS = 10
"""Of the path, measured."""
_STATE = "calibration.json"
_BUDGET = re.compile(r"\s*([a-z0-9]+)\s*([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))\s*(x|%|points?)?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Budget:
    """What to keep to: `ops` at least so many times fewer, or a score that may move by so much.

    >>> Budget.parse("ops 10x"), Budget.parse("accuracy -0.5"), Budget.parse("kept 98%")
    (Budget(metric='ops', value=10.0), Budget(metric='accuracy', value=-0.5), Budget(metric='kept', value=98.0))
    """

    metric: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Budget:
        found = _BUDGET.fullmatch(text)
        if not found:
            raise InvalidInput(
                "budget", given=repr(text), expected='such as "ops 4x", "accuracy -0.5", "kept 98%" or "cosine 0.985"'
            )
        return cls(found[1].lower(), float(found[2]))

    def check(self, known: Sequence[str]) -> None:
        known = [name for name in known if " " not in name]  # of intervals and extremes, which nobody keeps to
        if self.metric not in ("ops", *known):
            raise InvalidInput("budget", given=repr(self.metric), expected=f"one of ops, {', '.join(known)}")
        if self.metric not in ("ops", "kept", "cosine", "perplexity") and self.value > 0:
            raise InvalidInput(
                "budget",
                given=f"{self.metric} {self.value:+g}",
                expected=f"what it may lose, in points, such as {self.metric} -0.5",
            )

    def holds(self, point: Mapping[str, float], original: Mapping[str, float]) -> bool:
        """Changes of scores are in points of a hundred, of perplexity in percent; shares in percent; cosines as they are."""
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
    """What was found.

    settings: by layer; layers that are not there stay exact.
    frontier: the points measured, from the most faithful to the cheapest: `ops` (times fewer), scores, `chosen`.
    sensitivities: per layer and candidate: `distance` of the answers, `ops` that the layer takes, of 1.
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
    """Settings of a model's layers that keep to a budget on the judge's examples. The model is left unconverted.

    Args:
        budget: "ops 10x": ten times fewer operations, all counted, as faithful as can be; "accuracy -0.5": at most half a
            point lost, as cheap as can be; likewise "kept 98%" of the answers, "cosine 0.985", "spearman -0.5",
            "perplexity +1%".
        candidates: what is tried in each layer.
        every_layer: no layer stays exact.
        folder: where to keep what was measured, so that a run that is broken off goes on, and one that is repeated is quick.
        watch: told what is done, how far, and of how much.
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
        """Of all that measurements depend on."""
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
        """Scores, distance and operations of the model with these layers converted; measured once."""
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
        """Of every layer (its number) and candidate (its place)."""
        found: dict[tuple[int, int], dict[str, Any]] = {}
        total = len(self.layers) * len(self.candidates)
        for number in self.layers:
            for place, candidate in enumerate(self.candidates):
                self.watch("each layer alone", len(found), total)
                found[number, place] = self.measure({number: candidate})
        self.watch("each layer alone", total, total)
        return found

    def sensitivity_table(self) -> list[dict[str, Any]]:
        return [
            {
                "layer": number,
                "settings": self.candidates[place].to_json(),
                "distance": found["distance"],
                "ops": found["layer ops"][str(number)] / found["exact layer ops"][str(number)],
            }
            for (number, place), found in self.sensitivities().items()
        ]

    def path(self, every_layer: bool) -> list[dict[int, LayerSettings]]:
        """From the most faithful to the cheapest: at each step one layer takes the next of its good ways."""
        found = self.sensitivities()
        steps: list[tuple[float, int, LayerSettings]] = []
        start: dict[int, LayerSettings] = {}
        for number in self.layers:
            ways = [
                (found[number, place]["layer ops"][str(number)], found[number, place]["distance"], candidate)
                for place, candidate in enumerate(self.candidates)
            ]
            exact = found[number, 0]["exact layer ops"][str(number)]
            first: tuple[float, float, LayerSettings | None] = (exact, 0.0, None)
            if every_layer:
                first = min(ways, key=lambda way: way[1])
                assert first[2] is not None
                start[number] = first[2]
            steps += [(slope, number, way) for slope, way in hull(first, ways)]
        path = [start]
        for _, number, way in sorted(steps, key=lambda step: step[:2]):
            path.append({**path[-1], number: way})
        return path

    def frontier(self, path: list[dict[int, LayerSettings]], budget: Budget) -> list[dict[str, Any]]:
        """Points along the path, and a closer look at where the budget ends."""
        places = sorted({round(i * (len(path) - 1) / max(1, POINTS - 1)) for i in range(POINTS)})
        measured: dict[int, dict[str, Any]] = {}

        def look(place: int) -> dict[str, Any]:
            self.watch("along the path", len(measured), POINTS + 3)
            if place not in measured:
                measured[place] = {"step": place, "converted": len(path[place]), **self.measure(path[place])}
            return measured[place]

        holds = [budget.holds(look(place), self.original) for place in places]
        turn = next((i for i in range(1, len(places)) if holds[i] != holds[i - 1]), None)
        if turn is not None:
            low, high, side = places[turn - 1], places[turn], holds[turn - 1]
            while high - low > 1 and len(measured) < POINTS + 3:
                middle = (low + high) // 2
                if budget.holds(look(middle), self.original) == side:
                    low = middle
                else:
                    high = middle
        self.watch("along the path", POINTS + 3, POINTS + 3)
        return [measured[place] for place in sorted(measured)]

    def with_biases(self, settings: dict[int, LayerSettings], budget: Budget) -> dict[int, LayerSettings]:
        """The same with a bias per head, if that brings answers nearer and the budget is kept as before."""
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


def hull(
    first: tuple[float, float, LayerSettings | None], ways: Sequence[tuple[float, float, LayerSettings]]
) -> list[tuple[float, LayerSettings]]:
    """Ways (operations, distance, what) below the first, each cheaper than the one before, at rising cost in distance.

    >>> ways = [(0.8, 0.10, "a"), (0.6, 0.11, "b"), (0.3, 0.5, "c"), (0.5, 0.9, "d")]
    >>> [(round(slope, 1), what) for slope, what in hull((1.0, 0.0, None), ways)]
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
        slope = max(
            [slope, *(earlier for earlier, _ in taken[-1:])]
        )  # on a straight line rounding could turn them round
        taken.append((slope, best[2]))
        operations, distance = best[:2]
