"""Collaborative heads in pre-trained encoders of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hsa.errors import InvalidInput, Unsupported
from hsa.huggingface.attend import attend_exactly
from hsa.huggingface.interface import NAME
from hsa.huggingface.layers import attention_layers, is_causal
from hsa.huggingface.loading import transformers_library
from hsa.research.collaborative.heads import SharedProjections, check_shared_dim, share_projections
from hsa.research.collaborative.report import CollaborationReport, all_parameters

_CONFIG = "hsa_shared_dim"  # field of the model's config
_KNOWN = {"self", "hidden_states", "attention_mask", "past_key_values", "past_key_value", "head_mask"} | {
    "encoder_hidden_states",  # None in encoders
    "encoder_attention_mask",
    "output_attentions",
    "cache_position",
    "kwargs",
}
_NORMS = ("q_norm", "k_norm", "query_layernorm", "key_layernorm", "q_layernorm", "k_layernorm")


def collaborate(
    model: Any, shared_dim: int | float, *, inputs: Iterable[Mapping[str, Tensor]] | None, iterations: int
) -> CollaborationReport:
    """Change an encoder in place; see `hsa.research.collaborative.collaborate`."""
    layers = _layers(model)
    channels = layers[0].query.out_features
    shared = check_shared_dim(shared_dim, channels)
    before = all_parameters(model)
    moments = [None] * len(layers) if inputs is None else _moments(model, layers, inputs)
    results = [
        share_projections(
            *(layer.query.weight, layer.query.bias, layer.key.weight, layer.key.bias),
            layer.num_attention_heads,
            shared,
            moment=moment,
            iterations=iterations,
        )
        for layer, moment in zip(layers, moments, strict=True)
    ]
    for layer, projections in zip(layers, results, strict=True):
        replace_projections(layer, projections)
    setattr(model.config, _CONFIG, shared)
    return CollaborationReport.of(results, channels, before, all_parameters(model))


def prepare(model: Any, shared_dim: int | float | None) -> None:
    """Add untrained shared projections in place; see `hsa.research.collaborative.prepare_collaborative`."""
    layers = _layers(model)
    if shared_dim is None:
        shared_dim = getattr(model.config, _CONFIG, None)
    if shared_dim is None:
        raise InvalidInput(
            "shared_dim", problem="not given, and not in the config", expected="the number of shared channels"
        )
    shared = check_shared_dim(shared_dim, layers[0].query.out_features)
    for layer in layers:
        heads, width = layer.num_attention_heads, layer.query.in_features
        weights = [layer.query.weight.new_empty(shared, width).normal_(std=width**-0.5) for _ in range(2)]
        zeros = layer.query.weight.new_zeros(shared)
        mixing = layer.query.weight.new_ones(heads, shared)
        replace_projections(layer, SharedProjections(weights[0], zeros, weights[1], zeros, mixing, 1.0, None, 0, 0))
    setattr(model.config, _CONFIG, shared)


def replace_projections(layer: Any, shared: SharedProjections) -> None:
    """Turn a self-attention layer into one with shared projections; the module keeps its hooks and other parts."""
    layer.query = _linear(layer.query, shared.query_weight, shared.query_bias)
    layer.key = _linear(layer.key, shared.key_weight, shared.key_bias)
    needs_grad = layer.query.weight.requires_grad
    layer.mixing = nn.Parameter(shared.mixing.detach().to(layer.query.weight).clone(), requires_grad=needs_grad)
    layer.__class__ = _collaborative(type(layer))


class CollaborativeSelfAttention(nn.Module):
    """Self-attention whose heads share queries and keys; a mixin for the class of the layer that it changes."""

    mixing: Tensor  # [heads, shared_dim]
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    config: Any
    dropout: nn.Dropout
    scaling: float

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        heads = len(self.mixing)
        query = self.query(hidden_states)[:, None] * self.mixing[:, None]  # [batch, heads, tokens, shared_dim]
        key = self.key(hidden_states)[:, None].expand(-1, heads, -1, -1)
        value = self.value(hidden_states).unflatten(-1, (heads, -1)).transpose(1, 2)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, _attend_eagerly)
        dropout = self.dropout.p if self.training else 0.0
        out, weights = attend(self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return out.flatten(2), weights

    def __reduce__(self) -> Any:
        """Pickle the original class, because this subclass is built at run time."""
        return _empty, (type(self).__mro__[2],), self.__dict__


_MADE: dict[type[nn.Module], type[nn.Module]] = {}


def _collaborative(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass, so that transformers still recognises the layer and can return its attention weights."""
    if kind not in _MADE:
        name, bases = f"Collaborative{kind.__name__}", (CollaborativeSelfAttention, kind)
        _MADE[kind] = type(name, bases, {"__module__": __name__})
    return _MADE[kind]


def _empty(kind: type[nn.Module]) -> nn.Module:
    made = _collaborative(kind)
    return made.__new__(made)


def _attend_eagerly(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    return attend_exactly(query, key, value, attention_mask, causal=False, scale=scaling, dropout_p=dropout)


def _layers(model: Any) -> list[Any]:
    """Return the layers to change; raise an error with the reason if one cannot be."""
    library = transformers_library("collaborative heads in pre-trained models")
    if not isinstance(model, library.PreTrainedModel):
        raise Unsupported(
            f"{type(model).__name__} is not a transformers model; pass a PreTrainedModel or an hsa LanguageModel"
        )
    if model.config._attn_implementation == NAME:
        raise InvalidInput(
            "model",
            got="a converted model",
            expected="a model with exact attention",
            fix="Call revert(model) before and convert(model) afterwards",
        )
    layers = attention_layers(model)
    for number, layer in enumerate(layers):
        reason = _reason_against(layer)
        if reason is not None:
            raise Unsupported(f"{type(model).__name__}, layer {number}: {type(layer).__name__} {reason}")
    return layers


def _reason_against(layer: Any) -> str | None:
    one_form = "so its logits are not one bilinear form per head"
    if isinstance(layer, CollaborativeSelfAttention):
        return "already has collaborative heads; load the original model to choose another shared_dim"
    arguments = set(inspect.signature(type(layer).forward).parameters)
    if "position_embeddings" in arguments or "rotary" in inspect.getsource(type(layer).forward):
        return f"rotates queries and keys by their positions, {one_form}"
    if any(getattr(layer, name, None) is not None for name in _NORMS):
        return f"normalises queries and keys, {one_form}"
    projections = [getattr(layer, name, None) for name in ("query", "key", "value")]
    if not all(isinstance(projection, nn.Linear) for projection in projections):
        held = ", ".join(name for name, _ in layer.named_children()) or "none"
        return f"has the parts {held} instead of linear layers named query, key and value"
    if is_causal(layer) or getattr(layer, "is_decoder", False):
        return "belongs to a decoder, whose cache holds keys per head; only encoders are supported"
    if not arguments <= _KNOWN:
        return f"needs more than hidden states and a mask: {', '.join(sorted(arguments - _KNOWN))}"
    if not hasattr(layer, "num_attention_heads") or not isinstance(getattr(layer, "dropout", None), nn.Dropout):
        return "does not store its number of heads and its dropout as BERT does"
    return None if _is_plain(layer) else f"does more than compare its projections, {one_form}"


@torch.no_grad()
def _is_plain(layer: Any) -> bool:
    """Return whether a layer computes softmax attention of its projections and nothing else, on random inputs."""
    weight = layer.query.weight
    x = torch.randn(1, 5, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    parts = (layer.query, layer.key, layer.value)
    q, k, v = (part(x).unflatten(-1, (layer.num_attention_heads, -1)).transpose(1, 2) for part in parts)
    expected = F.scaled_dot_product_attention(q, k, v, scale=layer.scaling).transpose(1, 2).flatten(2)
    training = layer.training
    layer.eval()
    try:
        actual = layer(x)[0]
    finally:
        layer.train(training)
    tolerance = 100 * torch.finfo(weight.dtype).eps * float(expected.abs().max())
    return actual.shape == expected.shape and bool((actual - expected).abs().max() <= tolerance)


@torch.no_grad()
def _moments(model: Any, layers: list[Any], inputs: Iterable[Mapping[str, Tensor]]) -> list[Tensor]:
    """Return the mean of x xᵀ, `[width + 1, width + 1]`, per layer; x are inputs except padding, with a one appended."""
    sums: list[Any] = [0] * len(layers)
    mask: Tensor | None = None

    def add(number: int, states: Tensor) -> None:
        rows = states.flatten(0, 1) if mask is None else states[mask.bool()]
        rows = F.pad(rows.double(), (0, 1), value=1.0)
        sums[number] = sums[number] + rows.T @ rows

    hooks = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, number=number: add(number, args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        for number, layer in enumerate(layers)
    ]
    training = model.training
    model.eval()
    try:
        for batch in inputs:
            mask = batch.get("attention_mask")
            model(**batch)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    if not isinstance(sums[0], Tensor):
        raise InvalidInput(
            "inputs", problem="empty", expected="at least one batch", fix="Omit `inputs` to fit the weights alone"
        )
    return [total / total[-1, -1] for total in sums]


def _linear(like: nn.Linear, weight: Tensor, bias: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], len(weight), device=like.weight.device, dtype=like.weight.dtype)
    with torch.no_grad():
        made.weight.copy_(weight)
        made.bias.copy_(bias)
    return made.requires_grad_(like.weight.requires_grad).train(like.training)
