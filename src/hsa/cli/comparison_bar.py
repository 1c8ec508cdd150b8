"""Progress of `hsa compare`: one bar over all runs with the time left; in a log, a line per run and every half minute."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from hsa.cli.progress import Log, Pace, format_time_left

if TYPE_CHECKING:
    from rich.console import Console

    from hsa.training.compare import Plan, Run


class ComparisonBar:
    """Observer of a comparison, see `hsa.training.compare.Observer`; `score` is the name of the validation score."""

    def __init__(self, plan: Plan, score: str, console: Console):
        from rich.progress import BarColumn, Progress, TextColumn

        self.plan, self.score, self.console = plan, score, console
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task("", total=plan.num_runs, note="")
        self.log = Log(console)
        self.finished = 0
        self.spent: dict[str, list[float]] = {}  # by model: seconds of each whole run of this session

    def __enter__(self) -> ComparisonBar:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def begin(self, run: Run) -> RunBar:
        """Show that a run begins; return its observer."""
        # A model that failed at every learning rate has no runs with further seeds.
        self.finished = max(self.finished, self.plan.models.index(run.model) * self.runs_per_model)
        self.watched = RunBar(self, run)
        self.show(self.watched, "")
        return self.watched

    def end(self, run: Run) -> None:
        """Count a finished run; in a log, print its line."""
        self.finished += 1
        seconds = self.watched.pace.whole()
        if seconds is not None and run.state == "finished":  # the others ended early
            self.spent.setdefault(run.model, []).append(seconds)
        outcome = f"{self.score} {run.validation[0]:.3f} on validation" if run.state == "finished" else run.state
        now = seconds is not None or run.state == "out of memory"  # a resumed comparison tries such runs again
        how = f"{self.watched.pace.elapsed():.1f} s" if now else "finished before"
        left = format_time_left(self.seconds_left())
        progress = f"run {self.finished} of {self.plan.num_runs}{left}"
        self.log.line(f"{_name(run)}  {outcome}  {how}  ({progress})")

    def measuring(self, model: str, length: int) -> None:
        """Show that the costs at several lengths are measured, after all runs."""
        note = f"time of {model} at {length:,} leaves"
        self.progress.update(self.task, description="measuring", completed=self.plan.num_runs, note=note)
        self.log.progress(f"measuring the {note}")

    @property
    def runs_per_model(self) -> int:
        """Number of runs that are planned for each model."""
        return self.plan.num_runs // len(self.plan.models)

    def show(self, watched: RunBar, note: str) -> None:
        """Update the bar with the state of a run."""
        run, share = watched.run, watched.pace.share
        position = f"run {self.finished + 1} of {self.plan.num_runs}{format_time_left(self.seconds_left(watched))}"
        self.progress.update(
            self.task,
            description=f"{run.model} {run.rate:g} seed {run.seed}",
            completed=self.finished + share,
            note=f"{position}  {note}",
        )
        self.log.progress(f"{_name(run)}  {note}  {100 * share:.0f}% of the run  ({position})")

    def seconds_left(self, watched: RunBar | None = None) -> float | None:
        """Return an estimate of the time left from the runs so far, of the same model if possible; None if unknown."""
        now = watched.pace.whole() if watched is not None else None
        known = {model: statistics.fmean(seconds) for model, seconds in self.spent.items()}
        if watched is not None and now is not None:
            known.setdefault(watched.run.model, now)
        if not known:
            return None
        usual = statistics.fmean(known.values())
        models = [model for model in self.plan.models for _ in range(self.runs_per_model)]
        left = [known.get(model, usual) for model in models[self.finished :]]
        share = watched.pace.share if watched is not None else 0.0
        return sum(left) - (share * left[0] if left else 0.0)


class RunBar:
    """Observer of one run, see `hsa.training.loop.Watcher`."""

    def __init__(self, bar: ComparisonBar, run: Run):
        self.bar, self.run = bar, run
        self.pace = Pace()
        self.loss = self.validation = ""

    def step(self, done: int, total: int, loss: float | None, learning_rate: float) -> None:
        """Show the progress after a step."""
        if self.pace.start is None:
            self.pace.start = (done - 1) / total  # above 0 in a resumed run
        self.pace.share = done / total
        if loss is not None:
            self.loss = f"loss {loss:.3f}"
        self._show()

    def epoch(self, record: Any) -> None:
        """Show the validation score after an epoch."""
        self.validation = f"{self.bar.score} {record.validation:.3f}"
        self._show()

    def done(self) -> None:
        """Do nothing: `ComparisonBar.end` follows."""

    def _show(self) -> None:
        self.bar.show(self, self.validation or self.loss)


def _name(run: Run) -> str:
    """Return the start of the lines of a run."""
    return f"{run.model:<14}  rate {run.rate:<7g}  seed {run.seed}"
