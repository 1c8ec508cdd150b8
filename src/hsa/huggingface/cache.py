"""Caches of trees behind the cache interface of transformers, for `model.generate`.

transformers passes a layer's new keys and values to its cache, and only the tensors that the cache returns to the attention
function. So the keys that `CacheLayer.update` returns carry their cache layer as an attribute: for a prompt the keys
themselves, for later tokens a placeholder of the right shape. The attention function reads the cache layer from there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer

from hsa.attention.cache.clustered import ClusteredCache
from hsa.attention.cache.interface import Cache, Counted, Memory
from hsa.attention.cache.multiscale import MultiscaleCache
from hsa.attention.cache.step_memory import StepMemory
from hsa.attention.checks import check_count
from hsa.errors import InvalidInput
from hsa.huggingface.attend import Output, attend, attend_tree, bias_of
from hsa.huggingface.fixed_layer import FixedLayer
from hsa.huggingface.layer_plan import Call, LayerPlan, layers_that_cache_trees
from hsa.huggingface.observe import COUNTER, count_steps
from hsa.huggingface.passes import IN_STEP
from hsa.huggingface.sequences import Sequences
from hsa.huggingface.settings import LayerSettings

REWIND = 64
"""Maximum number of tokens to remove from a layer that keeps no leaves. Speculative decoding rejects fewer."""
MAX_LENGTH: ContextVar[int | None] = ContextVar("hsa_max_length", default=None)
"""Maximum length of the caches that forward passes create; None if they grow."""


class CacheLayer(CacheLayerMixin):
    """Cache of one converted layer.

    Sequences are packed, without padding; their lengths come from the mask. The lengths reported to transformers include
    padding.

    Args:
        settings: Settings of the layer.
        step_memory: Work memory of steps, which the layers of a model share.
        max_length: Maximum number of positions, whose memory is allocated at once; None to grow.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, settings: LayerSettings, step_memory: StepMemory, max_length: int | None = None):
        super().__init__()
        self.settings, self.step_memory, self.max_length = settings, step_memory, max_length
        self.tokens: Cache | None = None
        self.seen = 0
        self._mask: Tensor | None = None
        self._steps = 0  # number of decoding steps that the mask does not contain
        self._waiting = 0  # number of new positions that have not attended yet

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    @property
    def mask(self) -> Tensor | None:
        """`[batch, seen]` true where there is a token."""
        if self._mask is not None and self._steps:
            self._mask = F.pad(self._mask, (0, self._steps), value=True)
        self._steps = 0
        return self._mask

    @mask.setter
    def mask(self, mask: Tensor | None) -> None:
        self._mask, self._steps = mask, 0

    def count_step(self) -> None:
        """Count the token of a `DecodingStep`."""
        self.seen, self._steps = self.seen + 1, self._steps + 1

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if IN_STEP.get():
            key_states.hsa_cache = self  # type: ignore[attr-defined]
            return key_states, value_states
        if self._waiting:
            raise InvalidInput(
                "past_key_values",
                expected="a cache of this model",
                got="a cache of a converted model for layers that are not converted",
                fix="Create a new cache after hsa.huggingface.convert or revert",
            )
        batch, heads, new, _ = key_states.shape
        if self.tokens is not None:
            self._check(key_states, value_states)
        self.lazy_initialization(key_states, value_states)
        self.seen, self._waiting = self.seen + new, new
        if self.tokens is None:
            keys, values = key_states, value_states
        else:
            # Placeholders of NaN, so that attention that reads them by mistake fails visibly.
            keys, values = (
                x.new_full((), math.nan).expand(batch, heads, self.seen, x.shape[-1])
                for x in (key_states, value_states)
            )
            keys.hsa_new = key_states, value_states  # type: ignore[attr-defined]
        keys.hsa_cache = self  # type: ignore[attr-defined]
        return keys, values

    def _check(self, keys: Tensor, values: Tensor) -> None:
        tokens = self.tokens
        assert tokens is not None
        new = (len(keys), keys.shape[1], keys.shape[3], values.shape[3])
        cached = (tokens.batch, tokens.kv_heads, tokens.head_dim, tokens.value_dim)
        if new != cached:
            names = ("sequences", "key/value heads", "key dimensions", "value dimensions")
            i = next(i for i in range(4) if new[i] != cached[i])
            raise InvalidInput(
                "past_key_values",
                expected=f"a cache whose number of {names[i]} is {new[i]}, as in the new tokens",
                got=f"a cache with {cached[i]}",
                fix="Create a new cache for each batch and model",
            )

    def attend(self, plan: LayerPlan, call: Call, sequences: Sequences) -> Output:
        """Attend with the new tokens that `update` received, along the path of the layer's plan, and store them."""
        if plan.settings != self.settings:
            raise InvalidInput(
                "past_key_values",
                expected=f"a cache with the settings of layer {plan.number}",
                got="one with other settings",
                fix="Create a new cache after hsa.huggingface.convert",
            )
        if self.tokens is not None:
            self._check_continuation(call, sequences, self.tokens)
        self._waiting = 0
        path = plan.cache_path(call, sequences, empty=self.tokens is None)
        if path == "inside":
            return self._attend_inside(call, sequences)
        if path == "whole":
            return self._attend_whole(plan, call, sequences)
        return self._attend_steps(plan, call, sequences)

    def _check_continuation(self, call: Call, sequences: Sequences, tokens: Cache) -> None:
        if call.needs_gradient:
            raise InvalidInput(
                "past_key_values",
                expected="a forward pass without gradients",
                got="a cache of trees in a pass that needs gradients",
                fix="Use torch.no_grad(), or pass use_cache=False",
            )
        before = [keys - new for keys, new in zip(sequences.keys.lengths, sequences.queries.lengths, strict=True)]
        if before != tokens.lengths:
            raise InvalidInput(
                "attention_mask",
                expected=f"a mask of all positions, that includes the {tokens.lengths[:5]} tokens in the cache",
                got=f"a mask that includes {before[:5]}",
            )

    def _attend_inside(self, call: Call, sequences: Sequences) -> Output:
        """Store the new tokens while they attend."""
        key, value = self._new_tokens(call)
        self.mask = sequences.mask
        if self.tokens is None:
            self.tokens = self._empty(key, value)
        tokens, rows = self.tokens, sequences.queries
        assert isinstance(tokens, ClusteredCache)
        tokens.extend(rows.lengths)
        q, k, v = (rows.pack(x.detach().to(tokens.dtype)) for x in (call.query, key, value))
        out = tokens.attend_prompts(0, q, k, v, pooled_bias=bias_of(self.settings, q.device), scale=call.scale)
        return Output(rows.unpack(out.to(call.query.dtype)).transpose(1, 2))

    def _attend_whole(self, plan: LayerPlan, call: Call, sequences: Sequences) -> Output:
        """Attend as without a cache, and store the new tokens."""
        if self.tokens is not None:
            assert isinstance(self.tokens, ClusteredCache)
            key, value = self._all_tokens(call)
            out = attend_tree(plan, replace(call, key=key, value=value), sequences, self.tokens.opened(0), keep=True)
            self._attend_inside(call, sequences)
            return out
        # Not "split": the cache needs the selection of the whole batch.
        run = attend_tree if plan.path(call, sequences) == "split" else attend
        out = run(plan, call, sequences, keep=True)
        self.mask = sequences.mask
        self.tokens = self._empty(call.key, call.value)
        self.tokens.begin(sequences.keys.lengths)
        k, v = (sequences.keys.pack(x.detach()) for x in (call.key, call.value))
        if isinstance(self.tokens, ClusteredCache):
            nothing = torch.zeros(*call.query.shape[:2], 0, dtype=torch.bool, device=k.device)
            self.tokens.fill(0, k, v, keys=out.keys, opened=out.selection or nothing)
        else:
            self.tokens.fill(0, k, v)
        return out

    @staticmethod
    def _new_tokens(call: Call) -> tuple[Tensor, Tensor]:
        """Return the keys and values that `update` received."""
        return getattr(call.key, "hsa_new", (call.key, call.value))

    def _all_tokens(self, call: Call) -> list[Tensor]:
        """Return all keys and values in their original order, with padding."""
        assert isinstance(self.tokens, ClusteredCache)
        assert self.mask is not None
        both = []
        for kept, new in zip(self.tokens.leaves(0), self._new_tokens(call), strict=True):
            padded = new.new_zeros(*self.mask.shape, *kept.shape[1:])
            padded[self.mask] = kept.to(new.dtype)
            both.append(torch.cat([padded.transpose(1, 2), new], 2))
        return both

    def _attend_steps(self, plan: LayerPlan, call: Call, sequences: Sequences) -> Output:
        self.mask = sequences.mask
        counted = Counted() if COUNTER.get() is not None else None
        keys, values = self._new_tokens(call)
        each = zip(call.query.unbind(2), keys.unbind(2), values.unbind(2), strict=True)
        out = [self._step(q, k, v, call.scale, counted) for q, k, v in each]
        if counted is not None:
            count_steps(plan.number, call.query, sequences, counted)
        return Output(torch.stack(out, 1))

    def _step(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, counted: Counted | None) -> Tensor:
        tokens = self.tokens
        assert tokens is not None
        new = [x.to(tokens.dtype) for x in (q, k, v)]
        options: dict[str, Any] = {"pooled_bias": bias_of(self.settings, q.device), "scale": scale}
        tokens.append()
        if isinstance(tokens, ClusteredCache):
            out = tokens.attend(0, *new, **options, counted=counted)
        else:
            assert isinstance(tokens, MultiscaleCache)
            out = tokens.attend(0, *new, **options)
            if counted is not None:
                counted.entries += int((tokens.bias > -math.inf).sum()) * q.shape[1]
        return out.to(q.dtype)

    def step(self, call: Call) -> Tensor:
        """Store one token of a `DecodingStep`, and return its attention `[batch, 1, heads, dim]`."""
        return self._step(call.query[:, :, 0], call.key[:, :, 0], call.value[:, :, 0], call.scale, None)[:, None]

    def _empty(self, key: Tensor, value: Tensor) -> Cache:
        settings = self.settings.resolved(causal=True)
        shared: dict[str, Any] = {
            "layers": 1,
            "batch": len(key),
            "kv_heads": key.shape[1],
            "head_dim": key.shape[-1],
            "value_dim": value.shape[-1],
            "dtype": key.dtype,
            "device": key.device,
            "branching": settings.branching,
            **({} if self.max_length is None else {"max_length": self.max_length}),
        }
        if settings.uses_tiles(causal=True):
            shared |= {"threshold": settings.threshold, "top_k": settings.top_k, "tile": settings.tile}
            shared |= {"exact_until": settings.exact_until, "step_memory": self.step_memory}
            return ClusteredCache(windows=settings.kind == "multiscale", **shared)
        sinks = settings.sinks or 0
        assert isinstance(sinks, int)
        return MultiscaleCache(near=settings.near, rewind=REWIND, sinks=sinks, **shared)

    def get_seq_length(self, *args: Any) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        new = query_length if isinstance(query_length, int) else len(query_length)  # before transformers 5.3: positions
        return self.seen + new, 0

    def get_max_length(self) -> int:
        return -1 if self.max_length is None else self.max_length

    get_max_cache_shape = get_max_length  # former name

    def reset(self) -> None:
        self.tokens = None
        self.mask = None
        self.seen = self._waiting = 0
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.tokens is not None and self.mask is not None:
            index = beam_idx.to(self.mask.device)
            self.tokens.reorder(index)
            self.mask = self.mask[index]

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.tokens is not None:
            self.reorder_cache(torch.arange(self.tokens.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.tokens is not None:
            self.reorder_cache(torch.arange(self.tokens.batch)[indices.cpu()])

    def crop(self, tokens_to_remove: int) -> None:
        """Remove positions at the end: `-tokens_to_remove` of them if negative, all but the first ones if positive."""
        left = self.seen + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, self.seen)
        if self.tokens is None or self.mask is None or left == self.seen:
            return
        if left <= 0:
            self.reset()
            return
        mask = self.mask[:, :left]
        self.tokens.crop(mask.sum(1).tolist())
        self.seen, self.mask = left, mask

    def offload(self) -> None:
        """Do nothing, as trees stay on their device."""

    prefetch = offload

    def memory(self) -> Memory | None:
        """Return the memory of the layer, without the work memory that layers share."""
        if self.tokens is None:
            return None
        memory = self.tokens.memory()
        shared = self.step_memory.nbytes if isinstance(self.tokens, ClusteredCache) else 0
        return replace(memory, bytes=memory.bytes - shared)

    def __repr__(self) -> str:
        return f"CacheLayer({self.tokens!r})"


def cache_trees(cache: Any, layers: Mapping[int, LayerSettings], max_length: int | None = None) -> None:
    """Replace the empty layers of a `DynamicCache` that belong to converted layers by caches of trees, in place."""
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False) or not layers:
        return
    if getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:  # it creates its layers on demand
        while len(cache.layers) <= max(layers):
            cache.layers.append(DynamicLayer())
    step_memory = StepMemory()
    for number, settings in layers.items():
        if number >= len(cache.layers):
            continue
        layer: Any = cache.layers[number]
        ours = isinstance(layer, CacheLayer)
        if (ours and layer.settings == settings) or not (ours or type(layer) is DynamicLayer):
            continue
        if layer.get_seq_length() == 0:
            cache.layers[number] = CacheLayer(settings, step_memory, max_length)


def new_cache(model: Any, max_length: int | None = None) -> DynamicCache:
    """Return an empty cache for a converted decoder, to pass as `past_key_values` in a loop of your own.

    `model.generate` creates its own.

    Args:
        model: Converted decoder.
        max_length: Maximum number of tokens per sequence, with padding, whose memory is allocated at once, as
            `DecodingStep` needs it. By default the cache grows.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=8, vocab_size=60)
    >>> model = LlamaForCausalLM(config).eval()
    >>> import hsa.huggingface
    >>> cache = new_cache(hsa.huggingface.convert(model))
    >>> with torch.no_grad():
    ...     out = model(torch.arange(3, 50)[None], past_key_values=cache)
    ...     out = model(torch.tensor([[5]]), past_key_values=cache)
    >>> cache.get_seq_length()
    48
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    if max_length is not None:
        max_length = check_count("max_length", max_length, "a positive number of tokens, or None", 1)
    cache_trees(cache, layers_that_cache_trees(model.modules()), max_length)
    return cache


def memory_of(cache: Any) -> Memory:
    """Return the memory of all layers of a cache. Layers without trees keep every key and value.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=8, vocab_size=60)
    >>> model = LlamaForCausalLM(config).eval()
    >>> with torch.no_grad():
    ...     out = model(torch.arange(3, 50)[None])
    >>> memory_of(out.past_key_values).bytes  # 2 layers × 47 tokens × 32 × (key and value) × 4 bytes
    24064
    """
    each = [memory for memory in map(_memory, cache.layers) if memory is not None]
    kept = any(memory.leaves_kept for memory in each)
    shared = {layer.step_memory for layer in cache.layers if isinstance(layer, CacheLayer)}
    total = sum(m.bytes for m in each) + sum(memory.nbytes for memory in shared)
    return Memory(total, sum(m.flat_bytes for m in each), kept)


def _memory(layer: Any) -> Memory | None:
    if isinstance(layer, CacheLayer):
        return layer.memory()
    if isinstance(layer, FixedLayer):
        used = layer.k[:, :, : layer.seen].nbytes + layer.v[:, :, : layer.seen].nbytes
        return Memory(layer.k.nbytes + layer.v.nbytes, used, leaves_kept=True)
    if not isinstance(layer.keys, Tensor) or not isinstance(layer.values, Tensor):
        return None
    size = layer.keys.nbytes + layer.values.nbytes
    return Memory(size, size, leaves_kept=True)
