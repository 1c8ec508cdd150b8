"""Sweeps: their recipes, runs and reports."""

import itertools
import json
from pathlib import Path

import pytest

from hsa.errors import InvalidInput
from hsa.huggingface.fidelity.judge import Judge
from hsa.huggingface.fidelity.sweep import RESULTS, Sweep
from hsa.huggingface.fidelity.sweep_recipe import Task, Variant, expand_variants, load_sweep, select_late_layers
from hsa.huggingface.fidelity.sweep_report import tabulate, write_sweep_report
from hsa.huggingface.loading import load_for_task
from tests.huggingface.fidelity.small import LONGEST, classifier, examples, rows, save, tokenizer
from tests.tables import write_rows

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("convert_*.yaml"))
TASK = "{train: t.jsonl, epochs: 1, batch_size: 8}"


def recipe(tmp_path, tasks=None, variants=None, **more):
    path = tmp_path / "recipe.yaml"
    lines = ["title: A test", "tasks:", *(f"  {n}: {v}" for n, v in (tasks or {"toy": TASK}).items()), "variants:"]
    lines += [f"  {n}: {v}" for n, v in (variants or {"cheap": WINDOWS}).items()]
    path.write_text("\n".join([*lines, *(f"{n}: {v}" for n, v in more.items())]))
    return path


WINDOWS = "{kind: multiscale, branching: [4, 2], top_k: 0}"
PAPER = "{kind: hierarchical, branching: [4, 2], sinks: null, layers: each start}"


@pytest.fixture
def data(tmp_path):
    """Write two files: one with splits, and one for tests only."""
    folder = tmp_path / "data"
    folder.mkdir()
    both = [*rows(8, split="train"), *rows(6, seed=1, split="validation")]
    write_rows(folder / "t.jsonl", both)
    write_rows(folder / "test.jsonl", rows(5, seed=2))
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return str(save(tmp_path_factory.mktemp("encoder"), classifier().bert))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return str(save(tmp_path_factory.mktemp("trained"), classifier()))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_load(path):
    result = load_sweep(path)
    assert result.tasks
    assert result.variants
    for count in (2, 12, 24):
        for variant, layers in expand_variants(result.variants, count):
            assert layers == sorted(set(layers))
            assert set(layers) <= set(range(count))
            assert variant.exact or variant.settings
    assert len(RECIPES) >= 5
    one = next(iter(result.tasks))
    assert list(load_sweep(path, [one]).tasks) == [one]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"extra": 1}, r"recipe.yaml: expected title, tasks and variants, got \['extra'\]"),
        ({"tasks": {"a": "{trian: x}"}}, r"tasks.a: expected some of .*, got \['trian'\]"),
        ({"tasks": {"a": "{epochs: many}"}}, "tasks.a.epochs: expected a value of type int, got 'many'"),
        ({"tasks": {"a": "{epochs: 0}"}}, "tasks.a.epochs: expected 1 or more, got 0"),
        (
            {"tasks": {"a": "{learning_rate: fast}"}},
            "tasks.a.learning_rate: expected a value of type float, got 'fast'",
        ),
        ({"tasks": {"a": "5"}}, "tasks.a: expected options, .*, got 5"),
        ({"tasks": {"a": "{uses: b}"}}, r"tasks.a.uses: expected an earlier task: one of \[\], got b"),
        ({"variants": {"v": "{refin: 3}"}}, r"variants.v: expected some of .*, got \['refin'\]"),
        ({"variants": {"v": "{top_k: -3}"}}, "variants.v.top_k: expected .*, got -3"),
        (
            {"variants": {"v": "{layers: first}"}},
            "variants.v.layers: expected a list of numbers, all, late or each start, got 'first'",
        ),
        ({"variants": {"v": "{layers: []}"}}, "variants.v.layers: expected"),
        ({"variants": {"v": "{exact: 1}"}}, "variants.v.exact: expected a value of type bool, got 1"),
        ({"variants": {"v": "{finetune: {epoch: 1}}"}}, r"variants.v.finetune: expected .*, got \['epoch'\]"),
        ({"variants": {"v": "{finetune: {epochs: 0}}"}}, "variants.v.finetune.epochs: expected 1 or more, got 0"),
        ({"variants": {"v": "{finetune: 3}"}}, "variants.v.finetune: expected options, .*, got 3"),
    ],
)
def test_recipes_that_do_not_fit(tmp_path, parts, message):
    with pytest.raises(InvalidInput, match=message):
        load_sweep(recipe(tmp_path, **parts))


def test_files_that_are_not_recipes(tmp_path):
    path = tmp_path / "recipe.yaml"
    for text, message in (
        ("title: x\ntasks: {a: {}}", r"expected title, tasks and variants, got \['tasks', 'title'\]"),
        ("tasks: [a, b]\nvariants: {v: {}}", "tasks: expected names, each with its options, got a list"),
        ("- a", "expected names and values of options, got a list"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidInput, match=message):
            load_sweep(path)
    with pytest.raises(InvalidInput, match="No such file"):
        load_sweep(tmp_path / "none.yaml")
    with pytest.raises(InvalidInput, match=r"tasks: expected some of toy, got tie"):
        load_sweep(recipe(tmp_path), ["tie"])


def test_tasks_that_use_others(tmp_path):
    tasks = {
        "a": "{train: t.jsonl, epochs: 4, text: text, learning_rate: 1e-4}",
        "b": "{uses: a, min_tokens: 9}",
        "c": "{uses: b, limit: 2, text: [text, title]}",
    }
    result = load_sweep(recipe(tmp_path, tasks), ["c", "b"]).tasks
    shared = {"train": "t.jsonl", "epochs": 4, "learning_rate": 1e-4, "uses": "a", "min_tokens": 9}
    assert result["b"] == Task(**shared, text=("text",))
    assert result["c"] == Task(**shared, text=("text", "title"), limit=2)  # uses the model of task a
    assert list(result) == ["b", "c"]


@pytest.mark.parametrize("count", range(1, 40))
def test_late_layers(count):
    result = select_late_layers(count)
    assert result[-1] == count - 1
    assert all(b - a == 2 for a, b in itertools.pairwise(result))
    assert len(result) == max(1, -(-count // 4))


def test_layers_of_variants():
    def layers(wanted, count=5, sliding=()):
        return [(v.name, numbers) for v, numbers in expand_variants([Variant("v", wanted)], count, sliding)]

    assert layers("all") == [("v", [0, 1, 2, 3, 4])]
    assert layers("all", sliding={1, 2}) == [("v", [0, 3, 4])]
    assert layers("late") == [("v", select_late_layers(5))]
    assert layers((3, -1, 3)) == [("v", [3, 4])]
    assert layers("each start", 3) == [("v from 0", [0, 2]), ("v from 1", [1]), ("v from 2", [2])]
    for wrong in (5, -6):
        with pytest.raises(
            InvalidInput,
            match=f"variants.v.layers: expected numbers from 0 to 4, as the model has 5 layers, got {wrong}",
        ):
            layers((1, wrong))


def run(path, data, out, model=None, **options):
    said = []
    sweep = Sweep(load_sweep(path), model, data, out, say=said.append, **options)
    return list(sweep.run()), sweep, said


def test_a_sweep(tmp_path, data, encoder):
    variants = {"cheap": WINDOWS, '"(4,2)"': PAPER, "again": "{exact: true, finetune: {epochs: 1}}"}
    tasks = {"toy": TASK, "toy-some": "{uses: toy, limit: 3}", "gone": "{train: no.csv}", "test": "{test: test.jsonl}"}
    path, out = recipe(tmp_path, tasks, variants), tmp_path / "out"
    result, sweep, said = run(path, data, out, encoder)
    assert sweep.skipped == {
        "gone": f"no.csv is not in {data}",
        "test": "no training data; pass a fine-tuned model: --given test=FOLDER",
    }
    assert f"gone: skipped: no.csv is not in {data}" in said
    assert sum("fine-tuning" in line for line in said) == 1  # the second task uses the same model
    names = ["original", "cheap", "(4,2) from 0", "(4,2) from 1", "again"]
    assert [(row["task"], row["variant"]) for row in result] == [(t, v) for t in ("toy", "toy-some") for v in names]
    assert [row["examples"] for row in result] == [6] * 5 + [3] * 5
    assert [row["layers"] for row in result[:5]] == [[], [0, 1], [0], [1], []]
    assert [json.loads(line) for line in (out / RESULTS).read_text().splitlines()] == result
    for row in result:
        assert ("ops ratio, converted layers" in row) == (row["variant"] not in ("original", "again"))
        assert ("padded MFLOP per layer" in row) == row["variant"].startswith("(4,2)")
        assert ("kept" in row) == (row["variant"] != "original")
    # The scores of the original are those of the saved model.
    model, known = load_for_task(str(out / "models" / "toy"), "classification")
    judge = Judge(examples(6, seed=1), "classification", model, known, longest=LONGEST)
    assert result[0]["accuracy"] == judge.scores(judge.ask(model))["accuracy"]

    again, _, said = run(path, data, out, encoder)
    assert again == result
    assert (out / RESULTS).read_text().count("\n") == len(result)
    assert not any("fine-tuning" in line for line in said)

    # Half a line, left by an interrupted run, is computed again.
    text = (out / RESULTS).read_text()
    (out / RESULTS).write_text(text[:-30])
    again, _, _ = run(path, data, out, encoder)
    assert [(row["task"], row["variant"]) for row in again] == [(row["task"], row["variant"]) for row in result]
    assert len((out / RESULTS).read_text().splitlines()) == len(result)

    pictures = write_sweep_report(out, "A test", result, sweep.skipped)
    assert [picture.name for picture in pictures] == ["toy.png", "toy-some.png"]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    report = (out / "report.md").read_text()
    assert report.startswith("# A test\n")
    assert "- gone was skipped: no.csv is not in" in report
    assert "![toy](toy.png)" in report
    header, table = tabulate(result)
    assert {len(row) for row in table} == {len(header)}
    assert report.count("\n| ") + report.startswith("| ") == 1 + len(result)  # the header, and a row each
    for cells, row in zip(table, result, strict=True):
        assert cells[0] == f"{row['task']} ({row['mean length']:.0f})"
        change = 100 * (row["accuracy"] - next(r["accuracy"] for r in result if r["task"] == row["task"]))
        assert cells[header.index("change")] == ("" if row["variant"] == "original" else f"{change:+.2f}")


def test_a_fine_tuned_model_from_the_user(tmp_path, data, trained):
    path = recipe(tmp_path, {"test": "{test: test.jsonl}", "long": "{test: test.jsonl, min_tokens: 500}"})
    result, sweep, _ = run(path, data, tmp_path / "out", given={"test": trained, "long": trained})
    assert [row["variant"] for row in result] == ["original", "cheap"]
    assert sweep.skipped == {"long": "no test text has at least 500 tokens"}
    assert not (tmp_path / "out" / "models").exists()
    some, _, _ = run(path, data, tmp_path / "few", given={"test": trained}, limit=2)
    assert {row["examples"] for row in some} == {2}


def test_short_texts_are_left_out(tmp_path, data, trained):
    lengths = sorted(len(tokenizer()(row["text"])["input_ids"]) for row in rows(5, seed=2))
    path = recipe(tmp_path, {"test": f"{{test: test.jsonl, min_tokens: {lengths[2]}}}"})
    result, _, _ = run(path, data, tmp_path / "out", given={"test": trained})
    assert result[0]["examples"] == sum(length >= lengths[2] for length in lengths)


@pytest.mark.parametrize(
    ("task", "variant", "model", "given", "reason"),
    [
        (TASK, WINDOWS, False, False, "no model; pass --model, or --given a=FOLDER"),
        (TASK, "{fresh: true, exact: true}", False, True, "no model; pass --model"),
        ("{test: test.jsonl}", "{exact: true, finetune: {epochs: 1}}", True, True, "no training data"),
        ("{test: test.jsonl, train: no.csv}", "{exact: true, finetune: {}}", True, True, "no.csv is not in {data}"),
        ("{test: no.csv, train: t.jsonl}", WINDOWS, True, True, "no.csv is not in {data}"),
    ],
)
def test_why_a_task_is_skipped(tmp_path, data, encoder, trained, task, variant, model, given, reason):
    path = recipe(tmp_path, {"a": task}, {"v": variant})
    options = {"given": {"a": trained}} if given else {}
    result, sweep, _ = run(path, data, tmp_path / "out", encoder if model else None, **options)
    assert result == []
    assert sweep.skipped == {"a": reason.format(data=data)}


def test_fresh_models_have_no_original(tmp_path, data, encoder):
    fresh = "fresh: true, finetune: {epochs: 1}"
    variants = {"flat": f"{{exact: true, {fresh}}}", "tree": f"{{{WINDOWS[1:-1]}, {fresh}}}"}
    result, _, said = run(recipe(tmp_path, variants=variants), data, tmp_path / "out", encoder)
    assert [row["variant"] for row in result] == ["flat", "tree"]
    assert not any("kept" in row for row in result)
    assert not any("fine-tuning on" in line for line in said)
    assert not (tmp_path / "out" / "models").exists()
    assert write_sweep_report(tmp_path / "out", "A test", result, {}) == []
    assert [cells[4] for cells in tabulate(result)[1]] == ["", ""]  # nothing to compare with


def test_checkpoints_of_the_paper(tmp_path, data, trained, monkeypatch):
    task = f"{{test: test.jsonl, hub: {json.dumps(trained)}, hub_layers: [0]}}"
    path = recipe(tmp_path, {"a": task}, {"late": f"{{{WINDOWS[1:-1]}, layers: late}}"})
    result, _, _ = run(path, data, tmp_path / "hub", from_hub=True)
    assert result[1]["layers"] == [0]
    result, _, _ = run(path, data, tmp_path / "given", given={"a": trained})
    assert result[1]["layers"] == [1]
    assert select_late_layers(2) == [1]
