"""Backend "torch": pool keys and values into a pyramid, gather the list of every group, and attend to it.

Groups of similar size and list length are processed together, in chunks that bound the memory; they are padded to one
shape where that costs less than another chunk. Chunks are recomputed for the gradient (checkpointing).
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

from hsa.attention.entmax import entmax, level
from hsa.attention.multiscale.call import MultiscaleCall
from hsa.attention.multiscale.position_logits import position_logits
from hsa.attention.multiscale.pyramid import in_order, pyramid
from hsa.attention.multiscale.selection import Partition
from hsa.attention.normalizers import Entmax
from hsa.attention.rounds import rounds
from hsa.attention.softmax import exact
from hsa.tree.hierarchy import Hierarchy

CHUNK = {"cpu": 2**22, "cuda": 2**26}
"""Number of gathered values in memory at once."""
COST_OF_CHUNK = {"cpu": 2**24, "cuda": 2**30}
"""Number of products (of padding) that take about as long as another chunk."""


@torch.compiler.disable(reason="the torch backend of hsa.multiscale_attention depends on values, such as the lists")
def attend(call: MultiscaleCall) -> Tensor:
    """Compute `hsa.multiscale_attention` from checked arguments."""
    q, k, v = call.q, call.k, call.v
    if call.clusters is not None:
        k, v = in_order(k, call.clusters.order), in_order(v, call.clusters.order)
    plan = rounds(call.hierarchy)
    keys, values = pyramid(k, plan), pyramid(v, plan)
    needs_gradient = call.needs_gradient
    out = q.new_empty(len(q), q.shape[1], v.shape[-1])  # used without a gradient; with one, `pieces` are
    pieces: list[Tensor] = []
    piece_row = torch.empty(len(q), dtype=torch.int64, device=q.device)  # row of every query in the joined pieces
    begin = 0
    for chunk in chunks_of_call(call, keys.dtype):
        rows = chunk.rows.flatten()
        if needs_gradient:
            pieces.append(checkpoint(_attend, call, chunk, keys, values, use_reentrant=False).to(q.dtype))
            piece_row[rows] = torch.arange(begin, begin + len(rows), device=q.device)
            begin += len(rows)
        else:
            out.index_copy_(0, rows, _attend(call, chunk, keys, values).to(q.dtype))
    return torch.cat(pieces).index_select(0, piece_row) if pieces else out


@dataclass(frozen=True, eq=False)
class Chunk:
    """Groups of similar size with their lists, padded. Lists have one head if all heads share them."""

    rows: Tensor  # [groups, queries] rows of q; padding repeats the last query of a group, and so its result
    leaf: Tensor | None  # [groups, queries] leaf nodes of the queries
    parent: Tensor | None  # [groups] parent of these leaves
    nodes: Tensor  # [groups, 1 or heads, entries] nodes of the lists
    key_rows: Tensor  # [groups, heads, entries] rows of the pyramid with slots and key/value heads flattened
    pooled: Tensor  # [groups, 1 or heads, entries] whether the node is not a leaf
    log_count: Tensor  # [groups, 1 or heads, entries] log of the number of leaves
    mask: Tensor | None  # [groups, 1 or heads, 1 or queries, entries] whether the query attends to the entry

    def seen(self) -> Tensor:
        """Return the mask, without the repeated queries of the padding."""
        repeated = torch.zeros_like(self.rows, dtype=torch.bool)
        repeated[:, 1:] = self.rows[:, 1:] == self.rows[:, :-1]
        once = ~repeated[:, None, :, None]
        return once if self.mask is None else self.mask & once


def chunks_of_call(call: MultiscaleCall, dtype: torch.dtype) -> Iterator[Chunk]:
    """Yield all groups of a call with their lists, chunk by chunk."""
    partition, heads = call.selection.partition(call.hierarchy), call.q.shape[1]
    lists = Lists(call.hierarchy, partition, call.limit, call.include_self, heads, call.k.shape[1], dtype)
    for groups, num_queries, longest_list in _similar_groups(partition, heads * call.q.shape[2]):
        yield lists.chunk(groups, num_queries, longest_list)


def _attend(call: MultiscaleCall, chunk: Chunk, keys: Tensor, values: Tensor) -> Tensor:
    """Return the results of a chunk, `[groups · queries, heads, value_dim]`."""
    v = _gather(values, chunk)
    if call.dropout_p == 0 and call.mixing is None and call.entmax is None:
        queries, k, bias, position = _gather_logit_terms(call, chunk, keys)
        bias = _sum(chunk.log_count[:, :, None], bias, position)
        out, _ = exact(queries, k, v, bias, chunk.mask, scale=call.scale)
    else:
        weights = chunk_weights(call, chunk, keys)
        out = (F.dropout(weights, call.dropout_p) if call.dropout_p else weights) @ v
    return out.transpose(1, 2).flatten(0, 1)


def chunk_weights(call: MultiscaleCall, chunk: Chunk, keys: Tensor) -> Tensor:
    """Return the weights of all entries, `[groups, heads, queries, entries]`; `keys` is the pyramid."""
    queries, k, bias, position = _gather_logit_terms(call, chunk, keys)
    logits = _sum(queries @ k.transpose(-1, -2) * call.scale, position)
    logits = _sum(logits if call.mixing is None else call.mixing.mix_logits(logits), bias)
    weights = _softmax(logits, chunk) if call.entmax is None else _entmax(logits, chunk, call.hierarchy, call.entmax)
    return weights if call.mixing is None else call.mixing.mix_weights(weights)


def _gather_logit_terms(
    call: MultiscaleCall, chunk: Chunk, keys: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return queries and keys `[groups, heads, queries or entries, dim]`, bias of pooled nodes and position logits."""
    queries = call.q.index_select(0, chunk.rows.flatten()).unflatten(0, chunk.rows.shape).transpose(1, 2)
    bias = position = None
    if call.pooled_bias is not None:
        per_head = call.pooled_bias.to(keys.dtype)[:, None]
        bias = torch.where(chunk.pooled, per_head, torch.zeros_like(per_head))[:, :, None]
    if call.positions is not None:
        assert chunk.parent is not None
        assert chunk.leaf is not None
        position = position_logits(call.positions, call.hierarchy, chunk.parent, chunk.leaf, chunk.nodes)
    return queries.to(keys.dtype), _gather(keys, chunk), bias, position


def _gather(rows: Tensor, chunk: Chunk) -> Tensor:
    """Return the entries of the lists from the pyramid, `[groups, heads, entries, dim]`."""
    return rows.flatten(0, 1).index_select(0, chunk.key_rows.flatten()).unflatten(0, chunk.key_rows.shape)


def _sum(x: Tensor, *others: Tensor | None) -> Tensor:
    for other in others:
        x = x if other is None else x + other
    return x


def _softmax(logits: Tensor, chunk: Chunk) -> Tensor:
    hidden = logits == -math.inf  # where the bias of pooled nodes is −∞
    hidden = hidden if chunk.mask is None else hidden | ~chunk.mask
    logits = (logits + chunk.log_count[:, :, None]).masked_fill(hidden, torch.finfo(logits.dtype).min)
    return logits.softmax(-1).masked_fill(hidden, 0)


def _entmax(logits: Tensor, chunk: Chunk, hierarchy: Hierarchy, normalizer: Entmax) -> Tensor:
    if chunk.mask is not None:
        logits = logits.masked_fill(~chunk.mask, -math.inf)
    count = hierarchy.leaf_count[chunk.nodes][:, :, None].to(logits.dtype)
    if normalizer.counts == "logits":
        logits, count = logits + chunk.log_count[:, :, None], torch.ones_like(count[:1, :1])
    if normalizer.levels == 1:
        alpha = normalizer.at_height(1, logits.dtype)
        return entmax(logits, count, alpha[:, None, None] if alpha.ndim else alpha)
    alpha = _alpha_of_nodes(chunk.nodes, hierarchy, normalizer.by_height(normalizer.levels, logits))
    return entmax(level(logits, alpha), count, alpha)


def _alpha_of_nodes(nodes: Tensor, hierarchy: Hierarchy, alpha: Tensor) -> Tensor:
    """Return α `[groups, 1 or heads, 1, entries]` at the height of the family that each node belongs to."""
    heads = max(nodes.shape[1], alpha.shape[1])
    row = hierarchy.tensor("height")[hierarchy.parent[nodes]].clamp(max=len(alpha)) - 1
    head = torch.arange(alpha.shape[1], device=nodes.device).expand(heads)[:, None]
    return alpha[row.expand(-1, heads, -1), head][:, :, None]


class Lists:
    """Builder of chunks: turns the nodes of a partition into rows of the pyramid, leaf counts and masks."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        partition: Partition,
        limit: Tensor | None,
        include_self: bool,
        heads: int,
        kv_heads: int,
        dtype: torch.dtype = torch.float32,
    ):
        self.hierarchy, self.partition, self.limit = hierarchy, partition, limit
        self.slot = rounds(hierarchy).slot_of_node
        self.include_self, self.kv_heads = include_self, kv_heads
        self.kv_head = torch.arange(kv_heads, device=self.slot.device).repeat_interleave(heads // kv_heads)
        self.queries = partition.queries
        self.log_count = hierarchy.cached("log leaf counts", lambda: hierarchy.leaf_count.double().log()).to(dtype)

    def chunk(self, groups: Tensor, num_queries: int, longest_list: int) -> Chunk:
        """Build the chunk of some groups, padded to a number of queries and a length of lists."""
        h, partition, device = self.hierarchy, self.partition, self.slot.device
        end = self.queries.offsets[groups + 1][:, None]
        rows = (self.queries.offsets[groups][:, None] + torch.arange(num_queries, device=device)).minimum(end - 1)

        entry = torch.arange(longest_list, device=device)
        row = groups[:, None] * partition.heads + torch.arange(partition.heads, device=device)
        inside = entry < (partition.offsets[row + 1] - partition.offsets[row])[..., None]
        index = partition.offsets[row][..., None] + entry
        nodes = partition.nodes[torch.where(inside, index, 0)]  # [groups, 1 or heads, entries]
        slots = self.slot[nodes]
        pooled = h.num_children[nodes] > 0
        mask = None if bool(inside.all()) else inside[:, :, None]

        leaf = parent = None
        if self.queries.leaves is not None:
            leaf = h.tensor("leaf_nodes")[self.queries.leaves[rows]]
            parent = h.parent[leaf[:, 0]]
            if not self.include_self:
                mask = _both(mask, nodes[:, :, None] != leaf[:, None, :, None])
        if self.limit is not None:
            last = h.tensor("end_leaf")[nodes] - 1  # leaf number of the last key in a node
            mask = _both(mask, last[:, :, None] < self.limit[rows][:, None, :, None])
        return Chunk(
            rows=rows,
            leaf=leaf,
            parent=parent,
            nodes=nodes,
            key_rows=slots * self.kv_heads + self.kv_head[:, None],
            pooled=pooled,
            log_count=self.log_count[nodes],
            mask=mask,
        )


def entries_seen(partition: Partition, hierarchy: Hierarchy, limit: Tensor | None, heads: int) -> int:
    """Count the list entries that queries attend to, summed over heads, without those beyond their limit."""
    if limit is None:
        sizes = torch.from_numpy(np.diff(partition.queries.host_offsets))
        return int((sizes[:, None] * partition.lengths.cpu()).sum()) * (heads // partition.heads)
    lists = Lists(hierarchy, partition, limit, True, heads, 1)
    total = 0
    for groups, num_queries, longest_list in _similar_groups(partition, heads):
        chunk = lists.chunk(groups, num_queries, longest_list)
        total += int(chunk.seen().expand(len(groups), heads, num_queries, longest_list).sum())
    return total


def _both(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a & b


def _similar_groups(partition: Partition, numbers_per_entry: int) -> Iterator[tuple[Tensor, int, int]]:
    """Yield groups of similar size and list length together: (groups, largest group, longest list)."""
    sizes = np.diff(partition.queries.host_offsets)
    lengths = partition.lengths.amax(1).cpu().numpy() if len(sizes) else sizes
    order = np.lexsort((lengths, sizes))[::-1]
    order = order[sizes[order] > 0]
    kind = "cpu" if partition.offsets.device.type == "cpu" else "cuda"
    for begin, end in _split_by_padding(sizes[order], lengths[order], COST_OF_CHUNK[kind] // numbers_per_entry):
        size, longest = int(sizes[order[begin]]), int(lengths[order[begin:end]].max())
        step = max(1, CHUNK[kind] // (numbers_per_entry * (longest + size)))
        for first in range(begin, end, step):
            groups = order[first : min(first + step, end)]
            yield torch.as_tensor(groups.copy()).to(partition.offsets.device), size, int(lengths[groups].max())


def _split_by_padding(sizes: np.ndarray, lengths: np.ndarray, most_padding: int) -> list[tuple[int, int]]:
    """Split groups, sorted by descending size, so that padding each part to one shape adds at most `most_padding`.

    >>> _split_by_padding(np.array([9, 9, 8, 2]), np.array([20, 10, 10, 10]), most_padding=200)
    [(0, 3), (3, 4)]
    """
    if len(sizes) == 0:
        return []
    # Each run of one size and similar lengths is processed once.
    classes = np.flatnonzero(np.diff(sizes * 2**32 + lengths // 16, prepend=-1))
    cuts, count, entries, size, longest = [0], 0, 0, int(sizes[0]), 0
    for begin, end in zip(classes, [*classes[1:], len(sizes)], strict=True):
        more, top = int((sizes[begin:end] * lengths[begin:end]).sum()), int(lengths[begin:end].max())
        padded = (count + end - begin) * size * max(longest, top)
        if count and padded - entries - more > most_padding:
            cuts.append(int(begin))
            count, entries, size, longest = 0, 0, int(sizes[begin]), 0
        count, entries, longest = count + int(end - begin), entries + more, max(longest, top)
    return list(zip(cuts, [*cuts[1:], len(sizes)], strict=True))
