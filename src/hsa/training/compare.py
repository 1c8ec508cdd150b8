"""Fair comparison of models: equal numbers of parameters, a learning rate tuned for each, several seeds."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from hsa.errors import InvalidInput
from hsa.files import read_json, write_json
from hsa.models.classifier import ModelConfig
from hsa.plain_values import check_fields, from_plain
from hsa.running import Interrupted
from hsa.training import checkpoint
from hsa.training.data.prepare import PreparedData
from hsa.training.experiment import Result, check_models, model_config, train_model
from hsa.training.failures import Ending, NoResult
from hsa.training.loop import CHECKPOINT, Watcher, fingerprint
from hsa.training.options import TrainingOptions
from hsa.training.recipe import Recipe

ENDED, FIRST = "ended.json", "first.json"
State = Literal["begun", "finished"] | Ending


@dataclass(frozen=True)
class Plan:
    """Models, learning rates and seeds of a comparison.

    Args:
        models: Names of the models. The first is the reference; the others are matched to its size.
        rates: Learning rates to try; each model keeps its best.
        seeds: Random seeds of the weights, the order of the data and dropout. Rates are chosen with the first seed.

    Raises:
        InvalidInput: A model is unknown, a rate is not above 0, or a list is empty or has duplicates.
    """

    models: tuple[str, ...]
    rates: tuple[float, ...]
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        check_models(self.models)
        for rate in self.rates:
            if not 0 < rate < math.inf:
                raise InvalidInput("rates", got=f"{rate:g}", expected="learning rates above 0, such as 1e-3")
        names: tuple[tuple[str, Sequence[Any]], ...] = (
            ("models", self.models),
            ("rates", [f"{rate:g}" for rate in self.rates]),  # as in the names of folders
            ("seeds", self.seeds),
        )
        for name, values in names:
            if not values:
                raise InvalidInput(name, got="an empty list", expected=f"one or more {name}")
            if (twice := next((value for value in values if values.count(value) > 1), None)) is not None:
                raise InvalidInput(name, got=f"{twice} twice", expected=f"different {name}")

    @property
    def num_runs(self) -> int:
        """Number of runs: all rates with the first seed, then the other seeds with the best rate.

        >>> Plan(("hierarchical", "flat"), rates=(1e-3, 3e-3), seeds=(0, 1, 2)).num_runs
        8
        """
        return len(self.models) * (len(self.rates) + len(self.seeds) - 1)


@dataclass(frozen=True)
class Run:
    """Run of one model with one learning rate and one seed.

    Attributes:
        state: "begun", or how the run ended.
        result: Result of a finished run; None for all others.
    """

    model: str
    rate: float
    seed: int
    state: State = "begun"
    result: Result | None = None

    def __post_init__(self) -> None:
        if (self.state == "finished") != (self.result is not None):
            expected = "a result for a finished run, None for others"
            raise InvalidInput("result", got=f"{self.result} for a run that is {self.state}", expected=expected)

    def finished(self, result: Result) -> Run:
        """Return the same run with its result."""
        return replace(self, state="finished", result=result)

    def folder(self, base: Path) -> Path:
        """Return the folder of this run."""
        return base / self.model / f"{self.rate:g}" / str(self.seed)

    @property
    def validation(self) -> tuple[float, float]:
        """Validation score and negative loss of the best epoch; −∞ without a result."""
        if self.result is None:
            return -math.inf, -math.inf
        return max((record.validation, -record.validation_loss) for record in self.result.history)


@dataclass(frozen=True)
class Compared:
    """All runs of one model.

    Attributes:
        tried: Runs of every rate with the first seed.
        runs: Runs of every seed with the best rate; empty if no rate has a result.
    """

    model: str
    tried: tuple[Run, ...]
    runs: tuple[Run, ...]

    @property
    def results(self) -> list[Result]:
        """Results of the seeds that have one."""
        return [run.result for run in self.runs if run.result is not None]

    @property
    def rate(self) -> float | None:
        """Best learning rate; None if no rate has a result."""
        return self.runs[0].rate if self.runs else None

    @property
    def failed(self) -> list[Run]:
        """All runs without a result."""
        return [run for run in dict.fromkeys([*self.tried, *self.runs]) if run.result is None]

    @property
    def scores(self) -> list[float]:
        """Test accuracy or R² of every seed."""
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
        """Median over seeds, in MiB: the first run of a process also counts one-time allocations."""
        known = [result.peak_memory for result in self.results if result.peak_memory is not None]
        return statistics.median(known) if known else None

    def mean(self, of: Callable[[Result], float]) -> float:
        """Return the mean of a quantity over seeds."""
        return statistics.fmean(map(of, self.results))


@dataclass(frozen=True)
class Note:
    """Content of `ended.json`: how a run ended, the reason if it has no result, and its options."""

    state: State
    message: str | None
    training: dict[str, Any]


class Observer(Protocol):
    """Callbacks of a comparison."""

    def begin(self, run: Run) -> Watcher:
        """Return the watcher of a run that begins."""

    def end(self, run: Run) -> None:
        """Handle the end of a run."""


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
    """Train all models of a plan, each run in `folder/MODEL/RATE/SEED`. A run without a result does not stop the others.

    Args:
        plan: Models, learning rates and seeds.
        recipe: Options of the models and of training; the plan sets the learning rate and the seed.
        prepared: Data.
        folder: Folder of the comparison.
        accelerator: Result of `make_accelerator`.
        resume: Whether to keep the runs that finished or diverged, and to continue the others.
        only: Models to train now; None for all. Several processes can share a folder, each with some of the models.
        observer: Callbacks of the comparison.

    Raises:
        Interrupted: Ctrl-C or SIGTERM arrived; the message says how far the comparison got.
        InvalidInput: With `resume`, a run in the folder had other options or data.
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
    """Raise an error if the comparison in the folder began with another first model, which sets the size of all."""
    path = folder / FIRST
    was = None
    if path.is_file():
        first_model = read_json(path, "the first model of a comparison")
        check_fields(first_model, ("model",), str(path))
        was = first_model["model"]
    accelerator.wait_for_everyone()  # until all processes have read the file
    if was is None and accelerator.is_main_process:
        write_json(path, {"model": first})
    if was not in (None, first):
        raise InvalidInput(
            "models",
            got=f"{first} first",
            expected=f"{was} first, as when this comparison began (the others are matched to its size)",
            fix="Add new models after it, or compare in another folder",
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
    # Through JSON, which turns tuples into lists, to compare with the file.
    now = json.loads(json.dumps(fingerprint(config, options, prepared.train, prepared.validation)))
    if resume and note.is_file():
        ended = from_plain(Note, read_json(note, "how a run ended"), str(note))
        checkpoint.check_same(note, ended.training, now)
        if ended.state == "finished":
            return begun.finished(Result.load(folder))
        if ended.state == "diverged":
            return replace(begun, state="diverged")
        # Out of memory: try again, because there may be more memory now.
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
        write_json(note, asdict(Note(run.state, message, now)))
        if run.state == "finished":  # a checkpoint is three times as large as the model, and no longer needed
            (folder / CHECKPOINT).unlink(missing_ok=True)
    accelerator.wait_for_everyone()
    return run
