"""The scripts in examples/ run, offline, and stay short enough to copy."""

import math
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(path.name for path in FOLDER.glob("*.py"))


def load(name):
    return runpy.run_path(str(FOLDER / name))["main"]


def test_all_of_them():
    assert EXAMPLES == ["classifier.py", "convert_model.py", "language_model.py", "own_module.py", "own_tree.py"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_short(name):
    assert len((FOLDER / name).read_text().splitlines()) < 80


def test_classifier_learns(capsys):
    assert load("classifier.py")(epochs=2) > 0.5  # five classes
    assert "epoch 2: loss" in capsys.readouterr().out


def test_converted_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert load("convert_model.py")() > 0.9
    out = capsys.readouterr().out
    assert "times fewer" in out
    assert out.rstrip().endswith("1.0000")  # after revert
    assert (tmp_path / "runs" / "converted" / "model.safetensors").exists()


def test_language_model(capsys):
    written = load("language_model.py")(steps=3)
    assert written
    assert written in capsys.readouterr().out


def test_own_module(capsys):
    difference = load("own_module.py")(length=128)
    assert 0 < difference < 0.1
    assert capsys.readouterr().out.count("output (2, 128, 256)") == 2


def test_own_tree(capsys):
    load("own_tree.py")()
    out = capsys.readouterr().out
    shown = out.split("weights of")[1].split("batch of two")[0].splitlines()
    weights = [float(line.split()[-1]) for line in shown if line.startswith("  ")]
    assert len(weights) == 12
    assert math.isclose(sum(weights), 1, abs_tol=0.01)
    assert "batch of two: (24, 64)" in out
