"""Tables of a layout that kernels read: slabs of tiles, the tiles that read each chunk, and blocks of exact keys.

A slab is a set of tiles that are processed at once, which bounds the memory of selections, lists and partial gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from hsa.attention.clustered.layout import Layout
from hsa.tree.lasting import lasting

KEY_BLOCK = 64
"""Number of keys of a block in `key_blocks`."""


@dataclass(frozen=True, eq=False)
class Slab:
    """Some tiles of a layout, those that see most chunks first.

    Attributes:
        tiles: `[tiles, 9]`: first row of q, number of rows, page of the first visible chunk, number of visible chunks, first
            exact row of k, end of the exact rows for the first query, number of visible chunks of the tiles before in the
            selection and in the slab, number of the tile in the layout.
        bundles: `[bundles, 2]`: first tile and number of tiles. The tiles of a bundle see the same chunks of the same
            sequence, at least one.
        members: Number of each tile in the layout.
        chunks: Number of visible chunks of all tiles.
    """

    tiles: Tensor
    bundles: Tensor
    members: np.ndarray
    chunks: int

    @cached_property
    def num_tiles(self) -> int:
        """Number of tiles."""
        return len(self.tiles)

    @cached_property
    def num_bundles(self) -> int:
        """Number of bundles."""
        return len(self.bundles)


def on_device(device: torch.device, *arrays: np.ndarray) -> list[Tensor]:
    """Return integers as tensors that kernels read."""
    with lasting():
        return [torch.from_numpy(x.astype(np.int32)).to(device) for x in arrays]


@lru_cache(maxsize=64)
def slabs(layout: Layout, device: torch.device, bundle: int, number: int = 1, whole: bool = True) -> list[Slab]:
    """Return the tiles in a number of slabs.

    Args:
        bundle: Maximum number of tiles per bundle.
        number: Number of slabs; there are never more slabs than tiles.
        whole: Whether the selection is that of all tiles of the layout, instead of those of the slab.
    """
    order = layout.longest_first
    rows, visible = layout.tile_row, layout.tile_chunks
    parts = [rows[:-1], np.diff(rows), layout.tile_chunk, visible, layout.tile_exact, layout.tile_end]
    columns = np.stack([*parts, layout.tile_offset[:-1], layout.tile_offset[:-1], np.arange(len(visible))], 1)[order]
    result, slab = [], _deal(len(order), bundle, number)
    for i in range(min(number, len(order))):
        part = columns[slab == i]
        part[:, 7] = np.cumsum(part[:, 3]) - part[:, 3]
        if not whole:
            part[:, 6] = part[:, 7]
        bundles = _bundles(layout.tile_sequence[part[:, 8]], part[:, 3], bundle)
        tiles, bundled = on_device(device, part, bundles)
        result.append(Slab(tiles, bundled, part[:, 8], int(part[:, 3].sum())))
    return result


def slabs_within(layout: Layout, device: torch.device, bundle: int, most: int, whole: bool) -> list[Slab]:
    """Return the tiles in slabs of at most `most` visible chunks, or of a single tile."""
    return slabs(layout, device, bundle, _number_within_chunks(layout, bundle, most), whole)


@lru_cache(maxsize=64)
def _number_within_chunks(layout: Layout, bundle: int, most: int) -> int:
    return number_within(layout, bundle, layout.tile_chunks, most)


def number_within(layout: Layout, bundle: int, sizes: np.ndarray, most: int) -> int:
    """Return the number of slabs in which the sizes of the tiles add up to at most `most`, or slabs have a single tile."""
    tiles = len(sizes)
    sizes = sizes[layout.longest_first]
    number = max(1, -(-int(sizes.sum()) // max(1, most)))
    while number < tiles and np.bincount(_deal(tiles, bundle, number), sizes).max() > most:
        number += max(1, number // 8)
    return min(number, max(1, tiles))


def _deal(tiles: int, bundle: int, number: int) -> np.ndarray:
    """Return the slab of every tile, in the order of their visible chunks, most first.

    Tiles are dealt out in turn, a bundle at a time: every slab begins with long ones and ends with short ones, which keep a
    GPU busy while the long ones finish.
    """
    return np.arange(tiles) // min(bundle, max(1, tiles // number)) % number


def _bundles(sequence: np.ndarray, visible: np.ndarray, most: int) -> np.ndarray:
    """Return `[bundles, 2]` the first tile and the number of tiles of runs with the same sequence and visible chunks."""
    tiles = len(sequence)
    starts = np.ones(tiles, bool)
    starts[1:] = (sequence[1:] != sequence[:-1]) | (visible[1:] != visible[:-1])
    run = np.maximum.accumulate(np.where(starts, np.arange(tiles), 0))
    first = np.flatnonzero((np.arange(tiles) - run) % most == 0)
    bundles = np.stack([first, np.diff(np.append(first, tiles))], 1)
    return bundles[visible[first] > 0]


@dataclass(frozen=True, eq=False)
class Readers:
    """Tiles of a slab that see each complete chunk.

    Attributes:
        tiles: `[tiles]` tiles of the slab, sequence by sequence, those that see most chunks first.
        chunks: `[chunks, 5]`: page of the chunk, its number in the sequence, first of its readers in `tiles`, number of
            readers, number of readers of the chunks before.
        total: Number of readers of all chunks.
    """

    tiles: Tensor
    chunks: Tensor
    total: int


@lru_cache(maxsize=64)
def readers(layout: Layout, slab: Slab, device: torch.device) -> Readers:
    """Return the tiles of a slab that see each complete chunk of a layout."""
    sequence = layout.tile_sequence[slab.members]
    order = np.argsort(sequence, kind="stable")
    visible = layout.tile_chunks[slab.members[order]]
    first = np.searchsorted(sequence[order], np.arange(len(layout.lengths) + 1))
    columns = []
    for s, chunks in enumerate(layout.chunk_counts):
        number = np.arange(chunks)
        seen = visible[first[s] : first[s + 1]]  # descending
        count = len(seen) - np.searchsorted(seen[::-1], number, side="right")
        columns.append(np.stack([layout.starts[s] + number, number, np.full(chunks, first[s]), count], 1))
    table = np.concatenate(columns) if columns else np.empty((0, 4), np.int64)
    table = np.concatenate([table, (np.cumsum(table[:, 3]) - table[:, 3])[:, None]], 1)
    tiles, chunk_table = on_device(device, order, table)
    return Readers(tiles, chunk_table, int(table[:, 3].sum()))


@lru_cache(maxsize=64)
def key_blocks(layout: Layout, device: torch.device) -> Tensor:
    """Return `[blocks, 6]` the rows of k in blocks that lie in one chunk, with the tiles that see them exactly.

    Columns: first row of k, number of rows, page of the chunk or −1 if it is not complete, index of the first row in the
    chunk, first tile of the layout that sees it exactly, number of such tiles.
    """
    chunk, tile, exact_chunks = layout.shape.chunk, layout.shape.tile, layout.shape.exact_chunks
    blocks, row, first_tile = [], 0, 0
    for s, (keys, held, queries) in enumerate(zip(layout.lengths, layout.recent, layout.queries, strict=True)):
        tiles = int((layout.tile_sequence == s).sum())
        begin = (np.arange(0, keys, chunk)[:, None] + np.arange(0, chunk, KEY_BLOCK)).ravel()
        end = np.minimum(np.minimum(begin + KEY_BLOCK, begin // chunk * chunk + chunk), keys)
        begin = np.maximum(begin, keys - held)
        begin, end = begin[begin < end], end[begin < end]
        number = begin // chunk
        is_complete = number < layout.chunk_counts[s]
        if layout.causal:  # tiles from that of the first key to the end of the chunk, or of the tiles that see all keys
            before = (keys - queries) // tile  # number of tiles before the first one
            low = np.clip(begin // tile - before, 0, tiles)
            last = np.where(number < exact_chunks, exact_chunks, number + 1) * chunk
            high = np.clip(-(-np.minimum(last, keys) // tile) - before, 0, tiles)
        else:
            is_pooled = is_complete & (layout.chunk_counts[s] >= exact_chunks)
            low, high = np.zeros_like(begin), np.where(is_pooled, 0, tiles)
        page = np.where(is_complete, layout.starts[s] + number, -1)
        columns = [row + begin - (keys - held), end - begin, page, begin % chunk, first_tile + low, high - low]
        blocks.append(np.stack(columns, 1))
        row, first_tile = row + held, first_tile + tiles
    return on_device(device, np.concatenate(blocks) if blocks else np.empty((0, 6), np.int64))[0]


@lru_cache(maxsize=64)
def tile_table(layout: Layout, device: torch.device) -> Tensor:
    """Return `[tiles, 4]` in the order of the layout: first row of q, number of rows, first exact row of k, their end."""
    rows = layout.tile_row
    return on_device(device, np.stack([rows[:-1], np.diff(rows), layout.tile_exact, layout.tile_end], 1))[0]
