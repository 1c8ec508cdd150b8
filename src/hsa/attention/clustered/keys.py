"""`ClusteredKeys`: the keys and values of complete chunks in groups of similar keys, with their pooled rows.

Each chunk is split at the median of its first principal direction, again and again, down to groups: a balanced tree, per
chunk and key/value head, that depends on no later key. Plain windows leave the keys in their order. Either way, chunks are
stored as a table of rows: the keys, the means of all groups, of all nodes and of all chunks.

Related methods: Reformer (hash buckets), the Routing Transformer (k-means), clustered key–value caches, Quest (pages with
bounds). The tree is new here: its pooled nodes keep the mass of the keys that are not selected.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hsa.attention.clustered.layout import Layout, Shape
from hsa.errors import InvalidInput
from hsa.tree.jagged import few

ITERATIONS = 1
"""Number of power iterations for a principal direction, after one first product. An approximate direction is enough."""


@dataclass(frozen=True, eq=False)
class ClusteredKeys:
    """Keys and values of the complete chunks of a batch; the result of `hsa.cluster`.

    A table has the rows of all chunks: all keys in groups, then the means of all groups, nodes and chunks.

    Attributes:
        k: `[kv_heads, rows, dim]` table of keys.
        v: `[kv_heads, rows, value_dim]` table of values.
        spread: `[kv_heads, groups, dim]` principal direction of each group's keys times the standard deviation along it.
        order: `[kv_heads, keys]` index in its chunk of the key at every row; None if keys are in their own order.
        chunks: Number of complete chunks of every sequence.
        shape: Sizes of the trees.

    >>> from hsa import cluster
    >>> keys = cluster(torch.randn(600, 2, 16), torch.randn(600, 2, 16), [600])  # 2 complete chunks of 256 keys
    >>> keys.k.shape, keys.spread.shape
    (torch.Size([2, 586, 16]), torch.Size([2, 64, 16]))
    """

    k: Tensor
    v: Tensor
    spread: Tensor
    order: Tensor | None
    chunks: tuple[int, ...]
    shape: Shape

    @property
    def num_chunks(self) -> int:
        """Number of complete chunks of all sequences."""
        return sum(self.chunks)

    def __repr__(self) -> str:
        kind = "windows" if self.order is None else "clusters"
        return f"ClusteredKeys({self.num_chunks:,} chunks of {self.shape.chunk} keys, {len(self.k)} heads, {kind})"


def build_keys(k: Tensor, v: Tensor, layout: Layout, *, windows: bool, order: Tensor | None = None) -> ClusteredKeys:
    """Return the clustered keys of packed k `[keys, kv_heads, dim]` and v. Gradients flow to the tables.

    Args:
        order: `ClusteredKeys.order`, if it is known.
    """
    keys, values = chunks_of(k, layout), chunks_of(v, layout)  # [kv_heads, chunks, keys, dim]
    if not windows:
        if order is None:
            order = cluster_order(keys, layout.shape).flatten(1)
        by_chunk = order.unflatten(1, (layout.num_chunks, layout.shape.chunk))
        keys, values = take(keys, by_chunk), take(values, by_chunk)
    return ClusteredKeys(
        k=table_of(keys, layout.shape),
        v=table_of(values, layout.shape),
        spread=spreads_of(keys, layout.shape).flatten(1, 2),
        order=order,
        chunks=tuple(int(n) for n in layout.chunks[1:] - layout.chunks[:-1]),
        shape=layout.shape,
    )


def chunks_of(x: Tensor, layout: Layout) -> Tensor:
    """Return the complete chunks `[kv_heads, chunks, keys, dim]` of rows `[keys, kv_heads, dim]` of all sequences."""
    chunk = layout.shape.chunk
    if len(layout.lengths) == 1:
        rows = x[: layout.num_chunks * chunk]
    else:
        first = torch.from_numpy(layout.chunk_rows).to(x.device)
        rows = x.index_select(0, (first[:, None] + torch.arange(chunk, device=x.device)).flatten())
    return rows.unflatten(0, (layout.num_chunks, chunk)).permute(2, 0, 1, 3)


def take(x: Tensor, order: Tensor) -> Tensor:
    """Return rows `[…, rows, dim]` in another order `[…, rows]`."""
    return x.gather(-2, order.long()[..., None].expand(*order.shape, x.shape[-1]))


@torch.no_grad()
def cluster_order(keys: Tensor, shape: Shape) -> Tensor:
    """Return `[…, keys]` the order that puts similar keys of a chunk into the same group.

    The first key of a chunk is always in the first group, and keys of a group are in their own order.
    """
    dtype = torch.promote_types(keys.dtype, torch.float32)
    members = keys.to(dtype)[..., None, :, :]  # [kv_heads, chunks, parts, keys, dim]
    order = torch.arange(shape.chunk, device=keys.device).expand(*members.shape[:-1]).contiguous()
    while (size := members.shape[-2]) > shape.group:
        coordinate = principal_coordinate(members).nan_to_num_(torch.finfo(dtype).max)
        halves = coordinate.sort(dim=-1, stable=True).indices.unflatten(-1, (2, size // 2)).sort(-1).values
        # The half with the first key of the chunk, the first member of the first part, comes first.
        first = halves[..., :1, :, :]
        halves[..., :1, :, :] = torch.where(first[..., 1:, :1] == 0, first.flip(-2), first)
        order = order.gather(-1, halves.flatten(-2)).unflatten(-1, (2, size // 2)).flatten(-3, -2)
        members = take(members, halves.flatten(-2)).unflatten(-2, (2, size // 2)).flatten(-4, -3)
    return order.flatten(-2).to(torch.int16)


def principal_coordinate(members: Tensor) -> Tensor:
    """Return coordinates `[…, size]` along the first principal direction of `[…, size, dim]`, by power iteration."""
    centred = members - members.mean(-2, keepdim=True)
    return _principal_vector(centred)[0].squeeze(-1)


def _principal_vector(centred: Tensor) -> tuple[Tensor, Tensor]:
    """Return coordinates `[…, size, 1]` along a principal direction, and the direction `[…, 1, dim]`, a unit vector."""
    direction = start_direction(centred.shape[-1], centred.device).to(centred.dtype)[:, None]
    for _ in range(ITERATIONS + 1):
        direction = centred.transpose(-1, -2) @ (centred @ direction)
        length = direction.norm(dim=-2, keepdim=True)
        direction = direction / torch.where(length > 0, length, torch.ones_like(length))
    return centred @ direction, direction.transpose(-1, -2)


def start_direction(dim: int, device: torch.device) -> Tensor:
    """Return the start of power iterations: fixed, but irregular, as a regular one could be orthogonal to the result."""
    return torch.arange(1, dim + 1, device=device, dtype=torch.float64).mul(2.4).cos()


@torch.no_grad()
def spreads_of(keys: Tensor, shape: Shape) -> Tensor:
    """Return `[kv_heads, chunks, groups, dim]` the principal direction of each group times its standard deviation."""
    dtype = torch.promote_types(keys.dtype, torch.float32)
    members = keys.to(dtype).unflatten(-2, (shape.groups, shape.group))
    centred = members - members.mean(-2, keepdim=True)
    coordinate, direction = _principal_vector(centred)
    return (direction * coordinate.square().mean(-2, keepdim=True).sqrt()).squeeze(-2).to(keys.dtype)


def table_of(rows: Tensor, shape: Shape) -> Tensor:
    """Return `[kv_heads, rows, dim]`: keys or values `[kv_heads, chunks, keys, dim]`, then the means of each level."""
    levels, wide = [rows], rows.to(torch.promote_types(rows.dtype, torch.float32))
    for size in shape.branching:
        wide = wide.unflatten(2, (-1, size)).mean(3)
        levels.append(wide.to(rows.dtype))
    return torch.cat([level.flatten(1, 2) for level in levels], 1)


def clustering_operations(chunks: int, kv_heads: int, dim: int, shape: Shape) -> int:
    """Count the operations of the principal directions, of splits and groups, without the comparisons of sorting."""
    rounds = (shape.groups.bit_length() - 1) + 1  # splits, and the spreads of the groups
    return chunks * kv_heads * rounds * shape.chunk * dim * (4 * (ITERATIONS + 1) + 2)


def check_keys(keys: ClusteredKeys, layout: Layout, k: Tensor, v: Tensor | None) -> None:
    """Check that clustered keys fit the lengths, the shape and the tensors of a call."""
    fix = "Make them with hsa.cluster from the same keys, lengths and branching"
    chunks = tuple(int(n) for n in layout.chunks[1:] - layout.chunks[:-1])
    rows = layout.num_chunks * sum(layout.shape.rows)
    wanted = {"k": (k.shape[1], rows, k.shape[2])}
    if v is not None:
        wanted["v"] = (v.shape[1], rows, v.shape[2])
    if keys.shape.branching != layout.shape.branching or keys.chunks != chunks:
        got = f"chunks of {keys.shape.branching}, {few(list(keys.chunks))} per sequence"
        raise InvalidInput(
            "keys", expected=f"chunks of {layout.shape.branching}, {few(list(chunks))} per sequence", got=got, fix=fix
        )
    for name, shape in wanted.items():
        x = getattr(keys, name)
        if tuple(x.shape) != shape or x.dtype != k.dtype or x.device != k.device:
            got = f"{x.dtype} of shape {tuple(x.shape)} on {x.device}"
            raise InvalidInput(f"keys.{name}", expected=f"{k.dtype} of shape {shape} on {k.device}", got=got, fix=fix)
