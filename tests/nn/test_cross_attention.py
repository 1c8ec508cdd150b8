"""Cross-attention to a tree: softmax attention if all families are selected, and no influence of other tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa import Hierarchy
from hsa.errors import InvalidInput
from hsa.nn.cross_attention import CrossAttention, Source
from tests.forests import forests
from tests.model_inputs import exact

WIDTH, HEADS, SOURCE = 14, 2, 5


def layer(top_k: int | None) -> CrossAttention:
    return exact(CrossAttention(WIDTH, HEADS, SOURCE, top_k=top_k))


def softmax_attention(cross: CrossAttention, x: torch.Tensor, source: Source) -> torch.Tensor:
    """Compute softmax attention by the textbook formula, sequence by sequence."""
    rows = []
    offsets = source.hierarchy.structure.leaf_offsets
    for tokens, tree in zip(x.split(source.lengths), source.tree, strict=True):
        k, v = cross.keys_and_values(source.vectors[offsets[tree] : offsets[tree + 1]])
        q = cross.query(cross.norm(tokens)).unflatten(-1, (HEADS, -1))
        weights = (torch.einsum("ihd,jhd->hij", q, k) / (WIDTH / HEADS) ** 0.5).softmax(-1)
        rows.append(cross.output(torch.einsum("hij,jhd->ihd", weights, v).flatten(1)))
    return torch.cat(rows)


@settings(max_examples=20)
@given(forest=forests(), data=st.data())
def test_softmax_attention_if_all_families_are_selected(forest: Hierarchy, data: st.DataObject) -> None:
    lengths = [data.draw(st.integers(1, 4)) for _ in range(forest.num_trees)]
    source = Source.of(torch.randn(forest.num_leaves, SOURCE, dtype=torch.float64), forest, lengths)
    x = torch.randn(sum(lengths), WIDTH, dtype=torch.float64)
    for top_k in (None, forest.num_nodes):  # without a selection; with one of all families
        cross = layer(top_k)
        if cross.pooled_bias is not None:
            assert cross.pooled_bias.shape == (HEADS,)
        torch.testing.assert_close(cross(x, source), softmax_attention(cross, x, Source(*_parts(source))))


def _parts(source: Source) -> tuple:
    return source.vectors, source.hierarchy, source.tree, source.lengths


def test_each_token_has_its_own_selection() -> None:
    """The result of a token does not depend on the other tokens, whether before or after it."""
    forest = Hierarchy.from_nested([[3, 2, 4, 3, 2], [[2, 3], [4, 2]]])
    vectors = torch.randn(forest.num_leaves, SOURCE, dtype=torch.float64)
    cross = layer(1)
    x = torch.randn(23, WIDTH, dtype=torch.float64)
    whole = cross(x, Source.of(vectors, forest, [12, 11]))
    for i in range(23):
        source = Source(vectors, forest, (int(i >= 12),), (1,))
        torch.testing.assert_close(cross(x[i : i + 1], source), whole[i : i + 1])
    assert not torch.allclose(whole, layer(2)(x, Source.of(vectors, forest, [12, 11])))


def test_pooled_nodes_are_weighed_by_their_number_of_leaves() -> None:
    """Select nothing: the root's members have their mean key and value and the logarithm of their leaf count."""
    forest = Hierarchy.from_nested([[3, 2]])
    vectors = torch.randn(5, SOURCE, dtype=torch.float64)
    cross = layer(0)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    k, v = (torch.stack([t[:3].mean(0), t[3:].mean(0)]) for t in cross.keys_and_values(vectors))
    q = cross.query(cross.norm(x)).unflatten(-1, (HEADS, -1))
    logits = torch.einsum("ihd,jhd->hij", q, k) / (WIDTH / HEADS) ** 0.5 + torch.tensor([3.0, 2.0]).log()
    # Both members are pooled, so that the learned bias, the same for both, cancels.
    expected = cross.output(torch.einsum("hij,jhd->ihd", logits.softmax(-1), v).flatten(1))
    torch.testing.assert_close(cross(x, Source.of(vectors, forest, [3])), expected)


def test_gradients_reach_the_source_and_the_bias() -> None:
    forest = Hierarchy.from_nested([[3, 2, 4], [2, 2]])
    vectors = torch.randn(forest.num_leaves, SOURCE, dtype=torch.float64, requires_grad=True)
    cross = layer(1)
    cross(torch.randn(4, WIDTH, dtype=torch.float64), Source.of(vectors, forest, [3, 1])).square().sum().backward()
    assert bool((vectors.grad.abs().sum(-1) > 0).all())
    assert bool((cross.pooled_bias.grad != 0).all())


def test_keys_and_values_are_computed_once() -> None:
    forest = Hierarchy.from_nested([[3, 2]])
    cross, calls = layer(1), []
    cross.project.register_forward_hook(lambda *_: calls.append(1))
    source = Source.of(torch.randn(5, SOURCE, dtype=torch.float64), forest, [2])
    cross(torch.randn(2, WIDTH, dtype=torch.float64), source)
    cross(torch.randn(1, WIDTH, dtype=torch.float64), source.with_lengths([1]))
    assert len(calls) == 1


def test_reordered_sequences_attend_to_their_former_trees() -> None:
    forest = Hierarchy.from_nested([[3, 2], [4, 2]])
    source = Source.of(torch.randn(11, SOURCE, dtype=torch.float64), forest, [1, 1])
    cross = layer(1)
    x = torch.randn(2, WIDTH, dtype=torch.float64)
    index = [1, 1, 0]
    torch.testing.assert_close(cross(x[index], source.reorder(index)), cross(x, source)[index])


def test_invalid_input() -> None:
    with pytest.raises(InvalidInput, match=r"top_k: expected 0 or more leaf families, or None for all, got -1"):
        CrossAttention(WIDTH, HEADS, SOURCE, top_k=-1)
    with pytest.raises(
        InvalidInput, match=r"lengths: expected 2 sequences, one for each tree that is attended to, got 1"
    ):
        Source.of(torch.randn(5, SOURCE), Hierarchy.flat([3, 2]), [1])
