"""`ClusteredCache`: the keys of clustered attention, to decode token by token.

The chunk in progress keeps its keys in the order of time, and tokens attend to them exactly. When a chunk is complete, its
keys are clustered per key/value head, in place, and pooled; without kernels only once a token reads it through its tree,
which the first `exact_until` tokens do not. Each token scores all groups of the complete chunks, adds the
groups it wants to those that its tile has opened, and attends to the keys of open groups and to pooled nodes elsewhere.

On a GPU, kernels do all of this without the host, which only counts tokens: a step can be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar, Unpack

import numpy as np
import torch
from torch import Tensor

from hsa.attention.cache.clustered_rows import Layer, Rows, Rule, as_keys, in_time, rows_in_time, rows_of_new
from hsa.attention.cache.clustered_step import attend_token
from hsa.attention.cache.interface import AttendOptions, Cache, Counted, Memory, Storage
from hsa.attention.cache.saved_state import check_lengths, check_tensors
from hsa.attention.cache.step_memory import StepMemory
from hsa.attention.checks import scale_or_default, without_autocast
from hsa.attention.clustered.keys import ClusteredKeys, check_keys, clustering_operations
from hsa.attention.clustered.layout import BRANCHING, TILE, Shape, layout_of
from hsa.attention.clustered.operator import check_rule, select_and_attend
from hsa.attention.clustered.selection import NEVER, TileSelection
from hsa.attention.clustered.threshold import check_number_of_heads
from hsa.attention.clustered.why_not import why_not_tile
from hsa.attention.dispatch import Backend, choose
from hsa.attention.kernels import available
from hsa.attention.multiscale.operator import per_head
from hsa.errors import InvalidInput
from hsa.tree.hierarchy import Hierarchy, integers

F = TypeVar("F", bound=Callable[..., Any])

SPARE = 16
"""A cache that is full grows by one part in this many, or by a chunk."""
FEW = 16
"""Number of new tokens per sequence up to which kernels attend as in a step."""


def _without_autograd(function: F) -> F:
    """Run a method without gradients, and outside inference mode so that later calls may write to its tensors.

    The order matters: leaving inference mode turns gradients on.
    """
    return torch.inference_mode(False)(torch.no_grad()(function))


class ClusteredCache(Cache):
    """Cache of clustered attention: all keys and values, and the pooled rows above them.

    Decoding gives each token the same result as a pass over the whole sequence, `clustered_attention(q, k, v, lengths,
    causal=True, …)` with the same options. Prompts can be read in pieces, and several tokens can be decoded at once:

        cache.begin(lengths)                       # or cache.extend(lengths), further tokens; then for every layer
        y = cache.attend_prompts(layer, q, k, v)   #   store the packed tokens, and attend

    A step of a cache with `max_length` can be captured as a CUDA graph, after a first step that compiles the kernels. Where
    replays have filled the cache, the output of a step is NaN, as the host does not count them.

    Args:
        layers, batch, kv_heads, head_dim, value_dim, dtype, device: See `Cache`.
        branching, tile, exact_until, threshold, top_k, spread, share_lists, windows: See `clustered_attention`.
        max_length: Maximum number of tokens per sequence, allocated at once; by default the capacity grows as needed.
        backend: "auto", "triton" (CUDA; steps select by `threshold` only) or "torch".
        step_memory: Work memory of steps, to share with other caches, whose steps must not run at the same time.

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
        exact_until: int = 0,
        threshold: float | Sequence[float] | Tensor | None = None,
        top_k: int | None = None,
        spread: float = 1.0,
        share_lists: bool = False,
        windows: bool = False,
        max_length: int | None = None,
        backend: str = "auto",
        step_memory: StepMemory | None = None,
        **storage: Unpack[Storage],
    ):
        super().__init__(layers, batch, kv_heads, head_dim, max_length=max_length, **storage)
        self.shape = Shape.of(branching, tile, exact_until, causal=True)
        self.rule = Rule(*check_rule(threshold, top_k, spread), share_lists)
        self.windows = windows
        dims = head_dim, self.value_dim
        self.rows = Rows(kv_heads, dims, self.shape, self.dtype, self.device, windows, backend)
        self.step_memory = StepMemory() if step_memory is None else step_memory
        self.backend = choose("ClusteredCache", STEPS, backend, self)
        self._decode = self.backend.run(self)
        self._lengths = [0] * self.batch
        self._before = self._lengths  # lengths without the pending tokens
        with torch.inference_mode(False):  # graphs keep its address
            self._length = torch.zeros(self.batch, dtype=torch.int32, device=self.device)
        self._was_captured = False  # whether replays may have added tokens that the host has not counted
        chunks = -(-(max_length or 0) // self.shape.chunk)
        self._stored: list[Layer] = [self._empty(chunks, lists=0) for _ in range(self.layers)]

    def __repr__(self) -> str:
        return f"ClusteredCache({self.layers} layers, {self.batch} sequences of up to {max(self.lengths):,} tokens)"

    @property
    def lengths(self) -> list[int]:
        if self._was_captured:
            self._lengths = self._length.tolist()
            self._longest = max(self._lengths)
        return list(self._lengths)

    def _clustered(self, length: int) -> int:
        """Return the number of clustered chunks of a sequence. The kernels of a step cluster every complete chunk."""
        is_exact = self._decode is None and length <= self.shape.exact_chunks * self.shape.chunk
        return 0 if is_exact else length // self.shape.chunk

    @_without_autograd
    def _write_lengths(self, lengths: list[int]) -> None:
        self._lengths = lengths
        if len(lengths) != len(self._length):
            self._length = self._length.new_empty(len(lengths))
        if len(set(lengths)) == 1:
            self._length.fill_(lengths[0])
        else:
            self._length.copy_(torch.tensor(lengths, dtype=torch.int32), non_blocking=True)

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
        self._set_longest(max(before + n for before, n in zip(self.lengths, sizes, strict=True)))
        self._prompts, self._pending = sizes, set(range(self.layers))
        self._add(sizes)

    def _add(self, sizes: Sequence[int]) -> None:
        self._before = self.lengths
        self._write_lengths([before + n for before, n in zip(self._before, sizes, strict=True)])
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
            self._record(stored, opened)
        elif opened is not None:
            self._allocate_lists(stored, opened.shape[1])
            stored["first"].flatten(2)[:, :, : opened.shape[2]].masked_fill_(opened.transpose(0, 1), 0)

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
        check_number_of_heads(self.rule.threshold, heads)
        options = AttendOptions(per_head(pooled_bias, q), None, scale_or_default(scale, q), None)
        self._accept(layer, k, v)
        stored, new = self._stored[layer], [n - m for n, m in zip(self._lengths, self._before, strict=True)]
        self._allocate_lists(stored, self._lists(heads))
        if not any(new):
            return q.new_empty(0, heads, self.value_dim)
        if self._decode is not None and 0 < min(new) == max(new) <= min(FEW, self.shape.tile):
            few = [x.unflatten(0, (self.batch, new[0])) for x in (q, k, v)]
            return self._steps(stored, few[0], few[1], few[2], options).flatten(0, 1)
        shape, each = self.shape, zip(new, self._lengths, self._before, strict=True)
        recent_k, recent_v = self._recent(stored, "k", k), self._recent(stored, "v", v)
        self._store(stored, k, v)
        keys = as_keys(stored, [n // shape.chunk for n in self._lengths], shape)
        tiles: dict[str, Any] = {
            "query_lengths": new,
            "recent": [n and length - shape.first_exact(before) for n, length, before in each],
            "tile": shape.tile,
            "exact_until": shape.exact_until,
            "scale": scale,
            "backend": self.rows.backend,
        }
        lengths = [max(1, n) for n in self._lengths]  # a sequence without tokens has no queries either
        opened = self.opened(layer) if any(n % shape.tile for n in self._before) else None
        rest: dict[str, Any] = {"opened": opened, "rule": vars(self.rule), "pooled_bias": pooled_bias}
        out, selection = select_and_attend(q, recent_k, recent_v, keys, lengths, **rest, **tiles)
        self._record(stored, selection)
        return out

    def opened(self, layer: int) -> Tensor | None:
        """Return the groups that are open in the last tile, `[sequences, lists, groups]`; None if no token has attended."""
        first = self._stored[layer]["first"]
        return first.transpose(0, 1).flatten(2) != NEVER if len(first) else None

    def _recent(self, stored: Layer, name: str, new: Tensor) -> Tensor:
        """Return the stored keys or values that new tokens see exactly, each followed by the new ones of its sequence."""
        if not any(self._before):
            return new
        parts, start, chunk = [], 0, self.shape.chunk
        for i, (before, length) in enumerate(zip(self._before, self._lengths, strict=True)):
            if length > before:
                first = self.shape.first_exact(before)
                rows = self._rows(stored, name, i, first // chunk, -(-before // chunk))
                parts += [rows[: before - first], new[start : start + length - before]]
                start += length - before
        return torch.cat(parts)

    def _rows(self, stored: Layer, name: str, sequence: int, begin: int, end: int) -> Tensor:
        """Return the keys or values of some chunks of a sequence in the order of time, `[rows, kv_heads, dim]`."""
        rows = stored[name][:, sequence, begin:end, : self.shape.chunk]
        clustered = [(sequence, n) for n in range(begin, min(end, self._clustered(self._before[sequence])))]
        if clustered:
            rows = rows.clone()
            rows[:, : len(clustered)] = rows_in_time(stored, name, clustered, self.shape.chunk)
        return rows.flatten(1, 2).transpose(0, 1)

    def _store(self, stored: Layer, k: Tensor, v: Tensor, keys: ClusteredKeys | None = None) -> None:
        """Write packed new tokens, and cluster the chunks that they complete."""
        before, now = tuple(self._before), tuple(self._lengths)
        rows = rows_of_new(before, now, self.shape, self._capacity, self.device)
        stored["k"].flatten(1, 3).index_copy_(1, rows, k.transpose(0, 1))
        stored["v"].flatten(1, 3).index_copy_(1, rows, v.transpose(0, 1))
        completed = self._completed(before, now)
        if keys is not None and keys.num_chunks == len(completed):
            self.rows.write_chunks(stored, keys, completed)
        elif completed:
            self.rows.close_chunks(stored, completed)

    def _completed(self, before: Sequence[int], now: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Return the sequence and number of the chunks to cluster when sequences grow to these lengths."""
        lengths = enumerate(zip(before, now, strict=True))
        return tuple((i, c) for i, (m, n) in lengths for c in range(self._clustered(m), self._clustered(n)))

    def _record(self, stored: Layer, selection: TileSelection) -> None:
        """Keep which queries of the last two tiles opened groups."""
        layout = selection.layout
        for i in range(self.batch):
            now, before = stored["first"][:, i], stored["before"][:, i]
            tiles = np.flatnonzero(layout.tile_sequence == i)
            for tile in tiles[-2:].tolist():
                opening = selection.tile(tile)[0]
                first = torch.full_like(now, NEVER)
                first.flatten(1)[:, : opening.shape[1]] = opening
                row = self._before[i] % self.shape.tile
                if tile == tiles[0] and row:  # earlier queries belong to this tile
                    now = torch.where((now == NEVER) & (first != NEVER), first + row, now)
                else:
                    now, before = first, now
            stored["before"][:, i] = before.clone()  # may be a view of the next
            stored["first"][:, i] = now

    # Tokens

    def append(self, closes: Any = None) -> None:
        _check_closes(closes)
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._check_capture()
        elif self._was_captured:
            self._longest = max(self.lengths)
        self._start_token()
        self._before = self._lengths
        self._lengths = [n + 1 for n in self._before]
        self._ensure_capacity()
        with torch.inference_mode(False):
            self._length.add_(1)

    def _check_capture(self) -> None:
        """Check that a step can be captured, before anything is changed."""
        if self._decode is None or self.max_length is None:
            raise InvalidInput(
                "cache",
                problem="a step of this cache cannot be captured as a CUDA graph",
                expected="max_length, so that no memory is allocated, and steps by kernels",
                fix='Make the cache with max_length=… and backend="triton"',
            )
        self._was_captured = True

    def _accept(self, layer: int, k: Tensor, v: Tensor, q: Tensor | None = None) -> None:
        if q is not None and q.ndim == 3:
            check_number_of_heads(self.rule.threshold, q.shape[1])
        super()._accept(layer, k, v, q)

    @_without_autograd
    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttendOptions) -> Tensor:
        stored = self._stored[layer]
        self._allocate_lists(stored, self._lists(q.shape[1]))
        if self._decode is not None and options.counted is None:
            return self._steps(stored, q[:, None], k[:, None], v[:, None], options).squeeze(1)
        chunk, before = self.shape.chunk, self._before
        position = torch.tensor(before, device=self.device)
        at = slice(None), torch.arange(self.batch, device=self.device), position // chunk, position % chunk
        stored["k"][at] = k.transpose(0, 1)
        stored["v"][at] = v.transpose(0, 1)
        completed = self._completed(before, [n + 1 for n in before])
        needed = [(i, c) for i, c in completed if c < before[i] // chunk]  # by these tokens
        with without_autocast(q):
            self._close(stored, needed, options.counted)
            out = attend_token(stored, q, position, max(before) // chunk, self.shape, self.rule, options).to(q.dtype)
            self._close(stored, [chunk for chunk in completed if chunk not in needed], options.counted)
        return out

    def _close(self, stored: Layer, chunks: Sequence[tuple[int, int]], counted: Counted | None) -> None:
        if chunks:
            self.rows.close_chunks(stored, chunks)
            self._count_clustering(len(chunks), counted)

    def _steps(self, stored: Layer, q: Tensor, k: Tensor, v: Tensor, options: AttendOptions) -> Tensor:
        with available.device_of(q):
            return self._decode.attend(stored, q, k, v, self._length, options)

    def _count_clustering(self, chunks: int, counted: Counted | None) -> None:
        if counted is not None:
            members, width = self.shape.page - 1, self.kv_heads * (self.head_dim + self.value_dim)
            counted.clustering += clustering_operations(chunks, self.kv_heads, self.head_dim, self.shape)
            counted.pooling += 2 * chunks * members * width

    # Changes of the sequences

    @_without_autograd
    def reorder(self, index: Any) -> None:
        selected = self._check_index(index)
        for stored in self._stored:
            for name, x in stored.items():
                moved = x.index_select(1, selected)
                stored[name] = x.copy_(moved) if moved.shape == x.shape else moved  # graphs keep its address
        lengths = self.lengths
        self._set_lengths([lengths[i] for i in selected.tolist()])

    def _set_lengths(self, lengths: list[int]) -> None:
        self.batch, self._longest = len(lengths), max(lengths)
        self._write_lengths(lengths)

    @_without_autograd
    def crop(self, lengths: Sequence[int]) -> None:
        """Remove the tokens after these lengths. Complete chunks that lose tokens are in progress again.

        The next tokens get the same results as in a full pass if the new end lies in the tile of the last token, in the tile
        before it, or at the end of any tile. Further back, the cache does not know the open groups of the tile (nor, after a
        crop to the tile before, those of an even earlier one): the rest of the tile starts with the first group alone.
        """
        wanted, have, shape = self._check_shorter(lengths), self.lengths, self.shape
        reopened = [(i, c) for i, c in self._completed(wanted, have) if c * shape.chunk < wanted[i]]
        now, then = (torch.tensor(x, device=self.device)[:, None, None] for x in (wanted, have))
        row, tiles = (
            (now - 1) % shape.tile,
            (then - 1) // shape.tile - (now - 1) // shape.tile,
        )  # tiles that are removed
        for stored in self._stored:
            if reopened:
                in_time(stored, "k", reopened, shape.chunk)
                in_time(stored, "v", reopened, shape.chunk)
            first, before = stored["first"], stored["before"]
            first = torch.where(tiles == 0, first, before)
            stored["first"].copy_(first.masked_fill((tiles > 1) | (first > row) | (now == 0), NEVER))
            before.masked_fill_(tiles > 0, NEVER)
        self._set_lengths(wanted)

    @_without_autograd
    def leaves(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return all keys and values of a layer in the order of time, packed: `[tokens, kv_heads, dim]`."""
        stored, lengths, chunk = self._stored[layer], self.lengths, self.shape.chunk
        slots = torch.arange(self._capacity * chunk, device=self.device)
        exists = slots < torch.tensor(lengths, device=self.device)[:, None]
        complete = self._completed([0] * self.batch, lengths)

        def packed(name: str) -> Tensor:
            copy = {**stored, name: stored[name].clone()}
            if complete:
                in_time(copy, name, complete, chunk)
            return copy[name][:, :, :, :chunk].flatten(2, 3).permute(1, 2, 0, 3)[exists]

        return packed("k"), packed("v")

    # State

    def state_dict(self) -> dict[str, Any]:
        self._check_complete()
        layers = [{name: x.clone() for name, x in stored.items()} for stored in self._stored]
        if waiting := self._waiting():
            for layer in layers:
                self.rows.close_chunks(layer, waiting)
        return {"settings": self._settings(), "lengths": self.lengths, "layers": layers}

    def _waiting(self) -> list[tuple[int, int]]:
        """Return the sequence and number of the complete chunks that are not clustered. In saved states all of them are."""
        each = enumerate(self.lengths)
        return [(i, c) for i, n in each for c in range(self._clustered(n), n // self.shape.chunk)]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._check_state(state, {})
        layers, sizes = state.get("layers"), dict[str, int]()
        if not isinstance(layers, list) or len(layers) != self.layers:
            raise InvalidInput("state['layers']", got="other content", expected=f"the tensors of {self.layers} layers")
        for number, layer in enumerate(layers):
            scores = layer.get("scores") if isinstance(layer, dict) else None
            wanted = self.rows.tensors("sequences", scores)
            sizes = check_tensors(layer, wanted, f"state['layers'][{number}]", **sizes)
            lists = sizes.pop("lists")
            if lists % self.kv_heads or (self.rule.share_lists and lists > self.kv_heads):
                expected = f"lists for {self.kv_heads} key/value heads"
                raise InvalidInput(f"state['layers'][{number}]['first']", got=f"{lists} lists", expected=expected)
        most = self._most(sizes["chunks"] * self.shape.chunk)
        self._lengths = check_lengths(state.get("lengths"), sizes["sequences"], most)
        self._stored = [self._loaded_layer(layer) for layer in layers]
        if waiting := self._waiting():
            for stored in self._stored:
                in_time(stored, "k", waiting, self.shape.chunk)
                in_time(stored, "v", waiting, self.shape.chunk)
        self._loaded(self._lengths)
        self._set_lengths(self._lengths)

    @_without_autograd
    def _loaded_layer(self, layer: Layer) -> Layer:
        loaded = {name: layer[name].to(self.device, copy=True) for name in self.rows.tensors("sequences")}
        if loaded["scores"].dtype != self.rows.score_dtype:
            loaded["scores"] = self.rows.scores_of_pages(loaded["k"], loaded["channels"])
        return loaded

    def _settings(self) -> dict[str, Any]:
        sizes = {"layers": self.layers, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        kind = {"value_dim": self.value_dim, "dtype": str(self.dtype), "windows": self.windows}
        return {**sizes, **kind, **asdict(self.shape), **asdict(self.rule)}

    def memory(self) -> Memory:
        total = sum(x.nbytes for stored in self._stored for x in stored.values())
        return Memory(total + self.step_memory.nbytes, self._flat_bytes(), leaves_kept=True)

    # Storage

    @property
    def _capacity(self) -> int:
        """Number of chunks that the tensors have rows for."""
        return self._stored[0]["k"].shape[2]

    def _empty(self, chunks: int, lists: int) -> Layer:
        """Return the tensors of an empty layer: zeros, because masked entries must be finite too."""
        sizes: dict[Any, int] = {"chunks": chunks, "lists": lists}
        result = {}
        with torch.inference_mode(False):
            for name, (shape, dtype) in self.rows.tensors(self.batch).items():
                size: list[Any] = [sizes.get(n, n) for n in shape]
                result[name] = torch.zeros(size, dtype=dtype, device=self.device)
                if name in ("first", "before"):
                    result[name].fill_(NEVER)
        return result

    @_without_autograd
    def _ensure_capacity(self) -> None:
        have, need = self._capacity, -(-self._longest // self.shape.chunk)
        if need <= have:
            return
        for number, stored in enumerate(self._stored):
            larger = self._empty(max(need, have + have // SPARE), len(stored["first"]))
            if have:
                for name, rows in stored.items():
                    larger[name][:, :, :have] = rows
            self._stored[number] = larger

    def _lists(self, heads: int) -> int:
        return self.kv_heads if self.rule.share_lists else heads

    def _allocate_lists(self, stored: Layer, lists: int) -> None:
        """Allocate the open groups of a layer, once the number of query heads is known."""
        have = len(stored["first"])
        if have not in (0, lists):
            raise InvalidInput("q", got=f"{lists} lists of open groups", expected=f"{have}, as for earlier tokens")
        if have == 0:
            size = lists, self.batch, self._capacity, self.shape.groups
            for name in ("first", "before"):
                stored[name] = torch.full(size, NEVER, dtype=torch.uint8, device=self.device)

    def _check_opened(self, opened: Any) -> None:
        """Check `opened` of `fill`: without it, no prompt may end inside a tile that sees complete chunks."""
        shape, lengths = self.shape, self._lengths
        if opened is None:
            for i, n in enumerate(lengths):
                if n % shape.tile and shape.first_exact(n):
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


def _run_triton(cache: ClusteredCache) -> Any:
    from hsa.attention.cache.triton.clustered_step import Decode

    return Decode(cache.shape, cache.rule, cache.windows, cache.step_memory, cache.device)


def _why_not_triton(cache: ClusteredCache) -> list[str]:
    reasons = cache.rows.why_not_cluster + why_not_tile(cache.shape)
    if cache.rule.threshold is None:
        reasons.append("the kernels of steps select by threshold, not by top_k")
    return reasons


def _run_torch(cache: ClusteredCache) -> None:
    return None


STEPS = (Backend("triton", _run_triton, _why_not_triton), Backend("torch", _run_torch))
