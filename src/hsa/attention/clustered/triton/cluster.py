"""Kernel of `hsa.cluster`: one program per chunk and key/value head sorts its keys into groups and pools them.

The keys of a chunk stay in registers, in their own order; only the number of the part that each key belongs to changes.
All parts of a level are split at once: with the matrix that tells the part of every key, means and power iterations of
all parts are a few small matrix products, of 16 or 32 rows. The rank of a key is the number of keys before it, counted by comparing all
pairs.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hsa.attention.clustered.keys import ITERATIONS, ClusteredKeys, start_direction
from hsa.attention.clustered.layout import Layout
from hsa.attention.kernels.available import padded
from hsa.tree.lasting import lasting

WARPS, STAGES = 8, 2


def build_keys(k: Tensor, v: Tensor, layout: Layout, *, windows: bool) -> ClusteredKeys:
    """Return the clustered keys of packed k `[keys, kv_heads, dim]` and v."""
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
        _cluster[(chunks * heads,)](
            k,
            v,
            layout.rows_of_chunks(k.device),
            keys.k,
            keys.v,
            keys.spread,
            keys.spread if keys.order is None else keys.order,
            _start(padded(dim), k.device),
            keys.spread if keys.order is None else k.new_empty(keys.order.numel(), dtype=torch.int64),
            chunks,
            heads,
            *k.stride()[:2],
            *v.stride()[:2],
            CHUNK=shape.chunk,
            GROUPS=shape.groups,
            NODES=shape.branching[2],
            DIM=dim,
            VALUE_DIM=value_dim,
            D=padded(dim),
            DV=padded(value_dim),
            WINDOWS=windows,
            ITERATIONS=ITERATIONS,
            PRECISION="ieee" if k.dtype == torch.float32 else "tf32",
            num_warps=WARPS,
            num_stages=STAGES,
        )
    return keys


@triton.jit
def _principal(x, is_member, start, size, D: tl.constexpr, ITERATIONS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Return the principal direction of each part `[parts, D]`, and the coordinate of its members `[parts, keys]`, 0 of others.

    Args:
        x: Keys `[keys, D]`.
        is_member: `[parts, keys]`.
        start: Direction `[D]` from which power iterations start.
        size: Number of members of a part.
    """
    mean = tl.dot(is_member.to(x.dtype), x, input_precision=PRECISION) / size
    direction = tl.broadcast_to(tl.load(start + tl.arange(0, D))[None, :], mean.shape).to(x.dtype)
    for _ in range(ITERATIONS + 1):
        along = _along(x, mean, direction, is_member, PRECISION).to(x.dtype)
        wide = tl.dot(along, x, input_precision=PRECISION) - tl.sum(along.to(tl.float32), 1)[:, None] * mean
        length = tl.sqrt(tl.sum(wide * wide, 1))
        direction = (wide / tl.where(length > 0, length, 1.0)[:, None]).to(x.dtype)
    return direction, _along(x, mean, direction, is_member, PRECISION)


@triton.jit
def _along(x, mean, direction, is_member, PRECISION: tl.constexpr):
    """Return the coordinates of centred members along a direction."""
    along = tl.dot(direction, tl.trans(x), input_precision=PRECISION)
    return tl.where(is_member, along - tl.sum(mean * direction.to(tl.float32), 1)[:, None], 0.0)


@triton.jit
def _split(x, part, start, scratch, parts, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, D: tl.constexpr, ITERATIONS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Return the part of each key after all parts are split in two; the first key stays in the first part."""
    is_member = part[None, :] == tl.arange(0, COLUMNS)[:, None]
    _, along = _principal(x, is_member, start, CHUNK / parts.to(tl.float32), D, ITERATIONS, PRECISION)
    coordinate = tl.sum(along, 0)
    coordinate = tl.where(coordinate == coordinate, coordinate, 3.0e38)  # NaN: ranks must be a permutation
    bits = coordinate.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # ordered as the numbers are
    rank = _rank((part.to(tl.int64) << 32) + bits, scratch, CHUNK)  # `bits` may be negative
    upper = rank * 2 * parts // CHUNK
    of_first = tl.sum(tl.where(tl.arange(0, CHUNK) == 0, upper, 0), 0)
    return tl.where(upper < 2, upper ^ of_first, upper)


@triton.jit
def _rank(key, scratch, CHUNK: tl.constexpr):
    """Return the rank of every key of a chunk; equal keys in their order. Each program has a scratch of its own."""
    number = tl.arange(0, CHUNK)
    key = key * CHUNK + number
    tl.debug_barrier()
    tl.store(scratch + number, key)
    tl.debug_barrier()
    rank = tl.zeros([CHUNK], tl.int32)
    WIDE: tl.constexpr = min(CHUNK, 32)
    for begin in range(0, CHUNK, WIDE):
        other = tl.load(scratch + begin + tl.arange(0, WIDE))
        rank += tl.sum((other[None, :] < key[:, None]).to(tl.int32), 1)
    return rank


@triton.jit
def _store_means(table, x, member, base, chunk, chunks, CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Store the means of groups, nodes and chunk behind the keys of a table; `member` is `[groups, keys]`."""
    column = tl.arange(0, D)
    wide: tl.constexpr = D != DIM
    group = tl.arange(0, GROUPS)
    mean = tl.dot(member, x, input_precision=PRECISION) * (GROUPS / CHUNK)  # [GROUPS, D]
    row = base + chunks * CHUNK + chunk * GROUPS + group
    there = (column[None, :] < DIM) | (not wide)
    tl.store(table + row.to(tl.int64)[:, None] * DIM + column[None, :], mean.to(x.dtype), mask=there)
    node = tl.arange(0, NODES)
    node_mean = tl.sum(tl.reshape(mean, [NODES, GROUPS // NODES, D]), 1) * (NODES / GROUPS)
    row = base + chunks * (CHUNK + GROUPS) + chunk * NODES + node
    tl.store(table + row.to(tl.int64)[:, None] * DIM + column[None, :], node_mean.to(x.dtype), mask=there)
    root = tl.sum(node_mean, 0) * (1.0 / NODES)
    row = base + chunks * (CHUNK + GROUPS + NODES) + chunk
    tl.store(table + row.to(tl.int64) * DIM + column, root.to(x.dtype), mask=(column < DIM) | (not wide))


@triton.jit
def _cluster(
    k, v, chunk_rows, k_table, v_table, spread, order, start, scratch,
    chunks, heads, k_row, k_head, v_row, v_head,
    CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, WINDOWS: tl.constexpr, ITERATIONS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % heads
    chunk = tl.program_id(0) // heads
    first = tl.load(chunk_rows + chunk)
    number = tl.arange(0, CHUNK)
    column = tl.arange(0, D)
    rows = (first + number).to(tl.int64)
    x = tl.load(k + rows[:, None] * k_row + head * k_head + column[None, :], mask=column[None, :] < DIM, other=0.0)
    # Relative to the mean of the chunk, so that differences between similar keys stay precise.
    centred = (x - (tl.sum(x.to(tl.float32), 0) / CHUNK)[None, :]).to(x.dtype)
    group = number // (CHUNK // GROUPS)
    slot = number
    if not WINDOWS:
        scratch += tl.program_id(0).to(tl.int64) * CHUNK
        group = tl.zeros([CHUNK], tl.int32)
        LEVELS: tl.constexpr = _log2(GROUPS)
        parts = tl.full([], 1, tl.int32)
        for _ in range(LEVELS):
            group = _split(centred, group, start, scratch, parts, max(16, GROUPS // 2), CHUNK, D, ITERATIONS, PRECISION)
            parts *= 2
        slot = _rank(group.to(tl.int64), scratch, CHUNK)
        tl.store(order + head * (chunks * CHUNK) + chunk * CHUNK + slot, number.to(tl.int16))
    base = head.to(tl.int64) * (chunks * (CHUNK + GROUPS + NODES + 1))
    to = (base + chunk * CHUNK + slot)[:, None]
    tl.store(k_table + to * DIM + column[None, :], x, mask=column[None, :] < DIM)
    is_member = group[None, :] == tl.arange(0, GROUPS)[:, None]
    member = is_member.to(x.dtype)
    _store_means(k_table, x, member, base, chunk, chunks, CHUNK, GROUPS, NODES, DIM, D, PRECISION)
    direction, along = _principal(centred, is_member, start, CHUNK // GROUPS, D, ITERATIONS, PRECISION)
    deviation = tl.sqrt(tl.sum(along * along, 1) * (GROUPS / CHUNK))
    to_spread = spread + (head * chunks * GROUPS + chunk * GROUPS + tl.arange(0, GROUPS)).to(tl.int64)[:, None] * DIM
    wide = direction.to(tl.float32) * deviation[:, None]
    tl.store(to_spread + column[None, :], wide.to(x.dtype), mask=column[None, :] < DIM)

    value_column = tl.arange(0, DV)
    there = value_column[None, :] < VALUE_DIM
    y = tl.load(v + rows[:, None] * v_row + head * v_head + value_column[None, :], mask=there, other=0.0)
    tl.store(v_table + to * VALUE_DIM + value_column[None, :], y, mask=there)
    _store_means(v_table, y, member.to(y.dtype), base, chunk, chunks, CHUNK, GROUPS, NODES, VALUE_DIM, DV, PRECISION)


@lru_cache(maxsize=8)
def _start(dim: int, device: torch.device) -> Tensor:
    with lasting():
        return start_direction(dim, device).to(torch.float32)


@triton.constexpr_function
def _log2(number):
    return number.bit_length() - 1
