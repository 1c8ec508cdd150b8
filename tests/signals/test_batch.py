import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa import Hierarchy
from hsa.errors import InvalidInput
from hsa.signals import Grid, Leaf, Sequence, Set, Signal, Table
from hsa.signals.batch import Batch, collate, uncollate
from tests.model_inputs import position_of_nodes, readable
from tests.signals.random_signals import leaves, signals

batches = st.lists(signals | leaves, max_size=4)


def depth_first(node, path=""):
    """Return every leaf with its path, by recursion over `members`."""
    if isinstance(node, Leaf):
        yield path, node
    else:
        for i, member in enumerate(node.members):
            yield from depth_first(member, path + node.domain.step(i))


def parents(roots):
    """Return the parent vector of the forest and the domain of every internal node, by depth-first recursion."""
    parent, domain = [], []

    def add(node, above):
        parent.append(above)
        domain.append(node.domain if isinstance(node, Signal) else None)
        here = len(parent) - 1
        for member in node.members if isinstance(node, Signal) else ():
            add(member, here)

    for root in roots:
        add(root, -1)
    return parent, domain


@given(batches)
def test_uncollate_is_the_inverse(listed):
    before = copy.deepcopy(listed)
    assert uncollate(collate(listed)) == before
    assert listed == before


@given(batches)
def test_the_hierarchy_and_the_domains_are_those_of_the_recursion(listed):
    batch = collate(listed)
    parent, domain = parents(listed)
    wanted = Hierarchy.from_parents(torch.tensor(parent, dtype=torch.int64))
    assert batch.hierarchy == wanted
    assert batch.hierarchy.num_trees == len(listed)
    assert batch.hierarchy.leaf_ids.tolist() == list(range(wanted.num_leaves))
    assert list(batch.domains) == [domain[node] for node in wanted.node_ids.tolist() if domain[node] is not None]


@given(batches)
def test_values_and_leaves_are_those_of_the_recursion(listed):
    batch = collate(listed)
    wanted = [pair for i, root in enumerate(listed) for pair in depth_first(root, f"signals[{i}]")]
    assert [batch.path(leaf) for leaf in range(len(wanted))] == [path for path, _ in wanted]
    assert list(batch.values) == list(dict.fromkeys(leaf.modality for _, leaf in wanted))
    assert sorted(i for numbers in batch.leaves.values() for i in numbers.tolist()) == list(range(len(wanted)))
    for name, values in batch.values.items():
        numbers = batch.leaves[name].tolist()
        assert numbers == sorted(numbers)
        assert [Leaf(value, name) for value in values] == [wanted[i][1] for i in numbers]


@given(batches)
def test_values_are_a_list_only_where_they_cannot_be_a_tensor(listed):
    python = {int: torch.int64, float: torch.float64, bool: torch.bool}
    for values in collate(listed).values.values():
        if isinstance(values, list):
            kinds = {(v.dtype, v.shape) if isinstance(v, torch.Tensor) else (python.get(type(v)), ()) for v in values}
            assert len(kinds) > 1 or kinds == {(None, ())}  # several kinds, or strings


def website():
    page = Signal(Set(2), [Signal.of(["a", "b"], "text"), Signal.of(torch.ones(2, 3, 5), "patch", Grid((2, 3)))])
    return [page, Signal(Table(["title", "image"]), [Leaf("c", "text"), Signal.of(torch.zeros(7, 5), "patch")])]


def test_values_per_modality():
    batch = collate(website())
    assert batch.values["text"] == ["a", "b", "c"]
    assert torch.equal(batch.values["patch"], torch.cat([torch.ones(6, 5), torch.zeros(7, 5)]))
    assert batch.leaves["text"].tolist() == [0, 1, 8]
    assert batch.leaves["patch"].tolist() == [2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15]
    assert batch.path(6) == "signals[0][1][1, 1]"
    assert repr(batch) == f"Batch({batch.hierarchy!r}, text: 3 strings, patch: float32[13, 5])"


def test_a_sparse_modality_stacks_single_leaves_with_families():
    listed = [Leaf(3, "token"), Signal.of([1, 4], "token"), Signal(Sequence(2), [Leaf(1, "token"), Leaf(0.5, "x")])]
    assert collate(listed).values["token"].tolist() == [3, 1, 4, 1]


def test_patches_of_unequal_shape_are_a_list():
    listed = [Signal.of(torch.ones(2, 3), "patch"), Signal.of(torch.ones(2, 5), "patch")]
    assert [tuple(value.shape) for value in collate(listed).values["patch"]] == [(3,), (3,), (5,), (5,)]
    assert uncollate(collate(listed)) == listed


def test_declared_modalities():
    assert list(collate(website(), ["patch", "audio", "text"]).values) == ["patch", "text"]
    with pytest.raises(InvalidInput) as caught:
        collate(website()[::-1], ["text", "audio"])
    assert str(caught.value) == (
        "signals[0].image[0]: expected one of ('text', 'audio'), got modality 'patch'. "
        "Add 'patch' to modalities, or leave these leaves out"
    )


def test_bad_arguments():
    with pytest.raises(InvalidInput, match=r"signals\[1\]: expected a Signal or a Leaf, got a value of type list"):
        collate([Leaf(1, "x"), [1]])
    with pytest.raises(InvalidInput, match=r"leaf: expected a leaf in 0\.\.15, got 16"):
        collate(website()).path(16)


def test_an_empty_batch():
    batch = collate([])
    assert (batch.hierarchy.num_trees, batch.values, batch.domains) == (0, {}, ())
    assert uncollate(batch) == []


def test_deep_chain_and_long_stack():
    deep = Signal.of(range(100_003), "token")
    for _ in range(2003):
        deep = Signal(Sequence(1), [deep])
    batch = collate([deep])
    assert batch.hierarchy.depth == 2004
    assert torch.equal(batch.values["token"], torch.arange(100_003))
    assert uncollate(batch) == [deep]
    assert batch.path(5) == "signals[0]" + "[0]" * 2003 + "[5]"


def test_gradients_flow_into_the_values():
    weight = torch.ones(3, 5, requires_grad=True)
    batch = collate([Signal.of(weight * 2, "vector"), Signal.of(torch.zeros(2, 5), "vector")])
    batch.values["vector"].sum().backward()
    assert torch.equal(weight.grad, torch.full((3, 5), 2.0))


def test_to_moves_every_tensor():
    batch = collate([*website(), Leaf(torch.zeros(2), "odd"), Leaf(torch.zeros(3), "odd"), Leaf("x", "odd")])
    moved = batch.to("meta")
    assert {t.device.type for t in (*moved.leaves.values(), moved.values["patch"], *moved.values["odd"][:2])} == {
        "meta"
    }
    assert moved.values["odd"][2] == "x"
    assert moved.hierarchy.device.type == "meta"
    assert moved.hierarchy == batch.hierarchy
    assert moved.domains == batch.domains
    assert batch.values["patch"].device.type == "cpu"


@pytest.mark.gpu
def test_uncollate_from_another_device():
    assert uncollate(collate(website()).to("cuda")) == website()


def assert_same_batch(actual, wanted):
    """Check all but the order of the modalities; a list of values may be a tensor in the other batch."""
    assert actual.hierarchy == wanted.hierarchy
    assert actual.domains == wanted.domains
    assert set(actual.distinct_domains) == set(wanted.domains)
    assert actual.leaves.keys() == actual.values.keys() == wanted.values.keys()
    for name, numbers in wanted.leaves.items():
        assert torch.equal(actual.leaves[name], numbers)
    assert position_of_nodes(actual.positions) == position_of_nodes(wanted.positions)


@given(batches, st.data())
def test_a_selection_is_the_batch_of_the_selected_signals(listed, data):
    """Trees may be selected in any order, repeatedly, or not at all."""
    chosen = data.draw(st.lists(st.integers(0, len(listed) - 1), max_size=5)) if listed else []
    whole = collate(listed)
    selected = whole.select(chosen)
    assert uncollate(selected) == [listed[i] for i in chosen]
    assert_same_batch(selected, collate([listed[i] for i in chosen]))
    assert uncollate(whole) == listed


@given(batches, st.data())
def test_selections_of_selections(listed, data):
    numbers = data.draw(st.permutations(range(len(listed))))
    back = [numbers.index(i) for i in range(len(listed))]
    assert uncollate(collate(listed).select(numbers).select(back)) == listed


@given(readable(trees=(0, 4)), st.data())
def test_a_selection_of_uniform_values_has_the_tensors_of_the_selected_signals(listed, data):
    chosen = data.draw(st.lists(st.integers(0, len(listed) - 1), max_size=5)) if listed else []
    selected, wanted = collate(listed).select(chosen), collate([listed[i] for i in chosen])
    assert selected.values.keys() == wanted.values.keys()
    for name, values in wanted.values.items():
        assert torch.equal(selected.values[name], values)


@pytest.mark.parametrize("trees", [np.array([1, 0]), torch.tensor([1, 0]), (1, 0), range(1, -1, -1), np.uint8([1, 0])])
def test_a_selection_takes_any_integers(trees):
    assert uncollate(collate(website()).select(trees)) == website()[::-1]


@pytest.mark.parametrize(
    ("trees", "message"),
    [
        ([0, 2], r"trees\[1\]: expected a tree in 0\.\.1, got 2"),
        ([-1], r"trees\[0\]: expected a tree in 0\.\.1, got -1"),
        ([True, False], r"trees: expected integers, got bool values"),
        ([0.5], r"trees: expected integers, got float64 values"),
    ],
)
def test_selections_of_trees_that_do_not_exist(trees, message):
    with pytest.raises(InvalidInput, match=message):
        collate(website()).select(trees)


@given(st.lists(batches, max_size=3))
def test_joined_batches_are_the_batch_of_all_their_signals(lists):
    together = [signal for listed in lists for signal in listed]
    joined = Batch.join(collate(listed) for listed in lists)
    assert uncollate(joined) == together
    assert_same_batch(joined, collate(together))
    wanted = collate(together).values
    assert all(isinstance(joined.values[name], list) == isinstance(values, list) for name, values in wanted.items())


def test_joined_batches_stay_on_their_device():
    joined = Batch.join([collate(website()).to("meta")] * 2)
    assert joined.hierarchy.device.type == joined.leaves["text"].device.type == "meta"
