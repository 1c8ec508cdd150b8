"""Kernel of `hsa.cluster`: one program per chunk and key/value head sorts its keys into groups and pools them.

The keys are split level by level. At each level they are read in the order of their parts, so that all parts are slices of
one block, and their power iterations and coordinates are sums along its dimensions. Then every part is sorted.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hsa.attention.clustered.keys import EIGHT_BITS, ITERATIONS, UNIT, ClusteredKeys, scored_dim, start_direction
from hsa.attention.clustered.layout import Layout, Shape
from hsa.attention.clustered.triton.tiles import aligned
from hsa.attention.kernels import available
from hsa.attention.kernels.available import padded
from hsa.attention.kernels.triton.launch import INTERPRETED, Launcher, Prepared, compiled_for
from hsa.attention.kernels.triton.recording import constant, empty
from hsa.tree.lasting import lasting

NARROWEST = 32
"""Smallest number of channels of 8-bit products."""
WIDE = 64
"""Head dim up to which registers are limited, so that two programs fit a multiprocessor."""


def build_keys(k: Tensor, v: Tensor, layout: Layout, *, windows: bool) -> ClusteredKeys:
    """Return the clustered keys of packed k `[keys, kv_heads, dim]` and v."""
    k, v = aligned(k), aligned(v)
    shape, chunks, (_, heads, dim), value_dim = layout.shape, layout.num_chunks, k.shape, v.shape[2]
    parts = [heads * chunks * shape.page * dim, heads * chunks * shape.page * value_dim]
    pages = empty(k, sum(parts)).split(parts)
    dtype, number = score_dtype(k.dtype, dim, k.device), scored_dim(dim)
    keys = ClusteredKeys(
        k=pages[0].view(heads, chunks, shape.page, dim),
        v=pages[1].view(heads, chunks, shape.page, value_dim),
        scores=empty(k, heads, chunks, shape.branching[2], 2, shape.branching[1], number, dtype=dtype),
        channels=empty(k, heads, chunks, number, dtype=torch.int16),
        order=None if windows else empty(k, heads, chunks, shape.chunk, dtype=torch.int16),
        chunks=layout.chunk_counts,
        shape=shape,
    )
    if chunks:
        strides = (*k.stride()[:2], *v.stride()[:2])
        order = keys.channels if keys.order is None else keys.order  # not written for windows
        first_rows, start = constant(layout.rows_of_chunks(k.device)), constant(start_of(dim, k.device))
        choose, kernel = _kernels(layout, k.dtype, heads, dim, value_dim, strides, windows, dtype)
        choose(chunks * heads, (k, first_rows, keys.channels, chunks, heads, *strides[:2]))
        tensors = (k, v, first_rows, keys.k, keys.v, keys.scores, keys.channels, order, start)
        kernel(chunks * heads, (*tensors, chunks, heads, *strides))
    return keys


def cluster_pages(keys: ClusteredKeys, pages: Tensor) -> None:
    """Cluster and pool chunks in place, whose keys are in the order of time.

    Args:
        pages: `[chunks]` int32 their pages.
    """
    (heads, number, _, dim), value_dim, shape = keys.k.shape, keys.v.shape[3], keys.shape
    order, start = keys.channels if keys.order is None else keys.order, start_of(dim, pages.device)
    constants = constants_of(shape, dim, value_dim, keys.order is None, keys.scores.dtype)
    tensors = (keys.k, keys.v, pages, keys.scores, keys.channels, order, start)
    sizes = number, number if keys.capacity is None else keys.capacity, heads
    key = compiled_for(*tensors, *sizes)
    _choose_in_place(key, len(pages) * heads, (keys.k, pages, keys.channels, *sizes), _choice_constants(shape, dim))
    _cluster_in_place(key, len(pages) * heads, (*tensors, *sizes), constants)


@lru_cache(maxsize=512)
def _kernels(
    layout: Layout,
    dtype: torch.dtype,
    heads: int,
    dim: int,
    value_dim: int,
    strides: tuple[int, ...],
    windows: bool,
    scores: torch.dtype,
) -> tuple[Prepared, Prepared]:
    key = dtype, compiled_for(layout.num_chunks, heads, *strides)
    choose = Prepared(_choose, key, _choice_constants(layout.shape, dim))
    return choose, Prepared(_cluster, key, constants_of(layout.shape, dim, value_dim, windows, scores))


def _choice_constants(shape: Shape, dim: int) -> dict[str, Any]:
    page = {"CHUNK": shape.chunk, "PAGE": shape.page}
    return {**page, "DIM": dim, "CHANNELS": scored_dim(dim), "num_warps": 4}


def constants_of(shape: Shape, dim: int, value_dim: int, windows: bool, scores: torch.dtype) -> dict[str, Any]:
    """Return the compile-time constants of `cluster_chunk`, and launch options."""
    constants = {
        "CHUNK": shape.chunk, "GROUPS": shape.groups, "NODES": shape.branching[2], "DIM": dim, "VALUE_DIM": value_dim,
        "DV": padded(value_dim), "WINDOWS": windows, "ITERATIONS": ITERATIONS,
        "CHANNELS": scored_dim(dim), "UNIT": unit_of(scores), "num_warps": 8,
    }  # fmt: skip
    return constants | ({"maxnreg": 128} if dim <= WIDE else {})


def score_dtype(dtype: torch.dtype, dim: int, device: torch.device) -> torch.dtype:
    """Return the type of `ClusteredKeys.scores`: 8 bits for half precision, if the GPU multiplies them."""
    fits = dtype.itemsize == 2 and scored_dim(dim) >= NARROWEST and not INTERPRETED
    return EIGHT_BITS if fits and available.capability(device) >= (8, 9) else dtype


def unit_of(scores: torch.dtype) -> float:
    """Return the factor of means and spreads in scores of this type."""
    return UNIT if scores == EIGHT_BITS else 1.0


@lru_cache(maxsize=8)
def start_of(dim: int, device: torch.device) -> Tensor:
    """Return the start of power iterations on a device."""
    with lasting():
        return start_direction(dim, device).to(torch.float32)


@triton.jit
def _direction(x, start, SIZE: tl.constexpr, ITERATIONS: tl.constexpr):
    """Return a vector `[parts, D]` along the principal direction of keys `[parts, SIZE, D]`.

    The coordinates are centred, which has the same effect as centring the keys.
    """
    along = tl.sum(x * start[None, None, :], 2)
    direction = tl.sum(x * (along - (tl.sum(along, 1) / SIZE)[:, None])[:, :, None], 1)
    for _ in tl.static_range(ITERATIONS):
        direction /= _length(direction)[:, None]
        along = tl.sum(x * direction[:, None, :], 2)
        direction = tl.sum(x * (along - (tl.sum(along, 1) / SIZE)[:, None])[:, :, None], 1)
    return direction


@triton.jit
def _length(x):
    """Return the lengths of vectors `[parts, D]`, 1 for zero."""
    length = tl.sqrt(tl.sum(x * x, 1))
    return tl.where(length > 0, length, 1.0)


@triton.jit
def _sorted(
    k, k_row, number, start, scratch,
    PARTS: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """Return the keys of every part, numbers `[PARTS, SIZE]`, sorted along the principal direction of the part.

    Args:
        scratch: Memory for one integer per key.
    """
    column = tl.arange(0, DIM)
    x = tl.load(k + number[:, :, None] * k_row + column[None, None, :]).to(tl.float32)
    direction = _direction(x, start, SIZE, ITERATIONS)
    along = tl.sum(x * (direction / _length(direction)[:, None])[:, None, :], 2)
    along = tl.where(tl.abs(along) < 1e30, along, 0.0)  # not of keys that are not finite
    low, high = tl.min(along, 1), tl.max(along, 1)
    fine = 4194303.0 / tl.where(high > low, high - low, 1.0)
    rank = ((along - low[:, None]) * fine[:, None]).to(tl.int32)
    # Stored and loaded again, so that each thread has one integer: along a block of keys, eight threads have the same ones.
    slot = tl.arange(0, PARTS)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(scratch + slot, rank * 512 + number)
    tl.debug_barrier()
    keys = tl.reshape(tl.load(scratch + tl.arange(0, PARTS * SIZE)), [PARTS, SIZE])
    tl.debug_barrier()
    return tl.sort(keys, 1) & 511


@triton.jit
def choose_channels(k, k_row, channels, CHUNK: tl.constexpr, DIM: tl.constexpr, CHANNELS: tl.constexpr):
    """Store the channels that tell the keys of a chunk apart best, given its first row, as `scored_channels` does."""
    HALF: tl.constexpr = DIM // 2
    row, pair = tl.arange(0, CHUNK), tl.arange(0, HALF)
    at = k + row[:, None] * k_row + pair[None, :]
    low, high = tl.load(at).to(tl.float32), tl.load(at + HALF).to(tl.float32)
    weight = _length_times_deviation(low, CHUNK) + _length_times_deviation(high, CHUNK)
    weight = tl.where(weight == weight, weight, float("inf"))
    other, one = weight[:, None], weight[None, :]
    is_before = (other > one) | ((other == one) & (pair[:, None] < pair[None, :]))
    is_chosen = tl.sum(is_before.to(tl.int32), 0) < CHANNELS // 2
    to = channels + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(to, pair.to(tl.int16), mask=is_chosen)
    tl.store(to + CHANNELS // 2, (pair + HALF).to(tl.int16), mask=is_chosen)


@triton.jit
def _length_times_deviation(x, SIZE: tl.constexpr):
    centred = x - (tl.sum(x, 0) / SIZE)[None, :]
    return tl.sqrt(tl.sum(x * x, 0)) * tl.sqrt(tl.sum(centred * centred, 0))


@triton.jit
def choose(
    k, chunk_rows, channels, chunks, heads, k_row, k_head,
    CHUNK: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Choose the channels in which groups are scored, for the first chunk of every sequence."""
    head = (tl.program_id(0) % heads).to(tl.int64)
    chunk = tl.program_id(0) // heads
    if tl.load(chunk_rows + chunks + chunk) == chunk:
        k += tl.load(chunk_rows + chunk).to(tl.int64) * k_row + head * k_head
        choose_channels(k, k_row, channels + (head * chunks + chunk) * CHANNELS, CHUNK, DIM, CHANNELS)


@triton.jit
def choose_in_place(
    k_pages, pages, channels, num_pages, capacity, heads,
    CHUNK: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    head = (tl.program_id(0) % heads).to(tl.int64)
    page = tl.load(pages + tl.program_id(0) // heads)
    if page % capacity == 0:
        page += head * num_pages
        choose_channels(k_pages + page * (PAGE * DIM), DIM, channels + page * CHANNELS, CHUNK, DIM, CHANNELS)


@triton.jit
def _pool(
    source, row_stride, page, number, group,
    CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Store keys or values and the means of groups, nodes and chunk in a page, and return the former `[groups, keys, D]`.

    Args:
        source: First row of the chunk. It may be that of the page.
        number: `[groups, keys]` rows of the chunk.
        group: `[groups]` index of each group in the page.
    """
    SIZE: tl.constexpr = CHUNK // GROUPS
    PER_NODE: tl.constexpr = GROUPS // NODES
    column = tl.arange(0, D)
    there = column < DIM
    x = tl.load(source + number[:, :, None] * row_stride + column[None, None, :], mask=there[None, None, :], other=0.0)
    tl.debug_barrier()  # all rows are read before any is written
    row = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(page + row[:, :, None] * DIM + column[None, None, :], x, mask=there[None, None, :])
    mean = tl.sum(x.to(tl.float32), 1) / SIZE
    tl.store(page + (CHUNK + group)[:, None] * DIM + column[None, :], mean.to(x.dtype), mask=there[None, :])
    mean = tl.sum(tl.reshape(mean, [NODES, PER_NODE, D]), 1) / PER_NODE
    node = tl.min(tl.reshape(group, [NODES, PER_NODE]), 1) // PER_NODE
    tl.store(page + (CHUNK + GROUPS + node)[:, None] * DIM + column[None, :], mean.to(x.dtype), mask=there[None, :])
    whole = (tl.sum(mean, 0) / NODES).to(x.dtype)
    tl.store(page + (CHUNK + GROUPS + NODES) * DIM + column, whole, mask=there)
    return x


@triton.jit
def cluster_chunk(
    k, v, k_row, v_row, k_page, v_page, scores, channels, order, start, of_first,
    CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DV: tl.constexpr, WINDOWS: tl.constexpr, ITERATIONS: tl.constexpr, CHANNELS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Sort the keys of a chunk of one head into groups, and pool them.

    Args:
        k, v: First row of the chunk, which may be that of its page.
        k_page, v_page, scores, channels, order: Memory for the results of this chunk and head.
        start: Start of power iterations.
        of_first: Channels of the first chunk of the sequence.
    """
    column = tl.arange(0, DIM)
    from_direction = tl.load(start + column)
    SIZE: tl.constexpr = CHUNK // GROUPS
    PER_NODE: tl.constexpr = GROUPS // NODES
    group = tl.arange(0, GROUPS)
    number = tl.reshape(tl.arange(0, CHUNK), [1, CHUNK])
    if not WINDOWS:
        scratch = (k_page + CHUNK * DIM).to(tl.pointer_type(tl.int32), bitcast=True)  # the means of groups follow later
        LEVELS: tl.constexpr = _log2(GROUPS)
        for level in tl.static_range(LEVELS):
            number = tl.reshape(number, [1 << level, CHUNK >> level])
            number = _sorted(k, k_row, number, from_direction, scratch, 1 << level, CHUNK >> level, DIM, ITERATIONS)
        number = tl.sort(tl.reshape(number, [GROUPS, SIZE]), 1)  # keys of a group in their own order
        # Exclusive or swaps halves of the tree, so that the first key of the chunk comes into the first group.
        group = group ^ tl.sum(tl.where(tl.min(number, 1) == 0, group, 0), 0)
        to = order + group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        tl.store(to, number.to(order.dtype.element_ty))
    number = tl.reshape(number, [GROUPS, SIZE])
    x = _pool(k, k_row, k_page, number, group, CHUNK, GROUPS, NODES, DIM, DIM).to(tl.float32)
    direction = _direction(x, from_direction, SIZE, ITERATIONS)
    direction /= _length(direction)[:, None]
    along = tl.sum(x * direction[:, None, :], 2)
    along -= (tl.sum(along, 1) / SIZE)[:, None]
    direction *= tl.sqrt(tl.sum(along * along, 1) / SIZE)[:, None]
    mean = tl.sum(x, 1) / SIZE
    mean -= (tl.sum(mean, 0) / GROUPS)[None, :]
    place = tl.arange(0, CHANNELS)
    channel = tl.load(of_first + place)
    tl.store(channels + place, channel)
    is_channel = channel[:, None] == column[None, :]
    place = tl.sum(tl.where(is_channel, place[:, None], 0), 0)  # of each column
    is_scored = tl.sum(is_channel.to(tl.int32), 0)[None, :] > 0
    row = group // PER_NODE * (PER_NODE * 2) + group % PER_NODE
    to = scores + row[:, None] * CHANNELS + place[None, :]
    tl.store(to, (mean * UNIT).to(scores.dtype.element_ty), mask=is_scored)
    tl.store(to + PER_NODE * CHANNELS, (direction * UNIT).to(scores.dtype.element_ty), mask=is_scored)
    _pool(v, v_row, v_page, number, group, CHUNK, GROUPS, NODES, VALUE_DIM, DV)


@triton.jit
def cluster(
    k, v, chunk_rows, k_pages, v_pages, scores, channels, order, start, chunks, heads, k_row, k_head, v_row, v_head,
    CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DV: tl.constexpr, WINDOWS: tl.constexpr, ITERATIONS: tl.constexpr, CHANNELS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    head = (tl.program_id(0) % heads).to(tl.int64)
    chunk = tl.program_id(0) // heads
    first, first_chunk = tl.load(chunk_rows + chunk).to(tl.int64), tl.load(chunk_rows + chunks + chunk)
    page = head * chunks + chunk
    ROWS: tl.constexpr = CHUNK + GROUPS + NODES + 1
    cluster_chunk(
        k + first * k_row + head * k_head, v + first * v_row + head * v_head, k_row, v_row,
        k_pages + page * (ROWS * DIM), v_pages + page * (ROWS * VALUE_DIM), scores + page * (2 * GROUPS * CHANNELS),
        channels + page * CHANNELS, order + page * CHUNK, start, channels + (head * chunks + first_chunk) * CHANNELS,
        CHUNK, GROUPS, NODES, DIM, VALUE_DIM, DV, WINDOWS, ITERATIONS, CHANNELS, UNIT
    )  # fmt: skip


@triton.jit
def cluster_in_place(
    k_pages, v_pages, pages, scores, channels, order, start, num_pages, capacity, heads,
    CHUNK: tl.constexpr, GROUPS: tl.constexpr, NODES: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DV: tl.constexpr, WINDOWS: tl.constexpr, ITERATIONS: tl.constexpr, CHANNELS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    head = (tl.program_id(0) % heads).to(tl.int64)
    of_head = tl.load(pages + tl.program_id(0) // heads)
    page = head * num_pages + of_head
    ROWS: tl.constexpr = CHUNK + GROUPS + NODES + 1
    k_pages += page * (ROWS * DIM)
    v_pages += page * (ROWS * VALUE_DIM)
    cluster_chunk(
        k_pages, v_pages, DIM, VALUE_DIM, k_pages, v_pages, scores + page * (2 * GROUPS * CHANNELS),
        channels + page * CHANNELS, order + page * CHUNK, start, channels + (page - of_head % capacity) * CHANNELS, CHUNK,
        GROUPS, NODES, DIM, VALUE_DIM, DV, WINDOWS, ITERATIONS, CHANNELS, UNIT
    )  # fmt: skip


@triton.constexpr_function
def _log2(number):
    return number.bit_length() - 1


_cluster, _cluster_in_place = Launcher(cluster), Launcher(cluster_in_place)
_choose, _choose_in_place = Launcher(choose), Launcher(choose_in_place)
