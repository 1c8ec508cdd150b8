import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hsa.errors import InvalidInput
from hsa.models.saved import load_model
from hsa.training import compare as comparison
from hsa.training.accelerator import make_accelerator
from hsa.training.compare import ENDED, Compared, Plan, Run, compare_models
from hsa.training.experiment import RESULT, Result, Trainer
from hsa.training.failures import Diverged, OutOfMemory
from hsa.training.loop import CHECKPOINT, Interrupted, Silent
from hsa.training.significance import _student, margin
from tests.comparisons import RECIPE, prepared, result, run
from tests.sealing import reseal

PLAN = Plan(("hierarchical", "deepsets"), (1e-3, 1e-2, 3e-2), (5, 6))
SHORT = Plan(("hierarchical", "deepsets"), (1e-3, 1e-2), (5, 6))


class Notes:
    """Observer that records its calls."""

    def __init__(self, stop_at=None):
        self.begun, self.ended, self.stop_at = [], [], stop_at

    def begin(self, run):
        self.begun.append((run.model, run.rate, run.seed))
        return Stopping() if len(self.begun) == self.stop_at else Silent()

    def end(self, run):
        self.ended.append(run)


class Stopping(Silent):
    """Watcher that presses Ctrl-C after the first step."""

    def step(self, done, total, loss, learning_rate):
        if done == 1:
            os.kill(os.getpid(), signal.SIGINT)


def compare(folder, plan=PLAN, **more):
    return compare_models(plan, RECIPE, prepared(), folder, make_accelerator(RECIPE.training, cpu=True), **more)


def scripted(monkeypatch, actual):
    """Replace training: `actual(model, rate, seed)` returns the result of a run, or the error it ends with."""

    def train(name, config, data, options, folder, accelerator, **more):
        ended = actual(name, options.learning_rate, options.seed)
        if isinstance(ended, Exception):
            raise ended
        return ended

    monkeypatch.setattr(comparison, "train_model", train)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Comparison without interruption: its folder, its result, and the observer."""
    folder, notes = tmp_path_factory.mktemp("whole"), Notes()
    return folder, compare(folder, SHORT, observer=notes), notes


# Plans


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"models": ("hierarchical", "flt")},
            r"^models: expected one of hierarchical, .*, got 'flt'\. Did you mean 'flat'\?$",
        ),
        ({"models": ()}, "^models: expected one or more models, got an empty list$"),
        ({"models": ("hierarchical", "hierarchical")}, "^models: expected different models, got hierarchical twice$"),
        ({"rates": ()}, "^rates: expected one or more rates, got an empty list"),
        ({"rates": (1e-3, 0.0)}, "^rates: expected learning rates above 0, such as 1e-3, got 0"),
        ({"rates": (-1e-3,)}, "^rates: expected .*, got -0.001"),
        ({"rates": (math.nan,)}, "^rates: expected .*, got nan"),
        ({"rates": (math.inf,)}, "^rates: expected .*, got inf"),
        ({"rates": (1e-3, 0.0010000001)}, "^rates: expected different rates, got 0.001 twice"),
        ({"seeds": ()}, "^seeds: expected one or more seeds, got an empty list"),
        ({"seeds": (0, 0)}, "^seeds: expected different seeds, got 0 twice"),
    ],
)
def test_invalid_plans(change, message):
    with pytest.raises(InvalidInput, match=message):
        replace(PLAN, **change)


# Runs


def test_every_rate_then_every_seed_of_the_best(whole):
    folder, actual, notes = whole
    assert [model.model for model in actual] == ["hierarchical", "deepsets"]
    assert len(notes.begun) == SHORT.num_runs == 6
    for model, begun in zip(actual, (notes.begun[:3], notes.begun[3:]), strict=True):
        assert begun == [*((model.model, rate, 5) for rate in SHORT.rates), (model.model, model.rate, 6)]
        assert [run.seed for run in model.runs] == [5, 6]
        assert model.runs[0] in model.tried
        best = max(record.validation for run in model.tried for record in run.result.history)
        assert max(record.validation for record in model.runs[0].result.history) == best
        assert model.runs[0].result.scores != model.runs[1].result.scores or model.runs[0].result.history != (
            model.runs[1].result.history
        )
    assert notes.ended == [run for model in actual for run in (*model.tried, model.runs[1])]
    sizes = [model.runs[0].result.parameters for model in actual]
    assert abs(sizes[0] - sizes[1]) < 0.02 * sizes[0]
    folders = {path.parent.relative_to(folder) for path in folder.glob(f"**/{RESULT}")}
    assert folders == {Path(model) / f"{rate:g}" / str(seed) for model, rate, seed in notes.begun}


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_on_a_device(tmp_path, device, precision):
    """Train our model and a baseline, and load the result of the second again."""
    plan = Plan(("hierarchical", "transformer-xl"), (1e-2,), (5,))
    recipe = replace(RECIPE, training=replace(RECIPE.training, mixed_precision=precision))
    data, accelerator = prepared(), make_accelerator(recipe.training, cpu=device == "cpu")
    assert accelerator.device.type == device
    actual = compare_models(plan, recipe, data, tmp_path, accelerator)
    assert [run.state for model in actual for run in model.runs] == ["finished"] * 2
    for model in actual:
        (result,) = model.results
        assert all(math.isfinite(record.loss) and record.seconds > 0 for record in result.history)
        assert result.operations > 0
        if device == "cuda":  # weights, their gradients, and two moments of each
            assert result.peak_memory > 4 * 4 * result.parameters / 2**20
    loaded, classes = load_model(actual[1].runs[0].folder(tmp_path), device)
    with torch.no_grad(), accelerator.autocast():
        predicted = loaded(data.test.batch.to(device)).argmax(-1).cpu()
    right = (predicted == data.test.targets).float().mean()
    assert classes == data.test.classes
    assert float(right) == pytest.approx(actual[1].scores[0], abs=1.5 / len(data.test))  # rounding may decide a tie


def test_rates_and_seeds_are_those_of_training(whole):
    folder, _, notes = whole
    for model, rate, seed in notes.begun:
        options = json.loads((folder / model / f"{rate:g}" / f"{seed}" / ENDED).read_text())["training"]
        assert (options["learning_rate"], options["seed"]) == (rate, seed)


def test_the_best_on_validation_is_kept_not_the_best_in_the_test(tmp_path, monkeypatch):
    scores = {1e-3: (0.9, 0.6), 1e-2: (0.1, 0.8), 3e-2: (0.8, 0.7)}  # test, validation
    scripted(monkeypatch, lambda model, rate, seed: result(model, *scores[rate]))
    assert [model.rate for model in compare(tmp_path)] == [1e-2, 1e-2]


def test_the_best_epoch_counts_and_the_loss_decides_ties():
    def best_of(*history):
        records = tuple(
            replace(result("hierarchical", 0.5).history[0], validation=score, validation_loss=loss)
            for score, loss in history
        )
        return run("hierarchical", 1e-3, 0, result("hierarchical", 0.5, history=records)).validation

    assert best_of((0.5, 1.0), (0.9, 0.5), (0.7, 0.2)) == (0.9, -0.5)
    assert best_of((0.5, 0.4)) > best_of((0.5, 0.5))
    assert Run("hierarchical", 1e-3, 0, "diverged").validation < best_of((-1e9, 1e9))


def test_a_result_means_finished():
    assert Run("hierarchical", 1e-3, 0).state == "begun"
    for state, actual in (
        ("finished", None),
        ("begun", result("hierarchical", 0.5)),
        ("diverged", result("hierarchical", 0.5)),
    ):
        with pytest.raises(
            InvalidInput, match=f"^result: expected a result for a finished run, .*, got .* for a run that is {state}"
        ):
            Run("hierarchical", 1e-3, 0, state, actual)


@pytest.mark.parametrize(
    ("error", "state"), [(Diverged("no number"), "diverged"), (OutOfMemory("full"), "out of memory")]
)
def test_failed_runs_do_not_stop_the_others(tmp_path, monkeypatch, error, state):
    def actual(model, rate, seed):
        if model == "deepsets" or rate == 3e-2 or (rate == 1e-2 and seed == 6):
            return error
        return result(model, 0.5, validation=rate)

    scripted(monkeypatch, actual)
    notes = Notes()
    hsa, deepsets = compare(tmp_path, observer=notes)
    assert hsa.rate == 1e-2
    assert (len(hsa.results), hsa.scores) == (1, [0.5])
    assert [(run.rate, run.seed, run.state) for run in hsa.failed] == [(3e-2, 5, state), (1e-2, 6, state)]
    assert (deepsets.rate, deepsets.runs, deepsets.scores) == (None, (), [])
    assert [(run.rate, run.seed, run.state) for run in deepsets.failed] == [(rate, 5, state) for rate in PLAN.rates]
    assert len(notes.ended) == 7  # no further seeds for a model without a rate

    again = []
    scripted(monkeypatch, lambda *run: again.append(run) or error)
    monkeypatch.setattr(
        Result, "load", lambda folder: result(folder.parent.parent.name, 0.5, float(folder.parent.name))
    )
    assert compare(tmp_path, resume=True) == [hsa, deepsets]
    # A diverged run would diverge again, but there may be more memory another time.
    failed = [(run.model, run.rate, run.seed) for run in notes.ended if run.result is None]
    assert again == ([] if state == "diverged" else failed)


def test_out_of_memory(tmp_path, monkeypatch):
    """One run needs too much memory in its second epoch; with `resume` it continues there."""
    step, full, epochs = Trainer._step, True, []

    def greedy(self, *batch):
        epochs.append((self.options.learning_rate, self.progress.epoch))
        if full and self.progress.epoch == 1 and self.options.learning_rate == 1e-3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 EiB.")
        return step(self, *batch)

    monkeypatch.setattr(Trainer, "_step", greedy)
    (actual,) = compare(tmp_path, Plan(("deepsets",), (1e-3, 1e-2), (5,)))
    assert [run.state for run in actual.tried] == ["out of memory", "finished"]
    note = json.loads((tmp_path / "deepsets/0.001/5" / ENDED).read_text())
    assert note["state"] == "out of memory"
    assert note["message"].startswith("out of memory; try a smaller --batch-tokens")
    full = False
    epochs.clear()
    (actual,) = compare(tmp_path, Plan(("deepsets",), (1e-3, 1e-2), (5,)), resume=True)
    assert set(epochs) == {(1e-3, 1)}
    assert [run.state for run in actual.tried] == ["finished", "finished"]
    (whole,) = compare(tmp_path / "whole", Plan(("deepsets",), (1e-3,), (5,)))
    assert actual.tried[0].validation == whole.tried[0].validation


def test_a_learning_rate_that_diverges(tmp_path):
    actual = compare(tmp_path, Plan(("hierarchical", "deepsets"), (1e-2, 1e30), (0,)))
    for model in actual:
        assert model.rate == 1e-2
        assert [(run.rate, run.seed, run.state) for run in model.failed] == [(1e30, 0, "diverged")]
        assert "the loss is no longer a number" in (tmp_path / model.model / "1e+30/0" / ENDED).read_text()


# Resuming


def test_resumed_runs_have_the_same_results(tmp_path, whole):
    for stop_at in (1, 3, 5):
        with pytest.raises(Interrupted) as caught:
            compare(tmp_path, SHORT, observer=Notes(stop_at), resume=stop_at > 1)
        assert str(caught.value).endswith(f"continue with --resume; {stop_at - 1} of 6 runs are finished")
    again = compare(tmp_path, SHORT, resume=True)
    for model, other in zip(whole[1], again, strict=True):
        assert (model.rate, model.scores) == (other.rate, other.scores)
        assert [run.validation for run in model.tried] == [run.validation for run in other.tried]


def test_finished_runs_are_not_repeated(whole):
    folder, actual, _ = whole
    before = {path: path.stat().st_mtime_ns for path in folder.glob("**/*")}
    assert compare(folder, SHORT, resume=True) == actual
    assert {path: path.stat().st_mtime_ns for path in folder.glob("**/*")} == before


def test_finished_runs_keep_the_model_and_no_checkpoint(whole):
    folder, _, notes = whole
    assert not list(folder.glob(f"**/{CHECKPOINT}"))
    assert len(list(folder.glob("*/*/*/model.safetensors"))) == len(notes.begun)


@pytest.mark.parametrize("stop_at", [1, 2])
def test_a_run_without_its_checkpoint_starts_again(tmp_path, whole, stop_at):
    with pytest.raises(Interrupted):
        compare(tmp_path, SHORT, observer=Notes(stop_at))
    (saved,) = tmp_path.glob(f"**/{CHECKPOINT}")
    saved.unlink()
    assert [model.scores for model in compare(tmp_path, SHORT, resume=True)] == [m.scores for m in whole[1]]


def test_resuming_from_a_checkpoint_at_the_end(tmp_path):
    """A run that was stopped between its last checkpoint and `ended.json` has the same result."""
    plan, kept = Plan(("deepsets",), (1e-2,), (5,)), []

    class Keeping(Silent):
        def done(self):
            kept.append((tmp_path / "deepsets/0.01/5" / CHECKPOINT).read_bytes())

    class Observer(Notes):
        def begin(self, run):
            return Keeping()

    before = compare(tmp_path, plan, observer=Observer())
    (tmp_path / "deepsets/0.01/5" / ENDED).unlink()
    (tmp_path / "deepsets/0.01/5" / CHECKPOINT).write_bytes(kept[0])
    assert compare(tmp_path, plan, resume=True) == before
    assert not (tmp_path / "deepsets/0.01/5" / CHECKPOINT).exists()


def test_models_rates_and_seeds_can_be_added(tmp_path):
    few = compare(tmp_path, Plan(("deepsets",), (1e-2,), (5,)))
    more = compare(tmp_path, Plan(("deepsets", "flat"), (1e-2, 1e-3), (5, 6)), resume=True)
    assert len(more) == 2
    assert few[0].tried[0] in more[0].tried


@pytest.mark.parametrize("rate", [1e-3, 1e30])
def test_resuming_with_other_options(tmp_path, rate):
    """Both finished and diverged runs are checked."""
    plan = Plan(("deepsets",), (rate,), (0,))
    compare(tmp_path, plan)
    other = replace(RECIPE, training=replace(RECIPE.training, epochs=3))
    with pytest.raises(
        InvalidInput,
        match=r"expected epochs = 3, got a checkpoint trained with epochs = 2\. Resume with the options and the data",
    ):
        compare_models(plan, other, prepared(), tmp_path, make_accelerator(other.training, cpu=True), resume=True)
    with pytest.raises(InvalidInput, match="other data"):
        compare_models(
            plan, RECIPE, prepared(sentences=4), tmp_path, make_accelerator(RECIPE.training, cpu=True), resume=True
        )


def test_a_damaged_ended_json(tmp_path):
    plan = Plan(("deepsets",), (1e30,), (0,))
    compare(tmp_path, plan)
    (tmp_path / "deepsets/1e+30/0" / ENDED).write_text("{")
    with pytest.raises(InvalidInput, match=r"ended\.json: .*cannot be read"):
        compare(tmp_path, plan, resume=True)


# Means and significance


def test_means_over_seeds():
    ends = [
        result("hierarchical", 0.5, operations=2.0, training_seconds=3.0, test_seconds=5.0, peak_memory=100.0),
        result("hierarchical", 0.7, operations=4.0, training_seconds=5.0, test_seconds=9.0, peak_memory=7.0),
        result("hierarchical", 0.9, operations=6.0, training_seconds=13.0, test_seconds=13.0, peak_memory=None),
    ]
    runs = tuple(run("hierarchical", 1e-3, seed, end) for seed, end in enumerate(ends))
    actual = Compared("hierarchical", runs[:1], (*runs, Run("hierarchical", 1e-3, 9, "diverged")))
    assert actual.scores == [0.5, 0.7, 0.9]
    assert (actual.operations, actual.training_seconds, actual.test_seconds) == (4, 7, 9)
    assert actual.peak_memory == 53.5
    unknown = Compared(
        "hierarchical", (), (run("hierarchical", 1e-3, 0, result("hierarchical", 0.5, peak_memory=None)),)
    )
    assert unknown.peak_memory is None


@pytest.mark.parametrize("freedom", [1, 2, 4, 9, 10, 11, 15, 40, 1000])
def test_students_distribution(freedom):
    """The density between both points integrates to 95 %."""
    edge = _student(freedom)
    t = np.linspace(0, edge, 200_001)
    density = (1 + t**2 / freedom) ** (-(freedom + 1) / 2)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    assert 2 * scale * float(np.trapezoid(density, t)) == pytest.approx(0.95, abs=2e-4)


@pytest.mark.parametrize("seeds", [(3, 3), (1, 3), (2, 5)])
def test_the_margin_covers_chance(seeds):
    """About 5 % of all pairs of samples of equally good models differ by more than the margin."""
    generator = np.random.default_rng(0)
    wide = 0
    for _ in range(2000):
        first, second = (generator.normal(0.7, 0.05, n).tolist() for n in seeds)
        wide += abs(np.mean(first) - np.mean(second)) > margin(first, second, None)
    assert 0.025 < wide / 2000 < 0.075


def test_margins():
    assert margin([0.5], [0.5], 400) == pytest.approx(1.96 * math.sqrt(0.5 / 402), rel=1e-4)
    assert margin([0.5, 0.5], [0.5, 0.5], 400) == pytest.approx(margin([0.5], [0.5], 400))
    assert margin([1.0], [1.0], 6) == pytest.approx(1.96 * math.sqrt(2 * 7 / 8 * 1 / 8 / 8), rel=1e-4)  # not certain
    seeds = margin([0.4, 0.6], [0.5, 0.5], None)
    assert seeds == pytest.approx(4.303 * 0.1)  # two degrees of freedom; 0.1² = 0.02 / 2
    assert margin([0.4, 0.6], [0.5, 0.5], 400) == pytest.approx(math.hypot(seeds, margin([0.5], [0.5], 400)))
    assert margin([0.4, 0.6], [0.5], None) == pytest.approx(12.706 * math.sqrt(0.02 * 1.5))


def test_results_without_peak_memory(tmp_path):
    compare(tmp_path, Plan(("deepsets",), (1e-2,), (0,)))
    folder = tmp_path / "deepsets/0.01/0"
    actual = json.loads((folder / RESULT).read_text())
    del actual["peak_memory"]
    (folder / RESULT).write_text(json.dumps(actual))
    reseal(folder)
    assert Result.load(folder).peak_memory is None


def test_the_first_model_stays_first(tmp_path):
    compare(tmp_path, Plan(("deepsets",), (1e-2,), (0,)))
    with pytest.raises(
        InvalidInput, match=r"expected deepsets first, as when this comparison began .*, got flat first"
    ):
        compare(tmp_path, Plan(("flat", "deepsets"), (1e-2,), (0,)), resume=True)
    actual = compare(tmp_path, Plan(("deepsets", "flat"), (1e-2,), (0,)), resume=True)
    assert [one.model for one in actual] == ["deepsets", "flat"]
