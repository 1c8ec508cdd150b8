"""`select`: its definition, ties, tiles, neighbourhoods and the beam search."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa import Hierarchy, Queries, Selection, cluster_keys, multiscale_attention, select
from hsa.attention.multiscale import reference
from hsa.attention.multiscale.call import SelectCall
from hsa.attention.multiscale.leaf_families import leaf_families
from hsa.attention.multiscale.neighbourhood import empty_neighbourhood, neighbourhood
from hsa.attention.multiscale.visibility import key_limit
from hsa.attention.rounds import rooted
from tests.forests import forests, gradients, random_inputs, random_positions, windows

seeds = st.integers(0, 10**6)


def best_of(selection, forest, top_k, heads):
    """Return the `top_k` best families as lists, without the neighbourhood and the padding."""
    if selection.families.shape[1] != heads:
        return [[[]] * heads for _ in selection.families]
    widest = np.diff(leaf_families(rooted(forest, None)[0]).tree_offsets).max()  # no tree has more families to select
    best = selection.families[:, :, -min(top_k, widest) :]
    return [[[n for n in row if n >= 0] for row in group] for group in best.tolist()]


def by_definition(q, k, forest, selection, top_k, *, causal=False, clusters=None, positions=None, near=0):
    """Return the best families that the reference selects for the same groups."""
    forest, positions = rooted(forest, positions)
    queries = selection.queries
    limit = key_limit(queries, forest, causal)
    always = neighbourhood(queries, forest, near, limit) if clusters is None else empty_neighbourhood(queries, forest)
    call = SelectCall(
        q=q,
        k=k,
        hierarchy=forest,
        queries=queries,
        neighbourhood=always,
        clusters=clusters,
        positions=positions,
        limit=limit,
        top_k=top_k,
        width=None,
        scale=q.shape[-1] ** -0.5,
        backend="reference",
    )
    return reference.select(call)


@given(forests(), seeds, st.integers(0, 2), st.integers(1, 4), st.booleans(), st.booleans())
def test_exact_search_equals_the_definition(forest, seed, near, top_k, causal, with_positions):
    q, k, _ = random_inputs(forest, seed, heads=4)
    positions = random_positions(forest, seed, heads=4) if with_positions else None
    options = {"positions": positions, "causal": causal, "near": near}
    selection = select(q, k, forest, top_k=top_k, beam="exact", **options)
    assert best_of(selection, forest, top_k, 4) == by_definition(q, k, forest, selection, top_k, **options)


@given(windows(), seeds, st.integers(1, 4))
def test_exact_search_of_clusters_equals_the_definition(forest, seed, top_k):
    q, k, _ = random_inputs(forest, seed, heads=4)
    order = cluster_keys(k, forest)
    selection = select(q, k, forest, top_k=top_k, beam="exact", clusters=order)
    expected = by_definition(q, k, forest, selection, top_k, clusters=order)
    assert best_of(selection, forest, top_k, 4) == expected


@given(forests(), seeds, st.integers(1, 3), st.booleans())
def test_beam_as_wide_as_the_tree_is_exact(forest, seed, top_k, causal):
    q, k, _ = random_inputs(forest, seed, heads=4)
    exact = select(q, k, forest, top_k=top_k, beam="exact", causal=causal)
    wide = select(q, k, forest, top_k=top_k, beam=64, causal=causal)

    def as_sets(selection):
        return [[set(row) for row in group] for group in best_of(selection, forest, top_k, 4)]

    assert as_sets(wide) == as_sets(exact)


def test_narrow_beam_follows_the_best_branch():
    tree = Hierarchy.regular([64], (2, 2), repeat_last=True)
    k = torch.zeros(64, 1, 3, dtype=torch.float64)
    k[37, 0, 0] = 20.0
    q = torch.zeros(64, 1, 3, dtype=torch.float64)
    q[:, 0, 0] = 20.0
    selection = select(q, k, tree, top_k=1, beam=1)
    best = tree.structure.parent[tree.structure.leaf_nodes[37]]
    own, selected = selection.families[:, 0, 0], selection.families[:, 0, -1]
    assert ((selected == best) | (own == best)).all()
    exact = select(q, k, tree, top_k=1, beam="exact")
    assert selection.scored < exact.scored


def test_ties_go_to_the_lower_number():
    tree = Hierarchy.regular([32], (2, 4))
    q = k = torch.zeros(32, 3, 5)
    for beam in ("exact", 8):
        selection = select(q, k, tree, top_k=3, beam=beam)
        first = selection.families[-1, :, -3:].tolist()
        assert first == [sorted(row) for row in first]
    exact = select(q, k, tree, top_k=3, beam="exact").families
    families = [n for n in range(tree.num_nodes) if tree.structure.height[n] == 1]
    assert exact[-1, 0, -3:].tolist() == families[:3]
    assert exact[0, 0, -3:].tolist() == families[1:4]


@pytest.mark.parametrize("causal", [False, True])
def test_tiles_do_not_change_the_selection(monkeypatch, causal):
    forest = Hierarchy.collate([Hierarchy.regular([57], (3, 2)), Hierarchy.from_nested([[3, 2, [1, 4]], [2, 2]])])
    q, k, _ = random_inputs(forest, 3)
    whole = [select(q, k, forest, near=1, top_k=2, beam=b, causal=causal).families for b in ("exact", 4)]
    monkeypatch.setattr("hsa.attention.multiscale.search.TILE", 1)
    pieces = [select(q, k, forest, near=1, top_k=2, beam=b, causal=causal).families for b in ("exact", 4)]
    for a, b in zip(whole, pieces, strict=True):
        assert torch.equal(a, b)


def test_near_counts_families_inside_one_tree():
    forest = Hierarchy.regular([6, 8], (2, 8))
    q, k, _ = random_inputs(forest, 0)
    selection = select(q, k, forest, near=1).families[:, 0]
    first_leaf = forest.structure.first_leaf
    starts = [[int(first_leaf[n]) for n in row if n >= 0] for row in selection.tolist()]
    assert starts == [[0, 2], [0, 2, 4], [2, 4], [6, 8], [6, 8, 10], [8, 10, 12], [10, 12]]


def test_near_skips_sinks():
    forest = Hierarchy.regular([7], (2, 4), sinks=(0, -1))
    q, k, _ = random_inputs(forest, 0)
    selection = select(q, k, forest, near=1)
    starts = [[int(forest.structure.first_leaf[n]) for n in row if n >= 0] for row in selection.families[:, 0].tolist()]
    # Groups: the first sink, leaves 1–2, 3–4, 5, the last sink. Sinks are exact for all queries and not listed.
    assert starts == [[1], [1, 3], [1, 3, 5], [3, 5], [5]]


def test_no_gradient_flows_through_a_selection():
    """A selection is also the same with and without gradients."""
    forest = Hierarchy.regular([12], (2, 2))
    q, k, v = random_inputs(forest, 0, requires_grad=True)
    selection = select(q, k, forest, top_k=2)
    assert not selection.families.requires_grad
    with torch.no_grad():
        assert torch.equal(selection.families, select(q, k, forest, top_k=2).families)
    by_hand = Selection(selection.families, selection.queries)
    outs = [multiscale_attention(q, k, v, forest, selection=some) for some in (selection, by_hand)]
    for a, b in zip(*(gradients(out, [q, k, v]) for out in outs), strict=True):
        assert torch.equal(a, b)


def test_windows_of_queries_share_a_selection():
    """The score of a group is the sum of the scores of its queries."""
    forest = Hierarchy.regular([30], (3, 2), repeat_last=True)
    q, k, _ = random_inputs(forest, 0)
    clusters, queries = cluster_keys(k, forest), Queries.windows(forest, 7)
    selection = select(q, k, forest, queries=queries, top_k=2, clusters=clusters)
    assert selection.families.shape == (5, 6, 2)
    assert selection.queries is queries
    expected = by_definition(q, k, forest, selection, 2, clusters=clusters)
    assert selection.families.tolist() == expected
    alone = select(q, k, forest, queries=Queries.windows(forest, 1), top_k=2, clusters=clusters)
    assert not torch.equal(selection.families[queries.group], alone.families)


def test_causal_selections_do_not_depend_on_the_length_of_the_tree(monkeypatch):
    """Short trees are searched exactly without a limit, but always with a beam for causal queries."""
    monkeypatch.setattr("hsa.attention.multiscale.select.EXACT_FAMILIES", {"cpu": 100})
    tree, part = (Hierarchy.regular([n], (2, 2), repeat_last=True) for n in (251, 170))
    q, k, _ = random_inputs(tree, 5, heads=4)
    long = select(q, k, tree, top_k=3, causal=True)
    short = select(q[:170], k[:170], part, top_k=3, causal=True)

    def first_leaves(selection, forest):
        return [forest.structure.first_leaf[n] if n >= 0 else -1 for n in selection.families[:170].flatten()]

    assert first_leaves(long, tree) == first_leaves(short, part)
    assert torch.equal(long.families, select(q, k, tree, top_k=3, beam=32, causal=True).families)
    assert not torch.equal(long.families, select(q, k, tree, top_k=3, beam="exact", causal=True).families)
    assert torch.equal(
        select(q[:170], k[:170], part, top_k=3).families,
        select(q[:170], k[:170], part, top_k=3, beam="exact").families,
    )
