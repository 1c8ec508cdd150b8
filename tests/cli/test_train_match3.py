"""`hsa train --task match3`, from the command line."""

import json
from functools import partial

from hsa.models.saved import load_model
from hsa.research.trilinear.costs import costs

TINY = ("--cpu", "--width", "8", "--heads", "2", "--head-dim", "4", "--epochs", "2", "--batch-size", "32")


def test_end_to_end(call, refuses, tmp_path, monkeypatch):
    quickly = partial(costs, lengths=(16, 32), most=10**6, repeats=1)
    monkeypatch.setattr("hsa.research.match3.report.costs", quickly)
    out = tmp_path / "run"
    options = ("--models", "trilinear,flat", "--sequences", "60", "--modulus", "11", "--length", "4", *TINY)
    code, printed, err = call("train", "--task", "match3", *options, "--out", out)
    assert (code, err) == (0, "")
    assert "Match3: 4 numbers modulo 11: 60 to train, 6 to validate, 6 to test; 2 classes" in printed
    assert "next:" not in printed  # there is nothing to predict
    assert [r["model"] for r in json.loads((out / "results.json").read_text())] == ["trilinear", "flat"]
    assert load_model(out / "trilinear")[0].config.encoder.feed_forward is None  # the reference keeps its default size
    report = (out / "report.md").read_text()
    for part in ("## Accuracy of simple rules", "| 32 | ", "![cost](cost.png)", "modulus: 11", "task: match3"):
        assert part in report
    assert {p.name for p in out.glob("*.png")} == {"curves.png", "confusion.png", "cost.png"}
    code, _, err = call("train", "--task", "match3", *options, "--out", out, "--resume")
    assert (code, err) == (0, "")
    for command in ("evaluate", "predict"):
        refuses((command, out / "trilinear", tmp_path), out / "trilinear", "a model of generated data")


def test_data_and_bad_options_are_refused(fails, tmp_path):
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    for options, phrase in (
        ((tmp_path / "rows.csv",), "the task match3 generates its own numbers"),
        (("--modulus", "1"), "modulus: expected 2 or more, got 1"),
        (("--models", "bottom-up"), "expected an encoder that keeps leaves"),
    ):
        assert phrase in fails("train", *options, "--task", "match3", "--cpu", "--out", tmp_path / "out")
