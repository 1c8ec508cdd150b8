"""Kernels of clustered attention against the torch backend, in the interpreter or on a GPU."""

from dataclasses import replace

import pytest
import torch

import hsa
from hsa.attention.clustered.call import SelectCall
from hsa.attention.clustered.keys import build_keys, scores_of
from hsa.attention.clustered.layout import BRANCHING, Shape, layout_of
from hsa.attention.clustered.why_not import why_not_triton_select
from tests.interpreter import DEVICE, quick_interpreter  # noqa: F401

operator = pytest.importorskip("hsa.attention.clustered.triton.operator")
cluster = pytest.importorskip("hsa.attention.clustered.triton.cluster")

CASES = {
    "causal": ([600], None, (2, 1, 32, 32), {"causal": True, "threshold": 1 / 32}),
    "ragged": ([513, 40, 300, 1], None, (4, 2, 16, 48), {"causal": True, "threshold": 1 / 32}),
    "shared": (
        [513, 40, 300],
        None,
        (4, 2, 16, 48),
        {"causal": True, "threshold": 1 / 32, "share_lists": True, "pooled_bias": -0.5},
    ),
    "per head": ([513, 40], None, (4, 2, 16, 16), {"causal": True, "threshold": (1 / 4, 1 / 32, 1.0, 1 / 128)}),
    "per head, shared": (
        [513, 40],
        None,
        (4, 2, 16, 16),
        {"causal": True, "threshold": (1 / 4, 1 / 32, 1.0, 1 / 128), "share_lists": True},
    ),
    "others": ([513, 40, 300], [70, 3, 0], (4, 2, 32, 48), {"threshold": 1 / 64}),
    "top_k": ([700], None, (2, 2, 16, 16), {"causal": True, "top_k": 5}),
    "nothing": ([700], None, (2, 2, 16, 16), {"causal": True, "top_k": 0}),
    "all": ([700], None, (2, 2, 16, 16), {"causal": True, "threshold": 1e-30}),
    "windows": ([700], None, (2, 2, 16, 16), {"causal": True, "windows": True, "spread": 0.0, "tile": 32}),
    "no bias": ([700], [200], (2, 2, 16, 16), {"threshold": 1 / 16, "pooled_bias": float("-inf")}),
    "exact at first": ([820, 40, 600], None, (4, 2, 16, 16), {"causal": True, "threshold": 0.1, "exact_until": 300}),
    "exact if short": ([820, 300], [90, 70], (2, 1, 16, 16), {"threshold": 0.1, "exact_until": 512}),
    "half of the channels": ([600, 300], None, (4, 2, 64, 16), {"causal": True, "threshold": 1 / 32}),
    "half, top_k": ([600], [100], (2, 2, 64, 16), {"top_k": 5}),
    "chunks of 512": ([1100], [128], (2, 2, 16, 16), {"threshold": 1 / 16, "branching": (8, 8, 8)}),
}


def inputs(lengths, queries, sizes, dtype=torch.float32):
    heads, kv_heads, dim, value_dim = sizes
    q = torch.randn(sum(queries or lengths), heads, dim, device=DEVICE).to(dtype)
    k = (torch.randn(sum(lengths), kv_heads, dim, device=DEVICE) * 1.5).to(dtype)
    return q, k, torch.randn(sum(lengths), kv_heads, value_dim, device=DEVICE).to(dtype)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("slab", [2**12, 2**28])
def test_kernels_agree_with_torch(case, slab, monkeypatch):
    monkeypatch.setattr(operator, "SLAB_BYTES", slab)
    lengths, queries, sizes, options = case
    q, k, v = inputs(lengths, queries, sizes)
    options = {**options, "query_lengths": queries, "return_lse": True}
    out, lse = hsa.clustered_attention(q, k, v, lengths, backend="triton", **options)
    wanted, wanted_lse = hsa.clustered_attention(q, k, v, lengths, backend="torch", **options)
    torch.testing.assert_close(out, wanted, atol=2e-5, rtol=0)
    torch.testing.assert_close(lse, wanted_lse, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["ragged", "half of the channels", "windows", "chunks of 512"])
def test_clustered_keys_agree(name):
    lengths, queries, sizes, options = CASES[name]
    _, k, v = inputs(lengths, queries, sizes)
    k *= torch.rand(sizes[2], device=DEVICE) + 0.5
    layout = layout_of(lengths, shape=Shape.of(options.get("branching", BRANCHING), causal=False), causal=False)
    windows = options.get("windows", False)
    by_kernel, by_torch = (build(k, v, layout, windows=windows) for build in (cluster.build_keys, build_keys))
    assert torch.equal(by_kernel.channels, by_torch.channels)
    if not windows:
        same = (by_kernel.order == by_torch.order).all(-1)
        assert same.float().mean() > 0.8  # rounding may move a key from one half to the other
        for a, b in ((by_kernel.k, by_torch.k), (by_kernel.v, by_torch.v)):
            torch.testing.assert_close(a[same], b[same], atol=1e-5, rtol=0)
        means, others = (x.scored[0][same] for x in (by_kernel, by_torch))
        torch.testing.assert_close(means, others, atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_selections_agree(case):
    lengths, queries, sizes, options = case
    q, k, v = inputs(lengths, queries, sizes)
    cluster = {name: options[name] for name in ("windows", "branching") if name in options}
    keys = hsa.cluster(k, v, lengths, **cluster)
    select = {name: x for name, x in options.items() if name not in ("windows", "branching", "pooled_bias")}
    first, wanted = (
        hsa.select_groups(q, k, keys, lengths, query_lengths=queries, backend=backend, **select).first
        for backend in ("triton", "torch")
    )
    assert (first != wanted).float().mean() < 1e-3  # estimates that are equal up to rounding


@pytest.mark.parametrize("share_lists", [False, True])
def test_equal_thresholds_of_all_heads_are_one_threshold(share_lists):
    q, k, v = inputs([330], None, (4, 2, 16, 16))
    options = {"causal": True, "share_lists": share_lists, "backend": "triton"}
    wanted = hsa.clustered_attention(q, k, v, threshold=0.1, **options)
    for threshold in ([0.1] * 4, torch.full((4,), 0.1, dtype=torch.float64, device=DEVICE)):
        assert torch.equal(hsa.clustered_attention(q, k, v, threshold=threshold, **options), wanted)


def test_values_that_are_not_finite_stay_in_their_sequence():
    q, k, v = inputs([300, 300], None, (2, 1, 16, 16))
    options = {"lengths": [300, 300], "causal": True, "threshold": 0.05, "backend": "triton"}
    wanted = hsa.clustered_attention(q, k, v, **options)
    v[0] = torch.nan
    out = hsa.clustered_attention(q, k, v, **options)
    assert out[:300].isnan().any()
    torch.testing.assert_close(out[300:], wanted[300:], rtol=0, atol=0)


def test_strides_and_pieces():
    q, k, v = inputs([600], None, (4, 2, 16, 48))
    options = {"causal": True, "threshold": 0.05}
    wanted = hsa.clustered_attention(q, k, v, backend="torch", **options)
    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
    torch.testing.assert_close(hsa.clustered_attention(q, k, v, backend="triton", **options), wanted, atol=2e-5, rtol=0)
    opened = None
    for begin, end in ((0, 300), (300, 310), (310, 600)):
        keys = hsa.cluster(k[:end], v[:end], [end])
        piece = {"query_lengths": [end - begin], "backend": "triton"}
        selection = hsa.select_groups(q[begin:end], k[:end], keys, [end], opened=opened, **piece, **options)
        given = {"keys": keys, "selection": selection, "causal": True}
        out = hsa.clustered_attention(q[begin:end], k[:end], v[:end], [end], **piece, **given)
        torch.testing.assert_close(out, wanted[begin:end], atol=2e-5, rtol=0)
        opened = selection.opened()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dropout_p": 0.5}, "no dropout"),
        ({"branching": (4, 4, 4)}, "branching must be"),
        ({"tile": 8}, "at least 16 queries"),
        ({"top_k": 500}, "top_k=500 is more than"),
        ({"scale": -1.0}, "scale must be positive"),
    ],
)
def test_refusals(options, reason):
    q, k, v = inputs([300], None, (1, 1, 16, 16))
    with pytest.raises(hsa.HsaError, match=reason):
        hsa.clustered_attention(q, k, v, backend="triton", **options)
    assert hsa.clustered_attention(q, k, v, **options).isfinite().all()  # another backend runs it


def test_refuses_long_sequences():
    layout = layout_of([2**27], [1], shape=Shape.of(causal=False), causal=False)
    q, k = torch.zeros(1, 1, 8, device=DEVICE), torch.zeros(1, 1, 8, device=DEVICE)
    call = SelectCall(
        q=q, k=k, keys=None, layout=layout, threshold=0.1, top_k=None, spread=1.0, lists=1, opened=None, scale=1.0,
        backend="triton",
    )  # fmt: skip
    assert "a sequence has 16,777,216 groups, more than 8,388,608" in why_not_triton_select(call)
    layout = layout_of([2**26], [1], shape=Shape.of(causal=False), causal=False)
    assert not any("groups" in reason for reason in why_not_triton_select(replace(call, layout=layout)))


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # by the interpreter
@pytest.mark.parametrize("causal", [True, False])
def test_keys_far_above_their_pooled_rows(causal):
    """Weights relative to the largest pooled logit overflow, so that tiles are computed again."""
    q, k, v = inputs([768], None, (2, 1, 16, 16))
    k[37] = 40 * q[600, 0]
    options = {"causal": causal, "threshold": 0.05}
    wanted, sums = hsa.clustered_attention(q.double(), k.double(), v.double(), return_lse=True, **options)
    # exp(89) overflows in float32, and the mean of a group has an eighth of the logit.
    assert sums.max() - sums.median() > 200
    out, lse = hsa.clustered_attention(q, k, v, backend="triton", return_lse=True, **options)
    torch.testing.assert_close(out.double(), wanted, atol=1e-4, rtol=0)
    torch.testing.assert_close(lse.double(), sums, atol=1e-3, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("threshold", [1 / 256, (1 / 256, 1 / 64, 1 / 16, 1 / 128)])
def test_cuda_graph(threshold):
    q, k, v = inputs([1000, 300], None, (4, 2, 64, 64), torch.bfloat16)
    step = lambda: hsa.clustered_attention(q, k, v, [1000, 300], causal=True, threshold=threshold)  # noqa: E731
    wanted = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("mean", [0.0, 60.0])
def test_scores_in_8_bits_open_almost_the_same_groups(mean):
    """Keys may have a large mean in some channels, as those of Qwen2.5 have."""
    q, k, v = inputs([3000], None, (4, 2, 64, 64), torch.bfloat16)
    k[:, :, 5:8] += mean
    keys = hsa.cluster(k, v, [3000])
    if keys.scores.dtype != torch.float8_e4m3fn:
        pytest.skip("this GPU multiplies no 8-bit numbers")
    in_16_bits = replace(keys, scores=scores_of(keys.k, keys.channels, keys.shape))
    rule = {"causal": True, "threshold": 1 / 64, "backend": "triton"}
    coarse, exact = (hsa.select_groups(q, k, x, [3000], **rule).first != 255 for x in (keys, in_16_bits))
    assert 0.02 < exact.float().mean() < 0.98
    assert (coarse != exact).float().mean() < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_head_dims_and_dtypes(dim, dtype):
    q, k, v = inputs([1100, 70], None, (4, 2, dim, dim), dtype)
    keys = hsa.cluster(k, v, [1100, 70])
    rule = {"causal": True, "threshold": 1 / 64}
    selection = hsa.select_groups(q, k, keys, [1100, 70], backend="triton", **rule)
    given = {"selection": selection, "causal": True}
    out = hsa.clustered_attention(q, k, v, [1100, 70], keys=keys, backend="triton", **given)
    precise = replace(keys, k=keys.k.double(), v=keys.v.double())
    wide = [x.double() for x in (q, k, v)]
    wanted = hsa.clustered_attention(*wide, [1100, 70], keys=precise, backend="torch", **given)
    error = (out.double() - wanted).abs().max() / wanted.abs().max()
    assert error < {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}[dtype]


@pytest.mark.parametrize(("dims", "reason"), [((48, 16), "powers of two from 16 on, not 48"), ((16, 20), "16, not 20")])
def test_refuses_odd_head_dims(dims, reason):
    q, k, v = inputs([300], None, (1, 1, *dims))
    with pytest.raises(hsa.HsaError, match=reason):
        hsa.clustered_attention(q, k, v, backend="triton")
