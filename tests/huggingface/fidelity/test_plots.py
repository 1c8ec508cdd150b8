"""Plots of conversions, with usual and unusual values."""

import warnings

import numpy as np
import pytest

from hsa.analysis.plots import pyplot
from hsa.analysis.tables import markdown_table, print_table, terminal_table
from hsa.huggingface.fidelity.plots import (
    PARTS,
    plot_frontier,
    plot_operations,
    plot_sensitivity,
    plot_start_layers,
    plot_timing,
)
from hsa.huggingface.fidelity.timing import Timed
from tests.analysis.test_plots import check_picture

ODD = r"$\nothing{$ _^ 日本 🐈"


@pytest.fixture
def limits(monkeypatch):
    """Record the y limits of each plot, by axis label."""
    from hsa.huggingface.fidelity import plots as conversion_plots

    result, save = {}, conversion_plots.save_figure

    def note(figure, path):
        result.update({axes.get_ylabel(): axes.get_ylim() for axes in figure.axes})
        save(figure, path)

    monkeypatch.setattr(conversion_plots, "save_figure", note)
    return result


@pytest.fixture(autouse=True)
def _strict():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert pyplot().get_fignums() == []


def layer(share):
    return {**dict.fromkeys(PARTS, share * 25.0), "exact": 100.0}


@pytest.mark.parametrize("count", [1, 2, 48])
def test_operations(tmp_path, limits, count):
    plot_operations(tmp_path / "a.png", [layer(0.3)] * count, ODD)
    check_picture(tmp_path / "a.png")
    assert limits["operations, % of exact attention"][1] > 100  # the line of exact attention shows


def test_more_operations_than_exact_attention(tmp_path, limits):
    plot_operations(tmp_path / "a.png", [layer(0.3), layer(3.0)], ODD)
    check_picture(tmp_path / "a.png")
    assert limits["operations, % of exact attention"][1] > 300


@pytest.mark.parametrize("mib", [None, 0.0, 3.5])
@pytest.mark.parametrize("count", [1, 6])
def test_timing(tmp_path, mib, count):
    rows = [Timed(100 * 2**i, 1.5**i, 2.0, mib, mib) for i in range(count)]
    plot_timing(tmp_path / "a.png", rows, ODD)
    check_picture(tmp_path / "a.png")


@pytest.mark.parametrize("times", [[31.0, 39.0], [0.02, 0.5], [7.0, 70_000.0]])
def test_axes_of_time_have_ticks(tmp_path, monkeypatch, times):
    """Times between two powers of ten have ticks too."""
    from hsa.huggingface.fidelity import plots as conversion_plots

    labels, save = [], conversion_plots.save_figure

    def note(figure, path):
        save(figure, path)
        for axes in figure.axes:
            low, high = axes.get_ylim()
            ticks = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
            labels.append([label.get_text() for tick, label in ticks if low <= tick <= high])
            assert {text.get_text() for text in axes.get_legend().get_texts()} == {"exact", "converted"}

    monkeypatch.setattr(conversion_plots, "save_figure", note)
    plot_timing(tmp_path / "a.png", [Timed(128 * 2**i, ms, ms, None, ms) for i, ms in enumerate(times)], "title")
    (own,) = labels  # no panel for memory that was not measured
    assert len(own) >= 3
    assert all(float(label.replace(",", "")) > 0 for label in own)


@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("limits", [{}, {"limit": 0.85}, {"least_saved": 2.0}])
def test_frontier(tmp_path, count, limits):
    points = [{"ops": 1.0 + i, "f1": 0.9 - 0.1 * i, "chosen": i == count - 1} for i in range(count)]
    plot_frontier(tmp_path / "a.png", points, "f1", ODD, original=0.9, budget=ODD, **limits)
    check_picture(tmp_path / "a.png")


def test_sensitivity(tmp_path):
    candidates = ["one", ODD, "three"]
    rows = [
        {"layer": 2 * i, "candidate": w, "distance": d}
        for i, w, d in ((0, 0, 0.5), (1, 2, 0.0), (1, 1, -1e-3), (3, 0, 2))
    ]
    plot_sensitivity(tmp_path / "a.png", rows, candidates, ODD)
    check_picture(tmp_path / "a.png", least=200)


@pytest.mark.parametrize(("starts", "original"), [(1, 0.9), (12, 0.4), (24, 1.0), (3, -0.1)])
def test_start_layers(tmp_path, limits, starts, original):
    scores = {name: np.linspace(0.2, 0.95, starts).tolist() for name in ("(2,2)", ODD, "c")}
    plot_start_layers(tmp_path / "a.png", scores, original, "accuracy", ODD)
    check_picture(tmp_path / "a.png")
    low, high = limits["accuracy"]
    every = [original, *(value for values in scores.values() for value in values)]
    assert low <= min(every)
    assert max(every) < high


def test_tables_are_whole_on_narrow_screens(capsys):
    from rich.console import Console

    header, rows = ["name", "a long header"], [["x" * 40, "1,234.56"], ["y", "7"]]
    console = Console(width=30)
    print_table(console, terminal_table(header, rows, "a caption"))
    out = capsys.readouterr().out
    for cell in ("name", "a", "long", "header", *rows[0], *rows[1]):
        assert cell in out
    assert "…" not in out
    assert console.width == 30
    assert max(len(line) for line in markdown_table(header, rows)) == len("| " + "x" * 40 + " | 1,234.56 |")
