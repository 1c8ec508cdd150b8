"""`Layout`: the chunks of the keys and the tiles of the queries of a packed batch, as index tensors.

The keys of a sequence are cut into chunks of consecutive keys. A complete chunk is a small regular tree, given by its
`branching`: keys in groups, groups in nodes, nodes in the chunk. Queries are cut into *tiles* of consecutive tokens. All
queries of a tile see the same complete chunks through their trees, and further keys exactly:

- causal: the chunks before the tile's own chunk, and exactly the keys of that chunk up to the query;
- otherwise: all complete chunks, and exactly the keys after the last of them.

Tiles that would see fewer keys through trees than `Shape.exact_until` see all of their keys exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hsa.attention.checks import check_count
from hsa.errors import InvalidInput
from hsa.tree.hierarchy import integers
from hsa.tree.lasting import lasting

BRANCHING = (8, 8, 4)
"""Default sizes: keys per group, groups per node, nodes per chunk."""
TILE = 64
"""Default number of queries per tile."""
WIDEST_TILE = 128
"""Maximum number of queries per tile: rows of a tile are stored as bytes."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the trees and tiles.

    >>> Shape().chunk, Shape().groups
    (256, 32)
    """

    branching: tuple[int, int, int] = BRANCHING
    tile: int = TILE
    exact_until: int = 0

    @property
    def group(self) -> int:
        """Number of keys per group."""
        return self.branching[0]

    @property
    def node(self) -> int:
        """Number of keys per node."""
        return self.branching[0] * self.branching[1]

    @property
    def chunk(self) -> int:
        """Number of keys per chunk."""
        return self.node * self.branching[2]

    @property
    def groups(self) -> int:
        """Number of groups per chunk."""
        return self.branching[1] * self.branching[2]

    @property
    def rows(self) -> tuple[int, int, int, int]:
        """Number of keys, groups, nodes and roots of a chunk."""
        return self.chunk, self.groups, self.branching[2], 1

    @property
    def starts(self) -> tuple[int, int, int, int]:
        """First row of the keys, the groups, the nodes and the root in the page of a chunk."""
        return 0, self.chunk, self.chunk + self.groups, self.page - 1

    @property
    def page(self) -> int:
        """Number of rows of a chunk: its keys, then the means of its groups, its nodes and all of its keys."""
        return sum(self.rows)

    @property
    def exact_chunks(self) -> int:
        """Number of chunks below which a tile sees all of its keys exactly."""
        return -(-self.exact_until // self.chunk)

    def first_exact(self, position: int) -> int:
        """Return the first key that a causal query at this position sees exactly."""
        chunks = position // self.chunk
        return 0 if chunks < self.exact_chunks else chunks * self.chunk

    @classmethod
    def of(cls, branching: Any = BRANCHING, tile: Any = TILE, exact_until: Any = 0, *, causal: bool) -> Shape:
        """Check the sizes and return them as a shape."""
        given = tuple(branching) if isinstance(branching, Sequence) and not isinstance(branching, str) else ()
        if len(given) != 3:
            raise InvalidInput(
                "branching",
                expected="keys per group, groups per node and nodes per chunk, such as (8, 8, 4)",
                got=repr(branching),
            )
        sizes = tuple(_power_of_2(f"branching[{i}]", b, 1 if i else 2, 256) for i, b in enumerate(given))
        first = check_count("exact_until", exact_until, "a number of tokens, 0 or more")
        shape = cls(sizes, _power_of_2("tile", tile, 1, WIDEST_TILE), first)  # type: ignore[arg-type]
        if shape.chunk > 4096:
            raise InvalidInput(
                "branching", expected="chunks of at most 4,096 keys", got=f"{sizes}: {shape.chunk:,} keys"
            )
        if causal and shape.tile > shape.chunk:
            raise InvalidInput(
                "tile",
                expected=f"at most {shape.chunk}, the keys of a chunk, in causal attention",
                got=shape.tile,
                fix="The queries of a tile must lie in one chunk",
            )
        return shape


def _power_of_2(name: str, value: Any, least: int, most: int) -> int:
    expected = f"a power of two from {least} to {most}"
    number = check_count(name, value, expected, least)
    if number > most or number & (number - 1):
        raise InvalidInput(name, expected=expected, got=value)
    return number


@dataclass(frozen=True, eq=False)
class Layout:
    """Chunks and tiles of a packed batch.

    Attributes:
        lengths: Number of keys of every sequence.
        queries: Number of queries of every sequence. In causal attention they are its last tokens.
        recent: Number of keys of every sequence that k and v hold: its last ones.
        shape: Sizes of trees and tiles.
        causal: Whether queries see nothing later than themselves.
        capacity: Number of pages that tables reserve for every sequence; None if they have complete chunks only.
        starts: `[sequences]` page of the first chunk of every sequence.
        tile_sequence: `[tiles]` sequence of every tile.
        tile_row: `[tiles + 1]` first row of q of every tile, and the number of rows.
        tile_chunk, tile_chunks: `[tiles]` page of the first visible chunk, and the number of visible chunks.
        tile_exact, tile_end: `[tiles]` first row of k that is exact, and the end of these rows for the tile's first query.
            In causal attention each further query sees one more.
        tile_offset: `[tiles + 1]` number of visible chunks of the tiles before.
    """

    lengths: tuple[int, ...]
    queries: tuple[int, ...]
    recent: tuple[int, ...]
    shape: Shape
    causal: bool
    capacity: int | None
    starts: np.ndarray
    tile_sequence: np.ndarray
    tile_row: np.ndarray
    tile_chunk: np.ndarray
    tile_chunks: np.ndarray
    tile_exact: np.ndarray
    tile_end: np.ndarray
    tile_offset: np.ndarray

    @cached_property
    def chunk_counts(self) -> tuple[int, ...]:
        """Number of complete chunks of every sequence."""
        return tuple(n // self.shape.chunk for n in self.lengths)

    @cached_property
    def num_chunks(self) -> int:
        """Number of complete chunks."""
        return sum(self.chunk_counts)

    @cached_property
    def num_pages(self) -> int:
        """Number of pages of a head in the tables of keys and values."""
        return self.num_chunks if self.capacity is None else self.capacity * len(self.lengths)

    @cached_property
    def longest_first(self) -> np.ndarray:
        """Tiles in the order of their visible chunks, most first."""
        return np.argsort(-self.tile_chunks, kind="stable")

    @property
    def num_tiles(self) -> int:
        """Number of tiles."""
        return len(self.tile_sequence)

    @property
    def num_queries(self) -> int:
        """Number of queries."""
        return sum(self.queries)

    @property
    def chunk_rows(self) -> np.ndarray:
        """First row of every complete chunk, in a tensor with one row per key of all sequences."""
        lengths = np.array(self.lengths, np.int64)
        first = np.cumsum(lengths) - lengths
        counts = np.array(self.chunk_counts, np.int64)
        number = np.arange(self.num_chunks) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(first, counts) + number * self.shape.chunk

    @property
    def first_tiles(self) -> np.ndarray:
        """First tile of every sequence; −1 if it has no queries."""
        first = np.searchsorted(self.tile_sequence, np.arange(len(self.lengths)))
        return np.where(np.array(self.queries) > 0, first, -1)

    def is_cut(self, sequence: int) -> bool:
        """Return whether the first query of a sequence lies inside a tile that earlier queries belong to."""
        before = self.lengths[sequence] - self.queries[sequence]
        return self.causal and self.queries[sequence] > 0 and before % self.shape.tile != 0

    def rows_of_chunks(self, device: torch.device) -> Tensor:
        """Return `[2, chunks]` on a device: `chunk_rows`, and the first chunk of the sequence of every chunk."""
        return _rows_of_chunks(self, device)


@lru_cache(maxsize=64)
def _rows_of_chunks(layout: Layout, device: torch.device) -> Tensor:
    with lasting():
        counts = np.array(layout.chunk_counts, np.int64)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        return torch.from_numpy(np.stack([layout.chunk_rows, first]).astype(np.int32)).to(device)


def layout_of(
    lengths: Any,
    queries: Any = None,
    recent: Any = None,
    *,
    shape: Shape,
    causal: bool,
    capacity: int | None = None,
) -> Layout:
    """Check the lengths and return the layout, from a cache if the same was built before."""
    keys = _lengths("lengths", lengths, None)
    rows = keys if queries is None else _lengths("query_lengths", queries, keys if causal else None, len(keys))
    held = keys if recent is None else _lengths("recent", recent, keys, len(keys))
    return _build(keys, rows, held, shape, causal, capacity)


def _lengths(name: str, values: Any, most: tuple[int, ...] | None, count: int | None = None) -> tuple[int, ...]:
    array = integers(name, values)
    if array.ndim != 1:
        raise InvalidInput(name, expected="a list or vector of numbers, one per sequence", got=repr(values))
    numbers = tuple(array.tolist())
    least = 1 if count is None else 0
    if count is not None and len(numbers) != count:
        raise InvalidInput(name, expected=f"one number per sequence, {count} in all", got=f"{len(numbers)} numbers")
    for i, n in enumerate(numbers):
        if n < least or (most is not None and n > most[i]):
            limit = "" if most is None else f" to {most[i]}, the keys of the sequence"
            raise InvalidInput(f"{name}[{i}]", expected=f"a number from {least}{limit}", got=n)
    return numbers


@lru_cache(maxsize=64)
def _build(
    lengths: tuple[int, ...],
    queries: tuple[int, ...],
    recent: tuple[int, ...],
    shape: Shape,
    causal: bool,
    capacity: int | None,
) -> Layout:
    keys, rows, held = (np.array(x, np.int64) for x in (lengths, queries, recent))
    tile, chunk = shape.tile, shape.chunk
    chunks = keys // chunk
    starts = np.cumsum(chunks) - chunks if capacity is None else np.arange(len(keys)) * capacity
    first_key, first_row = np.cumsum(held) - held, np.cumsum(rows) - rows
    before = keys - rows if causal else np.zeros_like(keys)  # position of the first query
    first_tile = before // tile
    tiles = np.where(rows > 0, -(-(before + rows) // tile) - first_tile, 0)
    sequence = np.repeat(np.arange(len(keys)), tiles)
    number = np.arange(len(sequence)) - np.repeat(np.cumsum(tiles) - tiles, tiles) + first_tile[sequence]
    position = np.maximum(number * tile, before[sequence])  # of the first query of the tile
    visible = number * tile // chunk if causal else (keys // chunk)[sequence]
    visible = np.where(visible < shape.exact_chunks, 0, visible)
    hidden = (keys - held)[sequence]  # keys that k and v do not hold
    exact = visible * chunk
    short = np.flatnonzero(exact < hidden)
    if len(short):
        s = int(sequence[short[0]])
        need = int(keys[s] - exact[short[0]])
        raise InvalidInput(
            f"recent[{s}]",
            expected=f"at least {need} keys, those that the first query sees exactly",
            got=int(held[s]),
        )
    end = np.where(causal, position + 1, keys[sequence])
    row = first_row[sequence] + position - before[sequence]
    return Layout(
        lengths=lengths,
        queries=queries,
        recent=recent,
        shape=shape,
        causal=causal,
        capacity=capacity,
        starts=starts,
        tile_sequence=sequence,
        tile_row=np.append(row, rows.sum()),
        tile_chunk=starts[sequence],
        tile_chunks=visible,
        tile_exact=first_key[sequence] + exact - hidden,
        tile_end=first_key[sequence] + end - hidden,
        tile_offset=np.concatenate([[0], np.cumsum(visible)]),
    )
