"""`hsa train --task lm` and `hsa generate`, from the command line."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hsa.cli.main import run
from hsa.generation.text_stream import TextStream

TINY = ("--task", "lm", "--cpu", "--width", "16", "--heads", "2", "--layers", "1", "--vocabulary", "300")
SHORT = ("--context", "32", "--steps", "6", "--batch-tokens", "128", "--branching", "4", "2")
GROUPS = (*SHORT[:-2], "2", "2", "2", "--tile", "4", "--threshold", "0.125")


def tale(folder):
    path = folder / "tale.txt"
    path.write_text("\n\n".join(f"The cat sat on mat {i}. It was warm there." for i in range(150)))
    return path


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    monkeypatch.setenv("HSA_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of a run of two models."""
    folder = tmp_path_factory.mktemp("trained")
    environment = pytest.MonkeyPatch()
    environment.setenv("HSA_CACHE", str(folder / "cache"))
    with pytest.raises(SystemExit) as caught:
        run(["train", str(tale(folder)), *TINY, *SHORT, "--tree", "text", "--out", str(folder / "run")])
    environment.undo()
    assert caught.value.code == 0
    return folder / "run"


def test_training_leaves_models_a_report_and_pictures(trained):
    assert {path.name for path in trained.iterdir()} == {
        "multiscale",
        "flat",
        "results.json",
        "report.md",
        "losses.png",
        "positions.png",
    }
    hsa, flat = json.loads((trained / "results.json").read_text())
    assert (hsa["model"], flat["model"]) == ("multiscale", "flat")
    assert hsa["parameters"] - flat["parameters"] == 2  # a bias per head
    assert hsa["tokens"] == flat["tokens"] == 6 * 128
    assert [record["step"] for record in hsa["history"]] == [1, 2, 3, 4, 5, 6]
    assert hsa["loss"] == pytest.approx(sum(loss for _, loss in hsa["by_position"]) / len(hsa["by_position"]), rel=0.2)
    about = json.loads((trained / "multiscale" / "config.json").read_text())
    assert sorted(set(about["closes"].values())) == [2, 3, 4, 5]
    assert about["branching"] == [4, 2]
    report = (trained / "report.md").read_text()
    assert "# Language models of tale.txt" in report
    assert "multiscale against flat: perplexity" in report
    assert "context: 32" in report


def test_models_may_be_named_with_commas(call):
    code, out, err = call("train", tale_here(), *TINY, *GROUPS, "--models", "clustered,flat", "--out", "run")
    assert (code, err) == (0, "")
    table = [line.split()[0] for line in out.splitlines() if line.startswith(("clustered ", "flat ")) and "M" in line]
    assert table == ["clustered", "flat"]
    assert "clustered against flat: perplexity" in out
    assert "next: hsa generate run/clustered --prompt The" in out
    about = json.loads(Path("run/clustered/config.json").read_text())
    assert about["closes"] == {}  # windows by default
    assert (about["branching"], about["tile"], about["threshold"], about["top_k"]) == ([2, 2, 2], 4, 0.125, None)
    code, out, _ = call("generate", "run/clustered", "--prompt", "The cat", "--max-new-tokens", "30", "--cpu")
    assert (code, len(out) > 1) == (0, True)


def test_options_of_clustered_models(fails):
    asked = ("train", tale_here(), *TINY, "--models", "clustered", "--out", "run")
    assert "branching: expected keys per group" in fails(*asked, *SHORT)
    assert "top_k: expected None with a threshold" in fails(*asked, *GROUPS, "--top-k", "2")


def tale_here():
    return tale(Path())


def test_a_finished_run_is_not_trained_again(call, trained):
    weights = trained / "multiscale" / "model.safetensors"
    before, reported = weights.read_bytes(), json.loads((trained / "results.json").read_text())
    asked = ("train", trained.parent / "tale.txt", *TINY, *SHORT, "--tree", "text", "--out", trained, "--resume")
    code, out, _ = call(*asked)
    assert code == 0
    assert "multiscale against flat" in out
    assert weights.read_bytes() == before
    assert json.loads((trained / "results.json").read_text()) == reported
    code, _, err = call(*asked, "--near", "3")
    assert code == 2
    assert "expected near = 3" in err
    assert "trained with near = 1" in err


def test_a_run_starts_from_the_weights_of_another(call, fails, trained, tmp_path):
    data = trained.parent / "tale.txt"
    asked = ("train", data, *TINY, *SHORT, "--tree", "text", "--init-from", trained, "--out", tmp_path / "longer")
    assert "init_from: " in fails(*asked, "--models", "multiscale", "transformer-xl")
    assert not (tmp_path / "longer" / "multiscale").exists()  # nothing was trained in vain
    code, _, _ = call(*asked, "--models", "multiscale", "--learning-rate", "1e-9")
    assert code == 0
    losses = [json.loads((run / "results.json").read_text())[0]["loss"] for run in (trained, tmp_path / "longer")]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)


def test_a_run_of_language_models_is_overwritten(call, refuses, trained, tmp_path):
    run, data = tmp_path / "run", trained.parent / "tale.txt"
    shutil.copytree(trained, run)
    asked = ("train", data, *TINY, *SHORT, "--models", "multiscale", "--learning-rate", "1e-9", "--out", run)
    bad = (*asked, "--overwrite", "--init-from", run)
    refuses(bad, "init_from", f"got {run}, which --overwrite would remove", "a run in another folder")
    assert (run / "flat/model.safetensors").is_file()
    code, _, err = call(*asked, "--overwrite")
    assert (code, err) == (0, "")
    assert not (run / "flat").exists()
    assert [result["model"] for result in json.loads((run / "results.json").read_text())] == ["multiscale"]


def test_text_goes_to_stdout_and_speed_to_stderr(call, trained):
    asked = ("generate", trained, "--prompt", "The cat", "--max-new-tokens", "12", "--seed", "3", "--cpu")
    code, out, err = call(*asked)
    assert code == 0
    assert out.endswith("\n")
    assert len(out) > 1
    assert re.match(r"\d+ tokens read in \d\.\d\d s, ", err)
    assert "12 generated at" in err
    assert "in a flat cache" in err or "of a flat cache" in err
    assert call(*asked)[1] == out
    assert call(*asked[:-2], "4", "--cpu")[1] != out


def test_prompts_from_a_file_and_from_stdin(call, trained, tmp_path, monkeypatch):
    options = ("--max-new-tokens", "9", "--temperature", "0", "--cpu")
    _, wanted, _ = call("generate", trained / "multiscale", "--prompt", "The cat", *options)
    (tmp_path / "prompt.txt").write_text("The cat")
    assert call("generate", trained / "multiscale", "--prompt-file", tmp_path / "prompt.txt", *options)[1] == wanted
    monkeypatch.setattr(sys, "stdin", io.StringIO("The cat"))
    assert call("generate", trained / "multiscale", "--prompt", "-", *options)[1] == wanted


def test_stop_strings(call, trained):
    options = ("--max-new-tokens", "30", "--temperature", "0", "--cpu")
    _, whole, _ = call("generate", trained, "--prompt", "The cat", *options)
    end = whole[3:5]
    _, out, _ = call("generate", trained, "--prompt", "The cat", *options, "--stop", "never ever", "--stop", end)
    assert out == whole[: whole.find(end)] + "\n"


def test_an_interrupted_text_stays(call, trained, monkeypatch):
    made = TextStream.__next__

    def next_or_stop(self):
        if len(self.ids) >= 5:
            raise KeyboardInterrupt
        return made(self)

    monkeypatch.setattr(TextStream, "__next__", next_or_stop)
    code, out, err = call("generate", trained, "--prompt", "The cat", "--max-new-tokens", "500", "--seed", "1", "--cpu")
    assert code == 0
    assert len(out) > 1
    assert 5 <= int(re.search(r"(\d+) generated", err)[1]) < 20
    assert "(interrupted)" in err


@pytest.mark.slow
def test_interrupted_by_a_signal(trained):
    command = [sys.executable, "-c", "from hsa.cli.main import run; run()", "generate", str(trained)]
    process = subprocess.Popen(
        [*command, "--prompt", "The cat", "--max-new-tokens", "1000000", "--cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout.read(1)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert out
    assert "(interrupted)" in err


@pytest.mark.parametrize(
    ("arguments", "where", "phrase"),
    [
        (("--prompt", ""), "prompt", "an empty text"),
        ((), "prompt", "not given; expected --prompt TEXT or --prompt-file FILE"),
        (
            ("--prompt", "a", "--prompt-file", "b"),
            "prompt",
            "expected one of them, got both --prompt and --prompt-file",
        ),
        (("--prompt", "a", "--temperature", "-1"), "temperature", "got -1.0"),
        (("--prompt", "a", "--sample-top-p", "2"), "top_p", "got 2.0"),
        (("--prompt", "a", "--sample-top-k", "-2"), "top_k", "got -2"),
        (("--prompt", "a", "--max-new-tokens", "0"), "max_new_tokens", "got 0"),
        (("--prompt", "a", "--stop", ""), "stop", "got ''"),
        (("--prompt-file", "gone.txt"), "gone.txt", "no such file"),
    ],
)
def test_bad_arguments(refuses, trained, arguments, where, phrase):
    refuses(("generate", trained, *arguments), where, phrase)


def test_folders_without_a_language_model(fails, refuses, tmp_path):
    assert "no such folder" in fails("generate", "nowhere", "--prompt", "a")
    refuses(("generate", tmp_path, "--prompt", "a"), tmp_path, "an empty folder")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "the model cannot be loaded" in fails("generate", tmp_path, "--prompt", "a")


@pytest.mark.parametrize(
    ("options", "where", "phrases"),
    [
        (
            ("--models", "deepsets"),
            "models",
            ("expected one of multiscale, clustered, flat, transformer-xl", "got 'deepsets'"),
        ),
        (("--fsdp",), "task", ("lm in several processes",)),
        (("--context", "1"), "context", ("2 or more", "got 1")),
        (("--context", "100000"), "data", ("tokens to train on", "more than the context of 100,000")),
        (("--mixed-precision", "fp16"), "mixed_precision", ("no or bf16", "got fp16")),
        (("--heads", "3"), "heads", ("3 heads",)),
        (("--head-dim", "4"), "head_dim", ("width / heads", "got 4")),
    ],
)
def test_options_that_do_not_fit(refuses, options, where, phrases):
    others = [*TINY, *SHORT]
    if options[0] in others:
        index = others.index(options[0])
        del others[index : index + 2]
    refuses(("train", tale_here(), *others, *options), where, *phrases)


def test_recipes_know_language_models(call, tmp_path):
    tale(tmp_path)
    (tmp_path / "lm.yaml").write_text(
        "data: tale.txt\ntask: lm\nmodels: [flat]\nwidth: 16\nheads: 2\nvocabulary: 300\ncontext: 16\nsteps: 2\n"
        "batch_tokens: 64\nbranching: [4, 2]\n"
    )
    code, out, err = call("train", tmp_path / "lm.yaml", "--cpu", "--out", tmp_path / "run")
    assert (code, err) == (0, "")
    assert "step 2" in out
