"""The transformers model inside an object, its self-attention layers that can be converted, and their properties."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from torch import nn

from hsa.errors import Unsupported

_MARK = "ALL_ATTENTION_FUNCTIONS"
"""Name in the source of every layer that takes its attention from transformers' attention interface."""


def find_transformer(model: Any) -> Any:
    """Return the transformers model that an object is or contains.

    A `SentenceTransformer`, a `PeftModel` and a module of your own contain one.

    Raises:
        Unsupported: The object contains no transformers model, or several.
    """
    from transformers import PreTrainedModel

    inner = list(dict.fromkeys(_outermost(model, PreTrainedModel))) if isinstance(model, nn.Module) else []
    if len(inner) == 1:
        return inner[0]
    kind = type(model).__name__
    if inner:
        names = ", ".join(type(part).__name__ for part in inner)
        raise Unsupported(f"{kind} contains {len(inner)} transformers models ({names}); convert them one by one")
    raise Unsupported(
        f"{kind} is not a transformers model and contains none; pass a PreTrainedModel, or a module around one, such as a "
        "SentenceTransformer"
    )


def _outermost(module: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    if isinstance(module, kind):
        return [module]
    return [part for child in module.children() for part in _outermost(child, kind)]


def contains(module: nn.Module, inner: nn.Module) -> bool:
    """Return whether a module contains another one; no module contains itself."""
    return module is not inner and any(part is inner for part in module.modules())


def attention_layers(model: Any) -> list[nn.Module]:
    """List the self-attention modules of a transformers model that use its attention interface, first layer first.

    Raises:
        Unsupported: The model has none, or has parts that must be converted one by one. The message says which.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise Unsupported(f"{type(model).__name__} is not a transformers model; pass a PreTrainedModel")
    users = [module for module in model.modules() if _uses_interface(type(module))]  # type: ignore[arg-type]
    if getattr(model.config, "is_encoder_decoder", False) and any(getattr(m, "is_decoder", False) for m in users):
        raise Unsupported(
            f"{type(model).__name__} has a decoder that attends to an encoder; convert the encoder alone: "
            "convert(model.get_encoder())"
        )
    layers = [module for module in users if not is_cross(module)]
    parts = {type(module.config).__name__ for module in layers} - {type(model.config).__name__}
    if parts:
        raise Unsupported(
            f"{type(model).__name__} consists of models with configs of their own ({', '.join(sorted(parts))}); convert "
            "them one by one, for example convert(model.language_model)"
        )
    if not layers:
        raise Unsupported(
            f"{type(model).__name__} computes its attention itself instead of using transformers' attention interface, "
            "so it cannot be replaced; families that use the interface include BERT, RoBERTa, DistilBERT, ELECTRA, "
            "ModernBERT, ViT, GPT-2, Llama, Qwen"
        )
    return layers


def set_attention_dropout(model: Any, p: float) -> None:
    """Set the dropout of attention weights in all layers, whatever the model family calls it."""
    for module in attention_layers(model):
        for name in ("dropout", "attn_dropout", "attention_dropout"):
            dropout = getattr(module, name, None)
            if isinstance(dropout, nn.Dropout):
                dropout.p = p
            elif isinstance(dropout, (int, float)):
                setattr(module, name, p)


@cache  # reading the source takes milliseconds, and a model has hundreds of modules
def _uses_interface(kind: type[nn.Module]) -> bool:
    try:
        return _MARK in inspect.getsource(kind.forward)
    except (OSError, TypeError):  # no source: not a class of transformers
        return False


def why_not_convert(module: nn.Module) -> str | None:
    """Return the property of a layer that attention over trees does not have; None if the layer can be converted."""
    if is_sliding(module):
        return "a sliding window"
    if getattr(module, "attn_logit_softcapping", None) is not None:
        return "a soft cap on its logits"
    return "learned sinks" if isinstance(getattr(module, "sinks", None), nn.Parameter) else None


def is_sliding(module: nn.Module) -> bool:
    """Return whether a layer attends to a window of neighbouring tokens only."""
    kind = getattr(module, "attention_type", None) or getattr(module, "layer_type", None)
    if isinstance(kind, str):
        return kind != "full_attention"
    if hasattr(module, "is_sliding") or hasattr(module, "sliding_window"):
        return bool(getattr(module, "is_sliding", False) or getattr(module, "sliding_window", None))
    # Mistral, Phi-3 and Starcoder2 have one window for all layers, which only their config knows.
    config = getattr(module, "config", None)
    window = None if getattr(config, "layer_types", None) else getattr(config, "sliding_window", None)
    return window is not None and window < getattr(config, "max_position_embeddings", window + 1)


def is_cross(module: nn.Module) -> bool:
    """Return whether a layer attends to another sequence. If one class serves both, only self-attention is causal."""
    return (
        bool(getattr(module, "is_cross_attention", False))
        or "Cross" in type(module).__name__
        or (bool(getattr(module, "is_decoder", False)) and not getattr(module, "is_causal", True))
    )


def is_causal(module: Any) -> bool:
    """Return whether a layer hides later tokens. A config can make a decoder bidirectional."""
    return bool(getattr(module, "is_causal", False)) and bool(getattr(module.config, "is_causal", True))
