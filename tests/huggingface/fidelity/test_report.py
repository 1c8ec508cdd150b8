"""Reports: ratios that follow from counts, remarks, JSON and Markdown."""

import json
from dataclasses import replace

import pytest

from hsa.huggingface.conversion import convert_as
from hsa.huggingface.fidelity import report as report_module
from hsa.huggingface.fidelity.calibrate import Budget, Calibration, calibrate
from hsa.huggingface.fidelity.judge import Judge
from hsa.huggingface.fidelity.plots import PARTS
from hsa.huggingface.fidelity.report import HEADERS, Report, describe, frontier_header, write_report
from hsa.huggingface.fidelity.timing import Timed
from hsa.huggingface.settings import LayerSettings
from tests.huggingface.fidelity.small import (
    CHEAP,
    CLUSTERED,
    LONGEST,
    NEAR,
    classifier,
    examples,
    language_model,
    tokenizer,
)


def report_of(settings, task="classification", **more):
    model = language_model() if task == "lm" else classifier()
    model = model.bert if task == "embedding" else model
    judge = Judge(examples(5, parts=1 + (task == "embedding")), task, model, tokenizer(), longest=LONGEST)
    before = judge.ask(model)
    after = judge.ask(convert_as(model, settings))
    return Report.of("tiny", judge, settings, before, after, **more), judge, before, after


@pytest.mark.parametrize("task", ["classification", "embedding", "lm"])
def test_ratios_follow_from_counts(task):
    report, judge, before, after = report_of({1: CHEAP}, task)
    assert report.ratio == pytest.approx(after.counted.ratio)
    assert 1 < report.ratio < 2  # one of two layers
    assert [layer["layer"] for layer in report.layers] == [0, 1]
    for layer in report.layers:
        total = after.counted.layers[layer["layer"]].total
        assert sum(layer[part] for part in PARTS) * len(judge) == pytest.approx(total)
    assert (report.original, report.converted) == (judge.scores(before), judge.scores(after))
    assert report.comparison == judge.compare(before, after)
    assert report.mean_length == pytest.approx(judge.tokens.lengths.mean())
    rows = report.layer_rows()
    assert {len(row) for row in rows} == {len(HEADERS["layers"])}
    assert [row[1] for row in rows] == ["exact", describe(CHEAP), ""]
    assert [rows[0][-1], rows[-1][-1]] == ["1.00", f"{report.ratio:.2f}"]
    assert {len(row) for row in report.score_rows()} == {len(HEADERS["scores"])}
    assert f"1 of 2 layers converted; {report.ratio:.2f} times fewer" in report.summary


def test_changes_of_scores():
    report, *_ = report_of({0: CHEAP})
    report = replace(
        report, original={"accuracy": 0.9, "perplexity": 10.0}, converted={"accuracy": 0.875, "perplexity": 11}
    )
    assert [row[-1] for row in report.score_rows()[:2]] == ["-2.50 points", "+10.00%"]
    kept = report.score_rows()[2]
    assert kept[2] == f"{100 * report.comparison['kept']:.2f}%"


def test_the_error_of_the_perplexity():
    report, *_ = report_of({0: CHEAP}, "lm")
    row = report.score_rows()[0]
    assert row[0] == "perplexity"
    change, error = (100 * report.comparison[f"perplexity change{name}"] for name in ("", " error"))
    assert row[-1] == f"{change:+.2f}% ± {error:.2f} over pieces"
    assert error > 0


def test_remarks():
    report, *_ = report_of({0: CHEAP, 1: CHEAP})
    assert report.ratio > 1.5
    assert report.remarks() == []
    nothing = replace(report, layers=[{**layer, "exact": 0.9 * layer["attention"]} for layer in report.layers])
    assert [remark.split(":")[0] for remark in nothing.remarks()] == [
        f"Nothing is saved on texts of {report.mean_length:.0f} tokens on average"
    ]
    slow = replace(report, timed=[Timed(n, 1.0, after, None, None) for n, after in ((128, 3), (1024, 2), (2048, 0.5))])
    assert ["the converted model is slower up to 1,024 tokens" in remark for remark in slow.remarks()] == [True]


def test_remarks_on_budgets():
    report, *_ = report_of({0: CHEAP, 1: CHEAP})
    assert 1.5 < report.ratio < 50

    def remarks(budget, holds, reached="2.00 times fewer operations", **changes):
        search = Calibration({}, [], [], holds, reached)
        return replace(report, calibration=search, budget=budget, **changes).remarks()

    assert remarks("ops 1.5x", True) == remarks("kept 0%", True) == []
    few = Calibration({}, [{"chosen": True, "perplexity change error": 0.004}], [], True, "", {}, 4)
    perplexity = {"comparison": {"perplexity change": 0.0}}
    assert replace(report, calibration=few, budget="perplexity +0.5%", **perplexity).remarks() == [
        "4 pieces are too few for this budget: a change of 0.5% has a standard error of 0.4%. About 11 pieces would do: "
        "--calibrate-on 11."
    ]
    assert remarks("ops 50x", False) == [
        "No settings tried keep to the budget 'ops 50x'; the closest, 2.00 times fewer operations in the search, were taken."
    ]
    assert remarks("kept 98%", True, settings={}) == [
        "Only exact attention keeps to the budget 'kept 98%': no layer was converted."
    ]
    (missed,) = remarks("accuracy -0.5", True, original={"accuracy": 0.9}, converted={"accuracy": 0.89})
    assert missed.startswith(
        "The budget 'accuracy -0.5' was kept in the search (2.00 times fewer operations), but not on"
    )
    assert "(accuracy -1.00 points at " in missed
    assert missed.endswith("Search on more texts: --calibrate-on.")


def test_short_pieces_save_nothing():
    report, *_ = report_of({0: CLUSTERED, 1: CLUSTERED})
    nothing = [{**layer, "exact": 0.9 * layer["attention"]} for layer in report.layers]
    settings = {0: LayerSettings(exact_until=512), 1: LayerSettings(exact_until=256)}
    short = replace(report, task="lm", layers=nothing, mean_length=256.0, settings=settings)
    assert short.summary.startswith(f"{short.examples} pieces of 256 tokens; 2 of 2 layers converted")
    assert short.remarks() == [
        "Nothing is saved on pieces of 256 tokens: the first 256 tokens attend exactly. Pass larger --max-tokens or smaller "
        "--exact-until."
    ]
    assert "trees pay off on long texts" in replace(short, mean_length=257.0).remarks()[0]
    assert replace(report, task="lm").remarks() == []  # windows save operations on short pieces


def test_files(tmp_path):
    report, *_ = report_of({1: CLUSTERED}, timed=[Timed(7, 2.0, 1.0, None, None), Timed(61, 2.0, 1.0, 3.0, 1.5)])
    pictures = write_report(tmp_path, report)
    assert [picture.name for picture in pictures] == ["operations.png", "timing.png"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["operations.png", "report.json", "report.md", "timing.png"]
    result = json.loads((tmp_path / "report.json").read_text())
    assert result["times_fewer_operations"] == report.ratio
    assert LayerSettings.from_json("here", result["settings"]["1"]) == CLUSTERED
    assert result["layers"] == report.layers
    assert result["timed"][0] == {"length": 7, "before_ms": 2.0, "after_ms": 1.0, "before_mib": None, "after_mib": None}
    assert "holds" not in result
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# tiny on small\n")
    assert report.summary in text
    for picture in pictures:
        assert f"({picture.name})" in text
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 3
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert "| 7 | 2.0 | 1.0 | 2.00 | ? | ? |" in text


@pytest.mark.parametrize("task", ["classification", "embedding", "lm"])
def test_files_of_a_search(tmp_path, task, monkeypatch):
    drawn = []
    plot = report_module.plot_frontier
    monkeypatch.setattr(
        report_module, "plot_frontier", lambda *call, **more: (drawn.append((*call, more)), plot(*call, **more))
    )
    report, judge, *_ = report_of({1: CHEAP}, task)
    model = {"lm": language_model}.get(task, classifier)()
    model = model.bert if task == "embedding" else model
    result = calibrate(model, judge, "ops 1.2x", candidates=[CHEAP, NEAR])
    report = replace(report, calibration=result, budget="ops 1.2x")
    assert [p.name for p in write_report(tmp_path, report)] == ["operations.png", "frontier.png", "sensitivity.png"]
    _, points, metric, title, lines = drawn[0]
    assert points == result.frontier
    assert lines["original"] == (
        1.0 if metric == "cosine" else result.original[metric]
    )  # both on the texts of the search
    assert (lines["budget"], lines["least_saved"]) == ("ops 1.2x", 1.2)
    assert f"{result.examples} {'piece' if task == 'lm' else 'text'}s of the search" in title
    assert result.original == (judge.scores(judge.ask(model)))
    header = frontier_header(result.frontier)
    assert {len(row) for row in report.frontier_rows()} == {len(header)}
    assert [row[-1] for row in report.frontier_rows()].count("chosen") == 1
    written = json.loads((tmp_path / "report.json").read_text())
    assert (written["frontier"], written["holds"]) == (result.frontier, result.holds)


@pytest.mark.parametrize(
    ("task", "budget", "metric", "original"),
    [
        ("classification", "kept 60%", "kept", 1.0),
        ("classification", "f1 -5", "f1", None),
        ("lm", "perplexity +9%", "perplexity", None),
    ],
)
def test_pictures_of_a_search_show_the_metric_of_its_budget(tmp_path, task, budget, metric, original, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        report_module, "plot_frontier", lambda *call, **more: (drawn.append((*call, more)), call[0].touch())
    )
    report, judge, *_ = report_of({1: CHEAP}, task)
    result = calibrate({"lm": language_model}.get(task, classifier)(), judge, budget, candidates=[CHEAP, NEAR])
    write_report(tmp_path, replace(report, calibration=result, budget=budget))
    _, _, shown, _, lines = drawn[0]
    assert shown == metric
    table = replace(report, calibration=result, budget=budget)
    assert metric in frontier_header(result.frontier, budget)
    assert {len(row) for row in table.frontier_rows()} == {len(frontier_header(result.frontier, budget))}
    assert lines["original"] == (original or result.original[metric])
    inside = [point for point in result.frontier if Budget.parse(budget).holds(point, result.original)]
    for point in result.frontier:
        side = point[metric] >= lines["limit"] - 1e-9 if task != "lm" else point[metric] <= lines["limit"] + 1e-9
        assert side == (point in inside)


def test_nothing_converted(tmp_path):
    """A search may convert no layer if no settings keep to the budget."""
    report, _judge, before, after = report_of({})
    assert (before.values == after.values).all()
    assert report.ratio == 1
    assert report.remarks() == report.layer_rows() == []
    assert "no layer converted; 1.00 times fewer" in report.summary
    assert write_report(tmp_path, report) == []
    assert json.loads((tmp_path / "report.json").read_text())["times_fewer_operations"] == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "clustered"),
        ({"top_k": 0}, "clustered, top_k 0"),
        ({"threshold": 1 / 256}, "clustered, threshold 1/256"),
        ({"threshold": 0.3}, "clustered, threshold 0.3"),
        ({"threshold": (1 / 256, 1 / 512, 1 / 64)}, "clustered, threshold 1/64 to 1/512 by head"),
        ({"threshold": (1 / 64, 1 / 64)}, "clustered, threshold 1/64"),
        ({"kind": "multiscale", "near": 2, "branching": (16, 4)}, "multiscale, windows (16, 4), near 2"),
        ({"pooled_bias": 0.5, "top_k": 8}, "clustered, top_k 8, biased"),
        ({"pooled_bias": (0.0, 0.5)}, "clustered, biased"),
        ({"pooled_bias": (0.0, 0.0)}, "clustered"),
        ({"kind": "hierarchical"}, "hierarchical, windows"),
        ({"kind": "multiscale", "tree": len}, "multiscale, trees from a function"),
    ],
)
def test_settings_in_words(changes, words):
    assert describe(LayerSettings(**changes)) == words
