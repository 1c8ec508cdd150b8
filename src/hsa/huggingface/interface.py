"""`attn_implementation="hsa"`: the two functions that transformers calls, and how they are registered.

The mask function runs once per forward pass and returns a `[batch, keys]` mask, to which the `Sequences` of the pass are
bound; the attention function runs once per layer and finds them there. A mask that is kept for later, as gradient
checkpointing does, keeps its `Sequences`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hsa.attention.multiscale.cluster import KeyClusters
from hsa.errors import InvalidInput
from hsa.huggingface.attend import attend, attend_exactly, count_exact, count_mask, exact_is_cheaper
from hsa.huggingface.layers import is_causal, is_cross, is_sliding
from hsa.huggingface.loading import transformers_library
from hsa.huggingface.sequences import Sequences
from hsa.huggingface.settings import LayerSettings, Settings
from hsa.huggingface.vocabulary import Vocabulary

NAME = "hsa"
_PURPOSE = "hierarchical attention in pre-trained models"
_CURRENT: ContextVar[Pass | None] = ContextVar("hsa_pass", default=None)
_UNKNOWN_TERMS = ("position_bias", "softcap", "s_aux", "sliding_window")
_UNKNOWN_TO_TORCH = ("softcap", "s_aux")


class _Bindings:
    """`Sequences` by the memory of their mask, for as long as that lives: autograd may hand a mask back as another object.

    A `Sequences` must not hold its mask, which would never go away then.
    """

    def __init__(self) -> None:
        self._found: dict[Any, tuple[StorageWeakRef, int | None, Sequences]] = {}

    def __len__(self) -> int:
        self._forget()
        return len(self._found)

    def get(self, mask: Tensor) -> Sequences | None:
        _, version, sequences = self._found.get(self._key(mask), (None, None, None))
        return sequences if version == _version(mask) else None  # else it has been written to

    def bind(self, mask: Tensor, sequences: Sequences) -> None:
        self._forget()
        self._found[self._key(mask)] = StorageWeakRef(mask.untyped_storage()), _version(mask), sequences

    def _forget(self) -> None:
        for key, (memory, _, _) in list(self._found.items()):
            if memory.expired():
                self._found.pop(key, None)

    @staticmethod
    def _key(mask: Tensor) -> Any:
        return mask.untyped_storage()._cdata, mask.storage_offset(), mask.shape, mask.stride(), mask.dtype


def _version(mask: Tensor) -> int | None:
    return None if mask.is_inference() else mask._version


_BOUND = _Bindings()


@dataclass(frozen=True)
class Pass:
    """A forward pass of a converted model: what hooks saw of its arguments."""

    ids: Tensor | None
    vocabulary: Vocabulary
    outer: Pass | None


class Conversion:
    """What the layers of a converted model share: what its ids mean, and how to undo it all.

    Its hooks note the token ids of every forward pass, if a layer needs them, and put trees into the empty cache of a pass.
    They are methods, so that copies of a model, and pickled ones, listen to themselves.
    """

    def __init__(self, before: str | None):
        self.before = before  # the model's attention implementation
        self.vocabulary = Vocabulary()
        self.caching: Mapping[int, LayerSettings] = {}  # by number in the model's cache
        self._hooks: list[Any] = []

    def listen(self, models: Iterable[Any]) -> None:
        for model in models:
            self._hooks.append(model.register_forward_pre_hook(self._begin, with_kwargs=True))
            self._hooks.append(model.register_forward_hook(self._end, always_call=True))

    def keep_trees(self, models: Iterable[Any], layers: Mapping[int, LayerSettings]) -> None:
        self.caching = layers
        for model in models:
            self._hooks.append(model.register_forward_pre_hook(self._adopt, with_kwargs=True))

    def leave(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @torch.compiler.disable
    def _adopt(self, module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        cache = options.get("past_key_values")
        if cache is not None and not torch.is_grad_enabled():  # what comes out of a cache of trees has no gradient
            from hsa.huggingface.cache import adopt

            adopt(cache, self.caching)

    @torch.compiler.disable
    def _begin(self, module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        outer = _CURRENT.get()
        ids = options.get("input_ids", arguments[0] if arguments else None)
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
            ids = None if outer is None else outer.ids  # a model inside another may get their embeddings
        _CURRENT.set(Pass(ids, self.vocabulary, outer))

    @torch.compiler.disable
    def _end(self, module: Any, arguments: Any, output: Any) -> None:
        current = _CURRENT.get()
        _CURRENT.set(None if current is None else current.outer)


class ConvertedLayer:
    """What a converted model hangs on each of its attention modules."""

    def __init__(self, number: int, settings: LayerSettings | None, conversion: Conversion | None = None):
        self.number = number
        self.settings = settings  # None: exact
        self.conversion = conversion


def caching_layers(modules: Iterable[Any]) -> dict[int, LayerSettings]:
    """The causal layers among attention modules that have a cache of trees, by their number in the model's cache."""
    from hsa.huggingface.cache import keeps_trees

    found = {}
    for module in modules:
        settings: Any = getattr(getattr(module, "hsa_layer", None), "settings", None)
        number = getattr(module, "layer_idx", None)
        if number is not None and keeps_trees(settings) and is_causal(module):
            found[number] = settings
    return found


def register() -> None:
    """Makes `from_pretrained(…, attn_implementation="hsa")` known to transformers. `convert` does this by itself.

    A model loaded so attends as its config says, or, where that says nothing, as `convert` does by default.

    Raises:
        MissingExtra: transformers is not installed.
    """
    library = transformers_library(_PURPOSE)
    library.AttentionInterface.register(NAME, hsa_attention)
    library.AttentionMaskInterface.register(NAME, hsa_mask)


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
    causal = mask_function is library.causal_mask_function
    first_query = int(q_offset) if causal else 0
    # A cache of fixed size has places for later keys, which no query may see.
    seen = min(kv_length, first_query + q_length) if causal and q_length is not None else kv_length
    if attention_mask is None:
        mask = torch.ones(batch_size, seen, dtype=torch.bool, device=device)
    else:
        mask = attention_mask[:, :seen].bool()
    full = attention_mask is None
    sequences = Sequences(mask.clone(), causal=causal, first_query=first_query, full=full, **_known())
    mask = torch.nn.functional.pad(mask, (0, kv_length - seen)) if seen < kv_length else mask.clone()
    _BOUND.bind(mask, sequences)
    return mask


def _known() -> dict[str, Any]:
    """What the forward pass that we are in says about its tokens."""
    current = _CURRENT.get()
    return {} if current is None else {"ids": current.ids, "vocabulary": current.vocabulary}


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
    with_weights = _wants_weights(module, others)
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    options: dict[str, Any] = {"scale": scaling, "dropout_p": dropout, "weights": with_weights}
    if is_cross(module):
        mask = _for_torch(attention_mask)
        return _exactly(module, query, key, value, mask, False, others, **options)
    layer = _layer_of(module)
    cache = getattr(key, "hsa_cache", None)
    sequences = _sequences_of(attention_mask, query, key, causal)
    if sequences is not None and sequences.mask.shape[1] < key.shape[2]:  # a cache of fixed size, not full yet
        key, value = (x[:, :, : sequences.mask.shape[1]] for x in (key, value))
    if layer.settings is None and cache is None:
        if sequences is not None:
            count_exact(layer.number, query, sequences)
            mask, causal = sequences.allowed(), sequences.causal
        elif causal and attention_mask is not None and attention_mask.ndim == 2:
            raise _unknown_mask(layer, attention_mask)
        else:
            mask = _for_torch(attention_mask)
            count_mask(layer.number, query, mask)
        return _exactly(module, query, key, value, mask, causal, others, **options)
    _check_terms(layer.number, module, others, key.shape[2])
    if sequences is None:
        raise _unknown_mask(layer, attention_mask)
    if cache is None:
        return _each_as_it_should(module, layer, query, key, value, sequences, others, options)

    def whole(key: Tensor, value: Tensor, orders: list[KeyClusters]) -> tuple[Tensor, Tensor | None]:
        return _each_as_it_should(module, layer, query, key, value, sequences, others, options, orders)

    return cache.attend(layer.settings, layer.number, query, key, value, sequences, options, whole)


def _each_as_it_should(
    module: Any,
    layer: ConvertedLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequences,
    others: dict[str, Any],
    options: dict[str, Any],
    orders: list[KeyClusters] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A converted layer: trees, but exact attention for sequences that are too short, whoever shares their batch.

    `orders` takes the order of the keys, if one was found for all of them.
    """
    assert layer.settings is not None
    lengths = sequences.keys.lengths
    short = [exact_is_cheaper(layer.settings, length, causal=sequences.causal) for length in lengths]
    if not any(short):
        return attend(layer.settings, layer.number, query, key, value, sequences, **options, orders=orders)
    if all(short):
        count_exact(layer.number, query, sequences)
        mask = sequences.allowed()
        return _exactly(module, query, key, value, mask, sequences.causal, others, **options)
    parts = [[i for i, is_short in enumerate(short) if is_short is wanted] for wanted in (True, False)]
    found = [
        _each_as_it_should(module, layer, query[rows], key[rows], value[rows], sequences.part(rows), others, options)
        for rows in parts
    ]
    order = torch.tensor(parts[0] + parts[1], device=query.device).argsort()
    outputs, weights = zip(*found, strict=True)
    dense = None if weights[0] is None else torch.cat(weights)[order]
    return torch.cat(outputs)[order], dense


def _wants_weights(module: Any, others: dict[str, Any]) -> bool:
    """Whether the model was asked for its attentions. Not all families pass that on; transformers collects them."""
    if others.pop("output_attentions", False) or getattr(module.config, "output_attentions", False):
        return True
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:  # before 5.2
        return False
    collected = _active_collector.get() or {}
    return "attentions" in collected or "cross_attentions" in collected


def _for_torch(mask: Tensor | None) -> Tensor | None:
    return mask[:, None, None, :] if mask is not None and mask.ndim == 2 else mask


def _exactly(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    others: dict[str, Any],
    *,
    scale: float | None,
    dropout_p: float,
    weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """PyTorch's attention; our own where weights are asked for, which PyTorch's has none to give."""
    for name in _UNKNOWN_TO_TORCH:
        if others.get(name) is not None:
            raise InvalidInput(
                type(module).__name__, given=f"attention with {name}", expected="attention that PyTorch's own can do"
            )
    if weights and others.get("position_bias") is None:
        return attend_exactly(query, key, value, mask, causal=causal, scale=scale, dropout_p=dropout_p)
    run = transformers_library(_PURPOSE).AttentionInterface()["sdpa"]
    return run(module, query, key, value, mask, dropout=dropout_p, scaling=scale, is_causal=causal, **others)


def _layer_of(module: Any) -> ConvertedLayer:
    """What `convert` hung on the module; for a model that was only loaded with "hsa" attention, what its config says."""
    layer = getattr(module, "hsa_layer", None)
    if layer is not None:
        return layer
    number = getattr(module, "layer_idx", None)
    written = Settings.of(module.config)
    settings: LayerSettings | None
    if getattr(module, "is_decoder", False) and getattr(module.config, "is_encoder_decoder", False):
        settings = None  # shares its config with the encoder, which may be converted
    elif written is None:  # nothing said: every layer that sees the whole sequence, as `convert` does by default
        settings = None if is_sliding(module) else LayerSettings()
    elif number is None:
        raise InvalidInput(
            "attn_implementation",
            given=f"'hsa' for {type(module).__name__}, whose layers do not know their numbers",
            expected="a model loaded as usual",
            fix="call hsa.huggingface.convert(model), which numbers them, after loading",
        )
    else:
        written.check_numbers(getattr(module.config, "num_hidden_layers", None))
        settings = written.layers.get(number)
    if settings is not None:
        settings.check_direction(-1 if number is None else number, may_look_ahead=not is_causal(module))
    module.hsa_layer = ConvertedLayer(-1 if number is None else number, settings)
    return module.hsa_layer


def _sequences_of(mask: Tensor | None, query: Tensor, key: Tensor, causal: bool) -> Sequences | None:
    """The `Sequences` bound to a mask, or read off a mask that somebody else made; None: a mask of another form."""
    batch, queries, keys = len(query), query.shape[2], key.shape[2]
    if queries > keys:
        return None
    if mask is None:
        everything = torch.ones(batch, keys, dtype=torch.bool, device=query.device)
        return Sequences(everything, causal=causal, first_query=keys - queries, full=True, **_known())
    sequences = _BOUND.get(mask)
    if sequences is None:
        if mask.ndim == 4:
            sequences = _read_off(mask, batch, queries, causal)
        elif mask.ndim == 2 and mask[:, -1].any():  # a copy of one of ours, on another device for example
            sequences = Sequences(mask.bool().clone(), causal=causal, first_query=keys - queries if causal else 0)
        if sequences is None:
            return None
        if not mask.is_inference():  # what is written to such a tensor leaves no trace
            _BOUND.bind(mask, sequences)
    known = sequences.mask.shape[1]
    fits = len(sequences.mask) == batch and sequences.first_query + queries == known
    return sequences if fits and (known == keys or (sequences.causal and known < keys)) else None


def _read_off(mask: Tensor, batch: int, queries: int, causal: bool) -> Sequences | None:
    """`[batch or 1, heads or 1, queries or 1, keys]` that hides padding, or padding and what is later; else None.

    A single query at the end of its keys sees the same either way; there `causal` decides.
    """
    if mask.dtype != torch.bool and not mask.is_floating_point():
        return None
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    if mask.dtype != torch.bool and ((mask != 0) & seen).any():
        return None  # a bias
    keys = seen.shape[-1]
    first = keys - queries
    if len(seen) not in (1, batch) or seen.shape[2] not in (1, queries) or first < 0:
        return None
    if not torch.equal(seen, seen[:, :1].expand_as(seen)):
        return None
    rows = seen[:, 0].expand(batch, queries, keys)
    present = rows.any(1)
    asks = present[:, first:]
    if not asks.any(1).all():
        return None
    if torch.equal(rows[asks], present[:, None].expand_as(rows)[asks]):
        causal = causal and queries == 1
    else:
        place = torch.arange(keys, device=mask.device)
        before = (place <= place[first:, None]) & present[:, None]
        if not torch.equal(rows[asks], before[asks]):
            return None
        causal = True
    return Sequences(present.clone(), causal=causal, first_query=first, **_known())


def _check_terms(layer: int, module: Any, others: dict[str, Any], keys: int) -> None:
    """Terms that change the weights, which no tree knows of."""
    for name in _UNKNOWN_TERMS:
        value = others.get(name)
        if value is None or (name == "sliding_window" and value >= keys):
            continue
        raise InvalidInput(
            f"layer {layer} ({type(module).__name__})",
            given=f"attention with {name}",
            expected="plain softmax attention",
            fix=f"leave this layer out: convert(model, layers=…) without {layer}",
        )


def _unknown_mask(layer: ConvertedLayer, mask: Tensor | None) -> InvalidInput:
    shape = None if mask is None else tuple(mask.shape)
    return InvalidInput(
        "attention_mask",
        given=f"a mask of shape {shape} that is neither padding nor causal, in converted layer {layer.number}",
        expected="[batch, keys], or [batch, 1, queries, keys] that hides only padding and, in decoders, what is later",
        fix="unpack packed sequences into a padded batch; leave layers with sliding windows out of the conversion",
    )
