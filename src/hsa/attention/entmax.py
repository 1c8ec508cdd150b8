"""α-entmax over weighted entries: a sparse softmax, with its normaliser and its value.

    p = n · [1 + (α − 1)(z − c)]₊^{1/(α − 1)}        Σ p = 1
    value = max over p of  Σ p z + Σ (p − n^{1−α} p^α) / (α (α − 1))

An entry of weight n is n equal entries of which only the sum is looked at. α → 1 is softmax: p = n·e^{z − c}, c = value =
log Σ n e^z. Written with c, which stays where it is as α → 1, in place of the usual threshold τ = (α − 1) c − 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_STEPS = {torch.float64: 60, torch.float32: 32}
"""Halvings of the interval for c that reach the precision of the numbers."""


def entmax(z: Tensor, n: Tensor, alpha: Tensor) -> Tensor:
    """The weights p `[…, entries]` of every row. Differentiable in z and α.

    Args:
        z: `[…, entries]` logits; −∞ hides an entry.
        n: broadcasts to z: how many entries each stands for; more than 0.
        alpha: broadcasts to z, the same for all entries of a row; more than 1, at most 2.

    Returns p; 0 in rows of which all entries are hidden.

    >>> z = torch.tensor([[1.0, 0.8, -1.0]])
    >>> entmax(z, torch.ones(3), torch.tensor(2.0)).tolist()  # sparsemax
    [[0.6000000238418579, 0.4000000059604645, 0.0]]
    """
    return _Entmax.apply(z, n, alpha)


def deformed_log(n: Tensor, alpha: Tensor) -> Tensor:
    """(1 − n^{1−α}) / (α − 1), which is log n for α → 1."""
    return -torch.expm1((1 - alpha) * n.log()) / (alpha - 1)


def deformed_exp(x: Tensor, alpha: Tensor) -> Tensor:
    """The inverse of `deformed_log`."""
    return (torch.log1p(-(alpha - 1) * x) / (1 - alpha)).exp()


def value(p: Tensor, z: Tensor, n: Tensor, alpha: Tensor) -> Tensor:
    """What the weights p of a row reach, `[…]`; log Σ n e^z for α → 1.

        Σ p (z + ln_α(n / p) / α)        ln_α: `deformed_log`

    Its derivative by z is p: that is why entmax gradients need not pass through p here.
    """
    seen = p > 0
    ratio = torch.where(seen, n / p.clamp(min=torch.finfo(p.dtype).tiny), torch.ones_like(p))
    gain = torch.where(seen, z, torch.zeros_like(z)) + deformed_log(ratio, alpha) / alpha
    return (p * gain).sum(-1)


def solve(z: Tensor, n: Tensor, alpha: Tensor) -> Tensor:
    """The weights p, without a gradient: by sorting where α is 1.5 or 2 everywhere, else by bisection."""
    single = float(alpha.flatten()[0]) if alpha.numel() == 1 or bool((alpha == alpha.flatten()[0]).all()) else None
    if single == 2.0:
        return _sparsemax(z, n)
    if single == 1.5:
        return _entmax15(z, n)
    return _bisected(z, n, alpha)


def _sparsemax(z: Tensor, n: Tensor) -> Tensor:
    """τ = (Σ n z − 1) / Σ n over the support, which is a head of the sorted entries."""
    shifted, count = _sorted(z, n)
    total, first = count.cumsum(-1), (count * shifted).cumsum(-1)
    tau = (first - 1) / total
    threshold = _last(tau, (shifted > tau) & (count > 0))
    return n * (z - _top(z) - threshold).clamp(min=0)


def _entmax15(z: Tensor, n: Tensor) -> Tensor:
    """n (z/2 − τ)₊²: over a head of the sorted entries, Σ n (x − τ)² = 1 is a quadratic equation."""
    shifted, count = _sorted(z / 2, n)
    total, first, second = count.cumsum(-1), (count * shifted).cumsum(-1), (count * shifted**2).cumsum(-1)
    mean = first / total
    spread = second - first * mean  # Σ n (x − mean)²
    tau = mean - ((1 - spread).clamp(min=0) / total).sqrt()
    threshold = _last(tau, (shifted > tau) & (spread <= 1) & (count > 0))
    return n * (z / 2 - _top(z / 2) - threshold).clamp(min=0) ** 2


def _top(z: Tensor) -> Tensor:
    top = z.amax(-1, keepdim=True)
    return top.masked_fill(top == -math.inf, 0)


def _sorted(z: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """Falling entries, less the largest; hidden ones have no weight."""
    shifted, order = (z - _top(z)).sort(-1, descending=True)
    count = n.expand_as(z).gather(-1, order).masked_fill(shifted == -math.inf, 0)
    return shifted.masked_fill(shifted == -math.inf, 0), count


def _last(tau: Tensor, inside: Tensor) -> Tensor:
    """τ of the largest head that supports itself; of rows without any, such that nothing is left."""
    size = inside.sum(-1, keepdim=True)
    return tau.gather(-1, (size - 1).clamp(min=0)).masked_fill(size == 0, math.inf)


def _bisected(z: Tensor, n: Tensor, alpha: Tensor) -> Tensor:
    """c lies between that of the largest entry alone and that of all as large as it."""
    order = alpha - 1
    hidden = z == -math.inf
    n = n.expand_as(z)
    top = _top(z)
    shifted = torch.where(hidden, torch.zeros_like(z), z - top)
    best = (
        torch.where(shifted == 0, n, torch.zeros_like(n)).masked_fill(hidden, 0).amax(-1, keepdim=True).clamp(min=1e-30)
    )
    every = n.masked_fill(hidden, 0).sum(-1, keepdim=True).clamp(min=1e-30)
    # p of an entry of weight n is 1 where z − c = (n^{1−α} − 1) / (α − 1).
    row_order = order.expand_as(z)[..., :1]
    low, high = (-torch.expm1(-row_order * total.log()) / row_order for total in (best, every))

    def weights(c: Tensor) -> Tensor:
        inside = 1 + order * (shifted - c)
        p = n * (inside.clamp(min=torch.finfo(z.dtype).tiny).log() / order).exp()
        return torch.where(hidden | (inside <= 0), torch.zeros_like(p), p)

    for _ in range(_STEPS.get(z.dtype, 32)):
        middle = (low + high) / 2
        above = weights(middle).sum(-1, keepdim=True) >= 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    p = weights(low)
    total = p.sum(-1, keepdim=True)
    return p / total.masked_fill(total == 0, 1)


class _Entmax(torch.autograd.Function):
    """By the implicit function theorem: with s = n (p / n)^{2−α}, dp = s (dz − Σ s dz / Σ s) + (a − s Σ a / Σ s) dα."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, n: Tensor, alpha: Tensor) -> Tensor:
        p = solve(z, n, alpha)
        ctx.save_for_backward(p, n, alpha)
        return p

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        p, n, alpha = ctx.saved_tensors
        seen = p > 0
        log_density = torch.where(seen, p / n, torch.ones_like(p)).log()
        s = torch.where(seen, n * ((2 - alpha) * log_density).exp(), torch.zeros_like(p))
        total = s.sum(-1, keepdim=True)
        total = total.masked_fill(total == 0, 1)
        centred = grad - (s * grad).sum(-1, keepdim=True) / total
        d_z = s * centred
        d_alpha = None
        if ctx.needs_input_grad[2]:
            order = alpha - 1
            a = torch.where(seen, p * (1 - order * log_density), torch.zeros_like(p)) / order**2
            d_alpha = (a * centred).sum_to_size(alpha.shape)
        return d_z, None, d_alpha
