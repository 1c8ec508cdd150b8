"""`attn_implementation="hsa"`: the attention function that transformers calls, and how it is registered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hsa.errors import InvalidInput
from hsa.huggingface.attend import PURPOSE, attend, attend_softmax
from hsa.huggingface.layer_plan import Call, LayerPlan
from hsa.huggingface.layers import is_cross
from hsa.huggingface.loading import transformers_library
from hsa.huggingface.masks import hsa_mask, read_sequences
from hsa.huggingface.observe import count_mask

NAME = "hsa"


def register() -> None:
    """Register `from_pretrained(…, attn_implementation="hsa")` with transformers. `convert` does this by itself.

    A model loaded so attends as its config says, or, where that says nothing, as `convert` does by default.

    Raises:
        MissingExtra: transformers is not installed.
    """
    library = transformers_library(PURPOSE)
    library.AttentionInterface.register(NAME, hsa_attention)
    library.AttentionMaskInterface.register(NAME, hsa_mask)


@torch.compiler.disable
def hsa_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend in one layer: `[batch, queries, heads, dim]`, and the weights if they are asked for.

    A cache of trees hangs on the keys that it returned (see `hsa.huggingface.cache`).
    """
    weights = _wants_weights(module, others)
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    call = Call(module, query, key, value, scaling, dropout, weights, others)
    if is_cross(module):
        return attend_softmax(call, _for_torch(attention_mask), False)[:2]
    plan, cache = LayerPlan.of(module), getattr(key, "hsa_cache", None)
    sequences = read_sequences(attention_mask, query, key, causal)
    if sequences is not None and sequences.mask.shape[1] < key.shape[2]:  # a cache of fixed size, not full yet
        present = sequences.mask.shape[1]
        call = replace(call, key=key[:, :, :present], value=value[:, :, :present])
    if sequences is not None:
        run = attend if cache is None else cache.attend
        return run(plan, call, sequences)[:2]
    if plan.settings is not None:
        plan.check_terms(call)
    padding = attention_mask is not None and attention_mask.ndim == 2
    if plan.settings is not None or cache is not None or (causal and padding):
        raise _unknown_mask(plan, attention_mask)
    mask = _for_torch(attention_mask)
    count_mask(plan.number, query, mask)
    return attend_softmax(call, mask, causal)[:2]


def _wants_weights(module: Any, others: dict[str, Any]) -> bool:
    """Whether the model was asked for its attentions. Not all families pass that on; transformers collects them."""
    if others.pop("output_attentions", False) or getattr(module.config, "output_attentions", False):
        return True
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:  # before 5.2
        return False
    collected = _active_collector.get() or {}
    return "attentions" in collected or "cross_attentions" in collected


def _for_torch(mask: Tensor | None) -> Tensor | None:
    return mask[:, None, None, :] if mask is not None and mask.ndim == 2 else mask


def _unknown_mask(plan: LayerPlan, mask: Tensor | None) -> InvalidInput:
    shape = None if mask is None else tuple(mask.shape)
    return InvalidInput(
        "attention_mask",
        given=f"a mask of shape {shape} that is neither padding nor causal, in converted layer {plan.number}",
        expected="[batch, keys], or [batch, 1, queries, keys] that hides only padding and, in decoders, what is later",
        fix="unpack packed sequences into a padded batch; leave layers with sliding windows out of the conversion",
    )
