"""`MultiscaleCache`: the causal tree of a growing sequence, in memory that grows with the logarithm of its length.

A token attends to the leaves of its own family and of the `near` families before it, and to closed nodes farther back.
Of a closed node it needs only the pooled key, the pooled value and the leaf count. Every level therefore keeps only its
newest nodes, in a ring of (near + 1) · members slots: the members of the node in progress, and those of the nodes that
contain the near families.

Each slot stores three numbers: the number of leaves below its node, the token that the node ends with, and the token
that its parent ends with (none while the parent is in progress). Let T be the last token before the near families. A
pooled node is visible if it ends at or before T and its parent ends after T; a leaf is visible if its parent ends after
T. This is exactly the causal list of nodes of `multiscale_attention`.

`append` advances the structure once per token, for all layers. `attend` then stores one key and value per layer,
attends to one tile of slots, and pools the nodes that have closed. No step depends on a result from the device, so a
step can be captured as a CUDA graph; `max_length` is then no longer enforced, because the host does not count replayed
steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from hsa.attention.cache.interface import AttendOptions, Cache, Memory, Storage
from hsa.attention.cache.saved_state import Wanted, check_lengths
from hsa.attention.checks import check_count
from hsa.attention.dispatch import Backend, choose
from hsa.attention.kernels import available
from hsa.attention.mixing import HeadMixing
from hsa.attention.multiscale.operator import per_head
from hsa.attention.multiscale.pyramid import pyramid
from hsa.attention.rounds import rooted, rounds
from hsa.errors import InvalidInput
from hsa.tree.causal_tree import Level, cap, causal_tree, check_branching, check_closes, levels
from hsa.tree.hierarchy import Hierarchy

OPEN = 2**31 - 1
"""Value of `parent_end` while the parent of a node is in progress."""
LENGTH = 2**20
"""Default `max_length`. A value greater by a factor of `branching` adds one ring."""


class MultiscaleCache(Cache):
    """Cache of multiscale attention: O(branching · depth) keys and values per head.

    Decoding gives each token the same result as a pass over the whole sequence:

        tree      = causal_tree(lengths, branching, closes, sinks)
        selection = select(q, k, tree, near=near, causal=True)
        out       = multiscale_attention(q, k, v, tree, selection=selection, causal=True)

    Args:
        layers, batch, kv_heads, head_dim, value_dim, dtype, device: See `Cache`.
        branching: Maximum number of members per family, from the leaves up; the last factor repeats.
        near: Number of leaf families before the token's own that are exact.
        sinks: Number of first tokens that are always exact.
        closing: Greatest height of `closes`; 0 for families of fixed size.
        max_length: Maximum number of tokens per sequence; it determines the number of levels.
        rewind: Maximum number of tokens that `crop` can remove.
        backend: "auto", "triton" (CUDA) or "torch".

    >>> cache = MultiscaleCache(layers=1, batch=1, kv_heads=2, head_dim=8, branching=(4, 4), max_length=4096)
    >>> for _ in range(100):
    ...     q, k, v = torch.randn(3, 1, 2, 8).unbind(0)
    ...     cache.append()
    ...     y = cache.attend(0, q, k, v)
    >>> cache.lengths, cache.slots
    ([100], 48)
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        kv_heads: int,
        head_dim: int,
        *,
        branching: Sequence[int] = (16, 16),
        near: int = 1,
        sinks: int = 0,
        closing: int = 0,
        max_length: int = LENGTH,
        rewind: int = 0,
        backend: str = "auto",
        **storage: Unpack[Storage],
    ):
        super().__init__(layers, batch, kv_heads, head_dim, max_length=max_length, **storage)
        self.branching = check_branching(branching)
        self.near = check_count("near", near, "a number of leaf families, 0 or more")
        self.sinks = check_count("sinks", sinks, "a number of first tokens, 0 or more")
        self.closing = check_count("closing", closing, "the greatest height that tokens close, 0 or more")
        self.rewind = check_count("rewind", rewind, "a number of tokens, 0 or more")
        self.requested_backend = backend
        self.backend = choose("MultiscaleCache", CACHES, backend, self)
        self.caps = _caps(self.branching, self.closing, max_length)
        """Maximum number of members per node; entry l is for the nodes of level l + 1."""
        rings = [(self.near + 1) * members + self.rewind for members in self.caps]
        first = np.cumsum([self.sinks, *rings])
        self.rings = [(int(begin), size) for begin, size in zip(first, rings, strict=False)]
        """First slot and size of the ring of every level; sinks come before the first ring."""
        self.slots = int(first[-1])
        """Number of slots per head."""

        def full(*shape: int, dtype: torch.dtype = torch.int32, value: float = 0) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=self.device)

        self.leaves = full(batch, self.slots)  # number of leaves below the node of a slot; 0 for an empty slot
        self.end = full(batch, self.slots)  # token that the node ends with, counted from 1
        self.parent_end = full(batch, self.slots, value=OPEN)  # token that its parent ends with
        self.made = full(batch, len(self.rings))  # number of nodes closed on every level (leaves on level 0)
        self.length = full(batch)
        self.reached = full(batch)  # greatest length before a crop; determines which slots were overwritten
        self.keys = full(layers, batch, kv_heads, self.slots, head_dim, dtype=self.dtype)
        self.values = full(layers, batch, kv_heads, self.slots, self.value_dim, dtype=self.dtype)
        # For the newest token: the slot of its leaf and of each node that it closes (−1 for none); the number to add to
        # the logit of every slot (−∞ hides it); the weight of every slot in the mean of the node that closes above it.
        self.written = full(batch, len(self.rings), value=-1)
        wide = torch.promote_types(self.dtype, torch.float32)
        self.bias = full(batch, self.slots, dtype=wide)
        self.share = full(batch, self.slots, dtype=wide)
        self.closes = full(batch)
        layout = [(*ring, members) for ring, members in zip(self.rings, self.caps, strict=True)]
        self.layout = torch.tensor(layout, dtype=torch.int32, device=self.device)
        self._biases: dict[float, Tensor] = {}

    _STATE = ("keys", "values", "leaves", "end", "parent_end", "made", "length", "reached")
    _STEP = ("written", "bias", "share", "closes")

    @property
    def lengths(self) -> list[int]:
        return self.length.tolist()

    @property
    def pooled_from(self) -> int:
        """First slot of a pooled node; the slots of leaves come before it."""
        return sum(self.rings[0])

    def begin(self, lengths: Sequence[int], closes: Any = None) -> Hierarchy:
        heights = None if closes is None else check_closes(closes, sum(int(n) for n in lengths))
        if heights is not None and heights.max(initial=0) > self.closing:
            raise self._wrong_height(int(heights.max()))
        sizes = self._start_prompts(lengths)
        forest = causal_tree(sizes, self.branching, heights, self.sinks).to(self.device)
        self._assign_slots(sizes, levels(sizes, self.branching, heights, self.sinks, len(self.rings) - 1), forest)
        return forest

    def _assign_slots(self, sizes: Sequence[int], tree: list[Level], forest: Hierarchy) -> None:
        """Assign the newest closed nodes of every level to the slots that appending token by token would use."""
        numbers = {name: getattr(self, name).cpu().numpy() for name in ("leaves", "end", "parent_end", "made")}
        forest, _ = rooted(forest)
        kept = []
        for number, level in enumerate(tree):
            sequence, slot, node, made = self._newest(number, level)
            numbers["leaves"][sequence, slot] = level.leaves[node]
            numbers["end"][sequence, slot] = level.end[node]
            numbers["parent_end"][sequence, slot] = _parents_end(tree[number + 1 :], node)
            numbers["parent_end"][:, : self.sinks] = OPEN
            numbers["made"][:, number] = made
            first = (np.cumsum(sizes) - sizes)[sequence] + level.end[node] - level.leaves[node]
            kept.append(np.stack([sequence, slot, _nodes_with(first, level.leaves[node], forest)]))
        for name, array in numbers.items():
            getattr(self, name).copy_(torch.as_tensor(array))
        self.length.copy_(torch.tensor(sizes))
        self._kept = forest, torch.as_tensor(np.concatenate(kept, 1)).to(self.device)

    def _newest(self, number: int, level: Level) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return sequence, slot and index of the nodes of a level to keep, and how many nodes each sequence has made."""
        begin, size = self.rings[number]
        is_sink = level.end <= self.sinks
        node = np.flatnonzero(level.closed & ~is_sink)
        sequence = level.tree[node]
        made = np.bincount(sequence, minlength=self.batch)
        index = np.arange(len(node)) - (np.cumsum(made) - made)[sequence]
        newest = index >= made[sequence] - size
        slot = begin + index % size
        if number == 0 and self.sinks:
            first = np.flatnonzero(is_sink)
            sequence, node = np.append(level.tree[first], sequence[newest]), np.append(first, node[newest])
            return sequence, np.append(level.end[first] - 1, slot[newest]), node, made
        return sequence[newest], slot[newest], node[newest], made

    @torch.no_grad()
    def fill(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._accept(layer, k, v)
        forest, (sequence, slot, node) = self._kept
        for leaves, stored in ((k, self.keys[layer]), (v, self.values[layer])):
            stored[sequence, :, slot] = self.backend.run(self).pooled(leaves, forest, node).to(self.dtype)
        if not self._pending:
            del self._kept

    def append(self, closes: Any = None) -> None:
        heights = None if closes is None else self._checked_closes(closes)
        self._start_token()
        if heights is None:
            self.closes.zero_()
        else:
            self.closes.copy_(heights)
        self.backend.run(self).append()

    def _checked_closes(self, closes: Any) -> Tensor:
        heights = torch.as_tensor(closes)
        if heights.shape != (self.batch,) or heights.is_floating_point():
            raise InvalidInput("closes", got=repr(closes), expected=f"one height per sequence, shape ({self.batch},)")
        if heights.device.type == "cpu":  # reading them from a GPU would wait for it
            for height in (int(heights.min()), int(heights.max())):
                if not 0 <= height <= self.closing:
                    raise self._wrong_height(height)
        return heights

    def _wrong_height(self, height: int) -> InvalidInput:
        return InvalidInput(
            "closes",
            got=height,
            expected=f"heights from 0 to {self.closing}, the `closing` of the cache",
            fix=f"Make the cache with closing={height}" if height > 0 else None,
        )

    def _head_bias(self, pooled_bias: float | Tensor, q: Tensor) -> Tensor:
        """Return the bias `[1 or heads]` on the device. Numbers are uploaded once: a copy would break a CUDA graph."""
        if not isinstance(pooled_bias, Tensor) and pooled_bias in self._biases:
            return self._biases[pooled_bias]
        bias = per_head(pooled_bias, q)
        bias = torch.zeros(1, device=self.device) if bias is None else bias.detach()
        if not isinstance(pooled_bias, Tensor):
            self._biases[pooled_bias] = bias
        return bias.to(self.bias.dtype)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttendOptions) -> Tensor:
        if options.counted is not None:
            options.counted.entries += int((self.bias > -torch.inf).sum()) * q.shape[1]
        bias, scale = options.bias, options.scale
        assert bias is not None
        if options.mixing is not None:  # the kernel cannot mix heads
            return _Torch(self).attend(layer, q, k, v, bias, scale, options.mixing)
        return self.backend.run(self).attend(layer, q, k, v, bias, scale)

    def reorder(self, index: Any) -> None:
        selected = self._check_index(index)
        for name in (*self._STATE, *self._STEP):
            axis = 1 if name in ("keys", "values") else 0
            setattr(self, name, getattr(self, name).index_select(axis, selected))
        self.batch = len(selected)
        self._longest = max(self.lengths)

    def crop(self, lengths: Sequence[int]) -> None:
        """Remove the tokens after these lengths, at most `rewind` of them, counted from the greatest length so far.

        Slots are not overwritten for `rewind` tokens, so deleting the later nodes restores the state.
        """
        wanted, reached = self._check_shorter(lengths), torch.maximum(self.reached, self.length)
        removed = max(n - m for n, m in zip(reached.tolist(), wanted, strict=True))
        if removed > self.rewind:
            raise InvalidInput(
                "lengths",
                got=removed,
                expected=f"at most {self.rewind} tokens to remove from the greatest length so far (rewind)",
                fix=f"Make the cache with rewind={removed}; each level then takes as many more slots",
            )
        length = torch.tensor(wanted, dtype=torch.int32, device=self.device)
        later = (self.leaves > 0) & (self.end > length[:, None])
        for number, (begin, size) in enumerate(self.rings):
            self.made[:, number] -= later[:, begin : begin + size].sum(1).int()
        self.leaves[later] = 0
        self.parent_end[later | (self.parent_end > length[:, None])] = OPEN
        self.reached.copy_(reached)
        self.length.copy_(length)
        self._longest = max(wanted)

    def state_dict(self) -> dict[str, Any]:
        self._check_complete()
        return {"settings": self._settings(), **{name: getattr(self, name).clone() for name in self._STATE}}

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("branching", "near", "sinks", "closing", "rewind")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        wanted: dict[str, Wanted] = {}
        for name in self._STATE:
            own, before = getattr(self, name), (self.layers,) if name in ("keys", "values") else ()
            wanted[name] = (*before, "sequences", *own.shape[len(before) + 1 :]), own.dtype
        sizes = self._check_state(state, wanted)
        check_lengths(state["length"].tolist(), sizes["sequences"], self.max_length)
        for name in self._STATE:
            setattr(self, name, state[name].to(self.device, copy=True))
        self._loaded(self.lengths)
        for name in self._STEP:
            old = getattr(self, name)
            setattr(self, name, old.new_zeros(self.batch, *old.shape[1:]))

    def memory(self) -> Memory:
        used = sum(getattr(self, name).nbytes for name in (*self._STATE, *self._STEP))
        return Memory(used, self._flat_bytes(), leaves_kept=False)


def _caps(branching: Sequence[int], closing: int, max_length: int) -> list[int]:
    """Return the maximum number of members per node, for every level that the longest sequence needs.

    Nodes of the last level never close. A single token may close nodes up to height `closing`.
    """
    caps, tokens = [cap(branching, 1)], 1
    while True:
        if len(caps) > closing:
            tokens *= caps[-1]
        if tokens >= max_length:
            return caps
        caps.append(cap(branching, len(caps) + 1))


def _parents_end(above: list[Level], node: np.ndarray) -> np.ndarray | int:
    """Return the token that the parent of each node ends with; OPEN while it is in progress."""
    if not above:
        return OPEN
    parent = np.searchsorted(above[0].offsets, node, side="right") - 1
    return np.where(above[0].closed[parent], above[0].end[parent], OPEN)


def _nodes_with(first: np.ndarray, leaves: np.ndarray, forest: Hierarchy) -> np.ndarray:
    """Return the node of the forest with these leaves, for each first leaf and number of leaves."""
    s = forest.structure
    runs = s.first_leaf * (forest.num_leaves + 1) + s.leaf_count
    order = np.argsort(runs, kind="stable")
    return order[np.searchsorted(runs, first * (forest.num_leaves + 1) + leaves, sorter=order)]


class _Torch:
    """Decoding steps of a cache in PyTorch operations."""

    def __init__(self, cache: MultiscaleCache):
        self.cache = cache

    def append(self) -> None:
        """Add a leaf to every sequence and close the nodes that it completes."""
        c = self.cache
        rows = torch.arange(c.batch, device=c.device)
        c.length += 1
        now = c.length
        is_sink = now <= c.sinks
        slot = torch.where(is_sink, now - 1, self._next_slot(0)).long()
        c.leaves[rows, slot], c.end[rows, slot], c.parent_end[rows, slot] = 1, now, OPEN
        c.made[:, 0] += (~is_sink).int()
        c.written.fill_(-1)
        c.written[:, 0] = slot
        self._update_bias()
        c.share.zero_()
        closing = ~is_sink
        for level, members in enumerate(c.caps[:-1], 1):
            begin, size = c.rings[level - 1]
            ring = slice(begin, begin + size)
            inside = (c.parent_end[:, ring] == OPEN) & (c.leaves[:, ring] > 0)
            closing = closing & ((inside.sum(1) >= members) | (c.closes >= level))
            if c.device.type == "cpu" and not bool(closing.any()):
                return
            inside &= closing[:, None]
            leaves = c.leaves[:, ring] * inside
            total = leaves.sum(1, dtype=torch.int32)
            c.share[:, ring] = leaves.to(c.share.dtype) / total.clamp(min=1)[:, None]
            c.parent_end[:, ring] = torch.where(inside, now[:, None], c.parent_end[:, ring])
            slot = self._next_slot(level).long()
            for numbers, value in ((c.leaves, total), (c.end, now), (c.parent_end, torch.full_like(now, OPEN))):
                numbers[rows, slot] = torch.where(closing, value, numbers[rows, slot])
            c.written[:, level] = torch.where(closing, slot, -1)
            c.made[:, level] += closing.int()

    def _next_slot(self, level: int) -> Tensor:
        begin, size = self.cache.rings[level]
        return begin + self.cache.made[:, level] % size

    def _update_bias(self) -> None:
        """Set the bias of every slot for the newest token: −∞ if hidden, otherwise the log of its leaf count."""
        c = self.cache
        if len(c.rings) > 1:
            begin, size = c.rings[1]
            older = c.made[:, 1] - 1 - c.near  # the newest family that is not near
            last = c.end.gather(1, (begin + older.clamp(min=0) % size).long()[:, None])
            last = torch.where(older[:, None] >= 0, last, 0)
        else:
            last = torch.zeros_like(c.length)[:, None]
        is_leaf = torch.arange(c.slots, device=c.device) < c.pooled_from
        seen = (c.leaves > 0) & (is_leaf | (c.end <= last)) & (c.parent_end > last)
        c.bias.copy_(c.leaves.to(c.bias.dtype).log().masked_fill_(~seen, -torch.inf))

    def pooled(self, leaves: Tensor, forest: Hierarchy, nodes: Tensor) -> Tensor:
        """Return the means `[nodes, kv_heads, dim]` over the leaves below nodes of a rooted forest."""
        plan = rounds(forest)
        return pyramid(leaves, plan)[plan.slot_of_node[nodes]]

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pooled_bias: Tensor,
        scale: float,
        mixing: HeadMixing | None = None,
    ) -> Tensor:
        """Store the newest token in one layer, attend, and pool the nodes that it closes."""
        c = self.cache
        rows = torch.arange(c.batch, device=c.device)
        keys, values = c.keys[layer], c.values[layer]
        slot = c.written[:, 0].long()
        keys[rows, :, slot], values[rows, :, slot] = k, v
        dtype = torch.promote_types(c.dtype, torch.float32)
        bias = c.bias.to(dtype)[:, None].expand(-1, q.shape[1], -1)
        bias = torch.cat([bias[..., : c.pooled_from], bias[..., c.pooled_from :] + pooled_bias.to(dtype)[:, None]], -1)
        split = (c.kv_heads, q.shape[1] // c.kv_heads)
        logits = (q.to(dtype).unflatten(1, split) @ keys.to(dtype).transpose(-1, -2)).flatten(1, 2) * scale
        if mixing is not None:
            logits = mixing.logits.to(dtype) @ logits
        weights = (logits + bias).softmax(-1)
        if mixing is not None:
            weights = mixing.weights.to(dtype) @ weights
        out = (weights.unflatten(1, split) @ values.to(dtype)).flatten(1, 2).to(q.dtype)
        self._pool(keys, values, dtype)
        return out

    def _pool(self, keys: Tensor, values: Tensor, dtype: torch.dtype) -> None:
        """Pool the keys and values of the nodes that the newest token closes, level by level."""
        c = self.cache
        rows = torch.arange(c.batch, device=c.device)
        for level in range(1, len(c.rings)):
            slot = c.written[:, level].long()
            closed = (slot >= 0)[:, None, None]
            if c.device.type == "cpu" and not bool(closed.any()):
                return
            begin, size = c.rings[level - 1]
            share = c.share[:, None, None, begin : begin + size].to(dtype)
            slot = slot.clamp(min=0)
            for stored in (keys, values):
                pooled = (share @ stored[:, :, begin : begin + size].to(dtype)).squeeze(2).to(c.dtype)
                stored[rows, :, slot] = torch.where(closed, pooled, stored[rows, :, slot])


def _run_triton(cache: MultiscaleCache) -> Any:
    from hsa.attention.cache.triton.multiscale_step import Decode

    return Decode(cache)


def _why_not_triton(cache: MultiscaleCache) -> list[str]:
    like = torch.empty(0, 1, cache.head_dim, dtype=cache.dtype, device=cache.device)
    return available.why_not(like, like, cache.requested_backend)


CACHES = (Backend("triton", _run_triton, _why_not_triton), Backend("torch", _Torch))
