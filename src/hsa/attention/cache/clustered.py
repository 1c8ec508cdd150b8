"""`ClusteredCache`: the keys of clustered attention, to decode token by token.

The chunk in progress keeps its keys in the order of time, and tokens attend to them exactly. When a chunk is complete, its
keys are clustered per key/value head, in place, and pooled. Each token scores all groups of the complete chunks, adds the
groups it wants to those that its tile has opened, and attends to the keys of open groups and to pooled nodes elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar, Unpack

import numpy as np
import torch
from torch import Tensor

from hsa.attention.cache.clustered_rows import Layer, in_time, layer_tensors, read_chunks, write_chunks
from hsa.attention.cache.clustered_step import Rule, Step, attend_token
from hsa.attention.cache.interface import AttendOptions, Cache, Counted, Memory, Storage
from hsa.attention.cache.saved_state import check_lengths, check_tensors
from hsa.attention.checks import without_autocast
from hsa.attention.clustered.keys import ClusteredKeys, check_keys, clustering_operations
from hsa.attention.clustered.layout import BRANCHING, TILE, Shape, layout_of
from hsa.attention.clustered.operator import check_rule, cluster, clustered_attention, select_groups
from hsa.attention.clustered.selection import NEVER, TileSelection
from hsa.attention.multiscale.operator import per_head
from hsa.errors import InvalidInput
from hsa.tree.hierarchy import Hierarchy, integers

F = TypeVar("F", bound=Callable[..., Any])

SPARE = 16
"""A cache that is full grows by one part in this many, or by a chunk."""


def _without_autograd(function: F) -> F:
    """Run a method without gradients, and outside inference mode so that later calls may write to its tensors.

    The order matters: leaving inference mode turns gradients on.
    """
    return torch.inference_mode(False)(torch.no_grad()(function))


class ClusteredCache(Cache):
    """Cache of clustered attention: all keys and values, and the pooled rows above them.

    Decoding gives each token the same result as a pass over the whole sequence, `clustered_attention(q, k, v, lengths,
    causal=True, …)` with the same options. Prompts can be read in pieces:

        cache.begin(lengths)                       # or cache.extend(lengths), further tokens; then for every layer
        y = cache.attend_prompts(layer, q, k, v)   #   store the packed tokens, and attend

    Args:
        layers, batch, kv_heads, head_dim, value_dim, dtype, device: See `Cache`.
        branching, tile, threshold, top_k, spread, share_lists, windows: See `clustered_attention`.
        max_length: Maximum number of tokens per sequence, allocated at once; by default the capacity grows as needed.

    >>> q, k, v = torch.randn(3, 600, 2, 8).unbind(0)  # 600 tokens, 2 heads of 8
    >>> cache = ClusteredCache(1, 1, 2, 8)
    >>> tree = cache.begin([599])  # a prompt of 599 tokens
    >>> cache.attend_prompts(0, q[:599], k[:599], v[:599]).shape
    torch.Size([599, 2, 8])
    >>> cache.append()  # one more token
    >>> cache.attend(0, q[599:], k[599:], v[599:]).shape
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
        branching: Sequence[int] = BRANCHING,
        tile: int = TILE,
        threshold: float | None = None,
        top_k: int | None = None,
        spread: float = 1.0,
        share_lists: bool = False,
        windows: bool = False,
        max_length: int | None = None,
        **storage: Unpack[Storage],
    ):
        super().__init__(layers, batch, kv_heads, head_dim, max_length=max_length, **storage)
        self.shape = Shape.of(branching, tile, causal=True)
        self.rule = Rule(*check_rule(threshold, top_k, spread), share_lists)
        self.windows = windows
        self._lengths = [0] * self.batch
        self._before = self._lengths  # lengths without the pending tokens
        self._step: Step | None = None
        chunks = -(-(max_length or 1) // self.shape.chunk)
        self._stored: list[Layer] = [self._empty(chunks, lists=0) for _ in range(self.layers)]

    def __repr__(self) -> str:
        return f"ClusteredCache({self.layers} layers, {self.batch} sequences of up to {max(self._lengths):,} tokens)"

    @property
    def lengths(self) -> list[int]:
        return list(self._lengths)

    # Prompts

    def begin(self, lengths: Sequence[int], closes: Any = None) -> Hierarchy:
        """Start an empty cache with prompts of these lengths, and return them as flat trees: there is no other tree."""
        _check_closes(closes)
        self._add(self._start_prompts(lengths))
        return Hierarchy.flat(self._lengths).to(self.device)

    def extend(self, lengths: Sequence[int]) -> None:
        """Add this number of further tokens to every sequence, 0 for none. Their layers follow with `attend_prompts`."""
        self._check_complete()
        sizes = tuple(integers("lengths", lengths).reshape(-1).tolist())
        if len(sizes) != self.batch or min(sizes) < 0:
            expected = f"a number of tokens, 0 or more, for each of the {self.batch} sequences of the cache"
            raise InvalidInput("lengths", got=list(sizes), expected=expected)
        self._set_longest(max(before + n for before, n in zip(self._lengths, sizes, strict=True)))
        self._prompts, self._pending = sizes, set(range(self.layers))
        self._add(sizes)

    def _add(self, sizes: Sequence[int]) -> None:
        self._before = self._lengths
        self._lengths = [before + n for before, n in zip(self._before, sizes, strict=True)]
        self._ensure_capacity()

    @_without_autograd
    def fill(
        self,
        layer: int,
        k: Tensor,
        v: Tensor,
        keys: ClusteredKeys | None = None,
        opened: TileSelection | Tensor | None = None,
    ) -> None:
        """Store the keys and values of the prompts in one layer, after `begin`, if their attention is already computed.

        Args:
            layer: Number of the layer.
            k, v: `[tokens, kv_heads, dim]` keys and values of the prompts, packed.
            keys: Result of `hsa.cluster` for them.
            opened: Result of `hsa.select_groups` for them, or its `opened()`. Needed if a prompt ends inside a tile that
                sees complete chunks. `crop` into the prompts is exact only after a result of `select_groups`.
        """
        if any(self._before) and layer in self._pending:
            raise InvalidInput("fill", got="a cache that had tokens", expected="a new one", fix="Use attend_prompts")
        self._check_opened(opened)
        if keys is not None:
            check_keys(keys, layout_of(self._lengths, shape=self.shape, causal=True), k, v)
        self._accept(layer, k, v)
        stored = self._stored[layer]
        self._store(stored, k, v, keys)
        if isinstance(opened, TileSelection):
            self._allocate_lists(stored, opened.lists)
            self._record(stored, list(range(self.batch)), opened)
        elif opened is not None:
            self._allocate_lists(stored, opened.shape[1])
            stored["first"].flatten(2)[:, :, : opened.shape[2]].masked_fill_(opened, 0)

    @_without_autograd
    def attend_prompts(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        pooled_bias: float | Tensor = 0.0,
        scale: float | None = None,
    ) -> Tensor:
        """Store the tokens of `begin` or `extend` in one layer, and return their attention `[tokens, heads, value_dim]`.

        Args:
            layer: Number of the layer.
            q: `[tokens, heads, head_dim]` queries of these tokens, packed.
            k, v: `[tokens, kv_heads, dim]` their keys and values.
            pooled_bias, scale: See `attend`.
        """
        heads = q.shape[1] if q.ndim == 3 else 0
        if heads == 0 or heads % self.kv_heads or q.shape != (len(k), heads, self.head_dim) or q.dtype != self.dtype:
            raise InvalidInput(
                "q",
                got=f"{q.dtype} of shape {tuple(q.shape)}",
                expected=f"{self.dtype} of shape ({len(k)}, a multiple of {self.kv_heads} heads, {self.head_dim})",
            )
        per_head(pooled_bias, q)  # raises before anything is stored
        self._accept(layer, k, v)
        stored, chunk = self._stored[layer], self.shape.chunk
        self._allocate_lists(stored, self._lists(heads))
        some = [i for i, (n, before) in enumerate(zip(self._lengths, self._before, strict=True)) if n > before]
        if not some:
            return q.new_empty(0, heads, self.value_dim)
        recent_k, recent_v = self._recent(stored["k_keys"], k), self._recent(stored["v_keys"], v)
        self._store(stored, k, v)
        lengths = [self._lengths[i] for i in some]
        keys = read_chunks(stored, some, [n // chunk for n in lengths], self.shape)
        tiles: dict[str, Any] = {
            "query_lengths": [self._lengths[i] - self._before[i] for i in some],
            "recent": [self._lengths[i] - self._before[i] // chunk * chunk for i in some],
            "causal": True,
            "tile": self.shape.tile,
            "scale": scale,
        }
        opened = stored["first"][some].flatten(2) != NEVER
        selection = select_groups(q, recent_k, keys, lengths, opened=opened, **asdict(self.rule), **tiles)
        self._record(stored, some, selection)
        return clustered_attention(
            q, recent_k, recent_v, lengths, keys=keys, selection=selection, pooled_bias=pooled_bias, **tiles
        )

    def _recent(self, stored: Tensor, new: Tensor) -> Tensor:
        """Return the keys or values of the chunks in progress, each followed by the new ones of its sequence."""
        if not any(self._before):
            return new
        parts, start = [], 0
        for i, (before, length) in enumerate(zip(self._before, self._lengths, strict=True)):
            number, size = divmod(before, self.shape.chunk)
            if length > before:
                parts += [stored[i, :, number, :size].transpose(0, 1)] if size else []
                parts.append(new[start : start + length - before])
                start += length - before
        return torch.cat(parts)

    def _store(self, stored: Layer, k: Tensor, v: Tensor, keys: ClusteredKeys | None = None) -> None:
        """Write packed new tokens, and cluster the chunks that they complete."""
        new = [n - before for n, before in zip(self._lengths, self._before, strict=True)]
        sequence = np.repeat(np.arange(self.batch), new)
        slot = np.arange(len(sequence)) + np.repeat(np.array(self._before) - np.cumsum(new) + new, new)
        at = torch.from_numpy(sequence).to(self.device), slice(None), torch.from_numpy(slot).to(self.device)
        stored["k_keys"].flatten(2, 3)[at] = k
        stored["v_keys"].flatten(2, 3)[at] = v
        chunk = self.shape.chunk
        completed = [
            (i, number)
            for i, (before, n) in enumerate(zip(self._before, self._lengths, strict=True))
            for number in range(before // chunk, n // chunk)
        ]
        if completed:
            write_chunks(stored, keys or self._cluster(stored, completed), completed)

    def _cluster(self, stored: Layer, chunks: Sequence[tuple[int, int]]) -> ClusteredKeys:
        """Cluster chunks whose keys are in the order of time."""
        sequence, number = zip(*chunks, strict=True)
        k, v = (stored[name][list(sequence), :, list(number)] for name in ("k_keys", "v_keys"))
        k, v = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))  # one after another, as one sequence
        return cluster(k, v, [len(k)], windows=self.windows, branching=self.shape.branching)

    def _record(self, stored: Layer, sequences: Sequence[int], selection: TileSelection) -> None:
        """Keep which queries of the last two tiles opened groups."""
        layout = selection.layout
        for number, i in enumerate(sequences):
            now, before = stored["first"][i], stored["before"][i]
            tiles = np.flatnonzero(layout.tile_sequence == number)
            for tile in tiles[-2:].tolist():
                opening = selection.tile(tile)[0]
                first = torch.full_like(now, NEVER)
                first.flatten(1)[:, : opening.shape[1]] = opening
                row = self._before[i] % self.shape.tile
                if tile == tiles[0] and row:  # earlier queries belong to this tile
                    now = torch.where((now == NEVER) & (first != NEVER), first + row, now)
                else:
                    now, before = first, now
            stored["before"][i] = before  # may be a view of the next
            stored["first"][i] = now

    # Tokens

    def append(self, closes: Any = None) -> None:
        _check_closes(closes)
        self._start_token()
        self._step = Step.of(self._lengths, self.shape, self.device)
        self._add([1] * self.batch)

    @_without_autograd
    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttendOptions) -> Tensor:
        stored, step = self._stored[layer], self._step
        assert step is not None
        self._allocate_lists(stored, self._lists(q.shape[1]))
        at = torch.arange(self.batch, device=self.device), slice(None), step.position
        stored["k_keys"].flatten(2, 3)[at] = k
        stored["v_keys"].flatten(2, 3)[at] = v
        with without_autocast(q):
            out = attend_token(stored, q, step, self.shape, self.rule, options).to(q.dtype)
            if step.completed:
                write_chunks(stored, self._cluster(stored, step.completed), step.completed)
                self._count_clustering(len(step.completed), options.counted)
        return out

    def _count_clustering(self, chunks: int, counted: Counted | None) -> None:
        if counted is not None:
            members, width = sum(self.shape.rows) - 1, self.kv_heads * (self.head_dim + self.value_dim)
            counted.clustering += clustering_operations(chunks, self.kv_heads, self.head_dim, self.shape)
            counted.pooling += 2 * chunks * members * width

    # Changes of the sequences

    @_without_autograd
    def reorder(self, index: Any) -> None:
        selected = self._check_index(index)
        self._stored = [{name: x.index_select(0, selected) for name, x in stored.items()} for stored in self._stored]
        self.batch, self._lengths = len(selected), [self._lengths[i] for i in selected.tolist()]
        self._longest = max(self._lengths)

    @_without_autograd
    def crop(self, lengths: Sequence[int]) -> None:
        """Remove the tokens after these lengths. Complete chunks that lose tokens are in progress again.

        The next tokens get the same results as in a full pass if the new end lies in the tile of the last token, in the tile
        before it, or at the end of any tile. Further back, the cache does not know the open groups of the tile (nor, after a
        crop to the tile before, those of an even earlier one): the rest of the tile starts with the first group alone.
        """
        wanted, shape = self._check_shorter(lengths), self.shape
        reopened = [
            (i, n // shape.chunk)
            for i, (n, have) in enumerate(zip(wanted, self._lengths, strict=True))
            if n // shape.chunk < have // shape.chunk and n % shape.chunk
        ]
        now, then = (torch.tensor(x, device=self.device)[:, None, None, None] for x in (wanted, self._lengths))
        row, tiles = (
            (now - 1) % shape.tile,
            (then - 1) // shape.tile - (now - 1) // shape.tile,
        )  # tiles that are removed
        for stored in self._stored:
            if reopened and not self.windows:
                in_time(stored, "k_keys", reopened)
                in_time(stored, "v_keys", reopened)
            first, before = stored["first"], stored["before"]
            first = torch.where(tiles == 0, first, before)
            stored["first"] = first.masked_fill((tiles > 1) | (first > row) | (now == 0), NEVER)
            stored["before"] = before.masked_fill(tiles > 0, NEVER)
        self._lengths, self._longest = wanted, max(wanted)

    @_without_autograd
    def leaves(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return all keys and values of a layer in the order of time, packed: `[tokens, kv_heads, dim]`."""
        stored, lengths = self._stored[layer], torch.tensor(self._lengths, device=self.device)[:, None]
        slots = torch.arange(self._capacity * self.shape.chunk, device=self.device)
        complete = [(i, number) for i, n in enumerate(self._lengths) for number in range(n // self.shape.chunk)]

        def packed(name: str) -> Tensor:
            copy = {**stored, name: stored[name].clone()}
            if complete and not self.windows:
                in_time(copy, name, complete)
            return copy[name].flatten(2, 3).transpose(1, 2)[slots < lengths]

        return packed("k_keys"), packed("v_keys")

    # State

    def state_dict(self) -> dict[str, Any]:
        self._check_complete()
        layers = [{name: x.clone() for name, x in stored.items()} for stored in self._stored]
        return {"settings": self._settings(), "lengths": self.lengths, "layers": layers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._check_state(state, {})
        layers, sizes = state.get("layers"), dict[str, int]()
        if not isinstance(layers, list) or len(layers) != self.layers:
            raise InvalidInput("state['layers']", got="other content", expected=f"the tensors of {self.layers} layers")
        wanted = self._tensors("sequences")
        for number, layer in enumerate(layers):
            sizes = check_tensors(layer, wanted, f"state['layers'][{number}]", **sizes)
            lists = sizes.pop("lists")
            if lists % self.kv_heads or (self.rule.share_lists and lists > self.kv_heads):
                expected = f"lists for {self.kv_heads} key/value heads"
                raise InvalidInput(f"state['layers'][{number}]['first']", got=f"{lists} lists", expected=expected)
        most = self._most(sizes["chunks"] * self.shape.chunk)
        self._lengths = check_lengths(state.get("lengths"), sizes["sequences"], most)
        self._stored = [{name: layer[name].to(self.device, copy=True) for name in wanted} for layer in layers]
        self._loaded(self._lengths)

    def _settings(self) -> dict[str, Any]:
        sizes = {"layers": self.layers, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        kind = {"value_dim": self.value_dim, "dtype": str(self.dtype), "windows": self.windows}
        return {**sizes, **kind, **asdict(self.shape), **asdict(self.rule)}

    def memory(self) -> Memory:
        total = sum(x.numel() * x.element_size() for stored in self._stored for x in stored.values())
        return Memory(total, self._flat_bytes(), leaves_kept=True)

    # Storage

    @property
    def _capacity(self) -> int:
        """Number of chunks that the tensors have rows for."""
        return self._stored[0]["spread"].shape[2]

    def _tensors(self, sequences: int | str) -> dict[str, Any]:
        """Return shape and dtype of the tensors of a layer, by name."""
        rows, dims = (sequences, self.kv_heads), (self.head_dim, self.value_dim)
        return layer_tensors(rows, dims, self.shape, self.dtype, windows=self.windows)

    def _empty(self, chunks: int, lists: int) -> Layer:
        """Return the tensors of an empty layer: zeros, because masked entries must be finite too."""
        sizes = {"chunks": chunks, "lists": lists}
        with torch.inference_mode(False):
            return {
                name: torch.full(
                    [sizes.get(n, n) for n in shape],
                    NEVER if name in ("first", "before") else 0,
                    dtype=dtype,
                    device=self.device,
                )
                for name, (shape, dtype) in self._tensors(self.batch).items()
            }

    @_without_autograd
    def _ensure_capacity(self) -> None:
        have, need = self._capacity, -(-self._longest // self.shape.chunk)
        if need <= have:
            return
        for number, stored in enumerate(self._stored):
            larger = self._empty(max(need, have + have // SPARE), stored["first"].shape[1])
            for name, rows in stored.items():
                larger[name][:, :, :have] = rows
            self._stored[number] = larger

    def _lists(self, heads: int) -> int:
        return self.kv_heads if self.rule.share_lists else heads

    def _allocate_lists(self, stored: Layer, lists: int) -> None:
        """Allocate the open groups of a layer, once the number of query heads is known."""
        have = stored["first"].shape[1]
        if have not in (0, lists):
            raise InvalidInput("q", got=f"{lists} lists of open groups", expected=f"{have}, as for earlier tokens")
        if have == 0:
            size = self.batch, lists, self._capacity, self.shape.groups
            for name in ("first", "before"):
                stored[name] = torch.full(size, NEVER, dtype=torch.uint8, device=self.device)

    def _check_opened(self, opened: Any) -> None:
        """Check `opened` of `fill`: without it, no prompt may end inside a tile that sees complete chunks."""
        shape, lengths = self.shape, self._lengths
        if opened is None:
            for i, n in enumerate(lengths):
                if n % shape.tile and n > shape.chunk:
                    raise InvalidInput(
                        "opened",
                        problem=f"prompt {i} of {n:,} tokens ends inside a tile of {shape.tile}",
                        expected="the groups that the queries of this tile have opened",
                        fix="Call attend_prompts(layer, q, k, v), or pass opened=select_groups(…)",
                    )
        elif isinstance(opened, TileSelection):
            made = opened.layout
            if (made.lengths, made.queries, made.shape, made.causal) != ((*lengths,), (*lengths,), shape, True):
                raise InvalidInput("opened", got="a selection for others", expected="one for these prompts and tiles")
        elif not isinstance(opened, Tensor) or opened.dtype != torch.bool or opened.shape[:1] != (self.batch,):
            expected = f"a TileSelection, or a boolean tensor [{self.batch}, lists, groups]"
            raise InvalidInput("opened", got=type(opened).__name__, expected=expected)


def _check_closes(closes: Any) -> None:
    if closes is not None:
        raise InvalidInput(
            "closes", got="heights", expected="None", fix="Trees over clustered keys ignore the text's boundaries"
        )
