"""`ClusteredCache`: trees over clustered keys, to decode token by token.

The chunk in progress keeps its keys in the order of time, and tokens attend to them exactly. When a chunk is complete,
its keys are clustered, per key/value head (`cluster_keys`), and pooled from the leaves up. The tree continues above the
chunks, so the number of entries that a token reads grows with the logarithm of the length. For each token, the cache

1. starts at the largest complete nodes before the token's own chunk,
2. descends with a beam search to the `top_k` best groups, as `select` does,
3. attends to the sinks, to the token's own chunk up to the token, to the keys of the selected groups, and to the pooled
   rest: the largest nodes that contain no selected group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any, TypeVar, Unpack

import torch
from torch import Tensor

from hsa.attention.cache.clustered_search import Block, KeptLayer, Token
from hsa.attention.cache.clustered_tree import Heap, Shape, Step, shape_of, step_of
from hsa.attention.cache.interface import AttendOptions, Cache, Counted, Memory, Storage
from hsa.attention.cache.saved_state import check_lengths, check_tensors
from hsa.attention.checks import scale_or_default, without_autocast
from hsa.attention.multiscale.cluster import KeyClusters, cluster_keys
from hsa.attention.multiscale.operator import per_head
from hsa.attention.multiscale.pyramid import in_order
from hsa.errors import InvalidInput
from hsa.tree.hierarchy import Hierarchy

F = TypeVar("F", bound=Callable[..., Any])

PRODUCTS = 2**24
"""Maximum number of products of queries and keys in memory at once, in `attend_prompts`."""


def _without_autograd(function: F) -> F:
    """Run a method without gradients, and outside inference mode so that later calls may write to its tensors.

    The order matters: leaving inference mode turns gradients on.
    """
    return torch.inference_mode(False)(torch.no_grad()(function))


class ClusteredCache(Cache):
    """Cache of multiscale attention over clustered keys: all keys and values, and the pooled nodes above them.

    Decoding gives each token the same result as a pass over the whole sequence:

        tree      = Hierarchy.regular(lengths, branching, repeat_last=True, sinks=sinks)
        clusters  = cluster_keys(k, tree, chunk=chunk)
        selection = select(q, k, tree, top_k=top_k, beam=beam, clusters=clusters, causal=True)
        out       = multiscale_attention(q, k, v, tree, selection=selection, clusters=clusters, causal=True)

    Args:
        layers, batch, kv_heads, head_dim, value_dim, dtype, device: See `Cache`.
        branching: Number of keys per group, and of members of every node above.
        chunk: Number of tokens that are clustered together: branching[0] times a power of branching[1].
        top_k: Number of groups of earlier chunks that a token attends to exactly, per query head.
        beam: Width of the search for these groups; "exact" scores every group; None means max(32, 2·top_k).
        sinks: Number of first tokens that are always exact.
        max_length: Maximum number of tokens per sequence, allocated at once; by default the capacity grows as needed.

    >>> q, k, v = torch.randn(3, 70, 2, 8).unbind(0)  # 70 tokens, 2 heads of 8
    >>> cache = ClusteredCache(1, 1, 2, 8, branching=(4, 2), chunk=16, top_k=2)
    >>> tree = cache.begin([69])  # a prompt of 69 tokens
    >>> cache.fill(0, k[:69], v[:69])
    >>> cache.append()  # one more token
    >>> cache.attend(0, q[69:], k[69:], v[69:]).shape
    torch.Size([1, 2, 8])
    """

    mixes_heads = False

    def __init__(
        self,
        layers: int,
        batch: int,
        kv_heads: int,
        head_dim: int,
        *,
        branching: Sequence[int] = (8, 2),
        chunk: int = 256,
        top_k: int = 16,
        beam: int | str | None = None,
        sinks: int = 0,
        max_length: int | None = None,
        **storage: Unpack[Storage],
    ):
        super().__init__(layers, batch, kv_heads, head_dim, max_length=max_length, **storage)
        self.shape = shape_of(branching, chunk, top_k, beam, sinks)
        self._lengths = [0] * self.batch
        self._trees: Hierarchy | None = None  # of the prompts, until all layers are filled
        self._step: Step | None = None
        self._capacity, self._heap = self._capacity_for(max_length or self.shape.sinks + self.shape.chunk)
        self._kept = [self._empty(self._capacity, self._heap) for _ in range(self.layers)]

    def __repr__(self) -> str:
        return f"ClusteredCache({self.layers} layers, {self.batch} sequences of up to {max(self._lengths):,} tokens)"

    @property
    def lengths(self) -> list[int]:
        return list(self._lengths)

    def begin(self, lengths: Sequence[int], closes: Any = None) -> Hierarchy:
        _check_closes(closes)
        self._lengths = list(self._start_prompts(lengths))
        branching = (self.shape.group, self.shape.factor)
        tree = Hierarchy.regular(self._lengths, branching, repeat_last=True, sinks=self.shape.sinks)
        self._ensure_capacity(max(self._lengths))
        self._trees = tree.to(self.device)
        return self._trees

    @_without_autograd
    def fill(self, layer: int, k: Tensor, v: Tensor, clusters: KeyClusters | None = None) -> None:
        """Store the keys and values of the prompts in one layer, after `begin`.

        Args:
            layer: Number of the layer.
            k, v: `[tokens, kv_heads, dim]` keys and values of the prompts, packed.
            clusters: Result of `cluster_keys(k, tree, chunk=chunk)`, if it is already computed.
        """
        self._accept(layer, k, v)
        tree = self._trees
        assert tree is not None
        chunks = [self.shape.chunks(length) for length in self._lengths]
        if clusters is None and any(chunks):
            clusters = cluster_keys(k, tree, chunk=self.shape.chunk)
        if clusters is not None:
            self._check_clusters(clusters, tree)
            k, v = in_order(k, clusters.order), in_order(v, clusters.order)
        kept = self._kept[layer]
        sequence, slot = _sequence_and_slot(tree)
        kept.keys[sequence, :, slot] = k
        kept.values[sequence, :, slot] = v
        if clusters is not None:
            first = tree.tensor("leaf_offsets")[sequence] + self.shape.sinks
            kept.time[sequence, :, slot] = ((clusters.order - first) % self.shape.chunk).T.to(kept.time.dtype)
        self._pool_whole(kept, max(chunks))

    @_without_autograd
    def attend_prompts(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        clusters: KeyClusters | None = None,
        pooled_bias: float | Tensor = 0.0,
        scale: float | None = None,
    ) -> Tensor:
        """Store the prompts in one layer as `fill` does, and return their attention `[tokens, heads, value_dim]`.

        All queries of a chunk are multiplied with all keys before it. This is quadratic, but up to about 50,000 tokens
        it is faster on a CPU than `multiscale_attention`, which gathers the entries of each query.

        Args:
            layer: Number of the layer.
            q: `[tokens, heads, head_dim]` queries of the prompts, packed.
            k, v, clusters: See `fill`.
            pooled_bias, scale: See `attend`.
        """
        lengths = self._lengths
        heads = q.shape[1] if q.ndim == 3 else 0
        if heads == 0 or heads % self.kv_heads or q.shape != (len(k), heads, self.head_dim) or q.dtype != self.dtype:
            raise InvalidInput(
                "q",
                got=f"{q.dtype} of shape {tuple(q.shape)}",
                expected=f"{self.dtype} of shape ({len(k)}, a multiple of {self.kv_heads} heads, {self.head_dim})",
            )
        sinks, chunk, device = self.shape.sinks, self.shape.chunk, self.device
        bias, scale = per_head(pooled_bias, q), scale_or_default(scale, q)
        self.fill(layer, k, v, clusters)
        size = torch.tensor(lengths, device=device)
        first = size.cumsum(0) - size
        out = q.new_empty(len(q), heads, self.value_dim)
        for number in range(max(1, -(-(max(lengths) - sinks) // chunk))):
            begin, end = (sinks + number * chunk if number else 0), min(sinks + (number + 1) * chunk, max(lengths))
            some = torch.tensor([i for i, length in enumerate(lengths) if length > begin], device=device)
            # Queries of all sequences that are long enough, as many at once as PRODUCTS allows.
            step = max(1, PRODUCTS // (len(some) * heads * end))
            for start in range(begin, end, step):
                time = torch.arange(start, min(start + step, end), device=device)
                keys = torch.cat(
                    [torch.arange(min(sinks, begin), device=device), torch.arange(begin, end, device=device)]
                )
                query_rows, key_rows = (
                    first[some, None] + torch.minimum(x, size[some, None] - 1) for x in (time, keys)
                )
                with without_autocast(q):
                    block = Block(self.shape, self._heap, self._kept[layer], number, some, q[query_rows] * scale)
                    result = block.attend(k[key_rows], v[key_rows], keys > time[:, None], bias)
                exists = time < size[some, None]
                out[query_rows[exists]] = result[exists].to(q.dtype)
        return out

    def append(self, closes: Any = None) -> None:
        _check_closes(closes)
        self._start_token()
        self._ensure_capacity(self._longest)
        self._step = step_of(self.shape, self._heap, tuple(self._lengths), self._capacity, self.kv_heads, self.device)
        self._lengths = [length + 1 for length in self._lengths]

    @_without_autograd
    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttendOptions) -> Tensor:
        kept, step = self._kept[layer], self._step
        assert step is not None
        kept.keys.view(-1, self.head_dim).index_copy_(0, step.written, k.reshape(-1, self.head_dim))
        kept.values.view(-1, self.value_dim).index_copy_(0, step.written, v.reshape(-1, self.value_dim))
        with without_autocast(q):
            token = Token(self.shape, self._heap, kept, step, q, options.scale, options.counted)
            out = token.attend(options.bias).to(q.dtype)
            if step.closing:
                self._close(kept, step, options.counted)
        return out

    @_without_autograd
    def reorder(self, index: Any) -> None:
        selected = self._check_index(index)
        for kept in self._kept:
            for name, tensor in kept.tensors().items():
                setattr(kept, name, tensor.index_select(0, selected))
        self.batch, self._lengths = len(selected), [self._lengths[i] for i in selected.tolist()]
        self._longest = max(self._lengths)

    @_without_autograd
    def crop(self, lengths: Sequence[int]) -> None:
        """Remove the tokens after these lengths. Complete chunks that lose tokens are in progress again."""
        wanted = self._check_shorter(lengths)
        shape = self.shape
        reopened = [
            (sequence, shape.chunks(n))
            for sequence, (n, have) in enumerate(zip(wanted, self._lengths, strict=True))
            if shape.chunks(n) < shape.chunks(have) and (n - shape.sinks) % shape.chunk and n > shape.sinks
        ]
        if reopened:
            at = self._leaves_of_chunks(*zip(*reopened, strict=True))
            for kept in self._kept:
                time = kept.time[at].long()
                for leaves in (kept.keys, kept.values):
                    leaves[at] = _in_time(leaves[at], time)
        self._lengths, self._longest = wanted, max(wanted)

    @_without_autograd
    def leaves(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return all keys and values of a layer in the order of time, packed: `[tokens, kv_heads, dim]`."""
        kept, shape = self._kept[layer], self.shape
        longest = max(self._lengths)
        slot = torch.arange(longest, device=self.device)
        complete = torch.tensor([shape.chunks(n) for n in self._lengths], device=self.device)
        end = shape.sinks + complete * shape.chunk
        in_tree = (slot >= shape.sinks) & (slot < end[:, None])  # [batch, longest]
        first = slot - (slot - shape.sinks) % shape.chunk
        time = torch.where(in_tree[:, None], first + kept.time[:, :, :longest], slot)  # [batch, kv_heads, longest]
        exists = slot < torch.tensor(self._lengths, device=self.device)[:, None]

        def packed(leaves: Tensor) -> Tensor:
            return _in_time(leaves[:, :, :longest], time).transpose(1, 2)[exists]

        return packed(kept.keys), packed(kept.values)

    def state_dict(self) -> dict[str, Any]:
        self._check_complete()
        layers = [{name: x.clone() for name, x in kept.tensors().items()} for kept in self._kept]
        return {"settings": self._settings(), "lengths": self.lengths, "capacity": self._capacity, "layers": layers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._check_state(state, {})
        capacity, layers = state.get("capacity"), state.get("layers")
        if type(capacity) is not int or capacity < 0 or self._capacity_for(capacity)[0] != capacity:
            raise InvalidInput(
                "state['capacity']", got=capacity, expected="sinks and complete chunks, as in this cache"
            )
        if not isinstance(layers, list) or len(layers) != self.layers:
            raise InvalidInput("state['layers']", got="other content", expected=f"the tensors of {self.layers} layers")
        lengths = check_lengths(state.get("lengths"), longest=self._most(capacity))
        wanted = self._tensors(len(lengths), *self._capacity_for(capacity))
        for number, layer in enumerate(layers):
            check_tensors(layer, wanted, f"state['layers'][{number}]")
        self._capacity, self._heap = self._capacity_for(capacity)
        self._kept = [
            KeptLayer(**{name: layer[name].to(self.device, copy=True) for name in wanted}) for layer in layers
        ]
        self._lengths = lengths
        self._loaded(self._lengths)

    def _settings(self) -> dict[str, Any]:
        sizes = {"layers": self.layers, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        return {**sizes, "value_dim": self.value_dim, "dtype": str(self.dtype), **asdict(self.shape)}

    def memory(self) -> Memory:
        total = sum(x.numel() * x.element_size() for kept in self._kept for x in kept.tensors().values())
        return Memory(total, self._flat_bytes(), leaves_kept=True)

    def _check_clusters(self, clusters: KeyClusters, tree: Hierarchy) -> None:
        if clusters.chunk != self.shape.chunk or clusters.order.shape != (self.kv_heads, tree.num_leaves):
            raise InvalidInput(
                "clusters",
                got=f"shape {tuple(clusters.order.shape)} in chunks of {clusters.chunk}",
                expected=f"an order of shape {(self.kv_heads, tree.num_leaves)} in chunks of {self.shape.chunk}",
                fix=f"Use hsa.cluster_keys(k, tree, chunk={self.shape.chunk})",
            )

    def _capacity_for(self, length: int) -> tuple[int, Heap]:
        """Return a capacity of at least `length` tokens (sinks and whole chunks), and the heap over these chunks."""
        shape = self.shape
        chunks = max(1, -(-max(0, length - shape.sinks) // shape.chunk))
        levels = shape.chunk_height
        while shape.factor ** (levels - shape.chunk_height) < chunks:
            levels += 1
        return shape.sinks + chunks * shape.chunk, Heap(shape.factor, levels)

    def _empty(self, capacity: int, heap: Heap) -> KeptLayer:
        """Return the tensors of an empty layer: zeros, because masked entries must be finite too."""
        wanted = self._tensors(self.batch, capacity, heap)
        with torch.inference_mode(False):
            return KeptLayer(
                **{
                    name: torch.zeros(*shape, dtype=dtype, device=self.device)
                    for name, (shape, dtype) in wanted.items()
                }
            )

    def _tensors(self, batch: int, capacity: int, heap: Heap) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of the tensors of a layer, by name."""
        rows, pooled = (batch, self.kv_heads), torch.promote_types(self.dtype, torch.float32)
        return {
            "keys": ((*rows, capacity, self.head_dim), self.dtype),
            "values": ((*rows, capacity, self.value_dim), self.dtype),
            "time": ((*rows, capacity), torch.int16 if self.shape.chunk <= 2**15 else torch.int32),
            "pooled_keys": ((*rows, heap.none + 1, self.head_dim), pooled),
            "pooled_values": ((*rows, heap.none + 1, self.value_dim), pooled),
        }

    @_without_autograd
    def _ensure_capacity(self, length: int) -> None:
        if length <= self._capacity:
            return
        old, have = self._heap, self._capacity
        self._capacity, self._heap = self._capacity_for(max(length, 2 * have))
        for number, kept in enumerate(self._kept):
            self._kept[number] = larger = self._empty(self._capacity, self._heap)
            for name in ("keys", "values", "time"):
                getattr(larger, name)[:, :, :have] = getattr(kept, name)
            for height in range(1, old.levels + 1):
                before, now = old.first(height), self._heap.first(height)
                count = old.factor ** (old.levels - height)
                for name in ("pooled_keys", "pooled_values"):
                    pooled = getattr(kept, name)[:, :, before : before + count]
                    getattr(larger, name)[:, :, now : now + count] = pooled

    def _leaves_of_chunks(self, sequences: Sequence[int], numbers: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the index of the leaves `[sequences, kv_heads, chunk]` of one chunk per sequence."""
        chunk, device = self.shape.chunk, self.device
        first = self.shape.sinks + torch.tensor(numbers, device=device) * chunk
        slots = first[:, None, None] + torch.arange(chunk, device=device)
        return torch.tensor(sequences, device=device)[:, None, None], self._heads, slots

    @property
    def _heads(self) -> Tensor:
        """Numbers of the key/value heads, to index with: `[kv_heads, 1]`."""
        return torch.arange(self.kv_heads, device=self.device)[:, None]

    def _close(self, kept: KeptLayer, step: Step, counted: Counted | None) -> None:
        """Cluster and pool the chunks that the token completes, and pool the nodes above that they complete."""
        shape, several = self.shape, len(step.closing)
        at = self._leaves_of_chunks(step.closing, step.closed)
        keys, values = kept.keys[at], kept.values[at]  # [several, kv_heads, chunk, dim]
        tree = _chunk_trees(shape, several, self.device)
        clusters = cluster_keys(keys.transpose(1, 2).flatten(0, 1), tree)
        if counted is not None:
            counted.clustering += clusters.operations
            counted.pooling += 2 * self.kv_heads * (self.head_dim + self.value_dim) * tree.num_nodes
        time = clusters.order.view(self.kv_heads, several, shape.chunk).transpose(0, 1) % shape.chunk
        kept.time[at] = time.to(kept.time.dtype)
        numbers = torch.tensor(step.closed, device=self.device)
        for leaves, pooled, moved in (
            (kept.keys, kept.pooled_keys, keys),
            (kept.values, kept.pooled_values, values),
        ):
            moved = moved.gather(2, time[..., None].expand_as(moved))
            leaves[at] = moved
            members = shape.group
            for height in range(1, shape.chunk_height + 1):
                moved = _means(moved, members, pooled.dtype)
                nodes = self._heap.first(height) + numbers[:, None] * moved.shape[2]
                nodes = nodes + torch.arange(moved.shape[2], device=self.device)
                pooled[at[0], self._heads, nodes[:, None]] = moved
                members = shape.factor
        self._close_above(kept, step)

    def _close_above(self, kept: KeptLayer, step: Step) -> None:
        """Pool the nodes above chunks that the token completes."""
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
        """Return whether a node is the last member of its family."""
        return (number + 1) % self.shape.factor == 0

    def _pool_whole(self, kept: KeptLayer, chunks: int) -> None:
        """Pool all nodes over the first chunks. Sequences with fewer chunks pool theirs again once complete."""
        shape = self.shape
        for leaves, pooled in ((kept.keys, kept.pooled_keys), (kept.values, kept.pooled_values)):
            level = leaves[:, :, shape.sinks : shape.sinks + chunks * shape.chunk]
            members, height = shape.group, 1
            while count := level.shape[2] // members:
                level = _means(level[:, :, : count * members], members, pooled.dtype)
                first = self._heap.first(height)
                pooled[:, :, first : first + count] = level
                members, height = shape.factor, height + 1


def _means(x: Tensor, members: int, dtype: torch.dtype) -> Tensor:
    """Return the mean of every `members` rows: `[…, n, dim]` → `[…, n / members, dim]`."""
    return x.unflatten(2, (-1, members)).to(dtype).mean(3)


@lru_cache(maxsize=32)
def _chunk_trees(shape: Shape, several: int, device: torch.device) -> Hierarchy:
    """Return a forest of chunks."""
    with torch.inference_mode(False):
        tree = Hierarchy.regular([shape.chunk] * several, (shape.group, shape.factor), repeat_last=True)
        return tree.to(device)


def _in_time(leaves: Tensor, time: Tensor) -> Tensor:
    """Return leaves `[…, n, dim]` in the order of time `[…, n]`."""
    return torch.empty_like(leaves).scatter_(2, time[..., None].expand_as(leaves), leaves)


def _sequence_and_slot(tree: Hierarchy) -> tuple[Tensor, Tensor]:
    """Return `[leaves]` the tree of every leaf, and its index in that tree."""

    def build() -> tuple[Tensor, Tensor]:
        lengths = torch.tensor(tree.lengths)
        sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
        slot = torch.arange(len(sequence)) - (lengths.cumsum(0) - lengths)[sequence]
        return sequence.to(tree.device), slot.to(tree.device)

    return tree.cached("sequence and slot", build)


def _check_closes(closes: Any) -> None:
    if closes is not None:
        raise InvalidInput(
            "closes", got="heights", expected="None", fix="Trees over clustered keys ignore the text's boundaries"
        )
