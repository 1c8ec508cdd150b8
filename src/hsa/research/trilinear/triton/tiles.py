"""Shared parts of the kernels of three-way attention: tiles of ragged trees, limits, reading rows, launching.

Tiles are computed from the offsets on the device, so nothing is copied to the host: tiles of tree t begin at tile
⌊offset(t) / rows⌋ + t. Every tree gets as many tiles as it needs, and at most one that stays empty.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hsa.attention.kernels.available import padded
from hsa.attention.kernels.triton.launch import last_stride_1
from hsa.research.trilinear.call import Rows

LOG2E = tl.constexpr(1.4426950408889634)


class Tile(NamedTuple):
    """Tile sizes and compiler options of a kernel.

    A limit on registers lets more programs run in parallel, so that one multiplies while another computes exponentials.
    """

    rows: int  # rows that a program keeps
    columns: int  # rows of the second set per tile
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
"""Tiles for 16-bit numbers, by kernel and padded width."""
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
"""Tiles for float32, whose products use registers instead of tensor cores."""


def tile_of(kernel: str, q: Tensor, v: Tensor) -> Tile:
    table = SINGLE if q.dtype == torch.float32 else HALF
    return table[kernel, max(32, padded(q.shape[2]), padded(v.shape[2]))]


class KernelCall(NamedTuple):
    """Inputs of all kernels."""

    rows: Rows
    offsets: tuple[Tensor, Tensor, Tensor]  # [trees + 1] leaf offsets of the trees of the three sets
    left: int | None
    right: int | None
    scale: float

    def packed(self) -> KernelCall:
        """Return the call with rows that are contiguous in memory."""
        return self._replace(rows=Rows(*map(last_stride_1, self.rows)))

    def swapped(self) -> KernelCall:
        """Return the call with the first and second set exchanged; it computes the same."""
        (q, k1, k2, v1, v2), (queries, first, second) = self.rows, self.offsets
        return self._replace(rows=Rows(q, k2, k1, v2, v1), offsets=(queries, second, first))

    def launch(self, name: str, kernel: Any, *others: Tensor) -> None:
        """Launch a kernel with a program per head and tile, of the first set for "keys" and of the queries otherwise.

        Kernel parameters are the five rows, `others`, three offsets, strides of rows and heads, sizes, limits and scale.
        """
        q, k1, _, _, v = self.rows
        own, offsets = (k1, self.offsets[1]) if name == "keys" else (q, self.offsets[0])
        if own.shape[:2].numel() == 0:
            return
        tile, trees = tile_of(name, q, v), len(offsets) - 1
        # An upper bound of the number of tiles; see the top of this file.
        programs = (triton.cdiv(len(own), tile.rows) + trees) * own.shape[1]
        kernel[(programs,)](
            *self.rows,
            *others,
            *self.offsets,
            *(stride for x in self.rows for stride in x.stride()[:2]),
            len(q),
            q.shape[1],
            trees,
            *(len(q) if x is None else min(x, len(q)) for x in (self.left, self.right)),
            self.scale,
            LIMITED=self.left is not None or self.right is not None,
            DIM=q.shape[2],
            VALUE_DIM=v.shape[2],
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            BLOCK_D=padded(q.shape[2]),
            BLOCK_V=padded(v.shape[2]),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            maxnreg=tile.registers,
        )


@triton.jit
def find_tile(offsets, trees, heads, program, ROWS: tl.constexpr):
    """Return head and tree of a program, the first row of its tile in the tree, the tree's first row and its length."""
    tile = program // heads
    low = tile * 0
    high = low + trees
    while high - low > 1:
        middle = (low + high) // 2
        before = (tl.load(offsets + middle) // ROWS).to(tl.int32) + middle <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    begin = (tile - (tl.load(offsets + low) // ROWS).to(tl.int32) - low) * ROWS
    first, length = rows_of_tree(offsets, low)
    return (program % heads).to(tl.int64), low, begin, first, length


@triton.jit
def rows_of_tree(offsets, tree):
    """Return the first row of a tree, and the number of rows."""
    first = tl.load(offsets + tree).to(tl.int64)
    return first, (tl.load(offsets + tree + 1) - first).to(tl.int32)


@triton.jit
def find_set(k, v, offsets, tree, head, k_row, k_head, v_row, v_head):
    """Return pointers to the first key and value of a tree and head, and the length of the tree."""
    first, length = rows_of_tree(offsets, tree)
    return k + (first * k_row + head * k_head), v + (first * v_row + head * v_head), length


@triton.jit
def read_rows(x, row, exists, row_stride, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Read [rows, BLOCK]; `x` points at the first row of the tree and head."""
    d = tl.arange(0, BLOCK)
    return tl.load(x + row.to(tl.int64)[:, None] * row_stride + d, mask=exists[:, None] & (d < DIM), other=0.0)


@triton.jit
def read_row(x, row, end, row_stride, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Read [1, BLOCK]; zeros from row `end` on."""
    d = tl.arange(0, BLOCK)
    return tl.load(x + row * tl.cast(row_stride, tl.int64) + d, mask=(d < DIM) & (row < end), other=0.0)[None, :]


@triton.jit
def as_product(x):
    """Return `x` in the register layout of a tensor-core product, by multiplying it with the identity.

    In this layout, the inner loop can multiply rows by a vector in registers and pass them to tensor cores; in the layout of
    a load, they would pass through shared memory every time.
    """
    if x.dtype == tl.float32:  # these products do not use tensor cores
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
    """Return log2 of the factor of weights in gradients: the root of the number of pairs, which brings weights near 1."""
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
    """Return the ranges of rows of another set that some query of a tile sees, and that all of them see."""
    low, high, all_low, all_high = 0, other_length, 0, other_length
    if LIMITED:
        last = tl.minimum(begin + ROWS, length) - 1
        low, all_low = tl.maximum(begin - left, 0), tl.maximum(last - left, 0)
        high, all_high = tl.minimum(last + right + 1, other_length), tl.minimum(begin + right + 1, other_length)
    return low, high, all_low, all_high


@triton.jit
def columns(start, high, all_low, all_high, i, left, right, COLUMNS: tl.constexpr, LIMITED: tl.constexpr):
    """Return the rows of a tile of the second set, which of them queries i see, and whether all are visible."""
    k = start + tl.arange(0, COLUMNS)
    seen = (k < high)[None, :]
    if LIMITED:
        seen = seen & sees(i[:, None], k[None, :], left, right)
    return k, seen, (start >= all_low) & (start + COLUMNS <= all_high)


@triton.jit
def part_of(PART: tl.constexpr, low, high, whole, all_low, all_high):
    """Return the range of one of three parts of low … high. Only part 1 needs no mask; it is empty unless `whole`."""
    plain = tl.where(whole & (all_low < all_high), all_low, high)
    plain_end = tl.where(whole & (all_low < all_high), all_high, high)
    if PART == 0:
        begin, end = low, plain
    elif PART == 1:
        begin, end = plain, plain_end
    else:
        begin, end = plain_end, high
    return begin, end


@triton.jit
def hide(logit, seen, i, j, left, right, LIMITED: tl.constexpr):
    """Set logits [queries, tile] to −∞ unless they are `seen` and, with limits, query i sees row j."""
    if LIMITED:
        seen = seen & sees(i, j, left, right)[:, None]
    return tl.where(seen, logit, -float("inf"))
