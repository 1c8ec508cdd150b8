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
    at = tiles + number * 8
    return (
        tl.load(at),
        tl.load(at + 1),
        tl.load(at + 2),
        tl.load(at + 3),
        tl.load(at + 4),
        tl.load(at + 5),
        tl.load(at + 6),
        tl.load(at + 7),
    )


@triton.jit
def load_queries(q, row, count, head, q_row, q_head, TILE: tl.constexpr, DIM: tl.constexpr):
    """Return the queries `[TILE, DIM]` of a tile and head; 0 behind the last one."""
    query, column = tl.arange(0, TILE), tl.arange(0, DIM)
    rows = (row + query).to(tl.int64)[:, None]
    return tl.load(
        q + rows * q_row + head.to(tl.int64) * q_head + column[None, :], mask=query[:, None] < count, other=0.0
    )
