"""Tests of the time limit, with a clock on which each step takes one second."""

import math
from dataclasses import replace

import pytest

from hsa.errors import InvalidInput
from hsa.training import loop
from hsa.training.loop import Interrupted, Trainer, learning_rate
from hsa.training.options import TrainingOptions
from tests.tasks import QUICK, Log, classifier, data, trainer
from tests.training.test_loop import Interrupting, assert_same, plain

STEPS = 6  # per epoch of the tiny task
TEN_SECONDS = replace(QUICK, epochs=5, minutes=10 / 60)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Clock on which a step takes one second and a validation a thousand."""

    class Clock:
        now = 0.0

        def monotonic(self):
            return self.now

    result = Clock()
    step, evaluate = Trainer._step, Trainer.evaluate

    def slow_step(self, *batch):
        result.now += 1
        return step(self, *batch)

    def slow_evaluate(self, data):
        result.now += 1000
        return evaluate(self, data)

    monkeypatch.setattr(loop, "time", result)
    monkeypatch.setattr(Trainer, "_step", slow_step)
    monkeypatch.setattr(Trainer, "evaluate", slow_evaluate)
    return result


def test_training_ends_and_is_validated_when_time_is_up():
    log = Log()
    run = trainer(TEN_SECONDS, watcher=log)
    losses, plain_losses = [], run._losses

    def noted(out, targets):
        result = plain_losses(out, targets)
        if run.model.training:
            losses.append(float(result.detach().mean()))
        return result

    run._losses = noted
    history = run.fit()
    assert run.steps_per_epoch == STEPS
    assert [record.seconds for record in history] == [6, 4]
    assert log.epochs == history
    warm_up, *losses = losses
    assert warm_up == losses[0]
    assert len(losses) == 10
    assert history[0].loss == pytest.approx(sum(losses[:6]) / 6)
    assert history[1].loss == pytest.approx(sum(losses[6:]) / 4)
    assert history[1].learning_rate == 0
    assert run.progress.seconds == 10


def test_the_first_call_is_not_counted(clock, monkeypatch):
    """Kernels are compiled on first use, for example."""
    backward, known = Trainer._backward, []

    def compiled(self, *batch):
        clock.now += 0 if known else 500
        known.append(None)
        return backward(self, *batch)

    monkeypatch.setattr(Trainer, "_backward", compiled)
    assert [record.seconds for record in trainer(TEN_SECONDS).fit()] == [6, 4]
    assert len(known) == 11


def test_the_warm_up_has_no_side_effects(tmp_path, monkeypatch):
    """Neither weights nor random numbers change, also in a resumed run."""

    def run(folder, **more):
        return trainer(replace(QUICK, epochs=2), model=classifier(dropout=0.3), folder=folder, **more)

    warm = run(tmp_path / "warm", watcher=Interrupting(after=3 * 4))
    with pytest.raises(Interrupted):
        warm.fit()
    again = run(tmp_path / "warm")
    again.resume()
    history = again.fit()
    monkeypatch.setattr(Trainer, "_warm_up", lambda self: None)
    cold = run(tmp_path / "cold")
    assert plain(cold.fit()) == plain(history)
    assert_same(again, cold)


def test_a_finished_run_needs_no_warm_up(tmp_path, monkeypatch):
    trainer(TEN_SECONDS, folder=tmp_path).fit()
    again = trainer(TEN_SECONDS, folder=tmp_path)
    again.resume()
    monkeypatch.setattr(Trainer, "_backward", None)
    assert len(again.fit()) == 2


def test_the_learning_rate_decays_with_steps_or_time():
    total = 5 * STEPS
    for minutes, shares in ((10 / 60, [i / 10 for i in range(10)]), (1000, [i / total for i in range(total)])):
        log, used = Log(), []
        run = trainer(replace(TEN_SECONDS, minutes=minutes, warmup=0.2), watcher=log)
        step = run.optimizer.step

        def spy(run=run, step=step, used=used):
            used.append(run.optimizer.param_groups[0]["lr"])
            step()

        run.optimizer.step = spy
        run.fit()
        assert used == pytest.approx([learning_rate(run.options, share * total, total) for share in shares])
        done = [math.floor(total * share + 1e-9) for share in [*shares[1:], 1.0]]
        assert [call[0] for call in log.steps] == done  # a progress bar is full when time is up
        assert {call[1] for call in log.steps} == {total}


def test_a_long_limit_changes_nothing():
    limited, free = trainer(replace(QUICK, minutes=1000)), trainer(QUICK)
    assert plain(limited.fit()) == plain(free.fit())
    assert_same(limited, free)


def test_resumed_runs_count_their_earlier_time(tmp_path):
    whole = trainer(TEN_SECONDS)
    history = whole.fit()
    with pytest.raises(Interrupted):
        trainer(TEN_SECONDS, folder=tmp_path, watcher=Interrupting(after=3 * 7)).fit()  # 7 of 10 seconds
    log = Log()
    resumed = trainer(TEN_SECONDS, folder=tmp_path, watcher=log)
    resumed.resume()
    assert resumed.progress.seconds == 8
    assert plain(resumed.fit()) == plain(history)
    assert len(log.steps) == 2
    assert_same(resumed, whole)


@pytest.mark.parametrize("after", [27, 30])
def test_interrupted_when_time_is_up(tmp_path, after):
    """An epoch that was interrupted in its last two steps is validated, now or after `resume`."""
    history = trainer(TEN_SECONDS).fit()
    stopped = trainer(TEN_SECONDS, folder=tmp_path, watcher=Interrupting(after))
    with pytest.raises(Interrupted):
        stopped.fit()
    resumed = trainer(TEN_SECONDS, folder=tmp_path)
    resumed.resume()
    assert plain(resumed.fit()) == plain(history)


def test_time_is_up_during_a_checkpoint(tmp_path, clock, monkeypatch):
    """Waiting for the device takes five seconds, so that the time is up when the checkpoint is saved."""
    check = Trainer._check_losses

    def slow_check(self, running):
        clock.now += 5
        return check(self, running)

    monkeypatch.setattr(Trainer, "_check_losses", slow_check)
    stopped = trainer(TEN_SECONDS, folder=tmp_path, watcher=Interrupting(after=3 * 4))
    with pytest.raises(Interrupted):
        stopped.fit()
    assert (stopped.progress.step, stopped.progress.seconds) == (5, 10)
    resumed = trainer(TEN_SECONDS, folder=tmp_path)
    resumed.resume()
    (record,) = resumed.fit()
    assert (record.epoch, record.seconds) == (1, 16)  # one more step, and validation


def test_a_run_out_of_time_has_nothing_left_to_do(tmp_path):
    history = trainer(TEN_SECONDS, folder=tmp_path).fit()
    log = Log()
    again = trainer(TEN_SECONDS, folder=tmp_path, watcher=log)
    again.resume()
    assert (again.fit(), log.steps) == (history, [])


def test_at_least_one_step_is_trained():
    history = trainer(replace(TEN_SECONDS, minutes=1e-6)).fit()
    assert [record.seconds for record in history] == [1]


def test_peak_memory_is_kept_on_resume(tmp_path):
    run = trainer(folder=tmp_path)
    run.fit()
    peak = run.progress.peak_memory
    assert peak is None or 0 <= peak < 10_000
    again = trainer(folder=tmp_path)
    again.resume()
    assert again.progress.peak_memory == peak


def test_peak_memory_is_the_maximum_over_epochs(monkeypatch):
    peaks = iter([5.0, 9.0, 7.0])
    monkeypatch.setattr("hsa.training.loop.PeakMemory.so_far", lambda memory: next(peaks, 1.0))
    run = trainer()
    assert len(run.fit()) > 2
    assert run.progress.peak_memory == 9


def test_only_training_measures_memory(monkeypatch):
    """Evaluation does not reset the peak, which others may measure; a GPU's peak counts from before the model was moved."""
    begun = []

    class Noted(loop.PeakMemory):
        def __init__(self, device, held):
            begun.append(held)
            super().__init__(device)

    monkeypatch.setattr(loop, "PeakMemory", Noted)
    monkeypatch.setattr(loop, "allocated", lambda device: 17.0)
    run = trainer()
    monkeypatch.setattr(loop, "allocated", lambda device: 99.0)
    run.evaluate(data(20))
    assert not begun
    run.fit()
    assert begun == [17.0]


@pytest.mark.gpu
def test_peak_memory_includes_the_model():
    run = trainer(model=classifier(width=256))
    run.fit()
    assert run.progress.peak_memory > sum(4 * p.nbytes for p in run.model.parameters()) / 2**20


def test_invalid_minutes():
    with pytest.raises(InvalidInput, match=r"^minutes: expected 0 or more, got -1$"):
        TrainingOptions(minutes=-1)
    with pytest.raises(InvalidInput, match=r"^minutes: expected 0 or more, got nan"):
        TrainingOptions(minutes=math.nan)
