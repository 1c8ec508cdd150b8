"""Backend "triton" of three-way attention in core form."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hsa.attention.kernels.triton.launch import Operator
from hsa.research.trilinear.call import Rows
from hsa.research.trilinear.triton.backward import backward
from hsa.research.trilinear.triton.forward import forward, new_results


def trilinear_core(
    rows: Rows, offsets: tuple[Tensor, ...], *, left: int | None, right: int | None, scale: float
) -> Tensor:
    """Return softmax over all pairs (j, k) of a tree, applied to v1_j ∘ v2_k, `[queries, heads, value_dim]`.

        logit(i; j, k) = scale · Σ_r q_ir k1_jr k2_kr

    Memory is linear in the number of rows. Rows that see nothing are 0.

    Args:
        rows: Inputs of one dtype.
        offsets: Leaf offsets of the trees of the three sets, `[trees + 1]` integers each, on the same device.
        left, right: Largest distance of j and k before and after i in the tree; None for no limit.
        scale: Factor of the logits.
    """
    q, *others = rows
    if scale < 0:  # kernels take the maximum before scaling
        q, scale = -q, -scale
    out, _ = operator(q, *others, *offsets, left, right, scale)
    return out


def _fake(q: Tensor, k1: Tensor, k2: Tensor, v1: Tensor, v2: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return new_results(Rows(q, k1, k2, v1, v2))


def _fake_gradients(d_out: Tensor, out: Tensor, mass: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:5])


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output, *inputs[:8])
    ctx.options = inputs[8:]


def _backward(ctx, d_out: Tensor, d_mass: Tensor):
    return *gradients(d_out, *ctx.saved_tensors, *ctx.options), *(None,) * 6


operator = Operator("trilinear_core", forward, _fake, _save, _backward)
gradients = Operator("trilinear_core_backward", backward, _fake_gradients)
