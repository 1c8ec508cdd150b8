"""The query of a pair (query i, leaf j) to leaf k: one vector per pair, so that logits are a product of matrices.

    core   pair(i, j) = q_i ∘ k1_j                          turned(i) = q_i
    full   pair(i, j)_c = Σ_b (Σ_a q_ia T_abc) k1_jb        turned(i) = q_i·T
    logit(i; j, k) = pair(i, j) · k2_k

All have blocks and heads in front: q `[blocks, heads, queries, dim]`, tensor `[heads, dim, dim, dim]` or None for the core.
"""

from __future__ import annotations

import torch
from torch import Tensor


def turn(q: Tensor, tensor: Tensor | None) -> Tensor:
    return q if tensor is None else torch.einsum("ghia,habc->ghibc", q, tensor)


def turn_gradients(d_turned: Tensor, q: Tensor, tensor: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of q and the tensor."""
    if tensor is None:
        return d_turned, None
    d_q = torch.einsum("ghibc,habc->ghia", d_turned, tensor)
    return d_q, torch.einsum("ghia,ghibc->habc", q, d_turned)


def join(turned: Tensor, k1: Tensor) -> Tensor:
    """Return the vectors of all pairs, `[blocks, heads, queries, leaves, dim]`."""
    if turned.ndim == 4:
        return turned[:, :, :, None] * k1[:, :, None]
    return torch.einsum("ghibc,ghjb->ghijc", turned, k1)


def join_gradients(d_pairs: Tensor, turned: Tensor, k1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `turned` and k1."""
    if turned.ndim == 4:
        return (d_pairs * k1[:, :, None]).sum(3), (d_pairs * turned[:, :, :, None]).sum(2)
    return torch.einsum("ghijc,ghjb->ghibc", d_pairs, k1), torch.einsum("ghijc,ghibc->ghjb", d_pairs, turned)
