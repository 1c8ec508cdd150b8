"""`hsa convert`, `hsa finetune`, `hsa reproduce`, from the command line."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hsa.cli.convert import SettingOptions
from hsa.huggingface import convert, settings_of
from hsa.huggingface.fidelity.calibrate import calibrate
from hsa.huggingface.fidelity.examples import load_examples
from hsa.huggingface.fidelity.judge import Judge
from hsa.huggingface.loading import load_for_task
from hsa.huggingface.settings import LayerSettings
from tests.huggingface.fidelity.small import CHEAP, LONGEST, classifier, language_model, rows, save, tokenizer
from tests.tables import write_rows

WINDOWS = ("--kind", "multiscale", "--branching", "4", "2", "--top-k", "0")
QUICK = ("--cpu", "--lengths", "11")


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """One folder per task, and an encoder without a head."""
    folder = tmp_path_factory.mktemp("models")
    save(folder / "classification", classifier())
    save(folder / "embedding", classifier(seed=2).bert)
    save(folder / "lm", language_model())
    return folder


@pytest.fixture
def data(tmp_path):
    both = [*rows(8, split="train"), *rows(6, seed=1, split="validation")]
    return write_rows(tmp_path / "data.csv", both)


@pytest.mark.parametrize("task", ["classification", "embedding", "lm"])
def test_the_three_tasks(call, models, data, task):
    code, out, err = call("convert", models / task, data, "--task", task, "--out", "out", *WINDOWS, *QUICK, columns=60)
    assert (code, err) == (0, "")
    assert "…" not in "".join(line for line in out.splitlines() if not line.endswith(" …"))  # no cell is cut
    assert f"{task} on data: " in out
    assert "2 of 2 layers converted" in " ".join(out.split())
    report = json.loads(Path("out/report.json").read_text())
    assert (report["model"], report["data"], report["task"]) == (task, "data", task)
    assert set(report["settings"]) == {"0", "1"}
    assert {LayerSettings.from_json("", layer) for layer in report["settings"].values()} == {CHEAP}
    assert [row["length"] for row in report["timed"]] == [11]
    assert Path("out/report.md").read_text().startswith(f"# {task} on data\n")

    # What was saved gives the answers that were reported.
    model, known = load_for_task("out/model", task)
    original, _ = load_for_task(str(models / task), task)
    assert {LayerSettings(**vars(s)) for s in settings_of(model).values()} == {CHEAP}
    judge = Judge(load_examples(data), task, model, known, longest=LONGEST, batch_tokens=2**13)
    before, after = judge.ask(original), judge.ask(convert(model))
    assert len(judge) == report["examples"]
    assert judge.scores(before) == pytest.approx(report["original"])
    assert judge.scores(after) == pytest.approx(report["converted"])
    assert judge.compare(before, after) == pytest.approx(report["comparison"])
    assert judge.distance(before, after) != pytest.approx(0, abs=1e-6)
    assert report["times_fewer_operations"] == pytest.approx(after.counted.ratio)
    assert report["times_fewer_operations"] > 1


def test_some_layers_and_texts(call, models, data):
    arguments = ("--only-layers", "-1", "--limit", "3", "--max-tokens", "33", "--split", "train", *WINDOWS, *QUICK)
    code, out, _ = call("convert", models / "classification", data, *arguments)
    assert code == 0
    folder = Path("runs/convert-classification")  # unless another is named
    assert f"model     {folder / 'model'}" in out
    report = json.loads((folder / "report.json").read_text())
    assert (set(report["settings"]), report["examples"], report["mean_length"]) == ({"1"}, 3, 33)
    assert settings_of(load_for_task(str(folder / "model"), "classification")[0]) == {1: CHEAP}


def test_json_alone_on_stdout(call, models, data):
    code, out, err = call("convert", models / "classification", data, "--json", "--out", "out", *WINDOWS, *QUICK)
    assert code == 0
    assert out == Path("out/report.json").read_text()
    assert json.loads(out)["task"] == "classification"
    assert all(line.endswith(" …") for line in err.splitlines())  # what is being done


def test_a_budget(call, models, data):
    few = ("--calibrate-on", "3", "--out", "out", *QUICK)
    code, out, err = call("convert", models / "classification", data, "--budget", "ops 1.2x", *few)
    assert (code, err) == (0, "")
    report = json.loads(Path("out/report.json").read_text())
    assert (report["budget"], report["holds"], report["examples"]) == ("ops 1.2x", True, 3)  # the other half
    assert sum(point["chosen"] for point in report["frontier"]) == 1
    chosen = next(point for point in report["frontier"] if point["chosen"])
    assert chosen["ops"] >= 1.2
    assert "chosen" in out
    assert Path("out/frontier.png").exists()
    assert Path("out/sensitivity.png").exists()
    saved = settings_of(load_for_task("out/model", "classification")[0])
    assert {str(n): s.to_json() for n, s in saved.items()} == report["settings"]


def test_a_budget_that_nothing_keeps_to_on_texts_of_their_own(call, models, data, tmp_path, monkeypatch):
    monkeypatch.setitem(calibrate.__kwdefaults__, "candidates", (CHEAP,))
    own = write_rows(tmp_path / "own.jsonl", rows(4, seed=5))  # without a column of splits
    budget = ("--budget", "kept 101%", "--calibration", own)
    code, out, err = call("convert", models / "classification", data, *budget, "--out", "out", *QUICK)
    assert (code, err) == (0, "")
    assert "No setting that was tried keeps to the budget 'kept 101%'" in " ".join(out.split())
    assert "no layer converted" in " ".join(out.split())
    report = json.loads(Path("out/report.json").read_text())
    assert (report["settings"], report["holds"], report["examples"]) == ({}, False, 6)
    assert report["original"] == report["converted"]


def test_fine_tuning_then_converting(call, models, data):
    """An encoder becomes a classifier of the training rows; converted, trained on, it keeps its settings."""
    code, out, err = call(
        "finetune", models / "embedding", data, "--out", "tuned", "--epochs", "1", "--text", "text", "--cpu"
    )
    assert (code, err) == (0, "")
    assert "data: 8 texts, 2 classes: 0, 1" in out  # those of the split "train"
    assert "next: hsa convert tuned FILE" in out
    code, out, err = call("convert", "tuned", data, "--out", "out", "--only-layers", "1", *WINDOWS, *QUICK)
    assert (code, err) == (0, "")
    code, _, err = call("finetune", "out/model", data, "--out", "light", "--epochs", "1", "--cpu")
    assert (code, err) == (0, "")
    model, _ = load_for_task("light", "classification")
    assert settings_of(model) == {1: CHEAP}
    code, _, _ = call("convert", "light", data, "--out", "again", *QUICK)
    assert code == 0
    assert list(json.loads(Path("again/report.json").read_text())["settings"]) == ["1"]
    code, _, _ = call("convert", "light", data, "--out", "other", "--only-layers", "0", *WINDOWS, *QUICK)
    assert code == 0
    assert list(json.loads(Path("other/report.json").read_text())["settings"]) == ["0"]


def test_fine_tuning_converted_and_from_new_weights(call, models, data):
    arguments = ("--epochs", "1", "--limit", "4", "--cpu", "--split", "validation")
    code, out, err = call("finetune", models / "embedding", data, "--out", "a", "--convert", *WINDOWS, *arguments)
    assert (code, err) == (0, "")
    assert "4 texts" in out
    assert settings_of(load_for_task("a", "classification")[0]) == {0: CHEAP, 1: CHEAP}
    code, _, err = call("finetune", models / "embedding", data, "--out", "b", "--fresh", *arguments)
    assert (code, err) == (0, "")
    trained, first = (
        load_for_task(str(p), t)[0] for p, t in (("b", "classification"), (models / "embedding", "embedding"))
    )
    assert not torch.allclose(
        trained.bert.embeddings.word_embeddings.weight, first.embeddings.word_embeddings.weight, atol=0.1
    )


def test_an_experiment(call, models, data, tmp_path):
    recipe = tmp_path / "toy.yaml"
    recipe.write_text(
        "title: Toys\n"
        "tasks: {toy: {train: data.csv, epochs: 1}, gone: {train: none.csv}}\n"
        "variants: {cheap: {kind: multiscale, branching: [4, 2], top_k: 0}}\n"
    )
    arguments = ("reproduce", recipe, tmp_path, "--model", models / "embedding", "--cpu")
    code, out, err = call(*arguments, columns=60)
    assert (code, err) == (0, "")
    assert "gone was skipped: none.csv is not in" in " ".join(out.split())
    table = [line.split() for line in out.splitlines() if line.startswith("toy (")]
    assert [cells[2] for cells in table] == ["original", "cheap"]
    assert "…" not in out[out.index("task (tokens)") :]
    assert len(Path("runs/toy/results.jsonl").read_text().splitlines()) == 2
    code, again, _ = call(*arguments, columns=60)
    assert again[again.index("task (tokens)") :] == out[out.index("task (tokens)") :]
    assert len(Path("runs/toy/results.jsonl").read_text().splitlines()) == 2
    code, _, err = call(*arguments, "--given", "toy")
    assert (code, err) == (2, "--given: given toy, expected TASK=FOLDER\n")
    code, _, err = call(*arguments, "--given", "tie=x")
    assert (code, err) == (2, "--given: given tie, expected some of toy, gone\n")
    code, _, err = call("reproduce", recipe, tmp_path, "--tasks", "gone", "--out", "other")
    assert code == 2
    assert err.count("\n") == 1
    assert "given no task that can run (gone: none.csv is not in" in err


def test_experiments_that_cannot_run(fails, tmp_path):
    assert fails("reproduce", "none.yaml", tmp_path).startswith("none.yaml: given No such file")
    Path("bad.yaml").write_text("tasks: {a: {epochs: x}}\nvariants: {v: {}}")
    assert fails("reproduce", "bad.yaml", ".") == ("bad.yaml: tasks.a.epochs: given 'x', expected a value of type int")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only-layers", "7"], "layers: given 7, expected numbers from 0 to 1: the model has 2 layers"),
        (["--label", "mark"], "data.csv: given the column 'mark', expected one of 'text', 'label', 'split'"),
        (["--text", "txt"], "data.csv: given the column 'txt', expected one of .*; did you mean 'text'"),
        (["--split", "dev"], r"data.csv: split: given 'dev', expected one of \['train', 'validation'\]"),
        (["--budget", "fast"], "budget: given 'fast', expected such as"),
        (["--budget", "ops 1.2.3"], "budget: given 'ops 1.2.3', expected such as"),
        (["--budget", "speed 2x"], "budget: given 'speed', expected one of ops, accuracy, "),
        (["--budget", "accuracy 98"], r"budget: given accuracy \+98, expected what it may lose, in points"),
        (
            ["--budget", "ops 2x", "--top-k", "4"],
            "--top-k: given a setting, with --budget, expected one or the other",
        ),
        (["--limit", "0"], "limit: given 0, expected 1 or more"),
        (["--max-tokens", "0"], "max_tokens: given 0, expected 1 or more"),
        (["--max-tokens", "2"], "max_tokens: given 2, expected at least 3"),
        (["--calibrate-on", "0"], "calibrate_on: given 0, expected 1 or more"),
        (["--lengths", "62"], "lengths: given 62, expected 1 to 61, the most that the model takes"),
        (["--lengths", "0"], "lengths: given 0, expected 1 to 61"),
        (["--top-k=-1"], "top_k: given -1, expected 0 or a positive number"),
        (["--sinks", "many"], "sinks: given 'many', expected 'special', a number of first tokens, or None"),
        (["--branching", "1"], "branching"),
        (["--near", "1"], "near: given 1, expected 0 with kind='clustered'"),
        (["--task", "lm"], "given a checkpoint without .* of the weights"),
    ],
)
def test_options_that_do_not_fit(fails, models, data, arguments, message):
    assert re.search(message, fails("convert", models / "classification", data.name, "--out", "out", *arguments))
    assert not Path("out/model").exists()


def test_models_that_do_not_fit(fails, models, data, tmp_path):
    line = fails("convert", tmp_path / "none", data)
    assert line.startswith(f"{tmp_path / 'none'}: given no model that loads (no such folder), expected a folder with")
    (tmp_path / "here").mkdir()
    line = fails("convert", "here/none", data)  # looks like a name on the hub
    assert line.startswith("here/none: given no model that loads (no such folder)")
    line = fails("convert", models / "embedding", data)
    assert "given a checkpoint without 2 of the weights, such as classifier.bias" in line
    assert line.endswith("fine-tune it first: hsa finetune")
    save(tmp_path / "cut", classifier())
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "cut: given no model that loads (" in fails("convert", tmp_path / "cut", data)
    (tmp_path / "cut" / "config.json").write_text("{")
    assert "cut: given no model that loads (" in fails("convert", tmp_path / "cut", data)
    (tmp_path / "cut" / "config.json").write_text('{"model_type": "nonesuch"}')
    assert "cut: given no model that loads (" in fails("finetune", tmp_path / "cut", data, "--out", "x")
    from tests.huggingface.tiny_models import ENCODER, transformers

    save(tmp_path / "masked", transformers.BertForMaskedLM(transformers.BertConfig(**ENCODER)))
    line = fails("convert", tmp_path / "masked", data, "--task", "lm")
    assert "given BertLMHeadModel, whose tokens see later ones, expected a causal language model" in line


def test_data_that_do_not_fit(fails, models, data, tmp_path):
    def line(some, *more):
        return fails("convert", models / "classification", some, "--out", "out", *more)

    assert line("none.csv") == "none.csv: given no such file, expected a readable file"
    (tmp_path / "empty.csv").write_text("")
    assert line("empty.csv") == "empty.csv: given an empty file, expected rows"
    (tmp_path / "bare.csv").write_text("text,label\n")
    assert line("bare.csv") == "bare.csv: given no rows, expected at least one"
    (tmp_path / "notes.txt").write_text("a")
    assert line("notes.txt").startswith("notes.txt: given the suffix '.txt', expected one of .csv")
    unlabelled = write_rows(tmp_path / "u.jsonl", [{"text": "the cat sat"}])
    assert line(unlabelled).startswith("u: given no labels, expected a label per row, to say how good answers are")
    assert fails("finetune", models / "embedding", unlabelled, "--out", "o").startswith("u: given no labels")
    other = write_rows(
        tmp_path / "o.jsonl", [{"text": "the cat sat", "label": "cat"}, {"text": "a dog", "label": "dog"}]
    )
    assert line(other).startswith("o: label: given 'cat', expected one of the model's classes: 'LABEL_0', 'LABEL_1'")
    one = write_rows(tmp_path / "one.jsonl", rows(1))
    assert line(one, "--budget", "ops 2x").startswith("one: given 1 different texts, expected at least 2")
    assert fails("finetune", models / "embedding", one, "--out", "o").startswith(
        "one: label: given nothing but '0', expected at least 2 classes"
    )
    assert "split: given 'dev'" in fails("finetune", models / "embedding", data, "--out", "o", "--split", "dev")
    assert fails("finetune", models / "embedding", data, "--out", "o", "--limit", "0").startswith("limit: given 0")


def test_a_run_that_was_broken_off_with_other_options(call, fails, models, data, monkeypatch):
    arguments = ("finetune", models / "embedding", data, "--out", "o", "--cpu")
    from hsa.huggingface.fidelity import finetune as finetuning

    monkeypatch.setattr(finetuning, "save_finetuned", lambda *_: None)  # as if it had not come so far
    assert call(*arguments, "--epochs", "1")[0] == 0
    assert "given a run with epochs 1, expected one with epochs 2" in fails(*arguments, "--epochs", "2")
    assert call(*arguments, "--epochs", "1")[0] == 0


@pytest.mark.slow
def test_nothing_but_the_command_speaks(models, data, tmp_path):
    """In a process of its own: no warnings, no bars of the libraries."""
    arguments = [
        "convert",
        str(models / "classification"),
        str(data),
        *WINDOWS,
        *QUICK,
        "--out",
        str(tmp_path / "o"),
    ]
    code = f"from hsa.cli.main import run; run({arguments!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("loading ")


def test_the_libraries_may_speak_again_afterwards(models):
    from tests.huggingface.tiny_models import transformers

    hub = logging.getLogger("huggingface_hub")
    before = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled(), hub.level
    load_for_task(str(models / "classification"), "classification")
    assert before == (transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled(), hub.level)
    assert tokenizer().model_max_length == LONGEST


def test_the_defaults_are_those_of_python():
    assert LayerSettings(**SettingOptions().values()) == LayerSettings()


def test_settings_by_their_names(call, models, data):
    pytest.importorskip("sentencex")
    named = ("--kind", "hierarchical", "--tree", "sentences", "--branching", "4", "2", "--sinks", "special")
    code, _, err = call("convert", models / "classification", data, "--out", "a", *named, *QUICK)
    assert (code, err) == (0, "")
    sentences = LayerSettings(kind="hierarchical", tree="sentences", branching=(4, 2), sinks="special")
    assert set(settings_of(load_for_task("a/model", "classification")[0]).values()) == {sentences}
    named = ("--top-k", "2", "--tile", "5", "--branching", "4", "2")
    code, _, err = call("convert", models / "classification", data, "--out", "b", *named, *QUICK)
    assert (code, err) == (0, "")
    assert set(settings_of(load_for_task("b/model", "classification")[0]).values()) == {
        LayerSettings(branching=(4, 2), top_k=2, tile=5)
    }


def test_a_model_that_hsa_0_1_converted(fails, data, tmp_path):
    save(tmp_path / "old", classifier(hsa={"version": 1, "special_ids": [], "layers": {}}))
    line = fails("convert", tmp_path / "old", data)
    assert line.startswith(
        "config.hsa['version']: given 1: this model was converted by hsa 0.1, expected 2; convert the"
    )


@pytest.mark.parametrize("command", ["convert", "finetune", "reproduce"])
def test_help(call, command):
    code, out, _ = call(command, "--help")
    assert code == 0
    assert "DATA" in out
    for option in ("--max-tokens ", "--limit ", "--split ", "--epochs "):
        assert out.count(option) <= 1  # each option stands for one thing
