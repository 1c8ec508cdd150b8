"""Counts of zeros, against the weights of every family worked out alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa import Entmax, Hierarchy, dense_weights, hierarchical_attention, multiscale_attention, select
from hsa.attention.hierarchical.entmax.zeros import Zeros, zeros
from hsa.attention.multiscale import zeros as multiscale
from hsa.attention.rounds import rooted
from hsa.errors import InvalidInput
from hsa.tree.hierarchy import Structure
from tests.forests import forests, random_inputs

HEADS = 3
ALPHAS = (2.0, 1.5, torch.tensor([[1.9, 1.4, 2.0], [1.6, 2.0, 1.2]], dtype=torch.float64))


def inputs(hierarchy, seed):
    q, k, _ = random_inputs(hierarchy, seed, heads=HEADS, kv_heads=HEADS)
    return 2 * q, 2 * k


def subtree(s, top):
    """The tree below a node, and what its nodes were."""
    nodes = [top]
    depth = [top]
    while depth:
        depth = [c for n in depth for c in range(s.first_child[n], s.first_child[n] + s.num_children[n])]
        nodes += depth
    return Hierarchy(Structure.from_num_children(s.num_children[nodes]))


def counted(q, k, hierarchy, include_self, normalizer):
    """Zeros and entries per height. The rows of a family are those of a tree of which it is the first."""
    s = rooted(hierarchy)[0].structure
    heights = int(s.height.max())
    found = np.zeros((2, heights), int)
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
                    found[0, t.height[0] - 1] += int((block.flatten(1).abs().amax(1) == 0).sum())
                    found[1, t.height[0] - 1] += HEADS
    return Zeros(*(tuple(row.tolist()) for row in found))


@settings(max_examples=25)
@given(forests(), st.integers(0, 99), st.booleans(), st.sampled_from(ALPHAS))
def test_hierarchical(hierarchy, seed, include_self, alpha):
    q, k = inputs(hierarchy, seed)
    found = zeros(q, k, hierarchy, include_self=include_self, normalizer=Entmax(alpha))
    assert found == counted(q, k, hierarchy, include_self, Entmax(alpha))


def test_larger_families_than_are_kept_for_skipping():
    tree = Hierarchy.flat([300])
    q, k = inputs(tree, 3)
    weights = dense_weights(hierarchical_attention, q, k, tree, normalizer=Entmax(2.0))
    apart = ~torch.eye(300, dtype=torch.bool)
    found = zeros(q, k, tree, normalizer=Entmax(2.0))
    assert found == Zeros((int(((weights == 0) & apart).sum()),), (HEADS * 300 * 299,))


@settings(max_examples=25)
@given(forests(), st.integers(0, 99), st.integers(0, 2), st.booleans(), st.sampled_from(ALPHAS))
def test_multiscale(hierarchy, seed, near, top_k, alpha):
    q, k = inputs(hierarchy, seed)
    selection = select(q, k, hierarchy, near=near, top_k=int(top_k))
    weights = dense_weights(multiscale_attention, q, k, hierarchy, selection=selection, normalizer=Entmax(alpha))
    forest = rooted(hierarchy)[0]
    s, lists = forest.structure, selection.partition(hierarchy)
    wanted = np.zeros((2, int(s.height.max())), int)
    offsets = lists.queries.offsets.tolist()
    for group in range(lists.queries.num_groups):
        for head in range(HEADS):
            row = group * lists.heads + head % lists.heads
            nodes = lists.nodes[lists.offsets[row] : lists.offsets[row + 1]].numpy()
            level = s.height[s.parent[nodes]] - 1
            zero = weights[head, offsets[group] : offsets[group + 1]][:, s.first_leaf[nodes]] == 0
            np.add.at(wanted[0], level, zero.sum(0).numpy())
            np.add.at(wanted[1], level, len(zero))
    found = multiscale.zeros(q, k, hierarchy, selection=selection, normalizer=Entmax(alpha))
    assert found == Zeros(*(tuple(row.tolist()) for row in wanted))


def test_softmax_has_none():
    tree = Hierarchy.flat([5])
    q, k = inputs(tree, 1)
    with pytest.raises(InvalidInput, match="normalizer: given softmax"):
        zeros(q, k, tree, normalizer=Entmax(1.0))
    with pytest.raises(InvalidInput, match="normalizer: given softmax"):
        multiscale.zeros(q, k, tree, selection=select(q, k, tree), normalizer=Entmax(1.0))
