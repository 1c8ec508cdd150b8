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

import math
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
        log_count: Logarithm of the number of keys of a row, by level.
    """

    begin: tuple[Tensor, ...]
    end: tuple[Tensor, ...]
    log_count: tuple[float, ...]


def intervals_of(first: Tensor, layout: Layout, rows: int) -> Intervals:
    """Return the intervals of a tile with this number of queries, from `first` `[…, groups]`."""
    shape = layout.shape
    group = first.clamp(max=rows).to(torch.int16)
    node = group.unflatten(-1, (-1, shape.branching[1])).amin(-1)
    chunk = node.unflatten(-1, (-1, shape.branching[2])).amin(-1)
    return Intervals(
        begin=(
            group,
            node.repeat_interleave(shape.branching[1], -1),
            chunk.repeat_interleave(shape.branching[2], -1),
            torch.zeros_like(chunk),
        ),
        end=(torch.full_like(group, rows), group, node, chunk),
        log_count=(0.0, math.log(shape.group), math.log(shape.node), math.log(shape.chunk)),
    )


@dataclass(frozen=True, eq=False)
class Lists:
    """Rows of the tables that are active for some query of a tile, one list after another, padded to the longest.

    Attributes:
        rows: `[…, entries]` rows of the tables of the visible chunks; 0 for padding.
        begin, end: `[…, entries]` interval of queries; empty for padding.
        log_count: `[…, entries]` logarithm of the number of keys.
        lengths: `[…]` number of entries without padding.
    """

    rows: Tensor
    begin: Tensor
    end: Tensor
    log_count: Tensor
    lengths: Tensor


def lists_of(first: Tensor, layout: Layout, rows: int, first_chunk: int) -> Lists:
    """Lower `first` `[…, groups]` of a tile with this number of queries to lists of rows.

    The groups are those of consecutive chunks from `first_chunk` on.
    """
    shape, total = layout.shape, layout.num_chunks
    intervals = intervals_of(first.flatten(0, -2), layout, rows)
    number, begin, end, count, owner = [], [], [], [], []
    base = 0
    for level, per_chunk in enumerate(shape.rows):
        active = intervals.begin[level] < intervals.end[level]
        which, index = active.nonzero(as_tuple=True)
        low, high = intervals.begin[level][which, index], intervals.end[level][which, index]
        start = base + first_chunk * per_chunk
        if level == 0:  # an interval per group
            keys = torch.arange(shape.group, device=first.device)
            index = (index[:, None] * shape.group + keys).flatten()
            which, low, high = (x.repeat_interleave(shape.group) for x in (which, low, high))
        number.append(start + index)
        begin.append(low)
        end.append(high)
        count.append(torch.full_like(low, intervals.log_count[level], dtype=torch.float64))
        owner.append(which)
        base += total * per_chunk
    which = torch.cat(owner)
    order = which.argsort(stable=True)
    which = which[order]
    lengths = torch.bincount(which, minlength=first.flatten(0, -2).shape[0])
    slot = torch.arange(len(which), device=first.device) - (lengths.cumsum(0) - lengths)[which]
    longest = int(lengths.max()) if len(lengths) else 0

    def padded(parts: list[Tensor]) -> Tensor:
        values = torch.cat(parts)[order]
        out = values.new_zeros(len(lengths), longest)
        out[which, slot] = values
        return out.unflatten(0, first.shape[:-1])

    return Lists(padded(number), padded(begin), padded(end), padded(count), lengths.view(first.shape[:-1]))
