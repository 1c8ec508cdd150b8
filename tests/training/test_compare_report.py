import json
from dataclasses import replace

import pytest
from PIL import Image

from hsa.analysis.cost_plots import Cost
from hsa.baselines.hat.model import HatConfig
from hsa.baselines.options import DocumentOptions
from hsa.training.compare import Compared, Plan
from hsa.training.compare_report import JSON, Comparison
from tests.comparisons import RECIPE, prepared, references, result, run

RATES = (1e-3, 1e-2, 1e-1)
TEST = 17  # examples


def compared(model, scores, rate=1e-2, seeds=(0, 1, 2), **more):
    """Model that was best at this rate, with a score or a failure per seed."""
    runs = tuple(
        run(model, rate, seed, score if isinstance(score, str) else result(model, score, 0.9, **more))
        for seed, score in zip(seeds, scores, strict=False)
    )
    tried = tuple(runs[0] if r == rate else run(model, r, 0, result(model, 0.1, 0.4, **more)) for r in RATES)
    return Compared(model, tried, runs)


def lost(model, *endings):
    """Model without a result at any rate: diverged by default."""
    states = endings or ("diverged",) * len(RATES)
    return Compared(model, tuple(run(model, rate, 0, state) for rate, state in zip(RATES, states, strict=True)), ())


OUT_OF_MEMORY = ("out of memory",) * len(RATES)
WHAT_TO_DO = (
    "to retry the runs that ran out of memory, free memory and pass --resume; or compare in another folder with a smaller "
    "--batch-tokens, --max-tokens (--context for a language model) or --width"
)


def comparison(*models, task="classification", seeds=(0, 1, 2), **more):
    plan = Plan(tuple(model.model for model in models), RATES, seeds)
    return Comparison(plan, RECIPE, prepared(task), models, **{"references": references(task), **more})


HSA = compared("hierarchical", (0.8, 0.85, 0.9), operations=2e6, training_seconds=4.0, test_seconds=0.34)
FLAT = compared("flat", (0.7, 0.72, 0.71), operations=8e6, training_seconds=8.0, test_seconds=0.17, peak_memory=None)
DEEPSETS = compared("deepsets", (0.6, 0.61, 0.62), operations=0.0, training_seconds=1.0, test_seconds=0.017)


def test_the_table():
    models = (HSA, FLAT, DEEPSETS, lost("multiscale"))
    header, rows = comparison(*models, references=references(words=0.8)).columns()
    assert [dict(zip(header, row, strict=True)) for row in rows] == [
        {
            "model": "hierarchical",
            "parameters": "1,000",
            "rate": "0.01",
            "accuracy": "0.8500 ± 0.0500",
            "F1": "0.4250",
            "operations": "2.00 M",
            "train s": "4.0",
            "test ms": "20.00",
            "MiB": "7",
            "on the frontier": "training, test, operations",
        },
        {
            "model": "flat",
            "parameters": "1,000",
            "rate": "0.01",
            "accuracy": "0.7100 ± 0.0100",
            "F1": "0.3550",
            "operations": "8.00 M",
            "train s": "8.0",
            "test ms": "10.00",
            "MiB": "–",
            "on the frontier": "test",
        },
        {
            "model": "deepsets",
            "parameters": "1,000",
            "rate": "0.01",
            "accuracy": "0.6100 ± 0.0100",
            "F1": "0.3050",
            "operations": "0",
            "train s": "1.0",
            "test ms": "1.00",
            "MiB": "7",
            "on the frontier": "training, test, operations",
        },
        {
            "model": "multiscale",
            "parameters": "–",
            "rate": "–",
            "accuracy": "diverged",
            "F1": "–",
            "operations": "–",
            "train s": "–",
            "test ms": "–",
            "MiB": "–",
            "on the frontier": "–",
        },
        {
            "model": "most frequent class",
            "parameters": "–",
            "rate": "–",
            "accuracy": "0.5294",
            "F1": "0.3462",
            "operations": "–",
            "train s": "–",
            "test ms": "–",
            "MiB": "–",
            "on the frontier": "–",
        },
        {
            "model": "TF-IDF + logistic regression",
            "parameters": "70",
            "rate": "–",
            "accuracy": "0.8000",
            "F1": "0.8000",
            "operations": "–",
            "train s": "0.5",
            "test ms": "1.00",
            "MiB": "–",
            "on the frontier": "–",
        },
    ]


def test_findings():
    assert comparison(HSA, FLAT, DEEPSETS).findings() == [
        "hierarchical against flat: +14.0 points (not significant: 95% margin ± 28.4 with 17 test examples and 3 seeds), "
        "4.0 × fewer attention operations, trains 2.0 × faster",
        "hierarchical against deepsets: +24.0 points (not significant: 95% margin ± 29.3 with 17 test examples and 3 seeds)"
        ", trains 4.0 × slower",
        "on the frontier of accuracy and training time: hierarchical, deepsets",
    ]


def test_significant_differences():
    first, second = (
        compared("hierarchical", (0.99, 0.99, 1.0)),
        compared("flat", (0.01, 0.0, 0.0), training_seconds=3.01),
    )
    (*_, line, _) = comparison(first, second).findings()
    assert line.startswith("hierarchical against flat: +99.0 points (significant: 95% margin ± ")
    assert line.endswith(", equal attention operations, equal training time")
    (*_, line, _) = comparison(second, first).findings()
    assert line.startswith("flat against hierarchical: -99.0 points (significant: 95% margin ± ")


ADVICE = "what may help: more --epochs, other --rates, more data; is 'label' (--label) the column to predict?"
ONE_ANSWER = ((9, 0), (8, 0))


def test_models_that_learned_nothing():
    """Models that always give one answer, or none better than the most frequent class, are not compared."""
    same = [compared(name, (9 / 17, 9 / 17), confusion=ONE_ANSWER) for name in ("hierarchical", "flat")]
    chance = compared("deepsets", (10 / 17, 8 / 17), confusion=((8, 1), (7, 1)))
    lines = comparison(*same, chance).findings()
    assert lines == [
        "hierarchical, flat: nothing learned; the same answer to every test example",
        "deepsets: no sign of learning; accuracy 0.5294 is not above that of the most frequent class, 0.5294, by more than "
        "chance (95% margin ± 20.6 points with 17 test answers)",
        ADVICE,
    ]
    lines = comparison(FLAT, same[0]).findings()
    assert lines[:2] == ["hierarchical: nothing learned; the same answer to every test example", ADVICE]
    assert lines[2].startswith("flat against hierarchical: +18.1 points")


def test_a_seed_that_learned():
    """A model has learned if it has with one of the seeds."""
    half = compared("flat", (9 / 17, 0.9))
    collapsed = replace(half.runs[0].result, confusion=ONE_ANSWER)
    runs = (half.runs[0].finished(collapsed), half.runs[1])
    assert "learn" not in "".join(comparison(replace(half, runs=runs)).findings())


def test_regression_without_learning():
    lost_model = compared("hierarchical", (-0.5, 0.0), regression=True)
    lines = comparison(lost_model, task="regression").findings()
    assert lines == ["hierarchical: nothing learned; R² -0.250 is not above 0, that of a constant answer", ADVICE]


def test_words():
    better = comparison(FLAT, references=references(words=0.99))
    assert better.findings()[:2] == [
        "flat against TF-IDF + logistic regression: -28.0 points (significant: 95% margin ± 23.6 with 17 test examples and "
        "3 seeds)",
        "TF-IDF + logistic regression is better than flat beyond chance; a pre-trained text encoder may beat both: "
        "--encoder MODEL",
    ]
    spec = replace(better.prepared.input_spec, encoder="e5")
    encoded = replace(better, prepared=replace(better.prepared, input_spec=spec))
    assert encoded.findings()[1] == "TF-IDF + logistic regression is better than flat beyond chance"
    similar = comparison(FLAT, references=references(words=0.75)).findings()
    assert similar[0].startswith("flat against TF-IDF + logistic regression: -4.0 points (not significant")
    assert not any("better than" in line for line in similar)
    note = replace(references(), note="a package is missing")
    assert comparison(FLAT, references=note).findings()[0] == "a package is missing"


def test_one_seed():
    actual = comparison(compared("hierarchical", (0.8,)), compared("flat", (0.7,)), seeds=(0,))
    assert actual.columns()[1][0][3] == "0.8000"
    assert "(not significant: 95% margin ± 28.3 with 17 test examples and one seed)" in actual.findings()[0]
    assert actual.to_json()["models"][0]["accuracy_std"] is None


def test_training_time_is_no_cost_if_it_is_fixed():
    first, second = compared("hierarchical", (0.9, 0.9, 0.9), training_seconds=60.0), compared("flat", (0.1, 0.1, 0.1))
    actual = comparison(first, second)
    timed = replace(actual, recipe=replace(actual.recipe, training=replace(actual.recipe.training, minutes=1.0)))
    assert "training" in actual.frontiers()["flat"]  # 3 s against 60
    assert not any("training" in costs for costs in timed.frontiers().values())
    lines = timed.findings()
    assert "on the frontier of accuracy and test time: hierarchical" in lines
    assert "flat stopped before 1 min because of --epochs or --patience" in lines
    assert not any("--patience" in line for line in actual.findings())


def test_regression():
    first, second = (compared(name, (-0.5, 0.7), regression=True) for name in ("hierarchical", "flat"))
    actual = comparison(first, second, task="regression", seeds=(0, 1))
    header, rows = actual.columns()
    assert header[3:5] == ["R²", "error"]
    assert rows[0][3:5] == ["0.1000 ± 0.8485", "2.0000"]
    assert actual.findings()[0].startswith(
        "hierarchical against flat: R² +0.000 (not significant: 95% margin ± 3.651 with 2 seeds)"
    )
    assert actual.findings()[1] == "on the frontier of R² and training time: hierarchical, flat"
    model = actual.to_json()["models"][0]
    assert model["r2"] == pytest.approx(0.1)
    assert model["mean_absolute_error"] == 2
    one = comparison(
        compared("hierarchical", (0.5,), regression=True), compared("flat", (0.4,), regression=True), task="regression"
    )
    assert "R² +0.100 (significance unknown: one seed)" in one.findings()[0]


def test_best_rates_at_the_end_of_the_range():
    """A better rate may lie beyond the range; a single rate has no range."""
    actual = comparison(HSA, compared("flat", (0.7,), rate=1e-1), compared("deepsets", (0.7,), rate=1e-3)).findings()
    assert actual[-2:] == [
        "flat did best at the highest rate, 0.1; higher rates may be better",
        "deepsets did best at the lowest rate, 0.001; lower rates may be better",
    ]
    only = replace(comparison(HSA), plan=Plan(("hierarchical",), (1e-2,), (0,)))
    assert only.findings() == ["on the frontier of accuracy and training time: hierarchical"]


def test_diverged_runs():
    half = compared("flat", (0.7, "diverged", 0.9))
    actual = comparison(lost("hierarchical"), half, DEEPSETS)
    lines = actual.findings()
    assert lines[0].startswith("flat against deepsets: ")  # the first model with a result
    assert "and 2 seeds)" in lines[0]
    assert lines[-2:] == ["hierarchical diverged at every rate; try lower ones", "flat diverged at rate 0.01, seed 1"]
    assert comparison(lost("hierarchical"), lost("flat")).findings() == [
        "hierarchical diverged at every rate; try lower ones",
        "flat diverged at every rate; try lower ones",
    ]


def test_runs_out_of_memory():
    half = compared("flat", (0.7, "out of memory", 0.9))
    actual = comparison(lost("hierarchical", *OUT_OF_MEMORY), half, DEEPSETS)
    assert actual.findings()[-3:] == [
        "hierarchical ran out of memory at every rate",
        "flat ran out of memory at rate 0.01, seed 1",
        WHAT_TO_DO,
    ]
    assert actual.columns()[1][0] == ["hierarchical", "–", "–", "out of memory", *["–"] * 6]
    hsa, flat, _ = actual.to_json()["models"]
    assert hsa["out_of_memory"] == [{"rate": rate, "seed": 0} for rate in RATES]
    assert hsa["diverged"] == []
    assert flat["out_of_memory"] == [{"rate": 0.01, "seed": 1}]
    assert [run["seed"] for run in flat["runs"]] == [0, 2]


def test_out_of_memory_and_divergence():
    actual = comparison(lost("hierarchical", "out of memory", "out of memory", "diverged"))
    assert actual.columns()[1][0][3] == "out of memory, diverged"
    assert actual.findings() == [
        "hierarchical ran out of memory at rate 0.001, seed 0",
        "hierarchical ran out of memory at rate 0.01, seed 0",
        "hierarchical diverged at rate 0.1, seed 0",
        WHAT_TO_DO,
    ]


def test_a_warm_start_keeps_its_own_size(monkeypatch):
    pretrained = HatConfig(width=24, layers=1, warm_start="bert"), {}
    monkeypatch.setattr("hsa.baselines.hat.warm_start.warm_start", lambda name, **options: pretrained)
    actual = comparison(HSA, compared("hat", (0.7,), parameters=1250))
    assert (
        actual.findings()[-1]
        == "hat has 25% more parameters than hierarchical: its size cannot be matched more closely"
    )
    recipe = replace(actual.recipe, extra={"documents": DocumentOptions(warm_start="bert")})
    expected = "hat has 25% more parameters than hierarchical: it keeps the size of its pre-trained encoder"
    assert replace(actual, recipe=recipe).findings()[-1] == expected


def test_models_of_other_sizes_are_named():
    larger = compared("flat", (0.7,), parameters=1250)
    smaller = compared("deepsets", (0.7,), parameters=900)
    alike = compared("multiscale", (0.7,), parameters=1015)
    assert comparison(HSA, larger, smaller, alike).findings()[-2:] == [
        "flat has 25% more parameters than hierarchical: its size cannot be matched more closely",
        "deepsets has 10% fewer parameters than hierarchical: its size cannot be matched more closely",
    ]


COSTS = (Cost("hierarchical", 256, 1000, 0.5), Cost("flat", 256, 3000, None))


def test_everything_is_in_the_json(tmp_path):
    models = (HSA, compared("flat", (0.7, "diverged", 0.9)), lost("deepsets"))
    actual = comparison(*models, costs=COSTS, device="a GPU", references=references(words=0.8))
    actual.write(tmp_path)
    data = json.loads((tmp_path / JSON).read_text())
    assert data == json.loads(json.dumps(actual.to_json()))
    assert "NaN" not in (tmp_path / JSON).read_text()
    assert (data["data"], data["task"], data["device"]) == ("tiny", "classification", "a GPU")
    assert data["examples"] == {"train": 31, "validation": 13, "test": TEST}
    assert (data["rates"], data["seeds"]) == (list(RATES), [0, 1, 2])
    assert data["findings"] == actual.findings()
    constant, words = data["references"]
    assert constant["name"] == "most frequent class"
    assert (constant["accuracy"], constant["parameters"]) == (pytest.approx(9 / 17), None)
    assert words == {
        "name": "TF-IDF + logistic regression",
        "accuracy": 0.8,
        "f1": 0.8,
        "parameters": 70,
        "training_seconds": 0.5,
        "test_milliseconds": pytest.approx(1),
    }
    assert data["costs"][0] == {"model": "hierarchical", "length": 256, "operations": 1000, "seconds": 0.5}
    assert data["options"]["width"] == 12
    assert data["options"]["epochs"] == 2
    assert not {"learning_rate", "seed"} & set(data["options"])
    hsa, flat, deepsets = data["models"]
    assert hsa["validation"] == {"0.001": 0.4, "0.01": 0.9, "0.1": 0.4}
    assert hsa["accuracy"] == pytest.approx(0.85)
    assert hsa["accuracy_std"] == pytest.approx(0.05)
    assert hsa["folder"] == "hierarchical/0.01/0"
    assert hsa["test_milliseconds"] == pytest.approx(20)
    assert [(run["seed"], run["accuracy"], run["epochs"]) for run in hsa["runs"]] == [
        (0, 0.8, 1),
        (1, 0.85, 1),
        (2, 0.9, 1),
    ]
    assert flat["diverged"] == [{"rate": 0.01, "seed": 1}]
    assert [run["seed"] for run in flat["runs"]] == [0, 2]
    assert (deepsets["rate"], deepsets["validation"]) == (None, {"0.001": None, "0.01": None, "0.1": None})
    assert "runs" not in deepsets


def test_the_report_and_its_pictures(tmp_path):
    actual = comparison(HSA, FLAT, lost("deepsets"), costs=COSTS)
    pictures = actual.write(tmp_path)
    assert [picture.name for picture in pictures] == ["frontier.png", "curves.png", "costs.png"]
    for picture in pictures:
        with Image.open(picture) as image:
            assert min(image.size) > 300
    report = (tmp_path / "report.md").read_text()
    for part in (
        "# tiny: hierarchical, flat, deepsets\n",
        "| hierarchical | 1,000 | 0.01 | 0.8500 ± 0.0500 |",
        f"- {actual.findings()[0]}\n",
        "![frontier](frontier.png)\n",
        "| model | 0.001 | 0.01 | 0.1 |\n",
        "| hierarchical | 0.4000 | 0.9000 | 0.4000 |\n",
        "| deepsets | diverged | diverged | diverged |\n",
        "| 256 | 0.0 M, 500.00 ms | 0.0 M, – |\n",
        "\nwidth: 12\n",
    ):
        assert part in report


@pytest.mark.parametrize("names", [("deepsets",), ("hierarchical", "deepsets")])
def test_models_without_attention_and_lengths_that_were_not_measured(tmp_path, names):
    kept = {"deepsets": DEEPSETS, "hierarchical": HSA}
    costs = [Cost("hierarchical", 256, 1000, 0.5), Cost("deepsets", 256, 0, 0.1), Cost("deepsets", 512, 0, 0.2)]
    actual = comparison(*(kept[name] for name in names), costs=[cost for cost in costs if cost.kind in names])
    assert len(actual.write(tmp_path)) == 3
    report = (tmp_path / "report.md").read_text()
    assert ("| 512 | – | 0.0 M, 200.00 ms |\n" if "hierarchical" in names else "| 512 | 0.0 M, 200.00 ms |\n") in report


def test_nothing_to_draw(tmp_path):
    assert comparison(lost("hierarchical")).write(tmp_path) == []
    assert "| hierarchical | – | – | diverged |" in (tmp_path / "report.md").read_text()
