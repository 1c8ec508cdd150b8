"""Kernels of `select`: the same families as the PyTorch search, for each group and head."""

import pytest

pytest.importorskip("triton")

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa import Hierarchy, Queries, cluster_keys, select
from hsa.attention.kernels.levels import levels
from hsa.attention.multiscale import search as torch_search
from hsa.attention.multiscale.call import SelectCall
from hsa.attention.multiscale.leaf_families import leaf_families
from hsa.attention.multiscale.neighbourhood import empty_neighbourhood, neighbourhood
from hsa.attention.multiscale.pyramid import in_order
from hsa.attention.multiscale.triton import beam as beam_search
from hsa.attention.multiscale.triton import exact as exact_search
from hsa.attention.multiscale.triton import ranking
from hsa.attention.multiscale.triton.search import search_families
from hsa.attention.multiscale.visibility import key_limit
from hsa.attention.multiscale.why_not import why_not_triton_search
from hsa.attention.rounds import rooted
from tests.forests import forests, random_inputs, windows
from tests.interpreter import DEVICE, quick_interpreter  # noqa: F401

few = settings(max_examples=6, derandomize=True)  # near-ties may differ, so the examples are fixed
seeds = st.integers(0, 10**6)


def pooled(k, plan, clusters=None):
    """Return the means over the leaves below every row, `[kv_heads, rows, dim]`."""
    k = k if clusters is None else in_order(k, clusters.order)
    sums = torch.cat([torch.zeros_like(k[:1], dtype=torch.float64), k.double().cumsum(0)])
    first, count = (torch.as_tensor(x) for x in (plan.first_leaf, plan.leaf_count))
    return ((sums[first + count] - sums[first]) / count[:, None, None]).to(k.dtype).transpose(0, 1).contiguous()


def search(q, k, forest, *, queries=None, near=0, top_k=1, beam="exact", clusters=None, causal=False):
    """Return the nodes that the kernels select, `[groups, heads, top_k]`, and the number of products."""
    if queries is None:
        queries = Queries.windows(forest, 1) if causal else Queries.families(forest)
    forest, _ = rooted(forest)
    limit = key_limit(queries, forest, causal)
    always = neighbourhood(queries, forest, near, limit) if clusters is None else empty_neighbourhood(queries, forest)
    plan, tables = levels(forest), ranking.search_tables(forest)
    ranges = [None if always.bounds is None else torch.as_tensor(x).to(DEVICE) for x in (always.low, always.high)]
    groups = (queries.offsets.to(DEVICE), queries.tree.to(DEVICE), *ranges)
    options = {
        "limit": None if limit is None else limit.to(DEVICE),
        "scale": q.shape[-1] ** -0.5,
        "top_k": top_k,
        "most_queries": int(np.diff(queries.host_offsets).max(initial=0)),
    }
    keys = pooled(k, plan, clusters).to(DEVICE)
    tables = on_device(tables)
    width = None if beam == "exact" else beam
    rows, scored = search_families(q.to(DEVICE), keys, tables, *groups, **options, width=width)
    rows = rows.cpu()
    nodes = torch.as_tensor(plan.node)[rows.long()].where(rows >= 0, -1)
    lowest = torch.as_tensor(plan.row_of_node)[nodes].where(nodes >= 0, -1)
    assert torch.equal(rows.long(), lowest)  # other kernels expect the lowest row of a node
    return nodes, int(scored.sum())


def on_device(tables):
    moved = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in vars(tables).items()}
    return ranking.SearchTables(**moved)


def expected(q, k, forest, *, top_k, clusters=None, **options):
    """Return the result of the PyTorch search of each group and head alone: others must not change a selection."""
    selected, scored = [], 0
    widest = np.diff(leaf_families(rooted(forest)[0]).tree_offsets).max()
    number = min(top_k, widest)  # no tree has more families to select
    repeat = q.shape[1] // k.shape[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_search, "TILE", 1)
        for head in range(q.shape[1]):
            kv = slice(head // repeat, head // repeat + 1)
            order = clusters and type(clusters)(clusters.order[kv], 0, clusters.made_for)
            selection = select(q[:, head : head + 1], k[:, kv], forest, top_k=top_k, clusters=order, **options)
            nodes = selection.families[:, 0]
            best = nodes[:, -number:] if selection.scored else nodes[:, :0]
            selected.append(F.pad(best, (0, top_k - best.shape[1]), value=-1))
            scored += selection.scored
    return torch.stack(selected, 1), scored


def check(q, k, forest, **options):
    nodes, scored = search(q, k, forest, **options)
    right_nodes, right_scored = expected(q, k, forest, **options)
    assert nodes.shape == right_nodes.shape
    assert torch.equal(nodes.sort(-1).values, right_nodes.sort(-1).values)
    assert scored == right_scored


def inputs(forest, seed, **options):
    return random_inputs(forest, seed, dtype=torch.float32, **{"heads": 2, "kv_heads": 1, "dim": 5, **options})[:2]


beams = st.sampled_from(["exact", "narrow", "wide"])


def widths(beam, top_k):
    return {"exact": "exact", "narrow": top_k, "wide": 2 * top_k + 1}[beam]


@few
@given(forests(), seeds, st.integers(0, 1), st.integers(1, 3), beams, st.booleans())
def test_any_forest(forest, seed, near, top_k, beam, causal):
    q, k = inputs(forest, seed)
    check(q, k, forest, near=near, top_k=top_k, beam=widths(beam, top_k), causal=causal)


@few
@given(windows(), seeds, st.integers(1, 3), beams)
def test_clusters(forest, seed, top_k, beam):
    q, k = inputs(forest, seed, heads=1)
    options = {"clusters": cluster_keys(k, forest), "queries": Queries.windows(forest, 5)}
    check(q, k, forest, top_k=top_k, beam=widths(beam, top_k), **options)


@pytest.mark.parametrize("beam", ["exact", 4])
def test_binary_trees_and_heads_that_share_keys(beam):
    forest = Hierarchy.regular([64, 24], (2, 2), repeat_last=True)
    q, k = inputs(forest, 1, heads=4, kv_heads=2)
    check(q, k, forest, queries=Queries.windows(forest, 16), near=1, top_k=2, beam=beam)


@pytest.mark.parametrize("beam", ["exact", 3])
@pytest.mark.parametrize("most", [1, 5, 70])
def test_groups_of_any_size_with_limits(beam, most):
    """Cross-attention with empty groups, groups larger than a tile, and queries that see no key."""
    forest = Hierarchy.from_nested([[3, [2, 1], [[2, 2], 1]], [[4, 2], [3, 3]]])
    sizes = torch.tensor([most, 0, 1, (most + 1) // 2])
    tree = torch.tensor([1, 0, 0, 1])
    number = int(sizes.sum())
    lengths = torch.tensor(forest.lengths)[tree.repeat_interleave(sizes)]
    visible = (torch.rand(number) * (lengths + 1)).long()
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
    q, k = inputs(forest, 2, queries=number)
    check(q, k, forest, queries=Queries(offsets, tree, visible=visible), near=1, top_k=2, beam=beam)


@pytest.mark.parametrize(("beam", "size"), [("exact", 16), (3, 16), (3, 1)])
def test_more_candidates_than_a_tile(monkeypatch, beam, size):
    """Nodes with many members take several turns, whose best candidates are merged."""
    monkeypatch.setattr(beam_search, "CANDIDATES", 16)
    forest = Hierarchy.regular([297], (3, 9, 11))
    q, k = inputs(forest, 3, queries=size)
    groups = Queries(torch.tensor([0, size]), torch.tensor([0]))
    check(q, k, forest, queries=groups, top_k=3, beam=beam)


def test_long_paths_to_the_neighbourhood():
    """Nodes with one child have rows at several levels; a descent passes each node once."""
    forest = Hierarchy.from_nested([[[[[[2]]]], [[3, 1], [[1, 2], 2]], 4, [[[5]], 1]]])
    q, k = inputs(forest, 4)
    check(q, k, forest, near=1, top_k=2, beam=2)


@pytest.mark.parametrize("beam", ["exact", 8])
@pytest.mark.parametrize("size", [1, 2])
def test_ties_go_to_the_lower_number(beam, size):
    tree = Hierarchy.regular([16], (2, 4))
    q = k = torch.zeros(16, 1, 5)
    nodes, _ = search(q, k, tree, queries=Queries.windows(tree, size), top_k=3, beam=beam)
    families = [n for n in range(tree.num_nodes) if tree.structure.height[n] == 1]
    assert nodes[-1, 0].tolist() == families[:3]
    assert nodes[0, 0].tolist() == families[1:4]


@pytest.mark.parametrize("beam", ["exact", 4])
@pytest.mark.parametrize("size", [1, 8])
def test_half_precision_and_padded_heads(beam, size):
    """Results equal those in float32, where products of half-precision numbers are exact; with strided queries."""
    forest = Hierarchy.regular([16], (2, 4))
    q, k = inputs(forest, 5, dim=80)
    plan = levels(forest)
    keys = pooled(k, plan).half()
    groups = Queries.windows(forest, size)
    wide = torch.empty(16, 3, 80, dtype=torch.float16, device=DEVICE)
    wide[:, 1:] = q.half()
    arguments = (
        on_device(ranking.search_tables(forest)),
        groups.offsets.to(DEVICE),
        groups.tree.to(DEVICE),
        None,
        None,
    )
    options = {"limit": None, "scale": 80**-0.5, "top_k": 2, "most_queries": size}
    options["width"] = None if beam == "exact" else beam
    half = search_families(wide[:, 1:], keys.to(DEVICE), *arguments, **options)
    full = search_families(wide[:, 1:].float(), keys.float().to(DEVICE), *arguments, **options)
    assert torch.equal(half[0], full[0])
    assert (half[0] >= 0).all()
    assert torch.equal(half[1], full[1])


@pytest.mark.parametrize("near", [0, 1])
def test_operators_are_registered_fully(near):
    forest = Hierarchy.regular([4], (2, 2))
    tables = on_device(ranking.search_tables(forest))
    q, keys = torch.randn(4, 1, 16, device=DEVICE), torch.randn(1, len(tables.rows), 16, device=DEVICE)
    low = torch.arange(2, device=DEVICE) if near else None
    high = low + 1 if near else None
    groups = (torch.arange(0, 5, 2, device=DEVICE), torch.zeros(2, dtype=torch.long, device=DEVICE), low, high)
    limit = torch.arange(1, 5, device=DEVICE) if near else None
    beam = (q, keys, tables.rows, tables.paths, *groups, limit, 0.25, 2, 2, 2, 8, tables.most_slots, tables.first_root)
    families = (tables.family_rows, tables.family_start, tables.tree_families)
    exact = (q, keys, tables.rows, *families, *groups, limit, 0.25, 2, 2)
    for operator, arguments in ((beam_search.operator, beam), (exact_search.operator, exact)):
        torch.library.opcheck(operator.traced, arguments)


def test_searches_that_do_not_fit_are_refused():
    binary = Hierarchy.regular([64], (2, 2), repeat_last=True).to(DEVICE)
    deep = [5]
    for _ in range(70):
        deep = [deep]
    deep = Hierarchy.from_nested([deep]).to(DEVICE)

    def why_not(tree, top_k, width, near=True):
        q = torch.empty(tree.num_leaves, 1, 64, device=DEVICE)
        queries = Queries.families(tree)
        always = neighbourhood(queries, tree, 0, None)
        call = SelectCall(
            q=q,
            k=q,
            hierarchy=tree,
            queries=queries,
            neighbourhood=always if near else replace(always, bounds=None),
            clusters=None,
            positions=None,
            limit=None,
            top_k=top_k,
            width=width,
            scale=1.0,
            backend="triton",
        )
        return why_not_triton_search(call)

    assert why_not(binary, 4, 128) == []
    assert "more than 128" in why_not(binary, 4, 129)[0]
    assert why_not(binary, 256, None) == []
    assert "more than a program can keep" in why_not(binary, 257, None)[0]
    assert why_not(deep, 4, 8, near=False) == []
    assert "more than 128" in why_not(deep, 4, 8)[0]
