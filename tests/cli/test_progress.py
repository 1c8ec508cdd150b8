"""Progress in logs: a line when a stage begins and ends, and every half minute with the time left."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from hsa.cli import progress
from hsa.cli.comparison_bar import ComparisonBar
from hsa.cli.progress import Bars, TrainingBar
from hsa.training.compare import Plan, Run


@pytest.fixture
def clock(monkeypatch):
    time = SimpleNamespace(now=0.0)
    time.monotonic = lambda: time.now
    monkeypatch.setattr(progress, "time", time)
    return time


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=40)


def lines(console):
    return console.file.getvalue().splitlines()


def test_stages(clock, console):
    with Bars(console).running() as watch:
        count = Bars.counter(watch, "the original [model]", 1200)
        for _ in range(12):
            clock.now += 10
            count(100)
        watch("one step", 1, 1)
        watch("one step", 1, 1)
        watch("nothing to do", 0, 0)
    assert lines(console) == [
        "the original [model] …",
        "the original [model]: 300 of 1,200, 2 min left",
        "the original [model]: 600 of 1,200, 60 s left",
        "the original [model]: 900 of 1,200, 30 s left",
        "the original [model]: 1,200 of 1,200 in 2 min",
        "one step: 1 of 1 in 0 s",
        "nothing to do: 0 of 0 in 0 s",
    ]


def test_a_resumed_stage(clock, console):
    """Steps of an earlier session do not count as progress of this one."""
    with Bars(console).running() as watch:
        watch("fine-tuning", 900, 1000)
        clock.now += 40
        watch("fine-tuning", 940, 1000)
    assert lines(console) == ["fine-tuning …", "fine-tuning: 940 of 1,000, 60 s left"]


def test_lines_of_a_model_in_training(clock, console):
    bar = TrainingBar("hierarchical", "accuracy", console)
    for step in range(1, 81):
        clock.now += 1
        bar.step(step, 80, 0.5 if step % 20 == 0 else None, 1e-3)
        if step == 40:
            bar.epoch(SimpleNamespace(epoch=1, validation=0.75, loss=0.6, seconds=40.0))
    bar.done()
    assert [" ".join(line.split()) for line in lines(console)] == [
        "hierarchical loss 0.500 (step 30 of 80, 50 s left)",
        "hierarchical loss 0.600 epoch 1: accuracy 0.750 40.0 s (step 40 of 80, 40 s left)",
        "hierarchical loss 0.500 epoch 1: accuracy 0.750 (step 70 of 80, 10 s left)",
    ]


def test_lines_of_a_comparison(clock, console):
    bar = ComparisonBar(Plan(("hierarchical", "flat"), (1e-3,), (0, 1)), "accuracy", console)
    watcher = bar.begin(Run("hierarchical", 1e-3, 0))
    for step in range(1, 5):
        clock.now += 10
        watcher.step(step, 10, 0.5, 1e-3)
    bar.measuring("flat", 512)  # ten seconds later: too soon for another line
    clock.now += 30
    bar.measuring("flat", 1024)
    assert [" ".join(line.split()) for line in lines(console)] == [
        "hierarchical rate 0.001 seed 0 loss 0.500 30% of the run (run 1 of 4, 6 min left)",
        "measuring the time of flat at 1,024 leaves",
    ]


def test_no_lines_on_a_terminal(clock):
    console = Console(file=io.StringIO(), force_terminal=True, width=90)
    bar = TrainingBar("hierarchical", "accuracy", console)
    with Bars(console).running() as watch:
        for step in range(1, 4):
            clock.now += 100
            watch("fine-tuning", step, 3)
            bar.step(step, 3, 0.5, 1e-3)
    bar.epoch(SimpleNamespace(epoch=1, validation=0.75, loss=0.6, seconds=40.0))
    bar.done()
    written = console.file.getvalue()
    assert "fine-tuning" in written  # the bar
    for line in ("fine-tuning:", "fine-tuning …", "(step", "epoch 1: accuracy 0.750  40.0 s"):
        assert line not in written
