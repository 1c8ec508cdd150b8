"""`attn_implementation="hsa"`: the two functions that transformers calls, and how they are registered.

The mask function runs once per forward pass and returns a `[batch, keys]` mask, to which the `Sequences` of the pass are
bound; the attention function runs once per layer and finds them there. A mask that is kept for later, as gradient
checkpointing does, keeps its `Sequences`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hsa.errors import InvalidInput, MissingExtra
from hsa.huggingface.attend import attend, count_exact
from hsa.huggingface.layers import crosses_over
from hsa.huggingface.sequences import Sequences
from hsa.huggingface.settings import LayerSettings, Settings
from hsa.huggingface.vocabulary import Vocabulary

NAME = "hsa"
_BOUND: Any = WeakIdKeyDictionary()  # mask → Sequences
_PASSES: Any = WeakIdKeyDictionary()  # config → Pass
_UNKNOWN_TERMS = ("position_bias", "softcap", "s_aux", "sliding_window")


class Pass:
    """The forward pass that a model is in: what a hook saw of its arguments."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.ids: Tensor | None = None


class ConvertedLayer:
    """What a converted model hangs on each of its attention modules."""

    def __init__(self, number: int, settings: LayerSettings | None):
        self.number = number
        self.settings = settings  # None: exact


def register() -> None:
    """Makes `from_pretrained(…, attn_implementation="hsa")` known to transformers. `convert` does this by itself.

    A model loaded so attends as its config says, or, where that says nothing, as `convert` does by default.

    Raises:
        MissingExtra: transformers is not installed.
    """
    library = _library()
    library.AttentionInterface.register(NAME, hsa_attention)
    library.AttentionMaskInterface.register(NAME, hsa_mask)


def _library() -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingExtra("transformers", "hf", "hierarchical attention in pre-trained models") from None
    return transformers


def enter_pass(config: Any, state: Pass) -> None:
    """From now on, masks made for this config belong to this model's passes."""
    _PASSES[config] = state


def leave_pass(config: Any) -> None:
    _PASSES.pop(config, None)


@torch.compiler.disable
def hsa_mask(
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    config: Any = None,
    q_length: int | None = None,
    q_offset: Any = 0,
    cache_position: Tensor | None = None,
    device: Any = None,
    **others: Any,
) -> Tensor:
    """`[batch, keys]`, true where there is a token; `[batch, 1, queries, keys]` for what is no plain or causal attention.

    Masks of other forms (sliding windows, packed sequences) are left as they are to the layers that are not converted.
    """
    from transformers import masking_utils as library

    if cache_position is not None:  # transformers before 5.3 says where the queries are with this
        q_length, q_offset, device = len(cache_position), int(cache_position[0]), cache_position.device
    plain = (library.bidirectional_mask_function, library.causal_mask_function)
    if mask_function not in plain or kv_offset:
        where: dict[str, Any] = {"q_length": q_length, "q_offset": q_offset, "device": device}
        if cache_position is not None:
            where = {"cache_position": cache_position}
        others |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        allowed = library.sdpa_mask(
            batch_size=batch_size,
            kv_length=kv_length,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **where,
            **others,
        )
        assert allowed is not None  # it may not be skipped
        return allowed
    if attention_mask is None:
        mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    else:
        mask = attention_mask[:, :kv_length].bool().clone()
    here = _PASSES.get(config)
    causal = mask_function is library.causal_mask_function
    _BOUND[mask] = Sequences(
        mask,
        causal=causal,
        first_query=int(q_offset) if causal else 0,
        ids=None if here is None else here.ids,
        vocabulary=None if here is None else here.vocabulary,
    )
    return mask


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
    """`[batch, queries, heads, dim]`, and the weights if they are asked for."""
    layer = _layer_of(module)
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    crosses = crosses_over(module)
    sequences = None if crosses else _sequences_of(attention_mask, query, key, causal)
    if layer.settings is None or crosses:
        if sequences is not None:
            count_exact(layer.number, query, sequences)
            attention_mask, is_causal = sequences.allowed(), sequences.causal
        elif attention_mask is not None and attention_mask.ndim == 2:
            attention_mask = attention_mask[:, None, None, :]
        others.pop("output_attentions", None)  # PyTorch's attention has none to give
        run = _library().AttentionInterface()["sdpa"]
        return run(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **others
        )
    _check_terms(layer, module, others, key.shape[2])
    if sequences is None:
        raise _unknown_mask(layer, attention_mask)
    return attend(
        layer.settings,
        layer.number,
        query,
        key,
        value,
        sequences,
        scale=scaling,
        dropout_p=dropout,
        weights=bool(others.get("output_attentions")),
    )


def _layer_of(module: Any) -> ConvertedLayer:
    """What `convert` hung on the module; for a model that was only loaded with "hsa" attention, what its config says."""
    layer = getattr(module, "hsa_layer", None)
    if layer is not None:
        return layer
    number = getattr(module, "layer_idx", None)
    written = Settings.of(getattr(module, "config", None))
    if written is None:  # nothing said: every layer, as `convert` does by default
        settings: LayerSettings | None = LayerSettings()
    elif number is None:
        raise InvalidInput(
            "attn_implementation",
            given=f"'hsa' for {type(module).__name__}, whose layers do not know their numbers",
            expected="hsa.huggingface.convert(model), which numbers them",
        )
    else:
        settings = written.layers.get(number)
    module.hsa_layer = ConvertedLayer(-1 if number is None else number, settings)
    return module.hsa_layer


def _sequences_of(mask: Tensor | None, query: Tensor, key: Tensor, causal: bool) -> Sequences | None:
    """The `Sequences` bound to a mask, or read off a mask that somebody else made; None: a mask of another form."""
    if mask is None:
        everything = torch.ones(len(query), key.shape[2], dtype=torch.bool, device=query.device)
        return Sequences(everything, causal=causal, first_query=key.shape[2] - query.shape[2])
    sequences = _BOUND.get(mask)
    if sequences is None and mask.ndim == 4:
        sequences = _read_off(mask)
        if sequences is not None:
            _BOUND[mask] = sequences
    if sequences is None or sequences.mask.shape != (len(query), key.shape[2]):
        return None
    return sequences if sequences.first_query + query.shape[2] == key.shape[2] else None


def _read_off(mask: Tensor) -> Sequences | None:
    """`[batch, 1 or heads, 1 or queries, keys]` that hides padding, or padding and what is later; else None."""
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    if mask.dtype != torch.bool and ((mask != 0) & seen).any():
        return None  # a bias
    queries, keys = seen.shape[-2:]
    first = keys - queries
    if not torch.equal(seen, seen[:, :1].expand_as(seen)):
        return None
    seen = seen[:, 0]
    present = seen.any(1)
    if not present.any(1).all():
        return None
    asks = present if queries == 1 and keys > 1 else present[:, first:]
    rows = seen.expand(-1, asks.shape[1], -1)
    if torch.equal(rows[asks], present[:, None].expand_as(rows)[asks]):
        causal = False
    else:
        place = torch.arange(keys, device=mask.device)
        before = (place <= place[first:, None]) & present[:, None]
        if not torch.equal(rows[asks], before[asks]):
            return None
        causal = True
    return Sequences(present.clone(), causal=causal, first_query=first if causal else 0)


def _check_terms(layer: ConvertedLayer, module: Any, others: dict[str, Any], keys: int) -> None:
    """Terms that change the weights, which no tree knows of."""
    for name in _UNKNOWN_TERMS:
        value = others.get(name)
        if value is None or (name == "sliding_window" and value >= keys):
            continue
        raise InvalidInput(
            f"layer {layer.number} ({type(module).__name__})",
            given=f"attention with {name}",
            expected="plain softmax attention",
            fix=f"leave this layer out: convert(model, layers=…) without {layer.number}",
        )


def _unknown_mask(layer: ConvertedLayer, mask: Tensor | None) -> InvalidInput:
    shape = None if mask is None else tuple(mask.shape)
    return InvalidInput(
        "attention_mask",
        given=f"a mask of shape {shape} that is neither padding nor causal, in converted layer {layer.number}",
        expected="[batch, keys], or [batch, 1, queries, keys] that hides only padding and, in decoders, what is later",
        fix="unpack packed sequences into a padded batch; leave layers with sliding windows out of the conversion",
    )
