"""`cluster_keys`: permutations inside trees, the same on every run, with similar keys together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa import Hierarchy, cluster_keys
from tests.forests import forests, random_inputs

seeds = st.integers(0, 10**6)


@given(forests(), seeds)
def test_order_permutes_the_keys_of_each_tree_and_keeps_sinks(forest, seed):
    _, k, _ = random_inputs(forest, seed)
    order = cluster_keys(k, forest).order
    assert order.shape == (2, forest.num_leaves)
    s = forest.structure
    for begin, end in zip(s.leaf_offsets, s.leaf_offsets[1:], strict=False):
        assert (order[:, begin:end].sort(-1).values == torch.arange(begin, end)).all()
    for leaf, node in enumerate(s.leaf_nodes):
        if s.depth[node] <= 1:
            assert (order[:, leaf] == leaf).all()


def principal_split(keys):
    """Sort keys along their first principal direction, by an eigendecomposition in float64."""
    centred = keys - keys.mean(0)
    direction = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -1]
    coordinate = centred @ direction
    coordinate = coordinate * coordinate[coordinate.abs().argmax()].sign()
    return coordinate.argsort(stable=True)


@given(st.integers(0, 200), st.sampled_from([(16, 5), (64, 5), (32, 3)]))
def test_a_binary_level_splits_at_the_median_of_the_first_principal_direction(seed, shape):
    number, dim = shape
    generator = torch.Generator().manual_seed(seed)
    spread = torch.tensor([3.0, *[0.5] * (dim - 1)], dtype=torch.float64)  # one direction stands out
    rotation = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64)).Q
    k = (torch.randn(number, dim, generator=generator, dtype=torch.float64) * spread) @ rotation + 7
    tree = Hierarchy.regular([number], (number // 2,))
    order = cluster_keys(k[:, None], tree).order[0]
    expected = principal_split(k)
    assert set(order[: number // 2].tolist()) == set(expected[: number // 2].tolist())


def test_similar_keys_share_a_group():
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(8, 16, generator=generator) * 5
    label = torch.randperm(128, generator=generator) % 8
    k = (centres[label] + 0.1 * torch.randn(128, 16, generator=generator))[:, None]
    tree = Hierarchy.regular([128], (16, 2), repeat_last=True)
    order = cluster_keys(k, tree).order[0]
    groups = label[order].view(8, 16)
    assert (groups == groups[:, :1]).all()


def test_order_is_deterministic_and_per_head():
    forest = Hierarchy.regular([100], (4, 2), repeat_last=True)
    k = torch.randn(100, 3, 8)
    first, second = cluster_keys(k, forest).order, cluster_keys(k, forest).order
    assert torch.equal(first, second)
    alone = cluster_keys(k[:, 1:2], forest).order
    assert torch.equal(alone[0], first[1])
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_keys_that_are_not_finite_are_permuted_too(bad):
    """Nodes of unequal sizes are sorted together, with padding at the end."""
    forest = Hierarchy.regular([7, 5], (2, 2), repeat_last=True)
    _, k, _ = random_inputs(forest, 0)
    k[9] = bad
    order = cluster_keys(k, forest).order
    assert (order[:, 7:].sort(-1).values == torch.arange(7, 12)).all()
    assert torch.equal(order[:, :7], cluster_keys(k[:7], Hierarchy.regular([7], (2, 2), repeat_last=True)).order)


def test_equal_keys_keep_their_order():
    forest = Hierarchy.regular([40], (4, 2), repeat_last=True)
    assert torch.equal(cluster_keys(torch.ones(40, 2, 8), forest).order, torch.arange(40).expand(2, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_dtype(dtype):
    forest = Hierarchy.regular([40], (4, 2), repeat_last=True)
    order = cluster_keys(torch.randn(40, 2, 8).to(dtype), forest).order
    assert (order.sort(-1).values == torch.arange(40)).all()


def test_operations_are_counted():
    small, large = (cluster_keys(torch.randn(n, 2, 8), Hierarchy.regular([n], (4, 2))) for n in (32, 64))
    assert 0 < small.operations < large.operations
