"""`hsa train` where training one of several models fails."""

import json
from pathlib import Path

import pytest
import torch

from hsa.cli.main import run
from hsa.training import loop
from hsa.training.language_model import loop as lm_loop
from hsa.training.seq2seq import loop as seq2seq
from tests.tables import reviews, write_rows

SIZES = ("--cpu", "--width", "8", "--heads", "2", "--vocabulary", "300", "--epochs", "1")
CLASSES = ("--text", "text", "--label", "label", "--position-width", "8")
ANSWERS = ("--task", "seq2seq", "--text", "text", "--label", "label", "--position-width", "8")
TEXT = (
    "--task",
    "lm",
    "--layers",
    "1",
    "--context",
    "16",
    "--steps",
    "2",
    "--batch-tokens",
    "64",
    "--branching",
    "4",
    "2",
)


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    monkeypatch.setenv("HSA_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.csv", reviews())
    Path("tale.txt").write_text("\n\n".join(f"The cat sat on mat {i}. It was warm there." for i in range(150)))


def failing(monkeypatch, owner, error, models):
    """Make the training steps of the models with these numbers raise an error."""
    made, step, make = [], owner._step, owner.__init__

    def numbered(self, *arguments, **more):
        make(self, *arguments, **more)
        made.append(self)

    def fail(self, *batch):
        if made.index(self) in models:
            raise error
        return step(self, *batch)

    monkeypatch.setattr(owner, "__init__", numbered)
    monkeypatch.setattr(owner, "_step", fail)


@pytest.mark.parametrize(
    ("owner", "data", "options"),
    [
        (loop.Trainer, "rows.csv", CLASSES),
        (lm_loop._Run, "tale.txt", TEXT),
        (seq2seq._Run, "rows.csv", ANSWERS),
    ],
)
@pytest.mark.parametrize("which", [0, 1])
def test_the_other_model_is_trained_and_reported(call, monkeypatch, owner, data, options, which):
    failing(monkeypatch, owner, torch.OutOfMemoryError("CUDA out of memory."), {which})
    names = ["multiscale" if owner is lm_loop._Run else "hierarchical", "flat"]
    code, out, err = call("train", data, *SIZES, *options, "--models", ",".join(names), "--out", "run")
    failed, finished = names[which], names[1 - which]
    assert code == 2  # as where it diverges
    assert err.startswith(f"{failed}: out of memory; try a smaller --batch-tokens")
    rows = [line.split() for line in out.splitlines()]
    assert any(row[:5] == [failed, "–", "out", "of", "memory"] for row in rows)
    assert [result["model"] for result in json.loads(Path("run/results.json").read_text())] == [finished]
    report = Path("run/report.md").read_text()
    assert f"| {failed} | – | out of memory |" in report
    assert f"- {failed}: out of memory; try " in report
    assert f"model     run/{finished}" in out


def test_no_model_has_a_result(call, monkeypatch):
    failing(monkeypatch, loop.Trainer, RuntimeError("DefaultCPUAllocator: can't allocate memory"), {0, 1})
    code, _, err = call("train", "rows.csv", *SIZES, *CLASSES, "--models", "hierarchical,flat", "--out", "run")
    assert code == 2
    assert err.startswith("hierarchical: out of memory; ")
    assert "; flat: out of memory; " in err
    assert not Path("run/report.md").exists()


def test_a_model_that_diverges_does_not_stop_the_others(call):
    chosen = ("--models", "hierarchical,deepsets", "--learning-rate", "1e30", "--batch-size", "4", "--out", "run")
    code, _, err = call("train", "rows.csv", *SIZES, *CLASSES, *chosen)
    assert code == 2
    assert err.startswith("hierarchical: the loss is no longer a number")
    assert "; deepsets: the loss is no longer a number" in err


def test_other_errors_are_raised(monkeypatch):
    failing(monkeypatch, loop.Trainer, RuntimeError("a bug"), {0})
    with pytest.raises(RuntimeError, match="a bug"):
        run(["train", "rows.csv", *SIZES, *CLASSES, "--models", "hierarchical,flat", "--out", "run"])
