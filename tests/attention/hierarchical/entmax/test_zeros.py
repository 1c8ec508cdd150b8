"""Numbers of zeros and of visited families, against the weights of every family computed separately."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa import Entmax, Hierarchy, dense_weights, hierarchical_attention
from hsa.attention.hierarchical.entmax.zeros import zeros
from hsa.attention.rounds import rooted
from hsa.errors import InvalidInput
from hsa.tree.hierarchy import Structure
from tests.forests import forests, random_inputs, random_positions, sights

HEADS = 3
ALPHAS = (2.0, 1.5, torch.tensor([[1.9, 1.4, 2.0], [1.6, 2.0, 1.2]], dtype=torch.float64))


def inputs(hierarchy, seed):
    q, k, _ = random_inputs(hierarchy, seed, heads=HEADS, kv_heads=HEADS)
    return 2 * q, 2 * k


def subtree(s, top):
    """Return the tree below a node."""
    nodes = [top]
    depth = [top]
    while depth:
        depth = [c for n in depth for c in range(s.first_child[n], s.first_child[n] + s.num_children[n])]
        nodes += depth
    return Hierarchy(Structure.from_num_children(s.num_children[nodes]))


def counted(q, k, hierarchy, include_self, normalizer):
    """Return zeros and entries per height. The rows of a family are those of the first family of its subtree."""
    s = rooted(hierarchy)[0].structure
    heights = int(s.height.max())
    counts = np.zeros((2, heights), int)
    for top in np.flatnonzero(s.num_children):
        tree, leaves = subtree(s, top), slice(s.first_leaf[top], s.end_leaf[top])
        options = {"include_self": include_self, "normalizer": normalizer, "backend": "reference"}
        weights = dense_weights(hierarchical_attention, q[leaves], k[leaves], tree, **options)
        t = tree.structure
        members = [slice(t.first_leaf[c], t.end_leaf[c]) for c in range(1, 1 + t.num_children[0])]
        for i, a in enumerate(members):
            for j, b in enumerate(members):
                block = weights[:, a, b]
                keys = block.shape[1] - (i == j and not include_self)
                if keys:
                    counts[0, t.height[0] - 1] += int((block.flatten(1).abs().amax(1) == 0).sum())
                    counts[1, t.height[0] - 1] += HEADS
    return tuple(counts[0].tolist()), tuple(counts[1].tolist())


@settings(max_examples=25)
@given(forests(), st.integers(0, 99), st.booleans(), st.sampled_from(ALPHAS))
def test_zeros_equal_those_of_separate_families(hierarchy, seed, include_self, alpha):
    q, k = inputs(hierarchy, seed)
    result = zeros(q, k, hierarchy, include_self=include_self, normalizer=Entmax(alpha))
    assert (result.zeros, result.entries) == counted(q, k, hierarchy, include_self, Entmax(alpha))


def test_a_large_family():
    tree = Hierarchy.flat([300])
    q, k = inputs(tree, 3)
    weights = dense_weights(hierarchical_attention, q, k, tree, normalizer=Entmax(2.0), include_self=False)
    apart = ~torch.eye(300, dtype=torch.bool)
    result = zeros(q, k, tree, normalizer=Entmax(2.0), include_self=False)
    assert (result.zeros, result.entries) == ((int(((weights == 0) & apart).sum()),), (HEADS * 300 * 299,))
    assert (result.visited, result.families) == ((HEADS,), (HEADS,))


@settings(max_examples=30)
@given(
    forests(),
    st.integers(0, 99),
    sights,
    st.sampled_from(ALPHAS),
    st.sampled_from(["weighted", "logits"]),
    st.booleans(),
)
def test_shares_that_are_passed_down(forest, seed, sight, alpha, counts, with_positions):
    """Shares decrease towards the leaves; the share of a node is the total weight of a leaf's row inside it."""
    q, k = inputs(forest, seed)
    positions = random_positions(forest, seed, HEADS) if with_positions else None
    options = {"positions": positions, "normalizer": Entmax(alpha, counts), **sight}
    result = zeros(q, k, forest, **options)
    passed, s = result.passed_down, forest.structure
    below = torch.as_tensor(s.parent >= 0)
    above = torch.as_tensor(s.parent).clamp(min=0)
    assert (passed[below] <= passed[above][below] + 1e-12).all()
    inner = torch.as_tensor(~s.is_leaf)
    assert (passed[inner & ~below] == 1).all()
    assert (passed[~inner] == 0).all()
    assert sum(result.families) == int(inner.sum()) * HEADS
    assert sum(result.visited) == int((passed[inner] > 0).sum())
    weights = dense_weights(hierarchical_attention, q, k, forest, backend="reference", **options)
    for node in np.flatnonzero(~s.is_leaf & (s.parent >= 0)):
        leaves = slice(s.first_leaf[node], s.end_leaf[node])
        inside = weights[:, leaves, leaves].sum(-1)
        torch.testing.assert_close(inside, passed[node][:, None].expand_as(inside), rtol=1e-8, atol=1e-8)


def test_pairs_that_attend_only_to_each_other_are_not_visited():
    q = torch.tensor([[9.0, 0.0]] * 2 + [[0.0, 9.0]] * 2, dtype=torch.float64)[:, None]
    forest = Hierarchy.from_nested([[2, 2]])
    result = zeros(q, q.flip(0), forest, normalizer=Entmax(1.5), include_self=False)
    assert (result.visited, result.families) == ((0, 1), (2, 1))
    assert result.visited_fraction == pytest.approx(1 / 3)
    weights = dense_weights(hierarchical_attention, q, q.flip(0), forest, normalizer=Entmax(1.5), include_self=False)[0]
    assert (weights == torch.tensor([[0, 0, 1, 1]] * 2 + [[1, 1, 0, 0]] * 2) / 2).all()


def test_many_equal_keys_get_a_weight_where_one_would_not():
    """Nine keys with logits of 0 have a value of 0.86 with counts in the logits, enough for a weight beside 2.1."""
    forest = Hierarchy.from_parents([-1, 0, 0, *[1] * 9])  # a family of nine leaves, and a leaf beside it
    q, k = torch.zeros(2, 10, 1, 2, dtype=torch.float64).unbind(0)
    alone = int(forest.structure.first_leaf[2])
    q[:, 0, 0], k[alone, 0, 0] = 2.1, 1.0
    result = zeros(q, k, forest, normalizer=Entmax(1.5, "logits"), include_self=False, scale=1.0)
    assert 0.05 < result.passed_down[1] < 0.2


def test_softmax_is_an_error():
    tree = Hierarchy.flat([5])
    q, k = inputs(tree, 1)
    with pytest.raises(InvalidInput, match=r"normalizer: expected an hsa.Entmax, .* no weights of 0, got softmax"):
        zeros(q, k, tree, normalizer=Entmax(1.0))
