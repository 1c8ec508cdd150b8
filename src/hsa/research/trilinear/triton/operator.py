"""Backend "triton" of three-way attention in its core form, in which logits are sums of q ∘ k1 ∘ k2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hsa.attention.kernels import available
from hsa.attention.kernels.triton.launch import Operator
from hsa.research.trilinear.triton.backward import backward
from hsa.research.trilinear.triton.forward import forward


def trilinear_core(
    q: Tensor,
    k1: Tensor,
    k2: Tensor,
    v1: Tensor,
    v2: Tensor,
    offsets: Tensor,
    first_offsets: Tensor,
    second_offsets: Tensor,
    *,
    left: int | None,
    right: int | None,
    scale: float,
) -> Tensor:
    """`[queries, heads, value_dim]`: softmax over all pairs (j, k) of a tree, applied to v1_j ∘ v2_k.

        logit(i; j, k) = scale · Σ_r q_ir k1_jr k2_kr

    Memory is linear in the rows; nothing of the size of a pair is kept. Rows that see nothing are 0.

    Args:
        q: `[queries, heads, dim]`.
        k1, v1: `[first rows, heads, dim | value_dim]`.
        k2, v2: `[second rows, heads, dim | value_dim]`. All five of one dtype.
        offsets, first_offsets, second_offsets: `[trees + 1]` integers on the same device, the rows of every tree.
        left, right: how far before and after i, counted inside its tree, j and k may lie; None: any distance.
    """
    if scale < 0:  # the kernels take the largest product for the largest logit
        q, scale = -q, -scale
    out, _ = operator(q, k1, k2, v1, v2, offsets, first_offsets, second_offsets, left, right, scale)
    return out


def _attend(
    q: Tensor,
    k1: Tensor,
    k2: Tensor,
    v1: Tensor,
    v2: Tensor,
    offsets: Tensor,
    first_offsets: Tensor,
    second_offsets: Tensor,
    left: int | None,
    right: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    with available.device_of(q):
        return forward(q, k1, k2, v1, v2, offsets, first_offsets, second_offsets, left, right, scale)


def _empty(q: Tensor, k1: Tensor, k2: Tensor, v1: Tensor, v2: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:2], v2.shape[2]), q.new_empty(q.shape[1], len(q), dtype=torch.float32)


def _attend_backward(
    d_out: Tensor,
    out: Tensor,
    mass: Tensor,
    q: Tensor,
    k1: Tensor,
    k2: Tensor,
    v1: Tensor,
    v2: Tensor,
    offsets: Tensor,
    first_offsets: Tensor,
    second_offsets: Tensor,
    left: int | None,
    right: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with available.device_of(q):
        return backward(d_out, out, mass, q, k1, k2, v1, v2, offsets, first_offsets, second_offsets, left, right, scale)


def _empty_gradients(d_out: Tensor, out: Tensor, mass: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:5])


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output, *inputs[:8])
    ctx.options = inputs[8:]


def _backward(ctx, d_out: Tensor, d_mass: Tensor):
    return *gradients(d_out, *ctx.saved_tensors, *ctx.options), *(None,) * 6


operator = Operator("trilinear_core", _attend, _empty, _keep, _backward)
gradients = Operator("trilinear_core_backward", _attend_backward, _empty_gradients)
