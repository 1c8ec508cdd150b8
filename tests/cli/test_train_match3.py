"""`hsa train --task match3`, from the command line."""

import json
from functools import partial

from hsa.models.saved import load_model
from hsa.research.trilinear.costs import costs

TINY = ("--cpu", "--width", "8", "--heads", "2", "--head-dim", "4", "--epochs", "2", "--batch-size", "32")


def test_the_whole_way(call, fails, tmp_path, monkeypatch):
    quickly = partial(costs, lengths=(16, 32), most=10**6, repeats=1)
    monkeypatch.setattr("hsa.research.match3.report.costs", quickly)
    out = tmp_path / "run"
    options = ("--models", "trilinear,flat", "--sequences", "60", "--modulus", "11", "--length", "4", *TINY)
    code, printed, err = call("train", "--task", "match3", *options, "--out", out)
    assert (code, err) == (0, "")
    assert "Match3: 4 numbers modulo 11: 60 to train, 6 to validate, 6 to test; 2 classes" in printed
    assert "next:" not in printed  # there is nothing to predict
    assert [r["model"] for r in json.loads((out / "results.json").read_text())] == ["trilinear", "flat"]
    assert (
        load_model(out / "trilinear")[0].config.encoder.feed_forward is None
    )  # the one that the others are as large as
    report = (out / "report.md").read_text()
    for said in ("## Rules without three numbers", "| 32 | ", "![cost](cost.png)", "modulus: 11", "task: match3"):
        assert said in report
    assert {p.name for p in out.glob("*.png")} == {"curves.png", "confusion.png", "cost.png"}
    code, _, err = call("train", "--task", "match3", *options, "--out", out, "--resume")
    assert (code, err) == (0, "")
    for command in ("evaluate", "predict"):
        said = fails(command, out / "trilinear", tmp_path)
        assert "a model of generated data, expected a model that reads data" in said


def test_data_and_bad_flags_are_refused(fails, tmp_path):
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    for flags, said in (
        ((tmp_path / "rows.csv",), "given data for the task match3, expected none: its numbers are generated"),
        (("--modulus", "1"), "modulus: given 1, expected 2 or more"),
        (("--models", "bottom-up"), "a class per leaf from an encoder that pools"),
    ):
        assert said in fails("train", *flags, "--task", "match3", "--cpu", "--out", tmp_path / "out")
