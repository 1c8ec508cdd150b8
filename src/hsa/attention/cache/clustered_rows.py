"""Tensors of one layer of a `ClusteredCache`, by name, and their copies from and to `ClusteredKeys`.

All have the axes [heads, sequences, chunks, …]:

    k, v             pages of chunks; of the chunk in progress, the keys in the order of time, and nothing else
    scores           means and spreads of groups, as in `ClusteredKeys`
    time             index in its chunk of the key at every row; only in clustered order
    first, before    first query of the current tile, of the preceding tile, that opened a group; one list per query head, or
                     per key/value head

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
from hsa.attention.clustered.keys import EIGHT_BITS, UNIT, ClusteredKeys, levels_of, spreads_of
from hsa.attention.clustered.layout import Shape
from hsa.attention.clustered.operator import cluster
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
    def scores(self) -> tuple[torch.dtype, int]:
        """Type and number of parts of the scores: as `hsa.cluster` makes them."""
        if self.why_not_cluster:
            return self.dtype, 1
        from hsa.attention.clustered.triton.cluster import scores_of

        return scores_of(self.dtype, self.dims[0], self.device)

    def tensors(self, sequences: int | str, scores: Any = None) -> dict[str, Wanted]:
        """Return shape and dtype of the tensors of a layer.

        Args:
            sequences: Number of sequences, or its name.
            scores: Scores of a saved layer, which may have the form of another device.
        """
        shape, rows = self.shape, (self.kv_heads, sequences, "chunks")
        dtype, parts = self.scores
        if isinstance(scores, Tensor) and scores.ndim == 7:
            forms = ((self.dtype, 1), (EIGHT_BITS, 2))
            dtype, parts = (scores.dtype, scores.shape[4]) if (scores.dtype, scores.shape[4]) in forms else self.scores
        wanted: dict[str, Wanted] = {
            name: ((*rows, shape.page, dim), self.dtype) for name, dim in zip("kv", self.dims, strict=True)
        }
        wanted["scores"] = (*rows, shape.branching[2], parts, shape.branching[1], self.dims[0]), dtype
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
        k, v = (layer[name][at][:, :, : self.shape.chunk].flatten(1, 2).transpose(0, 1) for name in "kv")
        keys = cluster(k, v, [len(k)], windows=self.windows, branching=self.shape.branching)
        self.write_chunks(layer, keys, chunks)

    def write_chunks(self, layer: Layer, keys: ClusteredKeys, chunks: Sequence[tuple[int, int]]) -> None:
        """Write clustered keys as complete chunks, given as sequence and number."""
        at = chunk_index(chunks, self.device)
        written = {"k": keys.k, "v": keys.v, "scores": keys.scores, "time": keys.order}
        for name, x in written.items():
            if x is not None and x.shape[3:] == layer[name].shape[4:]:
                layer[name][at] = x.to(layer[name].dtype)
        if (keys.scores.dtype, keys.scores.shape[3]) != self.scores:
            layer["scores"][at] = self.scores_of_pages(keys.k, layer["k"][at[0], at[1], 0, -1])

    def scores_of_pages(self, pages: Tensor, centres: Tensor) -> Tensor:
        """Return the scores of pages of keys, in the form that this cache has.

        Args:
            pages: `[heads, …, rows, dim]`.
            centres: `[heads, …, dim]` mean of the first chunk of the sequence of each page.
        """
        dtype, parts = self.scores
        keys, means, _, _ = levels_of(pages.flatten(1, -3), self.shape)
        if parts == 2:
            means = means - centres.expand(*pages.shape[:-2], -1).flatten(1, -2)[:, :, None]
        groups = keys.flatten(1, 2).unflatten(1, (-1, self.shape.group))
        spread = spreads_of(groups).unflatten(1, (-1, self.shape.branching[1]))
        stacked = torch.stack([means.reshape(spread.shape), spread][-parts:], 2)
        if dtype == EIGHT_BITS:
            limit = torch.finfo(dtype).max
            stacked = (stacked.float() * UNIT).clamp_(-limit, limit)
        return stacked.to(dtype).view(*pages.shape[:-2], self.shape.branching[2], *stacked.shape[2:])


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
    k, v, scores = (layer[name].flatten(1, 2) for name in ("k", "v", "scores"))
    order = layer["time"].flatten(1, 2) if "time" in layer else None
    return ClusteredKeys(k, v, scores, order, tuple(chunks), shape, capacity=layer["k"].shape[2])


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
