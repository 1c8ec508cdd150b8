"""Two kernels for a step of `MultiscaleCache`: one advances the structure of all sequences, one attends over all levels.

All slots of a head form one tile in registers, in which a token is stored, attends and is pooled upwards; keys first, then
values. Each query head is a program; of those that share a key/value head, the first writes. The others may read a slot
while it is written: it holds the newest token, which they have loaded themselves, or a node that no query sees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

from hsa.attention.kernels import available
from hsa.attention.kernels.available import padded
from hsa.attention.kernels.triton.launch import Launcher, compiled_for, last_stride_1
from hsa.attention.multiscale.triton.operator import pooled_rows
from hsa.tree.hierarchy import Hierarchy

if TYPE_CHECKING:
    from hsa.attention.cache.multiscale import MultiscaleCache

_OPEN = tl.constexpr(2**31 - 1)


@triton.jit
def append_kernel(
    Leaves,
    End,
    ParentEnd,
    Made,
    Length,
    Written,
    Bias,
    Share,
    Closes,
    Layout,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    SINKS: tl.constexpr,
    NEAR: tl.constexpr,
    POOLED_FROM: tl.constexpr,
):
    """Add a leaf to one sequence, set the bias of all slots for it, and close the nodes that it completes."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    here = row * SLOTS + at
    leaves = tl.load(Leaves + here, at < SLOTS, 0)
    end = tl.load(End + here, at < SLOTS, 0)
    parent_end = tl.load(ParentEnd + here, at < SLOTS, 0)
    closes = tl.load(Closes + row)
    now = tl.load(Length + row) + 1
    tl.store(Length + row, now)
    is_sink = now <= SINKS
    made = tl.load(Made + row * LEVELS)
    slot = tl.where(is_sink, now - 1, tl.load(Layout) + made % tl.load(Layout + 1))
    tl.store(Made + row * LEVELS, tl.where(is_sink, made, made + 1))
    tl.store(Written + row * LEVELS, slot)
    leaves = tl.where(at == slot, 1, leaves)
    end = tl.where(at == slot, now, end)
    parent_end = tl.where(at == slot, _OPEN, parent_end)

    last = 0
    if LEVELS > 1:
        older = tl.load(Made + row * LEVELS + 1) - 1 - NEAR  # the newest family that is not near
        older_slot = tl.load(Layout + 3) + tl.maximum(older, 0) % tl.load(Layout + 4)
        last = tl.where(older >= 0, tl.sum(tl.where(at == older_slot, end, 0)), 0)
    seen = (leaves > 0) & ((at < POOLED_FROM) | (end <= last)) & (parent_end > last)
    bias = tl.where(seen, tl.log(tl.maximum(leaves, 1).to(tl.float32)), -float("inf"))
    tl.store(Bias + here, bias, at < SLOTS)

    share = tl.zeros([BLOCK], tl.float32)
    closing = now > SINKS
    for level in tl.static_range(1, LEVELS):
        begin = tl.load(Layout + 3 * level - 3)
        size = tl.load(Layout + 3 * level - 2)
        inside = (at >= begin) & (at < begin + size) & (parent_end == _OPEN) & (leaves > 0)
        full = tl.sum(inside.to(tl.int32)) >= tl.load(Layout + 3 * level - 1)
        closing = closing & (full | (closes >= level))
        inside = inside & closing
        total = tl.sum(tl.where(inside, leaves, 0))
        share += tl.where(inside, leaves.to(tl.float32) / tl.maximum(total, 1).to(tl.float32), 0.0)
        parent_end = tl.where(inside, now, parent_end)
        made = tl.load(Made + row * LEVELS + level)
        slot = tl.load(Layout + 3 * level) + made % tl.load(Layout + 3 * level + 1)
        tl.store(Made + row * LEVELS + level, made + closing.to(tl.int32))
        tl.store(Written + row * LEVELS + level, tl.where(closing, slot, -1))
        new = (at == slot) & closing
        leaves = tl.where(new, total, leaves)
        end = tl.where(new, now, end)
        parent_end = tl.where(new, _OPEN, parent_end)
    tl.store(Leaves + here, leaves, at < SLOTS)
    tl.store(End + here, end, at < SLOTS)
    tl.store(ParentEnd + here, parent_end, at < SLOTS)
    tl.store(Share + here, share, at < SLOTS)


@triton.jit
def _tile(
    Stored, first, row, New, new_at, Written, Share, Layout, writes, dim, at, lane,
    SLOTS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Return all slots of one head including the newest token; store this token and pool the nodes that it closes."""
    inside = (at < SLOTS)[:, None] & (lane < dim)[None, :]
    tile = tl.load(Stored + (first + at)[:, None] * dim + lane[None, :], inside, 0.0).to(tl.float32)
    new = tl.load(New + new_at + lane, lane < dim, 0.0)
    slot = tl.load(Written + row * LEVELS)
    tile = tl.where((at == slot)[:, None], new.to(tl.float32)[None, :], tile)
    if writes:
        tl.store(Stored + (first + slot) * dim + lane, new, lane < dim)
        share = tl.load(Share + row * SLOTS + at, at < SLOTS, 0.0)
        pooling = tile
        for level in tl.static_range(1, LEVELS):
            slot = tl.load(Written + row * LEVELS + level)
            if slot >= 0:
                begin = tl.load(Layout + 3 * level - 3)
                size = tl.load(Layout + 3 * level - 2)
                part = tl.where((at >= begin) & (at < begin + size), share, 0.0)
                pooled = tl.sum(part[:, None] * pooling, 0)
                rounded = pooled.to(Stored.dtype.element_ty)
                tl.store(Stored + (first + slot) * dim + lane, rounded, lane < dim)
                pooling = tl.where((at == slot)[:, None], rounded.to(tl.float32)[None, :], pooling)
    return tile


@triton.jit
def attend_kernel(
    Q,
    K,
    V,
    Keys,
    Values,
    Written,
    Bias,
    Share,
    Layout,
    PooledBias,
    Out,
    scale,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    bias_step,
    dim,
    value_dim,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
    POOLED_FROM: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Store the newest token of one sequence and attend, in one query head."""
    program = tl.program_id(0)
    row, head = program // HEADS, program % HEADS
    kv_head = head // GROUPS
    writes = head % GROUPS == 0
    at = tl.arange(0, BLOCK)
    first = (row * (HEADS // GROUPS) + kv_head).to(tl.int64) * SLOTS
    lane = tl.arange(0, DIM)
    q = tl.load(Q + row * q_row + head * q_head + lane, lane < dim, 0.0).to(tl.float32)
    keys = _tile(
        Keys, first, row, K, row * k_row + kv_head * k_head, Written, Share, Layout, writes, dim, at, lane,
        SLOTS, LEVELS,
    )  # fmt: skip
    bias = tl.load(Bias + row * SLOTS + at, at < SLOTS, -float("inf"))
    bias += tl.where(at >= POOLED_FROM, tl.load(PooledBias + head * bias_step), 0.0)
    logits = tl.sum(keys * q[None, :], 1) * scale + bias
    weights = tl.exp(logits - tl.max(logits, 0))
    weights = weights / tl.sum(weights, 0)
    lane = tl.arange(0, VALUE_DIM)
    values = _tile(
        Values, first, row, V, row * v_row + kv_head * v_head, Written, Share, Layout, writes, value_dim, at, lane,
        SLOTS, LEVELS,
    )  # fmt: skip
    out = tl.sum(weights[:, None] * values, 0)
    out_at = Out + program.to(tl.int64) * value_dim + lane
    tl.store(out_at, out.to(Out.dtype.element_ty), lane < value_dim)


_append, _attend = Launcher(append_kernel), Launcher(attend_kernel)


class Decode:
    """Decoding steps of a cache with kernels."""

    def __init__(self, cache: MultiscaleCache):
        self.cache = cache
        self.block = padded(cache.slots)

    def append(self) -> None:
        """Add a leaf to every sequence and close the nodes that it completes."""
        c = self.cache
        arguments = (c.leaves, c.end, c.parent_end, c.made, c.length, c.written, c.bias, c.share, c.closes, c.layout)
        constants = {
            "SLOTS": c.slots,
            "BLOCK": self.block,
            "LEVELS": len(c.rings),
            "SINKS": c.sinks,
            "NEAR": c.near,
            "POOLED_FROM": c.pooled_from,
            "num_warps": 4,
        }
        with available.device_of(c.keys):
            _append(compiled_for(*arguments), c.batch, arguments, constants)

    def pooled(self, leaves: Tensor, forest: Hierarchy, nodes: Tensor) -> Tensor:
        """Return the means `[nodes, kv_heads, dim]` over the leaves below nodes of a rooted forest."""
        return pooled_rows(leaves, forest, nodes)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
        """Store the newest token in one layer, attend, and pool the nodes that it closes."""
        c = self.cache
        q, k, v = (last_stride_1(x) for x in (q, k, v))
        out = q.new_empty(c.batch, q.shape[1], c.value_dim)
        dim, value_dim = padded(c.head_dim), padded(c.value_dim)
        strides = *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], int(len(bias) > 1)
        tensors = (q, k, v, c.keys[layer], c.values[layer], c.written, c.bias, c.share, c.layout, bias, out)
        arguments = (*tensors, scale, *strides, c.head_dim, c.value_dim)
        constants: dict[str, Any] = {
            "HEADS": q.shape[1],
            "GROUPS": q.shape[1] // c.kv_heads,
            "SLOTS": c.slots,
            "BLOCK": self.block,
            "LEVELS": len(c.rings),
            "POOLED_FROM": c.pooled_from,
            "DIM": dim,
            "VALUE_DIM": value_dim,
            "num_warps": 4 if self.block * max(dim, value_dim) <= 2**13 else 8,
        }
        key = compiled_for(*tensors, *strides, c.head_dim, c.value_dim)
        with available.device_of(c.keys):
            _attend(key, c.batch * q.shape[1], arguments, constants)
        return out
