"""`ClusteredKeys`: the keys and values of complete chunks in groups of similar keys, with their pooled rows.

Each chunk is split at the median of its first principal direction, again and again, down to groups: a balanced tree, per
chunk and key/value head, that depends on no later key. Plain windows leave the keys in their order. Either way, a chunk is
stored as a page of rows: its keys, the means of its groups and of its nodes, and the mean of all of its keys.

Related methods: Reformer (hash buckets), the Routing Transformer (k-means), clustered key–value caches, Quest (pages with
bounds). The tree is new here: its pooled nodes keep the mass of the keys that are not selected.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hsa.attention.clustered.layout import Layout, Shape
from hsa.errors import InvalidInput
from hsa.tree.jagged import few

ITERATIONS = 1
"""Number of power iterations for a principal direction, after one first product. An approximate direction is enough."""
NUMBERS = {"cpu": 2**18, "cuda": 2**26}
"""Number of coordinates of keys to cluster at once. On a CPU, blocks that fit its cache are several times faster."""


EIGHT_BITS = torch.float8_e4m3fn
"""Type of scores where a GPU multiplies 8-bit numbers. Its largest number is 448."""
WIDE = 64
"""Head dim from which groups are scored in half of the channels. Measured on language models with head dims of 64."""
UNIT = 0.25
"""Factor of means and spreads in 8 bits."""


@dataclass(frozen=True, eq=False)
class ClusteredKeys:
    """Keys and values of the complete chunks of a batch; the result of `hsa.cluster`.

    A chunk is a *page* of rows: its keys in groups, then the means of its groups, of its nodes and of all its keys.

    Attributes:
        k: `[kv_heads, chunks, rows of a page, dim]` keys.
        v: `[kv_heads, chunks, rows of a page, value_dim]` values.
        scores: `[kv_heads, chunks, nodes, 2, groups of a node, channels]` what tells the groups of a chunk apart, in some
            channels: the mean of each group less the mean of the chunk, and its spread, the principal direction of its keys
            times the standard deviation along it. In 8 bits for keys in half precision, if a GPU multiplies such numbers.
        channels: `[kv_heads, chunks, channels]` these channels, the same for all chunks of a sequence.
        order: `[kv_heads, chunks, keys]` index in its chunk of the key at every row; None if keys are in their own order.
        chunks: Number of complete chunks of every sequence.
        shape: Sizes of the trees.
        capacity: Number of pages of every sequence, if there are more than complete chunks, as in a cache.

    >>> from hsa import cluster
    >>> keys = cluster(torch.randn(600, 2, 16), torch.randn(600, 2, 16), [600])  # 2 complete chunks of 256 keys
    >>> keys.k.shape  # 256 keys, 32 groups, 4 nodes and one mean of all
    torch.Size([2, 2, 293, 16])
    """

    k: Tensor
    v: Tensor
    scores: Tensor
    channels: Tensor
    order: Tensor | None
    chunks: tuple[int, ...]
    shape: Shape
    capacity: int | None = None

    @property
    def num_chunks(self) -> int:
        """Number of complete chunks of all sequences."""
        return sum(self.chunks)

    @property
    def scored(self) -> tuple[Tensor, Tensor]:
        """Relative means of groups, and spreads, `[kv_heads, chunks, groups, channels]`: `scores` in the type of k."""
        both = self.scores if self.scores.dtype != EIGHT_BITS else self.scores.to(self.k.dtype) / UNIT
        means, spreads = both.unbind(3)
        return means.flatten(2, 3), spreads.flatten(2, 3)

    def __repr__(self) -> str:
        kind = "windows" if self.order is None else "clusters"
        return f"ClusteredKeys({self.num_chunks:,} chunks of {self.shape.chunk} keys, {len(self.k)} heads, {kind})"


def build_keys(
    k: Tensor,
    v: Tensor,
    layout: Layout,
    *,
    windows: bool,
    order: Tensor | None = None,
    channels: Tensor | None = None,
) -> ClusteredKeys:
    """Return the clustered keys of packed k `[keys, kv_heads, dim]` and v. Gradients flow to the pages.

    Args:
        order, channels: Those of `ClusteredKeys`, if they are known.
    """
    shape = layout.shape
    first = torch.from_numpy(layout.chunk_rows).to(k.device)[:, None]  # [chunks, 1]
    rows = first + torch.arange(shape.chunk, device=k.device)  # [chunks, keys]
    chunks = chunks_of(k, rows, layout)
    if not windows and order is None:
        order = cluster_order(chunks, shape)
    if channels is None:
        first_chunks, sequence = layout.rows_of_chunks(k.device)[1].unique(return_inverse=True)
        channels = scored_channels(chunks[:, first_chunks])[:, sequence]
    by_head = [rows] * k.shape[1] if order is None else [first + x for x in order]
    pages = pages_of(k, by_head, shape)
    return ClusteredKeys(
        k=pages,
        v=pages_of(v, by_head, shape),
        scores=scores_of(pages, channels, shape),
        channels=channels,
        order=order,
        chunks=layout.chunk_counts,
        shape=shape,
    )


def chunks_of(x: Tensor, rows: Tensor, layout: Layout) -> Tensor:
    """Return the complete chunks `[kv_heads, chunks, keys, dim]` of x `[keys, kv_heads, dim]`, given their rows."""
    x = x[: rows.numel()] if len(layout.lengths) == 1 else x.index_select(0, rows.flatten())
    return x.unflatten(0, rows.shape).permute(2, 0, 1, 3)


def _blocks(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield `[kv_heads, parts, keys, dim]` in blocks of parts, as `[kv_heads · parts, keys, dim]`, wide enough for sums."""
    dtype, most = torch.promote_types(x.dtype, torch.float32), NUMBERS.get(x.device.type, NUMBERS["cpu"])
    step = max(1, most // max(1, x[:, :1].numel()))
    for begin in range(0, x.shape[1], step):
        part = slice(begin, begin + step)
        yield part, x[:, part].to(dtype).flatten(0, 1)


@torch.no_grad()
def cluster_order(keys: Tensor, shape: Shape) -> Tensor:
    """Return `[kv_heads, chunks, keys]` the order that puts similar keys `[kv_heads, chunks, keys, dim]` into one group.

    The first key of a chunk is always in the first group, and keys of a group are in their own order.
    """
    order = keys.new_empty(keys.shape[:3], dtype=torch.int16)
    for part, members in _blocks(keys):
        order[:, part] = split_chunks(members, shape.group).view(len(keys), -1, shape.chunk)
    return order


def scored_dim(dim: int) -> int:
    """Return the number of channels in which groups are scored."""
    return dim // 2 if dim >= WIDE and dim % 4 == 0 else dim


@torch.no_grad()
def scored_channels(chunks: Tensor) -> Tensor:
    """Return the channels `[kv_heads, chunks, channels]` in which the keys of chunks are long and vary most.

    Keys that differ in a channel can be told apart by it, and where keys are long, queries often are too. Channels i and
    i + dim / 2 are chosen together, because rotary embeddings turn them into each other.

    Args:
        chunks: `[kv_heads, chunks, keys, dim]`.
    """
    dim = chunks.shape[-1]
    if scored_dim(dim) == dim:
        return torch.arange(dim, dtype=torch.int16, device=chunks.device).expand(*chunks.shape[:2], dim)
    chunks = chunks.to(torch.promote_types(chunks.dtype, torch.float32))
    weights = chunks.norm(dim=2) * (chunks - chunks.mean(2, keepdim=True)).norm(dim=2)
    pairs = weights.unflatten(-1, (2, -1)).sum(-2).nan_to_num(math.inf)
    largest = pairs.sort(dim=-1, descending=True, stable=True).indices[..., : scored_dim(dim) // 2].sort(-1).values
    return torch.cat([largest, largest + dim // 2], -1).to(torch.int16)


@torch.no_grad()
def scores_of(pages: Tensor, channels: Tensor, shape: Shape) -> Tensor:
    """Return `ClusteredKeys.scores` of pages of keys `[kv_heads, chunks, rows, dim]`, in the type of the keys.

    Args:
        channels: `[kv_heads, chunks, channels]`.
    """
    keys, means, _, whole = levels_of(pages, shape)
    spreads = spreads_of(keys.flatten(1, 2).unflatten(1, (-1, shape.group))).view_as(means)
    index = channels.long().unsqueeze(2).expand(-1, -1, shape.groups, -1)
    both = torch.stack([x.gather(3, index) for x in (means - whole, spreads)], 2)
    return both.unflatten(3, shape.branching[:0:-1]).transpose(2, 3).contiguous()


@torch.no_grad()
def spreads_of(keys: Tensor) -> Tensor:
    """Return `[kv_heads, groups, dim]` the principal directions of groups times their standard deviation.

    Args:
        keys: `[kv_heads, groups, keys, dim]`.
    """
    spread = keys.new_empty(*keys.shape[:2], keys.shape[3])
    for part, members in _blocks(keys):
        along, direction = principal(members)
        deviation = along.square().mean(1, keepdim=True).sqrt()
        spread[:, part] = (direction.squeeze(1) * deviation).view(len(keys), -1, keys.shape[3])
    return spread


def split_chunks(members: Tensor, group: int) -> Tensor:
    """Return the order `[chunks, keys]` that splits chunks `[chunks, keys, dim]` into groups."""
    chunks, size, dim = members.shape
    order = torch.arange(size, device=members.device).expand(chunks, size)
    while (size := members.shape[1]) > group:
        coordinate, _ = principal(members)
        # The larger half of a part comes second; both keep their order.
        halves = coordinate.nan_to_num_(torch.finfo(members.dtype).max).sort(dim=1, stable=True).indices
        halves = halves.view(-1, 2, size // 2).sort(-1).values  # [parts, halves, keys]
        moved = halves.view(-1, size) + torch.arange(0, order.numel(), size, device=members.device)[:, None]
        order = order.reshape(-1).index_select(0, moved.view(-1))
        members = members.reshape(-1, dim).index_select(0, moved.view(-1)).view(-1, size // 2, dim)
    # Exclusive or swaps halves of the tree, so that the first key of the chunk comes into the first group.
    groups = order.view(chunks, -1, group)
    of_first = groups[:, :, :1].argmin(1)  # [chunks, 1]
    swapped = torch.arange(groups.shape[1], device=members.device) ^ of_first
    return groups.gather(1, swapped[..., None].expand_as(groups)).flatten(1)


def principal(members: Tensor) -> tuple[Tensor, Tensor]:
    """Return the coordinates `[parts, size]` of keys `[parts, size, dim]` along their first principal direction.

    Also return the direction, unit vectors `[parts, 1, dim]`. The direction is that of a power iteration.
    """
    centred = members - members.mean(1, keepdim=True)
    along = centred @ start_direction(members.shape[2], members.device).to(members.dtype)
    for _ in range(ITERATIONS + 1):
        direction = torch.bmm(along[:, None], centred)
        length = direction.norm(dim=2, keepdim=True)
        direction = direction / length.masked_fill_(length == 0, 1)
        along = (centred * direction).sum(2)  # faster than a product with a vector per part
    return along, direction


def start_direction(dim: int, device: torch.device) -> Tensor:
    """Return the start of power iterations: fixed, but irregular, as a regular one could be orthogonal to the result."""
    return torch.arange(1, dim + 1, device=device, dtype=torch.float64).mul(2.4).cos()


def pages_of(x: Tensor, rows: list[Tensor], shape: Shape) -> Tensor:
    """Return the pages `[kv_heads, chunks, rows, dim]` of keys or values `[keys, kv_heads, dim]`.

    Args:
        rows: `[chunks, keys]` rows of x for each head.
    """
    pairs = zip(x.unbind(1), rows, strict=True)
    heads = (
        _with_means(head.index_select(0, index.flatten()).view(*index.shape, x.shape[2]), shape)
        for head, index in pairs
    )
    if torch.is_grad_enabled() and x.requires_grad:
        return torch.stack(list(heads))
    pages = x.new_empty(x.shape[1], len(rows[0]), shape.page, x.shape[2])
    for head, page in zip(pages, heads, strict=True):
        head.copy_(page)
    return pages


def _with_means(rows: Tensor, shape: Shape) -> Tensor:
    """Return keys or values `[chunks, keys, dim]`, followed by the means of groups, of nodes and of chunks."""
    levels, wide = [rows], rows.to(torch.promote_types(rows.dtype, torch.float32))
    for size in shape.branching:
        wide = wide.unflatten(1, (-1, size)).mean(2)
        levels.append(wide.to(rows.dtype))
    return torch.cat(levels, 1)


def levels_of(pages: Tensor, shape: Shape) -> tuple[Tensor, ...]:
    """Split pages `[kv_heads, chunks, rows, dim]` into their keys, groups, nodes and roots."""
    return pages.split(shape.rows, 2)


def clustering_operations(chunks: int, kv_heads: int, dim: int, shape: Shape) -> int:
    """Count the operations of the principal directions, of splits and groups, without the comparisons of sorting."""
    rounds = (shape.groups.bit_length() - 1) + 1  # splits, and the spreads of the groups
    return chunks * kv_heads * rounds * shape.chunk * dim * (4 * (ITERATIONS + 1) + 2)


def check_keys(keys: ClusteredKeys, layout: Layout, k: Tensor, v: Tensor | None) -> None:
    """Check that clustered keys fit the lengths, the shape and the tensors of a call."""
    fix = "Make them with hsa.cluster from the same keys, lengths and branching"
    chunks = layout.chunk_counts
    pages = layout.num_pages, layout.shape.page
    wanted = {"k": (k.shape[1], *pages, k.shape[2])}
    if v is not None:
        wanted["v"] = (v.shape[1], *pages, v.shape[2])
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
