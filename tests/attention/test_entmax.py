"""Weighted entmax: against the package `entmax`, optimality conditions, limits, gradients, and extreme rows."""

import math

import entmax as package
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hsa
from hsa.attention import entmax as core
from hsa.attention.entmax import deformed_exp, deformed_log, entmax, level, value
from hsa.errors import NonFinite

seeds = st.integers(0, 10**6)
alphas = st.sampled_from([1 + 1e-5, 1.01, 1.2, 1.5, 1.7, 1.99, 2.0])
scales = st.sampled_from([0.1, 1.0, 7.0])
sizes = st.sampled_from([1, 2, 7, 23])
ALPHAS = [1 + 1e-6, 1.2, 1.5, 1.8, 2.0]


def number(x, dtype=torch.float64):
    return torch.tensor(x, dtype=dtype)


def random_rows(seed, size, scale=1.0, most=9):
    """Return logits `[3, 5, size]` and weights `[3, 1, size]` from 1 to `most`."""
    generator = torch.Generator().manual_seed(seed)
    z = scale * torch.randn(3, 5, size, generator=generator, dtype=torch.float64)
    return z, torch.randint(1, most + 1, (3, 1, size), generator=generator).double()


def by_bisection(z, n, alpha):
    """Solve the definition for c, from a c that makes the weights sum to 1 or more up to one that makes them less."""
    order = alpha - 1
    low, high = z.amax(-1, keepdim=True) - 1 / order, z.amax(-1, keepdim=True) + n.sum(-1, keepdim=True).log()

    def weights(c):
        return n * (1 + order * (z - c)).clamp(min=0) ** (1 / order)

    for _ in range(200):
        middle = (low + high) / 2
        enough = weights(middle).sum(-1, keepdim=True) >= 1
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return weights(low)


@given(seeds, sizes, scales, alphas)
def test_equal_to_the_package_entmax(seed, size, scale, alpha):
    z, _ = random_rows(seed, size, scale)
    p = entmax(z, torch.ones(1, dtype=z.dtype), number(alpha))
    exact = {1.5: package.entmax15, 2.0: package.sparsemax}.get(alpha)
    expected = exact(z, dim=-1) if exact else package.entmax_bisect(z, alpha=alpha, n_iter=80)
    torch.testing.assert_close(p, expected, rtol=0, atol=2e-10)  # the package loses some digits for α → 1
    torch.testing.assert_close(p.sum(-1), torch.ones_like(p[..., 0]), rtol=0, atol=1e-14)


@given(seeds, scales, alphas)
def test_an_entry_of_weight_n_equals_n_entries(seed, scale, alpha):
    z, n = random_rows(seed, 7, scale)
    whole, repeats = entmax(z, n, number(alpha)), n[:, 0].long()
    for rows, p, repeat in zip(z, whole, repeats, strict=True):
        apart = entmax(rows.repeat_interleave(repeat, -1), torch.ones(1, dtype=z.dtype), number(alpha))
        expected = torch.stack([x.sum(-1) for x in apart.split(repeat.tolist(), -1)], -1)
        torch.testing.assert_close(p, expected, rtol=0, atol=1e-11)


@given(seeds, sizes, scales, st.booleans())
def test_optimality_conditions_with_an_alpha_per_entry(seed, size, scale, per_entry):
    """Check that ∂/∂p (p z + (p − n^{1−α} p^α) / (α (α − 1))) is λ where p > 0 and no more than λ elsewhere."""
    z, n = random_rows(seed, size, scale)
    generator = torch.Generator().manual_seed(seed + 1)
    alpha = 1.05 + 0.95 * torch.rand(3, 1, size if per_entry else 1, generator=generator, dtype=torch.float64)
    p = entmax(level(z, alpha), n, alpha)
    torch.testing.assert_close(p.sum(-1), torch.ones_like(p[..., 0]), rtol=0, atol=1e-12)
    slope = z + (1 - alpha * (p / n) ** (alpha - 1)) / (alpha * (alpha - 1))
    multiplier = (p * slope).sum(-1, keepdim=True)
    visible = p > 1e-8  # the slope at tiny weights is dominated by rounding
    assert ((slope - multiplier).abs() < 1e-6)[visible].all()
    assert (slope - multiplier < 1e-6)[p == 0].all()
    if not per_entry:
        torch.testing.assert_close(p, entmax(z, n, alpha), rtol=0, atol=1e-12)


@given(seeds, sizes, alphas)
def test_the_value_is_the_maximum_and_its_gradient_the_weights(seed, size, alpha):
    z, n = random_rows(seed, size)
    z.requires_grad_()
    alpha = number(alpha)
    p = entmax(z, n, alpha)
    reached = value(p.detach(), z, n, alpha)
    (slope,) = torch.autograd.grad(reached.sum(), z)
    torch.testing.assert_close(slope, p.detach(), rtol=0, atol=1e-12)
    (through,) = torch.autograd.grad(value(p, z, n, alpha).sum(), z)
    torch.testing.assert_close(through, p.detach(), rtol=0, atol=1e-7)
    other = torch.rand(101, *z.shape, generator=torch.Generator().manual_seed(seed), dtype=z.dtype) ** 3 + 1e-9
    other /= other.sum(-1, keepdim=True)
    for mixed in (other, 0.99 * p + 0.01 * other):
        assert (value(mixed, z, n, alpha) <= reached + 1e-9).all()


@given(seeds, sizes, scales)
def test_softmax_is_the_limit(seed, size, scale):
    z, n = random_rows(seed, size, scale)
    soft = (z + n.log()).softmax(-1)
    order = 1e-5
    p = entmax(z, n, number(1 + order))
    bound = order * ((z - z.amax(-1, keepdim=True)).abs() + n.sum(-1, keepdim=True).log() + 1) ** 2
    assert ((p - soft).abs() <= soft * bound + 1e-9).all()
    error = value(p, z, n, number(1 + order)) - (z + n.log()).logsumexp(-1)
    assert (error.abs() <= order * (bound.amax(-1) / order)).all()


@pytest.mark.parametrize("alpha", ALPHAS)
def test_float32_precision(alpha):
    z, n = random_rows(0, 23, 3.0)
    p = entmax(z.float(), n.float(), number(alpha, torch.float32))
    exact = entmax(z.float().double(), n, number(alpha, torch.float32).double())
    torch.testing.assert_close(p.double(), exact, rtol=0, atol=4e-6)
    torch.testing.assert_close(p.sum(-1), torch.ones(3, 5), rtol=0, atol=1e-6)


@pytest.mark.parametrize("alpha", [1.05, 1.3, 1.5, 1.8, 2.0])
@pytest.mark.parametrize("spacing", [1e-3, 0.1, 0.5, 0.9])
def test_rows_whose_entries_drop_out_one_by_one(alpha, spacing):
    """Logits that crowd towards the largest, and weights up to a million: the worst case for Newton's method."""
    k = torch.arange(40, dtype=torch.float64)
    z = torch.stack([-(spacing**k), -spacing * k, -((1 - spacing) ** k) / 2])[:, None].expand(3, 4, 40)
    n = torch.stack([torch.ones_like(k), 1 + k % 7, 2 ** (k / 2), 2 ** (20 - k / 2)])
    alpha = number(alpha)
    torch.testing.assert_close(entmax(z, n, alpha), by_bisection(z, n, alpha), rtol=0, atol=1e-9)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize(("dtype", "huge"), [(torch.float32, 1e37), (torch.float64, 1e307)])
def test_huge_logits(alpha, dtype, huge):
    z = torch.tensor([[huge, -huge, huge / 2], [-huge, -huge, -huge], [huge, huge, 0.0]], dtype=dtype)
    p = entmax(z, torch.ones(3, dtype=dtype), number(alpha, dtype))
    expected = torch.tensor([[1, 0, 0], [1 / 3, 1 / 3, 1 / 3], [0.5, 0.5, 0]], dtype=dtype)
    torch.testing.assert_close(p, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("alpha", [1.2, 1.5, 1.9, 2.0])
@pytest.mark.parametrize("many", [1e6, 1e12])
def test_weights_beyond_the_precision_of_float32(alpha, many):
    """The normaliser c is at its upper bound, up to rounding, and u is almost 0."""
    p = entmax(torch.tensor([0.0, 0.0, -1.0]), torch.tensor([many, many, 1.0]), torch.tensor(alpha))
    torch.testing.assert_close(p, torch.tensor([0.5, 0.5, 0.0]))
    assert entmax(torch.zeros(1), torch.tensor([many]), torch.tensor(alpha)) == 1
    each = torch.tensor([alpha, alpha, 1.3])
    torch.testing.assert_close(entmax(torch.zeros(3), torch.tensor([many, many, 1.0]), each).sum(), torch.tensor(1.0))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_hidden_entries_have_no_effect(alpha):
    z, n = random_rows(1, 7)
    hidden = z.clone()
    hidden[:, :4, 2] = hidden[:, :3, 5] = -math.inf
    hidden[1, 1] = -math.inf
    hidden.requires_grad_()
    p = entmax(hidden, n, number(alpha))
    seen = torch.tensor([0, 1, 3, 4, 6])
    without = entmax(z[..., seen], n[..., seen], number(alpha))
    torch.testing.assert_close(p[0, :3][:, seen], without[0, :3], rtol=0, atol=1e-12)
    assert (p[hidden == -math.inf] == 0).all()
    assert (p[1, 1] == 0).all()
    each = torch.linspace(1.1, 1.9, 7, dtype=torch.float64)
    assert (entmax(hidden, n, each)[hidden == -math.inf] == 0).all()
    (slope,) = torch.autograd.grad((p * z).sum(), hidden)
    assert slope.isfinite().all()
    assert (slope[hidden == -math.inf] == 0).all()


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_give_nan_in_their_row_only(alpha, bad):
    z, n = random_rows(2, 7)
    z[1, 3, 4] = bad
    p = entmax(z, n, number(alpha))
    assert p[1, 3].isnan().any()
    assert p.isnan().any(-1).sum() == 1
    with hsa.checking(), pytest.raises(NonFinite, match="a logit is"):
        entmax(z, n, number(alpha))
    z[1, 3, 4] = -math.inf
    with hsa.checking():
        entmax(z, n, number(alpha))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0,)])
def test_empty_input(shape):
    assert entmax(torch.zeros(shape), torch.ones(1), torch.tensor(1.3)).shape == shape


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_chunks_do_not_change_the_result(alpha, dims, monkeypatch):
    z, n = random_rows(3, 7)
    z, n = (z[0, 0], n[0, 0]) if dims == 1 else (z[:, 0], n[:, 0]) if dims == 2 else (z, n)
    orders = number(alpha) if dims < 3 else number([alpha, 1.2, 1.7]).view(3, 1, 1)
    whole = entmax(z, n, orders)
    monkeypatch.setattr(core, "CHUNK", 1)
    torch.testing.assert_close(entmax(z, n, orders), whole, rtol=0, atol=1e-14)


def clear_rows():
    """Return rows without a weight that is about to become 0, for every α below."""
    z = number([[0.3, 0.1, -9.0, 0.2, 0.0], [1.0, -9.0, 0.8, 0.9, -9.0], [0.0, 0.1, 0.05, 0.2, 0.15]])
    n = number([[1.0, 2.0, 3.0, 1.5, 1.0]])
    return z.requires_grad_(), n.requires_grad_()


@pytest.mark.parametrize("alpha", [1.001, 1.2, 1.5, 1.7, 1.95])
def test_gradients(alpha):
    z, n = clear_rows()
    one = number(alpha).requires_grad_()
    assert torch.autograd.gradcheck(entmax, (z, n, one))
    per_row = number([[alpha], [1.3], [1.6]]).requires_grad_()
    assert torch.autograd.gradcheck(entmax, (z, n, per_row))
    per_entry = number([[alpha, 1.3, 1.6, 1.2, 1.9]]).requires_grad_()
    assert torch.autograd.gradcheck(lambda z, n, a: entmax(level(z, a), n, a), (z, n, per_entry))


def test_gradients_of_sparsemax():
    z, n = clear_rows()
    assert torch.autograd.gradcheck(lambda z, n: entmax(z, n, number(2.0)), (z, n))


@pytest.mark.parametrize("order", [1e-7, 1e-5, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_gradient_of_alpha_is_accurate_near_softmax(order, dtype):
    """Compare with ∂p/∂α at α = 1, which is −p ((log p/n)² − Σ p (log p/n)²) / 2 by the series of the definition."""
    z, n = random_rows(5, 7)
    alpha = number(1 + order, dtype).requires_grad_()
    weight = torch.randn(z.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    (slope,) = torch.autograd.grad((entmax(z.to(dtype), n.to(dtype), alpha) * weight.to(dtype)).sum(), alpha)
    soft = (z + n.log()).softmax(-1)
    square = (soft / n).log() ** 2
    limit = (-soft * (square - (soft * square).sum(-1, keepdim=True)) / 2 * weight).sum()
    assert abs(float(slope) - float(limit)) < 1e-4 * abs(float(limit)) + 50 * order


@given(seeds, alphas)
def test_deformed_logarithm_and_exponential(seed, alpha):
    n = 1 + 1e3 * torch.rand(11, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    torch.testing.assert_close(deformed_exp(deformed_log(n, number(alpha)), number(alpha)), n, rtol=1e-9, atol=0)
    torch.testing.assert_close(deformed_log(n, number(1 + 1e-9)), n.log(), rtol=1e-7, atol=1e-7)
