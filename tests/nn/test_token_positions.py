import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa.nn.token_positions import TreePositionCounters, TreePositionEmbedding, token_positions
from hsa.tree.causal_tree import causal_tree

trees = st.tuples(
    st.lists(st.integers(1, 40), min_size=1, max_size=3), st.sampled_from([(3, 2), (2,), (5, 3, 2)]), st.integers(0, 2)
)


def heights(draw_from, lengths):
    return np.random.default_rng(draw_from).choice([0, 0, 0, 0, 1, 2, 3], sum(lengths))


@given(trees, st.integers(0, 20))
def test_positions_are_those_of_the_causal_tree(tree, seed):
    lengths, branching, _ = tree
    closes = heights(seed, lengths)
    result = token_positions(lengths, branching, closes, 0, 4)
    s = causal_tree(lengths, branching, closes).structure
    node = s.leaf_nodes
    for level in range(4):
        above = s.parent[node]
        rooted = above < 0
        index = np.where(rooted, 0, node - s.first_child[above])
        assert (result[:, level] == index).all()
        node = np.where(rooted, node, above)


@given(trees, st.integers(0, 20), st.booleans())
def test_counters_return_the_positions_of_the_whole_sequence(tree, seed, with_closes):
    lengths, branching, sinks = tree
    longest = max(lengths)
    lengths = [longest] * len(lengths)
    closes = heights(seed, lengths) if with_closes else None
    wanted = token_positions(lengths, branching, closes, sinks, 3).reshape(len(lengths), longest, 3)
    by_sequence = None if closes is None else closes.reshape(len(lengths), longest)
    counters = TreePositionCounters(len(lengths), branching, sinks, 3)
    for i in range(longest):
        assert (counters.positions == wanted[:, i]).all()
        if i == longest // 2:
            counters.reorder(range(len(lengths)))
        counters.append(None if by_sequence is None else by_sequence[:, i].tolist())
    counters.crop([longest // 3] * len(lengths))
    if longest // 3 < longest:
        assert (counters.positions == wanted[:, longest // 3]).all()


def test_reordered_counters_are_independent():
    counters = TreePositionCounters(2, (3, 2), 0, 2)
    for closes in ([0, 1], [0, 0]):
        counters.append(closes)
    counters.reorder([1, 1, 0])
    assert counters.positions.tolist() == [[1, 1], [1, 1], [2, 0]]
    counters.append([0, 1, 0])
    assert counters.positions.tolist() == [[2, 1], [0, 0], [0, 1]]


def test_embedding_is_a_sum_over_levels():
    module = TreePositionEmbedding(7, (3, 2), 2, features=6)
    positions = torch.tensor([[0, 0], [2, 0], [2, 1]])
    out = module(positions)
    alone = [module.maps[i](module.fourier[i](positions[:, i : i + 1])) for i in range(2)]
    torch.testing.assert_close(out, alone[0] + alone[1])
    assert not torch.allclose(out[1], out[2])
