"""`hsa train`, `hsa evaluate`, `hsa predict`, from the command line."""

import fcntl
import json
import os
import random
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from hsa.checksums import SUMS
from hsa.cli.main import run
from hsa.training import checkpoint, experiment
from hsa.training.loop import CHECKPOINT
from tests.tables import mixed_folder, picture, reviews, write_rows

COLUMNS = ("--text", "text", "--label", "label")
TINY = ("--cpu", "--heads", "2", "--epochs", "1", "--position-width", "8")
SIZES = ("--width", "8", "--vocabulary", "300")
ONE = ("--models", "hierarchical")


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    """Work in an empty folder with its own cache, on one thread."""
    monkeypatch.setenv("HSA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of a trained model, and its data."""
    folder = tmp_path_factory.mktemp("trained")
    data = write_rows(folder / "reviews.csv", reviews())
    environment = pytest.MonkeyPatch()
    environment.setenv("HSA_CACHE", str(folder / "cache"))
    with pytest.raises(SystemExit) as caught:
        run(["train", str(data), *COLUMNS, *TINY, *SIZES, *ONE, "--out", str(folder / "run")])
    environment.undo()
    assert caught.value.code == 0
    return folder / "run" / "hierarchical", data


def environment(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **more}


COMMAND = [sys.executable, "-c", "from hsa.cli.main import run; run()"]


# From data to predictions


def test_without_data_expressions_are_learned(call):
    code, out, err = call("train", "--quick", "--cpu", "--width", "16", "--epochs", "1", columns=80)
    assert (code, err) == (0, "")
    assert "ListOps: values of nested expressions: 2,000 to train, 500 to validate, 500 to" in out
    said = " ".join(out.split())
    assert re.search(r"bottom-up against flat: [+-]\d+\.\d points", said)
    meaning = re.search(
        r"(\S+), which knows the tree of an expression, evaluates (\d+)% of them correctly; flat, which", said
    )
    folder = Path("runs/listops")
    results = {result["model"]: result for result in json.loads((folder / "results.json").read_text())}
    assert list(results) == ["bottom-up", "hierarchical", "flat"]
    assert f"{results[meaning[1]]['scores']['accuracy']:.0%}" == f"{meaning[2]}%"
    report = (folder / "report.md").read_text()
    assert "## Accuracy by the length of expressions" in report
    assert meaning[0] in report
    with Image.open(folder / "lengths.png") as image:
        assert min(image.size) > 300
    code, _, err = call("predict", folder, "[MAX 1 2 ]")
    assert code == 2
    assert "a model of generated data" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--example", "lisp"], "example: expected one of python, listops, got 'lisp'. Did you mean 'listops'?"),
        (["--example", "python", "--task", "lm"], "example: expected an example alone"),
        (["reviews.csv", "--example", "python"], "got python with DATA, reviews.csv"),
        (["--text", "review"], "text: expected no such option, because the expressions are generated"),
        (["--max-tokens", "9"], "got 9 with --example listops. Omit it, or pass DATA or --example python"),
    ],
)
def test_options_that_do_not_fit_an_example(call, words, message):
    code, _, err = call("train", *words)
    assert code == 2
    assert message in " ".join(err.split())
    assert not Path("runs").exists()


def test_example_python_learns_the_standard_library(call):
    sizes = ("--width", "16", "--max-tokens", "64", "--epochs", "1", "--vocabulary", "512")
    code, out, err = call("train", "--example", "python", "--quick", "--cpu", *sizes, columns=80)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 140
    assert any(line.startswith("Python standard library: ") and " classes; " in line for line in lines)
    table = [
        line.split() for line in lines if line.split()[:1] in (["model"], ["hierarchical"], ["flat"], ["deepsets"])
    ]
    header = next(line for line in lines if line.split()[:2] == ["model", "parameters"])
    shown = lines[lines.index(header) - 1 : lines.index("", lines.index(header))]
    assert (shown[0].split(), shown[1].split()[-3:]) == (["train", "test"], ["s", "s", "epochs"])  # folded
    assert max(map(len, shown)) <= 80
    assert "…" not in "".join(shown)
    assert {"most frequent", "TF-IDF + logistic"} <= {line.partition("  ")[0] for line in shown}
    rows = [row for row in table if row[0] != "model" and row[1].replace(",", "").isdigit()]
    assert [row[0] for row in rows] == ["hierarchical", "flat", "deepsets"]
    sizes = [int(row[1].replace(",", "")) for row in rows]
    assert max(sizes) < 1.01 * min(sizes)
    assert any(line.startswith("hierarchical against TF-IDF + logistic regression: ") for line in lines)

    folder = Path("runs/python-standard-library")
    assert f"results go to {folder}" in lines
    for name in ("curves.png", "confusion.png", "attention.png"):
        with Image.open(folder / name) as image:
            assert min(image.size) > 300
    report = (folder / "report.md").read_text()
    for part in ("| model | parameters | accuracy |", "![attention](attention.png)", "vocabulary: 512", "| deepsets |"):
        assert part in report
    results = json.loads((folder / "results.json").read_text())
    assert [result["model"] for result in results] == ["hierarchical", "flat", "deepsets"]
    files = {"config.json", "model.safetensors", "input_spec.json", "tokenizer.json", "result.json", SUMS, CHECKPOINT}
    for result in results:
        assert {path.name for path in (folder / result["model"]).iterdir()} == files

    code, out, err = call("predict", folder / "hierarchical", json.__file__)
    assert (code, err) == (0, "")
    assert json.__file__ in out


def test_rows_end_to_end(call, tmp_path):
    data = write_rows(tmp_path / "reviews.jsonl", reviews())
    code, out, err = call("train", data, *COLUMNS, *TINY, *SIZES, *ONE)
    assert (code, err) == (0, "")
    assert "reviews.jsonl: 32 to train, 4 to validate, 4 to test; 2 classes; " in out
    assert Path("runs/reviews/hierarchical/model.safetensors").is_file()

    code, out, _ = call("train", data, *COLUMNS, *TINY, *SIZES, *ONE)  # results are never written over
    assert code == 0
    assert "results go to runs/reviews-2" in out
    assert sorted(os.listdir("runs")) == ["reviews", "reviews-2"]


def test_many_kinds_of_columns_end_to_end(call, tmp_path):
    rows = reviews()
    for i, row in enumerate(rows):
        row["photo"] = f"{i}.png"
        picture(tmp_path / row["photo"], 60 if row["label"] == "pos" else 200)
    data = write_rows(tmp_path / "reviews.csv", rows)
    columns = ("--text", "title", "text", "--number", "stars", "--image", "photo", "--label", "label")
    code, out, err = call("train", data, *columns, *TINY, *SIZES, "--models", "hierarchical", "deepsets")
    assert (code, err) == (0, "")
    assert "hierarchical against TF-IDF" in out
    code, out, _ = call("predict", "runs/reviews/hierarchical", data)
    assert (code, len(out.splitlines())) == (0, 41)


def test_suggested_commands_are_quoted(call, tmp_path):
    data = write_rows(tmp_path / "my reviews.csv", reviews())
    code, out, _ = call("train", data, *COLUMNS, *TINY, *SIZES, *ONE)
    assert code == 0
    words = shlex.split(out.splitlines()[-1])
    assert words == ["next:", "hsa", "predict", "runs/my reviews/hierarchical", str(data)]
    code, out, err = call(*words[2:])
    assert (code, len(out.splitlines()), err) == (0, 41, "")  # with a header


def test_nothing_is_learned(call, tmp_path):
    """Models that always give one answer are not compared; the report says what to change."""
    data = write_rows(tmp_path / "a.csv", reviews())
    rate = ("--learning-rate", "1e-30", "--models", "hierarchical", "deepsets")
    code, out, err = call("train", data, *COLUMNS, *TINY, *SIZES, *rate, columns=200)
    assert (code, err) == (0, "")
    assert "hierarchical against deepsets" not in out
    assert "what may help: more --epochs, another --learning-rate, more data; is 'label' (--label) the column" in out
    report = Path("runs/a/report.md").read_text()
    assert "\n- what may help: " in report
    assert "| most frequent class | – | 0.5000 | 0.3333 | – | – | – | – |\n" in report
    constant, words = json.loads(Path("runs/a/references.json").read_text())
    assert (constant["scores"]["accuracy"], words["scores"]["accuracy"]) == (0.5, 1)


def test_without_scikit_learn(call, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.exceptions", None)
    code, out, err = call(
        "train", write_rows(tmp_path / "a.csv", reviews()), *COLUMNS, *TINY, *SIZES, *ONE, columns=200
    )
    assert (code, err) == (0, "")
    note = "the row TF-IDF + logistic regression needs the package 'scikit-learn'; install it with: pip install 'hsa[tfidf]'"
    assert out.count("TF-IDF") == 1
    assert note in out
    assert f"\n- {note}\n" in Path("runs/a/report.md").read_text()


def test_folders_end_to_end(call, tmp_path):
    data = mixed_folder(tmp_path / "films")
    code, _, err = call("train", data, *TINY, *SIZES, *ONE)
    assert (code, err) == (0, "")
    code, out, _ = call("evaluate", "runs/films/hierarchical", data, "--json")
    assert (code, json.loads(out)["examples"]) == (0, 40)
    code, out, _ = call("predict", "runs/films/hierarchical", data / "pos", "--json")
    assert code == 0
    actual = [json.loads(line) for line in out.splitlines()]
    assert len(actual) == 20
    assert set(actual[0]) == {"where", "label", "probability", "runner_up", "probabilities"}


def test_numbers_end_to_end(call, tmp_path):
    data = write_rows(tmp_path / "reviews.parquet", reviews())
    arguments = ("--text", "text", "--label", "stars", "--task", "regression")
    code, out, err = call("train", data, *arguments, *TINY, *SIZES, "--models", "hierarchical", "deepsets")
    assert (code, err) == (0, "")
    assert "R²" in out
    assert "mean of training" in out
    assert "TF-IDF" not in out
    assert not Path("runs/reviews/confusion.png").exists()
    code, out, _ = call("evaluate", "runs/reviews/hierarchical", data)
    assert code == 0
    assert {line.split("  ")[0] for line in out.splitlines()} >= {"examples", "r2", "mean absolute error"}
    code, out, _ = call("predict", "runs/reviews/hierarchical", data)
    header, first, *_ = out.splitlines()
    assert header.split() == ["row", "predicted", "text"]
    assert 0 < float(first.split()[1]) < 9


@pytest.mark.parametrize("model", ["bottom-up", "deepsets", "multiscale", "clustered", "flat", "han"])
def test_any_model_may_come_first(call, tmp_path, model):
    data = write_rows(tmp_path / "a.csv", reviews())
    code, _, err = call("train", data, *COLUMNS, *TINY, *SIZES, "--models", model, "--out", "out")
    assert (code, err) == (0, "")
    assert Path("out/attention.png").exists() == (model not in ("bottom-up", "deepsets", "han"))
    assert Path("out/weights.png").exists() == (model == "han")


# Resuming


def test_a_finished_run_is_not_trained_again(call, tmp_path, monkeypatch):
    data = write_rows(tmp_path / "a.csv", reviews())
    call("train", data, *COLUMNS, *TINY, *SIZES, *ONE)
    before = json.loads(Path("runs/a/results.json").read_text())

    class NoTraining(experiment.Trainer):
        def fit(self):
            raise AssertionError("trained again")

    monkeypatch.setattr(experiment, "Trainer", NoTraining)
    code, out, err = call("train", data, *COLUMNS, *TINY, *SIZES, *ONE, "--resume")
    assert (code, err) == (0, "")
    assert "results go to runs/a" in out
    assert json.loads(Path("runs/a/results.json").read_text()) == before


def test_models_can_be_added_to_a_run(call, tmp_path):
    data = write_rows(tmp_path / "a.csv", reviews())
    call("train", data, *COLUMNS, *TINY, *SIZES, *ONE, "--out", "out")
    weights = Path("out/hierarchical/model.safetensors").read_bytes()
    code, _, _ = call(
        "train", data, *COLUMNS, *TINY, *SIZES, "--models", "hierarchical", "deepsets", "--out", "out", "--resume"
    )
    assert code == 0
    assert len(json.loads(Path("out/results.json").read_text())) == 2
    assert Path("out/hierarchical/model.safetensors").read_bytes() == weights


def test_a_folder_with_a_run_is_not_overwritten(call, fails, tmp_path):
    data = write_rows(tmp_path / "a.csv", reviews())
    call("train", data, *COLUMNS, *TINY, *SIZES, *ONE, "--out", "out")
    message = (
        "out: expected a new folder, got a folder with a run. "
        "Pass --resume to continue that run, --overwrite to start again, or another --out"
    )
    assert fails("train", data, *COLUMNS, *TINY, *SIZES, *ONE, "--out", "out") == message
    os.remove("out/results.json")  # as after Ctrl-C
    assert fails("train", data, *COLUMNS, *TINY, *SIZES, *ONE, "--out", "out") == message
    os.remove(f"out/hierarchical/{CHECKPOINT}")  # to save space
    assert fails("train", data, *COLUMNS, *TINY, *SIZES, *ONE, "--out", "out") == message


def test_a_run_is_overwritten(call, refuses, tmp_path):
    """Start again in the same folder, with other models and options; the files of the user stay."""
    data = write_rows(tmp_path / "a.csv", reviews())
    call("train", data, *COLUMNS, *TINY, *SIZES, "--models", "flat", "hierarchical")
    Path("runs/a/flat/notes.txt").write_text("mine")
    both = ("train", data, *COLUMNS, *TINY, *SIZES, *ONE, "--overwrite", "--resume")
    refuses(both, "overwrite", "expected one of them, got both --resume and --overwrite")
    refuses(("train", data, *COLUMNS, *TINY, *SIZES, *ONE, "--overwrite", "--text", "no"), str(data), "no column 'no'")
    assert Path("runs/a/flat/model.safetensors").is_file()  # options are checked before anything is removed
    new = ("--models", "deepsets", "--seed", "3", "--overwrite")
    code, out, err = call("train", data, *COLUMNS, *TINY, *SIZES, *new)
    assert (code, err) == (0, "")
    assert "results go to runs/a" in out
    assert os.listdir("runs") == ["a"]
    assert [result["model"] for result in json.loads(Path("runs/a/results.json").read_text())] == ["deepsets"]
    assert sorted(os.listdir("runs/a/flat")) == ["notes.txt"]
    assert not Path("runs/a/hierarchical").exists()
    assert not Path("runs/a/attention.png").exists()  # of the old report
    code, out, _ = call("train", data, *COLUMNS, *TINY, *SIZES, "--models", "deepsets", "--overwrite", "--out", "new")
    assert code == 0  # a new folder


@pytest.mark.filterwarnings("default::hsa.errors.HsaWarning")
def test_more_epochs(call, refuses, tmp_path):
    """A finished run is continued with more epochs, and resumed as usual after that."""
    data = write_rows(tmp_path / "a.csv", reviews())
    sizes = ("--cpu", "--heads", "2", "--position-width", "8", "--patience", "0")
    command = (
        "train",
        data,
        *COLUMNS,
        *sizes,
        *SIZES,
        "--models",
        "hierarchical",
        "deepsets",
        "--out",
        "out",
        "--epochs",
    )
    call(*command, "1")
    before = json.loads(Path("out/results.json").read_text())
    code, out, err = call(*command, "3", "--resume")
    assert code == 0
    first, second = err.splitlines()
    assert first.startswith("out/hierarchical: continues to 3 epochs instead of 1. From here the learning rate follows")
    assert second.startswith("out/deepsets: continues to 3 epochs")
    assert "epoch 3: " in out
    assert "epoch 1: " not in out
    after = json.loads(Path("out/results.json").read_text())
    assert [len(result["history"]) for result in after] == [3, 3]
    assert [result["history"][:1] for result in after] == [result["history"] for result in before]
    code, out, err = call(*command, "3", "--resume")
    assert (code, err) == (0, "")
    assert "epoch 3: " not in out
    bad = (f"out/hierarchical/{CHECKPOINT}", "expected epochs = 3 or more", "got epochs = 2")
    refuses((*command, "2", "--resume"), *bad)


@pytest.mark.parametrize(
    ("change", "phrases"),
    [
        (("--learning-rate", "0.5"), ("expected learning_rate = 0.5", "trained with learning_rate = 0.001")),
        (("--width", "10"), ("expected encoder.width = 10", "trained with encoder.width = 8")),
        (("--seed", "3"), ("expected seed = 3", "trained with seed = 0")),
        (("--max-tokens", "4"), ("got a checkpoint of a run on other data",)),
    ],
)
def test_resuming_with_other_options(refuses, trained, tmp_path, change, phrases):
    model, data = trained
    shutil.copytree(model.parent, "out")
    sizes = SIZES if "--width" not in change else SIZES[2:]
    arguments = ("train", data, *COLUMNS, *TINY, *sizes, *ONE, "--out", "out", "--resume", *change)
    refuses(arguments, f"out/hierarchical/{CHECKPOINT}", *phrases)


def test_nothing_to_resume(fails, trained):
    _, data = trained
    os.makedirs("runs/reviews-old")  # of other data
    message = "resume: no run in runs/reviews; expected a run to resume. Start without --resume, or pass the folder of"
    assert fails("train", data, *COLUMNS, "--resume").startswith(message)
    message = "none: no such folder; expected a run to resume. Start without --resume"
    assert fails("train", data, *COLUMNS, "--resume", "--out", "none") == message


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_save_a_checkpoint(tmp_path, number):
    data = write_rows(tmp_path / "a.csv", reviews(200))
    sizes = ("--cpu", "--width", "8", "--heads", "2", "--vocabulary", "300", "--batch-size", "2", "--patience", "0")
    arguments = ["train", str(data), *COLUMNS, *sizes, *ONE, "--epochs", "40", "--out", "out"]
    running = subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", env=environment()
    )
    for line in running.stdout:
        if "epoch 1:" in line:
            break
    time.sleep(0.1)
    running.send_signal(number)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 2
    assert err.startswith("stopped after ")
    assert f"out/hierarchical/{CHECKPOINT}" in err
    assert err.endswith(" with --resume\n")
    assert err.count("\n") == 1
    assert checkpoint.load(Path("out/hierarchical") / CHECKPOINT)["progress"]["state"]["epoch"] >= 1


def flip_bits(path, number):
    """Flip bits in the middle of a file, where a checkpoint has tensors."""
    damaged, generator = bytearray(path.read_bytes()), random.Random(0)
    for place in generator.sample(range(len(damaged) // 2, len(damaged) // 2 + 400), number):
        damaged[place] ^= 1 << generator.randrange(8)
    path.write_bytes(damaged)


def test_a_damaged_checkpoint_is_not_resumed(refuses, trained, tmp_path):
    model, data = trained
    shutil.copytree(model.parent, "out")
    flip_bits(Path("out/hierarchical") / CHECKPOINT, 200)
    arguments = ("train", data, *COLUMNS, *TINY, *SIZES, *ONE, "--out", "out", "--resume")
    refuses(arguments, f"out/hierarchical/{CHECKPOINT}", "got a damaged file", "delete it to train")


def test_a_folder_is_for_one_process(refuses, tmp_path):
    data = write_rows(tmp_path / "a.csv", reviews())
    Path("out").mkdir()
    with open("out/.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        arguments = ("train", data, *COLUMNS, *TINY, *SIZES, *ONE, "--out", "out")
        refuses(arguments, "out", "expected a folder that no other process uses")
    assert not Path("out/hierarchical").exists()


def test_an_output_folder_that_cannot_be_written(refuses, tmp_path):
    data = write_rows(tmp_path / "a.csv", reviews())
    Path("file").touch()
    for out in ("/proc/none", "file/inside"):
        arguments = ("train", data, *COLUMNS, *TINY, *SIZES, *ONE, "--out", out)
        refuses(arguments, out, "cannot be written", "expected a writable folder")


def test_an_error_leaves_no_folder(fails, tmp_path):
    data = write_rows(tmp_path / "a.csv", reviews())
    fails("train", data, "--text", "nothing", "--label", "label", *TINY, *SIZES, *ONE)
    assert not Path("runs").exists()


@pytest.mark.filterwarnings("default::hsa.errors.HsaWarning")
@pytest.mark.parametrize("task", [(), ("--task", "lm", "--steps", "2", "--context", "8")])
def test_a_cache_that_cannot_be_written(call, tmp_path, monkeypatch, task):
    data = write_rows(tmp_path / "a.csv", reviews())
    monkeypatch.setenv("HSA_CACHE", "/proc/none")
    columns, model = (COLUMNS, ONE) if not task else (COLUMNS[:2], ("--models", "flat"))
    code, _, err = call("train", data, *columns, *TINY, *SIZES, *model, *task, "--out", "out")
    assert code == 0
    assert err.startswith("prepared data are not cached: /proc/none")
    assert "Set HSA_CACHE to a writable folder" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_files_follow_the_umask(call, tmp_path, mask):
    data = write_rows(tmp_path / "a.csv", reviews())
    before = os.umask(mask)
    try:
        call("train", data, *COLUMNS, *TINY, *SIZES, *ONE, "--out", "out")
    finally:
        os.umask(before)
    files = [path for folder in (Path("out"), tmp_path / "cache") for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666 & ~mask}


# Help, recipes, options


@pytest.mark.parametrize("command", ["train", "evaluate", "predict"])
def test_help_does_not_import_torch(command):
    code = f"""if True:
        import sys
        from hsa.cli.main import run
        try:
            run(["{command}", "--help"])
        finally:
            print({{"torch", "numpy", "accelerate", "matplotlib", "yaml"}} & set(sys.modules))
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True, env=environment(COLUMNS="100")
    )
    assert done.stderr == ""
    assert done.stdout.endswith("\nset()\n")
    words = {
        "train": ("--text", "--label", "--models", "--resume", "--quick", "--learning-rate", "--help-all"),
        "evaluate": ("MODEL", "DATA", "--json"),
        "predict": ("MODEL", "DATA", "--json"),
    }
    for word in words[command]:
        assert word in done.stdout


def test_recipes_and_flags(call, trained):
    _, data = trained
    shutil.copy(data, "reviews.csv")
    recipe = {
        "data": "reviews.csv",
        "text": "text",
        "label": "label",
        "models": ["hierarchical", "flat"],
        "width": 8,
        "heads": 2,
    }
    sizes = {"vocabulary": 300, "epochs": 3, "position_width": 8, "learning_rate": "1e-2", "seed": 4}
    with open("my.yaml", "w") as file:
        file.writelines(f"{name}: {value}\n" for name, value in {**recipe, **sizes}.items())
    # Seed 0 is the default, but overrides the recipe.
    code, out, err = call("train", "my.yaml", "--cpu", "--models", "deepsets", "--epochs=1", "--seed", "0")
    assert (code, err) == (0, "")
    assert "results go to runs/reviews" in out
    report = Path("runs/reviews/report.md").read_text()
    for line in ("epochs: 1", "seed: 0", "learning_rate: 0.01", "width: 8", "label: label"):
        assert f"\n{line}\n" in report
    assert not Path("runs/reviews/hierarchical").exists()


@pytest.mark.parametrize(
    ("text", "where", "phrases"),
    [
        ("epocs: 3", "my.yaml", ("unknown option 'epocs'; expected one of data, models, ",)),
        ("epochs: [", "my.yaml", ("YAML", "(while parsing a flow node")),
        ("epochs: x", "my.yaml: epochs", ("int, got 'x'",)),
        ("models: [hierarchical, nope]", "models", ("expected one of hierarchical, multiscale, ", "got 'nope'")),
        ("data: none.csv", "none.csv", ("no such file or folder", "a folder per class")),
    ],
)
def test_bad_recipes(refuses, text, where, phrases):
    with open("my.yaml", "w") as file:
        file.write(text)
    assert refuses(("train", "my.yaml"), where, *phrases).startswith(where)


def test_a_recipe_that_is_overridden_with_no(call, trained):
    """Check that --no-OPTION on the command line overrides a recipe, and the default of True."""
    _, data = trained
    Path("my.yaml").write_text(f"data: {data}\ntext: text\nlabel: label\nposition_input: true\n")
    flags = ("--no-position-input", "--no-include-self")
    code, _, err = call("train", "my.yaml", *TINY, *SIZES, *ONE, *flags, "--out", "out")
    assert (code, err) == (0, "")
    encoder = json.loads(Path("out/hierarchical/config.json").read_text())["encoder"]
    assert (encoder["position_input"], encoder["include_self"]) == (False, False)


@pytest.mark.parametrize(
    ("arguments", "where", "phrases"),
    [
        (("--models", "nope"), "models", ("expected one of hierarchical, multiscale, clustered", "got 'nope'")),
        (("--epochs", "0"), "epochs", ("more than 0", "got 0")),
        (
            ("--task", "lm", "--minutes", "2"),
            "minutes",
            ("expected 0 with the task lm, got 2. Limit --epochs instead",),
        ),
        (("--learning-rate=-1",), "learning_rate", ("more than 0", "got -1.0")),
        (("--warmup", "1"), "warmup", ("0 or more and less than 1", "got 1.0")),
        (("--heads", "3"), "heads", ("divide the width", "3 heads", "head_dim")),
        (("--fsdp", "--cpu"), "fsdp", ("expected several processes", "got one", "start with torchrun")),
        (
            ("--text", "txt"),
            "reviews.csv",
            ("no column 'txt'", "one of 'text', 'title', 'stars', 'label'. Did you mean 'text'"),
        ),
        (("--label", "text"), "column 'text'", ("both read and predicted",)),
        (
            ("--task", "regression"),
            "row 1 (line 2), column 'label'",
            (
                "expected a finite number",
                "got 'pos'. Pass --skip-bad",
            ),
        ),
        (("--word-vectors", "none.txt"), "none.txt", ("no such file",)),
        (("--test", "none.csv"), "none.csv", ("no such file or folder", "a folder per class")),
    ],
)
def test_options_that_do_not_fit(refuses, trained, arguments, where, phrases):
    columns = {"--text": "text", "--label": "label"}
    columns.pop(arguments[0], None)
    others = [word for pair in columns.items() for word in pair]
    refuses(("train", trained[1], *others, *arguments), where, *phrases)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("train", "--epochs", "x"), "int"),
        (("train", "--schedule", "steep"), "cosine"),
        (("train", "--widht", "3"), "--width"),
        (("predict",), "MODEL"),
        (("evaluate", "a"), "DATA"),
    ],
)
def test_usage_errors(call, arguments, hint):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert hint in err


def test_bad_rows_stop_or_are_skipped(call, refuses, tmp_path):
    rows = reviews()
    rows[6]["text"] = ""
    data = write_rows(tmp_path / "a.csv", rows)
    bad = (f"{data}: row 7 (line 8)", "no values", "expected at least one in 'text'", "Pass --skip-bad")
    refuses(("train", data, *COLUMNS, *TINY, *SIZES, *ONE), *bad)
    code, out, _ = call("train", data, *COLUMNS, *TINY, *SIZES, *ONE, "--skip-bad")
    assert code == 0
    skipped = f"1 skipped, the first: {data}: row 7 (line 8): no values"
    assert skipped in " ".join(out.split())

    refuses(("evaluate", "runs/a/hierarchical", data), *bad)
    code, out, _ = call("evaluate", "runs/a/hierarchical", data, "--skip-bad", "--json")
    assert (code, json.loads(out)["examples"], json.loads(out)["skipped"]) == (0, 39, 1)
    code, out, err = call("predict", "runs/a/hierarchical", data, "--skip-bad")
    assert (code, len(out.splitlines())) == (0, 40)
    assert err.startswith(skipped)


# Models on new data


def test_evaluate(call, trained):
    model, data = trained
    code, out, err = call("evaluate", model, data)
    assert (code, err) == (0, "")
    names = [line[:22].strip() for line in out.split("\n\n")[0].splitlines()]
    assert names == ["examples", "skipped", "accuracy", "f1", "loss", "attention operations", "seconds"]
    code, out, _ = call("evaluate", model, data, "--json")
    assert json.loads(out)["examples"] == 40
    assert 0 <= json.loads(out)["accuracy"] <= 1


def test_evaluate_with_another_memory(call, refuses, trained):
    """Check that --test-memory changes the loss and the cost of transformer-xl, and is refused for other models."""
    model, data = trained
    chosen = ("--models", "transformer-xl", "--segment", "2", "--memory", "1", "--test-memory", "3")
    call("train", data, *COLUMNS, *TINY, *SIZES, *chosen, "--out", "run")
    weights = Path("run/transformer-xl/model.safetensors").read_bytes()

    def tested(*options):
        code, out, err = call("evaluate", "run/transformer-xl", data, "--json", *options)
        assert (code, err) == (0, "")
        return json.loads(out)

    actual = {memory: tested("--test-memory", str(memory)) for memory in (0, 1, 3, 500)}
    usual = tested()
    assert usual["loss"] == actual[3]["loss"]  # as it was saved
    assert len({one["loss"] for one in actual.values()}) == 4
    operations = [one["attention_operations"] for one in actual.values()]
    assert sorted(operations) == operations
    assert Path("run/transformer-xl/model.safetensors").read_bytes() == weights
    refuses(
        ("evaluate", "run/transformer-xl", data, "--test-memory", "-1"), "test_memory", "0 or more tokens", "got -1"
    )
    refuses(("evaluate", model, data, "--test-memory", "8"), "test_memory", "a model without a memory")
    refuses(
        ("evaluate", model, data, "--text", "text"),
        "text",
        "expected no value for a classifier or regressor of hsa train, got text. Leave it out",
    )
    refuses(
        ("evaluate", model, data, "--context", "8"),
        "context",
        "expected no value for a classifier or regressor of hsa train, got 8. Leave it out",
    )


def test_predict(call, trained):
    model, data = trained
    code, out, err = call("predict", model, data)
    assert (code, err) == (0, "")
    row, label, probability, text = out.splitlines()[5].split(maxsplit=3)
    assert (row, text) == ("5", reviews()[4]["text"])
    assert label in ("pos", "neg")
    assert 0.5 <= float(probability) <= 1
    code, out, _ = call("predict", model, data, "--json")
    actual = [json.loads(line) for line in out.splitlines()]
    where = f"{data}: row 5 (line 6)"
    assert (len(actual), actual[4]["where"], actual[4]["label"]) == (40, where, label)
    assert {actual[4]["label"], actual[4]["runner_up"]} == {"pos", "neg"}


def test_models_and_data_that_do_not_fit(refuses, trained, tmp_path):
    model, data = trained
    for command in ("evaluate", "predict"):
        refuses((command, "none", data), "none", "no such folder", "hsa train")
        os.makedirs("empty", exist_ok=True)
        refuses((command, "empty", data), "empty", "an empty folder", "hsa train")
        refuses((command, model, "none.csv"), "none.csv", "no such file or folder")
        other = write_rows(tmp_path / "other.csv", [{"body": "good", "label": "pos"}])
        refuses((command, model, other), other, "one of 'body', 'label'", "no column 'text'")
    unknown = write_rows(tmp_path / "unknown.csv", [{"text": "good", "label": "so-so"}])
    refuses(("evaluate", model, unknown), f"{unknown}: row 1 (line 2)", "one of neg, pos", "the class 'so-so'")


def test_weights_of_another_model(fails, call, trained):
    model, data = trained
    shutil.copytree(model, "mixed")
    call("train", data, *COLUMNS, *TINY, *SIZES[2:], *ONE, "--width", "10", "--out", "wider")
    shutil.copy("wider/hierarchical/model.safetensors", "mixed")
    assert "one of another model" in fails("predict", "mixed", data)
