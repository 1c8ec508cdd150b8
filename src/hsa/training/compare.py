"""Compare models fairly: as many parameters each, a learning rate chosen on validation for each, several seeds."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from hsa.errors import InvalidInput
from hsa.files import read_json, write_json
from hsa.models.classifier import ModelConfig
from hsa.training import checkpoint
from hsa.training.data.prepare import PreparedData
from hsa.training.experiment import Result, check_models, model_config, train_model
from hsa.training.failures import Ending, NoResult
from hsa.training.loop import CHECKPOINT, Interrupted, Watcher, fingerprint
from hsa.training.options import TrainingOptions
from hsa.training.recipe import Recipe

ENDED, FIRST = "ended.json", "first.json"
State = Literal["begun", "finished"] | Ending


@dataclass(frozen=True)
class Plan:
    """Which runs a comparison has.

    Args:
        models: names; all have as many parameters as the first.
        rates: Learning rates to try; each model keeps its best.
        seeds: of the weights, the order of the data and dropout; rates are chosen with the first.

    Raises:
        InvalidInput: unknown models; no models, rates or seeds; some twice; a rate that is not above 0.
    """

    models: tuple[str, ...]
    rates: tuple[float, ...]
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        check_models(self.models)
        for rate in self.rates:
            if not 0 < rate < math.inf:
                raise InvalidInput("rates", given=f"{rate:g}", expected="learning rates above 0, such as 1e-3")
        names: tuple[tuple[str, Sequence[Any]], ...] = (
            ("models", self.models),
            ("rates", [f"{rate:g}" for rate in self.rates]),  # as folders are named
            ("seeds", self.seeds),
        )
        for name, values in names:
            if not values:
                raise InvalidInput(name, given="none", expected="one or more")
            if (twice := next((value for value in values if values.count(value) > 1), None)) is not None:
                raise InvalidInput(name, given=f"{twice} twice", expected="each once")

    @property
    def num_runs(self) -> int:
        """
        >>> Plan(("hierarchical", "flat"), (1e-3, 3e-3), (0, 1, 2)).num_runs  # two rates, then two more seeds, of either
        8
        """
        return len(self.models) * (len(self.rates) + len(self.seeds) - 1)


@dataclass(frozen=True)
class Run:
    """One model, one learning rate, one seed.

    Attributes:
        state: begun, or how it ended.
        result: of a run that is finished, and of no other.
    """

    model: str
    rate: float
    seed: int
    state: State = "begun"
    result: Result | None = None

    def __post_init__(self) -> None:
        if (self.state == "finished") != (self.result is not None):
            raise InvalidInput(
                "result", given=f"{self.result} of a run that is {self.state}", expected="one if finished"
            )

    def finished(self, result: Result) -> Run:
        """The same run with its result."""
        return replace(self, state="finished", result=result)

    def folder(self, base: Path) -> Path:
        return base / self.model / f"{self.rate:g}" / str(self.seed)

    @property
    def validation(self) -> tuple[float, float]:
        """The score of the best epoch, and minus its loss; no result is worse than all else."""
        if self.result is None:
            return -math.inf, -math.inf
        return max((record.validation, -record.validation_loss) for record in self.result.history)


@dataclass(frozen=True)
class Compared:
    """What came of one model.

    Attributes:
        tried: every rate with the first seed.
        runs: every seed with the best rate; none where no rate gave a result.
    """

    model: str
    tried: tuple[Run, ...]
    runs: tuple[Run, ...]

    @property
    def results(self) -> list[Result]:
        """Of the seeds that have one."""
        return [run.result for run in self.runs if run.result is not None]

    @property
    def rate(self) -> float | None:
        return self.runs[0].rate if self.runs else None

    @property
    def failed(self) -> list[Run]:
        """Those without a result."""
        return [run for run in dict.fromkeys([*self.tried, *self.runs]) if run.result is None]

    @property
    def scores(self) -> list[float]:
        """Accuracy or R² of every seed."""
        return [result.scores.main for result in self.results]

    @property
    def operations(self) -> float:
        return self.mean(lambda result: result.operations)

    @property
    def training_seconds(self) -> float:
        return self.mean(lambda result: result.training_seconds)

    @property
    def test_seconds(self) -> float:
        return self.mean(lambda result: result.test_seconds)

    @property
    def peak_memory(self) -> float | None:
        """Of the usual run: the first one of a process also takes what the process needs once."""
        known = [result.peak_memory for result in self.results if result.peak_memory is not None]
        return statistics.median(known) if known else None

    def mean(self, of: Callable[[Result], float]) -> float:
        return statistics.fmean(map(of, self.results))


class Observer(Protocol):
    """Who is told how a comparison goes."""

    def begin(self, run: Run) -> Watcher: ...

    def end(self, run: Run) -> None: ...


def compare_models(
    plan: Plan,
    recipe: Recipe,
    prepared: PreparedData,
    folder: Path,
    accelerator: Any,
    *,
    resume: bool = False,
    only: Collection[str] | None = None,
    observer: Observer | None = None,
) -> list[Compared]:
    """Train all models of a plan, every run in `folder/MODEL/RATE/SEED`; one without a result does not stop the others.

    Args:
        recipe: the options of models and of training, but for rate and seed.
        resume: runs that finished or diverged are taken as they are, others go on, or begin where nothing was saved.
        only: these models now; processes that each take some can share a folder.

    Raises:
        Interrupted: Ctrl-C was pressed; says how far it came.
        InvalidInput: with `resume`, a run in the folder had other options or data.
    """
    configs = {name: model_config(prepared, recipe.model, name, plan.models[0], recipe.extra) for name in plan.models}
    _check_first(folder, plan.models[0], accelerator)
    done = 0

    def run(model: str, rate: float, seed: int) -> Run:
        nonlocal done
        begun = Run(model, rate, seed)
        options = replace(recipe.training, learning_rate=rate, seed=seed)
        watcher = observer.begin(begun) if observer else None
        try:
            ended = _run(begun, configs[model], prepared, options, folder, accelerator, resume, watcher)
        except Interrupted as stop:
            raise Interrupted(f"{stop}; {done} of {plan.num_runs} runs are finished") from None
        done += 1
        if observer:
            observer.end(ended)
        return ended

    return [_compare(model, plan, run) for model in plan.models if only is None or model in only]


def _check_first(folder: Path, first: str, accelerator: Any) -> None:
    """The first model sets the size of all: it must stay what it was."""
    path = folder / FIRST
    was = read_json(path, "the first model of a comparison")["model"] if path.is_file() else None
    accelerator.wait_for_everyone()  # all have looked
    if was is None and accelerator.is_main_process:
        write_json(path, {"model": first})
    if was not in (None, first):
        raise InvalidInput(
            "models",
            given=f"{first} first, in a comparison that began with {was}",
            expected=f"{was} first: all others are as large as it",
            fix="add models after it, or compare into another folder",
        )


def _compare(model: str, plan: Plan, run: Callable[[str, float, int], Run]) -> Compared:
    first, *others = plan.seeds
    tried = tuple(run(model, rate, first) for rate in plan.rates)
    best = max(tried, key=lambda run: run.validation)
    if best.result is None:
        return Compared(model, tried, ())
    return Compared(model, tried, (best, *(run(model, best.rate, seed) for seed in others)))


def _run(
    begun: Run,
    config: ModelConfig,
    prepared: PreparedData,
    options: TrainingOptions,
    base: Path,
    accelerator: Any,
    resume: bool,
    watcher: Watcher | None,
) -> Run:
    folder = begun.folder(base)
    note = folder / ENDED
    # As JSON gives it back, which knows no tuples.
    now = json.loads(json.dumps(fingerprint(config, options, prepared.train, prepared.validation)))
    if resume and note.is_file():
        ended = read_json(note, "how a run ended")
        checkpoint.check_same(note, ended["training"], now)
        if ended["state"] == "finished":
            return begun.finished(Result.load(folder))
        if ended["state"] == "diverged":
            return replace(begun, state="diverged")
        # There may be room now.
    note.unlink(missing_ok=True)
    message = None
    try:
        result = train_model(
            begun.model, config, prepared, options, folder, accelerator, resume=resume, watcher=watcher
        )
        run = begun.finished(result)
    except NoResult as error:
        run, message = replace(begun, state=error.ending), str(error)
    if accelerator.is_main_process:
        write_json(note, {"state": run.state, "message": message, "training": now})
        if run.state == "finished":  # what it would take to go on is as large as the model three times over
            (folder / CHECKPOINT).unlink(missing_ok=True)
    accelerator.wait_for_everyone()
    return run
