"""Functions that the kernels of clustered attention share: aligned inputs, and reading a tile of queries."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def aligned(x: Tensor) -> Tensor:
    """Return x, copied if its rows are not contiguous or do not start at multiples of 16 elements."""
    fits = x.stride(-1) == 1 and all(stride % 16 == 0 for stride in x.stride()[:-1]) and x.data_ptr() % 16 == 0
    return x if fits else x.contiguous()


@triton.jit
def load_tile(tiles, number):
    """Return a row of `Slab.tiles`."""
    at = tiles + number * 9
    return (
        tl.load(at),
        tl.load(at + 1),
        tl.load(at + 2),
        tl.load(at + 3),
        tl.load(at + 4),
        tl.load(at + 5),
        tl.load(at + 6),
        tl.load(at + 7),
        tl.load(at + 8),
    )


@triton.jit
def load_queries(x, row, count, head, x_row, x_head, TILE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Return the rows `[TILE, PADDED]` of the queries of a tile and head; 0 behind the last one and in padding."""
    query, column = tl.arange(0, TILE), tl.arange(0, PADDED)
    rows = (row + query).to(tl.int64)[:, None]
    there = (query < count)[:, None]
    if WIDTH != PADDED:
        there = there & (column < WIDTH)[None, :]
    return tl.load(x + rows * x_row + head.to(tl.int64) * x_head + column[None, :], mask=there, other=0.0)


@triton.jit
def load_rows(table, index, stride, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Load rows of a table `[rows, WIDTH]`, padded with zeros to a power of two."""
    column = tl.arange(0, PADDED)
    at = table + index[:, None] * stride + column[None, :]
    return tl.load(at) if WIDTH == PADDED else tl.load(at, mask=column[None, :] < WIDTH, other=0.0)


@triton.jit
def rows_of_groups(group, SIZE: tl.constexpr, GROUPS: tl.constexpr, PAGE: tl.constexpr):
    """Return the rows of the keys of groups, counted from the first page of the sequence, as one vector."""
    first = group // GROUPS * PAGE + group % GROUPS * SIZE
    return tl.reshape(first[:, None] + tl.arange(0, SIZE)[None, :], [group.shape[0] * SIZE])


@triton.jit
def of_members(x, SIZE: tl.constexpr):
    """Repeat every element of a vector for the keys of its group."""
    return tl.reshape(tl.broadcast_to(x[:, None], [x.shape[0], SIZE]), [x.shape[0] * SIZE])


@triton.jit
def interval_of(kind):
    """Return the logarithm of the count of a pooled row, its first query, and the number of queries that see it."""
    return (kind & -(2**22)).to(tl.float32, bitcast=True), kind >> 8 & 127, (kind & 255).to(tl.uint32)


@triton.jit
def is_active(query, since, active):
    """Return whether queries are in an interval. The difference of earlier ones is a large unsigned number."""
    return (query - since).to(tl.uint32) < active
