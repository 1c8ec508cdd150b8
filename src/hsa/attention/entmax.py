"""α-entmax over weighted entries: a sparse softmax, with its normaliser c and its value.

    p = n · [1 + (α − 1)(z − c)]₊^{1/(α − 1)}        Σ p = 1
    value = max over p of  Σ p z + Σ (p − n^{1−α} p^α) / (α (α − 1))

An entry of weight n stands for n equal entries; its p is the sum of theirs. The limit α → 1 is softmax: p = n·e^{z − c},
c = value = log Σ n e^z. The formulas use c, which stays finite as α → 1, instead of the usual threshold τ = (α − 1) c − 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hsa.attention.checks import is_checking
from hsa.errors import NonFinite

STEPS = 64
"""Maximum number of Newton steps. Each divides (S − 1)·|S'| by 4 or more (see `solve`), so this is enough for float64;
rows of attention take 3 to 8."""
CHUNK = 2**17
"""Numbers per chunk on the CPU: beyond the caches, allocating memory costs more than the arithmetic."""


def entmax(z: Tensor, n: Tensor, alpha: Tensor) -> Tensor:
    """Return the weights p of every row, differentiable in z, n and α.

    Args:
        z: Logits, `[…, entries]`; −∞ hides an entry.
        n: Number of equal entries that each entry stands for, more than 0; broadcast to z.
        alpha: α, more than 1 and at most 2; broadcast to z. It may differ between the entries of a row: see `level`.

    Returns:
        `[…, entries]`; 0 in rows whose entries are all hidden.

    >>> z = torch.tensor([[1.0, 0.8, -1.0]])
    >>> entmax(z, torch.ones(3), torch.tensor(2.0))  # sparsemax
    tensor([[0.6000, 0.4000, 0.0000]])
    """
    return _Entmax.apply(z, n, alpha)


def level(z: Tensor, alpha: Tensor) -> Tensor:
    """Return the logits z + 1 − 1/α, for rows whose entries have different α.

    If every entry has its own α, the row that maximises Σ p z + Σ_B (p − n^{1−α} p^α) / (α (α − 1)) has one multiplier λ:

        z_B − λ = (α (p / n)^{α−1} − 1) / (α (α − 1))   ⇒   p = n [1 + (α − 1)(z_B − 1/α − λ)]₊^{1/(α − 1)}

    The weights do not change if all α of a row are equal.
    """
    return z + (1 - 1 / alpha)


def deformed_log(n: Tensor, alpha: Tensor) -> Tensor:
    """Return (1 − n^{1−α}) / (α − 1), which tends to log n as α → 1."""
    return -torch.expm1((1 - alpha) * n.log()) / (alpha - 1)


def deformed_exp(x: Tensor, alpha: Tensor) -> Tensor:
    """Invert `deformed_log`."""
    return (torch.log1p(-(alpha - 1) * x) / (1 - alpha)).exp()


def value(p: Tensor, z: Tensor, n: Tensor, alpha: Tensor) -> Tensor:
    """Return the value of the objective at the weights p of each row, `[…]`; it tends to log Σ n e^z as α → 1.

        Σ p (z + ln_α(n / p) / α)        ln_α: `deformed_log`

    At the optimal p its derivative by z is p, so that gradients need not pass through p.
    """
    seen = p > 0
    ratio = torch.where(seen, n / p.clamp(min=torch.finfo(p.dtype).tiny), torch.ones_like(p))
    gain = torch.where(seen, z, torch.zeros_like(z)) + deformed_log(ratio, alpha) / alpha
    return (p * gain).sum(-1)


def solve(z: Tensor, n: Tensor, alpha: Tensor) -> Tensor:
    """Return the weights p without a gradient. c is computed by Newton's method, from below.

        S(c) = Σ n u^{1/(α − 1)}        u = [1 + (α − 1)(z − c)]₊
        c   ← c + S ln_α(S) / |S'|       |S'| = Σ n u^{1/(α − 1) − 1}

    S decreases in c, and S^{α−1} (with the largest α of the row) is a norm of u, hence convex in c: no step passes the
    solution, and until then S − 1 is the total error of the weights. As α → 1 one step is enough; for α = 2 there is a step
    each time that entries drop out. Sorting would be slower.
    """
    if z.numel() == 0:
        return torch.zeros_like(z)
    if is_checking() and not bool((z < math.inf).all()):
        raise NonFinite(
            "entmax: a logit is +∞ or NaN, although queries, keys and positions are finite. Scale them down, or use a dtype "
            "with a larger range"
        )
    single = float(alpha.flatten()[0]) if alpha.numel() == 1 or bool((alpha == alpha.flatten()[0]).all()) else None
    step = max(1, len(z) * CHUNK // z.numel()) if z.ndim > 1 and z.device.type == "cpu" else len(z)
    p = torch.empty_like(z, memory_format=torch.contiguous_format)
    for begin in range(0, len(z), step):
        some = slice(begin, begin + step)
        z_part, n_part, alpha_part = (x[some] if x.ndim == z.ndim and len(x) > 1 else x for x in (z, n, alpha))
        shifted = z_part - _above(z_part.amax(-1, keepdim=True))
        if single in (1.5, 2.0):
            p[some] = _threshold(shifted, n_part, squared=single == 1.5)
        else:
            p[some] = _normaliser(shifted, n_part, alpha_part)
    return p


def _threshold(z: Tensor, n: Tensor, squared: bool) -> Tensor:
    """Solve for α = 1.5 (`squared`) or 2 with τ = (α − 1) c − 1: u = [(α − 1) z − τ]₊ needs no logarithms. Overwrites z."""
    z = z.mul_(0.5) if squared else z
    tau = _from_below((z - (n.rsqrt() if squared else 1 / n)).amax(-1, keepdim=True))
    u, p, counted = torch.empty_like(z), torch.empty_like(z), torch.empty_like(z)
    for _ in range(STEPS):
        torch.sub(z, tau, out=u).clamp_(min=0)
        if squared:
            torch.mul(u, n, out=counted)
            torch.mul(u, counted, out=p)
        else:
            torch.mul(u, n, out=p)
            torch.sign(u, out=counted).mul_(n)
        total, slope = p.sum(-1, keepdim=True), counted.sum(-1, keepdim=True)
        above = total.clamp(min=1)
        now = tau + (above - above.sqrt() if squared else above - 1) / _positive(slope)
        if not _goes_on(total, now, tau):
            break
        tau = now
    return p.div_(_positive(total))


def _normaliser(z: Tensor, n: Tensor, alpha: Tensor) -> Tensor:
    """Solve for any α, with logarithms that stay accurate as α → 1."""
    order, largest = alpha - 1, alpha if alpha.ndim == 0 else alpha.amax(-1, keepdim=True)
    eps, tiny = torch.finfo(z.dtype).eps, torch.finfo(z.dtype).tiny
    c = _from_below((z + deformed_log(n, alpha)).amax(-1, keepdim=True))
    # Upper bound of c, where the last u is almost 0; without it, all weights of rows with huge n could round to 0.
    end = (1 - 4 * eps) / order
    end = end if end.ndim == 0 or end.shape[-1] == 1 else _above((z + end).amax(-1, keepdim=True))
    u, p, counted = torch.empty_like(z), torch.empty_like(z), torch.empty_like(z)
    for _ in range(STEPS):
        torch.sub(z, c, out=u).mul_(order).clamp_(min=eps - 1)  # u − 1
        # Logarithms of numbers near 0 and exponentials of numbers near −∞ take ten to a hundred times as long as others.
        torch.log1p(u, out=p).div_(order).clamp_(min=math.log(tiny)).exp_().mul_(n)
        p.mul_(torch.sign(u.add_(1 - eps), out=counted))  # 0 where u is 0
        torch.div(p, u.add_(eps), out=counted)
        total, slope = p.sum(-1, keepdim=True), counted.sum(-1, keepdim=True)
        above = total.clamp(min=1)
        now = (c + above * deformed_log(above, largest) / _positive(slope)).minimum(end)
        if not _goes_on(total, now, c):
            break
        c = now
    return p.div_(_positive(total))


def _goes_on(total: Tensor, now: Tensor, before: Tensor) -> bool:
    """Return whether some row has not converged and still moves by more than rounding."""
    eps = torch.finfo(total.dtype).eps
    return bool(((total > 1 + 4 * eps) & (now - before > 2 * eps * before.abs())).any())


def _from_below(x: Tensor) -> Tensor:
    """Return slightly less than x, so that its entry keeps a weight; finite in rows whose entries are all hidden."""
    x = _above(x)
    return x - 4 * torch.finfo(x.dtype).eps * x.abs()


def _above(x: Tensor) -> Tensor:
    return x.clamp(min=torch.finfo(x.dtype).min / 2)


def _positive(x: Tensor) -> Tensor:
    return x.clamp(min=torch.finfo(x.dtype).tiny)


class _Entmax(torch.autograd.Function):
    """Autograd function. The implicit function theorem gives, with u = (p / n)^{α−1} and s = p / u,

    dp = s (dz − m) + p/n dn + p (1 − 1/u − log u) / (α − 1)² dα,  m such that Σ dp = 0.

    The backward pass is made of differentiable functions of p, so that there are derivatives of any order.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, n: Tensor, alpha: Tensor) -> Tensor:
        p = solve(z, n, alpha)
        ctx.save_for_backward(p, n, alpha)
        return p

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        p, n, alpha = ctx.saved_tensors
        seen = p > 0
        density = torch.where(seen, p / n, torch.ones_like(p))
        log_u = (alpha - 1) * density.log()
        s = p * (-log_u).exp()
        centred = grad - (s * grad).sum(-1, keepdim=True) / _positive(s.sum(-1, keepdim=True))
        centred = torch.where(seen, centred, torch.zeros_like(p))
        d_n = d_alpha = None
        if ctx.needs_input_grad[1]:
            d_n = (density * centred).sum_to_size(n.shape)
        if ctx.needs_input_grad[2]:
            d_alpha = (p * minus_square(log_u) / (alpha - 1) ** 2 * centred).sum_to_size(alpha.shape)
        return s * centred, d_n, d_alpha


def minus_square(x: Tensor) -> Tensor:
    """Return 1 − x − e^{−x}; by its series −x²/2 + x³/6 − … where the terms nearly cancel."""
    series = torch.zeros_like(x)
    for k in range(11, 1, -1):
        series = (1 - series) * x / k if k > 2 else (1 - series) * x * x / -2
    return torch.where(x.abs() < 0.3, series, 1 - x - (-x).exp())
