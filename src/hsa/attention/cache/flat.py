"""`FlatCache`: every key and value, and exact attention. The baseline, and the cache of layers with flat attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hsa.attention.cache.interface import Cache, Memory
from hsa.attention.checks import scale_or_default
from hsa.attention.mixing import HeadMixing, check_mixing
from hsa.tree.hierarchy import Hierarchy


class FlatCache(Cache):
    """Keys and values of all tokens; room is doubled when it runs out.

    >>> cache = FlatCache(layers=1, batch=2, kv_heads=3, head_dim=8)
    >>> q, k, v = torch.randn(3, 2, 3, 8).unbind(0)
    >>> cache.append()
    >>> torch.equal(cache.attend(0, q, k, v), v)  # the first token sees itself
    True
    """

    def __init__(self, layers: int, batch: int, kv_heads: int, head_dim: int, **sizes: Any):
        super().__init__(layers, batch, kv_heads, head_dim, **sizes)
        self._lengths = [0] * batch
        self._set(*self._rooms(0))

    def _rooms(self, room: int) -> tuple[Tensor, Tensor]:
        shape = (self.layers, self.batch, self.kv_heads, room)
        kind: Any = {"dtype": self.dtype, "device": self.device}
        return torch.zeros(*shape, self.head_dim, **kind), torch.zeros(*shape, self.value_dim, **kind)

    def _set(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.batch = len(self._lengths)

    def _make_room(self) -> None:
        now = self.keys.shape[3]
        if self._longest > now:
            keys, values = self._rooms(max(self._longest, 2 * now, 16))
            keys[..., :now, :], values[..., :now, :] = self.keys, self.values
            self._set(keys, values)

    @property
    def lengths(self) -> list[int]:
        return list(self._lengths)

    def begin(self, lengths: Sequence[int], closes: Any = None) -> Hierarchy:
        self._lengths = list(self._meet_prompts(lengths))
        self._make_room()
        return Hierarchy.flat(self._lengths).to(self.device)

    def fill(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._meet_layer(layer, k, v)
        start = 0
        for i, n in enumerate(self._lengths):
            self.keys[layer, i, :, :n] = k[start : start + n].transpose(0, 1)
            self.values[layer, i, :, :n] = v[start : start + n].transpose(0, 1)
            start += n

    def append(self, closes: Any = None) -> None:
        self._meet_token()
        self._make_room()
        self._lengths = [n + 1 for n in self._lengths]
        self._last = torch.tensor(self._lengths, device=self.device) - 1
        self._mask = None
        if len(set(self._lengths)) > 1:
            self._mask = (torch.arange(self._longest, device=self.device) <= self._last[:, None])[:, None, None]

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
        check_mixing(mixing, q)
        self._meet_layer(layer, k, v, q)
        keys, values = self.keys[layer], self.values[layer]
        rows = torch.arange(self.batch, device=self.device)
        keys[rows, :, self._last], values[rows, :, self._last] = k, v
        if mixing is not None:
            return self._attend_mixed(q, keys, values, mixing, scale_or_default(scale, q))
        out = F.scaled_dot_product_attention(
            q[:, :, None],
            keys[:, :, : self._longest],
            values[:, :, : self._longest],
            attn_mask=self._mask,
            scale=scale_or_default(scale, q),
            enable_gqa=q.shape[1] != self.kv_heads,
        )
        return out[:, :, 0]

    def _attend_mixed(self, q: Tensor, keys: Tensor, values: Tensor, mixing: HeadMixing, scale: float) -> Tensor:
        groups = q.shape[1] // self.kv_heads
        keys, values = (x[:, :, : self._longest].repeat_interleave(groups, 1) for x in (keys, values))
        logits = mixing.mix_logits(q[:, :, None] @ keys.transpose(-1, -2) * scale)
        logits = logits if self._mask is None else logits.masked_fill(~self._mask, -math.inf)
        return (mixing.mix_weights(logits.softmax(-1)) @ values)[:, :, 0]

    def reorder(self, index: Any) -> None:
        chosen = self._check_index(index)
        self._lengths = [self._lengths[i] for i in chosen.tolist()]
        self._longest = max(self._lengths)
        self._set(self.keys[:, chosen], self.values[:, chosen])

    def crop(self, lengths: Sequence[int]) -> None:
        self._lengths = self._check_shorter(lengths)
        self._longest = max(self._lengths)

    def state_dict(self) -> dict[str, Any]:
        self._check_nobody_waits()
        return {"lengths": self.lengths, "keys": self.keys.clone(), "values": self.values.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rows = (self.layers, None, self.kv_heads, None)
        self._check_state(state, {"keys": (*rows, self.head_dim), "values": (*rows, self.value_dim)})
        self._lengths = list(state["lengths"])
        self._longest, self._waiting = max(self._lengths), set()
        self._set(state["keys"].to(self.device, copy=True), state["values"].to(self.device, copy=True))

    def memory(self) -> Memory:
        return Memory(self.keys.nbytes + self.values.nbytes, self._flat_bytes(), leaves_kept=True)
