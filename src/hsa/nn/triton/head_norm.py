"""Kernels of LayerNorm over the channels of a head.

PyTorch's kernel assigns a block of threads to each row; with only 32 channels per head, most of these threads are idle.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hsa.attention.kernels.available import padded
from hsa.attention.kernels.triton.launch import Launcher, Operator, compiled_for, last_stride_1

NUMBERS = 4096
"""Number of values that a program holds in registers; it sets the rows per block."""
PROGRAMS = 1024
"""Maximum number of programs of the gradient. Each keeps its own sums, which are then added in a fixed order."""


def head_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """Return `layer_norm` of x `[leaves, heads, dim]` over the last dimension, computed in float32, in the dtype of x."""
    return operator(last_stride_1(x), weight, bias, epsilon)


@triton.jit
def _load_rows(x, leaf_stride, head_stride, first, rows, HEADS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """Load a block of rows in float32, and their mask. The rows of all heads of a leaf are consecutive."""
    row, channel = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (channel < D)[None, :]
    offset = (row // HEADS).to(tl.int64) * leaf_stride + (row % HEADS) * head_stride
    return tl.load(x + offset[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32), mask


@triton.jit
def _standardised(x, mask, epsilon, D: tl.constexpr):
    """Return x with mean 0 and variance 1, and 1 / its standard deviation."""
    x = tl.where(mask, x - (tl.sum(x, 1) / D)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + epsilon)
    return x * scale[:, None], scale


@triton.jit
def norm(x, weight, bias, out, leaf_stride, head_stride, rows, epsilon, HEADS: tl.constexpr, ROWS: tl.constexpr,
         D: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    first = tl.program_id(0) * ROWS
    values, mask = _load_rows(x, leaf_stride, head_stride, first, rows, HEADS, ROWS, D, BLOCK)
    standard, _ = _standardised(values, mask, epsilon, D)
    channel = tl.arange(0, BLOCK)
    w = tl.load(weight + channel, mask=channel < D, other=0.0).to(tl.float32)
    b = tl.load(bias + channel, mask=channel < D, other=0.0).to(tl.float32)
    offset = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None] * D + channel[None, :]
    tl.store(out + offset, standard * w[None, :] + b[None, :], mask=mask)


@triton.jit
def d_norm(x, weight, d_out, d_x, sums, leaf_stride, head_stride, d_leaf_stride, d_head_stride, rows, epsilon,
           HEADS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Compute the gradient of x, and sums of the gradients of weight and bias in `sums` `[programs, 2, BLOCK]`."""
    program, channel = tl.program_id(0), tl.arange(0, BLOCK)
    w = tl.load(weight + channel, mask=channel < D, other=0.0).to(tl.float32)
    d_weight, d_bias = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        values, mask = _load_rows(x, leaf_stride, head_stride, first, rows, HEADS, ROWS, D, BLOCK)
        d, _ = _load_rows(d_out, d_leaf_stride, d_head_stride, first, rows, HEADS, ROWS, D, BLOCK)
        standard, scale = _standardised(values, mask, epsilon, D)
        d_weight += tl.sum(d * standard, 0)
        d_bias += tl.sum(d, 0)
        d *= w[None, :]
        along = tl.sum(d * standard, 1) / D
        mean = tl.sum(d, 1) / D
        offset = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None] * D + channel[None, :]
        tl.store(d_x + offset, (d - mean[:, None] - standard * along[:, None]) * scale[:, None], mask=mask)
    tl.store(sums + program * 2 * BLOCK + channel, d_weight)
    tl.store(sums + (program * 2 + 1) * BLOCK + channel, d_bias)


_norm, _d_norm = Launcher(norm), Launcher(d_norm)


def _sizes(x: Tensor) -> tuple[int, dict[str, int]]:
    """Return the number of rows and the constants of both kernels."""
    leaves, heads, dim = x.shape
    block = padded(dim)
    return leaves * heads, {"HEADS": heads, "ROWS": NUMBERS // block, "D": dim, "BLOCK": block, "num_warps": 4}


def _forward(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    rows, sizes = _sizes(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    strides = x.stride(0), x.stride(1)
    key = compiled_for(x, weight, bias, out, *strides, rows)
    if rows:
        _norm(key, triton.cdiv(rows, sizes["ROWS"]), (x, weight, bias, out, *strides, rows, epsilon), sizes)
    return out


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, _, ctx.epsilon = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, d_out: Tensor | None) -> tuple[Any, ...]:
    if d_out is None:
        return None, None, None, None
    x, weight = ctx.saved_tensors
    return *gradient(x, weight, d_out, ctx.epsilon), None


def _gradient(x: Tensor, weight: Tensor, d_out: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    rows, sizes = _sizes(x)
    d_out = last_stride_1(d_out)
    d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    programs = min(PROGRAMS, triton.cdiv(rows, sizes["ROWS"]))
    sums = torch.empty(programs, 2, sizes["BLOCK"], device=x.device)
    strides = x.stride(0), x.stride(1), d_out.stride(0), d_out.stride(1)
    key = compiled_for(x, weight, d_out, d_x, sums, *strides, rows)
    if rows:
        _d_norm(key, programs, (x, weight, d_out, d_x, sums, *strides, rows, epsilon), sizes)
    d_weight, d_bias = sums.sum(0)[:, : x.shape[2]].to(weight.dtype).unbind(0)
    return d_x, d_weight.clone(), d_bias.clone()  # results of a custom operator must not share memory


def _fake_gradient(x: Tensor, weight: Tensor, d_out: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(weight), torch.empty_like(weight)


def _fake(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


gradient = Operator("head_norm_gradient", _gradient, _fake_gradient)
operator = Operator("head_norm", _forward, _fake, _save, _backward)
