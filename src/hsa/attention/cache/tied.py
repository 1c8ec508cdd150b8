"""`TiedCache`: the paper's cache (appendix G.2) for `hierarchical_attention`, with pooled queries and energies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hsa.attention.cache.interface import Memory
from hsa.attention.cache.saved_state import check_lengths, check_tensors
from hsa.attention.checks import check_count, check_inputs, repeat_heads, scale_or_default, without_autocast
from hsa.attention.hierarchical.operator import energy
from hsa.attention.softmax import exact
from hsa.errors import InvalidInput
from hsa.tree.causal_tree import cap, causal_tree, check_branching, check_closes
from hsa.tree.hierarchy import Hierarchy, integers


class TiedCache:
    """Cache of `hierarchical_attention(causal="paper-mask")`, over the right-skewed tree of the paper's appendix G.2.

    For each open node on the path to the newest token, every layer keeps the sum of its queries, the energy of its
    finished members, and the pooled key, pooled value and leaf count of each finished member. A token costs O(b·depth):

        upwards    inner(P) = (Σ over finished members C of count(C)·mass(C) + count(A)·mass(A)) / count(P)
                   mass(A)  = log(e^inner(A) + e^outer(A)),  outer(A) over the finished members of P     (A: P's path member)
        downwards  out ← out + weight · share(outer(A)) · y(A),  weight ← weight · share(inner(A))

    The result of a token is that of the tree up to this token. A pass over a longer sequence gives earlier tokens
    *other* results, because the operator ties the rows of a node: its pooled queries and energies change with every
    token that joins it. Appendix G describes this behaviour. Models here decode with `MultiscaleCache`, where results
    never change. Tokens cannot be removed: they stay in sums and means.

    Args:
        batch: Number of sequences; each grows by one token per step.
        branching: Number of members per node, from the leaves up; the last factor repeats.
        layers: Number of layers.
        sinks: Number of first tokens that are children of the root.

    >>> from hsa import Hierarchy, hierarchical_attention
    >>> q, k, v = torch.randn(3, 9, 2, 4).unbind(0)  # 9 tokens, 2 heads of 4
    >>> cache = TiedCache(1, (2, 2))
    >>> for t in range(9):
    ...     cache.append()
    ...     out = cache.attend(0, q[t : t + 1], k[t : t + 1], v[t : t + 1])
    >>> tree = Hierarchy.regular([9], (2, 2), repeat_last=True)
    >>> full = hierarchical_attention(q, k, v, tree, causal="paper-mask")
    >>> torch.allclose(out[0], full[-1], atol=1e-5)
    True
    """

    def __init__(self, batch: int, branching: Sequence[int], *, layers: int = 1, sinks: int = 0):
        self.batch = check_count("batch", batch, "1 or more sequences", minimum=1)
        self.layers = check_count("layers", layers, "1 or more", minimum=1)
        self.sinks = check_count("sinks", sinks, "0 or more first tokens")
        self.branching = check_branching(branching)
        self.lengths = [0] * self.batch
        self._root = _Level(self.batch, self.sinks)
        self._levels: list[_Level] = []
        self._steps: list[_Step] | None = None
        self._prompts: _Prompts | None = None
        self._attended: set[int] = set(range(self.layers))
        self._widths: tuple[Any, ...] | None = None  # heads, key/value heads, dim, value_dim, dtype, device

    def begin(self, lengths: Any, closes: Any = None) -> Hierarchy:
        """Start an empty cache with prompts of these lengths.

        Args:
            lengths: `[batch]` number of tokens of every prompt.
            closes: `[tokens]` height up to which each token closes nodes, prompts one after another; None for 0.

        Returns:
            The forest of the prompts, for `hierarchical_attention`.
        """
        if any(self.lengths):
            raise InvalidInput("begin", got="a cache with tokens", expected="an empty cache", fix="Make a new cache")
        hierarchy = causal_tree(lengths, self.branching, closes, sinks=self.sinks)
        if hierarchy.num_trees != self.batch:
            raise InvalidInput(
                "lengths",
                got=hierarchy.lengths,
                expected=f"one length for each of the {self.batch} sequences",
            )
        length, first = np.array(hierarchy.lengths), hierarchy.structure.leaf_offsets[:-1]
        heights = np.zeros(hierarchy.num_leaves, np.int64) if closes is None else integers("closes", closes)
        for t in range(int(length.max())):
            has_token = t < length
            self._advance(has_token, heights[first + np.minimum(t, length - 1)])
        self._prompts = _Prompts.of(hierarchy, [level.counts for level in (self._root, *reversed(self._levels))])
        self._attended = set()
        return hierarchy

    @torch.no_grad()
    def fill(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> None:
        """Store the prompts in one layer, after `begin`.

        Args:
            layer: Number of the layer. Call each layer once.
            q, k, v: `[tokens, heads, dim]` queries, keys and values of the prompts, packed.
            scale: Factor of the dot products; 1/√dim by default.
        """
        if self._prompts is None or layer in self._attended:
            raise InvalidInput(
                "layer",
                problem=f"{layer} is not waiting for prompts",
                expected="a call of begin, then one of fill per layer",
            )
        check_inputs({"q": q, "k": k, "v": v}, self._prompts.members.to(q.device))
        self._check_widths(layer, q, k, v)
        self._attended.add(layer)
        self._prompts.fill(layer, q, k, v, [self._root, *reversed(self._levels)], scale_or_default(scale, q))
        if len(self._attended) == self.layers:
            self._prompts = None

    def append(self, closes: Any = None) -> None:
        """Add a token to every sequence, and close the nodes that it completes.

        Args:
            closes: `[batch]` height up to which the token closes nodes of any size; None for 0.
        """
        self._check_finished("append")
        heights = np.zeros(self.batch, np.int64) if closes is None else check_closes(closes, self.batch)
        self._steps, self._attended = self._advance(np.ones(self.batch, bool), heights), set()
        if self._widths is not None:
            self._upload()

    def _advance(self, has_token: np.ndarray, heights: np.ndarray) -> list[_Step]:
        """Add a token to the structure of some sequences, and return the steps of the nodes on its path."""
        in_tree = has_token & (np.array(self.lengths) >= self.sinks)
        # For the member of each level that lies on the path: whether it is complete, and its number of leaves.
        complete, size, steps = in_tree, np.ones(self.batch, np.int64), []
        for height, level in enumerate(self._levels, start=1):
            closing = complete & ((level.sizes + 1 == cap(self.branching, height)) | (heights >= height))
            steps.append(level.step(complete, closing, size))
            complete, size = closing, steps[-1].count
        while complete.any():
            level = _Level(self.batch, cap(self.branching, len(self._levels) + 1) - 1)
            if self._widths is not None:
                level.allocate(self.layers, *self._widths)
            closing = complete & (heights > len(self._levels))
            self._levels.append(level)
            steps.append(level.step(complete, closing, size))
            complete, size = closing, steps[-1].count
        steps.append(self._root.step(has_token & ~in_tree, np.zeros(self.batch, bool), size))
        self.lengths = (np.array(self.lengths) + has_token).tolist()
        return steps

    @torch.no_grad()
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        """Store the newest token of every sequence, and return its attention `[batch, heads, value_dim]`.

        Args:
            layer: Number of the layer. Call each layer once after every `append`.
            q: `[batch, heads, dim]` queries of the newest tokens.
            k: `[batch, kv_heads, dim]` keys of these tokens; `kv_heads` must divide `heads`.
            v: `[batch, kv_heads, value_dim]` values of these tokens.
            scale: Factor of the dot products; 1/√dim by default.
        """
        self._check(layer, q, k, v)
        self._attended.add(layer)
        scale, heads, wide = scale_or_default(scale, q), q.shape[1], torch.promote_types(q.dtype, torch.float32)
        query, key, value = q.to(wide), k.to(wide), v.to(wide)  # sum of queries, means of keys and values on the path
        count = torch.ones(self.batch, 1, dtype=wide, device=q.device)
        inner = scale * (query * repeat_heads(key, heads)).sum(-1)
        path = []
        with without_autocast(q):
            for level, step in zip([*self._levels, self._root], self._steps or [], strict=True):
                y, outer = level.siblings(layer, query / count[..., None], step, scale)
                path.append((y, (outer - inner)[..., None]))  # −∞ without siblings: all weight goes down
                mass = torch.logaddexp(inner, outer)
                query, inner, key, value, count = level.join(layer, query, mass, key, value, count, step)
        out, weight = torch.zeros_like(path[0][0]), torch.ones_like(path[0][1])
        for y, more in reversed(path):
            out = out + weight * torch.sigmoid(more) * y
            weight = weight * torch.sigmoid(-more)
        return (out + weight * repeat_heads(v.to(wide), heads)).to(v.dtype)

    def reorder(self, index: Any) -> None:
        """Replace sequence i by sequence `index[i]` (beam search). The number of sequences may change."""
        index = integers("index", index)
        if index.ndim != 1 or len(index) == 0 or ((index < 0) | (index >= self.batch)).any():
            raise InvalidInput(
                "index", got=index.tolist(), expected=f"sequence numbers from 0 to {self.batch - 1}, at least one"
            )
        self._check_finished("reorder")
        self.batch, self.lengths = len(index), [self.lengths[i] for i in index]
        for level in (*self._levels, self._root):
            level.reorder(index)
        self._steps = None

    def memory(self) -> Memory:
        """Return the bytes of this cache and of a flat one."""
        if self._widths is None:
            return Memory(0, 0, leaves_kept=False)
        _, kv_heads, dim, value_dim, dtype, _ = self._widths
        flat = sum(self.lengths) * kv_heads * (dim + value_dim) * dtype.itemsize * self.layers
        kept = sum(x.nbytes for level in (*self._levels, self._root) for x in level.tensors.values())
        return Memory(kept, flat, leaves_kept=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain values, for `torch.save`."""
        self._check_finished("state_dict")
        return {
            "settings": self._settings(),
            "lengths": list(self.lengths),
            "height": len(self._levels) + 1,
            "widths": self._widths and (*self._widths[:-1], str(self._widths[-1])),
            "levels": [level.state() for level in (*self._levels, self._root)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned. Tensors stay on their device."""
        check_tensors(state, {})
        if state.get("settings") != self._settings():
            raise InvalidInput(
                "state['settings']", got=state.get("settings"), expected=f"{self._settings()}, as in this cache"
            )
        lengths = check_lengths(state.get("lengths"))
        widths = _restored_widths(state.get("widths")) if any(lengths) else None
        levels = self._restored_levels(state.get("levels"), state.get("height"), lengths, widths)
        self.lengths, self.batch, self._widths = lengths, len(lengths), widths
        *self._levels, self._root = levels
        self._steps, self._attended = None, set(range(self.layers))

    def _restored_levels(
        self, states: Any, height: Any, lengths: list[int], widths: tuple[Any, ...] | None
    ) -> list[_Level]:
        """Return the levels of a state, after a check of their tensors."""
        if not isinstance(states, list) or len(states) != height or not states:
            raise InvalidInput(
                "state['levels']", got="other content", expected="the tensors of the levels and the root"
            )
        levels, batch = [], len(lengths)
        for number, state in enumerate(states):
            where = f"state['levels'][{number}]"
            width = self.sinks if number == len(states) - 1 else cap(self.branching, number + 1) - 1
            sizes = check_tensors(state, {"counts": ((batch, width), torch.int64)}, where)
            if widths is not None:
                check_tensors(state, _tensors(self.layers, batch, width, *widths[:-1]), where, **sizes)
            levels.append(_Level.restored(state, widths is not None))
        if not np.array_equal(sum(level.counts.sum(1) for level in levels), lengths):
            raise InvalidInput(
                "state['levels']", got="other numbers of tokens", expected=f"those of the lengths, {lengths}"
            )
        return levels

    def _settings(self) -> dict[str, Any]:
        return {"branching": list(self.branching), "layers": self.layers, "sinks": self.sinks}

    def _upload(self) -> None:
        if self._steps is not None and self._widths is not None:
            wide, device = torch.promote_types(self._widths[4], torch.float32), self._widths[5]
            for step in self._steps:
                step.upload(wide, device)

    def _check_finished(self, where: str) -> None:
        if len(self._attended) < self.layers:
            raise InvalidInput(
                where,
                problem=f"only {len(self._attended)} of {self.layers} layers have the newest tokens",
                expected="all of them first",
                fix="For every layer, call fill after begin and attend after append",
            )

    def _check(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        if self._steps is None or layer in self._attended:
            raise InvalidInput(
                "layer",
                problem=f"{layer} is not waiting for a token",
                expected="a call of append, then one of attend per layer",
            )
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.ndim != 3 or len(x) != self.batch:
                raise InvalidInput(
                    name,
                    got=f"shape {tuple(x.shape)}",
                    expected=f"shape ({self.batch}, heads, dim), one row per sequence",
                )
        fits = k.shape[1] == v.shape[1] and q.shape[1] % k.shape[1] == 0 and q.shape[2] == k.shape[2]
        if not fits or not q.dtype == k.dtype == v.dtype:
            raise InvalidInput(
                "k",
                got=f"{tuple(k.shape)} {k.dtype} with q {tuple(q.shape)} {q.dtype} and v {tuple(v.shape)} {v.dtype}",
                expected="the dtype and head_dim of q, and equal numbers of heads in k and v that divide those of q",
            )
        self._check_widths(layer, q, k, v)

    def _check_widths(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        numbers = f"a number from 0 to {self.layers - 1}"
        if check_count("layer", layer, numbers) >= self.layers:
            raise InvalidInput("layer", got=layer, expected=numbers)
        widths = (q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.dtype, q.device)
        if self._widths is None:
            self._widths = widths
            for level in (*self._levels, self._root):
                level.allocate(self.layers, *widths)
            self._upload()
        elif widths != self._widths:
            raise InvalidInput(
                "q",
                got=widths,
                expected=f"(heads, kv_heads, dim, value_dim, dtype, device) = {self._widths}, as of the earlier tokens",
                fix="Use one cache per model",
            )


@dataclass(frozen=True, eq=False)
class _Prompts:
    """Finished members on the paths of prompts, oldest first; together they contain every token once."""

    members: Hierarchy  # a forest with one tree per member
    slots: list[tuple[np.ndarray, np.ndarray, np.ndarray]]  # by level, from the root: sequence, slot, tree

    @staticmethod
    def of(hierarchy: Hierarchy, counts: list[np.ndarray]) -> _Prompts:
        """Find the finished members from their numbers of leaves, `[batch, width]` by level, from the root."""
        wide = np.concatenate(counts, 1)
        sizes = wide[wide > 0]
        s, end = hierarchy.structure, np.cumsum(sizes)
        # Nodes outside the members are still open: remove them.
        inside = s.end_leaf <= end[np.searchsorted(end, s.first_leaf, side="right")]
        number = np.cumsum(inside) - 1
        parent = np.where((s.parent >= 0) & np.append(inside, False)[s.parent], number[s.parent], -1)[inside]
        members = Hierarchy._from_parent_array(parent, s.first_leaf[inside])
        tree = np.cumsum(wide > 0).reshape(wide.shape) - 1
        bounds = np.cumsum([0, *(c.shape[1] for c in counts)])
        slots = []
        for begin, level in zip(bounds, counts, strict=False):
            sequence, slot = np.nonzero(level)
            slots.append((sequence, slot, tree[sequence, begin + slot]))
        return _Prompts(members, slots)

    def fill(self, layer: int, q: Tensor, k: Tensor, v: Tensor, levels: list[_Level], scale: float) -> None:
        """Store the means of members and the sums of their queries and energies; members see the earlier siblings."""
        members = self.members.to(q.device)
        wide = torch.promote_types(q.dtype, torch.float32)
        inner = -energy(q, k, members, causal="paper-mask", scale=scale).to(wide)
        lengths = members.tensor("leaf_offsets").diff()
        means = [torch.segment_reduce(x.to(wide), "mean", lengths=lengths) for x in (q, k, v)]
        for level, slots in zip(levels, self.slots, strict=True):
            sequence, slot, tree = (torch.as_tensor(x).to(q.device) for x in slots)
            query, key, value = (x.new_zeros(*level.counts.shape, *x.shape[1:]) for x in means)
            own = inner.new_zeros(*level.counts.shape, inner.shape[1])
            for padded, packed in ((query, means[0]), (key, means[1]), (value, means[2]), (own, inner)):
                padded[sequence, slot] = packed[tree]
            weights = torch.as_tensor(level.counts).to(q.device, wide)
            before = torch.ones(2 * level.counts.shape[1:], dtype=torch.bool, device=q.device).tril(-1)
            qs, ks, vs = (repeat_heads(x.transpose(1, 2), q.shape[1]) for x in (query, key, value))
            _, outer = exact(qs, ks, vs, weights.log()[:, None, None], before, scale=scale)
            mass = torch.logaddexp(own, outer.transpose(1, 2)).masked_fill(weights[..., None] == 0, 0)
            mine = {name: x[layer] for name, x in level.tensors.items()}
            mine["k"].copy_(key)
            mine["v"].copy_(value)
            mine["query"].copy_(torch.einsum("bw,bwhd->bhd", weights, query))
            mine["energy"].copy_(torch.einsum("bw,bwh->bh", weights, mass))


@dataclass
class _Step:
    """One node on the path of every sequence, at the moment when a token joins it."""

    counts: np.ndarray  # [batch, width] leaves of its finished members; 0 for empty slots
    slot: np.ndarray  # [batch] slot for its member on the path, once that is finished
    complete: np.ndarray  # [batch] whether this member is finished
    closing: np.ndarray  # [batch] whether the node itself is finished with it
    count: np.ndarray  # [batch] leaves of the node, the new one included

    def upload(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make the tensors that `siblings` and `join` need."""
        self.weights = torch.as_tensor(self.counts).to(device, dtype)
        self.bias = self.weights.log()[:, None, None]
        self.stays = torch.as_tensor(self.complete & ~self.closing).to(device)[:, None]
        self.ends = torch.as_tensor(self.closing).to(device)[:, None]
        is_slot = np.arange(self.counts.shape[1]) == self.slot[:, None]
        self.into = torch.as_tensor(is_slot & (self.complete & ~self.closing)[:, None]).to(device)[..., None, None]


class _Level:
    """Open node of one level in every sequence: its finished members and their sums."""

    def __init__(self, batch: int, width: int):
        self.counts = np.zeros((batch, width), np.int64)
        self.tensors: dict[str, Tensor] = {}

    @property
    def sizes(self) -> np.ndarray:
        """Number of finished members, `[batch]`."""
        return (self.counts > 0).sum(1)

    def allocate(
        self, layers: int, heads: int, kv_heads: int, dim: int, value_dim: int, dtype: torch.dtype, device: Any
    ) -> None:
        """Allocate the tensors of all layers."""
        batch, width = self.counts.shape
        wanted = _tensors(layers, batch, width, heads, kv_heads, dim, value_dim, dtype)
        self.tensors = {name: torch.zeros(*shape, dtype=kind, device=device) for name, (shape, kind) in wanted.items()}

    def step(self, complete: np.ndarray, closing: np.ndarray, size: np.ndarray) -> _Step:
        """Advance the structure by a token, and return the structure before it, for attention."""
        step = _Step(self.counts.copy(), self.sizes, complete, closing, self.counts.sum(1) + size)
        for sequence in np.flatnonzero(complete & ~closing):
            self.counts[sequence, step.slot[sequence]] = size[sequence]
        self.counts[closing] = 0
        return step

    def siblings(self, layer: int, query: Tensor, step: _Step, scale: float) -> tuple[Tensor, Tensor]:
        """Return y `[batch, heads, value_dim]` and outer `[batch, heads]` of the member on the path."""
        heads = query.shape[1]
        k, v = (repeat_heads(self.tensors[x][layer].transpose(1, 2), heads).to(query.dtype) for x in ("k", "v"))
        y, outer = exact(query[:, :, None], k, v, step.bias, scale=scale)
        return y[:, :, 0], outer[..., 0]

    def join(
        self, layer: int, query: Tensor, mass: Tensor, key: Tensor, value: Tensor, count: Tensor, step: _Step
    ) -> tuple[Tensor, ...]:
        """Add the member on the path, and return query sum, inner, means and leaf count of the node.

        A finished member is stored.
        """
        mine = {name: x[layer] for name, x in self.tensors.items()}
        total = mine["query"] + query
        energy = mine["energy"] + count * mass
        leaves = count + step.weights.sum(1, keepdim=True)
        means = []
        for name, x in (("k", key), ("v", value)):
            below = torch.einsum("bw,bwhd->bhd", step.weights, mine[name].to(x.dtype))
            means.append((below + count[..., None] * x) / leaves[..., None])
            mine[name].copy_(torch.where(step.into, x[:, None].to(mine[name].dtype), mine[name]))
        for name, x in (("query", total), ("energy", energy)):
            stays, ends = (mask if x.ndim == 2 else mask[..., None] for mask in (step.stays, step.ends))
            mine[name].copy_(torch.where(stays, x, mine[name]).masked_fill_(ends, 0))
        return total, energy / leaves, means[0], means[1], leaves

    def reorder(self, index: np.ndarray) -> None:
        """Replace sequence i by sequence `index[i]`."""
        self.counts = self.counts[index]
        self.tensors = {
            name: x.index_select(1, torch.as_tensor(index).to(x.device)) for name, x in self.tensors.items()
        }

    def state(self) -> dict[str, Any]:
        """Return copies of all tensors."""
        return {"counts": torch.from_numpy(self.counts.copy()), **{n: x.clone() for n, x in self.tensors.items()}}

    @staticmethod
    def restored(state: dict[str, Any], filled: bool) -> _Level:
        """Return the level with this state, which has tensors besides the counts if it is `filled`."""
        level = _Level(0, 0)
        level.counts = state["counts"].numpy().copy()
        level.tensors = {name: state[name].clone() for name in ("k", "v", "query", "energy") if filled}
        return level


def _tensors(
    layers: int, batch: int, width: int, heads: int, kv_heads: int, dim: int, value_dim: int, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of the tensors of a level, by name."""
    wide = torch.promote_types(dtype, torch.float32)
    return {
        "k": ((layers, batch, width, kv_heads, dim), dtype),
        "v": ((layers, batch, width, kv_heads, value_dim), dtype),
        "query": ((layers, batch, heads, dim), wide),
        "energy": ((layers, batch, heads), wide),
    }


def _restored_widths(saved: Any) -> tuple[Any, ...]:
    """Return heads, key/value heads, dim, value_dim, dtype and device of a state."""
    kinds = (int, int, int, int, torch.dtype, str)
    fits = isinstance(saved, tuple | list) and [type(value) for value in saved] == list(kinds)
    if not fits or not all(value > 0 for value in saved[:4]) or not saved[4].is_floating_point:
        expected = "numbers of heads and key/value heads, dimensions of keys and values, dtype, device"
        raise InvalidInput("state['widths']", got=repr(saved)[:80], expected=expected)
    try:
        return (*saved[:-1], torch.device(saved[-1]))
    except RuntimeError:
        raise InvalidInput("state['widths']", got=repr(saved[-1]), expected="the name of a device") from None
