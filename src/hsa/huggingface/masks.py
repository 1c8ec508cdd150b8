"""Attention masks, and the `Sequences` that belong to them.

transformers calls the mask function once per forward pass. It returns a `[batch, keys]` mask and binds the `Sequences` of
the pass to it; each layer receives this mask and looks them up. The binding lasts as long as the mask, also where gradient
checkpointing keeps it for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hsa.huggingface.passes import IN_STEP, known_tokens
from hsa.huggingface.sequences import Sequences


class _Bindings:
    """`Sequences` by the storage of their mask, as long as that lives. Autograd may return a mask as another tensor object.

    A `Sequences` must not hold the mask that it is bound to, or the mask would never be freed.
    """

    def __init__(self) -> None:
        self._bound: dict[Any, tuple[StorageWeakRef, int | None, Sequences]] = {}

    def __len__(self) -> int:
        self._forget()
        return len(self._bound)

    def get(self, mask: Tensor) -> Sequences | None:
        _, version, sequences = self._bound.get(self._key(mask), (None, None, None))
        return sequences if version == _version(mask) else None  # otherwise the mask was modified

    def bind(self, mask: Tensor, sequences: Sequences) -> None:
        self._forget()
        self._bound[self._key(mask)] = StorageWeakRef(mask.untyped_storage()), _version(mask), sequences

    def _forget(self) -> None:
        for key, (memory, _, _) in list(self._bound.items()):
            if memory.expired():
                self._bound.pop(key, None)

    @staticmethod
    def _key(mask: Tensor) -> Any:
        return mask.untyped_storage()._cdata, mask.storage_offset(), mask.shape, mask.stride(), mask.dtype


def _version(mask: Tensor) -> int | None:
    return None if mask.is_inference() else mask._version


BINDINGS = _Bindings()


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
    """Return the mask of a forward pass: `[batch, keys]`, true where there is a token.

    For patterns other than full and causal attention (sliding windows, packed sequences), return `[batch, 1, queries, keys]`
    for the layers that are not converted.
    """
    from transformers import masking_utils as library

    if IN_STEP.get():  # layers do not read it
        return torch.ones(batch_size, 1, dtype=torch.bool, device=device)
    if cache_position is not None:  # before transformers 5.3: positions of the queries
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
        assert allowed is not None  # the options forbid skipping it
        return allowed
    causal = mask_function is library.causal_mask_function
    first_query = int(q_offset) if causal else 0
    # A cache of fixed size has empty slots for later keys, which no query may see.
    seen = min(kv_length, first_query + q_length) if causal and q_length is not None else kv_length
    if attention_mask is None:
        mask = torch.ones(batch_size, seen, dtype=torch.bool, device=device)
    else:
        mask = attention_mask[:, :seen].bool()
    full = attention_mask is None
    sequences = Sequences(mask.clone(), causal=causal, first_query=first_query, full=full, **known_tokens())
    mask = torch.nn.functional.pad(mask, (0, kv_length - seen)) if seen < kv_length else mask.clone()
    BINDINGS.bind(mask, sequences)
    return mask


def read_sequences(mask: Tensor | None, query: Tensor, key: Tensor, causal: bool) -> Sequences | None:
    """Return the `Sequences` of a mask: those bound to it, or read from its values. None if it has another pattern.

    `query` and `key` are `[batch, heads, tokens, dim]`.
    """
    batch, queries, keys = len(query), query.shape[2], key.shape[2]
    if queries > keys:
        return None
    if mask is None:
        everything = torch.ones(batch, keys, dtype=torch.bool, device=query.device)
        return Sequences(everything, causal=causal, first_query=keys - queries, full=True, **known_tokens())
    sequences = BINDINGS.get(mask)
    if sequences is None:
        if mask.ndim == 4:
            sequences = _read_mask(mask, batch, queries, causal)
        elif mask.ndim == 2 and mask[:, -1].any():  # a copy of our mask, such as one on another device
            sequences = Sequences(mask.bool().clone(), causal=causal, first_query=keys - queries if causal else 0)
        if sequences is None:
            return None
        if not mask.is_inference():  # inference tensors do not record modification
            BINDINGS.bind(mask, sequences)
    known = sequences.mask.shape[1]
    fits = len(sequences.mask) == batch and sequences.first_query + queries == known
    return sequences if fits and (known == keys or (sequences.causal and known < keys)) else None


def _read_mask(mask: Tensor, batch: int, queries: int, causal: bool) -> Sequences | None:
    """Read a mask `[batch or 1, heads or 1, queries or 1, keys]` that hides padding, or padding and later tokens.

    Return None for any other pattern. For a single query at the end of its keys both patterns agree, so `causal` decides.
    """
    if mask.dtype != torch.bool and not mask.is_floating_point():
        return None
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    if mask.dtype != torch.bool and ((mask != 0) & seen).any():
        return None  # a bias, not a mask
    keys = seen.shape[-1]
    first = keys - queries
    if len(seen) not in (1, batch) or seen.shape[2] not in (1, queries) or first < 0:
        return None
    if not torch.equal(seen, seen[:, :1].expand_as(seen)):
        return None
    rows = seen[:, 0].expand(batch, queries, keys)
    present = rows.any(1)
    is_query = present[:, first:]
    if not is_query.any(1).all():
        return None
    if torch.equal(rows[is_query], present[:, None].expand_as(rows)[is_query]):
        causal = causal and queries == 1
    else:
        position = torch.arange(keys, device=mask.device)
        before = (position <= position[first:, None]) & present[:, None]
        if not torch.equal(rows[is_query], before[is_query]):
            return None
        causal = True
    return Sequences(present.clone(), causal=causal, first_query=first, **known_tokens())
