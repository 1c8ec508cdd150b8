"""What the kernels of three-way attention share: tiles of ragged trees, how far a row sees, reading rows.

Packed trees are cut into tiles without a plan, so that nothing is copied to the host: tiles of tree t begin at tile
⌊offset(t) / block⌋ + t. That leaves every tree at least as many as it needs, and at most one that stays empty.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hsa.attention.kernels.available import padded

LOG2E = tl.constexpr(1.4426950408889634)


class Tile(NamedTuple):
    """Rows that a program keeps, rows of another set that it meets at once, and how it is compiled.

    Fewer registers than the compiler would take let more programs run side by side: one multiplies while another takes
    exponentials.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int = 1
    registers: int | None = None


Tiles = dict[tuple[str, int], Tile]

HALF: Tiles = {
    ("forward", 32): Tile(64, 128, 4),
    ("forward", 64): Tile(64, 128, 4),
    ("forward", 128): Tile(64, 64, 4),
    ("queries", 32): Tile(64, 64, 4),
    ("queries", 64): Tile(64, 64, 4),
    ("queries", 128): Tile(64, 32, 4),
    ("keys", 32): Tile(64, 64, 4),
    ("keys", 64): Tile(64, 64, 4),
    ("keys", 128): Tile(32, 32, 4),
}
"""16-bit numbers: by kernel and padded width."""
SINGLE: Tiles = {
    ("forward", 32): Tile(32, 32, 4),
    ("forward", 64): Tile(32, 32, 4),
    ("forward", 128): Tile(16, 32, 8),
    ("queries", 32): Tile(32, 32, 4),
    ("queries", 64): Tile(32, 32, 8),
    ("queries", 128): Tile(16, 32, 8),
    ("keys", 32): Tile(32, 32, 4),
    ("keys", 64): Tile(32, 32, 8),
    ("keys", 128): Tile(16, 32, 8),
}
"""float32, whose products take no tensor cores but registers."""


def tile_of(kernel: str, q: Tensor, v: Tensor) -> Tile:
    table = SINGLE if q.dtype == torch.float32 else HALF
    return table[kernel, max(32, padded(q.shape[2]), padded(v.shape[2]))]


def constants(tile: Tile, q: Tensor, v: Tensor) -> dict[str, int | None]:
    """Sizes that kernels are compiled for."""
    return {
        "DIM": q.shape[2],
        "VALUE_DIM": v.shape[2],
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "BLOCK_D": padded(q.shape[2]),
        "BLOCK_V": padded(v.shape[2]),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "maxnreg": tile.registers,
    }


def numbers(
    q: Tensor, k1: Tensor, k2: Tensor, v1: Tensor, v2: Tensor, offsets: Tensor, left: int | None, right: int | None
) -> list[int]:
    """Strides and sizes, as kernels take them; no limit is as far as there are rows."""
    strides = [size for x in (q, k1, k2, v1, v2) for size in x.stride()[:2]]
    limits = (len(q) if x is None else min(x, len(q)) for x in (left, right))
    return [*strides, len(q), q.shape[1], len(offsets) - 1, *limits]


def programs(rows: Tensor, offsets: Tensor, tile: Tile) -> int:
    """One per tile of `rows` and head; see the top of this file."""
    return (triton.cdiv(len(rows), tile.rows) + len(offsets) - 1) * rows.shape[1]


@triton.jit
def find_tile(offsets, trees, tile, ROWS: tl.constexpr):
    """The tree of a tile, and where in that tree the tile begins."""
    low = tile * 0
    high = low + trees
    while high - low > 1:
        middle = (low + high) // 2
        before = (tl.load(offsets + middle) // ROWS).to(tl.int32) + middle <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low, (tile - (tl.load(offsets + low) // ROWS).to(tl.int32) - low) * ROWS


@triton.jit
def rows_of_tree(offsets, tree):
    """The first row of a tree, and how many there are."""
    first = tl.load(offsets + tree).to(tl.int64)
    return first, (tl.load(offsets + tree + 1) - first).to(tl.int32)


@triton.jit
def read_rows(x, row, exists, row_stride, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """[rows, BLOCK]; `x` points at the first row of the tree and head."""
    d = tl.arange(0, BLOCK)
    return tl.load(x + row.to(tl.int64)[:, None] * row_stride + d, mask=exists[:, None] & (d < DIM), other=0.0)


@triton.jit
def read_row(x, row, end, row_stride, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """[1, BLOCK], zeros from row `end` on."""
    d = tl.arange(0, BLOCK)
    return tl.load(x + row * tl.cast(row_stride, tl.int64) + d, mask=(d < DIM) & (row < end), other=0.0)[None, :]


@triton.jit
def as_product(x):
    """`x` as tensor cores leave a product, by one with the identity.

    From there, rows times a vector are what tensor cores take from registers; from where loads leave them, they would go
    through shared memory, in every round of the inner loop.
    """
    if x.dtype == tl.float32:  # these products take no tensor cores
        product = x
    else:
        d = tl.arange(0, x.shape[1])
        product = tl.dot(x, (d[:, None] == d[None, :]).to(x.dtype)).to(x.dtype)
    return product


@triton.jit
def write_rows(x, row, exists, row_stride, values, DIM: tl.constexpr, BLOCK: tl.constexpr):
    d = tl.arange(0, BLOCK)
    target = x + row.to(tl.int64)[:, None] * row_stride + d
    tl.store(target, values.to(x.dtype.element_ty), mask=exists[:, None] & (d < DIM))


@triton.jit
def raised(length1, length2, left, right, LIMITED: tl.constexpr):
    """log2 of what weights are multiplied by in gradients: even ones come as far below 1 as a single one comes above."""
    if LIMITED:
        length1 = tl.minimum(length1, left + right + 1)
        length2 = tl.minimum(length2, left + right + 1)
    pairs = tl.maximum(length1, 1).to(tl.float32) * tl.maximum(length2, 1).to(tl.float32)
    return 0.5 * tl.log2(pairs)


@triton.jit
def sees(query, key, left, right):
    return (key >= query - left) & (key <= query + right)


@triton.jit
def reach(begin, length, other_length, left, right, ROWS: tl.constexpr, LIMITED: tl.constexpr):
    """Rows of another set that some query of a tile sees, low … high, and those that all of them see."""
    low, high, all_low, all_high = 0, other_length, 0, other_length
    if LIMITED:
        last = tl.minimum(begin + ROWS, length) - 1
        low, all_low = tl.maximum(begin - left, 0), tl.maximum(last - left, 0)
        high, all_high = tl.minimum(last + right + 1, other_length), tl.minimum(begin + right + 1, other_length)
    return low, high, all_low, all_high
