"""Kernel of `hsa.cluster`: one program per chunk and key/value head sorts its keys into groups and pools them.

The keys are split level by level. Before each level they are read in the order of their parts, so that all parts are
slices of one block, and their means, power iterations and coordinates are sums along its dimensions. The rank of a key in
its part is the number of keys before it, counted by comparing all pairs.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hsa.attention.clustered.keys import ITERATIONS, ClusteredKeys, start_direction
from hsa.attention.clustered.layout import Layout
from hsa.attention.clustered.triton.tiles import aligned
from hsa.attention.kernels.available import padded
from hsa.attention.kernels.triton.launch import Launcher, compiled_for
from hsa.tree.lasting import lasting

WIDE = 64
"""Head dim up to which registers are limited, so that two programs fit a multiprocessor."""


def build_keys(k: Tensor, v: Tensor, layout: Layout, *, windows: bool) -> ClusteredKeys:
    """Return the clustered keys of packed k `[keys, kv_heads, dim]` and v."""
    k, v = aligned(k), aligned(v)
    shape, chunks, (_, heads, dim), value_dim = layout.shape, layout.num_chunks, k.shape, v.shape[2]
    rows = chunks * sum(shape.rows)
    keys = ClusteredKeys(
        k=k.new_empty(heads, rows, dim),
        v=v.new_empty(heads, rows, value_dim),
        spread=k.new_empty(heads, chunks * shape.groups, dim),
        order=None if windows else k.new_empty(heads, chunks * shape.chunk, dtype=torch.int16),
        chunks=tuple(int(n) for n in layout.chunks[1:] - layout.chunks[:-1]),
        shape=shape,
    )
    if chunks:
        order = keys.spread if keys.order is None else keys.order
        scratch = order if windows else k.new_empty(2 * order.numel(), dtype=torch.int32)
        start = _start(padded(dim), k.device)
        tensors = (k, v, layout.rows_of_chunks(k.device), keys.k, keys.v, keys.spread, order, start, scratch)
        sizes = (chunks, heads, *k.stride()[:2], *v.stride()[:2])
        constants = {"CHUNK": shape.chunk, "GROUPS": shape.groups, "NODES": shape.branching[2], "DIM": dim}
        constants |= {"VALUE_DIM": value_dim, "D": padded(dim), "DV": padded(value_dim), "WINDOWS": windows}
        constants |= {"ITERATIONS": ITERATIONS, "num_warps": 8} | ({"maxnreg": 128} if dim <= WIDE else {})
        _cluster(compiled_for(*tensors, *sizes), chunks * heads, (*tensors, *sizes), constants)
    return keys


@lru_cache(maxsize=8)
def _start(dim: int, device: torch.device) -> Tensor:
    with lasting():
        return start_direction(dim, device).to(torch.float32)


@triton.jit
def _principal(x, start, SIZE: tl.constexpr, ITERATIONS: tl.constexpr):
    """Return the principal direction `[parts, D]` of keys `[parts, SIZE, D]`, and their coordinates `[parts, SIZE]`."""
    centred = x - (tl.sum(x, 1) / SIZE)[:, None, :]
    along = tl.sum(centred * start[None, None, :], 2)
    direction = tl.sum(centred * along[:, :, None], 1)
    direction = direction / _length(direction)[:, None]
    for _ in tl.static_range(ITERATIONS):
        along = tl.sum(centred * direction[:, None, :], 2)
        direction = tl.sum(centred * along[:, :, None], 1)
        direction = direction / _length(direction)[:, None]
    return direction, tl.sum(centred * direction[:, None, :], 2)


@triton.jit
def _length(x):
    """Return the lengths of vectors `[parts, D]`, 1 for zero."""
    length = tl.sqrt(tl.sum(x * x, 1))
    return tl.where(length > 0, length, 1.0)


@triton.jit
def _rank(key, scratch, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """Return the ranks of distinct keys `[PARTS, SIZE]` inside their parts. Each program has a scratch of its own."""
    part = tl.arange(0, PARTS)[:, None] * SIZE
    own = scratch + part + tl.arange(0, SIZE)[None, :]
    tl.store(own, key)
    tl.debug_barrier()
    # Read back: a key that the compiler computes twice, in another order of additions, might differ from the stored one, and
    # ranks would not be a permutation.
    key = tl.load(own)
    rank = tl.zeros([PARTS, SIZE], tl.int32)
    WIDE: tl.constexpr = min(SIZE, 32)
    for begin in range(0, SIZE, WIDE):
        other = tl.load(scratch + part + begin + tl.arange(0, WIDE)[None, :])
        rank += tl.sum((other[:, None, :] < key[:, :, None]).to(tl.int32), 2)
    tl.debug_barrier()
    return rank


@triton.jit
def _split(
    k, k_row, order, start, scratch,
    PARTS: tl.constexpr, CHUNK: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """Split every part in two halves; the first key of the chunk stays in the first part.

    Args:
        k: First key of the chunk.
        order: Keys of the chunk in the order of their parts; overwritten.
    """
    SIZE: tl.constexpr = CHUNK // PARTS
    column = tl.arange(0, D)
    slot = tl.arange(0, PARTS)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    number = tl.load(order + slot)
    rows = number.to(tl.int64)[:, :, None] * k_row
    x = tl.load(k + rows + column[None, None, :], mask=column[None, None, :] < DIM, other=0.0).to(tl.float32)
    _, along = _principal(x, start, SIZE, ITERATIONS)
    along = tl.where(tl.abs(along) < 1e30, along, 0.0)  # ranks must be a permutation, also of keys that are not finite
    low, high = tl.min(along, 1), tl.max(along, 1)
    fine = 4194303.0 / tl.where(high > low, high - low, 1.0)
    key = ((along - low[:, None]) * fine[:, None]).to(tl.int32) * 512 + number
    rank = _rank(key, scratch, PARTS, SIZE)
    of_first = tl.max(tl.max(tl.where((number == 0) & (rank * 2 >= SIZE), SIZE // 2, 0), 1), 0)
    moved = tl.where(slot < SIZE, (rank + of_first) % SIZE, rank)
    tl.store(order + tl.arange(0, PARTS)[:, None] * SIZE + moved, number)
    tl.debug_barrier()


@triton.jit
def _pool(
    source, row_stride, table, number, chunk, chunks,
    CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Store keys or values and the means of groups, nodes and chunk in a table, and return the former `[groups, keys, D]`.

    Args:
        source: First row of the chunk.
        number: `[groups, keys]` rows of the chunk in the order of the table.
    """
    SIZE: tl.constexpr = CHUNK // GROUPS
    column = tl.arange(0, D)
    there = column < DIM
    rows = number.to(tl.int64)[:, :, None] * row_stride
    x = tl.load(source + rows + column[None, None, :], mask=there[None, None, :], other=0.0)
    group, node = tl.arange(0, GROUPS), tl.arange(0, NODES)
    slot = (chunk * CHUNK + group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]).to(tl.int64)
    tl.store(table + slot[:, :, None] * DIM + column[None, None, :], x, mask=there[None, None, :])
    mean = tl.sum(x.to(tl.float32), 1) / SIZE
    row = (chunks * CHUNK + chunk * GROUPS + group).to(tl.int64)
    tl.store(table + row[:, None] * DIM + column[None, :], mean.to(x.dtype), mask=there[None, :])
    mean = tl.sum(tl.reshape(mean, [NODES, GROUPS // NODES, D]), 1) * (NODES / GROUPS)
    row = (chunks * (CHUNK + GROUPS) + chunk * NODES + node).to(tl.int64)
    tl.store(table + row[:, None] * DIM + column[None, :], mean.to(x.dtype), mask=there[None, :])
    row = (chunks * (CHUNK + GROUPS + NODES) + chunk).to(tl.int64)
    tl.store(table + row * DIM + column, (tl.sum(mean, 0) / NODES).to(x.dtype), mask=there)
    return x


@triton.jit
def cluster(
    k, v, chunk_rows, k_table, v_table, spread, order, start, scratch, chunks, heads, k_row, k_head, v_row, v_head,
    CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, WINDOWS: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    head = (tl.program_id(0) % heads).to(tl.int64)
    chunk = tl.program_id(0) // heads
    first = tl.load(chunk_rows + chunk).to(tl.int64)
    k += first * k_row + head * k_head
    v += first * v_row + head * v_head
    column = tl.arange(0, D)
    from_direction = tl.load(start + column)
    SIZE: tl.constexpr = CHUNK // GROUPS
    group = tl.arange(0, GROUPS)
    slot = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    number = slot
    if not WINDOWS:
        number_of_key = tl.arange(0, CHUNK)
        scratch += tl.program_id(0).to(tl.int64) * (2 * CHUNK)
        tl.store(scratch + number_of_key, number_of_key)
        tl.debug_barrier()
        LEVELS: tl.constexpr = _log2(GROUPS)
        for level in tl.static_range(LEVELS):
            _split(k, k_row, scratch, from_direction, scratch + CHUNK, 1 << level, CHUNK, DIM, D, ITERATIONS)
        number = tl.load(scratch + slot)
        rank = _rank(number, scratch + CHUNK, GROUPS, SIZE)  # keys of a group in their own order
        tl.store(scratch + group[:, None] * SIZE + rank, number)
        tl.debug_barrier()
        number = tl.load(scratch + slot)
        tl.store(order + head * (chunks * CHUNK) + chunk * CHUNK + slot, number.to(tl.int16))
    rows = chunks * (CHUNK + GROUPS + NODES + 1)
    k_table += head * rows * DIM
    v_table += head * rows * VALUE_DIM
    x = _pool(k, k_row, k_table, number, chunk, chunks, CHUNK, GROUPS, NODES, DIM, D)
    direction, along = _principal(x.to(tl.float32), from_direction, SIZE, ITERATIONS)
    direction = direction * tl.sqrt(tl.sum(along * along, 1) / SIZE)[:, None]
    to = spread + ((head * chunks + chunk) * GROUPS + group)[:, None] * DIM + column[None, :]
    tl.store(to, direction.to(x.dtype), mask=column[None, :] < DIM)
    _pool(v, v_row, v_table, number, chunk, chunks, CHUNK, GROUPS, NODES, VALUE_DIM, DV)


@triton.constexpr_function
def _log2(number):
    return number.bit_length() - 1


_cluster = Launcher(cluster)
