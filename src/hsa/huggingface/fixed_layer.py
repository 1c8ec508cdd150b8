"""`FixedLayer`: exact attention to a cache of fixed size, for decoding steps in CUDA graphs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from hsa.errors import InvalidInput
from hsa.huggingface.layer_plan import Call
from hsa.huggingface.passes import IN_STEP


class FixedLayer(CacheLayerMixin):
    """Cache of a layer that is not converted, with memory for a fixed number of tokens.

    Token t is stored in row t modulo the number of rows, which is the size of the window in a layer with a sliding window.

    Args:
        layer: Cache of the layer, with the tokens of a prompt.
        mask: `[batch, seen]` whether there is a token at each position.
        max_length: Maximum number of positions.
    """

    is_compileable = False
    supports_early_init = False

    def __init__(self, layer: DynamicLayer, mask: Tensor, max_length: int):
        super().__init__()
        assert layer.keys is not None
        assert layer.values is not None
        window: int | None = getattr(layer, "sliding_window", None)
        self.is_sliding, self.is_croppable = window is not None, window is None
        self.seen, self.max_length = mask.shape[1], max_length
        self.rows = max_length if window is None else min(window, max_length)
        (batch, _, kept, _), device = layer.keys.shape, layer.keys.device
        kept = min(kept, self.rows)
        to = torch.arange(self.seen - kept, self.seen, device=device) % self.rows
        self.k, self.v = (
            x.new_zeros(*x.shape[:2], self.rows, x.shape[3]).index_copy_(2, to, x[:, :, x.shape[2] - kept :])
            for x in (layer.keys, layer.values)
        )
        self.is_token = torch.zeros(batch, self.rows, dtype=torch.bool, device=device)
        self.is_token.index_copy_(1, to, mask[:, self.seen - kept :])
        self.position = torch.tensor([self.seen], device=device)  # of the next token; steps count it on the device
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def count_step(self) -> None:
        """Count the token of a `DecodingStep`."""
        self.seen += 1

    def step(self, call: Call) -> Tensor:
        """Store the key and value of one token, and return its attention `[batch, 1, heads, dim]`."""
        query, (batch, kv_heads, _, dim) = call.query, call.key.shape
        row = self.position % self.rows
        self.k.index_copy_(2, row, call.key)
        self.v.index_copy_(2, row, call.value)
        self.is_token.index_fill_(1, row, True)
        self.position.add_(1)
        # The query heads of a key/value head are rows of one product.
        q = query.reshape(batch * kv_heads, -1, dim)
        logits = _product(q, self.k.flatten(0, 1).transpose(1, 2)).view(batch, -1, self.rows)
        logits = logits * (dim**-0.5 if call.scale is None else call.scale)
        weights = logits.masked_fill(~self.is_token[:, None], -math.inf).softmax(-1)
        out = weights.to(self.v.dtype).view(len(q), -1, self.rows) @ self.v.flatten(0, 1)
        return out.view(batch, 1, query.shape[1], -1)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store tokens, and return all keys and values; in a `DecodingStep` return the new ones."""
        if IN_STEP.get():
            key_states.hsa_cache = self  # type: ignore[attr-defined]
            return key_states, value_states
        if self.is_sliding:
            raise InvalidInput(
                "input_ids",
                expected="one new token per sequence, after the first step of a layer with a sliding window",
                got=f"{key_states.shape[2]} tokens",
                fix="Decode without decoding_graph to use prompt lookup, assisted decoding or further prompts",
            )
        new = key_states.shape[2]
        if self.seen + new > self.max_length:
            raise full(self.max_length)
        rows = slice(self.seen, self.seen + new)
        self.k[:, :, rows], self.v[:, :, rows] = key_states, value_states
        self.is_token[:, rows] = True
        self.seen += new
        self.position.add_(new)
        return self.k[:, :, : self.seen], self.v[:, :, : self.seen]

    def get_seq_length(self, *args: Any) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return self.max_length

    get_max_cache_shape = get_max_length  # former name

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for x in (self.k, self.v, self.is_token):
            x.copy_(x.index_select(0, beam_idx.to(x.device)))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove positions at the end, as `CacheLayer.crop` does."""
        left = self.seen + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, self.seen)
        if left != self.seen and self.is_sliding:
            raise InvalidInput(
                "past_key_values", expected="a cache that is not cropped", got="a layer with a sliding window"
            )
        self.is_token[:, left:] = False
        self.seen = max(left, 0)
        self.position.fill_(self.seen)

    def reset(self) -> None:
        self.is_token.zero_()
        self.position.zero_()
        self.seen = 0


def full(max_length: int) -> InvalidInput:
    """Return the error of a cache that has no memory for another token."""
    return InvalidInput(
        "past_key_values",
        problem=f"the cache is full: {max_length:,} tokens per sequence (max_length)",
        expected="room for another token",
        fix="Pass a larger max_length: the number of tokens of the prompt and of the new text, with padding",
    )


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a batch of products in float32."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float() if a.dtype in (torch.float16, torch.bfloat16) else a @ b
