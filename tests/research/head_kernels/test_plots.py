"""Plots of heads: few heads and many, and unusual names."""

import warnings

import numpy as np
import pytest

from hsa.research.head_kernels.plots import plot_alignment, plot_pruning, plot_weights
from hsa.research.head_kernels.pruning import Curve
from tests.analysis.test_plots import check_picture

ODD = r"$\nothing{$ _^ 日本 🐈"


@pytest.fixture(autouse=True)
def _strict():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def heads_of(counts):
    return [(layer, head) for layer, count in enumerate(counts) for head in range(count)]


@pytest.fixture
def drawn(monkeypatch):
    """Record every figure that is saved."""
    from hsa.research.head_kernels import plots as kernel_plots

    result, save = [], kernel_plots.save_figure

    def record(figure, path):
        result.append(figure)
        save(figure, path)

    monkeypatch.setattr(kernel_plots, "save_figure", record)
    return result


@pytest.mark.parametrize("counts", [(1,), (2, 3), (12,) * 6, (16,) * 24, (2,) * 60])
@pytest.mark.parametrize("negative", [False, True])
def test_alignment(tmp_path, drawn, counts, negative):
    heads = heads_of(counts)
    table = np.eye(len(heads))
    if negative:
        table[0, -1] = table[-1, 0] = -0.6
    plot_alignment(tmp_path / "a.png", table.tolist(), heads, ODD)
    check_picture(tmp_path / "a.png")
    axes = drawn[0].axes[0]
    assert axes.images[0].get_clim() == ((-1, 1) if negative else (0, 1))
    borders = sorted({float(line.get_xdata()[0]) for line in axes.lines if line.get_xdata()[0] == line.get_xdata()[1]})
    assert borders == (np.cumsum(counts)[:-1] - 0.5).tolist()
    assert len(axes.get_xticks()) <= 24


@pytest.mark.parametrize("counts", [(1,), (2, 3), (12,) * 6, (16,) * 24])
def test_weights(tmp_path, drawn, counts):
    heads = heads_of(counts)
    weights = np.random.default_rng(0).dirichlet(np.ones(len(heads))).tolist()
    plot_weights(tmp_path / "a.png", weights, heads, ODD)
    check_picture(tmp_path / "a.png")
    assert [bar.get_height() for bar in drawn[0].axes[0].patches] == pytest.approx(weights)


def test_pruning(tmp_path, drawn):
    draws = [[1.0, 0.9, 0.2], [1.0, 0.5, 0.2]]
    curves = [Curve("redundancy", [0, 1, 3], [[1.0, 0.95, 0.2]]), Curve(ODD, [0, 1, 3], draws)]
    plot_pruning(tmp_path / "a.png", curves, "accuracy", ODD)
    check_picture(tmp_path / "a.png")
    axes = drawn[0].axes[0]
    assert [line.get_ydata().tolist() for line in axes.lines] == [[1.0, 0.95, 0.2], pytest.approx([1.0, 0.7, 0.2])]
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (0.2, 1.0)
    assert {0.5, 0.9} <= set(band.tolist())
