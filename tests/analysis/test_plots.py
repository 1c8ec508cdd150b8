import warnings
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from hsa.analysis.plots import plot_confusion, plot_curves
from hsa.errors import InvalidInput
from hsa.training.loop import EpochRecord


def history(epochs):
    return [EpochRecord(i + 1, 1 / (i + 1), 1.1 / (i + 1), i / epochs, 0.1, 1.0) for i in range(epochs)]


def check_picture(path, least=300, most=2500):
    """Check that a file is a complete PNG of a sensible size that is not blank."""
    with Image.open(path) as image:
        image.load()
        assert image.format == "PNG"
        assert all(least <= side <= most for side in image.size)
        assert np.asarray(image.convert("L")).std() > 3
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("epochs", [1, 12])
def test_curves(tmp_path, epochs):
    plot_curves(
        tmp_path / "a.png", {name: history(epochs) for name in ("hierarchical", "flat", "deepsets")}, "accuracy"
    )
    check_picture(tmp_path / "a.png")


@pytest.mark.parametrize("classes", [2, 30])
def test_confusion(tmp_path, classes):
    table = np.random.default_rng(0).integers(0, 9, (classes, classes))
    table[0] = 0  # a class without examples
    plot_confusion(tmp_path / "a.png", table.tolist(), [f"class {i}" for i in range(classes)], "title")
    check_picture(tmp_path / "a.png")


def test_names_of_all_kinds(tmp_path):
    """Names are not parsed as formulas, and missing glyphs do not warn."""
    names = ["$x$", r"$\frac{$", "日本", "a" * 80, "_^", "", "🐈"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_confusion(tmp_path / "a.png", np.eye(len(names), dtype=int).tolist(), names, r"$\nothing{$")
    check_picture(tmp_path / "a.png", most=4000)


def test_a_plot_that_cannot_be_saved_is_closed(tmp_path):
    import matplotlib.pyplot as plt

    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="cannot be written"):
        plot_curves(tmp_path / "file" / "a.png", {"hierarchical": history(2)}, "accuracy")
    assert plt.get_fignums() == []


def test_histories_of_unequal_length(tmp_path):
    late = [replace(record, validation=0.5) for record in history(9)]
    plot_curves(tmp_path / "a.png", {"hierarchical": history(2), "flat": late}, "R²")
    check_picture(tmp_path / "a.png")
