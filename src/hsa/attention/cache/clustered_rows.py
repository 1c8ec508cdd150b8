"""Tensors of one layer of a `ClusteredCache`, by name, and their copies from and to `ClusteredKeys`.

All have the axes [sequences, heads, chunks, …]:

    k_keys, k_groups, k_nodes, k_chunks    keys and the means of their groups, nodes and chunks; the same for values
    spread                                 spread of every group
    time                                   index in its chunk of the key at every row; only in clustered order
    first, before                          first query of the current tile, of the preceding tile, that opened a group

The keys of a complete chunk are in groups, those of the chunk in progress in the order of time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hsa.attention.cache.saved_state import Wanted
from hsa.attention.clustered.keys import ClusteredKeys
from hsa.attention.clustered.layout import Shape

Layer = dict[str, Tensor]
LEVELS = ("keys", "groups", "nodes", "chunks")


def layer_tensors(
    rows: tuple[int | str, int | str], dims: tuple[int, int], shape: Shape, dtype: torch.dtype, *, windows: bool
) -> dict[str, Wanted]:
    """Return shape and dtype of the tensors of a layer.

    Args:
        rows: Number of sequences and of key/value heads.
        dims: Dimension of keys and values.
        shape: Sizes of the trees.
        dtype: Type of keys and values.
        windows: Whether keys stay in their order.
    """
    wanted: dict[str, Wanted] = {}
    for side, dim in zip("kv", dims, strict=True):
        for level, size in zip(LEVELS, shape.rows, strict=True):
            wanted[f"{side}_{level}"] = ((*rows, "chunks", size, dim), dtype)
    wanted["spread"] = ((*rows, "chunks", shape.groups, dims[0]), dtype)
    if not windows:
        wanted["time"] = ((*rows, "chunks", shape.chunk), torch.uint8 if shape.chunk <= 256 else torch.int16)
    for name in ("first", "before"):
        wanted[name] = ((rows[0], "lists", "chunks", shape.groups), torch.uint8)
    return wanted


def chunk_index(chunks: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, slice, Tensor]:
    """Return the index of chunks, given as sequence and number, into the tensors of a layer."""
    sequence, number = torch.tensor(chunks, dtype=torch.long, device=device).view(-1, 2).unbind(1)
    return sequence, slice(None), number


def write_chunks(layer: Layer, keys: ClusteredKeys, chunks: Sequence[tuple[int, int]]) -> None:
    """Write clustered keys as complete chunks, given as sequence and number."""
    at, several = chunk_index(chunks, keys.k.device), len(chunks)

    def write(name: str, rows: Tensor) -> None:
        layer[name][at] = rows.unflatten(1, (several, -1)).transpose(0, 1).to(layer[name].dtype)

    for side, table in (("k", keys.k), ("v", keys.v)):
        levels = table.split([several * size for size in keys.shape.rows], 1)
        for level, rows in zip(LEVELS, levels, strict=True):
            write(f"{side}_{level}", rows)
    write("spread", keys.spread)
    if keys.order is not None:
        write("time", keys.order)


def read_chunks(layer: Layer, sequences: Sequence[int], numbers: Sequence[int], shape: Shape) -> ClusteredKeys:
    """Return the clustered keys of some sequences, which have these numbers of complete chunks."""
    chunks = [(i, number) for i, count in zip(sequences, numbers, strict=True) for number in range(count)]
    at = chunk_index(chunks, layer["spread"].device)

    def read(name: str) -> Tensor:
        return layer[name][at].transpose(0, 1).flatten(1, 2)

    k, v = (torch.cat([read(f"{side}_{level}") for level in LEVELS], 1) for side in "kv")
    order = read("time").to(torch.int16) if "time" in layer else None
    return ClusteredKeys(k, v, read("spread"), order, tuple(numbers), shape)


def in_time(layer: Layer, name: str, chunks: Sequence[tuple[int, int]]) -> None:
    """Bring the keys or values of complete chunks back into the order of time."""
    at = chunk_index(chunks, layer[name].device)
    rows, time = layer[name][at], layer["time"][at].long()
    layer[name][at] = torch.empty_like(rows).scatter_(2, time[..., None].expand_as(rows), rows)
