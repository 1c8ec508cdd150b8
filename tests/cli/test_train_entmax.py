"""`hsa train --entmax`, from the command line to the report."""

import json

import pytest
import torch

from hsa.models.saved import load_model
from hsa.training.experiment import Result
from tests.tables import reviews, write_rows

SIZES = ("--cpu", "--heads", "2", "--epochs", "1", "--position-width", "8", "--width", "8", "--vocabulary", "300")
COLUMNS = ("--text", "text", "--label", "label")


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("HSA_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return write_rows(tmp_path / "reviews.csv", reviews())


def test_train_report_and_predict(call, data, tmp_path):
    chosen = ("--entmax", "learned", "--layers", "2", "--models", "hierarchical", "multiscale", "flat", "han")
    code, _, err = call("train", data, *COLUMNS, *SIZES, *chosen, "--out", tmp_path / "run")
    assert (code, err) == (0, "")
    configs = {
        name: json.loads((tmp_path / "run" / name / "config.json").read_text())["encoder"] for name in chosen[5:]
    }
    assert [configs[name].get("entmax") for name in chosen[5:]] == ["learned", "learned", None, None]
    assert configs["hierarchical"]["entmax_levels"] == 3  # paragraphs, sentences, tokens
    result = json.loads((tmp_path / "run" / "hierarchical" / "result.json").read_text())
    assert [(level["layer"], level["level"]) for level in result["sparsity"]] == [
        (i, j) for i in (1, 2) for j in (1, 2, 3)
    ]
    assert all(1 < alpha < 2 for level in result["sparsity"] for alpha in level["alpha"])
    assert Result.load(tmp_path / "run" / "hierarchical").sparsity[0].alpha == tuple(result["sparsity"][0]["alpha"])
    assert Result.load(tmp_path / "run" / "flat").sparsity == ()
    report = (tmp_path / "run" / "report.md").read_text()
    assert "## Sparsity of hierarchical" in report
    assert "## Sparsity of multiscale" in report
    assert "## Sparsity of flat" not in report
    assert "entmax: learned" in report
    for picture in ("sparsity", "tree", "tree_of_a_leaf"):
        assert f"![{picture}]({picture}.png)" in report
        assert (tmp_path / "run" / f"{picture}.png").stat().st_size > 5_000
    code, out, err = call("predict", tmp_path / "run" / "hierarchical", data, "--json")
    assert (code, err) == (0, "")
    assert {json.loads(line)["label"] for line in out.splitlines()} <= {row["label"] for row in reviews()}
    code, _, err = call("train", data, *COLUMNS, *SIZES, *chosen, "--out", tmp_path / "run", "--resume")
    assert (code, err) == (0, "")
    assert json.loads((tmp_path / "run" / "hierarchical" / "result.json").read_text()) == result


def test_a_number_and_a_recipe(call, data, tmp_path):
    (tmp_path / "sparse.yaml").write_text(
        "data: reviews.csv\nmodels: hierarchical\ntext: text\nlabel: label\nentmax: learned\nwidth: 8\nheads: 2\n"
        "vocabulary: 300\nepochs: 1\nposition_width: 8\nwindows: [4]\n"
    )
    for arguments, wanted in (((), "learned"), (("--entmax", "1.25"), 1.25)):
        folder = tmp_path / f"run {wanted}"
        code, _, err = call("train", tmp_path / "sparse.yaml", "--cpu", *arguments, "--out", folder)
        assert (code, err) == (0, "")
        model, _ = load_model(folder / "hierarchical")
        assert model.config.encoder.entmax == wanted
        assert model.config.encoder.entmax_levels == 2  # windows, and what they are in
        alphas = [level.alpha for level in Result.load(folder / "hierarchical").sparsity]
        assert all(len(alpha) == 2 for alpha in alphas)
        assert wanted == "learned" or torch.tensor(alphas).sub(1.25).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("arguments", "phrases"),
    [
        (("--entmax", "2.5"), ("'learned', or a number from 1 (softmax) to 2 (sparsemax)", "got 2.5")),
        (("--entmax", "1.5", "--models", "flat", "han"), ("one of hierarchical, ", "got 1.5 for flat, han")),
        (("--entmax", "1.5", "--models", "hierarchical+talking"), ("a fusion that does not mix weights", "got 1.5")),
        (
            ("--entmax", "1.5", "--task", "lm", "--models", "multiscale"),
            ("expected the task classification, regression or seq2seq", "got 1.5 with the task lm"),
        ),
        (("--entmax", "1.5", "--task", "seq2seq", "--models", "flat"), ("one of hierarchical, ", "got 1.5 for flat")),
    ],
)
def test_models_and_tasks_that_do_not_support_entmax(refuses, data, arguments, phrases):
    refuses(("train", data, *COLUMNS, *SIZES, *arguments), "entmax", *phrases)


def test_an_unknown_word(call, data):
    code, _, err = call("train", data, *COLUMNS, *SIZES, "--entmax", "lots")
    assert code != 0
    assert "entmax" in err


def test_a_recipe_with_an_unknown_word(refuses, data, tmp_path):
    (tmp_path / "sparse.yaml").write_text("data: reviews.csv\nentmax: lots\n")
    refuses(("train", tmp_path / "sparse.yaml"), "sparse.yaml: entmax", "got 'lots'")
