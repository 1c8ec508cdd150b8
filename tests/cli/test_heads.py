"""`hsa heads`, from the command line."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hsa.analysis.plots import pyplot
from hsa.cli.main import run
from hsa.huggingface.loading import load_for_task
from hsa.models.classifier import Classifier
from hsa.models.saved import load_model, save_model
from tests.huggingface.fidelity.small import classifier, language_model, rows, save
from tests.tables import reviews, write_rows

FEW = ("--cpu", "--prune-on", "5", "--points", "3", "--draws", "2", "--halves", "2")
DRAWN = "test_encoders[classification-similarity]"


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HSA_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _quick_pictures(request, monkeypatch):
    """Do not draw pictures, which takes longest, except in one test."""
    from hsa.research.head_kernels import plots as head_plots

    def save(figure, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        pyplot().close(figure)

    if request.node.name != DRAWN:
        monkeypatch.setattr(head_plots, "save_figure", save)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Save a classifier, an encoder and a decoder."""
    folder = tmp_path_factory.mktemp("models")
    save(folder / "classification", classifier())
    save(folder / "embedding", classifier(seed=2).bert)
    save(folder / "decoder", language_model())
    return folder


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Train classifiers, a regressor and a language model of hsa."""
    folder = tmp_path_factory.mktemp("ours")
    data = write_rows(folder / "reviews.csv", reviews())
    environment = pytest.MonkeyPatch()
    environment.setenv("HSA_CACHE", str(folder / "cache"))
    environment.chdir(folder)
    sizes = ("--width", "8", "--vocabulary", "300", "--heads", "2", "--epochs", "1", "--position-width", "8", "--cpu")
    text = ("--text", "text")
    for name, more in {
        "plain": (*text, "--label", "label", "--layers", "2", "--models", "hierarchical,bottom-up"),
        "number": (*text, "--label", "stars", "--task", "regression", "--models", "hierarchical"),
        "lm": (*text, "--task", "lm", "--models", "flat"),
    }.items():
        with pytest.raises(SystemExit) as caught:
            run(["train", str(data), *more, *sizes, "--out", name])
        assert caught.value.code == 0
    environment.undo()
    return folder


@pytest.fixture
def data(tmp_path):
    return write_rows(tmp_path / "data.csv", rows(30))


@pytest.mark.parametrize("compare", ["outputs", "similarity"])
@pytest.mark.parametrize("name", ["classification", "embedding"])
def test_encoders(request, call, models, data, name, compare):
    code, out, err = call(
        "heads", models / name, data, "--compare", compare, "--out", "o", "--tokens", "40", *FEW, columns=60
    )
    assert (code, err) == (0, "")
    words = " ".join(out.split())
    result = json.loads(Path("o/heads.json").read_text())
    assert (result["model"], result["data"], result["examples"], result["compare"]) == (name, "data.csv", 30, compare)
    assert result["rows"] == (60 if compare == "similarity" else 30)  # two tokens of each, to have 40
    assert result["heads"] == [[layer, head] for layer in range(2) for head in range(4)]
    assert len(result["alignment"]) == len(result["redundancy"]) == len(result["weights"]) == 8
    assert all(result["alignment"][i][i] == pytest.approx(1) for i in range(8))
    assert sum(result["weights"]) == pytest.approx(1)
    assert 1 < result["effective"] < 8
    assert f"Effective number of distinct heads: {result['effective']:.1f} of 8." in words
    assert [s["name"] for s in result["sums"]] == ["equal weights", "best single head", "flat MKL", "input-conditional"]
    assert [c["name"] for c in result["curves"]] == ["redundancy", "MKL weight", "random"]
    assert [len(c["scores"]) for c in result["curves"]] == [1, 1, 2]
    assert result["curves"][0]["removed"] == [0, 1, 4, 8]
    assert (result["score"], result["pruned_on"]) == ("accuracy" if name == "classification" else "cosine", 5)
    begins = {scores[0] for curve in result["curves"] for scores in curve["scores"]}
    assert len(begins) == 1
    if name == "embedding":
        assert begins.pop() == pytest.approx(1)
    assert (result["layers"][0]["asymmetric"] is None) == (compare == "outputs")
    assert ("asymmetric" in out) == (compare == "similarity")
    report = Path("o/report.md").read_text()
    assert report.startswith(f"# {name} on data.csv\n")
    for picture in ("alignment", "weights", "pruning"):
        assert (Path(f"o/{picture}.png").stat().st_size > 1000) == (request.node.name == DRAWN)
        assert f"![{picture}]({picture}.png)" in report
    assert all(sentence in report for sentence in result["words"])
    assert "…" not in "".join(line for line in out.splitlines() if not line.endswith(" …"))  # no cell is cut


def test_the_same_again_and_others(call, models, data):
    def result(folder, *more):
        assert call("heads", models / "classification", data, "--out", folder, *FEW, *more)[0] == 0
        return json.loads(Path(folder, "heads.json").read_text())

    first = result("a")
    assert result("b") == first
    other = result("c", "--seed", "1")
    assert other["alignment"] == first["alignment"]  # of all examples, whatever is drawn
    assert other["curves"] != first["curves"]
    few = result("d", "--limit", "20", "--max-tokens", "7")
    assert (few["examples"], few["mean_length"]) == (20, 7)


def test_labels_that_the_model_predicts(call, models, ours, tmp_path):
    """Check that a model with all its heads scores 1 on its own predictions, for any order of examples in batches."""
    texts = [row["text"] for row in rows(40, seed=3)]
    model, tokenizer = load_for_task(str(models / "classification"), "classification")
    result = [int(model(**tokenizer(text, return_tensors="pt")).logits.argmax()) for text in texts]
    assert 5 < sum(result) < 35
    some = write_rows(tmp_path / "own.csv", [{"text": t, "label": c} for t, c in zip(texts, result, strict=True)])
    code, predicted, _ = call("predict", ours / "number/hierarchical", ours / "reviews.csv", "--json")
    assert code == 0
    numbers = [json.loads(line)["label"] for line in predicted.splitlines()]
    assert len(set(numbers)) > 20
    table = [{**row, "stars": number} for row, number in zip(reviews(), numbers, strict=True)]
    others = write_rows(tmp_path / "own.jsonl", table)
    for name, file in ((models / "classification", some), (ours / "number/hierarchical", others)):
        assert call("heads", name, file, "--out", file.suffix, "--cpu", "--points", "1")[0] == 0
        curves = json.loads(Path(file.suffix, "heads.json").read_text())["curves"]
        assert [scores[0] for curve in curves for scores in curve["scores"]] == pytest.approx([1.0] * 5, abs=1e-4)


def test_accuracy_is_measured_on_examples_held_out_from_the_weights(call, models, data, monkeypatch):
    """Check the number of examples that weights are learned from."""
    from hsa.research.head_kernels import study

    known = []
    flat = study.flat_mkl
    monkeypatch.setattr(study, "flat_mkl", lambda grams, target: known.append(len(target)) or flat(grams, target))
    assert call("heads", models / "classification", data, "--out", "o", *FEW)[0] == 0
    assert known[0] == 25


def test_without_labels_or_pruning(call, models, tmp_path):
    bare = write_rows(tmp_path / "bare.jsonl", [{"sentence": row["text"]} for row in rows(12)])
    code, out, err = call("heads", models / "classification", bare, *FEW)
    assert (code, err) == (0, "")
    assert "no labels, so no weights were learned; pass --label" in " ".join(out.split())
    result = json.loads(Path("runs/heads-classification/heads.json").read_text())  # unless another is named
    assert (result["weights"], result["sums"], result["score"]) == (None, [], "cosine")
    assert [c["name"] for c in result["curves"]] == ["redundancy", "random"]
    assert not Path("runs/heads-classification/weights.png").exists()
    code, _, _ = call("heads", models / "classification", bare, "--out", "o", "--cpu", "--prune-on", "0")
    assert code == 0
    assert json.loads(Path("o/heads.json").read_text())["curves"] == []
    assert not Path("o/pruning.png").exists()


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_labels_that_are_numbers(call, models, tmp_path, suffix):
    data = write_rows(tmp_path / f"n.{suffix}", [{**row, "label": i + 0.5} for i, row in enumerate(rows(20))])
    code, out, _ = call("heads", models / "classification", data, "--out", "o", *FEW)
    assert code == 0
    assert "R² held out" in out
    assert json.loads(Path("o/heads.json").read_text())["score"] == "cosine"


def test_few_examples(call, models, tmp_path):
    data = write_rows(tmp_path / "few.csv", rows(6))
    code, out, err = call("heads", models / "embedding", data, "--out", "o", *FEW)
    assert (code, err) == (0, "")
    assert "Weights were not tested: that takes at least 18 examples" in " ".join(out.split())
    result = json.loads(Path("o/heads.json").read_text())
    assert (result["sums"], result["pruned_on"]) == ([], 3)


def test_our_models(call, ours):
    for folder, score, layers in [("plain/hierarchical", "accuracy", 2), ("number/hierarchical", "R²", 1)]:
        out = folder.partition("/")[0]
        code, shown, err = call("heads", ours / folder, ours / "reviews.csv", "--out", out, *FEW)
        assert (code, err) == (0, "")
        result = json.loads(Path(out, "heads.json").read_text())
        assert (result["score"], result["sum_score"], len(result["layers"]), result["examples"]) == (
            score,
            score,
            layers,
            40,
        )
        assert f"{2 * layers} heads in {layers} layer" in " ".join(shown.split())
    code, _, _ = call(
        "heads",
        ours / "plain/hierarchical",
        ours / "reviews.csv",
        "--compare",
        "similarity",
        "--out",
        "s",
        *FEW,
    )
    assert code == 0


def test_the_weights_of_the_model_itself(call, ours, tmp_path):
    """Check that the weights of a model that attends over its heads are tested beside learned ones."""
    folder = tmp_path / "over"
    shutil.copytree(ours / "plain" / "hierarchical", folder)
    model, classes = load_model(folder)
    config = model.config
    save_model(folder, Classifier(replace(config, encoder=replace(config.encoder, fusion="over-heads"))), classes)
    code, out, err = call("heads", folder, ours / "reviews.csv", "--out", "o", *FEW)
    assert (code, err) == (0, "")
    assert "the model's own weighting" in out
    sums = {s["name"]: s for s in json.loads(Path("o/heads.json").read_text())["sums"]}
    # Weights of heads start equal.
    assert sums["the model's own weighting"]["held"] == pytest.approx(sums["equal weights"]["held"])


def test_json_alone_on_stdout(call, models, data):
    code, out, err = call("heads", models / "embedding", data, "--json", "--out", "o", *FEW)
    assert code == 0
    assert out == Path("o/heads.json").read_text()
    assert all(re.search(r" …$|: \d+ of \d+ in \d+ s$", line) for line in err.splitlines())


def test_results_are_not_overwritten(call, fails, models, data):
    arguments = ("heads", models / "embedding", data, "--out", "o", *FEW)
    assert call(*arguments)[0] == 0
    before = Path("o/heads.json").stat().st_mtime_ns
    assert fails(*arguments) == "o: expected a new folder, got a folder with results. Pass another --out, or --replace"
    assert Path("o/heads.json").stat().st_mtime_ns == before
    assert call(*arguments, "--replace")[0] == 0
    assert Path("o/heads.json").stat().st_mtime_ns > before


@pytest.mark.parametrize(
    ("arguments", "where", "phrases"),
    [
        (["--label", "mark"], "data.csv", ["one of 'text', 'label'", "no column 'mark'"]),
        (["--text", "txt"], "data.csv", ["one of ", "no column 'txt'", "Did you mean 'text'"]),
        (["--text", "text", "text", "text"], "text", ["two for a pair", "got 3 columns"]),
        (["--split", "dev"], "data.csv", ["no column 'split'"]),
        (["--limit", "2"], "limit", ["3 or more", "got 2"]),
        (["--max-tokens", "0"], "max_tokens", ["1 or more", "got 0"]),
        (["--max-tokens", "2"], "max_tokens", ["at least 3", "got 2"]),
        (["--tokens", "1"], "tokens", ["3 or more", "got 1"]),
        (["--halves", "0"], "halves", ["1 or more", "got 0"]),
        (["--points", "0"], "points", ["1 or more", "got 0"]),
        (["--draws", "0"], "draws", ["1 or more", "got 0"]),
        (["--prune-on=-1"], "prune_on", ["0 or more", "got -1"]),
        (["--seed=-1"], "seed", ["0 or more", "got -1"]),
        (["--compare", "similarity", "--tokens", "100000"], "tokens", ["at most 8,192 tokens", "8 heads"]),
    ],
)
def test_options_that_do_not_fit(refuses, models, data, arguments, where, phrases):
    refuses(("heads", models / "classification", data.name, "--out", "out", *arguments), where, *phrases)
    assert not Path("out").exists()


def test_data_that_do_not_fit(refuses, models, tmp_path):
    def check(data, where, *phrases, model="classification", more=()):
        refuses(("heads", models / model, data, "--out", "out", *more), where, *phrases)

    check("none.csv", "none.csv", "no such file")
    two = write_rows(tmp_path / "two.csv", rows(2))
    check(two, two, "at least 3 examples", "got 2")
    one_class = write_rows(tmp_path / "one.csv", [{**row, "label": 1} for row in rows(9)])
    check(one_class, "label", "at least 2 classes", "nothing but '1'")
    lone = np.random.default_rng((0, 1)).permutation(5)[0]  # the example that pruning is tried on
    lonely = write_rows(tmp_path / "lonely.csv", [{**row, "label": int(i == lone)} for i, row in enumerate(rows(5))])
    check(lonely, "label", "the same class", model="embedding")
    other = write_rows(tmp_path / "other.csv", [{**row, "label": "xy"[i % 2]} for i, row in enumerate(rows(9))])
    check(other, "other: label", "one of the model's classes: 'LABEL_0', 'LABEL_1'", "got 'x'")
    no_text = write_rows(tmp_path / "no_text.csv", [{"a": 1, "label": 2}])
    check(no_text, "no_text.csv", "['a', 'label']")
    empty = write_rows(tmp_path / "empty.csv", [{"text": " ", "label": 2}])
    check(empty, "empty.csv", "expected a text", "got ' '")
    unlabelled = write_rows(tmp_path / "u.csv", [{**row, "mark": ""} for row in rows(9)])
    check(unlabelled, "u: mark", "labels", more=("--label", "mark"))


def test_models_that_do_not_fit(fails, refuses, models, data, ours, tmp_path):
    refuses(("heads", tmp_path / "none", data), tmp_path / "none", "the model cannot be loaded (no such folder)")
    (tmp_path / "bare").mkdir()
    assert "the model cannot be loaded" in fails("heads", tmp_path / "bare", data)
    assert "is a causal decoder" in fails("heads", models / "decoder", data)
    table = ours / "reviews.csv"
    assert "a bottom-up encoder uses the same heads on every level" in fails("heads", ours / "plain/bottom-up", table)
    assert "language model" in fails("heads", ours / "lm" / "flat", table)
    assert fails("heads", ours / "plain/hierarchical", table, "--text", "text") == (
        "--text: expected no such option for a model of hsa, got an option for a pre-trained model. "
        "Leave it out: the model reads data as in its training"
    )
    assert "no such file or folder" in fails("heads", ours / "plain/hierarchical", "none.csv")
    assert "column 'label'" in fails(
        "heads", ours / "plain/hierarchical", write_rows(tmp_path / "x.csv", [{"text": "a"}])
    )
    one = write_rows(tmp_path / "y.csv", [row for row in reviews() if row["label"] == "pos"])
    refuses(("heads", ours / "plain/hierarchical", one), "label", "nothing but")
