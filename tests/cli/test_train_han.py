"""`hsa train --models han`, from the command line."""

import json

import pytest

from tests.tables import reviews, write_rows

SIZES = ("--cpu", "--heads", "2", "--epochs", "1", "--position-width", "8", "--width", "8", "--vocabulary", "300")
COLUMNS = ("--text", "text", "--label", "label")


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("HSA_CACHE", str(tmp_path / "cache"))
    return write_rows(tmp_path / "reviews.csv", reviews())


@pytest.mark.parametrize("encoder", ["attention", "gru"])
def test_train_and_predict(call, data, tmp_path, encoder):
    chosen = ("--models", "hierarchical", "han", "--level-encoder", encoder, "--levels", "2")
    code, out, err = call("train", data, *COLUMNS, *SIZES, *chosen, "--out", tmp_path / "run")
    assert (code, err) == (0, "")
    assert out.count("\nhan ") >= 2  # its epoch and its row
    saved = json.loads((tmp_path / "run" / "han" / "config.json").read_text())["encoder"]
    assert (saved["architecture"], saved["encoder"], saved["levels"]) == ("han", encoder, 2)
    code, out, err = call("predict", tmp_path / "run" / "han", data, "--json")
    assert (code, err) == (0, "")
    assert {json.loads(line)["label"] for line in out.splitlines()} <= {row["label"] for row in reviews()}


def test_more_levels_than_the_data_have(refuses, data):
    arguments = ("train", data, *COLUMNS, *SIZES, "--models", "han", "--levels", "9")
    refuses(arguments, "levels", "expected at most 3", "got 9")
