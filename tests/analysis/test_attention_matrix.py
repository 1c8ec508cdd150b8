"""Attention of one example: the weights, and the picture of short and long examples."""

import warnings

import numpy as np
import pytest
import torch

from hsa import dense_weights, hierarchical_attention
from hsa.analysis import attention_matrix as module
from hsa.analysis.attention_matrix import LEAVES, attention_matrix, heaviest_leaves, plot_attention
from hsa.errors import InvalidInput
from tests.analysis.test_plots import check_picture
from tests.tasks import classifier, data


def test_labels_of_all_kinds(tmp_path):
    """Labels are not parsed as formulas."""
    example = data(1).batch
    labels = (["$x$", r"$\frac{$", "日本", "a" * 80, "_^", "", "🐈"] * 9)[: example.hierarchy.num_leaves]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
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


def test_long_examples_show_their_heaviest_families(tmp_path, monkeypatch):
    from hsa.signals import Sequence, Signal, collate

    sizes = [7, 50, 1, 13, 3, 41, 19, 2, 29]  # 165 leaves
    example = collate([Signal(Sequence(len(sizes)), [Signal.of([i] * n, "text") for i, n in enumerate(sizes)])])
    drawn, save = [], module.save_figure
    monkeypatch.setattr(module, "save_figure", lambda figure, path: (drawn.append(figure.axes), save(figure, path)))
    model, labels = classifier(layers=3), [f"w{i}" for i in range(165)]
    plot_attention(tmp_path / "a.png", model, example, labels, "the title")
    check_picture(tmp_path / "a.png")
    axes, bar = drawn[0]
    weights, _ = attention_matrix(model, example)
    leaves = [int(label.get_text()[1:]) for label in axes.get_xticklabels()]
    assert 60 < len(leaves) <= LEAVES
    assert leaves == sorted(leaves) == [int(label.get_text()[1:]) for label in axes.get_yticklabels()]
    np.testing.assert_allclose(np.square(axes.images[0].get_array()), weights[np.ix_(leaves, leaves)], atol=1e-6)
    share = 100 * weights[:, leaves].sum() / weights.sum()
    assert f"{len(leaves)} of 165 leaves" in axes.get_title()
    assert f"{share:.0f} %" in axes.get_title()
    assert bar.get_ylabel() == "attention weight: layer 1 of 3, mean over 2 heads"


def test_heaviest_leaves():
    generator = np.random.default_rng(0)
    families = np.repeat(np.arange(11), generator.integers(1, 60, 11))
    weights = generator.random(len(families)) ** 4
    for most in (5, 40, len(families) - 1, len(families)):
        chosen = heaviest_leaves(weights, families, most)
        assert most - 20 < len(chosen) <= most
        assert (np.diff(chosen) > 0).all()
        assert weights[chosen].mean() >= weights.mean()
    spread = np.arange(300) // 3  # as many families as fit, the heaviest first
    weights = np.repeat(generator.permutation(100), 3).astype(float)
    assert set(weights[heaviest_leaves(weights, spread, 30)]) == set(range(90, 100))
