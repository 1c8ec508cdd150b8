"""Caches of trees behind the cache interface of transformers: a converted layer's past, for `model.generate`.

transformers hands a layer's new keys to its cache and what that returns to the attention function, and nothing else. So the
keys that `CacheLayer.update` returns carry their cache layer with them: of a prompt the keys themselves, of later tokens a
placeholder of the right shape. The attention function finds the layer there and lets it attend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer

from hsa.attention.cache.clustered import ClusteredCache
from hsa.attention.cache.interface import Cache, Counted, Memory
from hsa.attention.cache.multiscale import MultiscaleCache
from hsa.attention.multiscale.cluster import KeyClusters
from hsa.errors import InvalidInput
from hsa.huggingface.attend import bias_of, count_step, is_counting, is_probing
from hsa.huggingface.sequences import Sequences
from hsa.huggingface.settings import LayerSettings

FEW = 16
"""New tokens up to which they are taken one by one; for more, trees are made anew from all keys."""
SHORT = 2**15
"""Prompts of up to so many tokens attend inside the cache where that is quicker."""
REWIND = 64
"""Tokens that can be taken back from layers that keep no leaves: what speculative decoding may guess in vain."""
Outputs = tuple[Tensor, Tensor | None]


def keeps_trees(settings: LayerSettings | None) -> bool:
    """Whether a causal layer with these settings has a cache of trees; the others make their trees anew in each step."""
    if settings is None or settings.operator != "multiscale" or isinstance(settings.sinks, str):
        return False
    if settings.hierarchy == "keys":
        return len(settings.branching) <= 2
    return settings.hierarchy == "windows" and settings.top_k == 0


class CacheLayer(CacheLayerMixin):
    """The past of one converted layer.

    Sequences are packed: each has the length that the mask gives it, and padding is nowhere. transformers counts padded
    positions, and so do the lengths that it is told.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, settings: LayerSettings):
        super().__init__()
        self.settings = settings
        self.tokens: Cache | None = None
        self.mask: Tensor | None = None  # [batch, seen] which positions hold tokens
        self.seen = 0
        self._waiting = 0  # positions that nobody has attended from yet

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self._waiting:
            raise InvalidInput(
                "past_key_values",
                given="a cache of a converted model, in layers that are not converted",
                expected="the model that it was made for",
                fix="start with a new cache after hsa.huggingface.convert or revert",
            )
        batch, heads, new, _ = key_states.shape
        if self.tokens is not None:
            self._check(key_states, value_states)
        self.lazy_initialization(key_states, value_states)
        self.seen, self._waiting = self.seen + new, new
        if self.tokens is None:
            keys, values = key_states, value_states
        else:
            # Whoever reads these instead of asking the layer shall notice.
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
        given = (len(keys), keys.shape[1], keys.shape[3], values.shape[3])
        wanted = (tokens.batch, tokens.kv_heads, tokens.head_dim, tokens.value_dim)
        if given != wanted:
            names = ("sequences", "key/value heads", "key dimensions", "value dimensions")
            i = next(i for i in range(4) if given[i] != wanted[i])
            raise InvalidInput(
                "past_key_values",
                given=f"a cache of {wanted[i]} {names[i]} for tokens of {given[i]}",
                expected="the cache of this batch and this model",
                fix="start with a new cache",
            )

    def attend(
        self,
        settings: LayerSettings | None,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sequences: Sequences,
        options: dict[str, Any],
        whole: Callable[[Tensor, Tensor, list[KeyClusters]], Outputs],
    ) -> Outputs:
        """What the attention function returns; `whole` is attention without a cache, which notes the order it found."""
        waiting, self._waiting = self._waiting, 0
        if settings != self.settings:
            raise InvalidInput(
                "past_key_values",
                given=f"a cache that was made for other settings of layer {layer}",
                expected="one of this conversion",
                fix="start with a new cache after hsa.huggingface.convert",
            )
        if self.tokens is None:
            if self._quicker(query, key, sequences, options):
                return self._first_quickly(query, key, value, sequences, options["scale"])
            return self._first(key, value, sequences, whole)
        if torch.is_grad_enabled() and query.requires_grad:
            raise InvalidInput(
                "past_key_values",
                given="a cache of trees, where gradients are asked for",
                expected="a pass without gradients",
                fix="use torch.no_grad(), or use_cache=False",
            )
        before = [all_ - new for all_, new in zip(sequences.keys.lengths, sequences.queries.lengths, strict=True)]
        if before != self.tokens.lengths:
            raise InvalidInput(
                "attention_mask",
                given=f"a mask that says {before[:5]} tokens are in the cache",
                expected=f"{self.tokens.lengths[:5]}, as there are: the mask of all positions, those in the cache included",
            )
        keys, values = key.hsa_new  # type: ignore[attr-defined]
        one_by_one = sequences.queries.full and not options["weights"] and not options["dropout_p"]
        if isinstance(self.tokens, ClusteredCache) and not (one_by_one and waiting <= FEW):
            return self._anew(keys, values, sequences, whole)
        if not one_by_one:
            raise InvalidInput(
                "past_key_values",
                given="padding among new tokens, weights or dropout, with a cache that keeps no leaves",
                expected="new tokens without padding, output_attentions=False, no dropout",
                fix="use_cache=False",
            )
        self.mask = sequences.mask
        counted = Counted() if is_counting() else None
        each = zip(query.unbind(2), keys.unbind(2), values.unbind(2), strict=True)
        out = [self._step(q, k, v, options["scale"], counted) for q, k, v in each]
        if counted is not None:
            count_step(layer, query, sequences, counted)
        return torch.stack(out, 1), None

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

    def _first(
        self,
        key: Tensor,
        value: Tensor,
        sequences: Sequences,
        whole: Callable[[Tensor, Tensor, list[KeyClusters]], Outputs],
    ) -> Outputs:
        """The prompts: attention as it is without a cache, then into the cache with them, in the order that it found."""
        found: list[KeyClusters] = []
        out = whole(key, value, found)
        self.mask = sequences.mask
        self.tokens = self._empty(key, value)
        self.tokens.begin(sequences.keys.lengths)
        k, v = (sequences.keys.pack(x.detach()) for x in (key, value))
        if isinstance(self.tokens, ClusteredCache):
            self.tokens.fill(0, k, v, clusters=found[0] if found else None)
        else:
            self.tokens.fill(0, k, v)
        return out

    def _quicker(self, query: Tensor, key: Tensor, sequences: Sequences, options: dict[str, Any]) -> bool:
        """Whether the prompts can attend inside the cache, which on a CPU saves most of the time."""
        watched = is_counting() or is_probing() or options["weights"] or options["dropout_p"]
        if watched or query.device.type != "cpu" or (torch.is_grad_enabled() and query.requires_grad):
            return False
        short = max(sequences.keys.lengths) <= SHORT
        return self.settings.hierarchy == "keys" and short and query.shape[2] == key.shape[2] and sequences.causal

    def _first_quickly(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float | None
    ) -> Outputs:
        self.mask = sequences.mask
        self.tokens = tokens = self._empty(key, value)
        assert isinstance(tokens, ClusteredCache)
        tokens.begin(sequences.keys.lengths)
        q, k, v = (sequences.keys.pack(x.detach().to(tokens.dtype)) for x in (query, key, value))
        out = tokens.attend_prompts(0, q, k, v, pooled_bias=bias_of(self.settings, q.device), scale=scale)
        return sequences.keys.unpack(out.to(query.dtype)).transpose(1, 2), None

    def _anew(
        self,
        keys: Tensor,
        values: Tensor,
        sequences: Sequences,
        whole: Callable[[Tensor, Tensor, list[KeyClusters]], Outputs],
    ) -> Outputs:
        """Many new tokens: all keys, in the order of time and with their padding, as if they had come at once."""
        assert isinstance(self.tokens, ClusteredCache)
        assert self.mask is not None
        both = []
        for kept, new in zip(self.tokens.leaves(0), (keys, values), strict=True):
            padded = new.new_zeros(*self.mask.shape, *kept.shape[1:])
            padded[self.mask] = kept.to(new.dtype)
            both.append(torch.cat([padded.transpose(1, 2), new], 2))
        return self._first(both[0], both[1], sequences, whole)

    def _empty(self, key: Tensor, value: Tensor) -> Cache:
        settings = self.settings
        sinks = settings.sinks or 0
        assert isinstance(sinks, int)
        shared: dict[str, Any] = {
            "layers": 1,
            "batch": len(key),
            "kv_heads": key.shape[1],
            "head_dim": key.shape[-1],
            "value_dim": value.shape[-1],
            "dtype": key.dtype,
            "device": key.device,
            "branching": settings.branching,
            "sinks": sinks,
        }
        if settings.hierarchy == "keys":
            return ClusteredCache(top_k=settings.top_k, beam=settings.beam, chunk=settings.chunk_size, **shared)
        return MultiscaleCache(near=settings.near, rewind=REWIND, **shared)

    def get_seq_length(self, *args: Any) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        new = query_length if isinstance(query_length, int) else len(query_length)  # before 5.3: positions
        return self.seen + new, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before

    def reset(self) -> None:
        self.tokens = self.mask = None
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
        """Negative: forget so many positions at the end. Positive: keep so many at the beginning."""
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
        """Stays where it is."""

    prefetch = offload

    def memory(self) -> Memory | None:
        return None if self.tokens is None else self.tokens.memory()

    def __repr__(self) -> str:
        return f"CacheLayer({self.tokens!r})"


def adopt(cache: Any, layers: Mapping[int, LayerSettings]) -> None:
    """Gives the layers of an empty `DynamicCache` that have trees a cache of trees, in place."""
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False) or not layers:
        return
    if getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:  # it makes its layers when they are needed
        while len(cache.layers) <= max(layers):
            cache.layers.append(DynamicLayer())
    for number, settings in layers.items():
        if number >= len(cache.layers):
            continue
        layer: Any = cache.layers[number]
        ours = isinstance(layer, CacheLayer)
        if (ours and layer.settings == settings) or not (ours or type(layer) is DynamicLayer):
            continue
        if layer.get_seq_length() == 0:
            cache.layers[number] = CacheLayer(settings)


def new_cache(model: Any) -> DynamicCache:
    """An empty cache for a converted decoder, such as `model.generate` makes by itself.

    For loops of one's own: `model(ids, past_key_values=cache)`.

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
    from hsa.huggingface.interface import caching_layers

    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    adopt(cache, caching_layers(model.modules()))
    return cache


def memory_of(cache: Any) -> Memory:
    """What a cache takes, all layers together; layers without trees keep every key and value."""
    found: Iterable[Memory | None] = [_memory(layer) for layer in cache.layers]
    each = [memory for memory in found if memory is not None]
    kept = any(memory.leaves_kept for memory in each)
    return Memory(sum(m.bytes for m in each), sum(m.flat_bytes for m in each), kept)


def _memory(layer: Any) -> Memory | None:
    if isinstance(layer, CacheLayer):
        return layer.memory()
    if not isinstance(layer.keys, Tensor) or not isinstance(layer.values, Tensor):
        return None
    size = layer.keys.nbytes + layer.values.nbytes
    return Memory(size, size, leaves_kept=True)
