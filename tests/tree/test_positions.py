import numpy as np
import pytest
import torch
from hypothesis import given

from hsa import Hierarchy
from hsa.signals import Graph, Grid, Leaf, Sequence, Set, Signal, Table
from hsa.signals.batch import collate
from hsa.signals.coordinates import graph_features
from hsa.tree.positions import KINDS, NodePositions
from tests.forests import forests
from tests.model_inputs import place_of_nodes, readable


def place(domain, member):
    """Of one member, by what the domain says."""
    if isinstance(domain, Sequence):
        return "sequence", (float(member),)
    if isinstance(domain, Grid):
        index = [float(i) for i in np.unravel_index(member, domain.shape)]
        return "grid", tuple(index + [0.0] * (3 - len(index)))
    if isinstance(domain, Graph):
        return "graph", tuple(graph_features(domain)[member].tolist())
    if isinstance(domain, Table):
        return "table", domain.keys[member]
    return None


def places_by_recursion(roots):
    """Breadth-first, which is the order of the nodes."""
    found, level = [None for _ in roots], list(roots)
    while level:
        families = [node for node in level if isinstance(node, Signal)]
        found += [place(node.domain, i) for node in families for i in range(node.domain.size)]
        level = [member for node in families for member in node.members]
    return found


@given(readable(trees=(0, 4)))
def test_every_node_lies_where_its_domain_says(listed):
    places = collate(listed).places
    assert place_of_nodes(places) == places_by_recursion(listed)
    assert all(numbers.dtype == torch.float32 for numbers in places.numbers.values())


@given(readable(trees=(0, 4)))
def test_rows_count_the_places_of_all_kinds(listed):
    places = collate(listed).places
    assert list(places.numbers) == [kind for kind in KINDS if kind in places.numbers]
    rows = sum(map(len, places.numbers.values())) + len(places.keys)
    assert (places.row >= 0).all()
    assert (places.row <= rows).all()


def test_roots_and_members_of_sets_lie_nowhere():
    listed = [Signal.of([3, 1, 4], "text", Set(3)), Leaf(1, "text"), Signal.of([5, 9], "text")]
    row = collate(listed).places.row
    assert row[:3].tolist() == [0, 0, 0]
    assert row[3:6].tolist() == [0, 0, 0]
    assert (row[6:] > 0).all()


def test_the_same_key_is_the_same_place_in_every_table():
    tables = [Table(["a", "b"]), Table(["b", "c"])]
    places = collate([Signal.of([1, 2], "text", table) for table in tables]).places
    assert places.keys == ("a", "b", "c")
    assert places.row[3] == places.row[4]
    assert len(set(places.row[2:].tolist())) == 3


@given(forests())
def test_sequence_places_are_those_of_sequences(hierarchy):
    places = NodePositions.of_sequences(hierarchy)
    first = hierarchy.structure.first_child
    wanted = [
        None if above < 0 else ("sequence", (float(node - first[above]),))
        for node, above in enumerate(hierarchy.parent.tolist())
    ]
    assert place_of_nodes(places) == wanted


def test_sequence_places_agree_with_those_of_a_batch():
    listed = [Signal(Sequence(2), [Signal.of([3, 1], "text"), Leaf(4, "text")]), Signal.of([1, 5, 9], "text")]
    batch = collate(listed)
    assert place_of_nodes(NodePositions.of_sequences(batch.hierarchy)) == place_of_nodes(batch.places)


def test_keep_leaves_the_places_of_the_kept():
    places = NodePositions.of_sequences(Hierarchy.from_nested([[3, 2], [4]]))
    nodes = torch.tensor([1, 2, 5, 9])
    assert place_of_nodes(places.keep(nodes)) == [place_of_nodes(places)[node] for node in nodes.tolist()]


@pytest.mark.parametrize("before", [False, True])
def test_places_move_with_their_batch(before):
    batch = collate([Signal.of([3, 1], "text"), Signal.of([1, 5], "text", Grid((2, 1)))])
    if before:
        assert batch.places is batch.places
    moved = batch.to("meta").places
    assert {t.device.type for t in (moved.row, *moved.numbers.values())} == {"meta"}
    assert moved.keys == batch.places.keys


def test_batches_without_places_move_all_the_same():
    four_axes = Signal.of(torch.zeros(1, 2, 3, 5), "voxel", Grid((1, 2, 3, 5)))
    assert collate([four_axes]).to("meta").hierarchy.device.type == "meta"
