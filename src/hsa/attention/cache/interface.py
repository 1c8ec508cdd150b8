"""`Cache`: the interface and the checks that all caches share. A cache holds sequences that grow together by tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor

from hsa.attention.cache.saved_state import Wanted, check_tensors
from hsa.attention.checks import check_count, scale_or_default
from hsa.attention.mixing import HeadMixing, check_mixing
from hsa.attention.multiscale.operator import per_head
from hsa.errors import InvalidInput, Unsupported
from hsa.tree.hierarchy import Hierarchy, integers


@dataclass(frozen=True)
class Memory:
    """Size of a cache in bytes, next to that of a flat cache of the same tokens.

    >>> print(Memory(bytes=65_536, flat_bytes=33_554_432, leaves_kept=False))
    64 KiB, 1/512 of the 32 MiB of a flat cache
    """

    bytes: int
    flat_bytes: int
    leaves_kept: bool  # whether the cache keeps every key and value

    def __str__(self) -> str:
        kept = "; every key and value is kept" if self.leaves_kept else ""
        if self.flat_bytes > self.bytes > 0:
            share = f"1/{self.flat_bytes / self.bytes:,.0f} of the {_size(self.flat_bytes)} of a flat cache"
            return f"{_size(self.bytes)}, {share}{kept}"
        return f"{_size(self.bytes)} ({_size(self.flat_bytes)} in a flat cache){kept}"


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} GiB"


@dataclass
class Counted:
    """Counter of the work of decoding steps, summed over heads and sequences."""

    entries: int = 0  # keys and pooled nodes attended to
    selection: int = 0  # operations to estimate groups and pooled nodes
    clustering: int = 0  # operations to cluster complete chunks
    pooling: int = 0  # operations to pool the nodes of these chunks


class Storage(TypedDict, total=False):
    """Optional properties of the stored tensors; see `Cache`."""

    value_dim: int | None
    dtype: torch.dtype
    device: torch.device | str


class Sizes(Storage, total=False):
    """Optional properties of the stored tensors, and the greatest length; see `Cache`."""

    max_length: int | None


@dataclass(frozen=True)
class AttendOptions:
    """Checked options of `Cache.attend`."""

    bias: Tensor | None  # [1 or heads] added to the logits of pooled nodes
    mixing: HeadMixing | None
    scale: float
    counted: Counted | None


class Cache(ABC):
    """Cache of the keys and values of a batch of sequences, to decode one token at a time.

        tree = cache.begin(lengths)                # start with prompts; then for every layer
        cache.fill(layer, k, v)                    #   store their packed keys and values
        cache.append()                             # add a token to every sequence; then for every layer
        y = cache.attend(layer, q, k, v)           #   store its key and value, and attend

    Args:
        layers: Number of layers; they share the tree.
        batch: Number of sequences.
        kv_heads: Number of key/value heads.
        head_dim: Dimension of a key.
        value_dim: Dimension of a value; `head_dim` by default.
        max_length: Maximum number of tokens per sequence.
        dtype, device: Type and device of the stored tensors.
    """

    mixes_heads = True  # whether `attend` takes `mixing`

    def __init__(
        self,
        layers: int,
        batch: int,
        kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        max_length: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self.layers = check_count("layers", layers, "a positive number", 1)
        self.batch = check_count("batch", batch, "a positive number of sequences", 1)
        self.kv_heads = check_count("kv_heads", kv_heads, "a positive number", 1)
        self.head_dim = check_count("head_dim", head_dim, "a positive number", 1)
        self.value_dim = head_dim if value_dim is None else check_count("value_dim", value_dim, "a positive number", 1)
        if max_length is not None:
            max_length = check_count("max_length", max_length, "a positive number of tokens, or None", 1)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise InvalidInput("dtype", got=repr(dtype), expected="a floating-point dtype")
        self.max_length, self.dtype = max_length, dtype
        self.device = torch.empty(0, device=device).device
        self._longest = 0  # tokens of the longest sequence
        self._pending: set[int] = set()  # layers that still lack the prompts or the newest token
        self._prompts: tuple[int, ...] | None = None  # lengths of the prompts, until a token is appended

    @property
    @abstractmethod
    def lengths(self) -> list[int]:
        """Number of tokens of every sequence."""

    @abstractmethod
    def begin(self, lengths: Sequence[int], closes: Any = None) -> Hierarchy:
        """Start an empty cache with prompts of these lengths, and return their forest.

        Args:
            lengths: `[batch]` number of tokens of every prompt.
            closes: `[tokens]` height up to which each token closes families, prompts one after another; None for 0.
        """

    @abstractmethod
    def fill(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the packed keys and values `[tokens, kv_heads, dim]` of the prompts in one layer."""

    @abstractmethod
    def append(self, closes: Any = None) -> None:
        """Add a token to every sequence. Its keys and values follow with `attend`.

        Args:
            closes: `[batch]` height up to which the token closes families; None for 0.
        """

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
        counted: Counted | None = None,
    ) -> Tensor:
        """Store the key and value of the newest token, and return its attention `[batch, heads, value_dim]`.

        Args:
            layer: Number of the layer. Call each layer once after every `append`.
            q: `[batch, heads, head_dim]` queries of the newest tokens.
            k: `[batch, kv_heads, head_dim]` keys of these tokens.
            v: `[batch, kv_heads, value_dim]` values of these tokens.
            pooled_bias: Number, or one number per head, to add to the logits of pooled nodes.
            mixing: Talking heads, as in `multiscale_attention`.
            scale: Factor of the dot products; `head_dim ** -0.5` by default.
            counted: Counter to add the work of this call to.
        """
        check_mixing(mixing, q)
        if mixing is not None and not self.mixes_heads:
            raise Unsupported(f"a {type(self).__name__} cannot mix heads: each head attends to its own nodes")
        options = AttendOptions(self._head_bias(pooled_bias, q), mixing, scale_or_default(scale, q), counted)
        self._accept(layer, k, v, q)
        return self._attend(layer, q, k, v, options)

    @abstractmethod
    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttendOptions) -> Tensor:
        """Run `attend` on checked arguments."""

    def _head_bias(self, pooled_bias: float | Tensor, q: Tensor) -> Tensor | None:
        return per_head(pooled_bias, q)

    @abstractmethod
    def reorder(self, index: Any) -> None:
        """Replace sequence i by sequence `index[i]` (beam search). The number of sequences may change."""

    @abstractmethod
    def crop(self, lengths: Sequence[int]) -> None:
        """Remove the tokens after these lengths (speculative decoding)."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain values, for `torch.save`."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a cache with the same sizes, as `state_dict` returned it. The batch size may differ."""

    @abstractmethod
    def memory(self) -> Memory:
        """Return the bytes of this cache and of a flat one."""

    def _settings(self) -> dict[str, Any]:
        """Return the settings, besides tensor shapes, that a cache must share with this one to load its state."""
        return {}

    def _flat_bytes(self) -> int:
        row = self.kv_heads * (self.head_dim + self.value_dim) * torch.empty(0, dtype=self.dtype).element_size()
        return self.layers * row * sum(self.lengths)

    def _start_prompts(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Check the arguments of `begin`, and mark the prompts as pending in every layer."""
        if self._longest:
            raise InvalidInput("begin", got="a cache with tokens", expected="an empty cache", fix="Make a new cache")
        sizes = tuple(integers("lengths", lengths).reshape(-1).tolist())
        if len(sizes) != self.batch or min(sizes) < 1:
            raise InvalidInput(
                "lengths",
                got=list(sizes),
                expected=f"a length of 1 or more for each of the {self.batch} sequences of the cache",
            )
        self._set_longest(max(sizes))
        self._prompts, self._pending = sizes, set(range(self.layers))
        return sizes

    def _set_longest(self, longest: int) -> None:
        if self.max_length is not None and longest > self.max_length:
            raise InvalidInput(
                "cache",
                got=f"{longest:,} tokens",
                expected=f"sequences of at most {self.max_length:,} tokens (max_length)",
                fix="Make the cache with a larger max_length",
            )
        self._longest = longest

    def _start_token(self) -> None:
        """Check that a token can be appended, and mark it as pending in every layer."""
        self._check_complete()
        self._set_longest(self._longest + 1)
        self._prompts, self._pending = None, set(range(self.layers))

    def _check_complete(self) -> None:
        if self._pending:
            tokens = "the prompts" if self._prompts else "the newest token"
            raise InvalidInput(
                "cache",
                problem=f"layer {min(self._pending)} lacks the keys and values of {tokens}",
                expected="those of every layer before the next step",
                fix="For every layer, call fill(layer, k, v) after begin and attend(layer, q, k, v) after append",
            )

    def _accept(self, layer: int, k: Tensor, v: Tensor, q: Tensor | None = None) -> None:
        """Check the arguments of `fill` (without q) or `attend`, and remove the layer from the pending ones."""
        prompts = q is None
        if layer not in self._pending or (self._prompts is not None) != prompts:
            waiting = f"one of {sorted(self._pending)}, once each"
            raise InvalidInput(
                "layer",
                problem=f"{layer} is not waiting for {'prompts' if prompts else 'a token'}",
                expected=waiting if self._pending else "prompts or a new token first",
                fix="Call begin before fill, append before attend",
            )
        rows = sum(self._prompts) if self._prompts is not None else self.batch
        heads = self.kv_heads if q is None else q.shape[1] if q.ndim == 3 else 0
        shapes = {"k": (rows, self.kv_heads, self.head_dim), "v": (rows, self.kv_heads, self.value_dim)}
        tensors = {"k": k, "v": v}
        if q is not None:
            shapes["q"], tensors["q"] = (rows, heads, self.head_dim), q
            if heads == 0 or heads % self.kv_heads:
                raise InvalidInput(
                    "q",
                    got=f"shape {tuple(q.shape)}",
                    expected=f"shape (batch, a multiple of {self.kv_heads} heads, dim)",
                )
        for name, x in tensors.items():
            if tuple(x.shape) != shapes[name]:
                raise InvalidInput(
                    name,
                    got=f"shape {tuple(x.shape)}",
                    expected=f"shape {shapes[name]}, as in this cache",
                    fix="Use a cache made for this model and batch",
                )
            if x.dtype != self.dtype or x.device != self.device:
                raise InvalidInput(
                    name, got=f"{x.dtype} on {x.device}", expected=f"{self.dtype} on {self.device}, as in this cache"
                )
        self._pending.discard(layer)

    def _check_index(self, index: Any) -> Tensor:
        self._check_complete()
        selected = torch.as_tensor(index)
        if selected.ndim != 1 or selected.is_floating_point() or selected.dtype == torch.bool or len(selected) == 0:
            raise InvalidInput("index", got=repr(index), expected="a list or vector of sequence numbers")
        if not bool(((selected >= 0) & (selected < self.batch)).all()):
            raise InvalidInput("index", got=selected.tolist(), expected=f"sequence numbers from 0 to {self.batch - 1}")
        return selected.to(self.device)

    def _check_shorter(self, lengths: Sequence[int]) -> list[int]:
        self._check_complete()
        wanted, now = integers("lengths", lengths).reshape(-1).tolist(), self.lengths
        if len(wanted) != self.batch:
            raise InvalidInput("lengths", got=wanted, expected=f"one length for each of the {self.batch} sequences")
        if any(not 0 <= n <= m for n, m in zip(wanted, now, strict=True)):
            raise InvalidInput("lengths", got=wanted, expected=f"at most the lengths of the sequences, {now}")
        return wanted

    def _check_state(self, state: dict[str, Any], wanted: Mapping[str, Wanted]) -> dict[str, int]:
        """Check that a state fits this cache, and return the sizes that `wanted` names."""
        sizes = check_tensors(state, wanted)
        if state.get("settings", {}) != self._settings():
            raise InvalidInput(
                "state['settings']",
                got=state.get("settings"),
                expected=f"{self._settings()}, as in this cache",
                fix="Make the cache with the settings of the saved one",
            )
        return sizes

    def _most(self, capacity: int) -> int:
        """Return the largest number of tokens of a sequence in a state with this capacity."""
        return capacity if self.max_length is None else min(capacity, self.max_length)

    def _loaded(self, lengths: Sequence[int]) -> None:
        """Mark no layer as pending, after a state of these lengths was loaded."""
        self.batch, self._longest, self._pending, self._prompts = len(lengths), max(lengths), set(), None
