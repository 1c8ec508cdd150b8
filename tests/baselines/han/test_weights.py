import warnings
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa.analysis import page as module
from hsa.baselines.han.model import HanConfig, HanEncoder
from hsa.baselines.han.weights import document_weights, plot_document_weights
from hsa.errors import InvalidInput
from hsa.signals import Leaf, Sequence, Signal
from hsa.signals.batch import collate
from hsa.tree.positions import KINDS
from tests.analysis.test_plots import check_picture
from tests.model_inputs import KEYS, MODALITIES, exact, readable


def han(levels=2):
    sizes = {"width": 13, "heads": 1, "feed_forward": 5, "position_width": 2, "position_dim": 3}
    return exact(HanEncoder(HanConfig(levels=levels, **sizes), MODALITIES, KINDS, KEYS))


def node(*members):
    return Signal(Sequence(len(members)), [Leaf(m, "text") if isinstance(m, int) else m for m in members])


@settings(max_examples=15)
@given(readable(trees=(1, 1), depth=4), st.integers(1, 3))
def test_a_leaf_weighs_the_product_of_the_weights_above_it(listed, levels):
    model, example = han(levels), collate(listed)
    alpha = {
        int(n): float(w) for level in model.weights(example) for n, w in zip(level.nodes, level.weights, strict=True)
    }
    parent = example.hierarchy.structure.parent

    def path(n):
        return [n, *path(parent[n])] if parent[n] >= 0 else []

    leaf_nodes = example.hierarchy.structure.leaf_nodes
    result = document_weights(model, example)
    np.testing.assert_allclose(result.leaves, [prod(alpha[n] for n in path(leaf)) for leaf in leaf_nodes], atol=1e-12)
    assert result.leaves.sum() == pytest.approx(1)
    for first, end in zip(result.rows[:-1], result.rows[1:], strict=True):  # runs of one family, as long as can be
        assert len({parent[leaf] for leaf in leaf_nodes[first:end]}) == 1
        assert end == len(leaf_nodes) or parent[leaf_nodes[end]] != parent[leaf_nodes[first]]


def test_rows_and_parts_weigh_what_their_nodes_do():
    document = node(0, 1, node(node(2, 3), node(4)), node(5, 6), 7)
    example, model = collate([document]), han(levels=3)
    result = document_weights(model, example)
    assert result.rows.tolist() == [0, 2, 4, 5, 7, 8]
    assert result.parts.tolist() == [0, 2, 5, 7, 8]
    top = model.weights(example)[-1].weights  # of 0, 1, the two inner nodes and 7
    wanted = [float(top[:2].sum()), *top[2:].tolist()]
    np.testing.assert_allclose(result.of(result.parts), wanted, atol=1e-12)
    assert result.of(result.rows)[1:3].sum() == pytest.approx(wanted[1])


def test_a_single_leaf_is_everything():
    result = document_weights(han(), collate([Leaf(3, "text")]))
    assert (result.leaves.tolist(), result.rows.tolist(), result.parts.tolist()) == ([1.0], [0, 1], [0, 1])


def sentences(*lengths):
    return node(*(Signal.of(torch.arange(n), "text") for n in lengths))


DOCUMENTS = {
    "a leaf": Leaf(3, "text"),
    "a sentence": Signal.of([3, 1, 4], "text"),
    "sentences": sentences(5, 3),
    "paragraphs": node(sentences(3, 2), sentences(4)),
    "mixed": node(0, sentences(3, 2), 1, node(sentences(2), 5)),
    "a long sentence": sentences(300),
    "many sentences": sentences(*[3] * 90),
}


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("labelled", [True, False])
def test_pictures(tmp_path, name, labelled):
    example = collate([DOCUMENTS[name]])
    labels = [" word"[i % 2 :] for i in range(example.hierarchy.num_leaves)] if labelled else None
    plot_document_weights(tmp_path / "a.png", han(), example, labels, "title")
    check_picture(tmp_path / "a.png", least=120)


def test_labels_of_all_kinds(tmp_path):
    """No label is a formula, and glyphs that the font lacks are no warning."""
    names = ["$x$", r" $\frac{$", "日本", "a" * 200, " _^", "", "🐈", "\n", "e\u0301"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_document_weights(tmp_path / "a.png", han(), collate([sentences(4, 5)]), names, r"$\nothing{$")
    check_picture(tmp_path / "a.png", least=120)


def drawn(monkeypatch, tmp_path, document, labels):
    """What a picture says: (x, y, text)."""
    said = []
    write = module.Page.write

    def listen(self, x, y, text, **look):
        said.append((x, y, text))
        write(self, x, y, text, **look)

    monkeypatch.setattr(module.Page, "write", listen)
    plot_document_weights(tmp_path / "a.png", han(), collate([document]), labels, "title")
    return said


def test_words_stay_together(monkeypatch, tmp_path):
    """Pieces of a word stand side by side, words a space apart; a word that does not fit goes to the next line."""
    labels = ["ab", "cd", " ef", *[" " + "x" * 8] * 9, " yy", "yyyyyyyy"]
    said = drawn(monkeypatch, tmp_path, sentences(len(labels)), labels)
    position = {text: (x, y) for x, y, text in said}
    cell = module.CELL
    assert position["cd"] == pytest.approx((position["ab"][0] + 2 * cell, position["ab"][1]))
    assert position["ef"] == pytest.approx((position["ab"][0] + 5 * cell, position["ab"][1]))
    assert position["yy"] == pytest.approx((position["ab"][0] + 2 * cell, position["ab"][1] + module.LINE))
    assert position["yyyyyyyy"] == pytest.approx((position["ab"][0] + 4 * cell, position["ab"][1] + module.LINE))


def test_words_longer_than_a_line_are_broken(monkeypatch, tmp_path):
    """As texts without spaces are: no piece stands outside."""
    said = drawn(monkeypatch, tmp_path, sentences(120), ["abc"] * 120)
    right = max(x for x, _, text in said if text == "abc") + 3 * module.CELL
    left = min(x for x, _, text in said if text == "abc")
    assert right - left <= module.CELLS * module.CELL + 1e-6
    assert len({y for _, y, text in said if text == "abc"}) == 4


def test_the_numbers_of_a_picture(monkeypatch, tmp_path):
    example = collate([sentences(5, 3)])
    shares = document_weights(han(), example)
    said = [text for _, _, text in drawn(monkeypatch, tmp_path, sentences(5, 3), None)]
    for share in shares.of(shares.rows):
        assert module.percent(share) in said
    assert "top level" not in said  # its bars would be those of the sentences
    assert "top level" in [
        text for _, _, text in drawn(monkeypatch, tmp_path, node(sentences(3, 2), sentences(4)), None)
    ]


def test_what_is_left_out_is_said(monkeypatch, tmp_path):
    document = sentences(*[3] * (module.LINES + 4))
    result = document_weights(han(), collate([document]))
    said = [text for _, _, text in drawn(monkeypatch, tmp_path, document, None)]
    rest = module.percent(result.leaves[-12:].sum())
    assert f"… and 12 more, which weigh {rest} together" in said
    assert "179" in said
    assert "180" not in said


def test_bad_input(tmp_path):
    two = collate([Leaf(3, "text"), Leaf(1, "text")])
    with pytest.raises(InvalidInput, match="example: given 2 trees, expected one document"):
        document_weights(han(), two)
    with pytest.raises(InvalidInput, match="labels: given 2, expected 3, one per leaf"):
        plot_document_weights(tmp_path / "a.png", han(), collate([sentences(3)]), ["a", "b"], "title")
