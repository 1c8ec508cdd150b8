import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from hsa import dense_weights, hierarchical_attention
from hsa.analysis.plots import attention_matrix, plot_attention, plot_confusion, plot_curves
from hsa.errors import InvalidInput
from hsa.training.loop import EpochRecord
from tests.tasks import classifier, data


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
    example = data(1).batch
    labels = (names * 9)[: example.hierarchy.num_leaves]
    plot_attention(tmp_path / "a.png", classifier(), example, labels, r"$\nothing{$")
    check_picture(tmp_path / "a.png", most=4000)


@pytest.mark.parametrize("kind", ["hierarchical", "multiscale", "clustered", "flat"])
@pytest.mark.parametrize("labelled", [True, False])
def test_attention(tmp_path, kind, labelled):
    example = data(3).select([2]).batch
    labels = [str(i) for i in range(example.hierarchy.num_leaves)] if labelled else None
    plot_attention(tmp_path / "a.png", classifier(kind), example, labels, "title")
    check_picture(tmp_path / "a.png")


@pytest.mark.parametrize("kind", ["hierarchical", "multiscale", "clustered", "flat"])
@pytest.mark.parametrize("layers", [1, 2])
def test_rows_of_the_matrix_sum_to_one(kind, layers):
    for i in range(4):
        example = data(4).select([i]).batch
        leaves = example.hierarchy.num_leaves
        weights, families = attention_matrix(classifier(kind, layers=layers), example)
        assert weights.shape == (leaves, leaves)
        sums = weights.sum(-1)
        assert (np.isclose(sums, 1, atol=1e-4) | np.isclose(sums, 0, atol=1e-4)).all()
        assert (weights > -1e-6).all()
        for position, depth in families:
            assert 0 < position < leaves
            assert depth >= 1


def test_the_matrix_is_that_of_the_operator():
    model, example = classifier(), data(5).select([4]).batch
    layer, caught = model.encoder.layers[0], []
    hook = layer.attention.register_forward_pre_hook(lambda module, inputs: caught.append(inputs))
    with torch.no_grad():
        model.eval()(example)
    hook.remove()
    q, k, _, hierarchy, positions, _ = caught[0]
    wanted = dense_weights(hierarchical_attention, q, k, hierarchy, positions=positions, include_self=True)
    weights, families = attention_matrix(model.train(), example)
    assert model.training  # as it was
    np.testing.assert_allclose(weights, wanted.mean(0).detach().numpy(), atol=1e-6)
    s = example.hierarchy.structure
    begins = {int(first) for first, parent in zip(s.first_leaf, s.parent, strict=True) if parent == 0} - {0}
    assert {position for position, _ in families} == begins


def test_dropout_is_off():
    model, example = classifier(dropout=0.5), data(1).batch
    first, second = (attention_matrix(model, example)[0] for _ in range(2))
    assert np.array_equal(first, second)


@pytest.mark.parametrize("kind", ["bottom-up", "trilinear", "hierarchical-trilinear", "none"])
def test_models_without_a_matrix(kind):
    expected = f"model: expected a model with attention weights for every pair of leaves, got the kind '{kind}'"
    with pytest.raises(InvalidInput, match=expected):
        attention_matrix(classifier(kind), data(1).batch)


def test_talking_heads(tmp_path):
    """Talking heads can scale or negate the weights."""
    model, example = classifier("flat", fusion="talking"), data(5).select([4]).batch
    before, _ = attention_matrix(model, example)
    for factor in (1 / 3, -1.0):
        with torch.no_grad():
            model.encoder.layers[0].fusion.mix_weights.copy_((factor - 1) * torch.eye(2))
        np.testing.assert_allclose(attention_matrix(model, example)[0], factor * before, atol=1e-6)
        with np.errstate(invalid="raise"):
            plot_attention(tmp_path / "a.png", model, example, None, "title")
    check_picture(tmp_path / "a.png")


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
