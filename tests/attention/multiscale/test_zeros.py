"""Zero weights of multiscale attention with entmax, counted against its dense weights."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa import Entmax, Hierarchy, dense_weights, multiscale_attention, select
from hsa.attention.multiscale.zeros import zeros
from hsa.attention.rounds import rooted
from hsa.errors import InvalidInput
from tests.forests import forests, random_inputs

HEADS = 3
ALPHAS = (2.0, 1.5, torch.tensor([[1.9, 1.4, 2.0], [1.6, 2.0, 1.2]], dtype=torch.float64))


def inputs(hierarchy, seed):
    q, k, _ = random_inputs(hierarchy, seed, heads=HEADS, kv_heads=HEADS)
    return 2 * q, 2 * k


@settings(max_examples=25)
@given(forests(), st.integers(0, 99), st.integers(0, 2), st.booleans(), st.sampled_from(ALPHAS))
def test_counts_match_the_dense_weights(hierarchy, seed, near, top_k, alpha):
    q, k = inputs(hierarchy, seed)
    selection = select(q, k, hierarchy, near=near, top_k=int(top_k))
    weights = dense_weights(multiscale_attention, q, k, hierarchy, selection=selection, normalizer=Entmax(alpha))
    forest = rooted(hierarchy)[0]
    s, lists = forest.structure, selection.partition(hierarchy)
    expected = np.zeros((2, int(s.height.max())), int)
    offsets = lists.queries.offsets.tolist()
    for group in range(lists.queries.num_groups):
        for head in range(HEADS):
            row = group * lists.heads + head % lists.heads
            nodes = lists.nodes[lists.offsets[row] : lists.offsets[row + 1]].numpy()
            level = s.height[s.parent[nodes]] - 1
            zero = weights[head, offsets[group] : offsets[group + 1]][:, s.first_leaf[nodes]] == 0
            np.add.at(expected[0], level, zero.sum(0).numpy())
            np.add.at(expected[1], level, len(zero))
    result = zeros(q, k, hierarchy, selection=selection, normalizer=Entmax(alpha))
    assert (list(result.zeros), list(result.entries)) == (expected[0].tolist(), expected[1].tolist())


def test_softmax_is_refused():
    tree = Hierarchy.flat([5])
    q, k = inputs(tree, 1)
    with pytest.raises(InvalidInput, match=r"normalizer: expected .*, got softmax"):
        zeros(q, k, tree, selection=select(q, k, tree), normalizer=Entmax(1.0))
