"""`hsa convert`, `hsa finetune`, `hsa reproduce`, from the command line."""

import json
import logging
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hsa.analysis import memory
from hsa.cli.convert import SettingOptions
from hsa.huggingface import convert, settings_of
from hsa.huggingface.fidelity import crossover, judge
from hsa.huggingface.fidelity.calibrate import calibrate
from hsa.huggingface.fidelity.examples import load_examples
from hsa.huggingface.fidelity.judge import Judge
from hsa.huggingface.loading import load_for_task, save_model
from hsa.huggingface.settings import LayerSettings
from tests.huggingface.fidelity.small import CHEAP, LONGEST, classifier, language_model, rows, save, text, tokenizer
from tests.tables import write_rows

WINDOWS = ("--kind", "multiscale", "--branching", "4", "2", "--top-k", "0")
QUICK = ("--cpu", "--lengths", "11")


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(crossover, "LENGTHS", (16,))
    monkeypatch.setenv("HSA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Save a model per task."""
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

    # The saved model has the reported scores.
    model, known = load_for_task("out/model", task)
    original, _ = load_for_task(str(models / task), task)
    assert {LayerSettings(**vars(s)) for s in settings_of(model).values()} == {CHEAP}
    judge = Judge(load_examples(data), task, model, known, longest=LONGEST, batch_tokens=2**13)
    before = judge.ask(original)
    after = judge.ask(convert(model), against=before)
    assert len(judge) == report["examples"]
    assert judge.scores(before) == pytest.approx(report["original"])
    assert judge.scores(after) == pytest.approx(report["converted"])
    assert judge.compare(before, after) == pytest.approx(report["comparison"])
    assert judge.distance(before, after) != pytest.approx(0, abs=1e-6)
    assert report["times_fewer_operations"] == pytest.approx(after.counted.ratio)
    assert report["times_fewer_operations"] > 1


def test_part_of_the_layers_and_texts(call, models, data):
    arguments = ("--only-layers", "-1", "--limit", "3", "--max-tokens", "33", "--split", "train", *WINDOWS, *QUICK)
    code, out, _ = call("convert", models / "classification", data, *arguments)
    assert code == 0
    folder = Path("runs/convert-classification")  # unless another is named
    assert f"model     {folder / 'model'}" in out
    report = json.loads((folder / "report.json").read_text())
    assert (set(report["settings"]), report["examples"], report["mean_length"]) == ({"1"}, 3, 33)
    assert settings_of(load_for_task(str(folder / "model"), "classification")[0]) == {1: CHEAP}


def test_only_json_on_stdout(call, models, data):
    code, out, err = call("convert", models / "classification", data, "--json", "--out", "out", *WINDOWS, *QUICK)
    assert code == 0
    assert out == Path("out/report.json").read_text()
    assert json.loads(out)["task"] == "classification"
    lines = err.splitlines()
    assert "converted model: 6 of 6 in 0 s" in lines
    said = "converted attention is not faster than exact attention up to 16 tokens "
    assert said + "(measured here on random inputs, 4 heads × 8); texts are cut at 61 tokens" in lines
    assert all(re.search(r" …$|: \d+ of \d+ in \d+ s$|tokens$", line) for line in lines)  # what is being done


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


def test_an_interrupted_comparison_goes_on(call, models, data, monkeypatch):
    """The second call measures only what the first did not, and leaves nothing behind for a third."""
    from hsa.huggingface.fidelity import parts

    asked, ask, time = [], judge.Judge.ask, parts.time_model

    def interrupt(*call, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        judge.Judge, "ask", lambda self, *more, **named: (asked.append(1), ask(self, *more, **named))[1]
    )
    monkeypatch.setattr(parts, "time_model", interrupt)
    arguments = ("convert", models / "classification", data, "--out", "out", *WINDOWS, *QUICK)
    message = "stopped; the same command goes on from what is in out\n"
    assert call(*arguments)[::2] == (2, message)
    assert len(asked) == 2
    assert not Path("out/model").exists()
    monkeypatch.setattr(parts, "time_model", time)
    code, out, err = call(*arguments)
    assert (code, err) == (0, "")
    assert "continuing from the finished parts in out" in out
    assert len(asked) == 2
    report = json.loads(Path("out/report.json").read_text())
    assert settings_of(load_for_task("out/model", "classification")[0]) == {0: CHEAP, 1: CHEAP}
    assert sorted(path.name for path in Path("out").iterdir()) == [
        "model", "operations.png", "report.json", "report.md", "timing.png"
    ]  # fmt: skip
    code, out, _ = call(*arguments)
    assert "continuing" not in out
    assert len(asked) == 4
    again = json.loads(Path("out/report.json").read_text())
    assert {**again, "timed": []} == {**report, "timed": []}


@pytest.mark.parametrize("task", ["classification", "lm"])
def test_a_dry_run_estimates_and_writes_nothing(call, models, data, task):
    arguments = ("convert", models / task, data, "--task", task, "--dry-run", *QUICK)
    code, out, err = call(*arguments, *WINDOWS)
    assert (code, err) == (0, "")
    assert re.search(r"estimate, from one batch of \d+ of \d+ (text|piece)s:\n  report +about \d+ s\n", out)
    assert re.search(r"\n  memory +0.0 GiB of weights, and about [\d.]+ GiB beside them\nnothing was converted\n$", out)
    assert not Path("runs").exists()
    budget = () if task == "lm" else ("--budget", "ops 2x")
    code, out, _ = call(*arguments, *budget, "--json")
    assert code == 0
    assert (json.loads(out)["search"] > 0) == (task != "lm")
    assert not Path("runs").exists()


def test_interrupted_before_anything_was_measured(call, models, data, monkeypatch):
    def interrupt(*call, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(judge.Judge, "ask", interrupt)
    arguments = ("convert", models / "classification", data, "--out", "out", *WINDOWS, *QUICK)
    assert call(*arguments)[::2] == (2, "stopped before anything was measured\n")
    assert not Path("out").exists()


@pytest.mark.filterwarnings("default::hsa.errors.HsaWarning")
def test_too_few_texts_for_a_budget(call, models, data, monkeypatch):
    monkeypatch.setitem(calibrate.__kwdefaults__, "candidates", (CHEAP,))
    arguments = ("--budget", "accuracy -0.5", "--calibrate-on", "3", "--out", "out", *QUICK)
    code, out, err = call("convert", models / "classification", data, *arguments)
    warning = (
        "3 texts are too few for this budget: a change of 0.5 points has a standard error of at least 4.1 points. "
        "About 800 texts would do: --calibrate-on 800"
    )
    assert (code, err) == (0, f"{warning}\n")  # before the search
    assert warning in " ".join(out.split())
    assert f"- {warning}." in Path("out/report.md").read_text()


def test_a_budget_that_no_setting_meets_on_a_calibration_file(call, models, data, tmp_path, monkeypatch):
    monkeypatch.setitem(calibrate.__kwdefaults__, "candidates", (CHEAP,))
    own = write_rows(tmp_path / "own.jsonl", rows(4, seed=5))  # without a column of splits
    budget = ("--budget", "ops 50x", "--calibration", own)
    code, out, err = call("convert", models / "classification", data, *budget, "--out", "out", *QUICK)
    assert (code, err) == (0, "")
    report = json.loads(Path("out/report.json").read_text())
    assert (len(report["settings"]), report["holds"], report["examples"]) == (2, False, 6)
    said = (
        f"No settings tried keep to the budget 'ops 50x'; the closest, {report['reached']} in the search, were taken."
    )
    assert said in " ".join(out.split())


@pytest.fixture
def decoder(tmp_path):
    """Save a language model that reads 1,300 tokens."""
    known = tokenizer()
    known.model_max_length = 10**30
    save_model(tmp_path / "decoder", language_model(max_position_embeddings=1300), known)
    return tmp_path / "decoder"


@pytest.fixture
def books(tmp_path):
    generator = random.Random(0)
    return write_rows(tmp_path / "books.jsonl", [{"text": text(generator, 2400, 2500)} for _ in range(5)])


def test_a_budget_of_a_language_model(call, decoder, books, monkeypatch):
    few = (LayerSettings(threshold=0.5), LayerSettings(threshold=0.01))
    monkeypatch.setitem(calibrate.__kwdefaults__, "candidates", few)
    arguments = ("convert", decoder, books, "--task", "lm", "--budget", "perplexity +900%", "--max-tokens", "1200")
    arguments += ("--exact-until", "300")
    code, out, err = call(*arguments, "--out", "out", *QUICK)
    assert (code, err) == (0, "")
    said = " ".join(out.split())
    assert (
        "searching on 4 pieces of 1,200 tokens from 2 texts, reporting on 6 pieces of 1,200 tokens from 3 texts" in said
    )
    assert re.search("6 pieces of 1,200 tokens; [12] of 2 layers converted", said)
    report = json.loads(Path("out/report.json").read_text())
    assert (report["holds"], report["examples"], report["mean_length"]) == (True, 6, 1200)
    assert report["reached"].startswith("perplexity +")
    assert report["times_fewer_operations"] > 1
    assert {layer["exact_until"] for layer in report["settings"].values()} == {300}
    assert {name for point in report["frontier"] for name in point} >= {"perplexity", "distance", "ops"}
    kept = Path("out/calibration.json").stat().st_mtime_ns
    code, _, err = call(*(a if a != "perplexity +900%" else "ops 1x" for a in arguments), "--out", "out", *QUICK)
    assert (code, err) == (0, "")
    assert Path("out/calibration.json").stat().st_mtime_ns == kept  # nothing was measured again


def test_pieces_of_a_language_model(call, decoder, books):
    arguments = ("convert", decoder, books, "--task", "lm", "--threshold", "0.5", "--out", "out", *QUICK)
    code, out, _ = call(*arguments, "--max-tokens", "300", "--limit", "7")
    assert code == 0
    assert "reporting on 7 pieces of 300 tokens from 5 texts" in " ".join(out.split())
    code, out, _ = call(*arguments, "--max-tokens", "100", "--limit", "2")
    assert code == 0
    assert "Nothing is saved on pieces of 100 tokens" in " ".join(out.split())


@pytest.mark.filterwarnings("default::hsa.errors.HsaWarning")
def test_a_length_that_the_model_cannot_read(call, decoder, books):
    arguments = ("convert", decoder, books, "--task", "lm", "--max-tokens", "9000", "--limit", "1", "--out", "out")
    code, out, err = call(*arguments, *QUICK)
    assert code == 0
    assert err.startswith("--max-tokens 9000: the model reads at most 1,300 tokens, so texts are cut there. ")
    assert err.count("\n") == 1
    assert "reporting on 1 piece of 1,300 tokens" in out


@pytest.mark.parametrize(
    ("arguments", "where", "phrases"),
    [
        (["--budget", "kept 98%"], "budget", ["one of ops, perplexity, got 'kept'", "for the task classification"]),
        (["--budget", "perplexity -1%"], "budget", ["perplexity +0.5%", "got 'perplexity -1%'"]),
        (["--budget", "perplexity 5x"], "budget", ["perplexity +0.5%", "got 'perplexity 5x'"]),
        (["--budget", "ops 2x", "--max-tokens", "1300"], "max_tokens", ["more than 2,048 with --budget", "got 1300"]),
        (
            ["--budget", "ops 2x", "--max-tokens", "256", "--exact-until", "0"],
            "max_tokens",
            ["more than 256 with --budget", "smaller --exact-until"],
        ),
        (["--budget", "ops 2x", "--limit", "0"], "limit", ["1 or more"]),
    ],
)
def test_searches_of_language_models_that_make_no_sense(refuses, decoder, books, arguments, where, phrases):
    refuses(("convert", decoder, books, "--task", "lm", "--out", "out", *arguments), where, *phrases)


def test_encoder_decoders_are_no_language_models(refuses, data, tmp_path):
    from tests.huggingface.tiny_models import FAMILIES, transformers

    shape = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 1, "num_heads": 4, "vocab_size": 59}
    save(tmp_path / "t5", transformers.T5ForConditionalGeneration(transformers.T5Config(**shape)))
    save(tmp_path / "bart", FAMILIES["bart"]())
    for name in ("t5", "bart"):
        phrases = ("expected a causal language model", f"got an encoder–decoder ({name})", "model.get_encoder()")
        refuses(("convert", tmp_path / name, data, "--task", "lm"), tmp_path / name, *phrases)
        refuses(("generate", tmp_path / name, "--prompt", "the cat"), tmp_path / name, *phrases)


@pytest.mark.parametrize("fits", ["a batch", "one text", "less"])
def test_out_of_memory(call, decoder, books, monkeypatch, fits):
    """Texts are tried one at a time; if that does not fit either, the error says what would."""
    from hsa.huggingface.fidelity import next_tokens

    decode, tokens = next_tokens.final_states, []
    most = {"a batch": 10**6, "one text": 350, "less": 200}[fits]

    def final_states(model, ids):
        tokens.append(ids.numel())
        if ids.numel() > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return decode(model, ids)

    for module in (next_tokens, judge):
        monkeypatch.setattr(module, "final_states", final_states)
    monkeypatch.setattr(memory, "extra_memory", lambda run, device: run() or tokens[-1] / 10)
    monkeypatch.setattr(memory, "free_memory", lambda device: 16.0)
    arguments = ("convert", decoder, books, "--task", "lm", "--threshold", "0.5", "--max-tokens", "350", "--out", "out")
    code, out, err = call(*arguments, *QUICK)
    if fits == "less":
        assert code == 2
        assert (
            err
            == "out of memory: 350 tokens need about 0.0 GiB beside the model, and 0.0 GiB are free. Pass --max-tokens 128\n"
        )
        return
    assert (code, err) == (0, "")
    assert ("out of memory; one text at a time" in out) == (fits == "one text")
    assert set(tokens[-2:]) == ({16 * 350} if fits == "a batch" else {350})


def test_fine_tuning_then_converting(call, models, data):
    """Check that a converted model keeps its settings when it is fine-tuned again."""
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
    code, again, _ = call(*arguments, "--resume", columns=60)
    assert again[again.index("task (tokens)") :] == out[out.index("task (tokens)") :]
    assert len(Path("runs/toy/results.jsonl").read_text().splitlines()) == 2
    code, _, err = call(*arguments, "--out", "runs/toy")
    message = "got a folder with a run. Pass --resume to continue that run, or another --out\n"
    assert (code, err) == (2, f"runs/toy: expected a new folder, {message}")
    code, _, err = call(*arguments, "--resume", "--out", "nowhere")
    assert (code, err) == (2, "nowhere: no such folder; expected a run to resume. Start without --resume\n")
    code, _, err = call(*arguments, "--given", "toy")
    assert (code, err) == (2, "--given: expected TASK=FOLDER, got toy\n")
    code, _, err = call(*arguments, "--given", "tie=x")
    assert (code, err) == (2, "--given: expected one of toy, gone, got tie\n")
    code, _, err = call("reproduce", recipe, tmp_path, "--tasks", "gone", "--out", "other")
    assert code == 2
    assert err.count("\n") == 1
    assert "no task that can run (gone: none.csv is not in" in err


def test_experiments_that_cannot_run(refuses, tmp_path):
    refuses(("reproduce", "none.yaml", tmp_path), "none.yaml", "no such file")
    Path("bad.yaml").write_text("tasks: {a: {epochs: x}}\nvariants: {v: {}}")
    refuses(("reproduce", "bad.yaml", "."), "bad.yaml: tasks.a.epochs", "int, got 'x'")


@pytest.mark.parametrize(
    ("arguments", "where", "phrases"),
    [
        (["--only-layers", "7"], "layers", ["from 0 to 1", "the model has 2 layers", "got 7"]),
        (["--label", "mark"], "data.csv", ["one of 'text', 'label', 'split'", "no column 'mark'"]),
        (["--text", "txt"], "data.csv", ["no column 'txt'; expected one of ", "Did you mean 'text'"]),
        (["--split", "dev"], "data.csv: split", ["['train', 'validation']", "got 'dev'"]),
        (["--budget", "fast"], "budget", ['"ops 4x"', "got 'fast'"]),
        (["--budget", "ops 1.2.3"], "budget", ['"ops 4x"', "got 'ops 1.2.3'"]),
        (["--budget", "speed 2x"], "budget", ["one of ops, accuracy, ", "got 'speed'"]),
        (
            ["--budget", "perplexity +1%"],
            "budget",
            ["one of ops, accuracy, ", "perplexity is a budget for the task lm"],
        ),
        (["--budget", "accuracy 98"], "budget", ["accuracy -0.5", "got 'accuracy 98'"]),
        (
            ["--budget", "ops 2x", "--top-k", "4"],
            "--top-k",
            ["expected one of them, got a setting together with --budget"],
        ),
        (["--limit", "0"], "limit", ["expected 1 or more, got 0"]),
        (["--max-tokens", "0"], "max_tokens", ["expected 1 or more, got 0"]),
        (["--max-tokens", "2"], "max_tokens", ["at least 3", "got 2"]),
        (["--calibrate-on", "0"], "calibrate_on", ["expected 1 or more, got 0"]),
        (["--lengths", "62"], "lengths", ["expected 1 to 61, the limit of the model, got 62"]),
        (["--lengths", "0"], "lengths", ["expected 1 to 61, the limit of the model, got 0"]),
        (["--top-k=-1"], "top_k", ["a number of groups, 0 or more", "got -1"]),
        (["--threshold", "2"], "threshold", ["a number above 0 and at most 1", "got 2.0"]),
        (
            ["--kind", "multiscale", "--tree", "sentences", "--threshold", "0.1"],
            "threshold",
            ["top_k in its place", "not causal", "got 0.1"],
        ),
        (["--sinks", "many"], "sinks", ["'special', ", "got 'many'"]),
        (["--branching", "1"], "branching[0]", ["expected 2 or more, got 1"]),
        (["--near", "1"], "near", ["0 with kind='clustered'", "got 1"]),
        (["--task", "lm"], "classification", ["a checkpoint without", "of the weights"]),
    ],
)
def test_options_that_do_not_fit(refuses, models, data, arguments, where, phrases):
    refuses(("convert", models / "classification", data.name, "--out", "out", *arguments), where, *phrases)
    assert not Path("out/model").exists()


def test_models_that_do_not_fit(fails, refuses, models, data, tmp_path):
    refuses(("convert", tmp_path / "none", data), tmp_path / "none", "the model cannot be loaded (no such folder)")
    (tmp_path / "here").mkdir()
    refuses(
        ("convert", "here/none", data), "here/none", "the model cannot be loaded (no such folder)"
    )  # like a hub name
    line = fails("convert", models / "embedding", data)
    assert "a checkpoint without 2 of the weights, such as classifier.bias" in line
    assert "hsa finetune" in line
    save(tmp_path / "cut", classifier())
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refuses(("convert", tmp_path / "cut", data), "cut", "the model cannot be loaded (")
    (tmp_path / "cut" / "config.json").write_text("{")
    refuses(("convert", tmp_path / "cut", data), "cut", "the model cannot be loaded (")
    (tmp_path / "cut" / "config.json").write_text('{"model_type": "nonesuch"}')
    refuses(("finetune", tmp_path / "cut", data, "--out", "x"), "cut", "the model cannot be loaded (")
    from tests.huggingface.tiny_models import ENCODER, transformers

    save(tmp_path / "masked", transformers.BertForMaskedLM(transformers.BertConfig(**ENCODER)))
    line = fails("convert", tmp_path / "masked", data, "--task", "lm")
    assert "expected a causal language model" in line
    assert "BertLMHeadModel" in line


def test_data_that_do_not_fit(refuses, models, data, tmp_path):
    def check(data, where, *phrases, more=()):
        refuses(("convert", models / "classification", data, "--out", "out", *more), where, *phrases)

    def check_finetuning(data, where, *phrases, more=()):
        refuses(("finetune", models / "embedding", data, "--out", "o", *more), where, *phrases)

    check("none.csv", "none.csv", "no such file")
    (tmp_path / "empty.csv").write_text("")
    check("empty.csv", "empty.csv", "an empty file")
    (tmp_path / "bare.csv").write_text("text,label\n")
    check("bare.csv", "bare.csv", "no rows")
    (tmp_path / "notes.txt").write_text("a")
    check("notes.txt", "notes.txt", "one of .csv", "the suffix '.txt'")
    unlabelled = write_rows(tmp_path / "u.jsonl", [{"text": "the cat sat"}])
    check(unlabelled, "u", "no labels", "a label per row")
    check_finetuning(unlabelled, "u", "no labels")
    other = write_rows(
        tmp_path / "o.jsonl", [{"text": "the cat sat", "label": "cat"}, {"text": "a dog", "label": "dog"}]
    )
    check(other, "o: label", "one of the model's classes: 'LABEL_0', 'LABEL_1'", "got 'cat'")
    one = write_rows(tmp_path / "one.jsonl", rows(1))
    check(one, "one", "expected at least 2", "got 1 different texts", more=("--budget", "ops 2x"))
    check_finetuning(one, "one: label", "at least 2 classes", "nothing but '0'")
    check_finetuning(data, "split", "got 'dev'", more=("--split", "dev"))
    check_finetuning(data, "limit", "expected 1 or more, got 0", more=("--limit", "0"))


def test_fine_tuning_resumes_an_unfinished_run_only_when_asked(call, fails, refuses, models, data, monkeypatch):
    arguments = ("finetune", models / "embedding", data, "--out", "o", "--cpu")
    assert fails(*arguments, "--resume") == ("o: no unfinished run; expected a run to resume. Start without --resume")
    from hsa.huggingface.fidelity import finetune as finetuning

    with monkeypatch.context() as patch:
        patch.setattr(finetuning, "save_finetuned", lambda *_: None)  # as if the run was interrupted before
        assert call(*arguments, "--epochs", "1")[0] == 0
    assert fails(*arguments, "--epochs", "1") == (
        "o: expected a new folder, got a folder with an unfinished run. "
        "Pass --resume to continue that run, or another --out"
    )
    refuses((*arguments, "--epochs", "2", "--resume"), "o", "a run with epochs 2", "got one with epochs 1")
    assert call(*arguments, "--epochs", "1", "--resume")[0] == 0
    assert fails(*arguments, "--epochs", "1").endswith("got a folder with a finished run. Pass another --out")
    assert fails(*arguments, "--epochs", "1", "--resume").startswith("o: no unfinished run")


@pytest.mark.slow
def test_libraries_print_nothing(models, data, tmp_path):
    """Check in a process of its own that there are no warnings and no progress bars of the libraries."""
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


def test_the_verbosity_of_the_libraries_is_restored(models):
    from tests.huggingface.tiny_models import transformers

    hub = logging.getLogger("huggingface_hub")
    before = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled(), hub.level
    load_for_task(str(models / "classification"), "classification")
    assert before == (transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled(), hub.level)
    assert tokenizer().model_max_length == LONGEST


def test_defaults_equal_those_in_python():
    assert LayerSettings(**SettingOptions().values()) == LayerSettings()


def test_named_settings(call, models, data):
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


@pytest.mark.parametrize("version", [1, 2])
def test_a_model_that_an_earlier_hsa_converted(refuses, data, tmp_path, version):
    save(tmp_path / "old", classifier(hsa={"version": version, "special_ids": [], "layers": {}}))
    refuses(("convert", tmp_path / "old", data), "config.hsa['version']", "expected 3", f"hsa 0.{version} converted")
