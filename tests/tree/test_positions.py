"""Positions of nodes in their families, against a recursion over the domains."""

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
from tests.model_inputs import position_of_nodes, readable


def position(domain, member):
    """Return the position of one member of a domain."""
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


def positions_by_recursion(roots):
    """Return the position of every node, breadth-first."""
    positions, level = [None for _ in roots], list(roots)
    while level:
        families = [node for node in level if isinstance(node, Signal)]
        positions += [position(node.domain, i) for node in families for i in range(node.domain.size)]
        level = [member for node in families for member in node.members]
    return positions


@given(readable(trees=(0, 4)))
def test_positions_follow_from_the_domains(listed):
    positions = collate(listed).positions
    assert position_of_nodes(positions) == positions_by_recursion(listed)
    assert all(numbers.dtype == torch.float32 for numbers in positions.numbers.values())


@given(readable(trees=(0, 4)))
def test_rows_index_the_positions_of_all_kinds(listed):
    positions = collate(listed).positions
    assert list(positions.numbers) == [kind for kind in KINDS if kind in positions.numbers]
    rows = sum(map(len, positions.numbers.values())) + len(positions.keys)
    assert (positions.row >= 0).all()
    assert (positions.row <= rows).all()


def test_roots_and_members_of_sets_have_no_position():
    listed = [Signal.of([3, 1, 4], "text", Set(3)), Leaf(1, "text"), Signal.of([5, 9], "text")]
    row = collate(listed).positions.row
    assert row[:3].tolist() == [0, 0, 0]
    assert row[3:6].tolist() == [0, 0, 0]
    assert (row[6:] > 0).all()


def test_a_key_has_the_same_position_in_every_table():
    tables = [Table(["a", "b"]), Table(["b", "c"])]
    positions = collate([Signal.of([1, 2], "text", table) for table in tables]).positions
    assert positions.keys == ("a", "b", "c")
    assert positions.row[3] == positions.row[4]
    assert len(set(positions.row[2:].tolist())) == 3


@given(forests())
def test_sequence_positions_are_indices_in_the_family(hierarchy):
    positions = NodePositions.of_sequences(hierarchy)
    first = hierarchy.structure.first_child
    wanted = [
        None if above < 0 else ("sequence", (float(node - first[above]),))
        for node, above in enumerate(hierarchy.parent.tolist())
    ]
    assert position_of_nodes(positions) == wanted


def test_sequence_positions_agree_with_those_of_a_batch():
    listed = [Signal(Sequence(2), [Signal.of([3, 1], "text"), Leaf(4, "text")]), Signal.of([1, 5, 9], "text")]
    batch = collate(listed)
    assert position_of_nodes(NodePositions.of_sequences(batch.hierarchy)) == position_of_nodes(batch.positions)


def test_keep_selects_nodes():
    positions = NodePositions.of_sequences(Hierarchy.from_nested([[3, 2], [4]]))
    nodes = torch.tensor([1, 2, 5, 9])
    assert position_of_nodes(positions.keep(nodes)) == [position_of_nodes(positions)[node] for node in nodes.tolist()]


@pytest.mark.parametrize("before", [False, True])
def test_positions_move_with_their_batch_whether_or_not_they_were_built_before(before):
    batch = collate([Signal.of([3, 1], "text"), Signal.of([1, 5], "text", Grid((2, 1)))])
    if before:
        assert batch.positions is batch.positions
    moved = batch.to("meta").positions
    assert {t.device.type for t in (moved.row, *moved.numbers.values())} == {"meta"}
    assert moved.keys == batch.positions.keys


def test_a_batch_whose_domains_have_no_positions_moves():
    four_axes = Signal.of(torch.zeros(1, 2, 3, 5), "voxel", Grid((1, 2, 3, 5)))
    assert collate([four_axes]).to("meta").hierarchy.device.type == "meta"
