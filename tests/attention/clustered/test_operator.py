"""Clustered attention: the backends against each other, a dense oracle and softmax attention."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa import checking, cluster, clustered_attention, select_groups
from hsa.attention.clustered.operator import ATTEND
from hsa.errors import NonFinite
from tests.attention.clustered.batches import (
    DIM,
    HEADS,
    KV_HEADS,
    VALUE_DIM,
    batches,
    dense,
    rows_of,
)
from tests.forests import gradients

ON_THE_CPU = [backend for backend in ATTEND if backend.name != "triton"]
BACKENDS = [backend.name for backend in ON_THE_CPU]
SMALL = {"branching": (2, 2, 2), "tile": 4}
PER_HEAD = torch.tensor([0.3, -0.7, -torch.inf, 0.0], dtype=torch.float64)
biases = st.sampled_from([0.0, -1.3, -torch.inf, PER_HEAD])


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@given(batches(), biases)
def test_torch_equals_reference(batch, bias):
    fast, slow = (batch.attend(pooled_bias=bias, return_lse=True, backend=b) for b in BACKENDS)
    close(fast, slow)
    assert fast[0].isfinite().all()
    assert fast[0].shape == (sum(batch.queries), HEADS, VALUE_DIM)
    assert fast[1].shape == (sum(batch.queries), HEADS)
    close(batch.attend(pooled_bias=bias), slow[0])  # the default backend, without the log-sum-exp


@given(batches(), biases)
def test_values_as_wide_as_keys(batch, bias):
    """PyTorch's flash attention then reads the exact keys."""
    batch = replace(batch, v=batch.v[..., :DIM])
    fast, slow = (batch.attend(pooled_bias=bias, return_lse=True, backend=b) for b in BACKENDS)
    close(fast, slow)


@given(batches())
def test_the_first_tokens_attend_exactly(batch):
    batch = replace(batch, exact_until=2 * batch.chunk, rule={"top_k": 0})
    out, lse = batch.attend(return_lse=True)
    for rows, columns in batch.sequences():
        before = len(batch.k[columns]) - len(batch.q[rows])
        exact = softmax_attention(batch.q[rows], batch.k[columns], batch.v[columns], batch.causal)
        number = batch.exact_until - before if batch.causal else len(exact[0])
        if batch.causal or len(batch.k[columns]) < batch.exact_until:
            close((out[rows][: max(0, number)], lse[rows][: max(0, number)]), tuple(x[: max(0, number)] for x in exact))


@settings(max_examples=15)
@given(batches(longest=14), st.sampled_from([-1.3, -torch.inf, 0.0]))
def test_gradients_of_torch_equal_those_of_the_reference(batch, bias):
    bias = torch.full((HEADS,), bias, dtype=torch.float64, requires_grad=True)
    inputs = [*(x.requires_grad_() for x in (batch.q, batch.k, batch.v)), bias]
    found = []
    for backend in BACKENDS:
        out, lse = batch.attend(pooled_bias=bias, return_lse=True, backend=backend)
        found.append(gradients(torch.cat([out, lse[..., None]], -1), inputs))
    close(*found)


@given(batches(), biases)
def test_equals_softmax_over_keys_with_the_mean_logits_of_pooled_nodes(batch, bias):
    keys = batch.cluster()
    selection = batch.select(keys)
    found = batch.attend(keys=keys, selection=selection, pooled_bias=bias, return_lse=True)
    close(found, dense(batch, keys, selection, torch.as_tensor(bias).expand(HEADS)))
    close(found, batch.attend(pooled_bias=bias, return_lse=True))  # it clusters and selects the same itself


def softmax_attention(q, k, v, causal):
    """Return the output and the log-sum-exp of exact attention in one sequence."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q)) if causal else None
    out = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), attn_mask=mask)
    hidden = torch.zeros_like(logits[0]) if mask is None else torch.zeros_like(logits[0]).masked_fill(~mask, -torch.inf)
    return out.transpose(0, 1), (logits + hidden).logsumexp(-1).T


@given(batches(), st.data())
def test_all_groups_open_is_softmax_attention(batch, data):
    share = data.draw(st.booleans())
    batch = replace(batch, rule={"threshold": 1e-30, "share_lists": share})
    out, lse = batch.attend(return_lse=True, pooled_bias=-torch.inf)  # nothing is pooled: the bias has no effect
    for rows, columns in batch.sequences():
        if len(batch.q[rows]):
            exact = softmax_attention(batch.q[rows], batch.k[columns], batch.v[columns], batch.causal)
            close((out[rows], lse[rows]), exact)


@pytest.mark.parametrize("causal", [False, True])
def test_default_sizes(causal):
    """Chunks of 256 keys and tiles of 64 queries."""
    lengths = [600, 256, 7]
    q, k, v = rows_of(lengths, 1)
    few = clustered_attention(q, k, v, lengths, causal=causal, threshold=0.1)
    by_default = clustered_attention(q, k, v, lengths, causal=causal)
    assert torch.equal(by_default, clustered_attention(q, k, v, lengths, causal=causal, threshold=1 / 256))
    every = clustered_attention(q, k, v, lengths, causal=causal, threshold=1e-30)
    begin = 0
    for length in lengths:
        rows = slice(begin, begin + length)
        exact = softmax_attention(q[rows], k[rows], v[rows], causal)[0]
        close(every[rows], exact)
        error, less = ((x[rows] - exact).norm() / exact.norm() for x in (few, by_default))
        assert less <= error < 0.3
        assert (error > 1e-6) == (
            length > 256 or (length == 256 and not causal)
        )  # otherwise there is no complete chunk
        begin += length


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=15)
@given(batch=batches())
def test_the_batch_of_a_sequence_does_not_matter(backend, batch):
    out, lse = batch.attend(return_lse=True, backend=backend)
    for s, (rows, columns) in enumerate(batch.sequences()):
        inputs = {"q": batch.q[rows], "k": batch.k[columns], "v": batch.v[columns]}
        alone = replace(batch, **inputs, lengths=[batch.lengths[s]], queries=[batch.queries[s]])
        close(alone.attend(return_lse=True, backend=backend), (out[rows], lse[rows]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_queries_and_no_sequences(backend):
    q, k, v = rows_of([11, 9], 0, queries=[0, 0])
    for causal in (False, True):
        options = {"query_lengths": [0, 0], "causal": causal, "return_lse": True, "backend": backend, **SMALL}
        out, lse = clustered_attention(q, k, v, [11, 9], **options)
        assert out.shape == (0, HEADS, VALUE_DIM)
        assert lse.shape == (0, HEADS)
        assert clustered_attention(q, k[:0], v[:0], [], causal=causal, backend=backend).shape == (0, HEADS, VALUE_DIM)


def test_lengths_are_one_sequence_by_default_and_may_be_a_tensor():
    q, k, v = rows_of([21], 0)
    plain = clustered_attention(q, k, v, threshold=0.2, **SMALL)
    for lengths in ([21], (21,), torch.tensor([21])):
        assert torch.equal(clustered_attention(q, k, v, lengths, threshold=0.2, **SMALL), plain)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("windows", [False, True])
def test_gradcheck(causal, windows):
    """Gradients with a fixed selection, through the means of nodes too."""
    q, k, v = (x.requires_grad_() for x in rows_of([11, 5], 3, heads=(2, 1)))
    bias = torch.tensor([0.3, -0.7], dtype=torch.float64, requires_grad=True)
    options = {"causal": causal, "branching": (2, 2, 1), "tile": 4, "windows": windows}
    keys = cluster(k, v, [11, 5], windows=windows, branching=(2, 2, 1))
    selection = select_groups(q, k, keys, [11, 5], causal=causal, top_k=1, tile=4)
    assert 0.1 < (selection.first == 255).float().mean() < 0.9

    def run(q, k, v, bias):
        more = {"selection": selection, "pooled_bias": bias, "return_lse": True, "backend": "torch"}
        return clustered_attention(q, k, v, [11, 5], **options, **more)

    assert torch.autograd.gradcheck(run, (q, k, v, bias), fast_mode=True)


def test_gradients_flow_through_keys_that_are_passed():
    q, k, v = (x.requires_grad_() for x in rows_of([29], 3))
    options = {"causal": True, "threshold": 0.2, "tile": 4}
    out = clustered_attention(q, k, v, branching=(2, 2, 2), **options)
    again = clustered_attention(q, k, v, keys=cluster(k, v, [29], branching=(2, 2, 2)), **options)
    close(gradients(again, [q, k, v]), gradients(out, [q, k, v]))


def test_pooled_bias():
    q, k, v = rows_of([29], 1)
    options = {"threshold": 0.3, **SMALL}
    plain, lower, dropped = (clustered_attention(q, k, v, pooled_bias=b, **options) for b in (0.0, -0.7, -torch.inf))
    mixed = clustered_attention(q, k, v, pooled_bias=torch.tensor([0, -0.7, -torch.inf, 0]), **options)
    close(mixed, torch.stack([plain[:, 0], lower[:, 1], dropped[:, 2], plain[:, 3]], 1), 1e-7)  # −0.7 in float32
    assert torch.equal(clustered_attention(q, k, v, pooled_bias=torch.zeros(()), **options), plain)
    assert min((a - b).abs().max() for a, b in ((plain, lower), (lower, dropped))) > 1e-3


def test_dropout_keeps_the_mean():
    q, k, v = rows_of([27], 1)
    v.requires_grad_()
    options = {"causal": True, "threshold": 0.2, **SMALL}
    exact = clustered_attention(q, k, v, **options)
    assert torch.equal(clustered_attention(q, k, v, dropout_p=0.0, **options), exact)
    with torch.no_grad():
        runs = torch.stack([clustered_attention(q, k, v, dropout_p=0.3, **options) for _ in range(300)])
    assert (runs[0] - runs[1]).abs().max() > 1e-3
    assert (runs.mean(0) - exact).abs().max() < 6 * (runs.std(0) / 300**0.5).max()
    out = clustered_attention(q, k, v, dropout_p=0.3, **options)
    (grad,) = torch.autograd.grad(out.sum(), v)  # recomputed with the same mask
    close((grad * v).sum(), out.sum())  # linear in v


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_of_every_backend(backend):
    q, k, v = rows_of([13], 1)
    options = {"threshold": 0.2, "backend": backend, **SMALL}
    exact, lse = clustered_attention(q, k, v, return_lse=True, **options)
    out, again = clustered_attention(q, k, v, dropout_p=0.4, return_lse=True, **options)
    assert torch.equal(again, lse)  # that of all weights
    assert (out - exact).abs().max() > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rule", [{"threshold": 0.2}, {"top_k": 1}], ids=["threshold", "top_k"])
def test_nan_query_does_not_change_other_rows(backend, causal, rule):
    """A query that is not a number opens nothing."""
    lengths = [22, 9]
    q, k, v = rows_of(lengths, 2)
    options = {"causal": causal, "backend": backend, **rule, **SMALL}
    queries = torch.arange(31)
    for bad in (13, 17, 25):
        others, broken = queries != bad, q.clone()
        broken[bad] = torch.nan
        # Without the query, its tile opens fewer groups: compare with a query that opens nothing but the first group.
        keys = cluster(k, v, lengths, branching=(2, 2, 2))
        selection = select_groups(broken, k, keys, lengths, causal=causal, tile=4, backend=backend, **rule)
        expected = clustered_attention(q, k, v, lengths, causal=causal, selection=selection, backend=backend, **SMALL)
        out = clustered_attention(broken, k, v, lengths, **options)
        close(out[others], expected[others])
        assert out[bad].isnan().all()
        elsewhere = (queries // 4 != bad // 4) if bad < 22 else queries < 22
        close(out[elsewhere], clustered_attention(q, k, v, lengths, **options)[elsewhere])


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_checking_names_values_that_are_not_finite(name):
    inputs = dict(zip("qkv", rows_of([13], 1), strict=True))
    inputs[name][7, 1, 2] = torch.nan
    with checking(), pytest.raises(NonFinite, match=f"{name}: row 7, head 1 is nan"):
        clustered_attention(**inputs, **SMALL)
    if name != "q":
        with checking(), pytest.raises(NonFinite, match=f"{name}: row 7, head 1 is nan"):
            cluster(inputs["k"], inputs["v"], [13])


@pytest.mark.parametrize("causal", [False, True])
def test_inputs_that_are_not_contiguous(causal):
    q, k, v = rows_of([21, 8], 1)
    ways = {
        "heads first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        "dimensions first": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        "every other": lambda x: torch.stack([x, -x], -1).flatten(-2)[..., ::2],
    }
    options = {"causal": causal, "threshold": 0.2, "return_lse": True, **SMALL}
    expected = clustered_attention(q, k, v, [21, 8], **options)
    for way in ways.values():
        close(clustered_attention(*(way(x) for x in (q, k, v)), [21, 8], **options), expected)
    one = k[:, :1].expand(-1, KV_HEADS, -1), v[:, :1].expand(-1, KV_HEADS, -1)
    out = clustered_attention(q, *one, [21, 8], **options)
    close(out, clustered_attention(q, *(x.contiguous() for x in one), [21, 8], **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ON_THE_CPU, ids=BACKENDS)
def test_declared_tolerances(backend, dtype):
    """Compare with float64, the same selection and the same order of keys."""
    lengths = [19, 16]
    q, k, v = rows_of(lengths, 5, dtype=dtype)
    keys = cluster(k, v, lengths, branching=(2, 2, 2))
    selection = select_groups(q, k, keys, lengths, causal=True, threshold=0.2, tile=4)
    assert 0.1 < (selection.first == 255).float().mean() < 0.9
    begin = torch.tensor([0, 8, 19, 27]).repeat_interleave(8)  # first row of the chunk of each key
    index = (begin + keys.order.flatten(1))[..., None]  # rows of k and v, by group
    ordered = [x.double().transpose(0, 1).gather(1, index.expand(-1, -1, x.shape[2])) for x in (k, v)]
    precise = cluster(*(x.transpose(0, 1) for x in ordered), [16, 16], windows=True, branching=(2, 2, 2))
    options = {"causal": True, "selection": selection, "return_lse": True, **SMALL}
    precise = replace(precise, order=keys.order)
    exact = clustered_attention(*(x.double() for x in (q, k, v)), lengths, keys=precise, backend="reference", **options)
    found = clustered_attention(q, k, v, lengths, keys=keys, backend=backend.name, **options)
    assert found[0].dtype == dtype
    assert found[1].dtype == torch.float32
    for a, b in zip(found, exact, strict=True):
        assert (a.double() - b).abs().max() / b.abs().max() < backend.tolerance[dtype]


def test_half_precision_survives_huge_logits():
    q, k, v = rows_of([40], 2, dtype=torch.float16)
    q, k = q * 60, k * 60
    options = {"threshold": 1e-30, **SMALL}
    out = clustered_attention(q, k, v, **options)
    exact = softmax_attention(*(x.double() for x in (q, k, v)), False)[0]
    assert (out.double() - exact).abs().max() < 4e-3 * exact.abs().max()


def test_autocast_has_no_effect():
    q, k, v = rows_of([203], 1, dtype=torch.float32)

    def run():
        keys = cluster(k, v, [203], branching=(4, 2, 2))
        selection = select_groups(q, k, keys, [203], causal=True, threshold=0.1, tile=4)
        found = clustered_attention(q, k, v, causal=True, threshold=0.1, branching=(4, 2, 2), tile=4, return_lse=True)
        return [keys.k, keys.v, keys.scores, keys.order, selection.first, *found]

    with torch.autocast("cpu", torch.bfloat16):
        found = run()
    assert all(torch.equal(a, b) for a, b in zip(found, run(), strict=True))


def test_inputs_stay_unchanged():
    inputs = rows_of([21], 1)
    before = [x.clone() for x in inputs]
    opened = torch.ones(1, HEADS, 8, dtype=torch.bool)
    q, k, v = inputs
    options = {"query_lengths": [3], "causal": True, "opened": opened, "pooled_bias": PER_HEAD, **SMALL}
    clustered_attention(q[-3:], k, v, [21], **options)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert opened.all()
    assert q.shape == (21, HEADS, DIM)


def test_compiles():
    q, k, v = rows_of([40], 3)
    attend = torch.compile(lambda *x: clustered_attention(*x, causal=True, **SMALL).sin(), backend="aot_eager")
    close(attend(q, k, v), clustered_attention(q, k, v, causal=True, **SMALL).sin())


@pytest.mark.parametrize("causal", [False, True])
def test_values_that_are_not_finite_stay_in_their_sequence(causal):
    q, k, v = rows_of([24, 24], 3)
    options = {"threshold": 0.3, "causal": causal, **SMALL}
    wanted = clustered_attention(q, k, v, [24, 24], **options)
    v[0] = torch.nan
    out = clustered_attention(q, k, v, [24, 24], **options)
    assert out[:24].isnan().any()
    close(out[24:], wanted[24:])


def test_no_value_dimension():
    q, k, v = rows_of([40], 3)
    assert clustered_attention(q, k, v[..., :0], causal=True, **SMALL).shape == (40, q.shape[1], 0)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_log_sum_exp_is_wide_without_queries(backend):
    q, k, v = rows_of([40], 3, dtype=torch.bfloat16)
    options = {"query_lengths": [0], "return_lse": True, "backend": backend, **SMALL}
    assert clustered_attention(q[:0], k, v, [40], **options)[1].dtype == torch.float32
