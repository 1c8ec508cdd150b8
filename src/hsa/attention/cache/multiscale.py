"""`MultiscaleCache`: the right-skewed tree of a growing sequence, in memory that grows with the logarithm of its length.

A token attends to the leaves of its own family and of the `near` families before it, and beyond to closed nodes, each by its
pooled key, pooled value and leaf count. So of every level only the newest nodes are kept, in a ring of (near + 1) · members
places: the members of the node in progress, and of those that a near family stands in.

What a token sees follows from three numbers per place: how many leaves it stands for, the token it ends with, and the token
its parent ends with (none as long as that is in progress). With T the last token before the near families, a pooled node is
listed if it ends at or before T and its parent after T; a leaf if its parent ends after T. That is the causal frontier of
`multiscale_attention`, number for number.

The structure moves once per token (`append`), for all layers; each layer then stores one key and value, attends to one tile
of places, and pools what has closed (`attend`). Nothing asks the device for a decision, so a step can be captured as a CUDA
graph; the host, which watches over `max_length`, then no longer counts along.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hsa.attention.cache.interface import Cache, Memory
from hsa.attention.checks import check_count, scale_or_default
from hsa.attention.dispatch import Backend, choose
from hsa.attention.kernels import available
from hsa.attention.mixing import HeadMixing, check_mixing
from hsa.attention.multiscale.operator import per_head
from hsa.attention.multiscale.pyramid import pyramid
from hsa.attention.rounds import rooted, rounds
from hsa.errors import InvalidInput
from hsa.tree.causal_tree import Level, cap, causal_tree, check_branching, check_closes, levels
from hsa.tree.hierarchy import Hierarchy

OPEN = 2**31 - 1
"""Where the parent of a node ends that is still in progress."""
LENGTH = 2**20
"""Tokens a sequence may come to unless the caller says otherwise; each factor of `branching` more costs one ring."""


class MultiscaleCache(Cache):
    """A cache of O(branching · depth) keys and values per head.

    A token gets what the full pass gives it: `multiscale_attention(q, k, v, tree, selection=selection, causal=True)` with
    `selection = select(q, k, tree, near=near, causal=True)` and `tree = causal_tree(lengths, branching, closes, sinks)`.

    Args:
        layers, batch, kv_heads, head_dim, value_dim, dtype, device: see `Cache`.
        branching: members per family, from the leaves up, at most; the last factor repeats.
        near: leaf families before the own one that are exact.
        sinks: first tokens of every sequence that are always exact.
        closing: the greatest height that tokens close (`closes`); 0 for fixed windows.
        max_length: tokens a sequence may come to; decides the number of levels.
        rewind: how many tokens `crop` can take back.
        backend: "auto", "triton" (CUDA) or "torch".

    >>> cache = MultiscaleCache(layers=1, batch=1, kv_heads=2, head_dim=8, branching=(4, 4), max_length=4096)
    >>> for _ in range(100):
    ...     q, k, v = torch.randn(3, 1, 2, 8).unbind(0)
    ...     cache.append()
    ...     y = cache.attend(0, q, k, v)
    >>> cache.lengths, cache.places  # of which it can see some
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
        **sizes: Any,
    ):
        super().__init__(layers, batch, kv_heads, head_dim, max_length=max_length, **sizes)
        self.branching = check_branching(branching)
        self.near = check_count("near", near, "0 or a positive number of leaf families")
        self.sinks = check_count("sinks", sinks, "0 or a positive number of first tokens")
        self.closing = check_count("closing", closing, "0 or the greatest height that tokens close")
        self.rewind = check_count("rewind", rewind, "0 or a positive number of tokens")
        self.asked_backend = backend
        self.backend = choose("MultiscaleCache", CACHES, backend, self)
        self.caps = _caps(self.branching, self.closing, max_length)
        """Members that a node takes; entry l for the nodes of level l + 1."""
        rings = [(self.near + 1) * members + self.rewind for members in self.caps]
        first = np.cumsum([self.sinks, *rings])
        self.rings = [(int(begin), size) for begin, size in zip(first, rings, strict=False)]
        """Begin and size of the ring of every level among the places; sinks come first."""
        self.places = int(first[-1])

        def whole(*shape: int, kind: Any = torch.int32, value: float = 0) -> Tensor:
            return torch.full(shape, value, dtype=kind, device=self.device)

        self.leaves = whole(batch, self.places)  # 0: nothing here
        self.end = whole(batch, self.places)
        self.parent_end = whole(batch, self.places, value=OPEN)
        self.made = whole(batch, len(self.rings))  # nodes of every level so far
        self.length = whole(batch)
        self.reached = whole(batch)  # the longest it was before a crop: places have been overwritten up to there
        self.keys = whole(layers, batch, kv_heads, self.places, head_dim, kind=self.dtype)
        self.values = whole(layers, batch, kv_heads, self.places, self.value_dim, kind=self.dtype)
        # Of the newest token: the place of its leaf and of each node that it closes (−1: none), the logit to add at every
        # place (−∞: not seen), and the share of every place in the node that closes above it.
        self.written = whole(batch, len(self.rings), value=-1)
        wide = torch.promote_types(self.dtype, torch.float32)
        self.bias = whole(batch, self.places, kind=wide)
        self.share = whole(batch, self.places, kind=wide)
        self.closes = whole(batch)
        layout = [(*ring, members) for ring, members in zip(self.rings, self.caps, strict=True)]
        self.layout = torch.tensor(layout, dtype=torch.int32, device=self.device)
        self._biases: dict[float, Tensor] = {}

    _STATE = ("leaves", "end", "parent_end", "made", "length", "reached", "keys", "values")
    _STEP = ("written", "bias", "share", "closes")

    @property
    def lengths(self) -> list[int]:
        return self.length.tolist()

    @property
    def pooled_from(self) -> int:
        """The first place of a pooled node; leaves are before it."""
        return sum(self.rings[0])

    def begin(self, lengths: Sequence[int], closes: Any = None) -> Hierarchy:
        heights = None if closes is None else check_closes(closes, sum(int(n) for n in lengths))
        if heights is not None and heights.max(initial=0) > self.closing:
            raise self._closes_too_much(int(heights.max()))
        sizes = self._meet_prompts(lengths)
        forest = causal_tree(sizes, self.branching, heights, self.sinks).to(self.device)
        self._place_prompts(sizes, levels(sizes, self.branching, heights, self.sinks, len(self.rings) - 1), forest)
        return forest

    def _place_prompts(self, sizes: Sequence[int], found: list[Level], forest: Hierarchy) -> None:
        """The newest closed nodes of every level go to the places where appending would have put them."""
        numbers = {name: getattr(self, name).cpu().numpy() for name in ("leaves", "end", "parent_end", "made")}
        forest, _ = rooted(forest)
        kept = []
        for number, level in enumerate(found):
            sequence, place, node, made = self._newest(number, level)
            numbers["leaves"][sequence, place] = level.leaves[node]
            numbers["end"][sequence, place] = level.end[node]
            numbers["parent_end"][sequence, place] = _parents_end(found[number + 1 :], node)
            numbers["parent_end"][:, : self.sinks] = OPEN
            numbers["made"][:, number] = made
            first = (np.cumsum(sizes) - sizes)[sequence] + level.end[node] - level.leaves[node]
            kept.append(np.stack([sequence, place, _nodes_with(first, level.leaves[node], forest)]))
        for name, array in numbers.items():
            getattr(self, name).copy_(torch.as_tensor(array))
        self.length.copy_(torch.tensor(sizes))
        self._kept = forest, torch.as_tensor(np.concatenate(kept, 1)).to(self.device)

    def _newest(self, number: int, level: Level) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Sequence, place and node of what a level keeps, and how many nodes it has closed per sequence."""
        begin, size = self.rings[number]
        is_sink = level.end <= self.sinks
        node = np.flatnonzero(level.closed & ~is_sink)
        sequence = level.tree[node]
        made = np.bincount(sequence, minlength=self.batch)
        index = np.arange(len(node)) - (np.cumsum(made) - made)[sequence]
        newest = index >= made[sequence] - size
        places = begin + index % size
        if number == 0 and self.sinks:
            first = np.flatnonzero(is_sink)
            sequence, node = np.append(level.tree[first], sequence[newest]), np.append(first, node[newest])
            return sequence, np.append(level.end[first] - 1, places[newest]), node, made
        return sequence[newest], places[newest], node[newest], made

    @torch.no_grad()
    def fill(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._meet_layer(layer, k, v)
        forest, (sequence, place, node) = self._kept
        for leaves, stored in ((k, self.keys[layer]), (v, self.values[layer])):
            stored[sequence, :, place] = self.backend.run(self).pooled(leaves, forest, node).to(self.dtype)
        if not self._waiting:
            del self._kept

    def append(self, closes: Any = None) -> None:
        heights = None if closes is None else self._checked_closes(closes)
        self._meet_token()
        if heights is None:
            self.closes.zero_()
        else:
            self.closes.copy_(heights)
        self.backend.run(self).append()

    def _checked_closes(self, closes: Any) -> Tensor:
        heights = torch.as_tensor(closes)
        if heights.shape != (self.batch,) or heights.is_floating_point():
            raise InvalidInput("closes", given=repr(closes), expected=f"a height per sequence, ({self.batch},)")
        if heights.device.type == "cpu" and not 0 <= int(heights.min()) <= int(heights.max()) <= self.closing:
            raise self._closes_too_much(int(heights.max()))
        return heights

    def _closes_too_much(self, height: int) -> InvalidInput:
        return InvalidInput(
            "closes",
            given=f"a token that closes height {height}",
            expected=f"0 to {self.closing}, the `closing` the cache was made with",
            fix=f"make it with closing={height}",
        )

    def _per_head(self, given: float | Tensor, q: Tensor) -> Tensor:
        """[1 or heads] on the device, where a number is put once."""
        if not isinstance(given, Tensor) and given in self._biases:
            return self._biases[given]
        bias = per_head(given, q)
        bias = torch.zeros(1, device=self.device) if bias is None else bias.detach()
        if not isinstance(given, Tensor):
            self._biases[given] = bias
        return bias.to(self.bias.dtype)

    @torch.no_grad()
    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        pooled_bias: float | Tensor = 0.0,
        mixing: HeadMixing | None = None,
        scale: float | None = None,
    ) -> Tensor:
        bias, scale = self._per_head(pooled_bias, q), scale_or_default(scale, q)
        check_mixing(mixing, q)
        self._meet_layer(layer, k, v, q)
        if mixing is not None:  # the kernel does not mix
            return _Torch(self).attend(layer, q, k, v, bias, scale, mixing)
        return self.backend.run(self).attend(layer, q, k, v, bias, scale)

    def reorder(self, index: Any) -> None:
        chosen = self._check_index(index)
        for name in (*self._STATE, *self._STEP):
            axis = 1 if name in ("keys", "values") else 0
            setattr(self, name, getattr(self, name).index_select(axis, chosen))
        self.batch = len(chosen)
        self._longest = max(self.lengths)

    def crop(self, lengths: Sequence[int]) -> None:
        """NodePositions are not overwritten for `rewind` tokens: forgetting what came later brings back what was."""
        wanted, reached = self._check_shorter(lengths), torch.maximum(self.reached, self.length)
        back = max(n - m for n, m in zip(reached.tolist(), wanted, strict=True))
        if back > self.rewind:
            raise InvalidInput(
                "lengths",
                given=f"{back} tokens to take back from the most there were",
                expected=f"at most {self.rewind}, the `rewind` the cache was made with",
                fix=f"make it with rewind={back}; it takes so many places more per level",
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
        self._check_nobody_waits()
        return {"settings": self._settings, **{name: getattr(self, name).clone() for name in self._STATE}}

    @property
    def _settings(self) -> dict[str, Any]:
        names = ("branching", "near", "sinks", "closing", "rewind")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rows, rings = (self.layers, None, self.kv_heads, self.places), len(self.rings)
        shapes = {"keys": (*rows, self.head_dim), "values": (*rows, self.value_dim), "made": (None, rings)}
        self._check_state(state, shapes)
        if state.get("settings") != self._settings:
            raise InvalidInput(
                "state['settings']",
                given=state.get("settings"),
                expected=f"{self._settings}, as this cache is made",
                fix="make the cache with the settings of the saved one",
            )
        for name in self._STATE:
            setattr(self, name, state[name].to(self.device, copy=True))
        self.batch = len(self.length)
        for name in self._STEP:
            old = getattr(self, name)
            setattr(self, name, old.new_zeros(self.batch, *old.shape[1:]))
        self._longest, self._waiting, self._prompts = max(self.lengths), set(), None

    def memory(self) -> Memory:
        used = sum(getattr(self, name).nbytes for name in (*self._STATE, *self._STEP))
        return Memory(used, self._flat_bytes(), leaves_kept=False)


def _caps(branching: Sequence[int], closing: int, max_length: int) -> list[int]:
    """Members per node, for as many levels as the longest sequence needs: nodes of the last never close.

    Nodes up to height `closing` may be closed after a single token.
    """
    caps, tokens = [cap(branching, 1)], 1
    while True:
        if len(caps) > closing:
            tokens *= caps[-1]
        if tokens >= max_length:
            return caps
        caps.append(cap(branching, len(caps) + 1))


def _parents_end(above: list[Level], node: np.ndarray) -> np.ndarray | int:
    if not above:
        return OPEN
    parent = np.searchsorted(above[0].offsets, node, side="right") - 1
    return np.where(above[0].closed[parent], above[0].end[parent], OPEN)


def _nodes_with(first: np.ndarray, leaves: np.ndarray, forest: Hierarchy) -> np.ndarray:
    """For every run of leaves that some node holds, a node that holds it."""
    s = forest.structure
    runs = s.first_leaf * (forest.num_leaves + 1) + s.leaf_count
    order = np.argsort(runs, kind="stable")
    return order[np.searchsorted(runs, first * (forest.num_leaves + 1) + leaves, sorter=order)]


class _Torch:
    """The step in PyTorch's own operations."""

    def __init__(self, cache: MultiscaleCache):
        self.cache = cache

    def append(self) -> None:
        c = self.cache
        rows = torch.arange(c.batch, device=c.device)
        c.length += 1
        now = c.length
        is_sink = now <= c.sinks
        place = torch.where(is_sink, now - 1, self._next_place(0)).long()
        c.leaves[rows, place], c.end[rows, place], c.parent_end[rows, place] = 1, now, OPEN
        c.made[:, 0] += (~is_sink).int()
        c.written.fill_(-1)
        c.written[:, 0] = place
        self._list_what_is_seen()
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
            place = self._next_place(level).long()
            for numbers, value in ((c.leaves, total), (c.end, now), (c.parent_end, torch.full_like(now, OPEN))):
                numbers[rows, place] = torch.where(closing, value, numbers[rows, place])
            c.written[:, level] = torch.where(closing, place, -1)
            c.made[:, level] += closing.int()

    def _next_place(self, level: int) -> Tensor:
        begin, size = self.cache.rings[level]
        return begin + self.cache.made[:, level] % size

    def _list_what_is_seen(self) -> None:
        c = self.cache
        if len(c.rings) > 1:
            begin, size = c.rings[1]
            older = c.made[:, 1] - 1 - c.near  # the newest family that is not near
            last = c.end.gather(1, (begin + older.clamp(min=0) % size).long()[:, None])
            last = torch.where(older[:, None] >= 0, last, 0)
        else:
            last = torch.zeros_like(c.length)[:, None]
        is_leaf = torch.arange(c.places, device=c.device) < c.pooled_from
        seen = (c.leaves > 0) & (is_leaf | (c.end <= last)) & (c.parent_end > last)
        c.bias.copy_(c.leaves.to(c.bias.dtype).log().masked_fill_(~seen, -torch.inf))

    def pooled(self, leaves: Tensor, forest: Hierarchy, nodes: Tensor) -> Tensor:
        """[nodes, kv_heads, dim] means over the leaves below some nodes of a rooted forest."""
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
        c = self.cache
        rows = torch.arange(c.batch, device=c.device)
        keys, values = c.keys[layer], c.values[layer]
        place = c.written[:, 0].long()
        keys[rows, :, place], values[rows, :, place] = k, v
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
        c = self.cache
        rows = torch.arange(c.batch, device=c.device)
        for level in range(1, len(c.rings)):
            place = c.written[:, level].long()
            closed = (place >= 0)[:, None, None]
            if c.device.type == "cpu" and not bool(closed.any()):
                return
            begin, size = c.rings[level - 1]
            share = c.share[:, None, None, begin : begin + size].to(dtype)
            place = place.clamp(min=0)
            for stored in (keys, values):
                pooled = (share @ stored[:, :, begin : begin + size].to(dtype)).squeeze(2).to(c.dtype)
                stored[rows, :, place] = torch.where(closed, pooled, stored[rows, :, place])


def _run_triton(cache: MultiscaleCache) -> Any:
    from hsa.attention.cache.triton.multiscale_step import Decode

    return Decode(cache)


def _why_not_triton(cache: MultiscaleCache) -> list[str]:
    like = torch.empty(0, 1, cache.head_dim, dtype=cache.dtype, device=cache.device)
    return available.why_not(like, like, cache.asked_backend)


CACHES = (Backend("triton", _run_triton, _why_not_triton), Backend("torch", _Torch))
