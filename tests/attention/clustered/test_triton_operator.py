"""Kernels of clustered attention against the torch backend, in the interpreter or on a GPU."""

import pytest
import torch

import hsa
from tests.interpreter import DEVICE, quick_interpreter  # noqa: F401

operator = pytest.importorskip("hsa.attention.clustered.triton.operator")

CASES = {
    "causal": ([600], None, (2, 1, 32, 32), {"causal": True, "threshold": 1 / 32}),
    "ragged": ([513, 40, 300, 1], None, (4, 2, 16, 24), {"causal": True, "threshold": 1 / 32}),
    "shared": (
        [513, 40, 300],
        None,
        (4, 2, 16, 24),
        {"causal": True, "threshold": 1 / 32, "share_lists": True, "pooled_bias": -0.5},
    ),
    "others": ([513, 40, 300], [70, 3, 0], (4, 2, 20, 24), {"threshold": 1 / 64}),
    "top_k": ([700], None, (2, 2, 16, 16), {"causal": True, "top_k": 5}),
    "nothing": ([700], None, (2, 2, 16, 16), {"causal": True, "top_k": 0}),
    "all": ([700], None, (2, 2, 16, 16), {"causal": True, "threshold": 1e-30}),
    "windows": ([700], None, (2, 2, 16, 16), {"causal": True, "windows": True, "spread": 0.0, "tile": 32}),
    "no bias": ([700], [200], (2, 2, 16, 16), {"threshold": 1 / 16, "pooled_bias": float("-inf")}),
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
