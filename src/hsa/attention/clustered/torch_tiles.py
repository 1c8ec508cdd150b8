"""Backend "torch" of clustered attention: dense scores of all groups, then a gathered list per tile and head.

Tiles of one sequence that see the same chunks are processed together, as many as fit into a block of memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hsa.attention.clustered.call import ClusteredCall, SelectCall
from hsa.attention.clustered.keys import ClusteredKeys, build_keys
from hsa.attention.clustered.layout import Layout
from hsa.attention.clustered.selection import NEVER, TileSelection, lists_of

SCORES = {"cpu": 2**21, "cuda": 2**26}
"""Number of scores in memory at once."""


@dataclass(frozen=True)
class Block:
    """Consecutive tiles of one sequence, with the same number of queries and the same visible chunks."""

    tile: int
    tiles: int
    queries: int  # per tile
    row: int  # first row of q
    first_chunk: int
    chunks: int
    exact: int  # first row of k that is exact
    end: int  # end of the exact rows of the first query

    @property
    def rows(self) -> slice:
        """Rows of q."""
        return slice(self.row, self.row + self.tiles * self.queries)


def blocks(layout: Layout, tiles_at_once: int) -> Iterator[Block]:
    """Yield all tiles in blocks."""
    sizes = np.diff(layout.tile_row)
    begin = 0
    while begin < layout.num_tiles:
        end = begin + 1
        while (
            end < layout.num_tiles
            and end - begin < tiles_at_once
            and layout.tile_sequence[end] == layout.tile_sequence[begin]
            and layout.tile_chunks[end] == layout.tile_chunks[begin]
            and sizes[end] == sizes[begin]
        ):
            end += 1
        yield Block(
            tile=begin,
            tiles=end - begin,
            queries=int(sizes[begin]),
            row=int(layout.tile_row[begin]),
            first_chunk=int(layout.tile_chunk[begin]),
            chunks=int(layout.tile_chunks[begin]),
            exact=int(layout.tile_exact[begin]),
            end=int(layout.tile_end[begin]),
        )
        begin = end


@torch.no_grad()
def select(call: SelectCall) -> TileSelection:
    """Compute `hsa.select_groups` from checked arguments."""
    layout, keys = call.layout, call.keys
    first = call.q.new_empty(int(layout.tile_offset[-1]) * layout.shape.groups * call.lists, dtype=torch.uint8)
    result = TileSelection(first, layout, call.lists)
    cut = {int(tile): s for s, tile in enumerate(layout.first_tiles) if tile >= 0 and layout.is_cut(s)}
    scores = SCORES.get(call.q.device.type, SCORES["cpu"])
    most = max(1, scores // max(1, call.q.shape[1] * layout.shape.tile * int(layout.tile_chunks.max(initial=1))))
    for block in blocks(layout, most):
        if block.chunks == 0:
            continue
        opening = _first_rows(call, keys, block)
        if block.tile in cut and call.opened is not None:
            before = call.opened[cut[block.tile], :, : opening.shape[-1]]
            opening[0, :, : before.shape[-1]].masked_fill_(before, 0)
        result.tile(block.tile, block.tiles).copy_(opening)
    return result


def _first_rows(call: SelectCall, keys: ClusteredKeys, block: Block) -> Tensor:
    """Return `[tiles, lists, groups]` the first query of each tile for which a group is open."""
    layout, shape = call.layout, call.layout.shape
    kv_heads, heads = len(keys.k), call.q.shape[1]
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    q = (call.q[block.rows].to(dtype) * call.scale).transpose(0, 1)  # [heads, rows, dim]
    q = q.unflatten(0, (kv_heads, -1)).flatten(1, 2)  # [kv_heads, heads of a group · rows, dim]
    begin = layout.num_chunks * shape.chunk + block.first_chunk * shape.groups
    groups = slice(begin, begin + block.chunks * shape.groups)
    mean = torch.matmul(q, keys.k[:, groups].to(dtype).transpose(1, 2)).add_(math.log(shape.group))
    if call.threshold is not None:
        bound = _normalizer(call, keys, block, q) + math.log(call.threshold)
    if call.spread:
        spreads = slice(block.first_chunk * shape.groups, (block.first_chunk + block.chunks) * shape.groups)
        spread = torch.matmul(q, keys.spread[:, spreads].to(dtype).transpose(1, 2))
        mean.add_(spread.abs_(), alpha=call.spread)
    if call.threshold is None:
        assert call.top_k is not None
        number = min(call.top_k, mean.shape[-1])
        bound = mean.topk(number, -1).values[..., -1:] if number else mean.new_full((*mean.shape[:-1], 1), math.inf)
    wanted = (mean >= bound).view(heads, block.tiles, block.queries, -1)
    if call.lists < heads:
        wanted = wanted.unflatten(0, (kv_heads, -1)).any(1)
    opened = wanted.any(2)
    first = (
        wanted.to(torch.uint8).argmax(2).to(torch.uint8)
        if layout.causal
        else torch.zeros_like(opened, dtype=torch.uint8)
    )
    first = first.masked_fill_(~opened, NEVER)
    first[..., 0] = 0  # the group of the first key, a sink in most models
    return first.transpose(0, 1)


def _normalizer(call: SelectCall, keys: ClusteredKeys, block: Block, q: Tensor) -> Tensor:
    """Return `[kv_heads, rows, 1]` the log-sum-exp of the exact logits and of the pooled nodes."""
    layout, shape = call.layout, call.layout.shape
    begin = layout.num_chunks * (shape.chunk + shape.groups) + block.first_chunk * shape.rows[2]
    nodes = slice(begin, begin + block.chunks * shape.rows[2])
    pooled = torch.matmul(q, keys.k[:, nodes].to(q.dtype).transpose(1, 2)) + math.log(shape.node)
    exact = _exact_logits(q, call.k, block, layout)
    return torch.cat([pooled, exact], -1).logsumexp(-1, keepdim=True)


def _exact_logits(q: Tensor, k: Tensor, block: Block, layout: Layout) -> Tensor:
    """Return `[kv_heads, rows, exact keys]`, −∞ for keys that a query does not see. Queries are scaled."""
    last = block.end + (block.tiles * block.queries - 1 if layout.causal else 0)
    logits = torch.matmul(q, k[block.exact : last].to(q.dtype).permute(1, 2, 0))
    if layout.causal:
        row = torch.arange(block.tiles * block.queries, device=q.device)
        hidden = torch.arange(block.exact, last, device=q.device) >= (block.end + row)[:, None]
        logits = logits.unflatten(1, (-1, len(row))).masked_fill(hidden, -math.inf).flatten(1, 2)
    return logits


@torch.compiler.disable(reason="the torch backend of hsa.clustered_attention depends on values, such as the lists")
def attend(call: ClusteredCall) -> tuple[Tensor, Tensor]:
    """Compute `hsa.clustered_attention` from checked arguments: the output and its log-sum-exp `[queries, heads]`."""
    keys = call.keys or build_keys(call.k, call.v, call.layout, windows=call.windows)
    selection = call.selection or select(call.select(keys))
    outputs = []
    for block in blocks(call.layout, 1):
        if call.needs_gradient:
            outputs.append(checkpoint(_attend, call, keys, selection, block, use_reentrant=False))
        else:
            outputs.append(_attend(call, keys, selection, block))
    if not outputs:
        return call.q.new_empty(0, call.q.shape[1], call.v.shape[2]), call.q.new_empty(0, call.q.shape[1])
    return torch.cat([out for out, _ in outputs]), torch.cat([lse for _, lse in outputs])


def _attend(call: ClusteredCall, keys: ClusteredKeys, selection: TileSelection, block: Block) -> tuple[Tensor, Tensor]:
    """Attend from one tile: `[queries, heads, value_dim]` and `[queries, heads]`."""
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    heads, kv_heads = call.q.shape[1], call.k.shape[1]
    q = (call.q[block.rows].to(dtype) * call.scale).transpose(0, 1)  # [heads, queries, dim]
    by_kv_head = q.unflatten(0, (kv_heads, -1)).flatten(1, 2)
    exact = _exact_logits(by_kv_head, call.k, block, call.layout).view(heads, block.queries, -1)
    logits = [exact]
    if block.chunks:
        lists = lists_of(selection.tile(block.tile)[0], call.layout, block.queries, block.first_chunk)
        lists_per_head = heads // selection.lists
        rows, begin, end, log_count = (
            x.repeat_interleave(lists_per_head, 0) for x in (lists.rows, lists.begin, lists.end, lists.log_count)
        )
        kv_head = torch.arange(heads, device=q.device)[:, None] // (heads // kv_heads)
        index = (kv_head * keys.k.shape[1] + rows).flatten()
        bias = log_count.to(dtype)
        if call.pooled_bias is not None:
            pooled = rows >= call.layout.num_chunks * call.layout.shape.chunk
            bias = bias + torch.where(pooled, call.pooled_bias.to(dtype)[:, None], 0)
        listed = keys.k.flatten(0, 1).index_select(0, index).to(dtype).view(heads, -1, q.shape[-1])
        query = torch.arange(block.queries, device=q.device)[:, None]
        hidden = (query < begin[:, None]) | (query >= end[:, None])
        logits.append(torch.baddbmm(bias[:, None], q, listed.transpose(1, 2)).masked_fill_(hidden, -math.inf))
    every = torch.cat(logits, -1)
    lse = every.logsumexp(-1)
    weights = F.dropout((every - lse[..., None]).exp(), call.dropout_p)
    last = block.exact + exact.shape[-1]
    values = call.v[block.exact : last].to(dtype).transpose(0, 1)  # [kv_heads, exact keys, value_dim]
    near, far = weights.split([exact.shape[-1], every.shape[-1] - exact.shape[-1]], -1)
    out = (near.unflatten(0, (kv_heads, -1)).flatten(1, 2) @ values).view(heads, block.queries, -1)
    if block.chunks:
        out = out + far @ keys.v.flatten(0, 1).index_select(0, index).to(dtype).view(heads, -1, values.shape[-1])
    return out.transpose(0, 1).to(call.q.dtype), lse.T
