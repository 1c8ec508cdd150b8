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
def test_leaf_weight_is_the_product_of_weights_on_its_path(listed, levels):
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
    for first, end in zip(result.rows[:-1], result.rows[1:], strict=True):  # longest runs of one family
        assert len({parent[leaf] for leaf in leaf_nodes[first:end]}) == 1
        assert end == len(leaf_nodes) or parent[leaf_nodes[end]] != parent[leaf_nodes[first]]


def test_weights_of_rows_and_parts_are_those_of_their_nodes():
    document = node(0, 1, node(node(2, 3), node(4)), node(5, 6), 7)
    example, model = collate([document]), han(levels=3)
    result = document_weights(model, example)
    assert result.rows.tolist() == [0, 2, 4, 5, 7, 8]
    assert result.parts.tolist() == [0, 2, 5, 7, 8]
    top = model.weights(example)[-1].weights  # of 0, 1, the two inner nodes and 7
    wanted = [float(top[:2].sum()), *top[2:].tolist()]
    np.testing.assert_allclose(result.of(result.parts), wanted, atol=1e-12)
    assert result.of(result.rows)[1:3].sum() == pytest.approx(wanted[1])


def test_single_leaf_has_weight_one():
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
    """Labels are not parsed as formulas, and glyphs that the font lacks give no warning."""
    names = ["$x$", r" $\frac{$", "日本", "a" * 200, " _^", "", "🐈", "\n", "e\u0301"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_document_weights(tmp_path / "a.png", han(), collate([sentences(4, 5)]), names, r"$\nothing{$")
    check_picture(tmp_path / "a.png", least=120)


def drawn(monkeypatch, tmp_path, document, labels):
    """Return the texts of a picture as (x, y, text)."""
    texts = []
    write = module.Page.write

    def record(self, x, y, text, **look):
        texts.append((x, y, text))
        write(self, x, y, text, **look)

    monkeypatch.setattr(module.Page, "write", record)
    plot_document_weights(tmp_path / "a.png", han(), collate([document]), labels, "title")
    return texts


def test_words_stay_together(monkeypatch, tmp_path):
    """Pieces of a word are adjacent, words are a space apart, and a word that does not fit moves to the next line."""
    labels = ["ab", "cd", " ef", *[" " + "x" * 8] * 9, " yy", "yyyyyyyy"]
    texts = drawn(monkeypatch, tmp_path, sentences(len(labels)), labels)
    position = {text: (x, y) for x, y, text in texts}
    cell = module.CELL
    assert position["cd"] == pytest.approx((position["ab"][0] + 2 * cell, position["ab"][1]))
    assert position["ef"] == pytest.approx((position["ab"][0] + 5 * cell, position["ab"][1]))
    assert position["yy"] == pytest.approx((position["ab"][0] + 2 * cell, position["ab"][1] + module.LINE))
    assert position["yyyyyyyy"] == pytest.approx((position["ab"][0] + 4 * cell, position["ab"][1] + module.LINE))


def test_words_longer_than_a_line_are_broken(monkeypatch, tmp_path):
    """Text without spaces stays inside the column."""
    texts = drawn(monkeypatch, tmp_path, sentences(120), ["abc"] * 120)
    right = max(x for x, _, text in texts if text == "abc") + 3 * module.CELL
    left = min(x for x, _, text in texts if text == "abc")
    assert right - left <= module.CELLS * module.CELL + 1e-6
    assert len({y for _, y, text in texts if text == "abc"}) == 4


def test_numbers_in_the_picture(monkeypatch, tmp_path):
    example = collate([sentences(5, 3)])
    shares = document_weights(han(), example)
    texts = [text for _, _, text in drawn(monkeypatch, tmp_path, sentences(5, 3), None)]
    for share in shares.of(shares.rows):
        assert module.percent(share) in texts
    assert "top level" not in texts  # its bars would repeat those of the sentences
    assert "top level" in [
        text for _, _, text in drawn(monkeypatch, tmp_path, node(sentences(3, 2), sentences(4)), None)
    ]


def test_long_documents_are_cut_with_a_note(monkeypatch, tmp_path):
    document = sentences(*[3] * (module.LINES + 4))
    result = document_weights(han(), collate([document]))
    texts = [text for _, _, text in drawn(monkeypatch, tmp_path, document, None)]
    rest = module.percent(result.leaves[-12:].sum())
    assert f"… and 12 more, with a total weight of {rest}" in texts
    assert "179" in texts
    assert "180" not in texts


def test_bad_input(tmp_path):
    two = collate([Leaf(3, "text"), Leaf(1, "text")])
    with pytest.raises(InvalidInput, match="example: expected one document, got 2 trees"):
        document_weights(han(), two)
    with pytest.raises(InvalidInput, match=r"labels: expected 3.*, got 2"):
        plot_document_weights(tmp_path / "a.png", han(), collate([sentences(3)]), ["a", "b"], "title")
