"""Kernels of `cluster_keys`: permutations inside nodes, and the same families as backend "torch" for grouped keys."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from hsa import Hierarchy
from hsa import cluster_keys as without_kernels
from hsa.attention.multiscale.triton import cluster as kernels
from hsa.errors import Unsupported
from tests.forests import forests, random_inputs
from tests.interpreter import DEVICE

seeds = st.integers(0, 10**6)


def cluster_keys(k, tree):
    """Run the kernels, on a GPU if there is one."""
    return kernels.cluster_keys(k.to(DEVICE), tree.to(DEVICE)).cpu()


def grouped_keys(sizes, dim, heads=2, dtype=torch.float32, seed=0):
    """Return keys `[keys, heads, dim]` in nested groups of these sizes, from the leaves up, in random order.

    Gaps between groups shrink to a third per level.
    """
    generator = torch.Generator().manual_seed(seed)
    keys = torch.full((1, heads, dim), 2.0)
    for level, size in enumerate(reversed(sizes)):
        direction = torch.randn(len(keys), 1, heads, dim, generator=generator)
        direction = direction / direction.norm(dim=-1, keepdim=True) * 4 * 3.0**-level
        if level == len(sizes) - 1:  # keys of the smallest groups
            offset = torch.randn(len(keys), size, heads, 1, generator=generator) * 0.3
        else:
            offset = torch.arange(size)[:, None, None] + 0.1 * torch.randn(
                len(keys), size, heads, 1, generator=generator
            )
        keys = (keys[:, None] + offset * direction).flatten(0, 1)
    shuffle = torch.stack([torch.randperm(len(keys), generator=generator) for _ in range(heads)], 1)
    return keys.gather(0, shuffle[..., None].expand_as(keys)).to(dtype)


def small_programs(monkeypatch):
    """Reduce all limits, so that small trees use the kernels for large ones."""
    constants = {"SMALL": 32, "NODE": 64, "BLOCK": 48, "ROWS": 32, "SPLIT": 32, "LONGEST_SPLIT": 32, "LONG_SPLIT": 64}
    for name, value in constants.items():
        monkeypatch.setattr(kernels, name, value)


def assert_permutation_inside_trees(order, forest):
    s = forest.structure
    for begin, end in zip(s.leaf_offsets, s.leaf_offsets[1:], strict=False):
        assert (order[:, begin:end].sort(-1).values == torch.arange(begin, end)).all()


@given(forests(), seeds)
def test_order_permutes_the_keys_of_each_tree_keeps_sinks_and_sorts_families(forest, seed):
    _, k, _ = random_inputs(forest, seed, dim=16, dtype=torch.float32)
    order = cluster_keys(k, forest)
    assert order.dtype == torch.int64
    assert_permutation_inside_trees(order, forest)
    s = forest.structure
    sinks = torch.from_numpy(s.depth[s.leaf_nodes] <= 1)
    assert (order[:, sinks] == torch.arange(forest.num_leaves)[sinks]).all()
    family = torch.from_numpy(s.parent[s.leaf_nodes])
    for members in (family == f for f in family.unique()):
        assert (order[:, members].diff(dim=-1) > 0).all()


@pytest.mark.parametrize(
    ("sizes", "dim", "dtype"),
    [
        ((8, 2, 2, 2), 64, torch.float32),
        ((8, 2, 2, 2, 2, 2), 64, torch.float16),
        ((8, 2, 2, 2, 2), 16, torch.float16),
        ((10, 2, 2, 2), 80, torch.float32),
        ((5, 3, 3, 2), 64, torch.float32),
        ((20, 5), 16, torch.float32),
    ],
)
def test_same_families_as_without_kernels(sizes, dim, dtype):
    k = grouped_keys(sizes, dim, dtype=dtype, seed=1)  # a seed with gaps well above the rounding of float16
    tree = Hierarchy.regular([len(k)], sizes)
    assert torch.equal(cluster_keys(k, tree), without_kernels(k, tree).order)


def test_same_families_with_sinks():
    k = grouped_keys((8, 2, 2, 2), 16, seed=1)
    k = torch.cat([torch.zeros(1, 2, 16), k, torch.zeros(1, 2, 16)])
    tree = Hierarchy.regular([len(k)], (8, 2), repeat_last=True, sinks=(0, -1))
    order = cluster_keys(k, tree)
    assert torch.equal(order, without_kernels(k, tree).order)
    assert (order[:, 1:-1] != torch.arange(1, len(k) - 1)).any()


@pytest.mark.parametrize("sizes", [(8, 2, 2, 2, 2), (10, 4, 5)])
def test_large_nodes_are_projected_in_blocks_and_split_in_pieces(sizes, monkeypatch):
    k = grouped_keys(sizes, 16, heads=1)
    expected = without_kernels(k, Hierarchy.regular([len(k)], sizes)).order
    small_programs(monkeypatch)
    tree = Hierarchy.regular([len(k)], sizes).to(DEVICE)
    assert torch.equal(cluster_keys(k, tree), expected)
    steps = tree.cached("key steps", lambda: None).steps[::5]
    assert {kernels.MEASURE_BLOCKS, kernels.SPLIT_NODES} <= set(steps)


def test_as_good_as_without_kernels_for_keys_without_groups():
    k = torch.randn(192, 2, 16) * torch.arange(1, 17) ** -0.5
    tree = Hierarchy.regular([192], (8, 2), repeat_last=True)

    def spread_inside_families(order):
        members = torch.stack([k[order[head], head] for head in range(2)]).view(2, -1, 8, 16)
        return (members - members.mean(2, keepdim=True)).square().sum()

    order, expected = cluster_keys(k, tree), without_kernels(k, tree).order
    assert spread_inside_families(order) < 1.05 * spread_inside_families(expected)
    assert spread_inside_families(order) < 0.8 * spread_inside_families(torch.arange(192).expand(2, -1))


def test_order_does_not_depend_on_the_batch():
    lengths = [9, 100, 24, 70]
    k = torch.randn(sum(lengths), 2, 16)
    together = cluster_keys(k, Hierarchy.regular(lengths, (4, 2), repeat_last=True))
    begin = 0
    for length in lengths:
        alone = cluster_keys(k[begin : begin + length], Hierarchy.regular([length], (4, 2), repeat_last=True))
        assert torch.equal(together[:, begin : begin + length], alone + begin)
        begin += length


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter warns about NaN
@pytest.mark.parametrize("value", [1.7, torch.nan])
@pytest.mark.parametrize("large", [False, True])
def test_equal_keys_keep_their_order_and_nan_keys_are_not_lost(value, large, monkeypatch):
    if large:
        small_programs(monkeypatch)
    forest = Hierarchy.regular([150], (4, 3), repeat_last=True)
    order = cluster_keys(torch.full((150, 1, 16), value), forest)
    assert_permutation_inside_trees(order, forest)
    if value == value:
        assert torch.equal(order, torch.arange(150)[None])


def test_strides_do_not_matter():
    forest = Hierarchy.regular([80], (4, 2), repeat_last=True)
    k = torch.randn(80, 2, 16)
    expected = cluster_keys(k, forest)
    assert torch.equal(cluster_keys(k.transpose(0, 1).contiguous().transpose(0, 1), forest), expected)
    assert torch.equal(cluster_keys(k.mT.contiguous().mT, forest), expected)


def test_operator_is_registered():
    forest = Hierarchy.regular([40], (4, 2), repeat_last=True, sinks=1).to(DEVICE)
    plan = kernels._build(forest)
    arguments = (torch.randn(40, 2, 16, device=DEVICE), plan.start, plan.slots, plan.table, plan.steps, 4)
    torch.library.opcheck(torch.ops.hsa.cluster_keys, arguments)


@pytest.mark.parametrize(("dim", "dtype", "reason"), [(256, torch.float32, "1 to 128"), (16, torch.float64, "float64")])
def test_unsupported_inputs_are_refused(dim, dtype, reason):
    k, tree = torch.zeros(2, 1, dim, dtype=dtype), Hierarchy.flat([2])
    with pytest.raises(Unsupported, match=reason):
        without_kernels(k, tree, backend="triton")
    assert without_kernels(k, tree).order.tolist() == [[0, 1]]  # "auto" chooses backend "torch"
