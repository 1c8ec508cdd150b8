import json
import math
import os
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hsa.errors import HsaWarning, InvalidInput
from hsa.models.saved import load_model
from hsa.training import checkpoint
from hsa.training.accelerator import make_accelerator
from hsa.training.failures import Diverged
from hsa.training.loop import CHECKPOINT, Interrupted, Trainer, learning_rate
from hsa.training.options import TrainingOptions
from tests.tasks import QUICK, Log, classifier, data, mixed, trainer

OPERATORS = ("hierarchical", "multiscale", "clustered", "bottom-up", "flat", "none")
ROOT = Path(__file__).parents[2]


class Interrupting(Log):
    """Watcher that presses Ctrl-C after some steps."""

    def __init__(self, after):
        super().__init__()
        self.after = after

    def step(self, done, total, loss, learning_rate):
        super().step(done, total, loss, learning_rate)
        if done == self.after:
            os.kill(os.getpid(), signal.SIGINT)


def plain(history):
    """Return the history without times, which may differ."""
    return [{name: value for name, value in asdict(record).items() if name != "seconds"} for record in history]


def assert_same(run, other):
    """Compare weights, history and predictions bit for bit."""
    for name, tensor in other.model.state_dict().items():
        assert torch.equal(run.model.state_dict()[name], tensor), name
    test = data(11, run.config.task, seed=2)
    assert np.array_equal(run.evaluate(test).outputs, other.evaluate(test).outputs)


@pytest.mark.parametrize("kind", OPERATORS)
def test_training_with_every_kind_of_attention(kind):
    run = trainer(replace(QUICK, epochs=6), model=classifier(kind))
    before = run.evaluate(run.validation)
    history = run.fit()
    after = run.evaluate(run.validation)
    assert history[-1].loss < 0.5 * history[0].loss
    assert after.loss < 0.7 * before.loss
    assert after.scores.accuracy > 0.85
    assert (after.operations == 0) == (kind == "none")


@pytest.mark.parametrize("kind", ["hierarchical", "flat"])
@pytest.mark.parametrize("task", ["regression", "tokens"])
def test_training_with_other_tasks(kind, task):
    run = trainer(replace(QUICK, epochs=5), model=classifier(kind, task), task=task)
    before = run.evaluate(run.validation)
    run.fit()
    after = run.evaluate(run.validation)
    assert after.loss < 0.3 * before.loss
    assert after.scores.main > 0.9
    assert after.predicted.shape == run.validation.targets.shape


def test_the_loss_of_an_evaluation_is_the_mean_over_examples():
    run = trainer(replace(QUICK, batch_size=3), task="tokens")
    result = run.evaluate(run.validation)
    losses = torch.nn.functional.cross_entropy(torch.tensor(result.outputs), run.validation.targets, reduction="none")
    means = [part.mean() for part in losses.split(run.validation.lengths.tolist())]
    assert result.loss == pytest.approx(float(torch.stack(means).mean()), rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["flat", "hierarchical", "multiscale"])
def test_mixed_precision(kind, precision):
    options = replace(QUICK, mixed_precision=precision)
    run = trainer(options, model=classifier(kind), accelerator=make_accelerator(options, cpu=True))
    history = run.fit()
    assert history[-1].loss < history[0].loss
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    assert np.isfinite(run.evaluate(run.validation).outputs).all()


def test_precision_can_change_within_a_process():
    for precision in ("bf16", "no", "bf16"):
        accelerator = make_accelerator(replace(QUICK, mixed_precision=precision), cpu=True)
        assert accelerator.mixed_precision == precision


def test_the_device_can_change_within_a_process(monkeypatch):
    for device in ("cpu", "meta", "cpu"):
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", device)
        assert make_accelerator(QUICK, cpu=True).device.type == device


@pytest.mark.gpu
def test_a_gpu_after_the_cpu_and_the_cpu_after_a_gpu():
    for device in ("cpu", "cuda", "cpu"):
        assert make_accelerator(QUICK, cpu=device == "cpu").device.type == device


def test_sharding_needs_several_processes():
    with pytest.raises(
        InvalidInput,
        match=r"^fsdp: expected several processes to shard the model over, got one\. .*torchrun --nproc-per-node",
    ):
        make_accelerator(QUICK, fsdp=True, cpu=True)


# Batches


@pytest.mark.parametrize("tokens", [9, 25, 60, 10_000])
def test_every_example_is_seen_once_per_epoch(tokens):
    run = trainer(replace(QUICK, epochs=7, batch_tokens=tokens, batch_size=11))
    for epoch in range(7):
        batches = run._epoch_batches(epoch)
        assert len(batches) == run.steps_per_epoch
        assert sorted(np.concatenate(batches).tolist()) == list(range(40))
        for batch in batches:
            assert 1 <= len(batch) <= 11
            assert len(batch) == 1 or run.train.lengths[batch].sum() <= tokens
    first, second = (np.concatenate(run._epoch_batches(epoch)).tolist() for epoch in (0, 1))
    assert first != second
    assert np.concatenate(trainer(run.options)._epoch_batches(1)).tolist() == second


def test_the_watcher_is_called_for_every_step_and_epoch():
    log = Log()
    run = trainer(replace(QUICK, batch_tokens=40), watcher=log)
    history = run.fit()
    assert [done for done, *_ in log.steps] == list(range(1, run.total_steps + 1))
    assert {total for _, total, *_ in log.steps} == {3 * run.steps_per_epoch}
    assert (log.epochs, log.finished) == (history, 1)
    ends = [loss for done, _, loss, _ in log.steps if done % run.steps_per_epoch == 0]
    assert all(loss is not None for loss in ends)
    assert all(record.seconds > 0 for record in history)


# Learning rates


def rates(**changes):
    run = trainer(TrainingOptions(epochs=4, learning_rate=0.01, batch_size=4, **changes))
    return np.array([learning_rate(run.options, step, run.total_steps) for step in range(run.total_steps + 1)])


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [0.0, 0.25])
def test_schedules(schedule, warmup):
    result = rates(schedule=schedule, warmup=warmup)
    warm = round(warmup * 40)
    assert result.max() == pytest.approx(0.01)
    assert (np.diff(result[: warm + 1]) > 0).all()
    rest = result[warm:]
    if schedule == "constant":
        assert (rest == 0.01).all()
        return
    assert (np.diff(rest) < 0).all()
    assert rest[-1] == pytest.approx(0, abs=1e-9)
    assert 0 < rest[-2] < 0.0005
    middle = 0.005
    assert rest[len(rest) // 2] == pytest.approx(middle, rel=0.1)


def test_the_optimizer_follows_the_schedule():
    log, used = Log(), []
    run = trainer(replace(QUICK, warmup=0.3), watcher=log)
    step = run.optimizer.step

    def spy():
        used.append({group["lr"] for group in run.optimizer.param_groups})
        step()

    run.optimizer.step = spy
    run.fit()
    assert used == [{learning_rate(run.options, i, run.total_steps)} for i in range(run.total_steps)]


def test_only_matrices_are_decayed():
    run = trainer(replace(QUICK, weight_decay=0.3))
    decayed, kept = run.optimizer.param_groups
    names = {id(p): name for name, p in run.model.named_parameters()}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    assert {id(p) for group in (decayed, kept) for p in group["params"]} == set(names)
    assert all(p.ndim >= 2 for p in decayed["params"])
    assert any("tables" in names[id(p)] for p in kept["params"])


# The best weights


def scripted(run, scores, monkeypatch):
    """Train with these validation scores and losses; return the history and the weights of every epoch."""
    weights, evaluate = [], Trainer.evaluate

    def scripted_evaluate(self, data):
        result = evaluate(self, data)
        weights.append({name: tensor.clone() for name, tensor in self.model.state_dict().items()})
        score, loss = scores[len(weights) - 1]
        return replace(result, scores=replace(result.scores, accuracy=score), loss=loss)

    monkeypatch.setattr(Trainer, "evaluate", scripted_evaluate)
    history = run.fit()
    monkeypatch.undo()
    return history, weights


def test_the_best_epoch_is_kept(monkeypatch):
    run = trainer(replace(QUICK, epochs=4))
    history, weights = scripted(run, [(0.5, 1.0), (0.8, 0.7), (0.7, 0.1), (0.6, 0.1)], monkeypatch)
    assert [record.validation for record in history] == [0.5, 0.8, 0.7, 0.6]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in run.model.state_dict().items())
    assert any(not torch.equal(weights[1][name], weights[3][name]) for name in weights[1])


def test_the_lower_loss_breaks_ties(monkeypatch):
    run = trainer(replace(QUICK, epochs=4))
    _, weights = scripted(run, [(0.8, 1.0), (0.8, 0.6), (0.8, 0.9), (0.7, 0.1)], monkeypatch)
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in run.model.state_dict().items())


@pytest.mark.parametrize(("patience", "epochs"), [(0, 9), (1, 3), (3, 5)])
def test_patience(monkeypatch, patience, epochs):
    run = trainer(replace(QUICK, epochs=9, patience=patience))
    history, _ = scripted(run, [(0.5, 1.0), (0.8, 0.7), *[(0.7, 0.1)] * 7], monkeypatch)
    assert len(history) == epochs


# Resuming


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("hierarchical", "classification"),
        ("clustered", "classification"),
        ("flat", "regression"),
        ("multiscale", "tokens"),
    ],
)
def test_resuming_within_an_epoch_is_exact(tmp_path, kind, task):
    if kind == "multiscale" and torch.cuda.is_available():
        pytest.skip("on a GPU its gradients add up in no fixed order")
    options = replace(QUICK, batch_size=5)

    def start(folder, watcher=None):
        model = classifier(kind, task, dropout=0.3)
        return trainer(options, task=task, model=model, folder=tmp_path / folder, watcher=watcher)

    whole = start("a")
    history = whole.fit()

    stopped = start("b", Interrupting(after=11))  # 8 steps per epoch
    with pytest.raises(Interrupted, match=rf"^stopped after 12 of 24 steps; .*{CHECKPOINT}, continue with --resume$"):
        stopped.fit()
    assert (stopped.progress.epoch, stopped.progress.step) == (1, 4)

    torch.manual_seed(99)  # the checkpoint restores the random state
    resumed = start("b")
    resumed.resume()
    assert plain(resumed.fit()) == plain(history)
    assert_same(resumed, whole)


@pytest.mark.parametrize("after", [7, 8])
def test_resuming_at_the_end_of_an_epoch(tmp_path, after):
    options = replace(QUICK, batch_size=5)
    whole = trainer(options, model=classifier("none", dropout=0.3), folder=tmp_path / "a")
    history = whole.fit()
    stopped = trainer(
        options, model=classifier("none", dropout=0.3), folder=tmp_path / "b", watcher=Interrupting(after)
    )
    with pytest.raises(Interrupted):
        stopped.fit()
    resumed = trainer(options, model=classifier("none", seed=5, dropout=0.3), folder=tmp_path / "b")
    resumed.resume()
    assert plain(resumed.fit()) == plain(history)
    assert_same(resumed, whole)


def test_interrupted_twice(tmp_path):
    options = replace(QUICK, batch_size=5)
    whole = trainer(options, model=classifier("none", dropout=0.3), folder=tmp_path / "a")
    history = whole.fit()
    for after in (2, 13):
        run = trainer(
            options, model=classifier("none", dropout=0.3), folder=tmp_path / "b", watcher=Interrupting(after)
        )
        if after > 2:
            run.resume()
        with pytest.raises(Interrupted):
            run.fit()
    last = trainer(options, model=classifier("none", dropout=0.3), folder=tmp_path / "b")
    last.resume()
    assert plain(last.fit()) == plain(history)
    assert_same(last, whole)


def test_checkpoints_by_the_clock_change_nothing(tmp_path):
    options = replace(QUICK, checkpoint_minutes=1e-9)
    often = trainer(options, model=classifier("none", dropout=0.3), folder=tmp_path)
    history = often.fit()
    seldom = trainer(QUICK, model=classifier("none", dropout=0.3))
    assert plain(seldom.fit()) == plain(history)
    assert_same(often, seldom)


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    run = trainer(folder=tmp_path)
    history = run.fit()
    log = Log()
    again = trainer(model=classifier("none", seed=5), folder=tmp_path, watcher=log)
    again.resume()
    assert again.fit() == history
    assert log.steps == []
    assert_same(again, run)


def test_a_run_that_ran_out_of_patience_has_nothing_left_to_do(tmp_path, monkeypatch):
    options = replace(QUICK, epochs=9, patience=1)
    run = trainer(options, folder=tmp_path)
    history, _ = scripted(run, [(0.5, 1.0), (0.4, 1.0)], monkeypatch)
    log = Log()
    again = trainer(options, folder=tmp_path, watcher=log)
    again.resume()
    assert (again.fit(), log.steps) == (history, [])


LONGER = (
    r": continues to 5 epochs instead of 2\. From here the learning rate follows the schedule of 5 epochs \(0.01 now\)"
)


@pytest.mark.parametrize("after", [None, 3, 6])
def test_more_epochs_at_a_constant_rate_are_one_run(tmp_path, after):
    """A run that is continued with more epochs, finished or not, equals one run of all epochs if there is no warm-up."""
    short, long = (replace(QUICK, epochs=epochs, schedule="constant", warmup=0.0) for epochs in (2, 5))
    whole = trainer(long, model=classifier("none", dropout=0.3), folder=tmp_path / "a")
    history = whole.fit()
    watcher = Log() if after is None else Interrupting(after)
    first = trainer(short, model=classifier("none", dropout=0.3), folder=tmp_path / "b", watcher=watcher)
    with nullcontext() if after is None else pytest.raises(Interrupted):
        first.fit()
    resumed = trainer(long, model=classifier("none", seed=5, dropout=0.3), folder=tmp_path / "b")
    with pytest.warns(HsaWarning, match=LONGER):
        resumed.resume(longer=True)
    assert plain(resumed.fit()) == plain(history)
    assert_same(resumed, whole)
    again = trainer(long, model=classifier("none", dropout=0.3), folder=tmp_path / "b")
    again.resume(longer=True)  # without a warning
    assert again.is_over


def test_more_epochs_follow_the_new_schedule(tmp_path):
    trainer(QUICK, folder=tmp_path).fit()
    longer = replace(QUICK, epochs=6)
    log = Log()
    run = trainer(longer, folder=tmp_path, watcher=log)
    with pytest.warns(HsaWarning, match=r"schedule of 6 epochs \(0.0053 now\)"):
        run.resume(longer=True)
    assert [record.epoch for record in run.fit()] == [1, 2, 3, 4, 5, 6]
    steps = run.steps_per_epoch
    assert [step[:2] for step in log.steps] == [(done, 6 * steps) for done in range(3 * steps + 1, 6 * steps + 1)]
    assert [rate for *_, rate in log.steps] == [
        pytest.approx(learning_rate(longer, done, 6 * steps)) for done in range(3 * steps + 1, 6 * steps + 1)
    ]


def test_an_epoch_that_has_begun_keeps_its_batches(tmp_path):
    """More epochs may need more batches per epoch, because of the lengths of the examples."""
    short, long = (replace(QUICK, epochs=epochs, batch_tokens=24) for epochs in (1, 30))
    first = trainer(short, folder=tmp_path, watcher=Interrupting(2))
    with pytest.raises(Interrupted):
        first.fit()
    resumed = trainer(long, folder=tmp_path)
    assert resumed.steps_per_epoch > first.steps_per_epoch
    with pytest.warns(HsaWarning):
        resumed.resume(longer=True)
    before, now = first._epoch_batches(0), resumed._epoch_batches(0)
    assert [batch.tolist() for batch in now] == [batch.tolist() for batch in before]
    history = resumed.fit()
    assert (len(history), resumed.progress.epoch_steps) == (30, resumed.steps_per_epoch)


def test_more_epochs_after_patience_ran_out(tmp_path, monkeypatch):
    options = replace(QUICK, epochs=9, patience=1)
    history, _ = scripted(trainer(options, folder=tmp_path), [(0.5, 1.0), (0.4, 1.0)], monkeypatch)
    again = trainer(replace(options, epochs=20), folder=tmp_path)
    with pytest.warns(HsaWarning, match="ended before its 9 epochs because of --patience, so that more epochs do not"):
        again.resume(longer=True)
    assert again.fit() == history


def test_a_second_ctrl_c_ends_at_once():
    class Impatient(Log):
        def step(self, *arguments):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer(watcher=Impatient()).fit()
    assert signal.getsignal(signal.SIGINT) is before


def test_training_outside_the_main_thread_leaves_signals_alone():
    histories = []
    thread = threading.Thread(target=lambda: histories.append(trainer(replace(QUICK, epochs=1)).fit()))
    thread.start()
    thread.join()
    assert len(histories[0]) == 1


def test_no_thread_is_left_behind(tmp_path):
    options = replace(QUICK, epochs=1, batch_size=2)
    trainer(options).fit()
    with pytest.raises(Interrupted) as stop:
        trainer(options, folder=tmp_path, watcher=Interrupting(3)).fit()
    assert stop.tb is not None  # keeps the frame of the loop alive, which must not keep the thread
    assert [thread for thread in threading.enumerate() if thread.name.startswith("hsa-prefetch")] == []


# Invalid checkpoints


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"options": replace(QUICK, learning_rate=0.5)},
            r"learning_rate = 0.5, got a checkpoint trained with learning_rate = 0.01\. Resume with the options",
        ),
        ({"options": replace(QUICK, epochs=4)}, "epochs = 4, got a checkpoint trained with epochs = 3"),
        (
            {"model": classifier("none", width=14)},
            "encoder.width = 14, got a checkpoint trained with encoder.width = 12",
        ),
        ({"model": classifier("flat")}, "encoder.kind = flat, got a checkpoint trained with encoder.kind = none"),
        (
            {"model": classifier("none", include_self=False)},
            "encoder.include_self = False, got a checkpoint trained with encoder.include_self = True",
        ),
        ({"train": data(41)}, "examples = 41, got a checkpoint trained with examples = 40"),
        (
            {"train": data(40, seed=7)},
            "expected a checkpoint of a run on these data, got a checkpoint of a run on other data",
        ),
        ({"validation": data(20, seed=7)}, "got a checkpoint of a run on other data"),
    ],
)
def test_resuming_with_other_options_or_data(tmp_path, change, message):
    trainer(replace(QUICK), folder=tmp_path).fit()
    other = trainer(folder=tmp_path, **change)
    before = {name: tensor.clone() for name, tensor in other.model.state_dict().items()}
    with pytest.raises(InvalidInput, match=message) as caught:
        other.resume()
    assert caught.value.where == str(tmp_path / CHECKPOINT)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.model.state_dict().items())


def test_other_labels_are_other_data(tmp_path):
    train = data(40)
    trainer(folder=tmp_path, train=train).fit()
    with pytest.raises(InvalidInput, match="other data"):
        trainer(folder=tmp_path, train=replace(train, targets=1 - train.targets)).resume()


def test_time_between_checkpoints_may_change(tmp_path):
    trainer(folder=tmp_path).fit()
    trainer(replace(QUICK, checkpoint_minutes=77), folder=tmp_path).resume()


def test_nothing_to_resume(tmp_path):
    with pytest.raises(
        InvalidInput, match=rf"{CHECKPOINT}: no such file; expected a checkpoint\. There is nothing to resume"
    ):
        trainer(folder=tmp_path).resume()
    with pytest.raises(InvalidInput, match="folder: not given; expected a folder with a checkpoint to resume from"):
        trainer().resume()


# Divergence


def poisoned(run, step):
    """Make the loss of one step NaN."""
    losses = run._losses

    def worse(out, targets):
        result = losses(out, targets)
        done = run.progress.epoch * run.steps_per_epoch + run.progress.step
        return result * math.nan if done == step and run.model.training else result

    run._losses = worse
    return run


def test_divergence(tmp_path):
    run = poisoned(trainer(folder=tmp_path), step=8)  # 6 per epoch
    path = tmp_path / CHECKPOINT
    with pytest.raises(Diverged) as caught:
        run.fit()
    message = str(caught.value)
    assert message.startswith("the loss is no longer a number (epoch 2, step 6, learning rate 0.")
    assert message.endswith(f"); try a lower learning rate; the last good checkpoint is {path}")
    content = checkpoint.load(path)
    assert content["progress"]["state"]["epoch"] == 1
    assert all(tensor.isfinite().all() for tensor in content["model"].values())
    assert all(tensor.isfinite().all() for tensor in content["progress"]["best_weights"].values())
    again = trainer(folder=tmp_path)
    again.resume()
    assert plain(again.fit()) == plain(trainer().fit())


def test_divergence_before_the_first_checkpoint(tmp_path):
    with pytest.raises(Diverged, match=r"there is no earlier checkpoint$"):
        poisoned(trainer(folder=tmp_path), step=1).fit()
    assert list(tmp_path.iterdir()) == []


def test_infinite_gradients_of_a_finite_loss():
    run = trainer()
    first = next(run.model.parameters())
    first.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(Diverged):
        run.fit()


def test_the_message_suggests_full_precision():
    options = replace(QUICK, mixed_precision="bf16")
    run = trainer(options, accelerator=make_accelerator(options, cpu=True))
    with pytest.raises(Diverged, match="try a lower learning rate or mixed_precision no; "):
        poisoned(run, step=0).fit()


# Several modalities, and several processes


def test_batches_without_a_modality():
    """Batches without numbers do not change the weights for numbers."""
    model, rows = mixed()
    run = trainer(replace(QUICK, batch_size=2), model=model, train=rows, validation=rows)
    assert math.isfinite(run.fit()[-1].loss)


WORKER = """
import json, os, signal, sys, time
from dataclasses import asdict, replace
from pathlib import Path
import torch
from hsa.training.accelerator import make_accelerator
from hsa.training.loop import Interrupted
from tests.tasks import QUICK, Log, classifier, data, mixed, trainer

torch.set_num_threads(1)
folder, options, result = Path(sys.argv[1]), replace(QUICK, epochs=2, batch_size=5), {}
accelerator = make_accelerator(options, cpu=True)


class LastProcessStops(Log):
    def step(self, done, *more):
        if done == 2 and accelerator.process_index == accelerator.num_processes - 1:
            os.kill(os.getpid(), signal.SIGINT)


def run(name, kind, count, watcher=None, resume=False, **more):
    made = trainer(
        options, model=classifier(kind, seed=5 * resume, **more), train=data(count), validation=data(7, seed=1),
        folder=folder / name, accelerator=accelerator, watcher=watcher,
    )
    if resume:
        made.resume()
    history = made.fit()
    test = made.evaluate(data(9, seed=2))
    made.save_model(folder / name, ("no", "yes"))
    return {"history": [asdict(r) for r in history], "loss": test.loss, "outputs": test.outputs.tolist()}


def several_modalities():
    model, rows = mixed()
    made = trainer(options, model=model, train=rows, validation=rows, accelerator=accelerator)
    return [asdict(record) for record in made.fit()]


class LastProcessIsSlow(Log):
    def step(self, *arguments):
        time.sleep(0.003 * accelerator.process_index)


def out_of_time():
    limited = replace(options, epochs=500, minutes=0.01, schedule="cosine")
    made = trainer(limited, train=data(16), accelerator=accelerator, watcher=LastProcessIsSlow())
    made.fit()
    sums = [float(p.detach().double().sum()) for p in made.model.parameters()]
    return made._gather([(made.progress.seconds, made.progress.epoch, sums)])


def stopped_and_resumed(name, kind, count):
    try:
        run(name, kind, count, LastProcessStops())
    except Interrupted as stop:
        return {**run(name, kind, count, resume=True), "stopped": str(stop)[:24]}


result["even"] = run("even", "hierarchical", 16)
result["odd"] = run("odd", "flat", 11)  # the last batch has one example
modalities = several_modalities()
limited = out_of_time()
processes = accelerator.num_processes
if processes > 1:
    accelerator = make_accelerator(options, cpu=True, fsdp=True)
kind = str(accelerator.distributed_type)
result["sharded"] = stopped_and_resumed("sharded", "hierarchical", 16)
result["sharded again"] = run("sharded", "hierarchical", 16, resume=True)
result["learned"] = run("learned", "hierarchical", 16, entmax="learned")
sharded_modalities = several_modalities()
if accelerator.is_main_process:
    assert kind == str(accelerator.distributed_type)
    about = {"processes": processes, "type": kind, "modalities": [modalities, sharded_modalities], "runs": result}
    about["limited"] = limited
    (folder / "result.json").write_text(json.dumps(about))
"""


def test_two_processes_match_one(tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text(WORKER)
    environment = {
        **os.environ,
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, str(tmp_path / "worker.py"), str(tmp_path / "two")]
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    monkeypatch.setattr(sys, "argv", ["worker.py", str(tmp_path / "one")])
    exec(WORKER, {})
    one, two = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two"))
    assert (one["processes"], two["processes"], two["type"]) == (1, 2, "DistributedType.FSDP")
    assert one["runs"]["sharded"]["stopped"] == two["runs"]["sharded"]["stopped"] == "stopped after 3 of 8 ste"
    for name, a in one["runs"].items():
        b = two["runs"][name]
        for left, right in zip(a["history"], b["history"], strict=True):
            for number in ("loss", "validation_loss", "validation", "learning_rate"):
                assert right[number] == pytest.approx(left[number], rel=1e-4), (name, number)
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
        np.testing.assert_allclose(b["outputs"], a["outputs"], atol=1e-3)
    for a, b, tolerance in zip(one["modalities"], two["modalities"], (1e-4, 1e-3), strict=True):
        # Adam skips weights without gradients on all processes; sharded, it still applies their momentum.
        assert [r["loss"] for r in b] == pytest.approx([r["loss"] for r in a], rel=tolerance)
    first, second = two["limited"]  # all processes count the same time, or their learning rates would differ
    assert first == second
    assert first[0] >= 0.6
    assert first[1] < 500
    assert two["runs"]["sharded again"]["outputs"] == two["runs"]["sharded"]["outputs"]
    for name in ("even", "odd", "sharded", "learned"):
        (left, _), (right, _) = (load_model(tmp_path / folder / name) for folder in ("one", "two"))
        for tensor, other in zip(left.parameters(), right.parameters(), strict=True):
            torch.testing.assert_close(tensor, other, atol=1e-3, rtol=1e-3)
