"""Attention of tokens over a `ClusteredCache`: selected groups of the complete chunks exactly, and the rest pooled.

The selection is the same as that of `select`. A row is a query head of one token (`Token`), or of each token of a chunk
of the prompts (`Block`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hsa.attention.cache.clustered_tree import Heap, Past, Shape, Step, past_of, tables_of
from hsa.attention.cache.interface import Counted


@dataclass
class KeptLayer:
    """Stored tensors of one layer. Complete chunks are in the order of their tree, the other leaves in that of time."""

    keys: Tensor  # [batch, kv_heads, capacity, dim]
    values: Tensor  # [batch, kv_heads, capacity, value_dim]
    time: Tensor  # [batch, kv_heads, capacity] for leaves of complete chunks: index in the chunk, in the order of time
    pooled_keys: Tensor  # [batch, kv_heads, nodes, dim]
    pooled_values: Tensor  # [batch, kv_heads, nodes, value_dim]

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        return dict(vars(self))


class Search:
    """Search of rows of queries in complete chunks: the groups to attend to exactly, the largest nodes of the rest."""

    def __init__(self, shape: Shape, heap: Heap, past: Past, rows: int, q: Tensor, counted: Counted | None = None):
        self.shape, self.heap, self.past, self.rows, self.counted = shape, heap, past, rows, counted
        self.tables = tables_of(self.heap, self.shape.group, q.dtype, q.device)

    def _node_logits(self, nodes: Tensor) -> Tensor:
        """Return logits `[batch, rows, nodes]` of pooled nodes, including the log of their number of keys."""
        raise NotImplementedError

    def _select(self) -> Tensor:
        """Return the selected groups `[batch, rows, top_k]` in ascending order, padded with the number of all groups.

        The result is that of `select`; its first rounds, which keep every candidate, are skipped.
        """
        nodes = self.past.candidates[:, None].expand(-1, self.rows, -1)
        for _ in range(self.past.rounds):
            assert self.shape.width is not None
            # A row that has reached the groups keeps its best ones until all rows have reached them.
            nodes = self.tables.children[self._best(nodes, self.shape.width)].flatten(-2)
        if nodes.shape[-1] > self.shape.top_k:
            nodes = self._best(nodes, self.shape.top_k, last=True)
        return (nodes - self.heap.first(1)).sort(-1).values

    def _best(self, nodes: Tensor, number: int, *, last: bool = False) -> Tensor:
        """Return the best candidates `[batch, rows, number]`; of equal scores, the first wins."""
        if number == 0:
            return nodes[..., :0]
        score = self._node_logits(nodes).softmax(-1).to(torch.float32)
        index = torch.arange(nodes.shape[-1] - 1, -1, -1, device=nodes.device)
        # Score and index form one integer: the bits of a non-negative float32 are ordered as the numbers are.
        order = score.view(torch.int32).to(torch.int64).bitwise_left_shift_(32).add_(index)
        if self.counted is not None:
            continues = (nodes < self.heap.first(1)).any(-1, keepdim=True) | last
            self.counted.scored += int(((nodes < self.heap.none) & continues).sum())
        return nodes.gather(-1, order.topk(min(number, nodes.shape[-1])).indices)

    def _rest(self, groups: Tensor) -> Tensor:
        """Return the largest nodes that contain no selected group, `[batch, rows, entries]`."""
        past, factor, none = self.past, self.shape.factor, self.heap.none
        batch, rows, number = groups.shape
        # Find the start above every group; a start above no group is an entry itself.
        start = (groups[..., None] >= past.ends[:, None, None]).sum(-1)
        above = groups.new_zeros(batch, rows, past.height.shape[1], dtype=torch.bool).scatter_(-1, start, True)
        nodes = past.starts[:, None].where(~above[..., :-1], none)
        if number == 0 or past.tallest == 1:
            return nodes
        height, size, first_node = past.levels
        ancestor = groups[:, :, None] // size  # [batch, rows, heights, groups]
        parent = ancestor // factor
        # Groups are in ascending order, so those below one parent are adjacent; the first represents the family.
        before = torch.nn.functional.pad(parent[..., :-1], (1, 0), value=-1)
        first = parent != before
        representative = torch.arange(number, device=groups.device).where(first, 0).cummax(-1).values
        holds = first.new_zeros(*parent.shape[:-1], number * factor)
        holds = holds.scatter_(-1, representative * factor + ancestor % factor, True).unflatten(-1, (number, factor))
        below_start = height < past.height.gather(-1, start.flatten(1)).view_as(start)[:, :, None]
        member = (first_node + parent * factor)[..., None] + torch.arange(factor, device=groups.device)
        family = member.where((first & below_start)[..., None] & ~holds, none)
        # Missing nodes have the greatest number: they are sorted to the end and cut off.
        return torch.cat([nodes, family.flatten(2)], -1).sort(-1).values[..., : past.pooled]


class Token(Search):
    """Attention of one token per sequence in one layer, with a row per query head."""

    def __init__(
        self,
        shape: Shape,
        heap: Heap,
        kept: KeptLayer,
        step: Step,
        q: Tensor,
        scale: float,
        counted: Counted | None,
    ):
        self.q = q.to(kept.pooled_keys.dtype) * scale  # [batch, heads, dim]
        super().__init__(shape, heap, step.past, q.shape[1], self.q, counted)
        self.kept, self.step = kept, step
        self.kv_heads, capacity = kept.keys.shape[1:3]
        sequence = torch.arange(len(q), device=q.device)[:, None] * self.kv_heads
        tree = (sequence + torch.arange(self.rows, device=q.device) // (self.rows // self.kv_heads))[..., None]
        # [batch, heads, 1] row of the first leaf and node of each tree, with sequences and key/value heads flattened.
        self.first_leaf, self.first_node = tree * capacity, tree * (self.heap.none + 1)
        self.last_leaf = capacity - 1

    def attend(self, bias: Tensor | None) -> Tensor:
        """Return the attention `[batch, heads, value_dim]`; `bias` is that of pooled nodes."""
        grouped = self.q.unflatten(1, (self.kv_heads, -1))
        own_keys, own_values = (self._rows(x, self.step.exact) for x in (self.kept.keys, self.kept.values))
        own = (grouped @ own_keys.transpose(-1, -2)).flatten(1, 2)
        if self.step.hidden is not None:
            own = own.masked_fill(self.step.hidden, -math.inf)
        logits, parts = [own], []
        if self.past.tallest:
            groups = self._select()
            for some_logits, values in (self._selected(groups), self._pooled(groups, bias)):
                logits.append(some_logits)
                parts.append(values)
        sizes = [part.shape[-1] for part in logits]
        own_weights, *weights = torch.cat(logits, -1).softmax(-1).split(sizes, -1)
        out = (own_weights.unflatten(1, (self.kv_heads, -1)) @ own_values).flatten(1, 2)
        for weight, values in zip(weights, parts, strict=True):
            out = out + (weight[..., None, :] @ values).squeeze(-2)
        if self.counted is not None:
            self.counted.entries += sum(int((part > -math.inf).sum()) for part in logits)
        return out

    def _rows(self, leaves: Tensor, rows: Tensor) -> Tensor:
        """Return rows `[…, dim]`, with sequences and heads flattened."""
        read = leaves.flatten(0, 2).index_select(0, rows.flatten())
        return read.to(self.q.dtype).view(*rows.shape, leaves.shape[-1])

    def _logits(self, keys: Tensor) -> Tensor:
        return (keys @ self.q[..., None]).squeeze(-1)

    def _node_logits(self, nodes: Tensor) -> Tensor:
        return self._logits(self._rows(self.kept.pooled_keys, self.first_node + nodes)) + self.tables.log_count[nodes]

    def _selected(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and values of the keys of selected groups."""
        member = torch.arange(self.shape.sinks, self.shape.sinks + self.shape.group, device=groups.device)
        slots = (groups[..., None] * self.shape.group + member).flatten(-2)
        rows = self.first_leaf + slots.clamp(max=self.last_leaf)
        logits = self._logits(self._rows(self.kept.keys, rows))
        if self.past.few:
            hidden = (groups == self.heap.groups).repeat_interleave(self.shape.group, -1)
            logits = logits.masked_fill(hidden, -math.inf)
        return logits, self._rows(self.kept.values, rows)

    def _pooled(self, groups: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return logits and values of the pooled rest."""
        nodes = self._rest(groups)
        logits = self._node_logits(nodes)
        if bias is not None:
            logits = logits + bias.to(logits.dtype)[:, None]
        return logits, self._rows(self.kept.pooled_values, self.first_node + nodes)


class Block(Search):
    """Attention of queries of one chunk of some sequences, with a row per query head and query.

    All rows are multiplied with all earlier keys and nodes.
    """

    def __init__(self, shape: Shape, heap: Heap, kept: KeptLayer, chunk: int, sequences: Tensor, q: Tensor):
        """Compute the logits of pooled nodes for scaled queries `q` `[sequences, queries, heads, dim]`."""
        several, self.queries, self.heads, _ = q.shape
        self.q = q.to(kept.pooled_keys.dtype).transpose(1, 2)  # [sequences, heads, queries, dim]
        past = past_of(shape, heap, (chunk,) * several, q.device)
        super().__init__(shape, heap, past, self.heads * self.queries, self.q)
        self.kv_heads = kept.keys.shape[1]
        if chunk:
            before = slice(shape.sinks, shape.sinks + chunk * shape.chunk)
            leaves = (x[sequences, :, before].to(self.q.dtype) for x in (kept.keys, kept.values))
            self.keys, self.values = leaves  # [sequences, kv_heads, leaves, dim]
            self.pooled_values = kept.pooled_values[sequences]
            self.node_logits = self._products(kept.pooled_keys[sequences]) + self.tables.log_count

    def _products(self, keys: Tensor) -> Tensor:
        """Return the products of all rows with keys, `[sequences, rows, keys]`."""
        grouped = self.q.flatten(1, 2).unflatten(1, (self.kv_heads, -1))
        return (grouped @ keys.transpose(-1, -2)).flatten(1, 2)

    def _average(self, weights: Tensor, values: Tensor) -> Tensor:
        """Return the weighted sums of values, `[sequences, rows, value_dim]`."""
        return (weights.unflatten(1, (self.kv_heads, -1)) @ values).flatten(1, 2)

    def _node_logits(self, nodes: Tensor) -> Tensor:
        return self.node_logits.gather(-1, nodes)

    def attend(self, keys: Tensor, values: Tensor, hidden: Tensor, bias: Tensor | None) -> Tensor:
        """Return the attention `[sequences, queries, heads, value_dim]`.

        Args:
            keys, values: `[sequences, keys, kv_heads, dim]` of the sinks and of the chunk, in the order of time.
            hidden: `[queries, keys]` whether a key is later than the query.
            bias: `[1 or heads]` bias of pooled nodes.
        """
        own_values = values.transpose(1, 2).to(self.q.dtype)
        own = self._products(keys.transpose(1, 2).to(self.q.dtype)).unflatten(1, (self.heads, self.queries))
        own = own.masked_fill(hidden, -math.inf).flatten(1, 2)
        if not self.past.tallest:
            out = self._average(own.softmax(-1), own_values)
            return out.unflatten(1, (self.heads, self.queries)).transpose(1, 2)
        groups = self._select()
        member = torch.arange(self.shape.group, device=groups.device)
        slots = groups.clamp(max=self.keys.shape[2] // self.shape.group - 1)[..., None] * self.shape.group + member
        selected = self._products(self.keys).gather(-1, slots.flatten(-2))
        if self.past.few:
            none = (groups == self.heap.groups).repeat_interleave(self.shape.group, -1)
            selected = selected.masked_fill(none, -math.inf)
        nodes = self._rest(groups)
        pooled = self._node_logits(nodes)
        if bias is not None:
            of_row = bias.to(pooled.dtype).expand(self.heads).repeat_interleave(self.queries)
            pooled = pooled + of_row[:, None]
        sizes = [part.shape[-1] for part in (own, selected, pooled)]
        weights = torch.cat([own, selected, pooled], -1).softmax(-1).split(sizes, -1)
        out = self._average(weights[0], own_values)
        for weight, index, stored in (
            (weights[1], slots.flatten(-2), self.values),
            (weights[2], nodes, self.pooled_values),
        ):
            every = weight.new_zeros(*weight.shape[:-1], stored.shape[2])
            out = out + self._average(every.scatter_add_(-1, index, weight), stored)
        return out.unflatten(1, (self.heads, self.queries)).transpose(1, 2)
