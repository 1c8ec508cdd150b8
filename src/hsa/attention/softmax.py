"""Softmax attention over short lists, with its log-sum-exp; used by both operators.

Both results are differentiable in q, k, v and the bias. Rows without a visible key give 0, a log-sum-exp of −∞, and no
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hsa.attention.derivatives import first_order

CHUNK = 2**18
"""Numbers per chunk on the CPU: beyond the caches, allocating memory costs more than the arithmetic."""


def exact(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, mask: Tensor | None = None, *, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return softmax(scale · q kᵀ + bias) v over the entries that `mask` allows, and the log-sum-exp of their logits.

    Args:
        q: Queries, `[lists, heads, queries, dim]`.
        k: Keys, `[lists, heads, keys, dim]`.
        v: Values, `[lists, heads, keys, value_dim]`.
        bias: Logits to add, broadcast to `[lists, heads, queries, keys]`; −∞ hides an entry.
        mask: Booleans, broadcast likewise; False hides an entry.
        scale: Factor of the dot products.

    Returns:
        `[lists, heads, queries, value_dim]` and `[lists, heads, queries]`.

    >>> q, k, v = torch.randn(3, 5, 2, 7, 4).unbind(0)
    >>> out, lse = exact(q, k, v, scale=0.5)
    >>> torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, k, v), atol=1e-6)
    True
    """
    both = masked_bias(q.dtype, bias, mask)
    out, lse = attend_with_gradient(q, k, v, both, scale)
    if both is None:
        return out, lse
    return out, lse.masked_fill((both == -math.inf).all(-1), -math.inf)


def attend_with_gradient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Compute `exact` for a bias that includes the mask; the log-sum-exp of a row without a visible key is undefined."""
    return _Exact.apply(q, k, v, bias, scale)


def masked_bias(dtype: torch.dtype, bias: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Return bias and mask as one tensor of logits, in float32 or better."""
    dtype = torch.promote_types(dtype, torch.float32)
    if bias is not None:
        bias = bias.to(dtype)
    if mask is None:
        return bias
    if bias is None:
        bias = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, bias, torch.full_like(bias, -math.inf))


def _logits(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    logits = (q @ k.transpose(-1, -2)).mul_(scale)
    return logits if bias is None else logits.add_(bias)


def _weights(logits: Tensor, lse: Tensor) -> Tensor:
    """Return exp(logits − lse), with 0 in rows without a visible key. Overwrites the logits."""
    return logits.sub_(lse.masked_fill(lse == -math.inf, math.inf).unsqueeze(-1)).exp_()


def chunks(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Return slices of lists whose intermediate results fit the CPU's cache; one slice on a GPU."""
    per_list = q[0].numel() + k[0].numel() + q.shape[1] * q.shape[2] * k.shape[2] if len(q) else 1
    step = max(1, CHUNK // max(per_list, 1)) if q.device.type == "cpu" else max(len(q), 1)
    return (slice(begin, begin + step) for begin in range(0, len(q), step))


class _Exact(torch.autograd.Function):
    """Autograd function that saves only the inputs and the log-sum-exp; the backward pass computes the weights again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = attend(q, k, v, bias, scale)
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, bias, lse)
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, lse = ctx.saved_tensors
        d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        d_bias = torch.zeros_like(bias) if ctx.needs_input_grad[3] else None
        for part in chunks(q, k):
            d_q[part], d_k[part], d_v[part], d_logits = gradients(
                q[part], k[part], v[part], part_of(bias, part), lse[part], d_out[part], d_lse[part], ctx.scale
            )
            if d_bias is not None:
                target = part_of(d_bias, part)
                target += d_logits.sum_to_size(target.shape)
        return d_q, d_k, d_v, d_bias, None


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Compute `attend_with_gradient` without autograd."""
    if _fits_fused(q, k, v):
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # other strides give wrong numbers
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=None if bias is None else _four_dims(bias), scale=scale
        )
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = v.new_empty(*q.shape[:-1], v.shape[-1])
    lse = torch.empty(q.shape[:-1], dtype=dtype, device=q.device)
    for part in chunks(q, k):
        logits = _logits(q[part].to(dtype), k[part].to(dtype), part_of(bias, part), scale)
        # Written out because torch.logsumexp is slower than all of this for short rows.
        top = logits.amax(-1, keepdim=True) if k.shape[-2] else lse.new_full((*q[part].shape[:-1], 1), -math.inf)
        top = top.masked_fill_(top == -math.inf, 0)
        weights = logits.sub_(top).exp_()
        mass = weights.sum(-1, keepdim=True)
        lse[part] = (mass.log() + top).squeeze(-1)
        out[part] = weights.div_(mass.masked_fill_(mass == 0, 1)) @ v[part].to(dtype)
    return out, lse


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    d_out: Tensor,
    d_lse: Tensor,
    scale: float,
    plus: tuple[Tensor | None, ...] = (None, None, None),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of `attend` for q, k, v and the logits, in the dtype of the log-sum-exp.

    Args:
        plus: Rows to add to every row of the gradients of q, k and v, `[lists, heads, 1, dim]` each.
    """
    q, k, v, d_out = (x.to(lse.dtype).contiguous() for x in (q, k, v, d_out))
    weights = _weights(_logits(q, k, bias, scale), lse)
    d_v = _product(weights.transpose(-1, -2), d_out, plus[2])
    d_logits = d_out @ v.transpose(-1, -2)
    d_logits.sub_((d_logits * weights).sum(-1, keepdim=True).sub_(d_lse.unsqueeze(-1))).mul_(weights)
    d_products = d_logits * scale
    return _product(d_products, k, plus[0]), _product(d_products.transpose(-1, -2), q, plus[1]), d_v, d_logits


def _product(a: Tensor, b: Tensor, plus: Tensor | None) -> Tensor:
    if plus is None:
        return a @ b
    return torch.baddbmm(*(x.flatten(0, 1) for x in (plus, a, b))).unflatten(0, b.shape[:2])


def part_of(bias: Any, part: slice) -> Any:
    """Return the bias of some lists; a bias without a dimension of lists applies to all."""
    return bias[part] if bias is not None and bias.ndim > 2 and len(bias) > 1 else bias


def _fits_fused(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether PyTorch's fused CPU attention, which also returns the log-sum-exp, can run: it needs one width."""
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and q.numel() > 0 and k.numel() > 0


def _four_dims(bias: Tensor) -> Tensor:
    return bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape))
