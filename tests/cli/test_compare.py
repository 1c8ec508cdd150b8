"""`hsa compare`, from the command line."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from hsa.cli.comparison_bar import ComparisonBar
from hsa.training import compare as comparison
from hsa.training import experiment, length_costs
from hsa.training.compare import Plan, Run
from hsa.training.failures import OutOfMemory
from tests.comparisons import result, run
from tests.tables import reviews, write_rows

COLUMNS = ("--text", "text", "--label", "label")
SIZES = ("--cpu", "--width", "8", "--heads", "2", "--position-width", "8", "--vocabulary", "300")
TINY = (*SIZES, "--epochs", "1", "--models", "hierarchical,deepsets", "--rates", "1e-3,1e-2", "--seeds", "2")


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    """Work in an empty folder with its own cache, on one thread, and measure time on short documents."""
    monkeypatch.setenv("HSA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(length_costs, "LENGTHS", (16, 32))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def rows(tmp_path):
    return write_rows(tmp_path / "reviews.csv", reviews())


def row(model):
    """Return the words of a model's row of the table, from the JSON."""
    memory, operations = model["peak_memory_mib"], model["operations"]
    cells = [
        model["model"],
        f"{model['parameters']:,}",
        f"{model['rate']:g}",
        f"{model['accuracy']:.4f} ± {model['accuracy_std']:.4f}",
        f"{model['f1']:.4f}",
        f"{operations / 1e6:.2f} M" if operations else "0",
        f"{model['training_seconds']:.1f}",
        f"{model['test_milliseconds']:.2f}",
        "–" if memory is None else f"{memory:,.0f}",
        ", ".join(model["on_frontier"]) or "–",
    ]
    return " ".join(cells).split()


def test_end_to_end_and_resumed(call, fails, rows, monkeypatch):
    code, out, err = call("compare", rows, *COLUMNS, *TINY, columns=160)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    runs = [line.split() for line in lines if re.match(r"(hierarchical|deepsets) +rate ", line)]
    assert [(run[0], run[2], run[4]) for run in runs[:2]] == [
        ("hierarchical", "0.001", "0"),
        ("hierarchical", "0.01", "0"),
    ]
    assert len(runs) == 6
    assert "(run 6 of 6, 0 s left)" in out
    header = next(i for i, line in enumerate(lines) if line.split()[:2] == ["model", "parameters"])
    names = "model parameters rate accuracy F1 operations train s test ms MiB on the frontier"
    assert lines[header].split() == names.split()
    assert "…" not in "".join(lines[header:])
    assert any(line.startswith("hierarchical against TF-IDF + logistic regression: ") for line in lines)

    folder = Path("runs/compare-reviews")
    assert f"report    {folder}/report.md" in lines
    assert {path.name for path in folder.iterdir() if path.is_file()} == {
        "frontier.png",
        "curves.png",
        "costs.png",
        "report.md",
        "comparison.json",
        "first.json",
    }
    before = json.loads((folder / "comparison.json").read_text())
    assert [model["model"] for model in before["models"]] == ["hierarchical", "deepsets"]
    assert [line.split() for line in lines[header + 2 : header + 4]] == [row(model) for model in before["models"]]
    assert lines[header + 4].startswith("most frequent class  ")
    assert lines[header + 5].startswith("TF-IDF + logistic regression  ")
    assert [entry["accuracy"] for entry in before["references"]] == [0.5, 1]
    for model in before["models"]:
        scores = [run["accuracy"] for run in model["runs"]]
        assert len(scores) == 2
        assert model["rate"] in (0.001, 0.01)
        assert (model["accuracy"], model["accuracy_std"]) == pytest.approx((np.mean(scores), np.std(scores, ddof=1)))
        assert model["validation"][f"{model['rate']:g}"] == max(model["validation"].values())
    assert (before["models"][0]["operations"] > 0, before["models"][1]["operations"]) == (True, 0)
    assert [cost["length"] for cost in before["costs"]] == [16, 32, 16, 32]
    model = re.search(r"^model     (runs.*)$", out, re.M)[1]
    code, out, _ = call("predict", model, rows)
    assert (code, len(out.splitlines())) == (0, 41)  # below a header

    message = fails("compare", rows, *COLUMNS, *TINY, "--out", folder)
    assert message.endswith("Pass --resume to continue that run, --overwrite to start again, or another --out")

    class NoTraining(experiment.Trainer):
        def fit(self):
            raise AssertionError("trained again")

    monkeypatch.setattr(experiment, "Trainer", NoTraining)
    code, out, err = call("compare", rows, *COLUMNS, *TINY, "--resume", "--json")
    assert code == 0
    assert "finished before" in err
    again = json.loads(out)  # and nothing else
    assert again["models"] == before["models"]
    message = fails("compare", rows, *COLUMNS, *TINY, "--resume", "--dropout", "0.7")
    assert "expected encoder.dropout = 0.7" in message
    assert "trained with encoder.dropout = 0.1" in message
    message = fails("compare", rows, *COLUMNS, *TINY, "--resume", "--patience", "5")
    assert "trained with patience = 3" in message


def test_a_comparison_is_overwritten(call, rows):
    few = (*SIZES, "--epochs", "1", "--seeds", "1", "--rates")
    code, _, _ = call("compare", rows, *COLUMNS, *few, "1e-3", "--models", "hierarchical,deepsets")
    assert code == 0
    Path("runs/compare-reviews/mine.txt").write_text("notes")
    code, out, err = call("compare", rows, *COLUMNS, *few, "1e-2", "--models", "deepsets", "--overwrite")
    assert (code, err) == (0, "")
    assert "finished before" not in out
    folder = Path("runs/compare-reviews")
    assert os.listdir("runs") == ["compare-reviews"]
    assert [path.name for path in folder.glob("*/*")] == ["0.01"]
    assert (folder / "mine.txt").is_file()
    assert json.loads((folder / "first.json").read_text()) == {"model": "deepsets"}


def test_without_data_and_quick(call, monkeypatch):
    seen = []

    def compare_nothing(plan, recipe, prepared, folder, accelerator, **more):
        seen.append((plan, recipe, prepared))
        return []

    monkeypatch.setattr(comparison, "compare_models", compare_nothing)
    code, out, err = call("compare", "--quick", "--cpu")
    assert (code, err) == (0, "")
    assert "Python standard library: " in out
    ((plan, recipe, prepared),) = seen
    assert plan.models == ("hierarchical", "multiscale", "flat", "deepsets", "han", "hat", "transformer-xl")
    assert (plan.rates, plan.seeds) == ((3e-3, 1e-2), (0, 1))
    assert (recipe.training.epochs, recipe.model.width, recipe.read.max_tokens) == (4, 64, 128)
    assert prepared.train.lengths.max() <= 128


@pytest.fixture
def planned(call, rows, monkeypatch):
    """Return the plan and the recipe of a command without running it."""

    def plan(*arguments):
        seen = []
        monkeypatch.setattr(
            comparison, "compare_models", lambda plan, recipe, *more, **rest: seen.append((plan, recipe)) or []
        )
        code, _, err = call("compare", *arguments)
        assert (code, err) == (0, "")
        return seen[0]

    return plan


def test_plans(planned, rows):
    plan, recipe = planned(rows, *COLUMNS, "--cpu")
    assert (plan.rates, plan.seeds) == ((3e-4, 1e-3, 3e-3), (0, 1, 2))
    assert (recipe.training.epochs, recipe.training.patience) == (10, 3)
    plan, _ = planned(
        rows,
        *COLUMNS,
        "--cpu",
        "--models",
        "hierarchical",
        "flat,hierarchical",
        "--rates",
        "1e-2",
        "--seed",
        "7",
        "--seeds",
        "2",
    )
    assert (plan.models, plan.rates, plan.seeds) == (("hierarchical", "flat"), (1e-2,), (7, 8))
    plan, _ = planned(rows, *COLUMNS, "--cpu", "--learning-rate", "0.02")
    assert plan.rates == (0.02,)


def test_a_budget_of_time(planned, rows):
    _, recipe = planned(rows, *COLUMNS, "--cpu", "--minutes", "2")
    assert (recipe.training.minutes, recipe.training.epochs, recipe.training.patience) == (2, 100, 0)
    _, recipe = planned(rows, *COLUMNS, "--cpu", "--minutes", "2", "--epochs", "3", "--patience", "1")
    assert (recipe.training.epochs, recipe.training.patience) == (3, 1)


def test_recipes(planned, rows):
    Path("my.yaml").write_text(
        f"data: {rows}\ntext: text\nlabel: label\nmodels: [hierarchical, flat]\nwidth: 16\nminutes: 3\nepochs: 4\n"
    )
    plan, recipe = planned("my.yaml", "--cpu", "--width", "24")
    assert plan.models == ("hierarchical", "flat")
    assert (recipe.model.width, recipe.training.minutes, recipe.training.epochs) == (24, 3, 4)


@pytest.mark.parametrize(
    ("arguments", "where", "phrases"),
    [
        (
            ("--models", "hierarchical,multiscal"),
            "models",
            ("expected one of hierarchical, ", "got 'multiscal'. Did you mean 'multiscale'?"),
        ),
        (("--models", ","), "models", ("one or more",)),
        (("--rates", "fast"), "rates", ("expected learning rates, such as 3e-4,1e-3, got 'fast'",)),
        (("--rates", "0"), "rates", ("learning rates above 0", "got 0")),
        (
            ("--rates", "1e-3", "--learning-rate", "1e-3"),
            "learning_rate",
            ("expected one of them, got both --learning-rate and --rates",),
        ),
        (("--seeds", "0"), "seeds", ("expected 1 or more, got 0",)),
        (("--minutes", "-1"), "minutes", ("0 or more", "got -1.0")),
        (
            ("--task", "lm"),
            "task",
            ("expected classification or regression, got lm. Run hsa train --task lm --models … to compare",),
        ),
        (
            ("--resume",),
            "resume",
            ("no run in runs/compare-nothing; expected a run to resume. Start without --resume",),
        ),
        ((), "nothing.csv", ("no such file or folder", "a folder per class")),
    ],
)
def test_errors_are_reported_before_data_are_read(refuses, arguments, where, phrases):
    line = refuses(("compare", "nothing.csv", "--cpu", *arguments), where, *phrases)
    assert line.startswith(where)
    assert not Path("runs").exists()


def test_one_class_and_no_rows(fails, refuses, tmp_path):
    same = write_rows(tmp_path / "same.csv", [{**row, "label": "pos"} for row in reviews()])
    refuses(
        ("compare", same, *COLUMNS, *TINY), "column 'label'", "two or more", "one class in the training data, 'pos'"
    )
    (tmp_path / "empty.csv").write_text("text,label\n")
    assert "no rows" in fails("compare", tmp_path / "empty.csv", *COLUMNS, *TINY)


def test_every_model_diverges(call, rows):
    code, out, err = call(
        "compare", rows, *COLUMNS, *SIZES, "--models", "hierarchical", "--rates", "1e30", "--epochs", "2"
    )
    assert (code, err) == (0, "")
    assert "diverged" in out
    assert "hierarchical diverged at every rate; try lower ones" in out


def test_out_of_memory_for_one_model(call, fails, rows, monkeypatch):
    """Check that the failure is reported, the other models are compared, and --resume tries again."""
    train, small = comparison.train_model, True

    def crowded(name, *arguments, **more):
        if small and name == "hierarchical":
            raise OutOfMemory("out of memory")
        return train(name, *arguments, **more)

    monkeypatch.setattr(comparison, "train_model", crowded)
    few = (*SIZES, "--epochs", "1", "--models", "hierarchical,deepsets", "--rates", "1e-2", "--seeds", "1")
    code, out, err = call("compare", rows, *COLUMNS, *few, "--out", "out", columns=160)
    assert (code, err) == (0, "")  # as where it diverges
    assert re.search(r"^hierarchical +rate 0.01 +seed 0 +out of memory ", out, re.M)
    assert re.search(r"^hierarchical +– +– +out of memory +–", out, re.M)
    assert re.search(r"^deepsets +\d,\d+ +0.01 ", out, re.M)
    text = " ".join(out.split())
    assert "hierarchical ran out of memory at every rate" in text
    assert "to retry the runs that ran out of memory, free memory and pass --resume" in text
    assert "or compare in another folder with a smaller --batch-tokens" in text
    fails("compare", rows, *COLUMNS, *few, "--out", "out")  # which needs --resume
    small = False
    code, out, err = call("compare", rows, *COLUMNS, *few, "--out", "out", "--resume")
    assert (code, err) == (0, "")
    assert "out of memory" not in out
    assert "hierarchical against TF-IDF" in out


def test_ctrl_c_says_how_to_resume(tmp_path):
    data = write_rows(tmp_path / "a.csv", reviews(200))
    command = [sys.executable, "-c", "from hsa.cli.main import run; run()"]
    arguments = [
        "compare",
        str(data),
        *COLUMNS,
        *SIZES,
        "--models",
        "hierarchical",
        "--batch-size",
        "2",
        "--patience",
        "0",
    ]
    running = subprocess.Popen(
        [*command, *arguments, "--epochs", "40", "--checkpoint-minutes", "0.001", "--out", "out"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    checkpoint = Path("out/hierarchical/0.0003/0/checkpoint.pt")
    for _ in range(600):
        if checkpoint.is_file():
            break
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 2
    assert re.fullmatch(r"stopped after .* with --resume; 0 of 5 runs are finished\n", err)


def test_help_does_not_import_torch():
    code = """if True:
        import sys
        from hsa.cli.main import run
        try:
            run(["compare", "--help-all"])
        finally:
            print({"torch", "numpy", "accelerate", "matplotlib", "yaml"} & set(sys.modules))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert done.stderr == ""
    assert done.stdout.endswith("\nset()\n")
    for word in (
        "--models",
        "--rates",
        "--seeds",
        "--minutes",
        "--epochs",
        "--segment",
        "--label",
        "--json",
        "--resume",
    ):
        assert word in done.stdout


# The progress bar


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def bar(monkeypatch):
    from rich.console import Console

    from hsa.cli import progress

    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    plan = Plan(("hierarchical", "flat"), (1e-3, 1e-2), (0, 1))
    return ComparisonBar(plan, "accuracy", Console(file=io.StringIO())), clock


def through(bar, clock, model, rate, seconds, diverged=False):
    watcher = bar.begin(Run(model, rate, 0))
    if seconds:
        clock.now += seconds / 2
        watcher.step(1, 2, 0.7, 1e-3)
        clock.now += seconds / 2
        watcher.step(2, 2, 0.6, 1e-3)
    bar.end(run(model, rate, 0, "diverged" if diverged else result(model, 0.5)))


def test_time_left(bar):
    actual, clock = bar
    assert actual.seconds_left() is None
    through(actual, clock, "hierarchical", 1e-3, 10)
    assert actual.seconds_left() == 5 * 10  # all like the first
    through(actual, clock, "hierarchical", 1e-2, 20)
    assert actual.seconds_left() == 4 * 15  # the mean
    through(actual, clock, "hierarchical", 1e-2, 0)  # was finished before
    assert actual.seconds_left() == 3 * 15
    through(actual, clock, "flat", 1e-3, 100)
    assert actual.seconds_left() == 2 * 100
    watcher = actual.begin(Run("flat", 1e-2, 0))
    clock.now += 50
    watcher.step(1, 4, None, 1e-3)
    assert actual.seconds_left(watcher) == 2 * 100 - 25


def test_models_without_a_rate_have_no_further_runs(bar):
    actual, clock = bar
    through(actual, clock, "hierarchical", 1e-3, 10, diverged=True)
    through(actual, clock, "hierarchical", 1e-2, 10, diverged=True)
    assert actual.finished == 2
    assert actual.seconds_left() is None  # they ended early
    actual.begin(Run("flat", 1e-3, 0))
    assert actual.finished == 3


def test_a_resumed_run_is_counted_as_a_whole_one(bar):
    actual, clock = bar
    watcher = actual.begin(Run("hierarchical", 1e-3, 0))
    clock.now += 10
    watcher.step(6, 10, 0.7, 1e-3)  # five steps were done before
    clock.now += 40
    watcher.step(10, 10, 0.6, 1e-3)
    assert watcher.pace.whole() == 100
