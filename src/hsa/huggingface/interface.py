"""`attn_implementation="hsa"`: the attention function that transformers calls, and its registration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hsa.errors import InvalidInput, Unsupported
from hsa.huggingface.attend import PURPOSE, attend, attend_softmax
from hsa.huggingface.layer_plan import Call, LayerPlan
from hsa.huggingface.layers import is_cross
from hsa.huggingface.loading import transformers_library
from hsa.huggingface.masks import hsa_mask, read_sequences
from hsa.huggingface.observe import count_mask
from hsa.huggingface.passes import IN_STEP

NAME = "hsa"


def register() -> None:
    """Register "hsa" as an attention implementation of transformers, for `from_pretrained(…, attn_implementation="hsa")`.

    A model loaded this way uses the settings in its config, or the defaults of `convert` if there are none. Settings that
    depend on token ids (`sinks="special"`, `tree="sentences"`, functions) need `convert(model)` after loading. `convert`
    calls this function itself.

    Raises:
        MissingExtra: transformers is not installed.

    >>> from transformers import BertConfig, BertModel
    >>> register()
    >>> config = BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=3, intermediate_size=8)
    >>> model = BertModel._from_config(config, attn_implementation="hsa")
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
    """Return the attention output of one layer, `[batch, queries, heads, dim]`, and the weights if requested.

    Keys that came from a cache of trees carry their cache as an attribute (see `hsa.huggingface.cache`).
    """
    if IN_STEP.get():
        return _step(Call(module, query, key, value, scaling, dropout, others=others)), None
    if others.get("cu_seq_lens_q") is not None:
        raise InvalidInput(
            "input_ids",
            expected="a padded batch with its attention_mask",
            got="sequences joined without padding (cu_seq_lens_q)",
            fix="Pad the batch; for a SentenceTransformer, set model[0].unpad_inputs = False",
        )
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


def _step(call: Call) -> Tensor:
    """Attend in a `DecodingStep`."""
    cache = getattr(call.key, "hsa_cache", None)
    if cache is None or is_cross(call.module):
        raise Unsupported(f"{type(call.module).__name__} has no cache that a decoding step can use")
    LayerPlan.of(call.module).check_terms(call)
    return cache.step(call)


def _wants_weights(module: Any, others: dict[str, Any]) -> bool:
    """Return whether attention weights are requested, directly or through the collector of transformers."""
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
        expected="[batch, keys], or [batch, 1, queries, keys] that hides only padding and, in decoders, later tokens",
        got=f"a mask of shape {shape} with another pattern in converted layer {plan.number}",
        fix="Pad packed sequences to a batch, and leave layers with sliding windows out of the conversion",
    )
