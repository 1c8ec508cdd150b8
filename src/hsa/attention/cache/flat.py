"""`FlatCache`: all keys and values, with exact attention. The baseline, and the cache of flat layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from hsa.attention.cache.interface import AttendOptions, Cache, Memory, Sizes
from hsa.attention.cache.saved_state import Wanted, check_lengths
from hsa.attention.checks import repeat_heads
from hsa.tree.hierarchy import Hierarchy


class FlatCache(Cache):
    """Cache of all keys and values, for exact attention. Its capacity doubles when it is full.

    Args:
        layers, batch, kv_heads, head_dim, value_dim, max_length, dtype, device: See `Cache`.

    >>> cache = FlatCache(layers=1, batch=2, kv_heads=3, head_dim=8)
    >>> q, k, v = torch.randn(3, 2, 3, 8).unbind(0)
    >>> cache.append()
    >>> torch.equal(cache.attend(0, q, k, v), v)  # the first token sees itself
    True
    """

    def __init__(self, layers: int, batch: int, kv_heads: int, head_dim: int, **sizes: Unpack[Sizes]):
        super().__init__(layers, batch, kv_heads, head_dim, **sizes)
        self._lengths = [0] * batch
        self.keys, self.values = self._zeros(0)

    def _zeros(self, capacity: int) -> tuple[Tensor, Tensor]:
        shape = (self.layers, self.batch, self.kv_heads, capacity)
        kind: Any = {"dtype": self.dtype, "device": self.device}
        return torch.zeros(*shape, self.head_dim, **kind), torch.zeros(*shape, self.value_dim, **kind)

    def _ensure_capacity(self) -> None:
        now = self.keys.shape[3]
        if self._longest > now:
            keys, values = self._zeros(max(self._longest, 2 * now, 16))
            keys[..., :now, :], values[..., :now, :] = self.keys, self.values
            self.keys, self.values = keys, values

    @property
    def lengths(self) -> list[int]:
        return list(self._lengths)

    def begin(self, lengths: Sequence[int], closes: Any = None) -> Hierarchy:
        self._lengths = list(self._start_prompts(lengths))
        self._ensure_capacity()
        return Hierarchy.flat(self._lengths).to(self.device)

    def fill(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._accept(layer, k, v)
        start = 0
        for i, n in enumerate(self._lengths):
            self.keys[layer, i, :, :n] = k[start : start + n].transpose(0, 1)
            self.values[layer, i, :, :n] = v[start : start + n].transpose(0, 1)
            start += n

    def append(self, closes: Any = None) -> None:
        self._start_token()
        self._ensure_capacity()
        self._lengths = [n + 1 for n in self._lengths]
        self._last = torch.tensor(self._lengths, device=self.device) - 1
        self._mask = None
        if len(set(self._lengths)) > 1:
            self._mask = (torch.arange(self._longest, device=self.device) <= self._last[:, None])[:, None, None]

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttendOptions) -> Tensor:
        keys, values = self.keys[layer], self.values[layer]
        rows = torch.arange(self.batch, device=self.device)
        keys[rows, :, self._last], values[rows, :, self._last] = k, v
        q, keys, values = q[:, :, None], keys[:, :, : self._longest], values[:, :, : self._longest]
        if options.counted is not None:
            options.counted.entries += sum(self._lengths) * q.shape[1]
        if options.mixing is None:
            grouped = q.shape[1] != self.kv_heads
            out = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=self._mask, scale=options.scale, enable_gqa=grouped
            )
            return out[:, :, 0]
        keys, values = (repeat_heads(x, q.shape[1]) for x in (keys, values))
        logits = options.mixing.mix_logits(q @ keys.transpose(-1, -2) * options.scale)
        logits = logits if self._mask is None else logits.masked_fill(~self._mask, -math.inf)
        return (options.mixing.mix_weights(logits.softmax(-1)) @ values)[:, :, 0]

    def reorder(self, index: Any) -> None:
        selected = self._check_index(index)
        self.batch, self._lengths = len(selected), [self._lengths[i] for i in selected.tolist()]
        self._longest = max(self._lengths)
        self.keys, self.values = self.keys[:, selected], self.values[:, selected]

    def crop(self, lengths: Sequence[int]) -> None:
        self._lengths = self._check_shorter(lengths)
        self._longest = max(self._lengths)

    def state_dict(self) -> dict[str, Any]:
        self._check_complete()
        return {"lengths": self.lengths, "keys": self.keys.clone(), "values": self.values.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rows = (self.layers, "sequences", self.kv_heads, "capacity")
        wanted: dict[str, Wanted] = {
            "keys": ((*rows, self.head_dim), self.dtype),
            "values": ((*rows, self.value_dim), self.dtype),
        }
        sizes = self._check_state(state, wanted)
        self._lengths = check_lengths(state.get("lengths"), sizes["sequences"], self._most(sizes["capacity"]))
        self._loaded(self._lengths)
        self.keys, self.values = (state[name].to(self.device, copy=True) for name in ("keys", "values"))

    def memory(self) -> Memory:
        return Memory(self.keys.nbytes + self.values.nbytes, self._flat_bytes(), leaves_kept=True)
