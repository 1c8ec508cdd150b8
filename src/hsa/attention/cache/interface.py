"""What every cache for generation can do: a batch of sequences that grow together, some layers deep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hsa.attention.checks import check_count
from hsa.attention.mixing import HeadMixing
from hsa.errors import InvalidInput
from hsa.tree.hierarchy import Hierarchy, integers


@dataclass(frozen=True)
class Memory:
    """What a cache takes, and what a flat one would take for the same tokens.

    >>> print(Memory(bytes=65_536, flat_bytes=33_554_432, leaves_kept=False))
    64 KiB, 1/512 of the 32 MiB of a flat cache
    """

    bytes: int
    flat_bytes: int
    leaves_kept: bool  # every key and value is still there

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


class Cache(ABC):
    """Keys and values of a batch of sequences, for decoding one token at a time.

        tree = cache.begin(lengths)                # the prompts; then for every layer
        cache.fill(layer, k, v)                    #   their packed keys and values
        cache.append()                             # a token more in every sequence; then for every layer
        y = cache.attend(layer, q, k, v)           #   what its query sees

    Args:
        layers: that share the structure.
        batch: sequences.
        kv_heads, head_dim: of the keys; `value_dim` of the values, the same by default.
        max_length: tokens a sequence may come to.
    """

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
            raise InvalidInput("dtype", given=repr(dtype), expected="a floating-point dtype")
        self.max_length, self.dtype = max_length, dtype
        self.device = torch.empty(0, device=device).device
        self._longest = 0  # tokens of the longest sequence
        self._waiting: set[int] = set()  # layers that have not got the newest token, or the prompts, yet
        self._prompts: tuple[int, ...] | None = None  # their lengths, until every layer is filled

    @property
    @abstractmethod
    def lengths(self) -> list[int]:
        """Tokens seen per sequence."""

    @abstractmethod
    def begin(self, lengths: Sequence[int], closes: Any = None) -> Hierarchy:
        """Prompts of these lengths, one after another, come into an empty cache. Returns their forest."""

    @abstractmethod
    def fill(self, layer: int, k: Tensor, v: Tensor) -> None:
        """The keys and values `[tokens, kv_heads, dim]` of the prompts in one layer."""

    @abstractmethod
    def append(self, closes: Any = None) -> None:
        """Every sequence grows by one token. `closes`: `[batch]` the height up to which it closes families."""

    @abstractmethod
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
        """What the newest token of every sequence sees in one layer.

        Args:
            q: `[batch, heads, head_dim]`.
            k, v: `[batch, kv_heads, head_dim]`, `[batch, kv_heads, value_dim]`: of the same token; they are stored.
            pooled_bias: added to the logits of pooled nodes, a number or one per head.
            mixing: talking heads, as in `multiscale_attention`.
        """

    @abstractmethod
    def reorder(self, index: Any) -> None:
        """Sequence i becomes what sequence `index[i]` was (beam search); there may be more or fewer than before."""

    @abstractmethod
    def crop(self, lengths: Sequence[int]) -> None:
        """Back to these lengths: the tokens after them have never been (speculative decoding)."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors and plain values."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What `state_dict` of a cache of the same sizes gave."""

    @abstractmethod
    def memory(self) -> Memory: ...

    def _flat_bytes(self) -> int:
        row = self.kv_heads * (self.head_dim + self.value_dim) * torch.empty(0, dtype=self.dtype).element_size()
        return self.layers * row * sum(self.lengths)

    def _meet_prompts(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Checks of `begin`."""
        if self._longest:
            raise InvalidInput(
                "begin", given="a cache with tokens in it", expected="an empty one", fix="make a new one"
            )
        sizes = tuple(integers("lengths", lengths).reshape(-1).tolist())
        if len(sizes) != self.batch or min(sizes) < 1:
            raise InvalidInput(
                "lengths",
                given=f"{list(sizes)[:5]} for {len(sizes)} sequences",
                expected=f"a token or more in each of {self.batch} sequences, as the cache was made for",
            )
        self._grow_to(max(sizes))
        self._prompts, self._waiting = sizes, set(range(self.layers))
        return sizes

    def _grow_to(self, longest: int) -> None:
        if self.max_length is not None and longest > self.max_length:
            raise InvalidInput(
                "cache",
                given=f"a sequence of {longest:,} tokens",
                expected=f"at most {self.max_length:,}, the max_length of the cache",
                fix="make it with a larger max_length",
            )
        self._longest = longest

    def _meet_token(self) -> None:
        """Checks of `append`."""
        self._check_nobody_waits()
        self._grow_to(self._longest + 1)
        self._prompts, self._waiting = None, set(range(self.layers))

    def _check_nobody_waits(self) -> None:
        if self._waiting:
            what = "the prompts" if self._prompts else "the newest token"
            raise InvalidInput(
                "cache",
                given=f"layer {min(self._waiting)} without {what}",
                expected="keys and values of every layer before the next token",
                fix="call fill(layer, k, v) after begin, attend(layer, q, k, v) after append, for every layer",
            )

    def _meet_layer(self, layer: int, k: Tensor, v: Tensor, q: Tensor | None = None) -> None:
        """Checks of `fill` (without q) and `attend`."""
        prompts = q is None
        if layer not in self._waiting or (self._prompts is not None) != prompts:
            raise InvalidInput(
                "layer",
                given=f"{layer}, which is not waiting for {'prompts' if prompts else 'a token'}",
                expected=f"one of {sorted(self._waiting)}, once each"
                if self._waiting
                else "nothing: no layer is waiting",
                fix="call begin before fill, append before attend",
            )
        rows = sum(self._prompts) if self._prompts is not None else self.batch
        heads = self.kv_heads if q is None else q.shape[1] if q.ndim == 3 else 0
        shapes = {"k": (rows, self.kv_heads, self.head_dim), "v": (rows, self.kv_heads, self.value_dim)}
        given = {"k": k, "v": v}
        if q is not None:
            shapes["q"], given["q"] = (rows, heads, self.head_dim), q
            if heads == 0 or heads % self.kv_heads:
                raise InvalidInput(
                    "q", given=f"shape {tuple(q.shape)}", expected=f"[batch, a multiple of {self.kv_heads} heads, dim]"
                )
        for name, x in given.items():
            if tuple(x.shape) != shapes[name]:
                raise InvalidInput(
                    name,
                    given=f"shape {tuple(x.shape)}",
                    expected=f"{shapes[name]}, as the cache was made for",
                    fix="use a cache made for this model and batch",
                )
            if x.dtype != self.dtype or x.device != self.device:
                raise InvalidInput(
                    name, given=f"{x.dtype} on {x.device}", expected=f"{self.dtype} on {self.device}, as the cache"
                )
        self._waiting.discard(layer)

    def _check_index(self, index: Any) -> Tensor:
        self._check_nobody_waits()
        chosen = torch.as_tensor(index)
        if chosen.ndim != 1 or chosen.is_floating_point() or chosen.dtype == torch.bool or len(chosen) == 0:
            raise InvalidInput("index", given=repr(index), expected="sequence numbers, one per place")
        if not bool(((chosen >= 0) & (chosen < self.batch)).all()):
            raise InvalidInput("index", given=chosen.tolist(), expected=f"sequences 0 to {self.batch - 1}")
        return chosen.to(self.device)

    def _check_shorter(self, lengths: Sequence[int]) -> list[int]:
        self._check_nobody_waits()
        wanted, now = integers("lengths", lengths).reshape(-1).tolist(), self.lengths
        if len(wanted) != self.batch:
            raise InvalidInput("lengths", given=wanted, expected=f"one for each of {self.batch} sequences")
        if any(not 0 <= n <= m for n, m in zip(wanted, now, strict=True)):
            raise InvalidInput("lengths", given=wanted, expected=f"at most what is there: {now}")
        return wanted

    def _check_state(self, state: dict[str, Any], shapes: dict[str, tuple[int | None, ...]]) -> None:
        """It is one of a cache of the same sizes; None: any."""
        for name, shape in shapes.items():
            found = tuple(state[name].shape) if isinstance(state.get(name), Tensor) else None
            fits = found is not None and len(found) == len(shape)
            if not fits or any(s is not None and s != f for f, s in zip(found or (), shape, strict=True)):
                raise InvalidInput(
                    f"state[{name!r}]",
                    given="nothing" if found is None else f"shape {found}",
                    expected=f"{shape} (None: any), as this cache is made",
                    fix="make the cache with the sizes of the saved one",
                )
            if name in ("keys", "values") and state[name].dtype != self.dtype:
                raise InvalidInput(
                    f"state[{name!r}]", given=state[name].dtype, expected=f"{self.dtype}, as this cache is made"
                )
