"""`LayerPlan`: the one place that decides how an attention layer runs in a forward pass.

Without a cache of trees (`LayerPlan.path`):

- "exact": PyTorch's attention, in layers that are not converted and for sequences too short for a tree to save anything;
- "tree": a tree over the keys, made in this pass;
- "split": both, each sequence of the batch as its length demands.

With one (`LayerPlan.cache_path`), in causal layers:

- "inside": a prompt attends while it enters the cache;
- "whole": attention as without a cache, over all keys, which then enter the cache;
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
from hsa.huggingface.layers import is_causal, is_sliding
from hsa.huggingface.observe import is_observed
from hsa.huggingface.sequences import Sequences
from hsa.huggingface.settings import LayerSettings, ModelSettings

if TYPE_CHECKING:
    from hsa.huggingface.hooks import Conversion

AttentionPath: TypeAlias = Literal["exact", "tree", "split"]
CachePath: TypeAlias = Literal["inside", "whole", "steps"]
FEW = 16
"""New tokens up to which a cache of clustered keys takes them one by one; for more, its trees are made anew."""
LONGEST_INSIDE = 2**15
"""Longest prompt that attends inside the cache: beyond, a whole pass is faster."""
_UNKNOWN_TERMS = ("position_bias", "softcap", "s_aux", "sliding_window")


@dataclass(frozen=True)
class Call:
    """One call of the attention function: what a layer hands over."""

    module: Any
    query: Tensor  # [batch, heads, queries, dim]
    key: Tensor  # [batch, key/value heads, keys, dim]
    value: Tensor
    scale: float | None = None
    dropout_p: float = 0.0
    weights: bool = False  # are asked for
    others: Mapping[str, Any] = field(default_factory=dict)  # for PyTorch's attention

    @property
    def needs_gradient(self) -> bool:
        return torch.is_grad_enabled() and self.query.requires_grad

    def part(self, rows: list[int]) -> Call:
        """Select some sequences of the batch."""
        return replace(self, query=self.query[rows], key=self.key[rows], value=self.value[rows])


class LayerPlan:
    """The plan of one attention layer. `convert` hangs one on every attention module of a model, as `hsa_plan`.

    Args:
        number: index of the layer in the model; -1 if the layer does not know it.
        settings: None for exact attention.
        conversion: state that all layers of a converted model share.
    """

    def __init__(self, number: int, settings: LayerSettings | None, conversion: Conversion | None = None):
        self.number = number
        self.settings = settings
        self.conversion = conversion

    @classmethod
    def of(cls, module: Any) -> LayerPlan:
        """Return the plan of a module; for a model that was only loaded with "hsa" attention, make it from its config."""
        plan = getattr(module, "hsa_plan", None)
        if plan is None:
            plan = cls(*_read_config(module))
            if plan.settings is not None and is_causal(module):
                plan.settings.check_causal(plan.number)
            module.hsa_plan = plan
        return plan

    @property
    def caches_trees(self) -> bool:
        """Whether the layer, if it is causal, has a cache of trees; others make their trees anew in each step."""
        settings = self.settings
        if settings is None or isinstance(settings.sinks, str):
            return False
        if settings.kind == "clustered":
            return len(settings.branching) <= 2
        return settings.kind == "multiscale" and settings.tree == "windows" and settings.top_k == 0

    def path(self, call: Call, sequences: Sequences) -> AttentionPath:
        """Decide how a pass over whole sequences runs; refuse what no tree can do."""
        if self.settings is None:
            return "exact"
        self.check_terms(call)
        short = self.short(sequences)
        if sequences.causal and not all(short):
            self.settings.check_causal(self.number)
        return "exact" if all(short) else "split" if any(short) else "tree"

    def short(self, sequences: Sequences) -> list[bool]:
        """Whether each sequence attends exactly, whoever shares its batch."""
        settings = self.settings
        assert settings is not None
        return [exact_is_cheaper(settings, length, causal=sequences.causal) for length in sequences.keys.lengths]

    def cache_path(self, call: Call, sequences: Sequences, *, empty: bool) -> CachePath:
        """Decide how a pass with a cache of trees runs; `empty`: the cache holds nothing yet."""
        assert self.settings is not None
        self.check_terms(call)
        clustered = self.settings.kind == "clustered"
        plain = not call.weights and not call.dropout_p
        if empty:
            whole_prompt = call.query.shape[2] == call.key.shape[2] and sequences.causal
            on_cpu = call.query.device.type == "cpu"  # where attending inside saves most of the time
            short = max(sequences.keys.lengths) <= LONGEST_INSIDE
            silent = plain and not is_observed() and not call.needs_gradient
            return "inside" if clustered and whole_prompt and on_cpu and short and silent else "whole"
        one_by_one = plain and sequences.queries.full
        if clustered and not (one_by_one and call.query.shape[2] <= FEW):
            return "whole"
        if not one_by_one:
            raise InvalidInput(
                "past_key_values",
                given="padding among new tokens, weights or dropout, with a cache that keeps no leaves",
                expected="new tokens without padding, output_attentions=False, no dropout",
                fix="use_cache=False",
            )
        return "steps"

    def check_terms(self, call: Call) -> None:
        """Refuse terms that change the weights of attention, which no tree takes into account."""
        for name in _UNKNOWN_TERMS:
            value = call.others.get(name)
            if value is None or (name == "sliding_window" and value >= call.key.shape[2]):
                continue
            raise InvalidInput(
                f"layer {self.number} ({type(call.module).__name__})",
                given=f"attention with {name}",
                expected="plain softmax attention",
                fix=f"leave this layer out: convert(model, layers=…) without {self.number}",
            )


def exact_is_cheaper(settings: LayerSettings, length: int, *, causal: bool) -> bool:
    """Whether exact attention takes no more operations than a tree for a sequence of `length` tokens.

    Counts, per query and in entries of attention: the families that are exact, one entry per node above them, half an entry
    for each family that is scored, and the clustering of keys. In causal layers only where nothing would be pooled: what a
    token sees must not depend on how long the text becomes. Trees that were asked for by their shape are always used.
    """
    clustered = settings.kind == "clustered"
    if not clustered and (settings.kind, settings.tree) != ("multiscale", "windows"):
        return False
    size = settings.branching[0]
    families = -(-length // size)
    if causal:
        in_first_chunk = clustered and length <= settings.chunk_size
        return in_first_chunk or (families <= settings.top_k and settings.sinks != "special")
    neighbours = 0 if clustered else (1 + 2 * settings.near) * size
    levels = math.log(families, settings.branching[-1])
    scored = families / 2 if settings.top_k else 0.0
    clustering = operations_per_key(levels) / 4 if clustered else 0.0
    return neighbours + settings.top_k * size + levels + scored + clustering >= length


def layers_that_cache_trees(modules: Iterable[Any]) -> dict[int, LayerSettings]:
    """Return the settings of causal layers that have a cache of trees, by their index in the model's cache."""
    layers = {}
    for module in modules:
        plan, index = getattr(module, "hsa_plan", None), getattr(module, "layer_idx", None)
        if plan is not None and index is not None and plan.caches_trees and is_causal(module):
            layers[index] = plan.settings
    return layers


def _read_config(module: Any) -> tuple[int, LayerSettings | None]:
    """Return the number and settings of a layer, as the config of its model has them."""
    index = getattr(module, "layer_idx", None)
    number = -1 if index is None else index
    written = ModelSettings.of(module.config)
    if getattr(module, "is_decoder", False) and getattr(module.config, "is_encoder_decoder", False):
        return number, None  # shares its config with the encoder, which may be converted
    if written is None:  # every layer that sees the whole sequence, as `convert` does by default
        return number, None if is_sliding(module) else LayerSettings()
    if index is None:
        raise InvalidInput(
            "attn_implementation",
            given=f"'hsa' for {type(module).__name__}, whose layers do not know their numbers",
            expected="a model loaded as usual",
            fix="call hsa.huggingface.convert(model), which numbers them, after loading",
        )
    written.check_numbers(getattr(module.config, "num_hidden_layers", None))
    return number, written.layers.get(index)
