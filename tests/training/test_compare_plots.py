import pytest
from matplotlib.text import Text
from PIL import Image

from hsa.analysis.frontier import on_frontier
from hsa.analysis.plots import save_figure
from hsa.training import compare_plots as comparison_plots
from hsa.training.compare_plots import Point, plot_frontiers

NAMES = ("hierarchical", "multiscale", "flat", "deepsets", "han", "hat", "transformer-xl")


@pytest.fixture
def figures(monkeypatch):
    """Collect the figures before they are saved."""
    kept = []

    def keep(figure, path):
        renderer = figure.canvas.get_renderer()
        texts = [text for axes in figure.axes for text in labels(axes)]
        for text in texts:
            text.update_positions(renderer)
        figure.boxes = {text: Text.get_window_extent(text, renderer) for text in texts}  # without lines to points
        kept.append(figure)
        save_figure(figure, path)

    monkeypatch.setattr(comparison_plots, "save_figure", keep)
    return kept


def labels(axes):
    return [text for text in axes.texts if text.get_text() in NAMES]


CROWDS = {
    "apart": [(10.0 * 3**i, 0.5 + 0.05 * i, 0.01) for i in range(7)],
    "near": [(10 + 0.3 * i, 0.8 + 0.002 * i, 0.01) for i in range(7)],
    "in rows": [(10 + 0.5 * i, 0.8 + 0.1 * (i == 6), 0.01) for i in range(7)],
    "a heap": [(10 + 0.05 * i, 0.8 + 0.0002 * i, 0.001) for i in range(7)],
    "without spread": [(10.0 * 2**i, 0.8 + 0.002 * i, None) for i in range(7)],
    "one cost": [(10.0, 0.6 + 0.05 * i, 0.001) for i in range(7)],
    "all at nothing": [(0.0, 0.6 + 0.05 * i, 0.001) for i in range(7)],
}


@pytest.mark.parametrize("crowd", CROWDS)
def test_labels_do_not_overlap(figures, tmp_path, crowd):
    points = [Point(name, *values) for name, values in zip(NAMES, CROWDS[crowd], strict=True)]
    plot_frontiers(tmp_path / "a.png", {"seconds": points, "operations": points}, "accuracy", "Title with $x_3")
    with Image.open(tmp_path / "a.png") as image:
        assert min(image.size) > 400
    (figure,) = figures
    for axes in figure.axes:
        texts = labels(axes)
        assert sorted(text.get_text() for text in texts) == sorted(NAMES)
        boxes = [figure.boxes[text] for text in texts]
        for i, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[:i])
            assert (axes.bbox.x0 <= box.x0, box.x1 <= axes.bbox.x1) == (True, True)


def frontier_line(axes):
    (line,) = [line for line in axes.lines if line.get_linestyle() == "--"]
    return list(zip(*line.get_data(), strict=True))


def test_the_frontier_is_drawn(figures, tmp_path):
    points = [Point("hierarchical", 10, 0.8), Point("flat", 20, 0.7), Point("hat", 40, 0.9)]
    plot_frontiers(tmp_path / "a.png", {"seconds": points}, "accuracy", "")
    (axes,) = figures[0].axes
    assert frontier_line(axes) == [(10, 0.8), (40, 0.9), (axes.get_xlim()[1], 0.9)]
    assert axes.get_xlabel() == "seconds"
    assert axes.get_ylabel() == "accuracy"


def test_zero_cost_has_a_position_on_the_logarithmic_axis(figures, tmp_path):
    points = [Point("deepsets", 0, 0.6), Point("hierarchical", 1000, 0.8)]
    plot_frontiers(tmp_path / "a.png", {"operations": points}, "accuracy", "")
    (axes,) = figures[0].axes
    ticks = dict(zip([tick.get_text() for tick in axes.get_xticklabels()], axes.get_xticks(), strict=True))
    assert 0 < ticks["0"] < 1000
    assert frontier_line(axes)[0] == (ticks["0"], 0.6)
    assert all(tick > ticks["0"] for name, tick in ticks.items() if name != "0")


@pytest.mark.parametrize(
    "point", [Point("hierarchical", 3.0, 0.5), Point("deepsets", 0.0, 0.5), Point("hierarchical", 3.0, -2.5, 0.3)]
)
def test_one_model(tmp_path, point):
    plot_frontiers(tmp_path / "a.png", {"seconds": [point]}, "R²", "one")
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_length_of_error_bars(figures, tmp_path):
    plot_frontiers(tmp_path / "a.png", {"seconds": [Point("hierarchical", 3.0, 0.5, 0.07)]}, "accuracy", "")
    (axes,) = figures[0].axes
    (bar,) = axes.collections
    assert bar.get_segments()[0][:, 1].tolist() == pytest.approx([0.43, 0.57])


def test_frontiers():
    assert on_frontier([]) == []
    assert on_frontier([(1, 0.5)]) == [True]
    assert on_frontier([(1, 0.5), (1, 0.6)]) == [False, True]  # better at the same cost
    assert on_frontier([(1, 0.5), (2, 0.5)]) == [True, False]  # as good at a lower one
    assert on_frontier([(3, 0.9), (2, 0.7), (1, 0.8)]) == [True, False, True]
