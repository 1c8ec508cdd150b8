"""`FoundCache`: trees found from the keys, for decoding token by token.

The keys of the chunk in progress are in the order of time, and a token reads them exactly. When a chunk is complete, its
keys are ordered once per key/value head (`find_key_order`) and pooled bottom up; above the chunks the tree goes on, so that
what a token reads of the past grows with the logarithm of the length. A token

1. starts at the largest complete nodes before its own chunk,
2. descends by a beam to the `refine` best groups, as `open_families` does,
3. attends to the sinks, its own chunk up to itself, the keys of those groups, and the pooled rest: the largest nodes that
   hold none of them.

Pooled nodes lie in a heap: node i has the children i·factor + 1, …, and groups are its last level. It has room for the
complete tree over the capacity; nodes that are not complete are never read. After them comes *none*, the node that stands
where there is no node: it holds no keys, so its logit is −∞, and its children are none again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hsa.attention.arguments import check_count, scale_or_default, without_autocast
from hsa.attention.cache.interface import Cache, Memory
from hsa.attention.multiscale.choice import default_width
from hsa.attention.multiscale.find_keys import KeyOrder, find_key_order
from hsa.attention.multiscale.operator import per_head
from hsa.attention.multiscale.pyramid import in_order
from hsa.errors import InvalidInput
from hsa.hierarchy import Hierarchy

PRODUCTS = 2**24
"""Of queries and keys that are held at once when prompts attend."""


@dataclass(frozen=True)
class Shape:
    """Of the trees, and of the search in them."""

    group: int  # keys of a group
    factor: int  # members of every node above
    chunk: int  # keys that are ordered together: those of one node
    refine: int
    width: int | None  # of the beam; None: every group is scored
    sinks: int

    @cached_property
    def chunk_height(self) -> int:
        """Of the node that is a chunk; groups have height 1."""
        height, size = 1, self.group
        while size < self.chunk:
            height, size = height + 1, size * self.factor
        if size != self.chunk:
            raise InvalidInput(
                "chunk",
                given=f"{self.chunk} with branching {(self.group, self.factor)}",
                expected="the keys of a whole node: branching[0] times a power of branching[1]",
                fix=f"for example chunk={size}",
            )
        return height

    def chunks(self, length: int) -> int:
        """Complete ones among so many tokens."""
        return max(0, length - self.sinks) // self.chunk

    def starts(self, chunks: int) -> list[tuple[int, int]]:
        """The largest complete nodes over so many chunks, from left to right: (height, number at that height)."""
        found: list[list[tuple[int, int]]] = []
        height, end = self.chunk_height, chunks
        while end:
            first = end - end % self.factor
            found.append([(height, number) for number in range(first, end)])
            height, end = height + 1, end // self.factor
        return [node for nodes in reversed(found) for node in nodes]

    def candidates(self, chunks: int) -> list[tuple[int, int]]:
        """Where the search begins to leave nodes out: the starts, replaced by children as long as all of them are kept."""
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
    """Where nodes are: heights from 1 (groups) to `levels` (the one root)."""

    factor: int
    levels: int

    def first(self, height: int) -> int:
        """The node of a height that comes first."""
        return int((self.factor ** (self.levels - height) - 1) // (self.factor - 1))

    @property
    def groups(self) -> int:
        return int(self.factor ** (self.levels - 1))

    @property
    def none(self) -> int:
        """The node that stands where there is none, after all others."""
        return self.first(1) + self.groups


@dataclass(frozen=True, eq=False)
class _Tables:
    children: Tensor  # [nodes, factor] of a group itself, then none
    log_count: Tensor  # [nodes] of the keys below each


@lru_cache(maxsize=32)
def _tables(heap: Heap, group: int, dtype: torch.dtype, device: torch.device) -> _Tables:
    with torch.inference_mode(False):
        node, first = torch.arange(heap.none + 1)[:, None], heap.first(1)
        member = torch.arange(heap.factor)
        itself = torch.where(member == 0, node, heap.none)
        sizes = torch.tensor([heap.factor**level for level in range(heap.levels)])
        counts = group * sizes.flip(0).repeat_interleave(sizes)
        return _Tables(
            children=torch.where(node < first, node * heap.factor + 1 + member, itself).to(device),
            log_count=torch.cat([counts, counts.new_zeros(1)]).double().log().to(dtype).to(device),
        )


@dataclass(frozen=True, eq=False)
class _Past:
    """What a token may read of complete chunks: follows from their numbers, so it is made once per chunk."""

    candidates: Tensor  # [batch, most] nodes of the heap where the search begins
    starts: Tensor  # [batch, most] the largest complete nodes
    ends: Tensor  # [batch, most] the group after the last one of each
    height: Tensor  # [batch, most + 1] of each; 0 where there is none
    few: bool  # some sequence has fewer groups than may be opened
    rounds: int  # how often the search goes down a level
    tallest: int  # height of the tallest start; 0: no complete chunk
    pooled: int  # no list has more pooled entries
    levels: tuple[Tensor, Tensor, Tensor]  # [heights, 1] below the tallest: height, groups of a node, first node


@lru_cache(maxsize=64)
def _past(shape: Shape, heap: Heap, chunks: tuple[int, ...], device: torch.device) -> _Past:
    def table(rows: list[list[int]], fill: int) -> Tensor:
        padded = np.full((len(rows), max(1, *map(len, rows))), fill)
        for row, values in zip(padded, rows, strict=True):
            row[: len(values)] = values
        return torch.from_numpy(padded).to(device)

    starts = [shape.starts(n) for n in chunks]
    nodes = [shape.candidates(n) if shape.refine else [] for n in chunks]
    tallest = max((height for row in starts for height, _ in row), default=0)
    most = max(chunks) * shape.chunk // shape.group  # groups
    levels = [most // shape.factor ** (height - 1) for height in range(2, tallest + 1)]
    pooled = (shape.factor - 1) * sum(min(shape.refine, count) for count in levels) + max(map(len, starts))
    below = range(1, tallest)
    columns = (list(below), [shape.factor ** (height - 1) for height in below], [heap.first(h) for h in below])
    with torch.inference_mode(False):
        height, size, first = (torch.tensor(column, dtype=torch.int64, device=device)[:, None] for column in columns)
        return _Past(
            candidates=table([[heap.first(height) + i for height, i in row] for row in nodes], heap.none),
            starts=table([[heap.first(height) + i for height, i in row] for row in starts], heap.none),
            ends=table([[(i + 1) * shape.factor ** (height - 1) for height, i in row] for row in starts], heap.groups),
            height=torch.nn.functional.pad(table([[height for height, _ in row] for row in starts], 0), (0, 1)),
            few=min(chunks) * shape.chunk // shape.group < shape.refine,
            rounds=max((height - 1 for row in nodes for height, _ in row), default=0),
            tallest=tallest,
            pooled=pooled,
            levels=(height, size, first),
        )


@dataclass(frozen=True, eq=False)
class _Step:
    """One more token in every sequence; the same for all layers."""

    past: _Past
    written: Tensor  # [batch · kv_heads] rows of the leaves, all sequences and heads flattened, that the token goes to
    exact: Tensor  # [batch, kv_heads, most] rows of the sinks and of the own chunk up to the token
    hidden: Tensor | None  # [batch, 1, most] which of them there are not; None: all are
    closing: tuple[int, ...]  # sequences whose chunk this token completes
    closed: tuple[int, ...]  # and the numbers of those chunks


@lru_cache(maxsize=64)
def _step(
    shape: Shape, heap: Heap, lengths: tuple[int, ...], capacity: int, kv_heads: int, device: torch.device
) -> _Step:
    """`lengths`: before the token."""
    place = np.array(lengths)
    chunks = np.maximum(place - shape.sinks, 0) // shape.chunk
    own = shape.sinks + chunks * shape.chunk
    most = int((np.minimum(place + 1, shape.sinks) + np.maximum(place + 1 - own, 0)).max())
    entry = np.arange(most)
    slots = np.where(entry < shape.sinks, entry, own[:, None] - shape.sinks + entry)
    there = slots <= place[:, None]
    first = np.arange(len(place) * kv_heads).reshape(len(place), kv_heads) * capacity
    rows = first[..., None] + np.where(there, slots, 0)[:, None]
    closing = np.flatnonzero((place >= shape.sinks) & ((place + 1 - shape.sinks) % shape.chunk == 0))
    with torch.inference_mode(False):
        return _Step(
            past=_past(shape, heap, tuple(chunks.tolist()), device),
            written=torch.from_numpy((first + place[:, None]).flatten()).to(device),
            exact=torch.from_numpy(rows).to(device),
            hidden=None if there.all() else torch.from_numpy(~there[:, None]).to(device),
            closing=tuple(closing.tolist()),
            closed=tuple(chunks[closing].tolist()),
        )


@dataclass
class Counted:
    """What steps took, all heads and sequences together."""

    entries: int = 0  # keys and pooled nodes that were attended to
    scored: int = 0  # pooled nodes that the search looked at
    finding: int = 0  # operations for the order of chunks that became complete
    pooling: int = 0  # operations for their nodes


@dataclass
class _Layer:
    """What is kept of one layer. Leaves of complete chunks are in the order of their tree, the others in that of time."""

    keys: Tensor  # [batch, kv_heads, capacity, dim]
    values: Tensor
    place: Tensor  # [batch, kv_heads, capacity] of a leaf of a complete chunk: its place in time inside the chunk
    pooled_keys: Tensor  # [batch, kv_heads, nodes, dim]
    pooled_values: Tensor

    def tensors(self) -> dict[str, Tensor]:
        return dict(vars(self))


class FoundCache(Cache):
    """Keys and values of a growing batch under trees found from the keys; all leaves are kept.

    Decoding step by step gives what the full pass gives:

        tree   = Hierarchy.regular(lengths, branching, repeat_last=True, sinks=sinks)
        order  = find_key_order(k, tree, chunk=chunk)
        opened = open_families(q, k, tree, refine=refine, beam=beam, key_order=order, causal=True)
        out    = multiscale_attention(q, k, v, tree, opened=opened, key_order=order, causal=True)

    Args:
        layers, batch, kv_heads, head_dim: what is kept.
        branching: keys of a group, members of every node above.
        chunk: tokens that are ordered together once they are there: the keys of a whole node.
        refine: groups of earlier chunks that a token reads exactly, per query head.
        beam: width of the search for them; "exact" scores every group; None: max(32, 2·refine).
        sinks: first tokens, which are always exact.
        max_length: tokens per sequence to make room for at once, and never more; by default room doubles as it is needed.
        value_dim: `head_dim` unless given.

    >>> q, k, v = torch.randn(3, 70, 2, 8).unbind(0)  # 70 tokens, 2 heads of 8
    >>> cache = FoundCache(1, 1, 2, 8, branching=(4, 2), chunk=16, refine=2)
    >>> tree = cache.begin([69])  # the prompt in one pass …
    >>> cache.fill(0, k[:69], v[:69])
    >>> cache.append()  # … then token by token
    >>> cache.attend(0, q[69:], k[69:], v[69:]).shape
    torch.Size([1, 2, 8])
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        kv_heads: int,
        head_dim: int,
        *,
        branching: Sequence[int] = (8, 2),
        chunk: int = 256,
        refine: int = 16,
        beam: int | str | None = None,
        sinks: int = 0,
        max_length: int | None = None,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: Any = "cpu",
    ):
        sizes: dict[str, Any] = {"value_dim": value_dim, "max_length": max_length, "dtype": dtype, "device": device}
        super().__init__(layers, batch, kv_heads, head_dim, **sizes)
        self.shape = _shape(branching, chunk, refine, beam, sinks)
        self._lengths = [0] * self.batch
        self._trees: Hierarchy | None = None  # of the prompts
        self._step: _Step | None = None
        self._capacity, self._heap = self._room(max_length or self.shape.sinks + self.shape.chunk)
        self._kept = [self._empty(self._capacity, self._heap) for _ in range(self.layers)]

    def __repr__(self) -> str:
        return f"FoundCache({self.layers} layers, {self.batch} sequences of up to {max(self._lengths):,} tokens)"

    @property
    def lengths(self) -> list[int]:
        return list(self._lengths)

    def begin(self, lengths: Sequence[int], closes: Any = None) -> Hierarchy:
        """Prompts of these lengths, one after another, come into an empty cache. Returns their trees, for the full pass."""
        _check_closes(closes)
        self._lengths = list(self._meet_prompts(lengths))
        branching = (self.shape.group, self.shape.factor)
        tree = Hierarchy.regular(self._lengths, branching, repeat_last=True, sinks=self.shape.sinks)
        self._make_room(max(self._lengths))
        self._trees = tree.to(self.device)
        return self._trees

    @torch.no_grad()
    @torch.inference_mode(False)
    def fill(self, layer: int, k: Tensor, v: Tensor, key_order: KeyOrder | None = None) -> None:
        """The keys and values of the prompts, after `begin`.

        Args:
            k, v: `[tokens, kv_heads, dim]`, packed.
            key_order: what the full pass found, `find_key_order(k, tree, chunk=chunk)`; found here unless given.
        """
        self._meet_layer(layer, k, v)
        tree = self._trees
        assert tree is not None
        chunks = [self.shape.chunks(length) for length in self._lengths]
        if key_order is None and any(chunks):
            key_order = find_key_order(k, tree, chunk=self.shape.chunk)
        if key_order is not None:
            self._check_order(key_order, tree)
            k, v = in_order(k, key_order.order), in_order(v, key_order.order)
        kept = self._kept[layer]
        sequence, place = _sequence_and_place(tree)
        kept.keys[sequence, :, place] = k
        kept.values[sequence, :, place] = v
        if key_order is not None:
            first = tree.tensor("leaf_offsets")[sequence] + self.shape.sinks
            kept.place[sequence, :, place] = ((key_order.order - first) % self.shape.chunk).T.to(kept.place.dtype)
        self._pool_whole(kept, max(chunks))

    @torch.no_grad()
    @torch.inference_mode(False)
    def attend_prompts(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        key_order: KeyOrder | None = None,
        pooled_bias: float | Tensor = 0.0,
        scale: float | None = None,
    ) -> Tensor:
        """`fill`, and what the prompts' own queries `[tokens, heads, dim]` see: `[tokens, heads, value_dim]`.

        Products of all queries of a chunk with all that is before it: quadratic, but on a CPU quicker than to gather what
        each query reads (`multiscale_attention`), up to some 50,000 tokens.
        """
        lengths = self._lengths
        self.fill(layer, k, v, key_order)
        heads = q.shape[1] if q.ndim == 3 else 0
        if heads == 0 or heads % self.kv_heads or q.shape != (len(k), heads, self.head_dim) or q.dtype != self.dtype:
            raise InvalidInput(
                "q",
                given=f"{q.dtype} of shape {tuple(q.shape)}",
                expected=f"{self.dtype} of shape ({len(k)}, a multiple of {self.kv_heads} heads, {self.head_dim})",
            )
        sinks, chunk, device = self.shape.sinks, self.shape.chunk, self.device
        bias, scale = per_head(pooled_bias, q), scale_or_default(scale, q)
        size = torch.tensor(lengths, device=device)
        first = size.cumsum(0) - size
        out = q.new_empty(len(q), heads, self.value_dim)
        for number in range(max(1, -(-(max(lengths) - sinks) // chunk))):
            begin, end = (sinks + number * chunk if number else 0), min(sinks + (number + 1) * chunk, max(lengths))
            some = torch.tensor([i for i, length in enumerate(lengths) if length > begin], device=device)
            # At once as many queries as keep the products few; all sequences of the batch that reach so far.
            step = max(1, PRODUCTS // (len(some) * heads * end))
            for start in range(begin, end, step):
                time = torch.arange(start, min(start + step, end), device=device)
                keys = torch.cat(
                    [torch.arange(min(sinks, begin), device=device), torch.arange(begin, end, device=device)]
                )
                asking, read = (
                    first[some, None] + torch.minimum(places, size[some, None] - 1) for places in (time, keys)
                )
                with without_autocast(q):
                    block = _Block(self, self._kept[layer], number, some, q[asking] * scale)
                    seen = block.attend(k[read], v[read], keys > time[:, None], bias)
                there = time < size[some, None]
                out[asking[there]] = seen[there].to(q.dtype)
        return out

    def append(self, closes: Any = None) -> None:
        """Every sequence grows by one token, whose keys and values `attend` brings, layer by layer."""
        _check_closes(closes)
        self._meet_token()
        self._make_room(self._longest)
        self._step = _step(self.shape, self._heap, tuple(self._lengths), self._capacity, self.kv_heads, self.device)
        self._lengths = [length + 1 for length in self._lengths]

    @torch.no_grad()
    @torch.inference_mode(False)
    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        pooled_bias: float | Tensor = 0.0,
        scale: float | None = None,
        counted: Counted | None = None,
    ) -> Tensor:
        """Keep the new token's keys and values, and attend to what it may see: `[batch, heads, value_dim]`.

        Args:
            q: `[batch, heads, dim]`; k, v: `[batch, kv_heads, dim]`.
            pooled_bias, scale: as for `multiscale_attention`.
            counted: takes the count of entries that were attended to and scored.
        """
        self._meet_layer(layer, k, v, q)
        kept, step = self._kept[layer], self._step
        assert step is not None
        kept.keys.view(-1, self.head_dim).index_copy_(0, step.written, k.reshape(-1, self.head_dim))
        kept.values.view(-1, self.value_dim).index_copy_(0, step.written, v.reshape(-1, self.value_dim))
        with without_autocast(q):
            token = _Token(self, kept, step, q, scale_or_default(scale, q), counted)
            out = token.attend(per_head(pooled_bias, q)).to(q.dtype)
            if step.closing:
                self._close(kept, step, counted)
        return out

    @torch.no_grad()
    @torch.inference_mode(False)
    def reorder(self, index: Any) -> None:
        """Sequence `index[i]` into place i; their number may change."""
        chosen = self._check_index(index)
        for kept in self._kept:
            for name, tensor in kept.tensors().items():
                setattr(kept, name, tensor.index_select(0, chosen))
        self.batch, self._lengths = len(chosen), [self._lengths[i] for i in chosen.tolist()]
        self._longest = max(self._lengths)

    @torch.no_grad()
    @torch.inference_mode(False)
    def crop(self, lengths: Sequence[int]) -> None:
        """Forget the last tokens of every sequence, down to these lengths. Chunks that lose some are in progress again."""
        wanted = self._check_shorter(lengths)
        shape = self.shape
        opened = [
            (sequence, shape.chunks(n))
            for sequence, (n, have) in enumerate(zip(wanted, self._lengths, strict=True))
            if shape.chunks(n) < shape.chunks(have) and (n - shape.sinks) % shape.chunk and n > shape.sinks
        ]
        if opened:
            at = self._leaves_of_chunks(*zip(*opened, strict=True))
            for kept in self._kept:
                place = kept.place[at].long()
                for leaves in (kept.keys, kept.values):
                    moved = leaves[at]
                    leaves[at] = torch.empty_like(moved).scatter_(2, place[..., None].expand_as(moved), moved)
        self._lengths, self._longest = wanted, max(wanted)

    @torch.no_grad()
    @torch.inference_mode(False)
    def leaves(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values as they came, packed: `[tokens, kv_heads, dim]`."""
        kept, shape = self._kept[layer], self.shape
        longest = max(self._lengths)
        slot = torch.arange(longest, device=self.device)
        complete = torch.tensor([shape.chunks(n) for n in self._lengths], device=self.device)
        end = shape.sinks + complete * shape.chunk
        in_tree = (slot >= shape.sinks) & (slot < end[:, None])  # [batch, longest]
        first = slot - (slot - shape.sinks) % shape.chunk
        time = torch.where(in_tree[:, None], first + kept.place[:, :, :longest], slot)  # [batch, kv_heads, longest]
        there = slot < torch.tensor(self._lengths, device=self.device)[:, None]

        def packed(leaves: Tensor) -> Tensor:
            moved = leaves[:, :, :longest]
            in_time = torch.empty_like(moved).scatter_(2, time[..., None].expand_as(moved), moved)
            return in_time.transpose(1, 2)[there]

        return packed(kept.keys), packed(kept.values)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values, for `torch.save`."""
        self._check_nobody_waits()
        kept = [{name: x.clone() for name, x in layer.tensors().items()} for layer in self._kept]
        return {
            "settings": self._settings(),
            "lengths": list(self._lengths),
            "capacity": self._capacity,
            "layers": kept,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Everything as it was when `state_dict` was called; the batch is that of then."""
        if state.get("settings") != self._settings():
            raise InvalidInput(
                "state",
                given=f"a cache with {state.get('settings')}",
                expected=f"one with {self._settings()}",
                fix="make the cache with the settings it was saved with",
            )
        self._capacity, self._heap = self._room(state["capacity"])
        self._kept = [
            _Layer(**{name: x.to(self.device, copy=True) for name, x in layer.items()}) for layer in state["layers"]
        ]
        self._lengths, self.batch = list(state["lengths"]), len(state["lengths"])
        self._longest, self._waiting, self._prompts = max(self._lengths), set(), None

    def _settings(self) -> dict[str, Any]:
        """What another cache must have in common to take this one's state."""
        sizes = {"layers": self.layers, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        return {**sizes, "value_dim": self.value_dim, "dtype": str(self.dtype), **asdict(self.shape)}

    def memory(self) -> Memory:
        """What is kept, and what a plain cache of the same tokens would keep."""
        total = sum(x.numel() * x.element_size() for kept in self._kept for x in kept.tensors().values())
        return Memory(total, self._flat_bytes(), leaves_kept=True)

    def _check_order(self, key_order: KeyOrder, tree: Hierarchy) -> None:
        if key_order.chunk != self.shape.chunk or key_order.order.shape != (self.kv_heads, tree.num_leaves):
            raise InvalidInput(
                "key_order",
                given=f"order {tuple(key_order.order.shape)} in chunks of {key_order.chunk}",
                expected=f"{(self.kv_heads, tree.num_leaves)} in chunks of {self.shape.chunk}",
                fix=f"use find_key_order(k, tree, chunk={self.shape.chunk})",
            )

    def _room(self, length: int) -> tuple[int, Heap]:
        """Tokens there is room for, in whole chunks unless there is a maximum, and the heap over their chunks."""
        shape = self.shape
        chunks = max(1, -(-max(0, length - shape.sinks) // shape.chunk))
        levels = shape.chunk_height
        while shape.factor ** (levels - shape.chunk_height) < chunks:
            levels += 1
        return shape.sinks + chunks * shape.chunk, Heap(shape.factor, levels)

    def _empty(self, capacity: int, heap: Heap) -> _Layer:
        """Zeros: what is hidden by a mask must still be numbers."""
        pooled = torch.promote_types(self.dtype, torch.float32)

        def zeros(*sizes: int, dtype: torch.dtype) -> Tensor:
            with torch.inference_mode(False):
                return torch.zeros(self.batch, self.kv_heads, *sizes, dtype=dtype, device=self.device)

        return _Layer(
            keys=zeros(capacity, self.head_dim, dtype=self.dtype),
            values=zeros(capacity, self.value_dim, dtype=self.dtype),
            place=zeros(capacity, dtype=torch.int16 if self.shape.chunk <= 2**15 else torch.int32),
            pooled_keys=zeros(heap.none + 1, self.head_dim, dtype=pooled),
            pooled_values=zeros(heap.none + 1, self.value_dim, dtype=pooled),
        )

    @torch.no_grad()
    @torch.inference_mode(False)
    def _make_room(self, length: int) -> None:
        if length <= self._capacity:
            return
        old, have = self._heap, self._capacity
        self._capacity, self._heap = self._room(max(length, 2 * have))
        for number, kept in enumerate(self._kept):
            self._kept[number] = grown = self._empty(self._capacity, self._heap)
            for name in ("keys", "values", "place"):
                getattr(grown, name)[:, :, :have] = getattr(kept, name)
            for height in range(1, old.levels + 1):
                before, now = old.first(height), self._heap.first(height)
                count = old.factor ** (old.levels - height)
                for name in ("pooled_keys", "pooled_values"):
                    getattr(grown, name)[:, :, now : now + count] = getattr(kept, name)[:, :, before : before + count]

    def _leaves_of_chunks(self, sequences: Sequence[int], numbers: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Index of the leaves `[sequences, kv_heads, chunk]` of one chunk of each of these sequences."""
        chunk, device = self.shape.chunk, self.device
        first = self.shape.sinks + torch.tensor(numbers, device=device) * chunk
        slots = first[:, None, None] + torch.arange(chunk, device=device)
        return torch.tensor(sequences, device=device)[:, None, None], self._heads, slots

    @property
    def _heads(self) -> Tensor:
        """[1, kv_heads, 1]"""
        return torch.arange(self.kv_heads, device=self.device)[:, None]

    def _close(self, kept: _Layer, step: _Step, counted: Counted | None) -> None:
        """Chunks that have just become complete: their order, their nodes, and the nodes above that they complete."""
        shape, several = self.shape, len(step.closing)
        at = self._leaves_of_chunks(step.closing, step.closed)
        keys, values = kept.keys[at], kept.values[at]  # [several, kv_heads, chunk, dim]
        tree = _chunk_trees(shape, several, self.device)
        found = find_key_order(keys.transpose(1, 2).flatten(0, 1), tree)
        if counted is not None:
            counted.finding += found.operations
            counted.pooling += 2 * self.kv_heads * (self.head_dim + self.value_dim) * tree.num_nodes
        place = found.order.view(self.kv_heads, several, shape.chunk).transpose(0, 1) % shape.chunk
        kept.place[at] = place.to(kept.place.dtype)
        numbers = torch.tensor(step.closed, device=self.device)
        for leaves, pooled, moved in (
            (kept.keys, kept.pooled_keys, keys),
            (kept.values, kept.pooled_values, values),
        ):
            moved = moved.gather(2, place[..., None].expand_as(moved))
            leaves[at] = moved
            members = shape.group
            for height in range(1, shape.chunk_height + 1):
                moved = _means(moved, members, pooled.dtype)
                nodes = self._heap.first(height) + numbers[:, None] * moved.shape[2]
                nodes = nodes + torch.arange(moved.shape[2], device=self.device)
                pooled[at[0], self._heads, nodes[:, None]] = moved
                members = shape.factor
        self._close_above(kept, step)

    def _close_above(self, kept: _Layer, step: _Step) -> None:
        height, nodes = self.shape.chunk_height, list(zip(step.closing, step.closed, strict=True))
        while nodes := [(row, number // self.shape.factor) for row, number in nodes if self._is_last(number)]:
            rows, parents = (torch.tensor(x, device=self.device)[:, None] for x in zip(*nodes, strict=True))
            children = self._heap.first(height) + parents * self.shape.factor
            children = (children + torch.arange(self.shape.factor, device=self.device))[:, None]
            height += 1
            for pooled in (kept.pooled_keys, kept.pooled_values):
                mean = pooled[rows[..., None], self._heads, children].mean(2)
                pooled[rows, self._heads.T, self._heap.first(height) + parents] = mean

    def _is_last(self, number: int) -> bool:
        """Of its family."""
        return (number + 1) % self.shape.factor == 0

    def _pool_whole(self, kept: _Layer, chunks: int) -> None:
        """All nodes over the first chunks; where a sequence has fewer, its nodes are made again when they are complete."""
        shape = self.shape
        for leaves, pooled in ((kept.keys, kept.pooled_keys), (kept.values, kept.pooled_values)):
            level = leaves[:, :, shape.sinks : shape.sinks + chunks * shape.chunk]
            members, height = shape.group, 1
            while count := level.shape[2] // members:
                level = _means(level[:, :, : count * members], members, pooled.dtype)
                first = self._heap.first(height)
                pooled[:, :, first : first + count] = level
                members, height = shape.factor, height + 1


class _Search:
    """What rows of queries read of complete chunks: the groups that they open, and the nodes that are left."""

    def __init__(self, cache: FoundCache, past: _Past, rows: int, q: Tensor, counted: Counted | None = None):
        self.shape, self.heap, self.past, self.rows, self.counted = cache.shape, cache._heap, past, rows, counted
        self.tables = _tables(self.heap, self.shape.group, q.dtype, q.device)

    def _node_logits(self, nodes: Tensor) -> Tensor:
        """[batch, rows, nodes] of pooled nodes, with the logarithm of their keys."""
        raise NotImplementedError

    def _choose(self) -> Tensor:
        """[batch, rows, opened] numbers of the groups to open, ascending, at the end one past all groups for none.

        As `open_families` does, without its first rounds, in which every candidate is kept.
        """
        nodes = self.past.candidates[:, None].expand(-1, self.rows, -1)
        for _ in range(self.past.rounds):
            assert self.shape.width is not None
            # Where a search has come to the end already, its best stay until the others have.
            nodes = self.tables.children[self._best(nodes, self.shape.width)].flatten(-2)
        if nodes.shape[-1] > self.shape.refine:
            nodes = self._best(nodes, self.shape.refine, last=True)
        return (nodes - self.heap.first(1)).sort(-1).values

    def _best(self, nodes: Tensor, number: int, *, last: bool = False) -> Tensor:
        """[batch, rows, number] of the candidates, ties to the first: score and place in one integer."""
        if number == 0:
            return nodes[..., :0]
        score = self._node_logits(nodes).softmax(-1).to(torch.float32)
        place = torch.arange(nodes.shape[-1] - 1, -1, -1, device=nodes.device)
        order = score.view(torch.int32).to(torch.int64).bitwise_left_shift_(32).add_(place)
        if self.counted is not None:
            goes_on = (nodes < self.heap.first(1)).any(-1, keepdim=True) | last
            self.counted.scored += int(((nodes < self.heap.none) & goes_on).sum())
        return nodes.gather(-1, order.topk(min(number, nodes.shape[-1])).indices)

    def _rest(self, groups: Tensor) -> Tensor:
        """[batch, rows, entries] the largest nodes that hold no open group."""
        past, factor, none = self.past, self.shape.factor, self.heap.none
        batch, rows, number = groups.shape
        # Of every group the start above it; a start is pooled if it is above none.
        start = (groups[..., None] >= past.ends[:, None, None]).sum(-1)
        above = groups.new_zeros(batch, rows, past.height.shape[1], dtype=torch.bool).scatter_(-1, start, True)
        nodes = past.starts[:, None].where(~above[..., :-1], none)
        if number == 0 or past.tallest == 1:
            return nodes
        height, size, first_node = past.levels
        ancestor = groups[:, :, None] // size  # [batch, rows, heights, groups]
        parent = ancestor // factor
        # Groups ascend, so those below one parent are neighbours; the first of them stands for the family.
        before = torch.nn.functional.pad(parent[..., :-1], (1, 0), value=-1)
        first = parent != before
        stands = torch.arange(number, device=groups.device).where(first, 0).cummax(-1).values
        holds = first.new_zeros(*parent.shape[:-1], number * factor)
        holds = holds.scatter_(-1, stands * factor + ancestor % factor, True).unflatten(-1, (number, factor))
        below_start = height < past.height.gather(-1, start.flatten(1)).view_as(start)[:, :, None]
        member = (first_node + parent * factor)[..., None] + torch.arange(factor, device=groups.device)
        family = member.where((first & below_start)[..., None] & ~holds, none)
        # None is the greatest number: away with it.
        return torch.cat([nodes, family.flatten(2)], -1).sort(-1).values[..., : past.pooled]


class _Token(_Search):
    """One token of every sequence in one layer: a row per query head."""

    def __init__(self, cache: FoundCache, kept: _Layer, step: _Step, q: Tensor, scale: float, counted: Counted | None):
        self.q = q.to(kept.pooled_keys.dtype) * scale  # [batch, heads, dim]
        super().__init__(cache, step.past, q.shape[1], self.q, counted)
        self.kept, self.step, self.kv_heads = kept, step, cache.kv_heads
        sequence = torch.arange(len(q), device=q.device)[:, None] * self.kv_heads
        tree = (sequence + torch.arange(self.rows, device=q.device) // (self.rows // self.kv_heads))[..., None]
        # [batch, heads, 1] where leaves and nodes of a tree begin, those of all sequences and key/value heads in a row.
        self.first_leaf, self.first_node = tree * cache._capacity, tree * (self.heap.none + 1)
        self.last_leaf = cache._capacity - 1

    def attend(self, bias: Tensor | None) -> Tensor:
        """[batch, heads, value_dim]"""
        grouped = self.q.unflatten(1, (self.kv_heads, -1))
        own_keys, own_values = (self._rows(x, self.step.exact) for x in (self.kept.keys, self.kept.values))
        own = (grouped @ own_keys.transpose(-1, -2)).flatten(1, 2)
        if self.step.hidden is not None:
            own = own.masked_fill(self.step.hidden, -math.inf)
        logits, parts = [own], []
        if self.past.tallest:
            groups = self._choose()
            for some_logits, values in (self._opened(groups), self._pooled(groups, bias)):
                logits.append(some_logits)
                parts.append(values)
        sizes = [part.shape[-1] for part in logits]
        own_weights, *weights = torch.cat(logits, -1).softmax(-1).split(sizes, -1)
        out = (own_weights.unflatten(1, (self.kv_heads, -1)) @ own_values).flatten(1, 2)
        for weight, values in zip(weights, parts, strict=True):
            out = out + (weight[..., None, :] @ values).squeeze(-2)
        if self.counted is not None:
            self.counted.entries += sum(int((part > -math.inf).sum()) for part in logits)
        return out

    def _rows(self, leaves: Tensor, rows: Tensor) -> Tensor:
        """`[…, dim]` rows of all sequences and heads flattened."""
        chosen = leaves.flatten(0, 2).index_select(0, rows.flatten())
        return chosen.to(self.q.dtype).view(*rows.shape, leaves.shape[-1])

    def _logits(self, keys: Tensor) -> Tensor:
        return (keys @ self.q[..., None]).squeeze(-1)

    def _node_logits(self, nodes: Tensor) -> Tensor:
        return self._logits(self._rows(self.kept.pooled_keys, self.first_node + nodes)) + self.tables.log_count[nodes]

    def _opened(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and values of the keys of open groups."""
        member = torch.arange(self.shape.sinks, self.shape.sinks + self.shape.group, device=groups.device)
        slots = (groups[..., None] * self.shape.group + member).flatten(-2)
        rows = self.first_leaf + slots.clamp(max=self.last_leaf)
        logits = self._logits(self._rows(self.kept.keys, rows))
        if self.past.few:
            hidden = (groups == self.heap.groups).repeat_interleave(self.shape.group, -1)
            logits = logits.masked_fill(hidden, -math.inf)
        return logits, self._rows(self.kept.values, rows)

    def _pooled(self, groups: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits and values of the pooled rest."""
        nodes = self._rest(groups)
        logits = self._node_logits(nodes)
        if bias is not None:
            logits = logits + bias.to(logits.dtype)[:, None]
        return logits, self._rows(self.kept.pooled_values, self.first_node + nodes)


class _Block(_Search):
    """Queries of one chunk of some sequences: a row per query head and query, products with everything before them."""

    def __init__(self, cache: FoundCache, kept: _Layer, chunk: int, sequences: Tensor, q: Tensor):
        """`q`: [sequences, queries, heads, dim], scaled."""
        several, self.queries, self.heads, _ = q.shape
        self.q = q.to(kept.pooled_keys.dtype).transpose(1, 2)  # [sequences, heads, queries, dim]
        past = _past(cache.shape, cache._heap, (chunk,) * several, q.device)
        super().__init__(cache, past, self.heads * self.queries, self.q)
        self.kv_heads = cache.kv_heads
        if chunk:
            before = slice(cache.shape.sinks, cache.shape.sinks + chunk * cache.shape.chunk)
            leaves = (x[sequences, :, before].to(self.q.dtype) for x in (kept.keys, kept.values))
            self.keys, self.values = leaves  # [sequences, kv_heads, leaves, dim]
            self.pooled_values = kept.pooled_values[sequences]
            self.known = self._products(kept.pooled_keys[sequences]) + self.tables.log_count

    def _products(self, keys: Tensor) -> Tensor:
        """[sequences, rows, keys]"""
        grouped = self.q.flatten(1, 2).unflatten(1, (self.kv_heads, -1))
        return (grouped @ keys.transpose(-1, -2)).flatten(1, 2)

    def _average(self, weights: Tensor, values: Tensor) -> Tensor:
        """[sequences, rows, value_dim]"""
        return (weights.unflatten(1, (self.kv_heads, -1)) @ values).flatten(1, 2)

    def _node_logits(self, nodes: Tensor) -> Tensor:
        return self.known.gather(-1, nodes)

    def attend(self, keys: Tensor, values: Tensor, hidden: Tensor, bias: Tensor | None) -> Tensor:
        """[sequences, queries, heads, value_dim]

        keys, values: [sequences, keys, kv_heads, dim] of the sinks and the own chunk, in the order of time.
        hidden: [queries, keys] which of them are later.
        """
        own_values = values.transpose(1, 2).to(self.q.dtype)
        own = self._products(keys.transpose(1, 2).to(self.q.dtype)).unflatten(1, (self.heads, self.queries))
        own = own.masked_fill(hidden, -math.inf).flatten(1, 2)
        if not self.past.tallest:
            out = self._average(own.softmax(-1), own_values)
            return out.unflatten(1, (self.heads, self.queries)).transpose(1, 2)
        groups = self._choose()
        member = torch.arange(self.shape.group, device=groups.device)
        slots = groups.clamp(max=self.keys.shape[2] // self.shape.group - 1)[..., None] * self.shape.group + member
        opened = self._products(self.keys).gather(-1, slots.flatten(-2))
        if self.past.few:
            none = (groups == self.heap.groups).repeat_interleave(self.shape.group, -1)
            opened = opened.masked_fill(none, -math.inf)
        nodes = self._rest(groups)
        pooled = self.known.gather(-1, nodes)
        if bias is not None:
            every = bias.to(pooled.dtype).expand(self.heads).repeat_interleave(self.queries)
            pooled = pooled + every[:, None]
        sizes = [part.shape[-1] for part in (own, opened, pooled)]
        weights = torch.cat([own, opened, pooled], -1).softmax(-1).split(sizes, -1)
        out = self._average(weights[0], own_values)
        for weight, places, at in (
            (weights[1], slots.flatten(-2), self.values),
            (weights[2], nodes, self.pooled_values),
        ):
            whole = weight.new_zeros(*weight.shape[:-1], at.shape[2])
            out = out + self._average(whole.scatter_add_(-1, places, weight), at)
        return out.unflatten(1, (self.heads, self.queries)).transpose(1, 2)


def _means(x: Tensor, members: int, dtype: torch.dtype) -> Tensor:
    """`[…, n, dim]` → `[…, n / members, dim]`"""
    return x.unflatten(2, (-1, members)).to(dtype).mean(3)


@lru_cache(maxsize=32)
def _chunk_trees(shape: Shape, several: int, device: torch.device) -> Hierarchy:
    with torch.inference_mode(False):
        tree = Hierarchy.regular([shape.chunk] * several, (shape.group, shape.factor), repeat_last=True)
        return tree.to(device)


def _sequence_and_place(tree: Hierarchy) -> tuple[Tensor, Tensor]:
    """[leaves] the tree of every leaf and its number there."""

    def build() -> tuple[Tensor, Tensor]:
        lengths = torch.tensor(tree.lengths)
        sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
        place = torch.arange(len(sequence)) - (lengths.cumsum(0) - lengths)[sequence]
        return sequence.to(tree.device), place.to(tree.device)

    return tree.cached("sequence and place", build)


def _shape(branching: Any, chunk: Any, refine: Any, beam: Any, sinks: Any) -> Shape:
    if not isinstance(branching, Sequence) or isinstance(branching, str) or len(branching) not in (1, 2):
        raise InvalidInput("branching", given=repr(branching), expected="keys of a group and a factor, such as (8, 2)")
    group, factor = (
        check_count(f"branching[{i}]", b, "2 or more", 2) for i, b in enumerate((*branching, branching[-1])[:2])
    )
    refine = check_count("refine", refine, "0 or a positive number of groups")
    if beam is None:
        width: int | None = default_width(refine)
    elif isinstance(beam, str) and beam == "exact":
        width = None
    else:
        least = max(refine, 1)
        width = check_count("beam", beam, f"'exact', None, or a width of at least {least} (refine)", least)
    shape = Shape(
        group=group,
        factor=factor,
        chunk=check_count("chunk", chunk, "a positive number of tokens", 1),
        refine=refine,
        width=width,
        sinks=check_count("sinks", sinks, "0 or a number of first tokens"),
    )
    _ = shape.chunk_height
    return shape


def _check_closes(closes: Any) -> None:
    if closes is not None:
        raise InvalidInput("closes", given="levels to close", expected="None", fix="found trees follow no text")
