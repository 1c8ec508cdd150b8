"""Conversion of a pre-trained BERT or RoBERTa into a HAT, with its embeddings and layers inside segments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hsa.baselines.hat.model import HatConfig, Returns
from hsa.errors import InvalidInput
from hsa.huggingface.loading import load_for_task, loading, transformers_library

_KINDS = ("bert", "roberta", "camembert", "xlm-roberta")  # these share layers and weight names
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh", "relu": "relu"}
_MARKS = 2  # [CLS] and [SEP]


def pretrained_tokenizer(name: str) -> Any:
    """Return the tokenizer of a pre-trained encoder as a `tokenizers.Tokenizer`, for texts of any length.

    Raises:
        InvalidInput: If there is no tokenizer, or its ids have gaps.
        MissingExtra: If `transformers` is not installed.
    """
    library = transformers_library("a warm start")
    with loading(name):
        tokenizer = library.AutoTokenizer.from_pretrained(name)
        # Without vocabulary files, transformers builds a tokenizer that knows only its special tokens.
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
            raise OSError("no vocabulary of a tokenizer")
    return _fast(tokenizer, name)


def warm_start(
    name: str,
    *,
    layout: str = "interleaved",
    segment: int = 128,
    segment_level: int = 0,
    returns: Returns = "segments",
    dropout: float = 0.1,
) -> tuple[HatConfig, dict[str, Tensor]]:
    """Return the configuration and the initial weights of a HAT that starts from a pre-trained encoder.

    Word vectors, positions in a segment, their norm and all layers inside segments come from the encoder; [CLS] and [SEP]
    become the first and last row of a segment. Layers across segments start as the identity, so that a document of one
    segment yields exactly the encoder's output. Use `pretrained_tokenizer` for the texts.

    Args:
        name: Folder with config.json, weights and tokenizer, or a name on the hub, such as "roberta-base".
        layout, segment, segment_level, returns, dropout: See `HatConfig`.

    Returns:
        Configuration, and weights for `HatEncoder.start_from`, by their names in its `state_dict`.

    Raises:
        InvalidInput: If the model does not load or is of another kind, if a segment has more leaves than the encoder has
            positions, or if the layout has another number of layers.
        MissingExtra: If `transformers` is not installed.
    """
    library = transformers_library("a warm start")
    with loading(name):
        _check_kind(library.AutoConfig.from_pretrained(name), name)
    model, tokenizer = load_for_task(name, "embedding")
    about, weights = model.config, model.state_dict()
    config = HatConfig(
        width=about.hidden_size,
        heads=about.num_attention_heads,
        layers=about.num_hidden_layers,
        feed_forward=about.intermediate_size,
        dropout=dropout,
        layout=layout,
        segment=segment,
        segment_level=segment_level,
        returns=returns,
        norm="post",
        activation=_ACTIVATIONS[about.hidden_act],  # type: ignore[arg-type]
        epsilon=about.layer_norm_eps,
        separator=True,
        warm_start=name,
    )
    if config.layers != about.num_hidden_layers:
        raise InvalidInput(
            "layout",
            got=f"{layout!r}, which has {config.layers}",
            expected=f"a layout with {about.num_hidden_layers} layers inside segments, as {name} has",
        )
    tensors = _embeddings(weights, model, _fast(tokenizer, name), tokenizer, segment, name)
    inside = (index for index, letter in enumerate(config.pattern) if letter == "S")
    for layer, index in enumerate(inside):
        tensors.update(_layer(weights, f"encoder.layer.{layer}.", f"layers.{index}."))
    return config, {key: tensor.clone() for key, tensor in tensors.items()}


def _check_kind(config: Any, name: str) -> None:
    if config.model_type not in _KINDS or getattr(config, "is_decoder", False):
        raise InvalidInput(
            name, got=f"a model of type {config.model_type!r}", expected=f"an encoder: one of {', '.join(_KINDS)}"
        )
    if getattr(config, "position_embedding_type", None) not in (None, "absolute"):
        raise InvalidInput(
            name,
            got=f"positions of type {config.position_embedding_type!r}",
            expected="learned absolute positions ('absolute')",
        )
    if config.hidden_act not in _ACTIVATIONS:
        raise InvalidInput(
            name, got=f"the activation {config.hidden_act!r}", expected=f"one of {', '.join(_ACTIVATIONS)}"
        )


def _fast(tokenizer: Any, name: str) -> Any:
    """Return the `tokenizers` object inside a tokenizer of transformers, with truncation and padding switched off."""
    fast: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(fast, "encode_batch_fast"):
        raise InvalidInput(name, got="a tokenizer written in Python", expected="a fast tokenizer (tokenizer.json)")
    copy = type(fast).from_str(fast.to_str())
    copy.no_padding()
    copy.no_truncation()
    if max(copy.get_vocab().values()) >= copy.get_vocab_size():
        raise InvalidInput(name, got="a tokenizer that skips ids", expected="ids 0, 1, 2, … without gaps")
    return copy


def _embeddings(
    weights: dict[str, Tensor], model: Any, fast: Any, tokenizer: Any, segment: int, name: str
) -> dict[str, Tensor]:
    words, positions, types = (
        weights[f"embeddings.{kind}_embeddings.weight"] for kind in ("word", "position", "token_type")
    )
    size = fast.get_vocab_size()
    if size > len(words):
        raise InvalidInput(
            name, got=f"{len(words):,} vectors for a tokenizer of {size:,} tokens", expected="a vector per token"
        )
    marks = [tokenizer.cls_token_id, tokenizer.sep_token_id]
    if None in marks:
        raise InvalidInput(name, problem="the tokenizer lacks [CLS] or [SEP]", expected="both")
    padding = model.embeddings.position_embeddings.padding_idx
    positions = positions[0 if padding is None else padding + 1 :]  # RoBERTa's positions start after the padding index
    if segment + _MARKS > len(positions):
        raise InvalidInput(
            "segment",
            got=segment,
            expected=f"at most {len(positions) - _MARKS} ({name} has {len(positions)} positions, two for [CLS] and [SEP])",
        )
    return {
        "embedding.tables.text.weight": words[:size],
        "marks.weight": words[marks],
        "positions.weight": positions[: segment + _MARKS] + types[0],  # all tokens have the first token type
        "norm.weight": weights["embeddings.LayerNorm.weight"],
        "norm.bias": weights["embeddings.LayerNorm.bias"],
    }


def _layer(weights: dict[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    """Return the weights of one layer under our names, with queries, keys and values in one projection."""
    names = {
        "output": "attention.output.dense",
        "norm_attention": "attention.output.LayerNorm",
        "inner": "intermediate.dense",
        "outer": "output.dense",
        "norm_feed_forward": "output.LayerNorm",
    }
    tensors = {}
    for kind in ("weight", "bias"):
        parts = [weights[f"{theirs}attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
        tensors[f"{ours}project.{kind}"] = torch.cat(parts)
        tensors.update({f"{ours}{mine}.{kind}": weights[f"{theirs}{their}.{kind}"] for mine, their in names.items()})
    return tensors
