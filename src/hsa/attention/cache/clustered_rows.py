"""Tensors of one layer of a `ClusteredCache`, by name, and their copies from and to `ClusteredKeys`.

All have the axes [heads, sequences, chunks, …]:

    k, v              pages of chunks; of the chunk in progress, the keys in the order of time, and nothing else
    scores, channels  what groups are scored by, as in `ClusteredKeys`
    time              index in its chunk of the key at every row; only in clustered order
    first, before     first query of the current tile, of the preceding tile, that opened a group; one list per query head,
                      or per key/value head

The pages of all sequences are therefore clustered keys with `capacity` pages per sequence, without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hsa.attention.cache.saved_state import Wanted
from hsa.attention.checks import without_autocast
from hsa.attention.clustered.keys import (
    EIGHT_BITS,
    UNIT,
    ClusteredKeys,
    build_keys,
    scored_channels,
    scored_dim,
    scores_of,
)
from hsa.attention.clustered.layout import Shape, layout_of
from hsa.attention.clustered.threshold import Threshold
from hsa.attention.clustered.why_not import why_not_cluster
from hsa.attention.kernels import available
from hsa.tree.lasting import lasting

Layer = dict[str, Tensor]


@dataclass(frozen=True)
class Rule:
    """Rule by which queries select groups; see `hsa.clustered_attention`."""

    threshold: Threshold | None
    top_k: int | None
    spread: float
    share_lists: bool


@dataclass(frozen=True)
class Rows:
    """Sizes and types of the tensors of a layer.

    Attributes:
        kv_heads: Number of key/value heads.
        dims: Dimension of keys and of values.
        shape: Sizes of the trees.
        dtype: Type of keys and values.
        device: Device of all tensors.
        windows: Whether keys stay in their order.
        backend: "auto", "triton" or "torch".
    """

    kv_heads: int
    dims: tuple[int, int]
    shape: Shape
    dtype: torch.dtype
    device: torch.device
    windows: bool
    backend: str

    @cached_property
    def why_not_cluster(self) -> list[str]:
        """Reasons why no kernel can cluster chunks."""
        k, v = (torch.empty(0, self.kv_heads, dim, dtype=self.dtype, device=self.device) for dim in self.dims)
        return why_not_cluster(k, v, self.shape, self.backend)

    @cached_property
    def score_dtype(self) -> torch.dtype:
        """Type of the scores, as `hsa.cluster` makes them."""
        if self.why_not_cluster:
            return self.dtype
        from hsa.attention.clustered.triton.cluster import score_dtype

        return score_dtype(self.dtype, self.dims[0], self.device)

    def tensors(self, sequences: int | str, scores: Any = None) -> dict[str, Wanted]:
        """Return shape and dtype of the tensors of a layer.

        Args:
            sequences: Number of sequences, or its name.
            scores: Scores of a saved layer, which may have the type of another device.
        """
        shape, rows, channels = self.shape, (self.kv_heads, sequences, "chunks"), scored_dim(self.dims[0])
        is_other = isinstance(scores, Tensor) and scores.dtype in (self.dtype, EIGHT_BITS)
        dtype = scores.dtype if is_other else self.score_dtype
        wanted: dict[str, Wanted] = {
            name: ((*rows, shape.page, dim), self.dtype) for name, dim in zip("kv", self.dims, strict=True)
        }
        wanted["scores"] = (*rows, shape.branching[2], 2, shape.branching[1], channels), dtype
        wanted["channels"] = (*rows, channels), torch.int16
        if not self.windows:
            wanted["time"] = (*rows, shape.chunk), torch.uint8 if shape.chunk <= 256 else torch.int16
        for name in ("first", "before"):
            wanted[name] = ("lists", sequences, "chunks", shape.groups), torch.uint8
        return wanted

    def close_chunks(self, layer: Layer, chunks: Sequence[tuple[int, int]]) -> None:
        """Cluster and pool complete chunks, given as sequence and number, whose keys are in the order of time."""
        if not self.why_not_cluster:
            from hsa.attention.clustered.triton.cluster import cluster_pages

            with available.device_of(layer["k"]):
                cluster_pages(
                    as_keys(layer, [], self.shape), page_numbers(tuple(chunks), layer["k"].shape[2], self.device)
                )
            return
        at = chunk_index(chunks, self.device)
        keys, values = (layer[name][at][:, :, : self.shape.chunk] for name in "kv")
        starts = [n for n, (_, number) in enumerate(chunks) if number == 0]
        layer["channels"][:, at[1][starts], 0] = scored_channels(keys[:, starts])
        k, v = (x.flatten(1, 2).transpose(0, 1) for x in (keys, values))
        channels = layer["channels"][:, at[1], 0]
        layout = layout_of([len(k)], shape=Shape.of(self.shape.branching, 1, causal=False), causal=False)
        with without_autocast(k):
            clustered = build_keys(k, v, layout, windows=self.windows, channels=channels)
        self.write_chunks(layer, clustered, chunks)

    def write_chunks(self, layer: Layer, keys: ClusteredKeys, chunks: Sequence[tuple[int, int]]) -> None:
        """Write clustered keys as complete chunks, given as sequence and number."""
        at = chunk_index(chunks, self.device)
        fits = keys.scores.dtype == self.score_dtype
        scores = keys.scores if fits else self.scores_of_pages(keys.k, keys.channels)
        written = {"k": keys.k, "v": keys.v, "scores": scores, "channels": keys.channels, "time": keys.order}
        for name, x in written.items():
            if x is not None:
                layer[name][at] = x.to(layer[name].dtype)

    def scores_of_pages(self, pages: Tensor, channels: Tensor) -> Tensor:
        """Return the scores of pages of keys, in the type that this cache has.

        Args:
            pages: `[heads, …, rows, dim]`.
            channels: `[heads, …, channels]`.
        """
        scores = scores_of(pages.flatten(1, -3), channels.flatten(1, -2), self.shape)
        if self.score_dtype == EIGHT_BITS:
            limit = torch.finfo(EIGHT_BITS).max
            scores = (scores.float() * UNIT).clamp_(-limit, limit)
        return scores.to(self.score_dtype).unflatten(1, pages.shape[1:-2])


@lru_cache(maxsize=4)  # all layers of a model need the same
def rows_of_new(
    before: tuple[int, ...], lengths: tuple[int, ...], shape: Shape, capacity: int, device: torch.device
) -> Tensor:
    """Return `[tokens]` the rows, among the pages of all sequences, of the tokens with which sequences grow."""
    chunk, new = shape.chunk, np.subtract(lengths, before)
    sequence = np.repeat(np.arange(len(new)), new)
    slot = np.arange(len(sequence)) + np.repeat(np.array(before) - np.cumsum(new) + new, new)
    rows = (sequence * capacity + slot // chunk) * shape.page + slot % chunk
    with lasting():
        return torch.from_numpy(rows).to(device)


@lru_cache(maxsize=4)
def page_numbers(chunks: tuple[tuple[int, int], ...], capacity: int, device: torch.device) -> Tensor:
    """Return `[chunks]` int32 the pages of chunks, given as sequence and number."""
    with lasting():
        return torch.tensor([i * capacity + n for i, n in chunks], dtype=torch.int32).to(device)


def as_keys(layer: Layer, chunks: Sequence[int], shape: Shape) -> ClusteredKeys:
    """Return the pages of a layer as clustered keys, without a copy, given the number of complete chunks per sequence."""
    k, v, scores, channels = (layer[name].flatten(1, 2) for name in ("k", "v", "scores", "channels"))
    order = layer["time"].flatten(1, 2) if "time" in layer else None
    return ClusteredKeys(k, v, scores, channels, order, tuple(chunks), shape, capacity=layer["k"].shape[2])


def chunk_index(chunks: Sequence[tuple[int, int]], device: torch.device) -> tuple[slice, Tensor, Tensor]:
    """Return the index of chunks, given as sequence and number, into the tensors of a layer."""
    sequence, number = torch.tensor(chunks, dtype=torch.long, device=device).view(-1, 2).unbind(1)
    return slice(None), sequence, number


def rows_in_time(layer: Layer, name: str, chunks: Sequence[tuple[int, int]], size: int) -> Tensor:
    """Return the keys or values of complete chunks of this size in the order of time, `[heads, chunks, size, dim]`."""
    at = chunk_index(chunks, layer[name].device)
    rows = layer[name][at][:, :, :size]
    if "time" not in layer:
        return rows
    return torch.empty_like(rows).scatter_(2, layer["time"][at].long()[..., None].expand_as(rows), rows)


def in_time(layer: Layer, name: str, chunks: Sequence[tuple[int, int]], size: int) -> None:
    """Bring the keys or values of complete chunks of this size back into the order of time."""
    sequence, number = chunk_index(chunks, layer[name].device)[1:]
    layer[name][:, sequence, number, :size] = rows_in_time(layer, name, chunks, size)
