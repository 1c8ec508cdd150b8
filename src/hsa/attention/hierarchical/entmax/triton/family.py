"""Entmax within families, in registers: weights and value of every member's row, and their gradients.

    p = n·(u − τ)₊^r,  Σ p = 1        u = z / r,  r = 1 / (α − 1): `POWER` 1 is α = 2, 2 is α = 1.5, `ANY` any other

The inside of a member above the leaves is one more entry of its row. It is on the diagonal of the family's [SIZE, SIZE]
product, which is free because a member is not its own sibling. Its logit is `inner`, its weight `inside` (0 if there is
none).

**The threshold** needs no sorting: τ is the root of ‖(u − τ)₊‖_r = 1, a norm weighted by n. The left side is convex and
decreasing in τ, so Newton's steps from below never pass the root, and the support only shrinks. For r = 1 this is Michelot's
algorithm (Michelot 1986), which ends at the right support; for other r, a support of equal entries takes one step. The steps
start at the largest u − n^{−1/r}, the root for a single entry; random logits take 3 to 7 steps.

**Precision.** The starting point is subtracted from u first. The remaining numbers have the size of n^{−1/r}, and
differences of logits stay accurate however large logits and counts are. In the end the weights are divided by Σ p.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hsa.attention.hierarchical.triton.family_tiles import family_logits

ANY = tl.constexpr(-1)
"""`POWER` if r is known at run time only."""
LN2 = tl.constexpr(0.6931471805599453)
CLOSE = tl.constexpr(2e-6)
"""Tolerance of Σ p − 1: the rounding error of a sum of 128 entries."""


HUGE = tl.constexpr(1e38)
TINY = tl.constexpr(1e-37)
SMALL = tl.constexpr(32)
"""Size up to which two steps are taken between checks for convergence, because a check costs as much as a step."""


@triton.jit
def _times(x, n, COUNTED: tl.constexpr):
    return x * n if COUNTED else x


@triton.jit
def _sign(x):
    """Return 1 where x > 0, else 0, for x ≥ 0. Two instructions; comparisons would need too many predicate registers."""
    return tl.minimum(x * HUGE, 1.0)


@triton.jit
def _root(n, r, POWER: tl.constexpr):
    """Return n^{−1/r}."""
    if POWER == 1:
        return 1.0 / n
    if POWER == 2:
        return tl.rsqrt(n)
    return tl.exp2(tl.log2(n) / -r)


@triton.jit
def _one_less(x, r, POWER: tl.constexpr):
    """Return x^{r−1}, 0 where x is 0."""
    if POWER == 1:
        return _sign(x)
    if POWER == 2:
        return x
    return _sign(x) * tl.exp2((r - 1.0) * tl.log2(tl.maximum(x, TINY)))


@triton.jit
def _solved(u, n, r, POWER: tl.constexpr, COUNTED: tl.constexpr, SIZE: tl.constexpr):
    """Return (u − τ)₊ [GROUPS, SIZE, SIZE], and τ and Σ n (u − τ)₊^r of every row; zeros in rows without an entry."""
    alone = _root(n, r, POWER) if COUNTED else 1.0
    base = tl.max(u - alone, 2)
    base = tl.where(base == float("-inf"), 0.0, base)
    u = u - base[:, :, None]
    step = tl.zeros_like(base)  # from the base to τ
    total = step
    going = tl.full((), 1, tl.int32)
    while going > 0:
        for _ in tl.static_range(2 if SIZE <= SMALL else 1):
            x = tl.maximum(u - step[:, :, None], 0.0)
            if POWER == 1:
                total = tl.sum(_times(x, n, COUNTED), 2)
                excess = total - 1.0
                slope = tl.sum(_times(_sign(x), n, COUNTED), 2)
            else:
                weighted = _times(_one_less(x, r, POWER), n, COUNTED)
                total = tl.sum(weighted * x, 2)
                slope = tl.sum(weighted, 2)
                if POWER == 2:
                    norm = tl.sqrt(total)
                    excess = (norm - 1.0) * norm
                else:
                    excess = total - total * _root(tl.maximum(total, TINY), r, POWER)
            further = step + excess / tl.where(slope > 0, slope, 1.0)
            moving = (total > 1.0 + CLOSE) & (further > step)
            step = tl.where(moving, further, step)
        going = tl.max(moving.to(tl.int32))
    return tl.maximum(u - step[:, :, None], 0.0), base + step, total  # the last step moved nothing: total belongs to it


@triton.jit
def _keys_seen(
    u, n, valid, COUNTED: tl.constexpr, INCLUDE_SELF: tl.constexpr, CAUSAL: tl.constexpr, LEAVES: tl.constexpr,
    SINGLE: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Return Σ n over the visible entries of each row, [GROUPS, SIZE]; in a leaf family it follows from the size."""
    if LEAVES and SINGLE:
        if CAUSAL:
            return tl.zeros(valid.shape, tl.float32) + (tl.arange(0, SIZE)[None, :] + 1.0)
        size = tl.sum(tl.where(valid, 1.0, 0.0), 1)[:, None]
        return tl.zeros(valid.shape, tl.float32) + (size if INCLUDE_SELF else size - 1.0)
    return tl.sum(_times(tl.where(u > float("-inf"), 1.0, 0.0), n, COUNTED), 2)


@triton.jit
def sparse_weights(
    q, k, positions, parent, valid, count, inner, inside, scale, r, P: tl.constexpr, PRECISION: tl.constexpr,
    INCLUDE_SELF: tl.constexpr, CAUSAL: tl.constexpr, LEAVES: tl.constexpr, SINGLE: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, POWER: tl.constexpr, WEIGHTED: tl.constexpr
):  # fmt: skip
    """Return the weights p, their derivatives s = n (u − τ)₊^{r−1}, the value of each row, (u − τ)₊, and N^{−1/r}.

    With `WEIGHTED`, the value for logits of 0 is subtracted from the value:

        r τ + r²/(r + 1)·N^{−1/r} + r/(r + 1)·Σ p (u − τ)        N = Σ n over visible entries (`WEIGHTED`), else 1

    Args:
        r: 1 / (α − 1) as a number; equal to `POWER` unless that is `ANY`.
    """
    unit = 1.0 if POWER == ANY else 1.0 / POWER
    log_count = count
    if not (LEAVES or WEIGHTED):
        log_count = tl.log2(count) * (LN2 * unit)
    u = family_logits(
        q, k, positions, parent, valid, log_count, scale, unit, P, PRECISION, INCLUDE_SELF, CAUSAL, LEAVES, SINGLE,
        not (LEAVES or WEIGHTED), GROUPS, SIZE
    )  # fmt: skip
    n = count
    if not LEAVES:
        own = _diagonal(SIZE)
        full = inside > 0
        u = tl.where(own, tl.where(full, inner * unit, float("-inf"))[:, :, None], u)
        n = tl.where(own, tl.where(full, inside, 1.0)[:, :, None], count[:, None, :])
    COUNTED: tl.constexpr = WEIGHTED and not LEAVES
    top = tl.zeros(valid.shape, tl.float32)
    if POWER == ANY:  # subtract the largest before dividing, which would round differences of large logits
        top = tl.max(u, 2)
        top = tl.where(top == float("-inf"), 0.0, top)
        u = (u - top[:, :, None]) * (1.0 / r)
    x, threshold, total = _solved(u, n, r, POWER, COUNTED, SIZE)
    empty = total == 0
    part = 1.0 / tl.where(empty, 1.0, total)
    slope = _times(_one_less(x, r, POWER), n, COUNTED)
    weights = (_times(x, n, COUNTED) if POWER == 1 else slope * x) * part[:, :, None]
    uniform = tl.full(threshold.shape, 1.0, tl.float32)
    if WEIGHTED:
        seen = _keys_seen(u, n, valid, COUNTED, INCLUDE_SELF, CAUSAL, LEAVES, SINGLE, SIZE)
        uniform = _root(tl.maximum(seen, 1.0), r, POWER)
    value = top + r * threshold + (r / (r + 1.0)) * tl.sum(weights * x, 2) + (r * r / (r + 1.0)) * uniform
    return weights, slope, tl.where(empty, 0.0, value), x, uniform


@triton.jit
def split_diagonal(x, SIZE: tl.constexpr):
    """Return the diagonal of x, [GROUPS, SIZE], and x with zeros on the diagonal."""
    own = _diagonal(SIZE)
    return tl.sum(tl.where(own, x, 0.0), 2), tl.where(own, 0.0, x)


@triton.jit
def with_diagonal(x, diagonal, SIZE: tl.constexpr):
    return tl.where(_diagonal(SIZE), diagonal[:, :, None], x)


@triton.jit
def _diagonal(SIZE: tl.constexpr):
    member = tl.arange(0, SIZE)
    return (member[:, None] == member[None, :])[None]


@triton.jit
def gradient_of_logits(d_weights, d_value, weights, slope):
    """Return the gradient of the logits, by the implicit function theorem; the derivative of the value is the weights."""
    total = tl.sum(slope, 2)
    mean = tl.sum(slope * d_weights, 2) / tl.where(total > 0, total, 1.0)
    return slope * (d_weights - mean[:, :, None]) + d_value[:, :, None] * weights


@triton.jit
def gradient_of_power(d_weights, d_value, weights, slope, x, uniform, r):
    """Return the gradient of r for each row, [GROUPS, SIZE]. With x = (u − τ)₊, s the slope and means weighted by s,

        ∂p/∂r = p (log x − 1) − s · mean(p (log x − 1) / s)        p = s x: any multiple of s may be added to both terms
        ∂V/∂r = (r² + 2r)/(r + 1)² · (x₀ − Σ p x) + r/(r + 1) · (Σ p x log x − x₀ log x₀)        x₀ = N^{−1/r}

    The second formula holds because the weights maximise V: only its entropy changes with r.
    """
    log = LN2 * tl.log2(tl.maximum(x, TINY))
    of_weights = slope * (x * log - (x - 1.0))  # no cancellation of large terms where x is close to 1, as for large r
    total = tl.sum(slope, 2)
    mean = tl.sum(of_weights, 2) / tl.where(total > 0, total, 1.0)
    some = tl.sum(weights, 2)  # 1, or 0 in rows without an entry
    of_value = (r * r + 2.0 * r) / ((r + 1.0) * (r + 1.0)) * (some * uniform - tl.sum(weights * x, 2))
    of_value += r / (r + 1.0) * (tl.sum(weights * x * log, 2) - some * uniform * LN2 * tl.log2(uniform))
    return tl.sum(d_weights * (of_weights - slope * mean[:, :, None]), 2) + d_value * of_value
