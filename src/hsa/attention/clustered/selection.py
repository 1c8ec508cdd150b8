"""`TileSelection`: the groups that each tile of queries attends to key by key, and from which query on.

A group is open for a query if the query, or an earlier one of its tile, wants it; without causality, if any query of the
tile does. Every row of the tables is therefore active for an interval of queries of the tile, [begin, end):

    keys of a group    from where the group is opened to the end of the tile
    mean of a group    from where its node is opened (one of the node's groups is) until the group is
    mean of a node     from where its chunk is opened until the node is
    mean of a chunk    from the first query until the chunk is opened

so that every query sees every key exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hsa.attention.clustered.keys import ClusteredKeys
from hsa.attention.clustered.layout import Layout

NEVER = 255
"""Value of `TileSelection.first` for groups that are not opened."""


@dataclass(frozen=True, eq=False)
class TileSelection:
    """Open groups of every tile; the result of `hsa.select_groups`.

    Attributes:
        first: uint8, first query of the tile for which a group is open, or 255. Tile by tile, then list by list (one list
            per query head, or per key/value head), then group by group of the visible chunks.
        layout: Tiles and chunks.
        lists: Number of lists per tile.
        keys: Keys whose groups they are; None if it was made by hand.
        before: `opened` of the queries before these ones.

    >>> from hsa import cluster, select_groups
    >>> q, k, v = torch.randn(3, 600, 2, 16).unbind(0)
    >>> selection = select_groups(q, k, cluster(k, v, [600]), [600], causal=True, threshold=1e-30)
    >>> selection
    TileSelection(10 tiles, 2 lists each, 100.0% of the groups open)
    """

    first: Tensor
    layout: Layout
    lists: int
    keys: ClusteredKeys | None = None
    before: Tensor | None = None

    def __repr__(self) -> str:
        share = float((self.first != NEVER).float().mean()) if len(self.first) else 0.0
        return (
            f"TileSelection({self.layout.num_tiles:,} tiles, {self.lists} lists each, {share:.1%} of the groups open)"
        )

    def tile(self, number: int, tiles: int = 1) -> Tensor:
        """Return `[tiles, lists, groups]` of consecutive tiles that see the same number of chunks."""
        step = self.lists * self.layout.shape.groups
        begin = int(self.layout.tile_offset[number]) * step
        groups = int(self.layout.tile_chunks[number]) * self.layout.shape.groups
        return self.first[begin : begin + tiles * self.lists * groups].view(tiles, self.lists, groups)

    def opened(self) -> Tensor:
        """Return `[sequences, lists, groups]` the open groups of the last tile of every sequence.

        Pass it as `opened` with the next queries of the sequences, if they belong to the same tile.
        """
        last = _last_tiles(self.layout)
        groups = max((int(self.layout.tile_chunks[t]) for t in last if t >= 0), default=0) * self.layout.shape.groups
        groups = max(groups, 0 if self.before is None else self.before.shape[2])
        result = self.first.new_zeros(len(last), self.lists, groups, dtype=torch.bool)
        for sequence, tile in enumerate(last):
            if tile >= 0:
                first = self.tile(tile)[0]
                result[sequence, :, : first.shape[1]] = first != NEVER
            elif self.before is not None:  # no new queries
                result[sequence, :, : self.before.shape[2]] = self.before[sequence]
        return result


def _last_tiles(layout: Layout) -> list[int]:
    """Return the last tile of every sequence; −1 if it has no queries."""
    last = {int(s): t for t, s in enumerate(layout.tile_sequence)}
    return [last.get(s, -1) for s in range(len(layout.lengths))]


@dataclass(frozen=True, eq=False)
class Intervals:
    """Queries of a tile for which each row of the tables is active: [begin, end), by level.

    Attributes:
        begin, end: For keys (one interval per group), groups, nodes and chunks: `[…, number of them]`.
    """

    begin: tuple[Tensor, ...]
    end: tuple[Tensor, ...]


def intervals_of(first: Tensor, layout: Layout, rows: int) -> Intervals:
    """Return the intervals of a tile with this number of queries, from `first` `[…, groups]`."""
    _, per_node, nodes = layout.shape.branching
    group = first.clamp(max=rows).to(torch.int16)
    node = group.unflatten(-1, (-1, per_node)).amin(-1)
    chunk = node.unflatten(-1, (-1, nodes)).amin(-1)
    from_node = node[..., None].expand(*node.shape, per_node).flatten(-2)
    from_chunk = chunk[..., None].expand(*chunk.shape, nodes).flatten(-2)
    return Intervals(
        begin=(group, from_node, from_chunk, torch.zeros_like(chunk)),
        end=(torch.full_like(group, rows), group, node, chunk),
    )


@dataclass(frozen=True, eq=False)
class Lists:
    """Rows of the tables that are active for some query of a tile, one list after another, padded to the longest.

    Attributes:
        entries: `[…, entries]` int64. From the highest bit on: row, level, begin and end. Padding repeats the first row of
            the list, with an empty interval.
        bits: Number of bits of begin and of end.
        lengths: `[…]` number of entries without padding.
    """

    entries: Tensor
    bits: int
    lengths: Tensor

    @property
    def rows(self) -> Tensor:
        """Rows of the tables."""
        return self.entries >> (2 * self.bits + 2)

    @property
    def level(self) -> Tensor:
        """Level of each row: 0 for keys, 1 for groups, 2 for nodes, 3 for chunks."""
        return self.entries >> (2 * self.bits) & 3

    @property
    def interval(self) -> Tensor:
        """Queries for which each row is active, as one number: begin · 2^bits + end."""
        return self.entries & ((1 << 2 * self.bits) - 1)


def lists_of(first: Tensor, layout: Layout, rows: int, first_chunk: int) -> Lists:
    """Lower `first` `[…, groups]` of a tile with this number of queries to lists of rows.

    The groups are those of consecutive chunks from `first_chunk` on.
    """
    shape, bits, flat = layout.shape, rows.bit_length(), first.flatten(0, -2)
    intervals = intervals_of(flat, layout, rows)
    lengths = torch.zeros(len(flat), dtype=torch.int64, device=first.device)
    parts, base = [], 0  # parts: list, place in the list, and entry
    for level, per_chunk in enumerate(shape.rows):
        active = intervals.begin[level] < intervals.end[level]
        which, index = active.nonzero(as_tuple=True)
        number = active.sum(1)
        rank = torch.arange(len(which), device=first.device) - (number.cumsum(0) - number)[which]
        size = shape.group if level == 0 else 1  # all keys of a group have one interval
        row = base + first_chunk * per_chunk + index * size
        low, high = (x[active].long() for x in (intervals.begin[level], intervals.end[level]))
        entry = (((row << 2 | level) << bits | low) << bits) | high
        inside = torch.arange(size, device=first.device)
        place = (lengths[which] + rank * size)[:, None] + inside
        parts.append((which[:, None], place, entry[:, None] + (inside << 2 * bits + 2)))
        lengths = lengths + number * size
        base += layout.num_chunks * per_chunk
    entries = torch.full((len(flat), int(lengths.max()) if len(flat) else 0), -1, device=first.device)
    for which, place, entry in parts:
        entries[which, place] = entry
    empty = entries[:, :1] >> 2 * bits << 2 * bits  # the first row of the list, for no query
    entries = torch.where(entries < 0, empty, entries)
    return Lists(entries.unflatten(0, first.shape[:-1]), bits, lengths.view(first.shape[:-1]))
