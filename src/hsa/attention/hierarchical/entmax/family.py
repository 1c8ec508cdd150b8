"""Entmax attention within families: weights of the siblings, the share that is passed down, and the value of every row.

The inside of a member is one more entry of its row. It is on the diagonal of the family's `[size, size]` logits, which is
free because a member is not its own sibling. A leaf that sees itself has itself on the diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hsa.attention.derivatives import first_order
from hsa.attention.entmax import minus_square, solve
from hsa.attention.hierarchical.entmax.entries import Entries
from hsa.attention.softmax import part_of

CHUNK = 2**17
"""Logits per chunk on the CPU: beyond the caches, allocating memory costs more than the arithmetic."""


class Rows(NamedTuple):
    """Weights of the rows of some families and their origin, `[families, heads, size, size]` unless noted otherwise."""

    p: Tensor
    logits: Tensor  # minus the largest of the row
    top: Tensor  # [families, heads, size, 1] largest logit of the row
    c: Tensor  # [families, heads, size, 1] normaliser, minus the largest logit; 0 in rows that see nothing

    @property
    def down(self) -> Tensor:
        return self.p.diagonal(dim1=-2, dim2=-1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, inside: Tensor | None, alpha: Tensor, entries: Entries, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Σ p v over the siblings, the value of each row, and the share of the inside; all are differentiable.

    Args:
        q, k, v: Rows of the members, `[families, heads, size, dim]`.
        inside: Logits of the insides, `[families, heads, size]`; read only for members with an inside (`entries`).
        alpha: α, `[]` or `[heads or 1]`.
    """
    return _Attend.apply(q, k, v, inside, alpha_of_rows(alpha), entries, scale)


def solve_families(
    q: Tensor, k: Tensor, inside: Tensor | None, alpha: Tensor, entries: Entries, scale: float
) -> Iterator[tuple[slice, Entries, Rows]]:
    """Yield the rows of the families, in chunks that fit the cache. `alpha` is the result of `alpha_of_rows`."""
    for part in _chunks(q):
        some = entries.part(part)
        yield part, some, _solve_rows(_logits(q[part], k[part], part_of(inside, part), some, scale), alpha, some)


def alpha_of_rows(alpha: Tensor) -> Tensor:
    """Reshape α, `[]` or `[heads or 1]`, so that it broadcasts to `[families, heads, size, size]`."""
    return alpha if alpha.ndim == 0 else alpha[:, None, None]


def _chunks(rows: Tensor) -> Iterator[slice]:
    """Return slices of families whose logits fit the CPU's cache; one slice on a GPU."""
    families, heads, size, _ = rows.shape
    step = max(1, CHUNK // max(heads * size**2, 1)) if rows.device.type == "cpu" else max(families, 1)
    return (slice(begin, begin + step) for begin in range(0, families, step))


def _logits(q: Tensor, k: Tensor, inside: Tensor | None, entries: Entries, scale: float) -> Tensor:
    """Return the logits, `[families, heads, size, size]`, −∞ where hidden."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    logits = (q.to(dtype) @ k.to(dtype).transpose(-1, -2)).mul_(scale)
    if entries.bias is not None:
        logits.add_(entries.bias)
    if entries.inside is not None:
        own = logits.diagonal(dim1=-2, dim2=-1)
        assert inside is not None
        own.copy_(torch.where(entries.inside, inside, own))
    return logits if entries.hidden is None else logits.masked_fill_(entries.hidden, -math.inf)


def _shifted(logits: Tensor) -> tuple[Tensor, Tensor]:
    top = logits.amax(-1, keepdim=True)
    top = top.masked_fill_(top == -math.inf, 0)
    return logits.sub_(top), top


def _solve_rows(logits: Tensor, alpha: Tensor, entries: Entries) -> Rows:
    """Return the weights of all rows. Overwrites the logits."""
    logits, top = _shifted(logits)
    p = solve(logits, alpha.new_ones(()) if entries.weight is None else entries.weight, alpha)
    # p/n = (1 + (α − 1)(z − c))^{1/(α − 1)} is largest where z is largest; there z = 0.
    density = (p if entries.weight is None else p / entries.weight).amax(-1, keepdim=True)
    order = alpha - 1
    c = torch.expm1(density.log_().mul_(order)).div_(-order)
    if entries.hidden is not None or entries.inside is not None:
        c.masked_fill_(density == -math.inf, 0)
        logits.clamp_(min=torch.finfo(p.dtype).min / 4)  # finite, so that a weight of 0 times it is 0
    return Rows(p, logits, top, c)


def _value_of(rows: Rows, alpha: Tensor) -> Tensor:
    """Return Σ p (z + ln_α(n/p)/α) = c/α + (1 − 1/α) Σ p z, which holds because ln_α(n/p) = c − z wherever p > 0."""
    mean = (rows.p * rows.logits).sum(-1, keepdim=True)
    return (rows.top + rows.c / alpha + (1 - 1 / alpha) * mean).squeeze(-1)


def _split_rows(rows: Rows, entries: Entries) -> tuple[Tensor, Tensor]:
    """Return the weights of the siblings (and of a leaf for itself), and the share of the inside, 0 if there is none."""
    if entries.inside is None:
        return rows.p, torch.zeros((), dtype=rows.p.dtype, device=rows.p.device).expand(rows.p.shape[:-1])
    down = torch.where(entries.inside, rows.down, torch.zeros_like(rows.down))
    rows.down.masked_fill_(entries.inside, 0)
    return rows.p, down


def _densities(less: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Return u = [1 + less]₊ and u^{1/(α − 1) − 1}, which is s of an entry that stands for one key; both 0 where u is 0."""
    eps, tiny = torch.finfo(less.dtype).eps, torch.finfo(less.dtype).tiny
    u = (1 + less).clamp_(min=0)
    single = float(alpha) if alpha.ndim == 0 else None
    if single == 1.5:
        return u, u.clone()
    if single == 2:
        return u, u.sign()
    # Logarithms of numbers near 0 and exponentials of numbers near −∞ take ten to a hundred times as long as others.
    power = less.clamp(min=eps - 1).log1p_().mul_((2 - alpha) / (alpha - 1)).clamp_(min=math.log(tiny)).exp_()
    return u, power.mul_(u.sign())


class _Attend(torch.autograd.Function):
    """Autograd function that saves the inputs and c; the backward pass computes logits and weights again, in chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        inside: Tensor | None,
        alpha: Tensor,
        entries: Entries,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        size = q.shape[:3]
        y = v.new_empty(*size, v.shape[-1])
        values, down, c = (q.new_empty(size, dtype=dtype) for _ in range(3))
        for part, some, rows in solve_families(q, k, inside, alpha, entries, scale):
            values[part], c[part] = _value_of(rows, alpha), rows.c.squeeze(-1)
            p, down[part] = _split_rows(rows, some)
            y[part] = p @ v[part].to(dtype)
        ctx.entries, ctx.scale = entries, scale
        ctx.save_for_backward(q, k, v, inside, alpha, c)
        return y, values, down

    @staticmethod
    @first_order
    def backward(ctx: Any, d_y: Tensor, d_values: Tensor, d_down: Tensor) -> tuple[Tensor | None, ...]:
        """Compute dz = s (dp − Σ s dp / Σ s) + p dV with u = 1 + (α − 1)(z − c), s = p/u; see `hsa.attention.entmax`."""
        q, k, v, inside, alpha, c = ctx.saved_tensors
        d_q, d_k, d_v = (torch.empty_like(x) for x in (q, k, v))
        d_inside = None if inside is None else torch.zeros_like(inside)
        d_alpha = torch.zeros_like(alpha) if ctx.needs_input_grad[4] else None
        order = alpha - 1
        for part in _chunks(q):
            some = ctx.entries.part(part)
            queries, keys, values, above = (x[part].to(c.dtype) for x in (q, k, v, d_y))
            logits, _ = _shifted(_logits(queries, keys, part_of(inside, part), some, ctx.scale))
            less = (logits - c[part][..., None]).mul_(order)  # u − 1
            u, s = _densities(less, alpha)
            s = s if some.weight is None else s.mul_(some.weight)
            p = s * u
            d_p = above @ values.transpose(-1, -2)
            own = p
            if some.inside is not None:
                here = d_p.diagonal(dim1=-2, dim2=-1)
                here.copy_(torch.where(some.inside, d_down[part], here))
                own = p.clone()
                own.diagonal(dim1=-2, dim2=-1).masked_fill_(some.inside, 0)
            d_v[part] = own.transpose(-1, -2) @ above
            total = s.sum(-1, keepdim=True)
            d_p.sub_((s * d_p).sum(-1, keepdim=True) / total.masked_fill_(total == 0, 1))
            d_row = d_values[part][..., None]
            if d_alpha is not None:
                bend = p * minus_square(less.masked_fill_(p == 0, 0).log1p()) / order**2
                gain = p * less / -order  # p (c − z)
                by_alpha = bend * d_p + d_row * (u * bend - gain / alpha) / alpha
                d_alpha += by_alpha.sum_to_size(alpha.shape)
            d_logits = d_p.mul_(s).addcmul_(p, d_row)
            if d_inside is not None and some.inside is not None:
                here = d_logits.diagonal(dim1=-2, dim2=-1)
                d_inside[part] = torch.where(some.inside, here, torch.zeros_like(here))
                here.masked_fill_(some.inside, 0)
            d_logits.mul_(ctx.scale)
            d_q[part], d_k[part] = d_logits @ keys, d_logits.transpose(-1, -2) @ queries
        return d_q, d_k, d_v, d_inside, d_alpha, None, None
