"""Streams: contiguous texts in parallel, the memory carried along, and checkpoints that hold it."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa.baselines.options import DocumentOptions
from hsa.baselines.transformer_xl.language_model import TransformerXLLanguageConfig, TransformerXLLanguageModel
from hsa.baselines.transformer_xl.streams import StreamCourse, StreamReader, Streams
from hsa.cli.main import run
from hsa.errors import InvalidInput
from hsa.models.classifier import count_parameters
from hsa.models.language_model import LanguageModelConfig
from hsa.models.options import ModelOptions
from hsa.models.registry import create_language_model
from hsa.training.language_model.experiment import language_model_config
from hsa.training.language_model.loop import evaluate_language_model, reader_of, train_language_model
from hsa.training.loop import CHECKPOINT, Interrupted
from hsa.training.options import LanguageOptions, TrainingOptions
from tests.model_inputs import exact

TEXT = np.tile(np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], np.uint16), 60)
CONFIG = TransformerXLLanguageConfig(11, width=12, heads=2, layers=2, segment=24, memory=10, dropout=0.1)
OPTIONS = TrainingOptions(batch_tokens=96, learning_rate=1e-2, schedule="cosine")
LANGUAGE = LanguageOptions(context=24, steps=12, evaluate_every=5)


def train(config=CONFIG, options=OPTIONS, language=LANGUAGE, text=TEXT, **more):
    return train_language_model(config, text, text[:200], options, language, **{"device": "cpu", **more})


@given(st.integers(4, 90), st.integers(2, 5), st.integers(1, 9), st.integers(0, 9))
def test_streams_are_contiguous_and_disjoint(size, context, number, seed):
    if size < context + 1:
        with pytest.raises(InvalidInput, match=f"^data: .*context of {context}.* {size} tokens"):
            Streams(np.arange(size), context, number, seed)
        return
    streams = Streams(np.arange(size), context, number, seed)
    steps = streams.steps_per_epoch
    blocks = max(1, (size - context) // context)
    assert steps == max(1, blocks // number)
    for epoch in range(2):
        taken = np.stack([streams.take(epoch * steps + i) for i in range(steps)])
        assert taken.shape == (steps, number, context + 1)
        assert (np.diff(taken) == 1).all()
        assert (taken[1:, :, 0] == taken[:-1, :, -1]).all()  # the last target is the next first token
        assert [streams.begins(epoch * steps + i) for i in range(steps)] == [True] + [False] * (steps - 1)
        if blocks >= number:  # no token is predicted twice
            assert len(np.unique(taken[:, :, 1:])) == steps * number * context
    assert np.array_equal(streams.take(steps), Streams(np.arange(size), context, number, seed).take(steps))


def test_epochs_differ():
    streams = Streams(np.arange(400), 10, 3, 0)
    starts = [streams.take(epoch * streams.steps_per_epoch)[:, 0] for epoch in range(6)]
    assert len({tuple(np.sort(s)) for s in starts}) > 1
    assert len({tuple(np.argsort(s)) for s in starts}) > 1


def test_memory_follows_the_streams_and_is_reset_with_them():
    model = exact(TransformerXLLanguageModel(CONFIG))
    draw = np.random.default_rng(0)
    streams = Streams(draw.integers(11, size=3 * 5 * 24 + 50), 24, 3, 0)
    assert streams.steps_per_epoch == 5
    course = StreamCourse(model, streams)
    for epoch in range(2):
        steps = range(5 * epoch, 5 * epoch + 5)
        losses = [course.loss(course.load(step)) for step in steps]
        taken = np.concatenate([streams.take(step)[:, :-1] for step in steps], 1)
        targets = np.concatenate([streams.take(step)[:, 1:] for step in steps], 1)
        inputs, targets = (torch.from_numpy(t.reshape(-1).astype(np.int64)) for t in (taken, targets))
        whole, _ = model.loss(inputs, targets, [5 * 24] * 3, mean=False)
        wanted = whole.view(3, 5, 24).mean((0, 2))
        torch.testing.assert_close(torch.stack(losses), wanted, rtol=0, atol=1e-10)


def test_state_of_a_course_is_restored():
    model = exact(TransformerXLLanguageModel(CONFIG))
    first, second = (StreamCourse(model, Streams(TEXT, 24, 4, 0)) for _ in range(2))
    for step in range(3):
        first.loss(first.load(step))
    second.restore(first.state())
    assert torch.equal(second.loss(second.load(3)), first.loss(first.load(3)))


class Stopping:
    """Watcher that presses Ctrl-C in the middle of an epoch of six steps."""

    def step(self, done, total, loss, learning_rate):
        if done == 3:
            signal.raise_signal(signal.SIGINT)

    def evaluated(self, record): ...

    def done(self): ...


def test_resumed_run_is_identical(tmp_path):
    assert Streams(TEXT, 24, 4, 0).steps_per_epoch == 6
    whole = train()
    with pytest.raises(Interrupted, match="stopped after 4 of 12 steps"):
        train(folder=tmp_path, watcher=Stopping())
    again = train(folder=tmp_path, resume=True)
    assert [replace(r, seconds=0.0) for r in again.history] == [replace(r, seconds=0.0) for r in whole.history]
    for ours, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(InvalidInput, match=r"memory = 11.*memory = 10"):
        train(replace(CONFIG, memory=11), folder=tmp_path, resume=True)
    carried = torch.load(tmp_path / CHECKPOINT, weights_only=True)["progress"]["carried"]
    assert carried["seen"] == [6 * 24] * 4


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_text_is_learned_on_a_device(tmp_path, device):
    """Interrupt and resume on the device; apart from rounding, the result is that of the CPU."""
    still, more = replace(CONFIG, dropout=0.0), replace(LANGUAGE, steps=40)
    with pytest.raises(Interrupted):
        train(still, language=more, folder=tmp_path, watcher=Stopping(), device=device)
    result = train(still, language=more, folder=tmp_path, resume=True, device=device)
    assert result.model.device.type == device
    losses, wanted = ([r.validation_loss for r in each.history] for each in (result, train(still, language=more)))
    assert losses[0] == pytest.approx(wanted[0], rel=2e-2)
    assert losses[-1] < 0.6 * losses[0] < 2


@pytest.mark.parametrize("memory", [0, 10])
def test_text_is_learned(memory):
    result = train(replace(CONFIG, dropout=0.0, memory=memory), language=replace(LANGUAGE, steps=40))
    losses = [r.validation_loss for r in result.history]
    assert losses[-1] < 0.6 * losses[0] < 2
    assert result.tokens == 40 * 4 * 24


def test_half_precision():
    result = train(options=replace(OPTIONS, mixed_precision="bf16"), language=replace(LANGUAGE, steps=30))
    assert result.history[-1].validation_loss < result.history[0].validation_loss


@pytest.mark.parametrize("test_memory", [None, 0, 35])
def test_text_is_evaluated_as_one_stream(test_memory):
    model = exact(TransformerXLLanguageModel(replace(CONFIG, test_memory=test_memory)))
    text = np.random.default_rng(0).integers(11, size=180).astype(np.uint16)
    result = evaluate_language_model(model, text, 24, batch_tokens=50)
    whole = torch.from_numpy(text[: 7 * 24 + 1].astype(np.int64))
    logits = model(whole[:-1], [7 * 24])
    wanted = torch.nn.functional.cross_entropy(logits, whole[1:], reduction="none").view(7, 24).mean(0).detach()
    torch.testing.assert_close(torch.from_numpy(result.by_position), wanted, rtol=0, atol=1e-10)
    assert result.tokens == 7 * 24
    at_once = evaluate_language_model(model, text, 24, batch_tokens=10_000)
    assert at_once.loss == pytest.approx(result.loss, abs=1e-10)
    assert evaluate_language_model(model, text[:10], 24).tokens == 9  # shorter than a block


def test_operations_with_a_full_memory():
    model = exact(TransformerXLLanguageModel(replace(CONFIG, test_memory=50)))
    entry = 3 * 2 * CONFIG.width + CONFIG.heads
    assert StreamReader(model, 24).operations(TEXT) == CONFIG.layers * entry * (50 + 12.5)
    assert StreamReader(model, 24).operations(TEXT[:2]) == CONFIG.layers * entry * 1.5
    none = exact(TransformerXLLanguageModel(replace(CONFIG, memory=0)))
    assert StreamReader(none, 24).operations(TEXT) == CONFIG.layers * entry * 12.5


def test_models_have_equal_parameters_and_their_own_readers():
    data = SimpleNamespace(tokenizer=SimpleNamespace(get_vocab_size=lambda: 53), closes={})
    model = ModelOptions(width=28, heads=2, layers=3)
    extra = {"documents": DocumentOptions(memory=31, test_memory=57)}
    language = LanguageOptions(context=24, kv_heads=1, positions="both", max_length=1000)
    ours, theirs = (language_model_config(data, model, language, n, extra) for n in ("multiscale", "transformer-xl"))
    assert isinstance(ours, LanguageModelConfig)
    assert isinstance(theirs, TransformerXLLanguageConfig)
    assert (theirs.segment, theirs.memory, theirs.test_memory, theirs.max_length) == (24, 31, 57, 1000)
    made = [create_language_model(config) for config in (ours, theirs)]
    first, second = map(count_parameters, made)
    assert abs(first - second) <= 3 * 28 * model.layers / 2
    assert [type(reader_of(each, 24)).__name__ for each in made] == ["BlockReader", "StreamReader"]


def test_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HSA_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("tale.txt").write_text("\n\n".join(f"The cat sat on mat {i}. It was warm there." for i in range(150)))

    def call(*words):
        with pytest.raises(SystemExit) as caught:
            run(list(words))
        printed = capsys.readouterr()
        return caught.value.code, printed.out, printed.err

    tiny = ("--task", "lm", "--cpu", "--width", "16", "--heads", "2", "--layers", "1", "--vocabulary", "300")
    short = ("--context", "32", "--steps", "6", "--batch-tokens", "128", "--branching", "4", "2", "--memory", "40")
    names = ("--models", "transformer-xl,multiscale", "--test-memory", "90")
    code, out, err = call("train", "tale.txt", *tiny, *short, *names, "--out", "run")
    assert (code, err) == (0, "")
    assert "transformer-xl against multiscale: perplexity" in out
    theirs, ours = json.loads(Path("run/results.json").read_text())
    assert theirs["tokens"] == ours["tokens"] == 6 * 128
    assert abs(theirs["parameters"] - ours["parameters"]) <= 3 * 16
    assert theirs["test_tokens"] == ours["test_tokens"]
    report = Path("run/report.md").read_text()
    assert "\nmemory: 40\ntest_memory: 90\n" in report
    code, out, err = call("generate", "run", "--prompt", "The cat", "--max-new-tokens", "7", "--seed", "1", "--cpu")
    assert code == 0
    assert "7 generated" in err
    code, out, _ = call("train", "tale.txt", *tiny, *short, *names, "--out", "run", "--resume")
    assert code == 0
    assert json.loads(Path("run/results.json").read_text())[0]["loss"] == theirs["loss"]
    code, _, err = call("train", "tale.txt", *tiny, "--models", "transformer-lx")
    assert code != 0
    assert "did you mean 'transformer-xl'" in err.lower()
    code, _, err = call("train", "tale.txt", *tiny, "--models", "transformer-xl", "--memory", "-1")
    assert code != 0
    assert "memory: expected 0 or more, got -1" in err
