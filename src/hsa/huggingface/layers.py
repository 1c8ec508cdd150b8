"""The self-attention layers of a transformers model, and why a model has none that can be converted."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from hsa.errors import Unsupported

_MARK = "ALL_ATTENTION_FUNCTIONS"  # what a layer that takes its attention from transformers' interface mentions


def attention_layers(model: Any) -> list[nn.Module]:
    """The modules that ask transformers' attention interface for self-attention, in the order of the model.

    Raises:
        Unsupported: not a transformers model, or one whose attention is its own; the message says which.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise Unsupported(f"{type(model).__name__} is no transformers model; convert takes a PreTrainedModel")
    if getattr(model.config, "is_encoder_decoder", False):
        raise Unsupported(
            f"{type(model).__name__} has an encoder and a decoder; convert one of them: convert(model.get_encoder())"
        )
    layers = [module for module in model.modules() if _asks(type(module)) and not crosses_over(module)]
    if not layers:
        raise Unsupported(
            f"{type(model).__name__} computes its attention itself instead of asking transformers' attention interface, "
            "so it cannot be replaced; families that ask include BERT, RoBERTa, DistilBERT, ELECTRA, ModernBERT, ViT, "
            "GPT-2, Llama, Qwen"
        )
    return layers


def slides(module: nn.Module) -> bool:
    """Whether a layer looks no further than a window already."""
    kind = getattr(module, "attention_type", None) or getattr(module, "layer_type", None)
    return bool(getattr(module, "is_sliding", False) or getattr(module, "sliding_window", None)) or (
        isinstance(kind, str) and kind != "full_attention"
    )


def _asks(kind: type[nn.Module]) -> bool:
    try:
        return _MARK in inspect.getsource(kind.forward)
    except (OSError, TypeError):  # no source: not a class of transformers
        return False


def crosses_over(module: nn.Module) -> bool:
    return bool(getattr(module, "is_cross_attention", False)) or "Cross" in type(module).__name__
