"""Attention within a family, which users can replace (the paper's appendix E.3).

It is a function `(q, k, v, bias, mask, *, scale) → (out, lse)` with

    q, k   [families, heads, size, dim]          v   [families, heads, size, value_dim]
    bias   [families or 1, 1, 1, size] log leaf_count of the keys; None if all are leaves
    mask   [families or 1, 1, size, size] True at visible entries
    out    [families, heads, size, value_dim] softmax(scale · q kᵀ + bias) v over visible entries; 0 in rows without any
    lse    [families, heads, size] log-sum-exp of the same logits; −∞ in rows without visible entries

The default is `exact`. This module has two further functions, as examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from hsa.attention.softmax import exact
from hsa.errors import InvalidInput, Unsupported

FamilyAttention: TypeAlias = Callable[..., tuple[Tensor, Tensor]]
FamilyAttentionName: TypeAlias = Literal["exact", "flex", "linear"]


def flex(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention with FlexAttention, eagerly. To fuse it on a GPU, pass `torch.compile(flex)` instead."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    if q.device.type == "cpu":
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            raise Unsupported("family_attention='flex' has no gradient on the CPU. Use 'exact' or torch.no_grad()")
        q, k, v = q.detach(), k.detach(), v.detach()
    logits = torch.zeros((), dtype=q.dtype, device=q.device) if bias is None else bias.to(q.dtype)
    logits = torch.where(mask, logits, torch.full_like(logits, -math.inf)).expand(len(q), 1, *mask.shape[-2:])

    def score_mod(score: Tensor, family: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + logits[family, 0, i, j]

    out, aux = flex_attention(q, k, v, score_mod=score_mod, scale=scale, return_aux=AuxRequest(lse=True))
    assert aux.lse is not None
    return out, aux.lse


def linear(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Approximate attention by positive random features (Choromanski et al. 2021, arXiv:2009.14794), in linear time.

    e^{q·k} ≈ φ(q)·φ(k), so sums over keys are computed once, and each member subtracts its own term. The estimate is
    unbiased; its error grows with |q| and |k|, so normalise both.
    """
    # A sum over keys only works if every member sees all others, with or without itself.
    size, dim = q.shape[-2:]
    present = mask.any(-2)
    own = mask.diagonal(dim1=-2, dim2=-1)
    eye = torch.eye(size, dtype=torch.bool, device=q.device)
    everyone = torch.where(eye, own[..., None], present[..., None, :])
    if size > 1 and not torch.equal(mask, everyone):
        raise Unsupported("family_attention='linear' cannot hide siblings. Use 'exact' with causal='paper-mask'")

    dtype = torch.promote_types(q.dtype, torch.float32)
    features = _orthogonal_features(dim, q.device).to(dtype)
    root = math.sqrt(abs(scale))
    log_q = _log_features(q.to(dtype) * math.copysign(root, scale), features)
    log_k = _log_features(k.to(dtype) * root, features)
    if bias is not None:
        log_k = log_k + bias.to(dtype).transpose(-1, -2)
    log_k = log_k.masked_fill(~present[..., None], -math.inf)
    # Subtract a maximum per query and one per family, to keep the exponentials in range.
    top_q = log_q.amax(-1, keepdim=True).detach()
    top_k = log_k.amax((-2, -1), keepdim=True).detach().clamp(min=torch.finfo(dtype).min)
    phi_q, phi_k = (log_q - top_q).exp(), (log_k - top_k).exp()
    values = torch.cat([v.to(dtype), torch.ones_like(v[..., :1], dtype=dtype)], -1)
    total = phi_q @ (phi_k.transpose(-1, -2) @ values)
    itself = (phi_q * phi_k).sum(-1, keepdim=True) * values
    total = total - itself.masked_fill(own[..., None], 0)
    alone = ~mask.any(-1)[..., None]
    mass = total[..., -1:].clamp(min=torch.finfo(dtype).tiny)
    out = (total[..., :-1] / mass).masked_fill(alone, 0)
    lse = (mass.log() + top_q + top_k).masked_fill(alone, -math.inf)
    return out.to(v.dtype), lse.squeeze(-1)


NUM_FEATURES = 256


@cache
def _orthogonal_features(dim: int, device: torch.device) -> Tensor:
    """Return blocks of orthogonal directions with Gaussian lengths, from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    blocks = []
    for _ in range(-(-NUM_FEATURES // dim)):
        gaussian = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
        directions = torch.linalg.qr(gaussian).Q.T
        lengths = torch.randn(dim, dim, generator=generator, dtype=torch.float64).norm(dim=-1, keepdim=True)
        blocks.append(directions * lengths)
    return torch.cat(blocks)[:NUM_FEATURES].to(device)


def _log_features(x: Tensor, features: Tensor) -> Tensor:
    """Return log φ(x) = w·x − |x|²/2 − log(√m) for each direction w."""
    return x @ features.T - x.square().sum(-1, keepdim=True) / 2 - math.log(len(features)) / 2


FAMILY_ATTENTION: dict[str, FamilyAttention] = {"exact": exact, "flex": flex, "linear": linear}


def family_attention_named(name: Any) -> FamilyAttention:
    """Return the function with this name, or the argument itself if it is a function."""
    if callable(name):
        return name
    if not isinstance(name, str) or name not in FAMILY_ATTENTION:
        raise InvalidInput(
            "family_attention", got=repr(name), expected=f"one of {list(FAMILY_ATTENTION)} or a function"
        )
    return FAMILY_ATTENTION[name]
