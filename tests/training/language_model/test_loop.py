from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa.errors import HsaWarning, InvalidInput
from hsa.models.language_model import LanguageModel, LanguageModelConfig
from hsa.training.failures import Diverged
from hsa.training.language_model.blocks import Blocks
from hsa.training.language_model.loop import evaluate_language_model, train_language_model
from hsa.training.loop import CHECKPOINT, Interrupted
from hsa.training.options import LanguageOptions, TrainingOptions

TEXT = np.tile(np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], np.uint16), 60)
CONFIG = LanguageModelConfig(11, width=12, heads=2, layers=2, branching=(3, 2), dropout=0.1)
OPTIONS = TrainingOptions(batch_tokens=96, learning_rate=1e-2, schedule="cosine")
LANGUAGE = LanguageOptions(context=24, steps=12, evaluate_every=5)


def train(config=CONFIG, options=OPTIONS, language=LANGUAGE, text=TEXT, **more):
    return train_language_model(config, text, text[:200], options, language, device="cpu", **more)


class Watcher:
    def __init__(self, stop_at=None):
        self.steps, self.records, self.stop_at, self.ended = [], [], stop_at, False

    def step(self, done, total, loss, learning_rate):
        self.steps.append((done, total, learning_rate))
        if done == self.stop_at:
            import signal

            signal.raise_signal(signal.SIGINT)

    def evaluated(self, record):
        self.records.append(record)

    def done(self):
        self.ended = True


@pytest.mark.parametrize("attention", ["flat", "multiscale", "clustered"])
def test_training_reduces_the_loss(attention):
    groups = {"branching": (2, 2, 2), "tile": 4} if attention == "clustered" else {}
    config = replace(CONFIG, attention=attention, dropout=0.0, **groups)
    result = train(config, language=replace(LANGUAGE, steps=40))
    assert [r.step for r in result.history] == [5, 10, 15, 20, 25, 30, 35, 40]
    losses = [r.validation_loss for r in result.history]
    assert losses[-1] < 0.6 * losses[0] < 2
    assert result.tokens == 40 * 4 * 24
    assert result.history[-1].tokens == result.tokens
    assert result.tokens_per_second > 0


def test_bf16_and_trees_that_follow_the_text():
    config = replace(CONFIG, closes={5: 2, 9: 3})
    result = train(config, replace(OPTIONS, mixed_precision="bf16"), replace(LANGUAGE, steps=30))
    assert result.history[-1].validation_loss < result.history[0].validation_loss


def test_a_resumed_run_has_the_same_result(tmp_path):
    whole, watcher = train(), Watcher(stop_at=8)
    with pytest.raises(Interrupted, match=r"stopped after 9 of 12 steps; the checkpoint is .*, continue with --resume"):
        train(folder=tmp_path, watcher=watcher)
    assert watcher.ended
    again = train(folder=tmp_path, resume=True)
    assert [replace(r, seconds=0.0) for r in again.history] == [replace(r, seconds=0.0) for r in whole.history]
    for ours, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_more_steps_at_a_constant_rate_are_one_run(tmp_path):
    options = replace(OPTIONS, schedule="constant", warmup=0.0)
    short, long = (replace(LANGUAGE, steps=steps, evaluate_every=4) for steps in (8, 12))
    whole = train(options=options, language=long)
    train(options=options, language=short, folder=tmp_path)
    with pytest.warns(HsaWarning, match="continues to 12 steps instead of 8. From here the learning rate follows"):
        again = train(options=options, language=long, folder=tmp_path, resume=True)
    assert [replace(r, seconds=0.0) for r in again.history] == [replace(r, seconds=0.0) for r in whole.history]
    for ours, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(InvalidInput, match="expected steps = 12 or more, as in the checkpoint, got steps = 8"):
        train(options=options, language=short, folder=tmp_path, resume=True)


def test_resuming_with_other_options(tmp_path):
    train(folder=tmp_path)
    for other, message in (
        (
            {"options": replace(OPTIONS, learning_rate=0.5)},
            "learning_rate = 0.5, got a checkpoint trained with learning_rate = 0.01",
        ),
        ({"config": replace(CONFIG, near=2)}, "near = 2, got a checkpoint trained with near = 1"),
        ({"text": TEXT[:-1]}, "expected a checkpoint of a run on these data, got a checkpoint of a run on other data"),
    ):
        with pytest.raises(InvalidInput, match=message):
            train(folder=tmp_path, resume=True, **other)
    train(options=replace(OPTIONS, checkpoint_minutes=9), folder=tmp_path, resume=True)
    (tmp_path / CHECKPOINT).write_bytes(b"?")
    with pytest.raises(InvalidInput, match="a damaged file"):
        train(folder=tmp_path, resume=True)


def test_the_rate_rises_and_falls():
    watcher = Watcher()
    train(watcher=watcher, options=replace(OPTIONS, warmup=0.5))
    rates = [rate for _, _, rate in watcher.steps]
    assert [done for done, _, _ in watcher.steps] == list(range(1, 13))
    assert rates[:6] == sorted(rates[:6])
    assert rates[6:] == sorted(rates[6:], reverse=True)
    assert rates[-1] == 0
    assert [r.step for r in watcher.records] == [5, 10, 12]


def test_epochs_without_steps():
    watcher = Watcher()
    train(options=replace(OPTIONS, epochs=2), language=LanguageOptions(context=24), watcher=watcher)
    blocks = (len(TEXT) - 24) // 24
    assert watcher.steps[-1][:2] == (2 * (blocks // 4), 2 * (blocks // 4))


def test_an_infinite_loss_stops_the_run():
    with pytest.raises(Diverged, match="lower learning rate"):
        train(options=replace(OPTIONS, learning_rate=1e30, clip=1e30, warmup=0.0))


def test_an_infinite_gradient_stops_the_run(monkeypatch):
    """The gradient of the last step is checked too, although no loss follows."""
    norms = iter([1.0] * 11 + [torch.inf])
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(next(norms)))
    with pytest.raises(Diverged, match="step 12"):
        train()


@given(st.integers(6, 60), st.integers(2, 5), st.integers(0, 9))
def test_an_epoch_takes_every_block_once(size, context, seed):
    blocks = Blocks(np.arange(size), context, seed)
    taken = blocks.take(0, 2 * blocks.per_epoch)
    assert taken.shape == (2 * blocks.per_epoch, context + 1)
    assert (np.diff(taken) == 1).all()
    for epoch in np.split(taken, 2):
        starts = np.sort(epoch[:, 0])
        assert (np.diff(starts) == context).all()
        assert starts[0] <= context
        assert size - 1 - (starts[-1] + context) <= 2 * context
    assert np.array_equal(blocks.take(3, 1), Blocks(np.arange(size), context, seed).take(3, 1))


def test_epochs_differ():
    first, second = np.split(Blocks(np.arange(400), 10, 0).take(0, 2 * 39)[:, 0], 2)
    assert first[0] % 10 != second[0] % 10
    assert (first // 10).tolist() != (second // 10).tolist()


def test_evaluation_is_the_mean_over_blocks():
    model = LanguageModel(CONFIG).double().eval()
    text = TEXT[:80]
    result = evaluate_language_model(model, text, 24, batch_tokens=50)
    losses = []
    for start in (0, 24, 48):
        block = torch.from_numpy(text[start : start + 25].astype(np.int64))
        logits = model(block[:-1], [24])
        losses.append(torch.nn.functional.cross_entropy(logits, block[1:], reduction="none"))
    wanted = torch.stack(losses).mean(0).detach()
    torch.testing.assert_close(torch.from_numpy(result.by_position), wanted)
    assert result.loss == pytest.approx(wanted.mean().item())
    assert result.perplexity == pytest.approx(np.exp(result.loss))
    assert result.tokens == 72
    assert evaluate_language_model(model, text[:10], 24).tokens == 9  # shorter than a block


def test_too_little_text():
    with pytest.raises(InvalidInput, match=r"data: expected more than the context of 24, got 24 tokens to train on"):
        train(text=TEXT[:24])
    with pytest.raises(InvalidInput, match="tokens: expected 2 or more, to predict one from another, got 1"):
        evaluate_language_model(LanguageModel(CONFIG), TEXT[:1], 24)


def test_fp16_is_not_supported():
    with pytest.raises(InvalidInput, match=r"mixed_precision: expected no or bf16 for language models, got fp16"):
        train(options=replace(OPTIONS, mixed_precision="fp16"))


@pytest.mark.parametrize("options", [{"context": 1}, {"steps": -1}, {"evaluate_every": -1}, {"tree": "chapters"}])
def test_invalid_options(options):
    with pytest.raises(InvalidInput, match=next(iter(options))):
        LanguageOptions(**options)


def test_initial_weights_from_shorter_blocks():
    short = train(replace(CONFIG, dropout=0.0), language=replace(LANGUAGE, steps=30))
    weights = short.model.state_dict()
    options = replace(OPTIONS, learning_rate=1e-4)
    longer = train(short.model.config, options, replace(LANGUAGE, context=48, steps=1, evaluate_every=1), start=weights)
    afresh = train(short.model.config, options, replace(LANGUAGE, context=48, steps=1, evaluate_every=1))
    assert longer.history[0].validation_loss < afresh.history[0].validation_loss - 0.3
    with pytest.raises(InvalidInput, match=r"init_from: .*shape"):
        train(replace(CONFIG, width=16), start=weights)
