"""Queries of pairs: one vector per pair (query i, leaf j), so that logits with leaves k are a matrix product.

    core   pair(i, j) = q_i ∘ k1_j                          contracted(i) = q_i
    full   pair(i, j)_c = Σ_b (Σ_a q_ia T_abc) k1_jb        contracted(i) = q_i·T
    logit(i; j, k) = pair(i, j) · k2_k

Tensors have leading blocks and heads: q is `[blocks, heads, queries, dim]`. T is `[heads, dim, dim, dim]`, or None for the
core.
"""

from __future__ import annotations

import torch
from torch import Tensor


def contract(q: Tensor, tensor: Tensor | None) -> Tensor:
    """Return q·T, `[blocks, heads, queries, dim, dim]`; q itself for the core."""
    return q if tensor is None else torch.einsum("ghia,habc->ghibc", q, tensor)


def contract_gradients(d_contracted: Tensor, q: Tensor, tensor: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of q and the tensor."""
    if tensor is None:
        return d_contracted, None
    d_q = torch.einsum("ghibc,habc->ghia", d_contracted, tensor)
    return d_q, torch.einsum("ghia,ghibc->habc", q, d_contracted)


def join(contracted: Tensor, k1: Tensor) -> Tensor:
    """Return the vectors of all pairs, `[blocks, heads, queries, leaves, dim]`."""
    if contracted.ndim == 4:
        return contracted[:, :, :, None] * k1[:, :, None]
    return torch.einsum("ghibc,ghjb->ghijc", contracted, k1)


def join_gradients(d_pairs: Tensor, contracted: Tensor, k1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `contracted` and k1."""
    if contracted.ndim == 4:
        return (d_pairs * k1[:, :, None]).sum(3), (d_pairs * contracted[:, :, :, None]).sum(2)
    return torch.einsum("ghijc,ghjb->ghibc", d_pairs, k1), torch.einsum("ghijc,ghibc->ghjb", d_pairs, contracted)
