"""Every training loop stops for Ctrl-C and SIGTERM with a checkpoint; a killed run resumes bit for bit."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from hsa.huggingface.fidelity import finetune as finetuning
from hsa.huggingface.fidelity.options import FinetuneOptions
from hsa.models.language_model import LanguageModelConfig
from hsa.models.options import ModelOptions
from hsa.running import Interrupted
from hsa.training.language_model.loop import train_language_model
from hsa.training.loop import CHECKPOINT
from hsa.training.options import DataOptions, LanguageOptions, Seq2SeqOptions, TrainingOptions
from hsa.training.seq2seq.data import prepare_pairs
from hsa.training.seq2seq.loop import seq2seq_config, train_seq2seq
from tests.huggingface.fidelity.small import classifier as transformer
from tests.huggingface.fidelity.small import learnable, tokenizer
from tests.tables import write_rows
from tests.tasks import QUICK, Log, classifier, trainer

ROOT = Path(__file__).parents[2]
TEXT = np.tile(np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], np.uint16), 60)


class Stop(Log):
    """Watcher that sends this process a signal after some steps."""

    def __init__(self, after=None, number=signal.SIGTERM):
        super().__init__()
        self.after, self.number = after, number

    def step(self, done, *more):
        super().step(done, *more)
        if done == self.after:
            os.kill(os.getpid(), self.number)

    def evaluated(self, record): ...


def run_classifier(folder, watcher):
    run = trainer(QUICK, model=classifier("flat", dropout=0.3), folder=folder, watcher=watcher)
    if folder is not None and (folder / CHECKPOINT).exists():
        run.resume()
    run.fit()
    return run.model


def run_language_model(folder, watcher):
    config = LanguageModelConfig(11, width=12, heads=2, layers=1, branching=(3, 2), dropout=0.1)
    options, language = TrainingOptions(batch_tokens=96), LanguageOptions(context=24, steps=12, evaluate_every=5)
    more = {"folder": folder, "resume": True, "watcher": watcher, "device": "cpu"}
    return train_language_model(config, TEXT, TEXT[:99], options, language, **more).model


def run_seq2seq(folder, watcher):
    rows = [{"question": f"Light {['red', 'blue'][i % 2]} {i}.", "answer": "ab"[i % 2] * 3} for i in range(30)]
    path = write_rows(Path(os.environ["HSA_TEST_ROWS"]), rows)
    prepared = prepare_pairs(path, DataOptions(text=("question",), label="answer", task="seq2seq", vocabulary=300))
    sizes = ModelOptions(width=12, heads=2, dropout=0.2, near=0, position_width=8)
    config = seq2seq_config(prepared, "flat", sizes, LanguageOptions(branching=(2, 2)), Seq2SeqOptions())
    options = TrainingOptions(epochs=3, batch_size=6)
    return train_seq2seq(config, prepared, options, folder=folder, resume=True, watcher=watcher)[0]


def run_finetuning(folder, watcher):
    options = FinetuneOptions(epochs=3, batch_size=6)

    def watch(done, total, loss):
        watcher.step(done, total, loss, 0.0)

    return finetuning.finetune(transformer(), tokenizer(), learnable(24), options, folder=folder, watch=watch)


LOOPS = {
    "classifier": run_classifier,
    "language model": run_language_model,
    "seq2seq": run_seq2seq,
    "finetuning": run_finetuning,
}


@pytest.fixture(autouse=True)
def _rows(tmp_path, monkeypatch):
    monkeypatch.setenv("HSA_TEST_ROWS", str(tmp_path / "rows.csv"))
    monkeypatch.setattr(finetuning, "REPORT_EVERY", 1)


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal(model, expected):
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("kind", LOOPS)
def test_a_signal_within_an_epoch(kind, number, tmp_path):
    run = LOOPS[kind]
    whole = weights(run(None, Stop()))
    for after in (2, 7):
        message = rf"^stopped after ({after}|{after + 1}) of \d+ steps; .*, continue with --resume$"
        with pytest.raises(Interrupted, match=message):
            run(tmp_path / "run", Stop(after, number))
        assert len(list((tmp_path / "run").glob("*.pt"))) == 1
    torch.manual_seed(99)
    resumed = Stop()
    assert_equal(run(tmp_path / "run", resumed), whole)
    assert 7 <= resumed.steps[0][0] <= 9  # nothing is repeated


@pytest.mark.parametrize("kind", LOOPS)
def test_a_signal_at_the_last_step_is_not_lost(kind, tmp_path):
    run, log = LOOPS[kind], Stop()
    whole = weights(run(None, log))
    with pytest.raises(Interrupted):
        run(tmp_path / "run", Stop(log.steps[-1][0]))
    assert_equal(run(tmp_path / "run", Stop()), whole)


KILLED = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.training import test_stopping as own
own.finetuning.REPORT_EVERY = 1
class Print(own.Stop):
    def step(self, done, *more):
        print(done, flush=True)
model = own.LOOPS[sys.argv[1]](Path(sys.argv[2]), Print())
torch.save(model.state_dict(), Path(sys.argv[2]) / "weights")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOOPS)
def test_killed_at_random_moments(kind, tmp_path):
    """Kill the process again and again; the last run finishes with the weights of an uninterrupted one."""
    whole, generator, folder = weights(LOOPS[kind](None, Stop())), random.Random(0), tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    for attempt in range(20):
        command = [sys.executable, "-c", KILLED, kind, str(folder)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if attempt < 4:
            for _ in process.stdout:
                if generator.random() < 0.3:
                    time.sleep(generator.random() * 0.05)
                    break
            process.kill()
            process.communicate()
            continue
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-2000:]
        break
    assert not list(folder.glob(".*"))
    saved = torch.load(folder / "weights")
    assert all(torch.equal(tensor, whole[name]) for name, tensor in saved.items())
