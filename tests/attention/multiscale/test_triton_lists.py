"""Kernels of pyramids and of attention over lists, against PyTorch in float64."""

import pytest

pytest.importorskip("triton")

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa import Hierarchy, Queries, Selection, cluster_keys, multiscale_attention, select
from hsa.attention.kernels.levels import levels
from hsa.attention.multiscale.pyramid import in_order
from hsa.attention.multiscale.triton import attend as kernels
from hsa.attention.multiscale.triton import lists, pyramid
from hsa.attention.multiscale.visibility import key_limit
from hsa.attention.rounds import rooted
from tests.forests import forests, windows
from tests.interpreter import DEVICE, quick_interpreter  # noqa: F401

seeds = st.integers(0, 10**6)
planned = forests().filter(lambda forest: levels(rooted(forest)[0]) is not None)
small = windows().filter(lambda forest: forest.num_leaves <= 16)
few = settings(max_examples=5)
fewer = settings(max_examples=4)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


def close(result, expected, tolerance=2e-5):
    result, expected = result.detach(), expected.detach()
    assert result.shape == expected.shape
    assert result.isfinite().all()
    if result.numel():
        assert (result.double() - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))


def inputs(shapes, seed, dtype=torch.float32):
    """Return tensors for the kernels, and copies in float64."""
    generator = torch.Generator().manual_seed(seed)
    ours = [torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_() for shape in shapes]
    return ours, [x.detach().double().requires_grad_() for x in ours]


def means(x, plan, order=None):
    """Return the pyramid `[heads, rows, dim]`, row by row."""
    x = x if order is None else in_order(x, order)
    ranges = zip(plan.first_leaf, plan.first_leaf + plan.leaf_count, strict=True)
    return torch.stack([x[begin:end].mean(0) for begin, end in ranges], 1)


def check_pyramid(forest, seed, *, heads=2, dim=16, moved=False, dtype=torch.float32):
    forest = rooted(forest)[0].to(DEVICE)
    plan = levels(forest)
    order = None
    if moved:
        order = torch.stack([torch.randperm(forest.num_leaves) for _ in range(heads)]).to(DEVICE)
    (x,), (precise,) = inputs([(forest.num_leaves, heads, dim)], seed, dtype)
    result, expected = pyramid.pyramid(x, plan, order), means(precise, plan, order)
    assert result.dtype == dtype
    close(result, expected, TOLERANCE[dtype])
    weight = torch.randn_like(expected)
    (d_x,) = torch.autograd.grad(result, x, weight.to(dtype))
    (d_precise,) = torch.autograd.grad(expected, precise, weight)
    close(d_x, d_precise, TOLERANCE[dtype])


@few
@given(planned, seeds, st.booleans(), st.sampled_from([2, 256]))
def test_pyramid_of_any_forest(forest, seed, moved, subtree):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyramid, "SUBTREE", subtree)  # many stages, or one
        check_pyramid(forest, seed, moved=moved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dim", [16, 80])
def test_pyramid_of_a_deep_tree(monkeypatch, dim, dtype):
    monkeypatch.setattr(pyramid, "SUBTREE", 4)
    forest = Hierarchy.regular([300, 5], (8, 2), repeat_last=True, sinks=1)
    assert len(pyramid._build(levels(forest)).stages) > 4
    check_pyramid(forest, 1, dim=dim, moved=True, dtype=dtype)


def test_pyramid_of_a_wide_family_and_of_strided_inputs():
    check_pyramid(Hierarchy.flat([150, 1]), 2)
    forest = Hierarchy.regular([40], (4, 4)).to(DEVICE)
    plan = levels(forest)
    x = torch.randn(2, 16, 40, device=DEVICE)
    close(pyramid.pyramid(x.permute(2, 0, 1), plan), means(x.permute(2, 0, 1).double(), plan))
    halves = torch.randn(40, 4, 16, device=DEVICE)[:, ::2]
    close(pyramid.pyramid(halves, plan), means(halves.double(), plan))


def test_long_trees_take_few_launches():
    for length, branching in ((32768, (8, 2)), (32768, (16, 8, 8, 16)), (131072, (8, 2))):
        plan = levels(Hierarchy.regular([length], branching, repeat_last=len(branching) == 2))
        assert len(pyramid._climb(plan).stages) <= 3 * 4


def attend(q, k, v, forest, selection, *, causal=False, clusters=None, include_self=True, pooled_bias=None):
    """Run multiscale attention with the kernels."""
    queries = selection.queries
    limit = key_limit(queries, forest, causal)
    rooted_forest, _ = rooted(forest)
    plan = levels(rooted_forest)
    row = torch.from_numpy(plan.row_of_node).to(DEVICE)
    order = None if clusters is None else clusters.order
    return kernels.attend_lists(
        q,
        pyramid.pyramid(k, plan, order),
        pyramid.pyramid(v, plan, order),
        torch.where(selection.families < 0, -1, row[selection.families]).int(),
        queries.offsets,
        queries.tree,
        plan,
        limit=limit,
        leaves=queries.leaves,
        include_self=include_self,
        pooled_bias=pooled_bias,
        scale=q.shape[-1] ** -0.5,
        most_queries=int(np.diff(queries.host_offsets).max(initial=0)),
    )


def gradients(out, inputs, weight):
    """Return gradients; zeros for inputs that the output does not depend on."""
    if not out.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    return torch.autograd.grad(out, inputs, weight, allow_unused=True, materialize_grads=True)


def check(
    forest,
    seed,
    selection,
    *,
    queries=None,
    pooled_bias="learned",
    dtype=torch.float32,
    heads=(2, 1),
    dims=(16, 32),
    **options,
):
    """Compare values and gradients with backend "torch"; `selection` is a function of q and k, from `selecting`."""
    n = forest.num_leaves
    num_queries = n if queries is None else queries.num_queries
    shapes = [(num_queries, heads[0], dims[0]), (n, heads[1], dims[0]), (n, heads[1], dims[1]), (heads[0],)]
    ours, precise = inputs(shapes, seed, dtype)
    selected, clusters = selection(*ours[:2])
    bias, precise_bias = ours.pop(), precise.pop()
    if isinstance(pooled_bias, str):
        ours, precise = [*ours, bias], [*precise, precise_bias]
    else:
        bias = precise_bias = pooled_bias
    out = attend(*ours[:3], forest, selected, clusters=clusters, pooled_bias=bias, **options)
    options = {**options, "clusters": clusters, "pooled_bias": 0.0 if bias is None else precise_bias}
    expected = multiscale_attention(*precise[:3], forest, selection=selected, backend="torch", **options)
    assert out.dtype == dtype
    close(out, expected, TOLERANCE[dtype])
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    for a, b in zip(gradients(out, ours, weight), gradients(expected, precise, weight.double()), strict=True):
        close(a, b, TOLERANCE[dtype])
    return out


def selecting(forest, *, queries=None, clustered=False, **options):
    """Return a function of q and k that returns a selection and the clusters of the keys."""

    def selected(q, k):
        q, k = q.detach(), k.detach()
        order = cluster_keys(k, forest) if clustered else None
        return select(q, k, forest, queries=queries, clusters=order, **options), order

    return selected


@few
@given(planned, seeds, st.integers(0, 2), st.integers(0, 2), st.booleans(), st.booleans())
def test_any_forest(forest, seed, near, top_k, causal, include_self):
    forest = forest.to(DEVICE)
    options = {"near": near, "top_k": top_k, "causal": causal}
    check(forest, seed, selecting(forest, **options), causal=causal, include_self=include_self)


@fewer
@given(small, seeds, st.integers(1, 3), st.integers(1, 5))
def test_clusters(forest, seed, top_k, size):
    forest = forest.to(DEVICE)
    queries = Queries.windows(forest, size)
    check(forest, seed, selecting(forest, queries=queries, clustered=True, top_k=top_k))


@fewer
@given(small, seeds, st.booleans(), st.data())
def test_other_queries(forest, seed, limited, data):
    forest = forest.to(DEVICE)
    sizes = [data.draw(st.integers(0, 4)) for _ in range(forest.num_trees + 1)]
    tree = [*range(forest.num_trees), 0]
    visible = [data.draw(st.integers(0, forest.lengths[t])) for t, n in zip(tree, sizes, strict=True) for _ in range(n)]
    queries = Queries(
        torch.tensor([0, *sizes]).cumsum(0).to(DEVICE),
        torch.tensor(tree).to(DEVICE),
        visible=torch.tensor(visible, dtype=torch.long).to(DEVICE) if limited else None,
    )
    options = {"queries": queries, "top_k": 0 if limited else 2, "causal": limited}
    check(forest, seed, selecting(forest, **options), queries=queries, causal=limited)


@pytest.mark.parametrize("bias", [None, -1.5, -torch.inf])
def test_pooled_bias(bias):
    forest = Hierarchy.collate([Hierarchy.regular([11], (3, 2)), Hierarchy.from_nested([[4, [2, 2]]], sinks=(0,))])
    forest = forest.to(DEVICE)
    bias = None if bias is None else torch.tensor([bias], device=DEVICE)
    check(forest, 3, selecting(forest, near=1), pooled_bias=bias)


def test_pooled_bias_per_head():
    forest = Hierarchy.regular([11], (3, 2)).to(DEVICE)
    per_head = torch.tensor([-torch.inf, 1.0], device=DEVICE)
    check(forest, 4, selecting(forest, top_k=1), pooled_bias=per_head)


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("dims", [(16, 16), (80, 24)])
def test_half_precision(dims, size):
    forest = Hierarchy.regular([11, 3], (3, 2), sinks=1).to(DEVICE)
    queries = Queries.windows(forest, size)
    check(forest, 5, selecting(forest, queries=queries, top_k=2), dtype=torch.float16, dims=dims, heads=(4, 2))


def test_large_groups_and_wide_families():
    """More queries than a block, more children than a tile, more selected families than threads."""
    wide = Hierarchy.from_nested([[50, [3, 40], *[1] * 30]]).to(DEVICE)
    check(wide, 6, selecting(wide, queries=Queries.windows(wide, 100), top_k=2))
    many = Hierarchy.regular([90], (2, 3, 20)).to(DEVICE)
    check(many, 7, selecting(many, queries=Queries.windows(many, 45), top_k=40))


def test_mixed_families_selected_inside_each_other():
    forest = Hierarchy.from_parents([-1, 0, 0, 1, 1, 1, 3, 3, 3, 6, 6, 2, 2, 9, 9]).to(DEVICE)
    (leaves,) = {len(x) for x in [forest.structure.leaf_nodes]}
    parents = np.unique(forest.structure.parent[forest.structure.leaf_nodes])
    inner = torch.tensor(parents[forest.structure.parent[parents] >= 0])
    generator = torch.Generator().manual_seed(0)
    for width in (1, 3, len(inner) + 1):  # with repeated or missing families, in any order
        picks = inner[torch.randint(len(inner), (3, 2, width), generator=generator)]
        picks = torch.where(torch.rand(picks.shape, generator=generator) < 0.2, -1, picks).to(DEVICE)
        offsets = torch.tensor([0, 1, leaves - 2, leaves]).to(DEVICE)
        queries = Queries(
            offsets, torch.zeros(3, dtype=torch.long, device=DEVICE), leaves=torch.arange(leaves).to(DEVICE)
        )
        selection = Selection(picks, queries)
        check(forest, width, lambda q, k, selection=selection: (selection, None), include_self=width % 2 == 0)


def test_lists_in_batches_of_groups(monkeypatch):
    forest = Hierarchy.regular([30], (4, 3)).to(DEVICE)
    whole = check(forest, 8, selecting(forest, near=1))
    monkeypatch.setattr(lists, "SCRATCH", 100)
    assert torch.equal(check(forest, 8, selecting(forest, near=1)), whole)


def test_most_entries_is_a_bound():
    forest = Hierarchy.from_nested([[3, [2, 40], 5], [[[7], 1], 2]])
    q, k = torch.randn(forest.num_leaves, 2, 4), torch.randn(forest.num_leaves, 2, 4)
    for near in range(3):
        selection = select(q, k, forest, near=near)
        longest = int(selection.partition(forest).lengths.max())
        assert longest <= lists.rows_of(levels(rooted(forest)[0])).most_entries(selection.families.shape[2])


def test_queries_that_see_no_key_get_zero():
    single = Hierarchy.from_nested([[[1]], [2]]).to(DEVICE)
    out = check(single, 9, selecting(single), include_self=False)
    assert out[0].abs().max() == 0
    assert out[1].abs().max() > 0
    empty = Queries(torch.tensor([0, 0]).to(DEVICE), torch.tensor([0]).to(DEVICE))
    selection = Selection(torch.full((1, 1, 1), -1, device=DEVICE), empty)
    assert check(single, 9, lambda q, k: (selection, None), queries=empty).shape == (0, 2, 32)


def test_custom_operators(monkeypatch):
    calls = {}

    def note(operator, arguments):
        calls[operator, tuple(x is None for x in arguments)] = arguments

    for module in (pyramid, kernels):
        operator = module.operator
        monkeypatch.setattr(module, "operator", lambda *args, of=operator: note(of, args) or of(*args))
    forest = Hierarchy.regular([5], (2, 2)).to(DEVICE)
    check(forest, 0, selecting(forest, causal=True), causal=True)
    check(forest, 0, selecting(forest, clustered=True, top_k=1))
    assert len(calls) == 4  # with and without an order, with and without a limit
    for (operator, _), arguments in calls.items():
        arguments = [
            x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, torch.Tensor) else x for x in arguments
        ]
        torch.library.opcheck(operator.traced, tuple(arguments))
