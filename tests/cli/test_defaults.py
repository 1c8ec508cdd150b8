"""Defaults by task, as `--help-all` prints them, are those that apply."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from hsa.cli.compare import TASKS as COMPARED
from hsa.cli.defaults import changed_options, defaults_by_task
from hsa.models.options import ModelOptions
from hsa.research.match3.options import Match3Options
from hsa.training.options import DataOptions, LanguageOptions, TrainingOptions
from hsa.training.recipe import Recipe
from hsa.training.tasks import EXAMPLES, TASKS

DATA = Path("rows.csv")


def entries(text):
    """Return title → option → value of every line of the list."""
    lines = [line.removeprefix("- ").split(": ", 1) for line in text.splitlines() if line.startswith("- ")]
    return {
        title: {} if changes == "none" else dict(change.split(" ", 1) for change in changes.split(", "))
        for title, changes in lines
    }


def test_changed_options():
    recipe = Recipe(
        DATA,
        ("flat",),
        DataOptions(task="lm", max_tokens=7),
        ModelOptions(head_dim=5),
        TrainingOptions(learning_rate=3e-4),
        LanguageOptions(branching=(3, 2)),
        extra={"match3": Match3Options(modulus=11)},
    )
    assert changed_options(recipe, Recipe()) == {
        "--models": ("flat",),
        "--max-tokens": 7,
        "--head-dim": 5,
        "--learning-rate": 3e-4,
        "--branching": (3, 2),
        "--modulus": 11,
    }
    assert changed_options(recipe, recipe) == {}
    assert changed_options(Recipe(), recipe)["--head-dim"] is None


def test_every_task_is_listed():
    listed = entries(defaults_by_task())
    examples = {f"--example {name}" for name in EXAMPLES.names()}
    assert {title.split(" ")[0] for title in listed if title not in examples} == set(TASKS.names())
    assert listed["--example python"]["--vocabulary"] == "4096"
    assert listed["regression"] == listed["classification"] == {}
    assert listed["seq2seq without DATA"] == {"--vocabulary": "512"}
    assert (listed["lm"]["--models"], listed["lm"]["--learning-rate"]) == ("multiscale flat", "0.003")
    assert "--models" not in defaults_by_task(COMPARED, models=False)
    assert set(entries(defaults_by_task(COMPARED))) == {
        "classification",
        "regression",
        *examples,
    }


@pytest.mark.parametrize("task", TASKS.names())
@pytest.mark.parametrize("data", [None, DATA])
def test_listed_defaults_apply(task, data):
    """Check that the defaults of the options, changed as listed, are the recipe of the preset."""
    listed = entries(defaults_by_task())
    changes = listed[task] | (listed.get(f"{task} without DATA", {}) if data is None else {})
    recipe = TASKS.get(task).preset(data, False)
    for group in (recipe.read, recipe.model, recipe.training, recipe.language, recipe.seq2seq, *recipe.extra.values()):
        for field in fields(group):
            value, default = getattr(group, field.name), field.default
            if field.name != "task":
                option = f"--{field.name.replace('_', '-')}"
                shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
                assert (option in changes) == (value != default)
                assert value == default or str(shown) == changes[option] or float(shown) == float(changes[option])


def test_full_help_lists_them(call):
    _, out, _ = call("train", "--help-all", columns=400)
    for line in defaults_by_task().splitlines()[2:]:
        assert line.removeprefix("- ") in out
    _, out, _ = call("compare", "--help-all", columns=400)
    assert "--example python: --max-tokens 384" in out
    assert not re.search("lm: --", out)
