"""Trees of growing sequences: windows, tokens that close families, and nodes that never change once they are closed."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa import Hierarchy, multiscale_attention, select
from hsa.errors import InvalidInput
from hsa.tree.causal_tree import causal_tree, levels

BRANCHING = st.lists(st.integers(2, 4), min_size=1, max_size=3).map(tuple)
SINKS = st.integers(0, 3)
HEIGHTS = st.sampled_from([0, 0, 0, 0, 1, 1, 2, 3, 7])


@st.composite
def texts(draw, trees=3, longest=40):
    """Draw lengths, and the heights up to which each token closes families."""
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=trees))
    return lengths, draw(st.lists(HEIGHTS, min_size=sum(lengths), max_size=sum(lengths)))


def nodes(tree, sinks=0):
    """Return tree, height, first leaf, end and members of every node without the sinks, bottom up and left to right."""
    s = tree.structure
    start = s.leaf_offsets[s.tree]
    rows = zip(s.tree, s.height, s.first_leaf - start, s.end_leaf - start, s.num_children, strict=True)
    kept = [tuple(map(int, row)) for row in rows if row[3] > sinks]
    return sorted(kept, key=lambda row: (*row[:3], row[3]))


def ranges(tree):
    """Return the range of leaves of every node; the nodes of a one-child chain count once."""
    return {(tree, first, end) for tree, _, first, end, _ in nodes(tree)}


def by_hand(length, branching, closes, sinks):
    """Build the levels of one tree node by node: a list of [first, end, members, closed] per level, tokens first."""
    made = [[[t, t + 1, 0, True] for t in range(sinks, length)]]
    while len(made) == 1 or len(made[-1]) > 1:
        cap, level = branching[min(len(made), len(branching)) - 1], len(made)
        above = []
        for first, end, _, closed in made[-1]:
            if not above or above[-1][3]:
                above.append([first, end, 0, False])
            node = above[-1]
            node[1], node[2] = end, node[2] + 1
            node[3] = closed and (node[2] == cap or closes[end - 1] >= level)
        made.append(above)
    return made


@given(st.lists(st.integers(1, 60), min_size=1, max_size=3), BRANCHING, SINKS)
def test_without_closing_tokens_families_are_windows(lengths, branching, sinks):
    windows = Hierarchy.regular(lengths, branching, repeat_last=True, sinks=sinks or None)
    assert causal_tree(lengths, branching, sinks=sinks) == windows
    none_closed = causal_tree(lengths, branching, [0] * sum(lengths), sinks)
    assert none_closed.lengths == lengths
    assert ranges(none_closed) == ranges(windows)


@given(texts(), BRANCHING, SINKS)
def test_levels_equal_those_built_node_by_node(text, branching, sinks):
    lengths, closes = text
    first = 0
    built = levels(lengths, branching, np.array(closes), sinks)
    expected = {(tree, 0, n) for tree, n in enumerate(lengths)}  # roots
    for tree, length in enumerate(lengths):
        expected |= {(tree, t, t + 1) for t in range(length)}
        if length > sinks:
            made = by_hand(length, branching, closes[first : first + length], sinks)
            expected |= {(tree, a, b) for level in made for a, b, *_ in level}
            for level, wanted in zip(built, made, strict=False):
                ours = (level.tree == tree) & (level.end > sinks)
                assert level.end[ours].tolist() == [end for _, end, *_ in wanted]
                assert level.leaves[ours].tolist() == [end - begin for begin, end, *_ in wanted]
                assert level.closed[ours].tolist() == [closed for *_, closed in wanted]
        first += length
    assert ranges(causal_tree(lengths, branching, closes, sinks)) == expected


@given(texts(), BRANCHING, SINKS)
def test_families_have_at_most_branching_members_and_end_at_closing_tokens(text, branching, sinks):
    lengths, closes = text
    tree = causal_tree(lengths, branching, closes, sinks)
    assert tree.lengths == lengths
    start = np.cumsum([0, *lengths])
    for number, height, first, end, members in nodes(tree, sinks):
        if height == 0 or (first < sinks and sinks):  # the root, which also holds the sinks
            continue
        cap = branching[min(height, len(branching)) - 1]
        heights = np.array(closes[start[number] + first : start[number] + end])
        assert members <= cap
        assert (heights[:-1] < height).all()  # a token that closes a family is its last
        if end < lengths[number]:  # another node follows: this one was full, or a token closed it
            assert members == cap or heights[-1] >= height


@given(texts(trees=1), BRANCHING, SINKS, st.data())
def test_closed_nodes_do_not_change_as_the_text_grows(text, branching, sinks, data):
    (length,), closes = text
    shorter = data.draw(st.integers(1, length))
    before = levels([shorter], branching, np.array(closes[:shorter]), sinks)
    after = levels([length], branching, np.array(closes), sinks, height=len(before) - 1)
    later = ranges(causal_tree([length], branching, closes, sinks))
    for old, new in zip(before, after, strict=True):
        number = int(old.closed.sum())
        assert old.closed[:number].all()  # all except perhaps the last
        assert number >= len(old.end) - 1
        for name in ("end", "leaves", "closed"):
            assert getattr(old, name)[:number].tolist() == getattr(new, name)[:number].tolist()
        ends = zip(old.end[:number].tolist(), old.leaves[:number].tolist(), strict=True)
        assert all((0, end - leaves, end) in later for end, leaves in ends if end > sinks)


@given(st.lists(st.integers(0, 5), min_size=2, max_size=40), BRANCHING, SINKS, st.integers(0, 3), st.data())
def test_no_output_depends_on_a_later_token_even_if_tokens_close_families(ids, branching, sinks, near, data):
    """A token determines its query, key, value and the height that it closes."""
    generator = torch.Generator().manual_seed(0)
    tables = [torch.randn(6, heads, dim, generator=generator).double() for heads, dim in ((4, 3), (2, 3), (2, 5))]
    heights = np.array([0, 0, 0, 1, 2, 3])

    def outputs(ids):
        q, k, v = (table[ids] for table in tables)
        tree = causal_tree([len(ids)], branching, heights[ids], sinks)
        selection = select(q, k, tree, near=near, causal=True)
        return multiscale_attention(q, k, v, tree, selection=selection, causal=True, pooled_bias=0.3)

    index = data.draw(st.integers(1, len(ids) - 1))
    changed = [*ids[:index], (ids[index] + data.draw(st.integers(1, 5))) % 6, *ids[index + 1 :]]
    before, after = outputs(ids), outputs(changed)
    torch.testing.assert_close(after[:index], before[:index], rtol=0, atol=1e-12)
    assert (after[index] - before[index]).abs().max() > 1e-6


@pytest.mark.parametrize("branching", [(), 4, (1,), (4, 0), (4.0,), (True, 4), "44"])
def test_invalid_branching(branching):
    with pytest.raises(InvalidInput, match="branching: expected"):
        causal_tree([9], branching)


@pytest.mark.parametrize("closes", [[0, 1], [0, 0, 0, -1], [[0, 0, 0, 0]], [0.0, 0, 0, 0], torch.zeros(5).long()])
def test_invalid_closes(closes):
    with pytest.raises(InvalidInput, match="closes: expected"):
        causal_tree([4], (2,), closes)


@pytest.mark.parametrize("closes", [None, [0, 1, 0]])
def test_invalid_lengths_and_sinks(closes):
    with pytest.raises(InvalidInput, match="lengths"):
        causal_tree([3, 0], (2,), closes)
    with pytest.raises(InvalidInput, match=r"sinks: expected .*, got -1"):
        causal_tree([3], (2,), closes, sinks=-1)
