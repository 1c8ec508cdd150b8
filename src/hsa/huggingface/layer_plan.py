"""`LayerPlan`: the decision how an attention layer runs in a forward pass.

Without a cache of trees (`LayerPlan.path`):

- "exact": PyTorch's attention, in layers that are not converted and for sequences too short for a tree to save operations;
- "tree": attention over a tree of the keys, built in this pass;
- "split": "exact" for the short sequences of a batch and "tree" for the others.

With a cache of trees (`LayerPlan.cache_path`), in causal layers:

- "inside": new tokens attend while they enter the cache;
- "whole": attention over all keys as without a cache, beside which the keys enter the cache;
- "steps": new tokens attend to the cache one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from hsa.attention.multiscale.cluster import operations_per_key
from hsa.errors import InvalidInput
from hsa.huggingface.layers import is_causal, why_not_convert
from hsa.huggingface.observe import is_observed
from hsa.huggingface.sequences import Sequences
from hsa.huggingface.settings import LayerSettings, ModelSettings

if TYPE_CHECKING:
    from hsa.huggingface.hooks import Conversion

AttentionPath: TypeAlias = Literal["exact", "tree", "split"]
CachePath: TypeAlias = Literal["inside", "whole", "steps"]
_UNKNOWN_TERMS = ("position_bias", "softcap", "s_aux", "sliding_window")


@dataclass(frozen=True)
class Call:
    """Arguments of one call of the attention function."""

    module: Any
    query: Tensor  # [batch, heads, queries, dim]
    key: Tensor  # [batch, key/value heads, keys, dim]
    value: Tensor
    scale: float | None = None
    dropout_p: float = 0.0
    weights: bool = False  # whether to return them
    others: Mapping[str, Any] = field(default_factory=dict)  # further arguments of PyTorch's attention

    @property
    def needs_gradient(self) -> bool:
        return torch.is_grad_enabled() and self.query.requires_grad

    def part(self, rows: list[int]) -> Call:
        """Return the call for some sequences of the batch."""
        return replace(self, query=self.query[rows], key=self.key[rows], value=self.value[rows])


class LayerPlan:
    """Plan of one attention layer. `convert` stores one in each attention module of a model, as `hsa_plan`.

    Args:
        number: Number of the layer in the model; -1 if the module does not know it.
        settings: Settings of the layer; None for exact attention.
        conversion: State that all layers of a converted model share.
    """

    def __init__(self, number: int, settings: LayerSettings | None, conversion: Conversion | None = None):
        self.number = number
        self.settings = settings
        self.conversion = conversion

    @classmethod
    def of(cls, module: Any) -> LayerPlan:
        """Return the plan of a module. For a model loaded with `attn_implementation="hsa"`, build it from the config."""
        plan = getattr(module, "hsa_plan", None)
        if plan is None:
            plan = cls(*_read_config(module))
            if plan.settings is not None:
                plan.settings.check(plan.number, causal=is_causal(module))
            module.hsa_plan = plan
        return plan

    @property
    def caches_trees(self) -> bool:
        """Whether the layer, if it is causal, has a cache of trees. Other layers rebuild their trees in each step."""
        settings = self.settings
        if settings is None or isinstance(settings.sinks, str):
            return False
        return settings.uses_tiles(causal=True) or (settings.kind, settings.tree) == ("multiscale", "windows")

    def path(self, call: Call, sequences: Sequences) -> AttentionPath:
        """Return the path of a pass without a cache of trees. Refuse attention that trees cannot compute."""
        if self.settings is None:
            return "exact"
        self.check_terms(call)
        short = self.short(sequences)
        if not all(short):
            self.settings.check(self.number, causal=sequences.causal)
        return "exact" if all(short) else "split" if any(short) else "tree"

    def short(self, sequences: Sequences) -> list[bool]:
        """Return for each sequence whether it attends exactly, regardless of the other sequences in the batch."""
        settings = self.settings
        assert settings is not None
        return [exact_is_cheaper(settings, length, causal=sequences.causal) for length in sequences.keys.lengths]

    def cache_path(self, call: Call, sequences: Sequences, *, empty: bool) -> CachePath:
        """Return the path of a pass with a cache of trees; `empty` tells whether the cache holds no tokens yet."""
        assert self.settings is not None
        self.check_terms(call)
        plain = not call.weights and not call.dropout_p
        one_by_one = plain and sequences.queries.full and not empty
        if self.settings.uses_tiles(causal=True):
            if one_by_one and call.query.shape[2] == 1:
                return "steps"
            inside = plain and sequences.causal and not is_observed() and not call.needs_gradient
            return "inside" if inside else "whole"
        if not empty and not one_by_one:
            raise InvalidInput(
                "past_key_values",
                expected="new tokens without padding, output_attentions=False and no dropout, as the cache keeps no leaves",
                got="new tokens with padding, output_attentions=True or dropout",
                fix="Pass use_cache=False",
            )
        return "whole" if empty else "steps"

    def check_terms(self, call: Call) -> None:
        """Refuse terms that change the attention weights, which trees do not support."""
        for name in _UNKNOWN_TERMS:
            value = call.others.get(name)
            if value is None or (name == "sliding_window" and value >= call.key.shape[2]):
                continue
            raise InvalidInput(
                f"layer {self.number} ({type(call.module).__name__})",
                expected="plain softmax attention",
                got=f"attention with {name}",
                fix=f"Leave layer {self.number} out of layers=… in convert",
            )


def exact_is_cheaper(settings: LayerSettings, length: int, *, causal: bool) -> bool:
    """Return whether exact attention takes no more operations than a tree for a sequence of `length` tokens.

    The count, per query and in entries of attention, includes the keys of exact families, one entry per pooled node, half an
    entry for each scored family, and the clustering of keys. Causal layers and layers with a threshold are exact only where
    nothing would be pooled: in causal layers, the output of a token must not depend on the length of the text after it. That
    is up to `exact_until` tokens, or a chunk.
    Sentence trees, trees from a function and the paper's operator are always used.
    """
    clustered = settings.kind == "clustered"
    if not clustered and (settings.kind, settings.tree) != ("multiscale", "windows"):
        return False
    if causal or settings.uses_tiles(causal):
        return settings.uses_tiles(causal) and length <= settings.exact_length(causal)
    settings = settings.resolved(causal)
    assert settings.branching is not None
    assert settings.top_k is not None
    size = settings.branching[0]
    families = -(-length // size)
    neighbours = 0 if clustered else (1 + 2 * settings.near) * size
    levels = math.log(families, settings.branching[-1])
    scored = families / 2 if settings.top_k else 0.0
    clustering = operations_per_key(levels) / 4 if clustered else 0.0
    return neighbours + settings.top_k * size + levels + scored + clustering >= length


def layers_that_cache_trees(modules: Iterable[Any]) -> dict[int, LayerSettings]:
    """Return the settings of the causal layers that have a cache of trees, by their index in the model's cache."""
    layers = {}
    for module in modules:
        plan, index = getattr(module, "hsa_plan", None), getattr(module, "layer_idx", None)
        if plan is not None and index is not None and plan.caches_trees and is_causal(module):
            layers[index] = plan.settings
    return layers


def _read_config(module: Any) -> tuple[int, LayerSettings | None]:
    """Return the number of a layer and its settings from the config of its model."""
    index = getattr(module, "layer_idx", None)
    number = -1 if index is None else index
    saved = ModelSettings.of(module.config)
    if getattr(module, "is_decoder", False) and getattr(module.config, "is_encoder_decoder", False):
        return number, None  # the config's settings are the encoder's
    if saved is None:  # the default of `convert`
        return number, None if why_not_convert(module) else LayerSettings()
    if index is None:
        raise InvalidInput(
            "attn_implementation",
            expected="the default",
            got=f"'hsa' for {type(module).__name__}, which does not know its layer number",
            fix="Call hsa.huggingface.convert(model) after loading, which numbers the layers",
        )
    saved.check_numbers(getattr(module.config, "num_hidden_layers", None))
    return number, saved.layers.get(index)
