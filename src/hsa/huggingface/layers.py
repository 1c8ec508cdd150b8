"""Find the self-attention layers of a transformers model that can be converted, and what kind each is."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from hsa.errors import Unsupported

_MARK = "ALL_ATTENTION_FUNCTIONS"  # in the source of layers that take their attention from transformers' interface


def attention_layers(model: Any) -> list[nn.Module]:
    """List the modules that ask transformers' attention interface for self-attention, in the order of the model.

    Raises:
        Unsupported: not a transformers model, or one whose attention is its own; the message says which.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise Unsupported(f"{type(model).__name__} is no transformers model; convert takes a PreTrainedModel")
    asking = [module for module in model.modules() if _asks(type(module))]
    if getattr(model.config, "is_encoder_decoder", False) and any(getattr(m, "is_decoder", False) for m in asking):
        raise Unsupported(
            f"{type(model).__name__} has a decoder that attends to an encoder; convert the encoder alone: "
            "convert(model.get_encoder())"
        )
    layers = [module for module in asking if not is_cross(module)]
    parts = {type(module.config).__name__ for module in layers} - {type(model.config).__name__}
    if parts:
        raise Unsupported(
            f"{type(model).__name__} is made of models with configs of their own ({', '.join(sorted(parts))}); convert them "
            "one by one, for example convert(model.language_model)"
        )
    if not layers:
        raise Unsupported(
            f"{type(model).__name__} computes its attention itself instead of asking transformers' attention interface, "
            "so it cannot be replaced; families that ask include BERT, RoBERTa, DistilBERT, ELECTRA, ModernBERT, ViT, "
            "GPT-2, Llama, Qwen"
        )
    return layers


def is_sliding(module: nn.Module) -> bool:
    """Whether a layer sees no further than a window."""
    kind = getattr(module, "attention_type", None) or getattr(module, "layer_type", None)
    return bool(getattr(module, "is_sliding", False) or getattr(module, "sliding_window", None)) or (
        isinstance(kind, str) and kind != "full_attention"
    )


def set_attention_dropout(model: Any, p: float) -> None:
    """Set the dropout of attention weights in all layers, by the names that families have for it."""
    for module in attention_layers(model):
        for name in ("dropout", "attn_dropout", "attention_dropout"):
            held = getattr(module, name, None)
            if isinstance(held, nn.Dropout):
                held.p = p
            elif isinstance(held, (int, float)):
                setattr(module, name, p)


def _asks(kind: type[nn.Module]) -> bool:
    try:
        return _MARK in inspect.getsource(kind.forward)
    except (OSError, TypeError):  # no source: not a class of transformers
        return False


def is_cross(module: nn.Module) -> bool:
    """Whether a layer attends to another sequence. Families that use one class for both mark causal self-attention."""
    return (
        bool(getattr(module, "is_cross_attention", False))
        or "Cross" in type(module).__name__
        or (bool(getattr(module, "is_decoder", False)) and not getattr(module, "is_causal", True))
    )


def is_causal(module: Any) -> bool:
    """Whether a layer sees no later tokens. A config can make decoders see everything."""
    return bool(getattr(module, "is_causal", False)) and bool(getattr(module.config, "is_causal", True))
