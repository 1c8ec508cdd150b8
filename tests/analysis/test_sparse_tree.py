"""Tests of attention trees: weights add up, zeros are exact, and every document can be drawn."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa.analysis import page, sparse_tree
from hsa.analysis.attention_matrix import layer_weights
from hsa.analysis.sparse_tree import AttentionTree, attention_tree, plot_sparse_tree
from hsa.errors import InvalidInput
from hsa.models.classifier import Classifier, ModelConfig
from hsa.nn.encoder_config import EncoderConfig
from hsa.signals import Sequence, Signal
from hsa.signals.batch import collate
from hsa.tree.hierarchy import Hierarchy
from tests.analysis.test_plots import check_picture
from tests.model_inputs import MODALITIES, exact, readable
from tests.tasks import classifier

TEXT = {"text": MODALITIES["text"]}


def sharp(kind="hierarchical", alpha=2.0):
    sizes = {"width": 13, "heads": 3, "head_dim": 5, "feed_forward": 7, "position_width": 2, "position_dim": 3}
    config = EncoderConfig(kind=kind, layers=2, entmax=alpha, **sizes)
    return exact(Classifier(ModelConfig(config, TEXT, outputs=2)))


@settings(max_examples=15)
@given(readable(names=("text",), kinds=("sequence",), trees=(1, 1), depth=4), st.data())
def test_weights_add_up(listed, data):
    model, example = sharp(data.draw(st.sampled_from(["hierarchical", "multiscale"]))), collate(listed)
    layer, head = data.draw(st.integers(0, 1)), data.draw(st.sampled_from([None, 0, 2]))
    leaf = data.draw(st.one_of(st.none(), st.integers(0, example.hierarchy.num_leaves - 1)))
    result = attention_tree(model, example, leaf=leaf, layer=layer, head=head)
    weights, _ = layer_weights(model, example, layer)
    row = (weights.mean(0) if head is None else weights[head])[slice(None) if leaf is None else [leaf]].mean(0)
    s = result.structure
    np.testing.assert_allclose(result.weights[s.leaf_nodes], row, atol=1e-6)
    assert ((result.weights[s.leaf_nodes] == 0) == (row == 0)).all()
    assert result.gone == np.mean(row == 0)
    for node in np.flatnonzero(s.num_children):
        children = result.weights[s.first_child[node] : s.first_child[node] + s.num_children[node]]
        assert result.weights[node] == pytest.approx(children.sum(), abs=1e-6)
        assert (result.weights[node] == 0) == (children == 0).all()
        cut = result.pruned[s.first_child[node] : s.first_child[node] + s.num_children[node]]
        assert (cut == ((children == 0) & (result.weights[node] > 0))).all()


def tree_of(weights, hierarchy, leaf=None):
    s = hierarchy.structure
    return AttentionTree(
        s, np.array([sum(weights[s.first_leaf[n] : s.end_leaf[n]]) for n in range(len(s.parent))]), leaf
    )


FOREST = Hierarchy.from_nested([[[3, 2], [4], 2]])
ROW = [0.0, 0.25, 0.25, 0.0, 0.0, 0.125, 0.125, 0.125, 0.125, 0.0, 0.0]


def test_leaves_and_branches_without_weight():
    result = tree_of(ROW, FOREST)
    assert result.gone == 5 / 11
    assert result.branches_gone == (2, 6)  # the sentence of 2 below the first paragraph, the last sentence
    assert int(result.pruned.sum()) == 3  # those two, and the first word


def test_tiny_weights_are_not_zero(monkeypatch):
    """A sum with larger weights would lose them."""
    row = np.array([0.5, 0.5, 0, 0, 0, 1e-30, 0, 0, 0, 0, 0])
    monkeypatch.setattr(sparse_tree, "layer_weights", lambda *_: (np.tile(row, (1, 11, 1)), FOREST))
    result = attention_tree(None, None, leaf=3)
    assert (result.weights[result.structure.leaf_nodes] > 0).tolist() == (row > 0).tolist()
    assert result.gone == 8 / 11


def drawn(monkeypatch, tmp_path, tree, labels):
    """Return the texts of a plot with their colours, and its curves (points, width)."""
    texts, curves = [], []
    write, curve = page.Page.write, page.Page.curve

    def record_text(self, x, y, text, **look):
        texts.append((text, look.get("color")))
        write(self, x, y, text, **look)

    def record_curve(self, points, width, color, alpha=1.0):
        curves.append((points, width))
        curve(self, points, width, color, alpha)

    monkeypatch.setattr(page.Page, "write", record_text)
    monkeypatch.setattr(page.Page, "curve", record_curve)
    plot_sparse_tree(tmp_path / "a.png", tree, labels, "title")
    check_picture(tmp_path / "a.png", least=150)
    return texts, curves


def test_zero_branches_are_stubs(monkeypatch, tmp_path):
    labels = [f" w{i}" for i in range(11)]
    texts, curves = drawn(monkeypatch, tmp_path, tree_of(ROW, FOREST, leaf=2), labels)
    grey = {text for text, color in texts if color == "#b5b5b5"}
    assert grey == {"w0", "w3", "w4", "w9", "w10"}
    assert "Attention of “w2”. Without any weight: 45 % of the leaves, 2 of 6 branches" in {text for text, _ in texts}
    assert [text for text, _ in texts if text.endswith(" %")][:4] == ["50 %", "0 %", "50 %", "0 %"]
    # Branches to 2 paragraphs with weight, to 2 of their sentences, and to their words; stubs to 2 without weight.
    assert sum(width < 1 for _, width in curves) == 2
    assert len(curves) == 4 + 2 + 2
    # No branch continues below a stub.
    ends = {points[-1] for points, width in curves if width < 1}
    assert not ends & {points[0] for points, _ in curves}


@pytest.mark.parametrize("lengths", [[1], [5], [[1]], [[3, 2], 4], [40] * 80, [[[[2, 1], 3], 1], 2], [300]])
def test_documents_of_all_shapes(tmp_path, lengths):
    hierarchy = Hierarchy.from_nested([lengths])
    weights = np.random.default_rng(0).random(hierarchy.num_leaves)
    weights[weights < 0.6] = 0
    weights[0] = 1.0
    plot_sparse_tree(tmp_path / "a.png", tree_of(weights / weights.sum(), hierarchy, leaf=0), None, "title")
    check_picture(tmp_path / "a.png", least=100)


def test_labels_of_all_kinds(tmp_path):
    labels = ["$x$", " 日本語", "\ufffd", "", " \n", " é", " _^{", " 🐈", " a" * 30, " \x00", "b"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_sparse_tree(tmp_path / "a.png", tree_of(ROW, FOREST, leaf=1), labels, r"$\nothing{$")
    check_picture(tmp_path / "a.png", least=200)
    with pytest.raises(InvalidInput, match=r"labels: expected 11 labels, one per leaf, got 3"):
        plot_sparse_tree(tmp_path / "b.png", tree_of(ROW, FOREST), ["a"] * 3, "title")


def test_a_row_without_any_weight(tmp_path):
    """Test a single leaf that does not attend to itself."""
    plot_sparse_tree(tmp_path / "a.png", tree_of([0.0], Hierarchy.flat([1])), [" word"], "title")
    check_picture(tmp_path / "a.png", least=100)


def test_invalid_arguments():
    model = sharp()
    example = collate([Signal(Sequence(2), [Signal.of([3, 1, 4], "text"), Signal.of([1, 5], "text")])])
    for name, number in (("leaf", 5), ("leaf", -1), ("head", 3), ("layer", 2), ("layer", -1)):
        with pytest.raises(InvalidInput, match=f"{name}: expected an index from 0 to .*, got {number}"):
            attention_tree(model, example, **{name: number})
    with pytest.raises(InvalidInput, match=r"example: expected one tree, got 2"):
        attention_tree(model, collate([Signal.of([3], "text"), Signal.of([3, 1], "text")]))
    with pytest.raises(
        InvalidInput, match=r"model: expected a model with attention weights .*, got the kind 'bottom-up'"
    ):
        attention_tree(classifier("bottom-up"), example)
