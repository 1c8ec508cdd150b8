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
        entries: `[…, entries]` int64: row and kind, as one number. Padding repeats the first row of the list, with an
            empty interval.
        lengths: `[…]` number of entries without padding.
        queries: Number of queries of the tile.
    """

    entries: Tensor
    lengths: Tensor
    queries: int

    @property
    def rows(self) -> Tensor:
        """Rows of the pages, counted from the first page of a head."""
        return self.entries >> _kind_bits(self.queries)

    @property
    def kinds(self) -> Tensor:
        """Level and interval of each row, as one number: (level · (queries + 1) + begin) · (queries + 1) + end.

        Levels are 0 for keys, 1 for groups, 2 for nodes and 3 for chunks.
        """
        return self.entries & ((1 << _kind_bits(self.queries)) - 1)


def _kind_bits(queries: int) -> int:
    """Return the number of bits of `Lists.kinds`."""
    return (4 * (queries + 1) ** 2 - 1).bit_length()


def lists_of(first: Tensor, layout: Layout, rows: int, first_chunk: int) -> Lists:
    """Lower `first` `[…, groups]` of a tile with this number of queries to lists of rows.

    The groups are those of consecutive chunks, whose pages begin with `first_chunk`.
    """
    flat, device, bits = first.flatten(0, -2), first.device, _kind_bits(rows)
    intervals = intervals_of(flat, layout, rows)
    # All keys of a group have one interval: they are one unit, like each mean.
    units, sizes, shape = [], [], layout.shape  # entry of a unit's first row without its interval, and number of rows
    for level, (per_chunk, start) in enumerate(zip(shape.rows, shape.starts, strict=True)):
        number, size = intervals.begin[level].shape[1], shape.group if level == 0 else 1
        row = torch.arange(number, device=device) * size
        row = (first_chunk + row // per_chunk) * shape.page + start + row % per_chunk
        units.append((row << bits) + level * (rows + 1) ** 2)
        sizes.append(torch.full_like(row, size))
    begin, end = torch.cat(intervals.begin, 1), torch.cat(intervals.end, 1)
    index = (begin < end).view(-1).nonzero().squeeze(1)
    which, unit = index // begin.shape[1], index % begin.shape[1]
    low, high = (x.view(-1).index_select(0, index) for x in (begin, end))
    entry = torch.cat(units).index_select(0, unit) + low.long() * (rows + 1) + high
    count = torch.cat(sizes).index_select(0, unit)
    lengths = torch.zeros(len(flat), dtype=torch.int64, device=device).index_add_(0, which, count)
    unit_of_row = torch.repeat_interleave(count)
    inside = torch.arange(len(unit_of_row), device=device) - (count.cumsum(0) - count).index_select(0, unit_of_row)
    every = entry.index_select(0, unit_of_row) + (inside << bits)
    place = torch.arange(int(lengths.max()) if len(flat) else 0, device=device)
    empty = every[lengths.cumsum(0) - lengths] >> bits << bits  # the first row of the list, for no query
    entries = empty[:, None].masked_scatter(place < lengths[:, None], every)
    return Lists(entries.unflatten(0, first.shape[:-1]), lengths.view(first.shape[:-1]), rows)
