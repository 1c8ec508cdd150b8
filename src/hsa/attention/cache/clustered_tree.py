"""Structure of the trees of `ClusteredCache`: the nodes that exist at a length, and the rows where they are stored.

There are no keys here. Everything follows from the lengths, so it is computed once per length or chunk and shared by
all layers. Pooled nodes are numbered as a heap: node i has the children i·factor + 1, …, and groups are the last level.
The heap covers the complete tree over the capacity; nodes that are not complete yet are never read. One more node,
`Heap.none`, stands for a missing node: it has no keys, so its logit is −∞, and its children are missing too.
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
from hsa.attention.multiscale.select import default_width
from hsa.errors import InvalidInput


@dataclass(frozen=True)
class Shape:
    """Sizes of the trees and of the search in them."""

    group: int  # keys per group
    factor: int  # members of every node above the groups
    chunk: int  # keys that are clustered together, those of one node
    top_k: int  # groups that a query attends to exactly
    width: int | None  # of the beam; None to score every group
    sinks: int  # first tokens, outside the groups

    @cached_property
    def chunk_height(self) -> int:
        """Height of the node of a chunk; groups have height 1."""
        height, size = 1, self.group
        while size < self.chunk:
            height, size = height + 1, size * self.factor
        if size != self.chunk:
            raise InvalidInput(
                "chunk",
                got=f"{self.chunk} with branching {(self.group, self.factor)}",
                expected="branching[0] times a power of branching[1]",
                fix=f"Use for example chunk={size}",
            )
        return height

    def chunks(self, length: int) -> int:
        """Return the number of complete chunks of a sequence."""
        return max(0, length - self.sinks) // self.chunk

    def starts(self, chunks: int) -> list[tuple[int, int]]:
        """Return the largest complete nodes over some chunks, from left to right: (height, index at that height)."""
        levels: list[list[tuple[int, int]]] = []
        height, end = self.chunk_height, chunks
        while end:
            first = end - end % self.factor
            levels.append([(height, number) for number in range(first, end)])
            height, end = height + 1, end // self.factor
        return [node for nodes in reversed(levels) for node in nodes]

    def candidates(self, chunks: int) -> list[tuple[int, int]]:
        """Return the nodes where the beam first drops any: the starts, replaced by children while all are kept."""
        nodes = self.starts(chunks)
        if self.width is None:
            return [(1, group) for group in range(chunks * (self.chunk // self.group))]
        while len(nodes) <= self.width and any(height > 1 for height, _ in nodes):
            below: list[tuple[int, int]] = []
            for height, number in nodes:
                children = range(number * self.factor, (number + 1) * self.factor)
                below += [(height - 1, child) for child in children] if height > 1 else [(height, number)]
            nodes = below
        return nodes


@dataclass(frozen=True)
class Heap:
    """Numbering of nodes, with heights from 1 (groups) to `levels` (the only root)."""

    factor: int
    levels: int

    def first(self, height: int) -> int:
        """Return the first node of a height."""
        return int((self.factor ** (self.levels - height) - 1) // (self.factor - 1))

    @property
    def groups(self) -> int:
        """Number of groups."""
        return int(self.factor ** (self.levels - 1))

    @property
    def none(self) -> int:
        """Node that stands for a missing one; it comes after all others."""
        return self.first(1) + self.groups


@dataclass(frozen=True, eq=False)
class Tables:
    """Children and sizes of all nodes of a heap."""

    children: Tensor  # [nodes, factor]; the first child of a group is itself, the others are missing
    log_count: Tensor  # [nodes] log of the number of keys below each


@lru_cache(maxsize=32)
def tables_of(heap: Heap, group: int, dtype: torch.dtype, device: torch.device) -> Tables:
    """Return the tables of a heap over groups of `group` keys."""
    with torch.inference_mode(False):
        node, first = torch.arange(heap.none + 1)[:, None], heap.first(1)
        member = torch.arange(heap.factor)
        itself = torch.where(member == 0, node, heap.none)
        sizes = torch.tensor([heap.factor**level for level in range(heap.levels)])
        counts = group * sizes.flip(0).repeat_interleave(sizes)
        return Tables(
            children=torch.where(node < first, node * heap.factor + 1 + member, itself).to(device),
            log_count=torch.cat([counts, counts.new_zeros(1)]).double().log().to(dtype).to(device),
        )


@dataclass(frozen=True, eq=False)
class Past:
    """Nodes of complete chunks that a token may read. Computed once per chunk."""

    candidates: Tensor  # [batch, width] nodes where the search begins
    starts: Tensor  # [batch, width] the largest complete nodes
    ends: Tensor  # [batch, width] end of the groups below each start
    height: Tensor  # [batch, width + 1] height of each start; 0 for a missing one
    few: bool  # whether some sequence has fewer groups than top_k
    rounds: int  # number of levels that the search descends
    tallest: int  # height of the tallest start; 0 without a complete chunk
    pooled: int  # maximum number of pooled entries of a row
    levels: tuple[Tensor, Tensor, Tensor]  # [heights, 1] below the tallest start: height, groups per node, first node


@lru_cache(maxsize=64)
def past_of(shape: Shape, heap: Heap, chunks: tuple[int, ...], device: torch.device) -> Past:
    """Return the nodes of sequences with these numbers of complete chunks."""

    def table(rows: list[list[int]], fill: int) -> Tensor:
        padded = np.full((len(rows), max(1, *map(len, rows))), fill)
        for row, values in zip(padded, rows, strict=True):
            row[: len(values)] = values
        return torch.from_numpy(padded).to(device)

    starts = [shape.starts(n) for n in chunks]
    nodes = [shape.candidates(n) if shape.top_k else [] for n in chunks]
    tallest = max((height for row in starts for height, _ in row), default=0)
    groups = max(chunks) * shape.chunk // shape.group
    levels = [groups // shape.factor ** (height - 1) for height in range(2, tallest + 1)]
    pooled = (shape.factor - 1) * sum(min(shape.top_k, count) for count in levels) + max(map(len, starts))
    below = range(1, tallest)
    columns = (list(below), [shape.factor ** (height - 1) for height in below], [heap.first(h) for h in below])
    with torch.inference_mode(False):
        height, size, first = (torch.tensor(column, dtype=torch.int64, device=device)[:, None] for column in columns)
        return Past(
            candidates=table([[heap.first(height) + i for height, i in row] for row in nodes], heap.none),
            starts=table([[heap.first(height) + i for height, i in row] for row in starts], heap.none),
            ends=table([[(i + 1) * shape.factor ** (height - 1) for height, i in row] for row in starts], heap.groups),
            height=torch.nn.functional.pad(table([[height for height, _ in row] for row in starts], 0), (0, 1)),
            few=min(chunks) * shape.chunk // shape.group < shape.top_k,
            rounds=max((height - 1 for row in nodes for height, _ in row), default=0),
            tallest=tallest,
            pooled=pooled,
            levels=(height, size, first),
        )


@dataclass(frozen=True, eq=False)
class Step:
    """Rows that one more token in every sequence writes and reads; the same for all layers."""

    past: Past
    written: Tensor  # [batch · kv_heads] rows that the token is written to, with sequences, heads and slots flattened
    exact: Tensor  # [batch, kv_heads, width] rows of the sinks and of the token's chunk up to the token
    hidden: Tensor | None  # [batch, 1, width] whether a row is padding; None if no row is
    closing: tuple[int, ...]  # sequences whose chunk this token completes
    closed: tuple[int, ...]  # indices of those chunks


@lru_cache(maxsize=64)
def step_of(
    shape: Shape, heap: Heap, lengths: tuple[int, ...], capacity: int, kv_heads: int, device: torch.device
) -> Step:
    """Return the step from sequences of these lengths to one more token in each."""
    slot = np.array(lengths)
    chunks = np.maximum(slot - shape.sinks, 0) // shape.chunk
    own = shape.sinks + chunks * shape.chunk
    width = int((np.minimum(slot + 1, shape.sinks) + np.maximum(slot + 1 - own, 0)).max())
    entry = np.arange(width)
    slots = np.where(entry < shape.sinks, entry, own[:, None] - shape.sinks + entry)
    exists = slots <= slot[:, None]
    first = np.arange(len(slot) * kv_heads).reshape(len(slot), kv_heads) * capacity
    rows = first[..., None] + np.where(exists, slots, 0)[:, None]
    closing = np.flatnonzero((slot >= shape.sinks) & ((slot + 1 - shape.sinks) % shape.chunk == 0))
    with torch.inference_mode(False):
        return Step(
            past=past_of(shape, heap, tuple(chunks.tolist()), device),
            written=torch.from_numpy((first + slot[:, None]).flatten()).to(device),
            exact=torch.from_numpy(rows).to(device),
            hidden=None if exists.all() else torch.from_numpy(~exists[:, None]).to(device),
            closing=tuple(closing.tolist()),
            closed=tuple(chunks[closing].tolist()),
        )


def shape_of(branching: Any, chunk: Any, top_k: Any, beam: Any, sinks: Any) -> Shape:
    """Check the options of a `ClusteredCache`, and return them as a shape."""
    if not isinstance(branching, Sequence) or isinstance(branching, str) or len(branching) not in (1, 2):
        expected = "the keys per group and the members of a node above, such as (8, 2)"
        raise InvalidInput("branching", got=repr(branching), expected=expected)
    group, factor = (
        check_count(f"branching[{i}]", b, "2 or more", 2) for i, b in enumerate((*branching, branching[-1])[:2])
    )
    top_k = check_count("top_k", top_k, "a number of groups, 0 or more")
    if beam is None:
        width: int | None = default_width(top_k)
    elif isinstance(beam, str) and beam == "exact":
        width = None
    else:
        least = max(top_k, 1)
        width = check_count("beam", beam, f"'exact', None, or a width of at least {least} (top_k)", least)
    shape = Shape(
        group=group,
        factor=factor,
        chunk=check_count("chunk", chunk, "a positive number of tokens", 1),
        top_k=top_k,
        width=width,
        sinks=check_count("sinks", sinks, "a number of first tokens, 0 or more"),
    )
    _ = shape.chunk_height  # checks the chunk
    return shape
