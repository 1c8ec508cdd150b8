"""Entmax in multiscale attention: both backends, flat entmax as the oracle, causality, optimality."""

import math

import pytest
import torch
from entmax import entmax15, entmax_bisect, sparsemax
from hypothesis import given, settings
from hypothesis import strategies as st

import hsa
from hsa import (
    Entmax,
    Hierarchy,
    HsaError,
    Queries,
    dense_weights,
    find_key_order,
    multiscale_attention,
    open_families,
)
from hsa.attention.mixing import HeadMixing
from tests.attention.test_multiscale import open_all
from tests.forests import forests, gradients, random_inputs, random_positions, windows

seeds = st.integers(0, 10**6)
counts = st.sampled_from(["weighted", "logits"])
HEADS = 4


def random_alpha(seed, shape):
    """Between 1.1 and 1.9."""
    generator = torch.Generator().manual_seed(seed + 3)
    return (1.1 + 0.8 * torch.rand(shape, generator=generator, dtype=torch.float64)).requires_grad_()


def both_backends(q, k, v, forest, normalizer, positions=None, pooled_bias=0.0, **options):
    options = {"positions": positions, "pooled_bias": pooled_bias, "normalizer": normalizer, **options}
    fast, slow = (multiscale_attention(q, k, v, forest, backend=b, **options) for b in ("torch", "reference"))
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)
    learned = [x if isinstance(x, torch.Tensor) else None for x in (pooled_bias, normalizer.alpha)]
    inputs = [q, k, v, positions, *learned]
    for a, b in zip(gradients(fast, inputs), gradients(slow, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(multiscale_attention(q, k, v, forest, **options), fast, rtol=1e-12, atol=1e-12)
    return fast


alphas = st.sampled_from([1.5, 2.0, 1.3, (), (1,), (HEADS,), (1, HEADS), (2, 1), (3, HEADS)])


@settings(max_examples=30)
@given(forests(), seeds, alphas, counts, st.integers(0, 1), st.integers(0, 2), st.data())
def test_torch_equals_reference(forest, seed, alpha, how, near, refine, data):
    q, k, v = random_inputs(forest, seed, heads=HEADS, requires_grad=True)
    normalizer = Entmax(random_alpha(seed, alpha) if isinstance(alpha, tuple) else alpha, how)
    positions = random_positions(forest, seed, heads=HEADS, requires_grad=True) if data.draw(st.booleans()) else None
    causal, include_self = data.draw(st.booleans()), data.draw(st.booleans())
    bias = torch.linspace(-1, 1, HEADS, dtype=torch.float64, requires_grad=True)
    opened = open_families(q, k, forest, near=near, refine=refine, causal=causal)
    options = {"opened": opened, "causal": causal, "include_self": include_self}
    both_backends(q, k, v, forest, normalizer, positions, bias, **options)
