"""Multiscale attention: softmax as the oracle, causality, and all options against the reference."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from hsa import (
    Hierarchy,
    HsaError,
    Queries,
    Selection,
    cluster_keys,
    dense_weights,
    hierarchical_attention,
    multiscale_attention,
    select,
)
from hsa.attention.multiscale.leaf_families import leaf_families
from hsa.attention.multiscale.operator import MULTISCALE
from hsa.attention.rounds import rooted
from tests.forests import forests, gradients, random_inputs, random_positions, softmax_weights, total_kl, windows

seeds = st.integers(0, 10**6)
ON_THE_CPU = [backend for backend in MULTISCALE if backend.name != "triton"]  # see test_triton_operator.py
BACKENDS = [backend.name for backend in ON_THE_CPU]


def both_backends(q, k, v, forest, positions=None, pooled_bias=0.0, **options):
    """Compare values and gradients of the backends "torch" and "reference"."""
    options = {"positions": positions, "pooled_bias": pooled_bias, **options}
    fast, slow = (multiscale_attention(q, k, v, forest, backend=b, **options) for b in ("torch", "reference"))
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-10)
    inputs = [q, k, v, positions, pooled_bias if isinstance(pooled_bias, torch.Tensor) else None]
    for a, b in zip(gradients(fast, inputs), gradients(slow, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        again = multiscale_attention(q, k, v, forest, **options)
    torch.testing.assert_close(again, slow, rtol=1e-10, atol=1e-10)
    assert fast.isfinite().all()
    return fast


def select_all(forest, queries=None):
    """Select every leaf family for every group."""
    forest, _ = rooted(forest)
    queries = queries or Queries.families(forest)
    listed = leaf_families(forest)
    rows = [listed.nodes[listed.tree == tree] for tree in queries.tree]
    width = max((len(row) for row in rows), default=0)
    table = torch.stack([F.pad(row, (0, width - len(row)), value=-1) for row in rows])
    return Selection(table[:, None], queries)


@given(forests(), seeds, st.integers(0, 2), st.integers(0, 3), st.sampled_from([None, "exact", 5]), st.data())
def test_torch_equals_reference(forest, seed, near, top_k, beam, data):
    q, k, v = random_inputs(forest, seed, heads=4, requires_grad=True)
    positions = random_positions(forest, seed, heads=4, requires_grad=True) if data.draw(st.booleans()) else None
    causal, include_self = data.draw(st.booleans()), data.draw(st.booleans())
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)
    selection = select(q, k, forest, near=near, top_k=top_k, beam=beam, positions=positions, causal=causal)
    both_backends(q, k, v, forest, positions, bias, selection=selection, causal=causal, include_self=include_self)


@given(windows(), seeds, st.integers(1, 3), st.integers(1, 5))
def test_torch_equals_reference_with_clusters(forest, seed, top_k, size):
    q, k, v = random_inputs(forest, seed, heads=4, value_dim=3, requires_grad=True)
    order = cluster_keys(k, forest)
    selection = select(q, k, forest, queries=Queries.windows(forest, size), top_k=top_k, clusters=order)
    both_backends(q, k, v, forest, selection=selection, clusters=order)


@given(windows(), seeds, st.integers(1, 3), st.data())
def test_torch_equals_reference_for_other_queries(forest, seed, top_k, data):
    sizes = [data.draw(st.integers(0, 4)) for _ in range(forest.num_trees + 1)]
    tree = [*range(forest.num_trees), 0]
    visible = [data.draw(st.integers(0, forest.lengths[t])) for t, n in zip(tree, sizes, strict=True) for _ in range(n)]
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    for seen, r in ((None, top_k), (torch.tensor(visible, dtype=torch.long), 0)):
        queries = Queries(offsets, torch.tensor(tree), visible=seen)
        q, k, v = random_inputs(forest, seed, heads=4, queries=sum(sizes), requires_grad=True)
        selection = select(q, k, forest, queries=queries, top_k=r, causal=seen is not None)
        both_backends(q, k, v, forest, selection=selection, causal=seen is not None)


@pytest.mark.parametrize("backend", BACKENDS)
@given(forest=forests(), seed=seeds, include_self=st.booleans())
def test_all_selected_is_softmax_attention(backend, forest, seed, include_self):
    q, k, _ = random_inputs(forest, seed)
    options = {"selection": select_all(forest), "include_self": include_self, "backend": backend}
    weights = dense_weights(multiscale_attention, q, k, forest, **options)
    flat = softmax_weights(q, k, forest, include_self=include_self)
    torch.testing.assert_close(weights, flat, rtol=1e-10, atol=1e-10)


@given(windows(), seeds)
def test_all_selected_is_softmax_attention_if_causal_or_clustered(forest, seed):
    q, k, v = random_inputs(forest, seed, kv_heads=6)
    everything = select_all(forest, Queries.windows(forest, 1))
    for options in ({"causal": True}, {"clusters": cluster_keys(k, forest)}):
        out = multiscale_attention(q, k, v, forest, selection=everything, **options)
        begin = 0
        for length in forest.lengths:
            rows = slice(begin, begin + length)
            packed = (x[rows].transpose(0, 1) for x in (q, k, v))
            flat = F.scaled_dot_product_attention(*packed, is_causal="causal" in options)
            torch.testing.assert_close(out[rows].transpose(0, 1), flat, rtol=1e-10, atol=1e-10)
            begin += length


@given(forests(), seeds, st.integers(0, 2), st.integers(0, 2))
def test_every_key_is_in_one_node_of_a_list(forest, seed, near, top_k):
    q, k, _ = random_inputs(forest, seed)
    selection = select(q, k, forest, near=near, top_k=top_k)
    partition = selection.partition(forest)
    counts = rooted(forest)[0].leaf_count[partition.nodes]
    row = torch.arange(len(partition.offsets) - 1).repeat_interleave(partition.offsets.diff())
    leaves = torch.zeros(len(partition.offsets) - 1, dtype=torch.long).index_add_(0, row, counts)
    expected = torch.tensor(forest.lengths)[selection.queries.tree].repeat_interleave(partition.heads)
    assert leaves.tolist() == expected.tolist()
    weights = dense_weights(multiscale_attention, q, k, forest, selection=selection)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), rtol=1e-10, atol=1e-10)


@given(forests(), seeds)
def test_closer_to_softmax_than_hierarchical_attention_and_closer_with_more_selected(forest, seed):
    q, k, _ = random_inputs(forest, seed)
    flat = softmax_weights(q, k, forest)
    tied = total_kl(dense_weights(hierarchical_attention, q, k, forest, include_self=True), flat)
    own = total_kl(dense_weights(multiscale_attention, q, k, forest), flat)
    assert own <= tied + 1e-9
    last = own
    for near in (1, 2, 3):
        selection = select(q, k, forest, near=near)
        now = total_kl(dense_weights(multiscale_attention, q, k, forest, selection=selection), flat)
        assert now <= last + 1e-9
        last = now
    best = select(q, k, forest, top_k=1), select(q, k, forest, top_k=2)
    more = [total_kl(dense_weights(multiscale_attention, q, k, forest, selection=o), flat) for o in best]
    assert more[1] <= more[0] + 1e-9 <= own + 2e-9


@pytest.mark.parametrize("beam", [None, "exact", 4])
def test_causal_jacobian_is_exactly_zero(beam):
    """Changing all tokens after i leaves outputs up to i the same, through the selection too."""
    forest = Hierarchy.regular([41], (4, 2), repeat_last=True, sinks=1)
    q, k, v = random_inputs(forest, 11)

    def run(q, k, v):
        return multiscale_attention(q, k, v, forest, near=1, top_k=2, beam=beam, causal=True)

    out = run(q, k, v)
    for i in range(40):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[i + 1 :] = torch.randn_like(x[i + 1 :]) * 3
        later = run(*changed)
        torch.testing.assert_close(later[: i + 1], out[: i + 1], rtol=0, atol=1e-13)
        assert (later[i + 1 :] != out[i + 1 :]).any()

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = run(*leaves)
    for i in (0, 7, 8, 23, 39):
        for grad in torch.autograd.grad(out[i].sum(), leaves, retain_graph=True):
            assert grad[i + 1 :].abs().max() == 0


@pytest.mark.parametrize("beam", [None, "exact", 4])
def test_step_by_step_equals_the_full_pass(beam):
    """Each token over the tree up to itself gets the same result as in a pass over the whole tree."""
    length, branching = 48, (4, 2)
    full = Hierarchy.regular([length], branching, repeat_last=True)
    q, k, v = random_inputs(full, 13)

    def run(q, k, v, tree, queries=None):
        return multiscale_attention(q, k, v, tree, queries=queries, near=1, top_k=2, beam=beam, causal=True)

    out = run(q, k, v, full)
    for i in range(length):
        so_far = Hierarchy.regular([i + 1], branching, repeat_last=True)
        step = Queries(torch.tensor([0, 1]), torch.tensor([0]), leaves=torch.tensor([i]))
        alone = run(q[i : i + 1], k[: i + 1], v[: i + 1], so_far, step)
        torch.testing.assert_close(alone[0], out[i], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("value_dim", [2, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck(causal, value_dim):
    forest = Hierarchy.collate([Hierarchy.from_nested([[3, [2, 1], 2]], sinks=(0,)), Hierarchy.from_parents([-1])])
    q, k, v = random_inputs(forest, 1, heads=2, kv_heads=1, dim=2, value_dim=value_dim, requires_grad=True)
    positions = random_positions(forest, 1, heads=2, requires_grad=True)
    bias = torch.tensor([0.3, -0.7], dtype=torch.float64, requires_grad=True)
    selection = select(q, k, forest, near=1, top_k=1, positions=positions, causal=causal)

    def run(q, k, v, positions, bias):
        options = {"selection": selection, "positions": positions, "pooled_bias": bias, "causal": causal}
        return multiscale_attention(q, k, v, forest, **options)

    assert torch.autograd.gradcheck(run, (q, k, v, positions, bias))


def test_gradcheck_with_clusters():
    forest = Hierarchy.regular([11], (2, 2), repeat_last=True)
    q, k, v = random_inputs(forest, 1, heads=2, kv_heads=1, dim=2, value_dim=2, requires_grad=True)
    order = cluster_keys(k, forest)
    selection = select(q, k, forest, top_k=1, clusters=order)
    bias = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)

    def run(q, k, v, bias):
        return multiscale_attention(q, k, v, forest, selection=selection, clusters=order, pooled_bias=bias)

    assert torch.autograd.gradcheck(run, (q, k, v, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ON_THE_CPU, ids=BACKENDS)
def test_declared_tolerances(backend, dtype):
    forest = Hierarchy.collate([Hierarchy.regular([61], (5, 3)), Hierarchy.from_nested([[7, [2, 11]]], sinks=(0,))])
    for seed in range(2):
        q, k, v = random_inputs(forest, seed, dim=16, value_dim=16, dtype=dtype)
        selection = select(q, k, forest, near=1, top_k=1)
        precise = (x.double() for x in (q, k, v))
        exact = multiscale_attention(*precise, forest, selection=selection, backend="reference")
        out = multiscale_attention(q, k, v, forest, selection=selection, backend=backend.name)
        assert out.dtype == dtype
        assert (out.double() - exact).abs().max() / exact.abs().max() < backend.tolerance[dtype]


def test_half_precision_survives_huge_logits():
    forest = Hierarchy.regular([40], (4, 4))
    q, k, v = random_inputs(forest, 2, dim=16, value_dim=16, dtype=torch.float16)
    q, k = q * 60, k * 60
    selection = select(q, k, forest, near=1, top_k=1)
    exact = multiscale_attention(*(x.double() for x in (q, k, v)), forest, selection=selection, backend="reference")
    out = multiscale_attention(q, k, v, forest, selection=selection)
    assert out.isfinite().all()
    assert (out.double() - exact).abs().max() < 4e-3 * exact.abs().max()


def test_pooled_bias():
    forest = Hierarchy.regular([27], (3, 3))
    q, k, v = random_inputs(forest, 1)
    parent = forest.structure.parent[forest.structure.leaf_nodes]
    own = torch.tensor(parent[:, None] == parent)
    flat = softmax_weights(q, k, forest) * own
    weights = dense_weights(multiscale_attention, q, k, forest, pooled_bias=-torch.inf)
    torch.testing.assert_close(weights, flat / flat.sum(-1, keepdim=True), rtol=1e-10, atol=1e-10)
    per_head = torch.tensor([0.0, 0, 0, -1, -1, -1], dtype=torch.float64)
    mixed = multiscale_attention(q, k, v, forest, pooled_bias=per_head)
    torch.testing.assert_close(mixed[:, :3], multiscale_attention(q, k, v, forest)[:, :3])
    torch.testing.assert_close(mixed[:, 3:], multiscale_attention(q, k, v, forest, pooled_bias=-1)[:, 3:])


def test_dropout_keeps_the_mean():
    forest = Hierarchy.regular([27], (3, 3))
    q, k, v = random_inputs(forest, 1, requires_grad=True)
    exact = multiscale_attention(q, k, v, forest)
    runs = torch.stack([multiscale_attention(q, k, v, forest, dropout_p=0.3) for _ in range(300)])
    assert (runs[0] - runs[1]).abs().max() > 1e-3
    assert (runs.mean(0) - exact).abs().max() < 6 * (runs.std(0) / 300**0.5).max()
    torch.manual_seed(3)
    first = multiscale_attention(q, k, v, forest, dropout_p=0.3)
    (grad,) = torch.autograd.grad(first.sum(), v)  # recomputed with the same mask
    torch.testing.assert_close((grad * v).sum(), first.sum(), rtol=1e-10, atol=1e-10)  # linear in v


@given(st.lists(forests(), min_size=2, max_size=3), seeds)
def test_trees_of_a_batch_do_not_see_each_other(parts, seed):
    batch = Hierarchy.collate(parts)
    q, k, v = random_inputs(batch, seed)

    def run(q, k, v, forest):
        return multiscale_attention(q, k, v, forest, selection=select(q, k, forest, near=1, top_k=1))

    out = run(q, k, v, batch)
    begin = 0
    for part in parts:
        rows = slice(begin, begin + part.num_leaves)
        torch.testing.assert_close(out[rows], run(q[rows], k[rows], v[rows], part), rtol=1e-10, atol=1e-10)
        begin += part.num_leaves


@pytest.mark.parametrize("options", [{"causal": True, "include_self": False}, {"pooled_bias": -torch.inf}])
def test_dropout_for_queries_that_see_no_key(options):
    forest = Hierarchy.regular([8], (2, 2))
    q, k, v = random_inputs(forest, 0, requires_grad=True)
    nothing_selected = Selection(torch.empty(4, 1, 0, dtype=torch.long), Queries.families(forest))
    if "pooled_bias" in options:
        options = {**options, "selection": nothing_selected}
    for dropout_p in (0.0, 0.3):
        out = multiscale_attention(q, k, v, forest, dropout_p=dropout_p, **options)
        assert out.isfinite().all()
        assert all(g.isfinite().all() for g in gradients(out, [q, k, v]))
        assert out[0].abs().max() == 0


def test_empty_groups_do_not_change_the_others():
    forest = Hierarchy.regular([32], (4, 4))
    q, k, v = random_inputs(forest, 0, queries=5)
    leaves = torch.arange(5)
    plain = Queries(torch.tensor([0, 5]), torch.tensor([0]), leaves=leaves)
    padded = Queries(torch.tensor([0, 0, 5, 5]), torch.tensor([0, 0, 0]), leaves=leaves)
    outs = []
    for queries in (plain, padded):
        selection = select(q, k, forest, queries=queries, top_k=1)
        outs.append(multiscale_attention(q, k, v, forest, selection=selection))
    torch.testing.assert_close(*outs, rtol=1e-12, atol=1e-12)


def test_caches_built_in_inference_mode_work_for_training():
    """Outputs and gradients are those of a fresh forest."""
    used, fresh = (Hierarchy.from_nested([[3, [2, 4]]]) for _ in range(2))
    q, k, v = random_inputs(used, 0, requires_grad=True)

    def runs(forest):
        selection = select(q, k, forest, near=1)
        return [
            hierarchical_attention(q, k, v, forest),
            multiscale_attention(q, k, v, forest),
            multiscale_attention(q, k, v, forest, selection=selection),
        ]

    with torch.inference_mode():
        before = runs(used)
    for out, again, expected in zip(before, runs(used), runs(fresh), strict=True):
        assert out.is_inference()
        assert torch.equal(again, expected)
        torch.testing.assert_close(out.clone(), expected.detach(), rtol=1e-12, atol=1e-12)
        for a, b in zip(gradients(again, [q, k, v]), gradients(expected, [q, k, v]), strict=True):
            assert torch.equal(a, b)
            assert a.abs().max() > 0


def test_chunks_do_not_change_the_result(monkeypatch):
    forest = Hierarchy.from_nested([[[3, 5, 1], [2, [4, 4]]], [7, 2]], sinks=(0,))
    q, k, v = random_inputs(forest, 1, requires_grad=True)
    selection = select(q, k, forest, near=1, top_k=2)
    whole = multiscale_attention(q, k, v, forest, selection=selection)
    monkeypatch.setattr("hsa.attention.multiscale.torch_lists.CHUNK", {"cpu": 1})
    monkeypatch.setattr("hsa.attention.multiscale.torch_lists.COST_OF_CHUNK", {"cpu": 0})
    monkeypatch.setattr("hsa.attention.multiscale.selection.ROWS_AT_ONCE", 1)
    monkeypatch.setattr("hsa.attention.softmax.CHUNK", 1)
    again = Selection(selection.families, selection.queries)
    pieces = multiscale_attention(q, k, v, forest, selection=again)
    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-12)
    for a, b in zip(gradients(pieces, [q, k, v]), gradients(whole, [q, k, v]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_one_leaf_and_empty_batches():
    for forest in (Hierarchy.flat([1]), Hierarchy.from_parents([-1]), Hierarchy.from_nested([[[1]]])):
        q, k, v = random_inputs(forest, 0, heads=2)
        torch.testing.assert_close(multiscale_attention(q, k, v, forest), v)
        assert multiscale_attention(q, k, v, forest, include_self=False).abs().max() == 0
    forest = Hierarchy.flat([])
    q, k, v = random_inputs(forest, 0)
    assert multiscale_attention(q, k, v, forest).shape == (0, 6, 5)
    selection = select(q, k, forest, near=1, top_k=2)
    assert multiscale_attention(q, k, v, forest, selection=selection).shape == (0, 6, 5)
    assert cluster_keys(k, forest).order.shape == (2, 0)


def bad_calls():
    forest = Hierarchy.regular([12], (2, 2))
    q, k, v = random_inputs(forest, 0)
    order = cluster_keys(k, forest)
    positions = random_positions(forest, 0)
    elsewhere = Queries(torch.tensor([0, 12]), torch.tensor([0]))

    def attend(**options):
        return lambda: multiscale_attention(q, k, v, forest, **options)

    def selecting(**options):
        return lambda: select(q, k, forest, **options)

    def selecting_for(offsets=(0, 12), tree=(0,), **others):
        others = {name: torch.tensor(x) for name, x in others.items()}
        return selecting(queries=Queries(torch.tensor(offsets), torch.tensor(tree), **others))

    clustered = select(q, k, forest, top_k=1, clusters=order)
    plain = select(q, k, forest, top_k=1)

    # options that clustered keys do not allow
    yield selecting(near=1, clusters=order), r"near: expected 0 with clusters, got 1. Clustered .* no neighbours"
    yield selecting(positions=positions, clusters=order), r"positions: expected None with clusters, got a tensor"
    yield attend(include_self=False, clusters=order, selection=clustered), r"include_self: expected True with clusters"
    yield attend(positions=positions, clusters=order, selection=clustered), r"positions: expected None with clusters"
    yield attend(clusters=order), r"top_k: expected 1 or more for clustered keys.*, got 0"
    # causality
    some = Queries(torch.tensor([0, 12]), torch.tensor([0]), visible=torch.arange(1, 13))
    instead = r"use hsa\.clustered_attention\(q, k, v, lengths, causal=True\)"
    for call in (selecting, attend):
        yield call(top_k=1, clusters=order, causal=True), rf"causal: expected False with clusters, got True.*{instead}"
        yield call(top_k=1, clusters=order, queries=some), rf"queries.visible: expected None with clusters.*{instead}"
    yield attend(selection=clustered, clusters=order, causal=True), rf"causal: expected False with clusters.*{instead}"
    by_hand = Selection(clustered.families[:1], some)
    yield attend(selection=by_hand, clusters=order), rf"queries.visible: expected None with clusters.*{instead}"
    yield attend(selection=plain, causal=True), r"selection: expected .*, got one made with causal=False"
    yield selecting(top_k=1, causal=True, queries=Queries.families(forest)), r"leak later queries"
    yield selecting(causal=True, queries=elsewhere), r"causal: expected queries with `visible` or `leaves`, got neither"
    # selections and clusters made for other inputs
    other = Hierarchy.from_nested([[6, [4, 2]]])
    yield (
        attend(selection=select(q, k, other, top_k=1)),
        r"selection: expected one made for this hierarchy, got one for another",
    )
    yield attend(selection=clustered), r"selection: expected one made with the same clusters, got one made with others"
    yield (
        attend(selection=select(q[:, :2], k, forest, top_k=1)),
        r"selection: expected .* 1 or 6 heads, as in q, got one for 2",
    )
    yield (
        attend(selection=clustered, clusters=cluster_keys(k, other)),
        r"clusters: expected clusters of this hierarchy, got clusters of another one",
    )
    shorter = Hierarchy.regular([9], (2, 2))
    yield (
        attend(clusters=cluster_keys(k[:9], shorter), selection=clustered),
        r"clusters: expected an order of shape \(2 key/value heads, 12 leaves\), got shape \(2, 9\)",
    )
    # queries
    yield attend(queries=elsewhere), r"top_k: expected 1 or more for queries that are not leaves.*, got 0"
    yield (
        attend(queries=Queries.windows(forest, 3), selection=plain),
        r"queries: expected the queries of the selection, got another",
    )
    yield selecting_for((0, 12, 13)), r"queries.offsets"
    yield selecting_for(tree=(1,)), r"queries.tree: expected tree numbers from 0 to 0, got 1 to 1"
    yield selecting_for(visible=[1, 1, 1]), r"queries.visible: expected .*, got shape \(3,\)"
    yield selecting_for(visible=[13] * 12), r"queries.visible\[0\]: expected a number from 0 to 12, in tree 0, got 13"
    yield selecting_for(visible=[1.0] * 12), r"queries.visible: expected .*, got a torch.float32 tensor"
    yield (
        selecting_for(leaves=[*range(11), 12]),
        r"queries.leaves\[11\]: expected a number from 0 to 11, in tree 0, got 12",
    )
    yield (
        selecting_for(leaves=[*range(12)], visible=[1] * 12),
        r"queries: expected either `visible` or `leaves`, got both",
    )
    yield selecting(queries=Queries([0, 12], [0])), r"queries.offsets: expected .*, got list"
    yield selecting(queries=torch.arange(3)), r"queries: expected an hsa.Queries.*, got Tensor"
    windows_of_three = Queries.windows(forest, 3)
    yield selecting(positions=positions, queries=windows_of_three), r"got a group that spans several families"
    shared = select(q, k, forest, queries=windows_of_three)
    yield attend(positions=positions, selection=shared), r"got a group that spans several families"
    from_outside = select(q, k, forest, queries=elsewhere, top_k=1)
    yield (
        attend(selection=from_outside, include_self=False),
        r"include_self: expected True for queries that are not leaves",
    )
    yield attend(selection=from_outside, positions=positions), r"positions: .*no position in it"
    # a selection, or what to select
    yield attend(selection=plain, near=1), r"near: expected no value together with a selection, got 1"
    yield attend(selection=plain, top_k=1), r"top_k: expected no value together with a selection, got 1"
    yield attend(selection=plain, beam="exact"), r"beam: expected no value together with a selection, got 'exact'"
    # counts and factors
    yield selecting(near=-1), r"near: expected .*, got -1"
    yield selecting(near=True), r"near: expected .*, got True"
    yield selecting(top_k=1.5), r"top_k: expected .*, got 1.5"
    yield selecting(top_k=4, beam=3), r"beam: expected .* at least 4 .*, got 3"
    yield selecting(top_k=1, beam=2.5), r"beam: expected .*, got 2.5"
    yield selecting(top_k=4, beam="wide"), r"beam: expected .*, got 'wide'"
    yield attend(dropout_p=1.0), r"dropout_p: expected .*, got 1.0"
    yield attend(dropout_p=None), r"dropout_p: expected .*, got None"
    yield attend(pooled_bias=torch.zeros(5)), r"pooled_bias: expected a number or \(6,\).*, got shape \(5,\)"
    yield attend(pooled_bias=float("nan")), r"pooled_bias: expected .*, got nan"
    yield attend(pooled_bias=float("inf")), r"pooled_bias: expected .*, got inf"
    yield attend(pooled_bias=None), r"pooled_bias: expected .*, got None"
    yield attend(scale=float("nan")), r"scale: expected a finite number.*, got nan"
    yield attend(scale=torch.tensor(1.0)), r"scale: expected .*, got tensor.*multiply q"
    yield lambda: Queries.windows(forest, 0), r"size: expected .*, got 0"
    # types and shapes
    yield attend(normalizer="entmax"), "normalizer: expected 'softmax' or an hsa.Entmax.*, got 'entmax'"
    yield attend(selection=torch.zeros(3)), r"selection: expected an hsa.Selection.*, got Tensor"
    yield attend(clusters=order.order), r"clusters: expected an hsa.KeyClusters.*, got Tensor"
    yield lambda: multiscale_attention(q[:5], k, v, forest), r"q: expected 12.*, got 5 rows"
    yield lambda: cluster_keys(k[:5], forest), r"k: expected 12.*, got 5 rows"
    yield lambda: multiscale_attention(q, k, v, [12]), r"hierarchy: expected an hsa.Hierarchy.*, got list"


@pytest.mark.parametrize(("call", "message"), list(bad_calls()))
def test_bad_input(call, message):
    with pytest.raises(HsaError, match=message):
        call()
