import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa import Hierarchy
from hsa.errors import InvalidInput
from hsa.nn.pooling import (
    GlobalPool,
    merge_leaves,
    pool_families,
    segment_max,
    segment_mean,
    segment_softmax,
    segment_weigh,
)
from hsa.tree.positions import NodePositions
from tests.forests import forests

WIDTH = 5


def vectors(hierarchy, **more):
    return torch.randn(hierarchy.num_leaves, WIDTH, dtype=torch.float64, **more)


def every_node_its_own_position(hierarchy):
    return NodePositions(torch.arange(hierarchy.num_nodes), {}, ())


def children(hierarchy, node):
    first = int(hierarchy.structure.first_child[node])
    return list(range(first, first + int(hierarchy.num_children[node])))


def rebuilt(hierarchy, x, members):
    """Pool by recursion: return the vectors of the new leaves, the new forest, and the old node of each of its nodes.

    `members(node)` returns a vector for a node that becomes a leaf, else a list of (child, its vector or None).
    """
    parent, old, leaves = [], [], []

    def add(node, above, vector):
        here = len(parent)
        parent.append(above)
        old.append(node)
        below = vector if vector is not None else members(node)
        if isinstance(below, torch.Tensor):
            leaves.append(below)
        else:
            for member, merged in below:
                add(member, here, merged)

    for root in range(hierarchy.num_trees):
        add(root, -1, None)
    wanted = Hierarchy.from_parents(torch.tensor(parent, dtype=torch.int64))
    empty = x.new_empty(0, x.shape[1])
    return (torch.stack(leaves) if leaves else empty), wanted, torch.tensor(old)[wanted.node_ids]


def assert_pooled(pooled, wanted):
    (x, coarser, positions), (vectors_wanted, tree, nodes) = pooled, wanted
    assert coarser == tree
    assert torch.equal(positions.row, nodes)
    torch.testing.assert_close(x, vectors_wanted, rtol=0, atol=1e-12)


@settings(max_examples=25)
@given(forests())
def test_leaf_families_become_their_parents(hierarchy):
    x, s = vectors(hierarchy), hierarchy.structure

    def members(node):
        if s.height[node] == 0:
            return x[s.first_leaf[node]]
        if s.height[node] == 1:
            return torch.stack([x[s.first_leaf[child]] for child in children(hierarchy, node)]).mean(0)
        return [(child, None) for child in children(hierarchy, node)]

    pooled = pool_families(x, hierarchy, every_node_its_own_position(hierarchy))
    assert_pooled(pooled, rebuilt(hierarchy, x, members))


@settings(max_examples=25)
@given(forests())
def test_as_many_calls_as_the_height_leave_the_roots_alone(hierarchy):
    def mean(node):
        below = children(hierarchy, node)
        return torch.stack([mean(child) for child in below]).mean(0) if below else x[s.first_leaf[node]]

    x, s = vectors(hierarchy), hierarchy.structure
    wanted = torch.stack([mean(root) for root in range(hierarchy.num_trees)])
    pooled, tree, positions = x, hierarchy, every_node_its_own_position(hierarchy)
    for depth in range(hierarchy.depth, 0, -1):
        assert tree.depth == depth
        pooled, tree, positions = pool_families(pooled, tree, positions)
    assert tree.num_nodes == hierarchy.num_trees
    assert positions.row.tolist() == list(range(hierarchy.num_trees))
    torch.testing.assert_close(pooled, wanted, rtol=0, atol=1e-12)
    assert_pooled(
        pool_families(pooled, tree, positions), (wanted, tree, positions.row)
    )  # a further call changes nothing


@settings(max_examples=25)
@given(forests(), st.integers(1, 4))
def test_runs_of_neighbouring_leaves_are_merged_at_the_first_position(hierarchy, size):
    x, s = vectors(hierarchy), hierarchy.structure

    def members(node):
        if s.height[node] == 0:
            return x[s.first_leaf[node]]
        listed, run = [], []
        for child in [*children(hierarchy, node), None]:
            is_leaf = child is not None and s.height[child] == 0
            if run and (not is_leaf or len(run) == size):
                listed.append((run[0], torch.stack([x[s.first_leaf[leaf]] for leaf in run]).mean(0)))
                run = []
            if is_leaf:
                run.append(child)
            elif child is not None:
                listed.append((child, None))
        return listed

    merged = merge_leaves(x, hierarchy, every_node_its_own_position(hierarchy), size)
    assert_pooled(merged, rebuilt(hierarchy, x, members))


def test_runs_of_one_leaf_are_not_changed():
    tree = Hierarchy.from_nested([[3, [2, 1]]])
    x = vectors(tree)
    merged, same, _ = merge_leaves(x, tree, NodePositions.of_sequences(tree), 1)
    assert same == tree
    assert torch.equal(merged, x)
    with pytest.raises(InvalidInput, match=r"size: expected 1 or more leaves to merge into one, got 0"):
        merge_leaves(x, tree, NodePositions.of_sequences(tree), 0)


LOOPS = {
    "mean": lambda pool, rows: rows.mean(0),
    "max": lambda pool, rows: rows.max(0).values,
    "attention": lambda pool, rows: pool.score(rows)[:, 0].softmax(0) @ rows,
    "first": lambda pool, rows: rows[0],
    "last": lambda pool, rows: rows[-1],
}


@pytest.mark.parametrize("kind", LOOPS)
@settings(max_examples=25)
@given(forests())
def test_global_pooling_of_each_tree(kind, hierarchy):
    pool, x = GlobalPool(kind, WIDTH).double(), vectors(hierarchy, requires_grad=True)
    parts = x.split(hierarchy.lengths)
    wanted = torch.stack([LOOPS[kind](pool, rows) for rows in parts])
    result = pool(x, hierarchy)
    torch.testing.assert_close(result, wanted, rtol=0, atol=1e-12)
    weight = torch.randn_like(result)
    inputs = [x, *pool.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad(result, inputs, weight), torch.autograd.grad(wanted, inputs, weight), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_the_gradient_of_attention_pooling():
    tree = Hierarchy.flat([3, 1, 2])
    pool, x = GlobalPool("attention", WIDTH).double(), vectors(tree, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: pool(x, tree), (x, *pool.parameters()))


def test_attention_pooling_of_large_scores():
    tree = Hierarchy.flat([3, 2])
    pool, x = GlobalPool("attention", WIDTH).double(), vectors(tree)
    torch.nn.init.constant_(pool.score.weight, 1e4)
    wanted = torch.stack([rows[pool.score(rows)[:, 0].argmax()] for rows in x.split([3, 2])])
    torch.testing.assert_close(pool(x, tree), wanted, rtol=0, atol=1e-12)


@settings(max_examples=25)
@given(forests())
def test_softmax_over_runs(hierarchy):
    """Check it with large logits, which would overflow."""
    lengths, logits = torch.tensor(hierarchy.lengths), 300 * torch.randn(hierarchy.num_leaves, 1, dtype=torch.float64)
    weights, x = segment_softmax(logits, lengths), vectors(hierarchy)
    wanted = torch.cat([part.softmax(0) for part in logits.split(hierarchy.lengths)])
    torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        segment_weigh(x, logits, lengths), segment_mean(weights * x, lengths) * lengths[:, None], rtol=0, atol=1e-12
    )


def test_an_unknown_pooling():
    with pytest.raises(InvalidInput, match=r"pooling: expected one of mean, max, attention, first, last, got 'median'"):
        GlobalPool("median", WIDTH)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype):
    """Expect the exact mean of many rows up to rounding: a sum in half precision would stop growing."""
    x, lengths = (torch.rand(5003, WIDTH) + 1).to(dtype), torch.tensor([5000, 1, 2])
    for kind in (segment_mean, segment_max):
        result = kind(x, lengths)
        assert result.dtype == dtype
        exact = [
            rows.double().mean(0) if kind is segment_mean else rows.double().max(0).values
            for rows in x.split([5000, 1, 2])
        ]
        torch.testing.assert_close(result.double(), torch.stack(exact), rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("kind", LOOPS)
def test_pooling_keeps_the_dtype(kind):
    tree = Hierarchy.flat([3, 2])
    assert GlobalPool(kind, WIDTH).bfloat16()(vectors(tree).bfloat16(), tree).dtype == torch.bfloat16
