"""HAT from a pre-trained BERT or RoBERTa: its embeddings and layers read the segments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hsa.baselines.hat.model import HatConfig, Returns
from hsa.errors import InvalidInput
from hsa.huggingface.loading import load_for_task, loading, transformers_library

_KINDS = ("bert", "roberta", "camembert", "xlm-roberta")  # the same layers under the same names
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh", "relu": "relu"}
_MARKS = 2  # [CLS] and [SEP]


def pretrained_tokenizer(name: str) -> Any:
    """The tokenizer of a pre-trained encoder as a `tokenizers.Tokenizer`, for texts of any length.

    Raises:
        InvalidInput: no tokenizer there, or one that ids of a table of vectors cannot be made with.
        MissingExtra: `transformers` is not installed.
    """
    library = transformers_library("a warm start")
    with loading(name):
        tokenizer = library.AutoTokenizer.from_pretrained(name)
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # invented where files are missing
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
    """The sizes of a HAT that begins as a pre-trained encoder, and the weights it begins with.

    Word vectors, positions in a segment, their norm and all layers inside segments are the encoder's; [CLS] and [SEP] are a
    segment's first and last vector. Layers across segments start as the identity, so that a document of one segment is
    read exactly as the encoder reads it. Texts are read with `pretrained_tokenizer`.

    Args:
        name: a folder with config.json, weights and tokenizer, or a name on the hub, such as "roberta-base".
        layout, segment, segment_level, returns, dropout: see `HatConfig`.

    Returns the configuration, and weights for `HatEncoder.start_from`, by the names of its `state_dict`.

    Raises:
        InvalidInput: nothing that loads, another kind of model, more leaves per segment than it has positions, a layout of
            another number of layers.
        MissingExtra: `transformers` is not installed.
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
            given=f"{layout!r}, with {config.layers} layers inside segments",
            expected=f"{about.num_hidden_layers}, as {name} has",
        )
    tensors = _embeddings(weights, model, _fast(tokenizer, name), tokenizer, segment, name)
    inside = (index for index, letter in enumerate(config.pattern) if letter == "S")
    for layer, index in enumerate(inside):
        tensors.update(_layer(weights, f"encoder.layer.{layer}.", f"layers.{index}."))
    return config, {key: tensor.clone() for key, tensor in tensors.items()}


def _check_kind(config: Any, name: str) -> None:
    if config.model_type not in _KINDS or getattr(config, "is_decoder", False):
        raise InvalidInput(
            name, given=f"a model of type {config.model_type!r}", expected=f"an encoder: one of {', '.join(_KINDS)}"
        )
    if getattr(config, "position_embedding_type", None) not in (None, "absolute"):
        raise InvalidInput(
            name,
            given=f"positions of type {config.position_embedding_type!r}",
            expected="a table of positions ('absolute')",
        )
    if config.hidden_act not in _ACTIVATIONS:
        raise InvalidInput(
            name, given=f"the activation {config.hidden_act!r}", expected=f"one of {', '.join(_ACTIVATIONS)}"
        )


def _fast(tokenizer: Any, name: str) -> Any:
    """What lies under a tokenizer of transformers, without the cuts and the padding it may have been saved with."""
    fast: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(fast, "encode_batch_fast"):
        raise InvalidInput(name, given="a tokenizer in Python", expected="one with a tokenizer.json")
    copy = type(fast).from_str(fast.to_str())
    copy.no_padding()
    copy.no_truncation()
    if max(copy.get_vocab().values()) >= copy.get_vocab_size():
        raise InvalidInput(name, given="a tokenizer that leaves out ids", expected="ids 0, 1, 2, … without gaps")
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
            name, given=f"a tokenizer of {size:,} tokens for {len(words):,} vectors", expected="a vector per token"
        )
    marks = [tokenizer.cls_token_id, tokenizer.sep_token_id]
    if None in marks:
        raise InvalidInput(name, given="a tokenizer without [CLS] or [SEP]", expected="both")
    padding = model.embeddings.position_embeddings.padding_idx
    positions = positions[0 if padding is None else padding + 1 :]  # RoBERTa counts from beyond the padding
    if segment + _MARKS > len(positions):
        raise InvalidInput(
            "segment",
            given=f"{segment} leaves, [CLS] and [SEP]",
            expected=f"at most {len(positions) - _MARKS}: {name} has {len(positions)} positions",
        )
    return {
        "embedding.tables.text.weight": words[:size],
        "marks.weight": words[marks],
        "positions.weight": positions[: segment + _MARKS] + types[0],  # all tokens of a text are of the first type
        "norm.weight": weights["embeddings.LayerNorm.weight"],
        "norm.bias": weights["embeddings.LayerNorm.bias"],
    }


def _layer(weights: dict[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    """One layer: queries, keys and values in one projection, the rest under other names."""
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
