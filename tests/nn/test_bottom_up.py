import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa import Hierarchy
from hsa.nn.bottom_up import fold
from hsa.nn.grouped_linear import Groups
from hsa.signals import Leaf, Signal
from hsa.signals.batch import collate
from tests.forests import forests
from tests.model_inputs import MODALITIES, encoder, readable


def by_recursion(model, batch):
    """Encode family by family: apply all layers, then take the mean of the members."""
    tree, node_positions = batch.hierarchy, batch.positions
    x = model.embedding(batch.values, batch.leaves, tree.num_leaves)
    features = None if model.features is None else model.features(node_positions)
    if model.input_position is not None:
        x = x + model.input_position(features, node_positions.row[tree.tensor("leaf_nodes")])[:, 0]
    s = tree.structure

    def vector(node):
        if s.num_children[node] == 0:
            return x[s.first_leaf[node]]
        members = list(range(s.first_child[node], s.first_child[node] + s.num_children[node]))
        rows = torch.stack([vector(member) for member in members])
        groups = Groups((0,) * (model.num_groups - 1) + (len(members),), None, None)
        for i, layer in enumerate(model.layers):
            positions = None
            if len(model.positions):
                row = torch.cat([torch.zeros(1, dtype=torch.int64), node_positions.row[members]])
                positions = model.positions[i](features, row)
            rows = layer(rows, Hierarchy.flat([len(members)]), groups, positions)
        return rows.mean(0)

    return torch.stack([vector(root) for root in range(tree.num_trees)])


@pytest.mark.parametrize("changes", [{}, {"position_input": True}, {"position_width": 0, "layers": 1}])
@pytest.mark.parametrize("names", [("text",), tuple(MODALITIES)])
@settings(max_examples=8)
@given(st.data())
def test_bottom_up_is_the_recursion_over_the_tree(names, changes, data):
    batch = collate(data.draw(readable(names)))
    model = encoder("bottom-up", {name: MODALITIES[name] for name in names}, **changes)
    x, forest = model(batch)
    assert forest.num_nodes == forest.num_leaves == forest.num_trees == batch.hierarchy.num_trees
    torch.testing.assert_close(x, by_recursion(model, batch), rtol=0, atol=1e-10)


@settings(max_examples=25)
@given(forests())
def test_every_family_is_folded_once_after_its_members(hierarchy):
    """Sum leaves of value 1: each root gets its number of leaves, and steps are those of the parents' heights."""
    heights = []

    def add(members, step):
        heights.append(step.height)
        parents = torch.from_numpy(height == step.height).nonzero()[:, 0]
        assert torch.equal(hierarchy.parent[step.nodes].unique(), parents)
        return torch.segment_reduce(members, "sum", lengths=step.sizes)

    height = hierarchy.structure.height
    x, roots = fold(torch.ones(hierarchy.num_leaves, 2), hierarchy, add)
    assert torch.equal(x[:, 0], torch.tensor(hierarchy.lengths, dtype=torch.float32))
    assert heights == list(range(1, hierarchy.depth + 1))
    assert (roots.num_trees, roots.depth) == (hierarchy.num_trees, 0)


def test_fold_of_an_empty_forest():
    x, roots = fold(torch.empty(0, 3), Hierarchy.collate([]), lambda members, step: members)
    assert (x.shape, roots.num_trees) == ((0, 3), 0)


def test_a_tree_of_one_leaf_keeps_its_embedding():
    model, batch = encoder("bottom-up"), collate([Leaf(3, "text"), Signal.of([1, 5], "text")])
    embedded = model.embedding(batch.values, batch.leaves, 3)
    torch.testing.assert_close(model(batch)[0][0], embedded[0])


def test_gradients_reach_every_leaf():
    model, batch = encoder("bottom-up"), collate([Signal.of([0.5, 1.5, 2.5], "number"), Signal.of([3, 1], "text")])
    model(batch)[0].square().sum().backward()
    used = model.embedding.tables["text"].weight.grad.any(1).nonzero()[:, 0]
    assert used.tolist() == [1, 3]
