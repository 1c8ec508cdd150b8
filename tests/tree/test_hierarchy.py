"""Forests: constructors agree, invariants hold, and errors name the invalid entry."""

import resource
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa import Hierarchy, HsaError
from tests.forests import forests, nested_lists, parent_vectors


@given(forests())
def test_invariants(forest):
    s = forest.structure
    assert (np.diff(s.depth) >= 0).all()  # nodes by depth
    for node in np.flatnonzero(s.num_children):  # every family is one slice, and so are the leaves of every node
        children = np.flatnonzero(s.parent == node)
        assert children.tolist() == list(range(s.first_child[node], s.first_child[node] + s.num_children[node]))
        assert s.leaf_count[node] == s.leaf_count[children].sum()
        assert s.height[node] == 1 + s.height[children].max()
        ends = s.first_leaf[children] + s.leaf_count[children]
        assert s.first_leaf[children].tolist() == [s.first_leaf[node], *ends[:-1]]
        assert (s.tree[children] == s.tree[node]).all()
    assert s.first_leaf[s.leaf_nodes].tolist() == list(range(forest.num_leaves))
    assert sum(forest.lengths) == forest.num_leaves
    assert forest.depth == s.depth.max()


@given(parent_vectors())
def test_from_parents_keeps_the_tree(parent):
    forest = Hierarchy.from_parents(parent)
    ids = forest.node_ids.numpy()
    above = forest.structure.parent
    assert [parent[i] for i in ids] == [-1 if p < 0 else ids[p] for p in above]

    def walk(node):  # depth-first, children in index order
        children = [i for i, p in enumerate(parent) if p == node]
        return [leaf for child in children for leaf in walk(child)] if children else [node]

    roots = [i for i, p in enumerate(parent) if p < 0]
    assert forest.leaf_ids.tolist() == [leaf for root in roots for leaf in walk(root)]


@given(st.lists(forests(), max_size=3))
def test_collate_and_uncollate_are_inverses(parts):
    trees = [tree for part in parts for tree in part.uncollate()]
    batch = Hierarchy.collate(parts)
    assert batch.uncollate() == trees
    assert Hierarchy.collate(trees) == batch
    assert batch.lengths == [n for part in parts for n in part.lengths]


@given(st.lists(nested_lists(), min_size=1, max_size=3))
def test_nested_leaf_counts(nested):
    def count(entry):
        return entry if isinstance(entry, int) else sum(map(count, entry))

    assert Hierarchy.from_nested(nested).lengths == [count(entry) for entry in nested]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_regular_windows(lengths, branching):
    forest = Hierarchy.regular(lengths, branching)
    assert forest.lengths == lengths
    s = forest.structure
    below_root = s.parent >= 0
    at_height = s.num_children[(s.height == 1) & below_root]
    assert (at_height <= branching[0]).all()
    for tree, length in zip(forest.uncollate(), lengths, strict=True):
        nodes = length
        for factor in branching:
            if nodes > 1:
                nodes = -(-nodes // factor)
        assert tree.structure.num_children[0] == nodes if nodes > 1 else True


@given(st.integers(1, 500), st.integers(2, 5))
def test_repeat_last_is_logarithmic(length, factor):
    forest = Hierarchy.regular([length], (factor,), repeat_last=True)
    assert forest.structure.num_children.max() <= factor
    assert factor ** (forest.depth - 1) < max(length, 2) <= factor**forest.depth


def test_from_offsets_equals_nested():
    tokens, sentences, documents = [0, 3, 5, 9, 10], [0, 2, 3, 4], [0, 2, 3]
    assert Hierarchy.from_offsets(tokens, sentences, documents) == Hierarchy.from_nested([[[3, 2], [4]], [[1]]])
    as_tensors = [torch.tensor(x) for x in (tokens, sentences, documents)]
    assert Hierarchy.from_offsets(*as_tensors) == Hierarchy.from_offsets(tokens, sentences, documents)


@given(st.lists(nested_lists(), min_size=1, max_size=3), st.data())
def test_sinks_are_children_of_the_root_and_split_the_nodes_that_contained_them(nested, data):
    plain = Hierarchy.from_nested(nested)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=plain.num_leaves, max_size=plain.num_leaves)))
    forest = Hierarchy.from_nested(nested, sinks=mask)
    assert forest.lengths == plain.lengths
    s = forest.structure
    for leaf in mask.nonzero().flatten().tolist():
        assert s.depth[s.leaf_nodes[leaf]] == 1
        spanning = (s.first_leaf <= leaf) & (leaf < s.end_leaf) & (s.depth > 0)
        assert spanning.sum() == 1  # itself
    # Neighbouring leaves that are not sinks share a family as before.
    for a in range(plain.num_leaves - 1):
        if not mask[a] and not mask[a + 1]:
            was = plain.structure.parent[plain.structure.leaf_nodes]
            now = s.parent[s.leaf_nodes]
            assert (was[a] == was[a + 1]) == (now[a] == now[a + 1])


def test_sinks_restart_regular_windows():
    forest = Hierarchy.regular([9], (4,), sinks=(0,))
    assert forest.num_children[:4].tolist() == [3, 0, 4, 4]
    assert Hierarchy.regular([9], (4,), sinks=1) == forest
    assert Hierarchy.regular([9], (4,), sinks=torch.arange(9) == 0) == forest


def test_a_million_leaves():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    forest = Hierarchy.regular([1_000_000], (16, 8, 8, 16))
    seconds = time.perf_counter() - start
    assert forest.num_leaves == 1_000_000
    assert forest.num_families == 62_500 + 7_813 + 977 + 62 + 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB: 1 GiB
    assert seconds < 20  # a loop over leaves would take far longer; the benchmark measures the time


def test_a_chain_deeper_than_pythons_stack():
    chain = Hierarchy.from_parents(list(range(-1, 3_000)))
    assert chain.depth == 3_000
    assert chain.show(max_rows=3).endswith("…")


def test_frozen_hashable_and_movable():
    forest = Hierarchy.flat([3])
    with pytest.raises(AttributeError, match="frozen"):
        forest.device = "cuda"
    assert {forest: 1}[Hierarchy.flat([3])] == 1
    assert forest != Hierarchy.flat([4])
    assert forest.to("cpu") is forest
    assert forest.to("meta").num_children.device.type == "meta"


def test_empty():
    for forest in (Hierarchy.flat([]), Hierarchy.from_nested([]), Hierarchy.from_parents([]), Hierarchy.collate([])):
        assert (forest.num_trees, forest.num_leaves, forest.num_nodes) == (0, 0, 0)
        assert forest.uncollate() == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Hierarchy.from_parents([1, 2, 0]), r"parent\[0\]: expected a forest, got the cycle 0 → 1 → 2 → 0"),
        (lambda: Hierarchy.from_parents([0]), r"parent\[0\]: expected a forest, got the cycle 0 → 0"),
        (lambda: Hierarchy.from_parents([[1, 2], [-1, -1]]), r"shape \(2, 2\).*exactly one parent"),
        (lambda: Hierarchy.from_parents([-1, 5]), r"parent\[1\]: expected −1 \(a root\) or a node in 0..1, got 5"),
        (lambda: Hierarchy.from_parents([-1.0, 0.0]), r"parent: expected integers, got float64 values"),
        (lambda: Hierarchy.from_nested([[3, []]]), r"nested\[0\]\[1\]: expected at least one child, got an empty list"),
        (lambda: Hierarchy.from_nested([[3, 0]]), r"nested\[0\]\[1\]: expected a positive integer, got 0"),
        (lambda: Hierarchy.from_nested([[3, "a"]]), r"nested\[0\]\[1\]: expected a positive integer, got 'a'"),
        (lambda: Hierarchy.from_nested(3), r"nested: expected a list with one entry per tree, got int"),
        (lambda: Hierarchy.from_offsets([0, 3, 3]), r"levels\[0\]\[1:3\]: expected .*, got \[3, 3\].*empty families"),
        (lambda: Hierarchy.from_offsets([0, 3, 5], [0, 3]), r"levels\[1\]\[-1\]: expected 2,.*, got 3"),
        (lambda: Hierarchy.from_offsets([1, 3]), r"starts with 0"),
        (lambda: Hierarchy.from_offsets(), r"levels: not given; expected at least one vector of offsets"),
        (lambda: Hierarchy.regular([5], (4, -1)), r"branching\[1\]: expected a positive integer, got -1"),
        (lambda: Hierarchy.regular([5], ()), r"branching: expected at least one factor, got \(\).*Hierarchy.flat"),
        (lambda: Hierarchy.regular([5], (1,), repeat_last=True), r"a last factor of 1"),
        (lambda: Hierarchy.regular([5, 0], (4,)), r"lengths\[1\]: expected at least one leaf per tree, got 0"),
        (lambda: Hierarchy.flat([[5]]), r"lengths: expected a vector, .*, got shape \(1, 1\)"),
        (
            lambda: Hierarchy.regular([5, 2], (4,), sinks=(0, 3)),
            r"sinks\[1\]: expected .* shortest has 2 leaves\), got 3",
        ),
        (lambda: Hierarchy.regular([5], (4,), sinks=-1), r"sinks: expected .*, got -1"),
        (lambda: Hierarchy.regular([5], (4,), sinks=1.5), r"sinks: expected .*, got 1.5"),
        (lambda: Hierarchy.regular([5], 4), r"branching: expected factors, such as \(16, 8\), got 4"),
        (lambda: Hierarchy.regular([5], (4,), sinks=torch.ones(4, dtype=torch.bool)), r"shape \(4,\)"),
    ],
)
def test_invalid_input(make, message):
    with pytest.raises(HsaError, match=message):
        make()


def test_a_list_that_contains_itself():
    nested = [3]
    nested.append(nested)
    with pytest.raises(HsaError, match="contains itself"):
        Hierarchy.from_nested([nested])
