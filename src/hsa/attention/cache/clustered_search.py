"""What tokens read of the complete chunks of a `ClusteredCache`: the groups they open, and the nodes that are left.

The choice is that of `select`; a row is a query head of one token, or of every token of a chunk of the prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hsa.attention.cache.clustered_tree import Heap, Past, Shape, Step, past_of, tables_of


@dataclass
class Counted:
    """What steps took, all heads and sequences together."""

    entries: int = 0  # keys and pooled nodes that were attended to
    scored: int = 0  # pooled nodes that the search looked at
    finding: int = 0  # operations for the order of chunks that became complete
    pooling: int = 0  # operations for their nodes


@dataclass
class KeptLayer:
    """What is kept of one layer. Leaves of complete chunks are in the order of their tree, the others in that of time."""

    keys: Tensor  # [batch, kv_heads, capacity, dim]
    values: Tensor
    place: Tensor  # [batch, kv_heads, capacity] of a leaf of a complete chunk: its place in time inside the chunk
    pooled_keys: Tensor  # [batch, kv_heads, nodes, dim]
    pooled_values: Tensor

    def tensors(self) -> dict[str, Tensor]:
        return dict(vars(self))


class Search:
    """What rows of queries read of complete chunks: the groups that they open, and the nodes that are left."""

    def __init__(self, shape: Shape, heap: Heap, past: Past, rows: int, q: Tensor, counted: Counted | None = None):
        self.shape, self.heap, self.past, self.rows, self.counted = shape, heap, past, rows, counted
        self.tables = tables_of(self.heap, self.shape.group, q.dtype, q.device)

    def _node_logits(self, nodes: Tensor) -> Tensor:
        """[batch, rows, nodes] of pooled nodes, with the logarithm of their keys."""
        raise NotImplementedError

    def _choose(self) -> Tensor:
        """[batch, rows, opened] numbers of the groups to open, ascending, at the end one past all groups for none.

        As `select` does, without its first rounds, in which every candidate is kept.
        """
        nodes = self.past.candidates[:, None].expand(-1, self.rows, -1)
        for _ in range(self.past.rounds):
            assert self.shape.width is not None
            # Where a search has come to the end already, its best stay until the others have.
            nodes = self.tables.children[self._best(nodes, self.shape.width)].flatten(-2)
        if nodes.shape[-1] > self.shape.top_k:
            nodes = self._best(nodes, self.shape.top_k, last=True)
        return (nodes - self.heap.first(1)).sort(-1).values

    def _best(self, nodes: Tensor, number: int, *, last: bool = False) -> Tensor:
        """[batch, rows, number] of the candidates, ties to the first: score and place in one integer."""
        if number == 0:
            return nodes[..., :0]
        score = self._node_logits(nodes).softmax(-1).to(torch.float32)
        place = torch.arange(nodes.shape[-1] - 1, -1, -1, device=nodes.device)
        order = score.view(torch.int32).to(torch.int64).bitwise_left_shift_(32).add_(place)
        if self.counted is not None:
            goes_on = (nodes < self.heap.first(1)).any(-1, keepdim=True) | last
            self.counted.scored += int(((nodes < self.heap.none) & goes_on).sum())
        return nodes.gather(-1, order.topk(min(number, nodes.shape[-1])).indices)

    def _rest(self, groups: Tensor) -> Tensor:
        """[batch, rows, entries] the largest nodes that hold no open group."""
        past, factor, none = self.past, self.shape.factor, self.heap.none
        batch, rows, number = groups.shape
        # Of every group the start above it; a start is pooled if it is above none.
        start = (groups[..., None] >= past.ends[:, None, None]).sum(-1)
        above = groups.new_zeros(batch, rows, past.height.shape[1], dtype=torch.bool).scatter_(-1, start, True)
        nodes = past.starts[:, None].where(~above[..., :-1], none)
        if number == 0 or past.tallest == 1:
            return nodes
        height, size, first_node = past.levels
        ancestor = groups[:, :, None] // size  # [batch, rows, heights, groups]
        parent = ancestor // factor
        # Groups ascend, so those below one parent are neighbours; the first of them stands for the family.
        before = torch.nn.functional.pad(parent[..., :-1], (1, 0), value=-1)
        first = parent != before
        stands = torch.arange(number, device=groups.device).where(first, 0).cummax(-1).values
        holds = first.new_zeros(*parent.shape[:-1], number * factor)
        holds = holds.scatter_(-1, stands * factor + ancestor % factor, True).unflatten(-1, (number, factor))
        below_start = height < past.height.gather(-1, start.flatten(1)).view_as(start)[:, :, None]
        member = (first_node + parent * factor)[..., None] + torch.arange(factor, device=groups.device)
        family = member.where((first & below_start)[..., None] & ~holds, none)
        # None is the greatest number: away with it.
        return torch.cat([nodes, family.flatten(2)], -1).sort(-1).values[..., : past.pooled]


class Token(Search):
    """One token of every sequence in one layer: a row per query head."""

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
        # [batch, heads, 1] where leaves and nodes of a tree begin, those of all sequences and key/value heads in a row.
        self.first_leaf, self.first_node = tree * capacity, tree * (self.heap.none + 1)
        self.last_leaf = capacity - 1

    def attend(self, bias: Tensor | None) -> Tensor:
        """[batch, heads, value_dim]"""
        grouped = self.q.unflatten(1, (self.kv_heads, -1))
        own_keys, own_values = (self._rows(x, self.step.exact) for x in (self.kept.keys, self.kept.values))
        own = (grouped @ own_keys.transpose(-1, -2)).flatten(1, 2)
        if self.step.hidden is not None:
            own = own.masked_fill(self.step.hidden, -math.inf)
        logits, parts = [own], []
        if self.past.tallest:
            groups = self._choose()
            for some_logits, values in (self._opened(groups), self._pooled(groups, bias)):
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
        """`[…, dim]` rows of all sequences and heads flattened."""
        chosen = leaves.flatten(0, 2).index_select(0, rows.flatten())
        return chosen.to(self.q.dtype).view(*rows.shape, leaves.shape[-1])

    def _logits(self, keys: Tensor) -> Tensor:
        return (keys @ self.q[..., None]).squeeze(-1)

    def _node_logits(self, nodes: Tensor) -> Tensor:
        return self._logits(self._rows(self.kept.pooled_keys, self.first_node + nodes)) + self.tables.log_count[nodes]

    def _opened(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and values of the keys of open groups."""
        member = torch.arange(self.shape.sinks, self.shape.sinks + self.shape.group, device=groups.device)
        slots = (groups[..., None] * self.shape.group + member).flatten(-2)
        rows = self.first_leaf + slots.clamp(max=self.last_leaf)
        logits = self._logits(self._rows(self.kept.keys, rows))
        if self.past.few:
            hidden = (groups == self.heap.groups).repeat_interleave(self.shape.group, -1)
            logits = logits.masked_fill(hidden, -math.inf)
        return logits, self._rows(self.kept.values, rows)

    def _pooled(self, groups: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits and values of the pooled rest."""
        nodes = self._rest(groups)
        logits = self._node_logits(nodes)
        if bias is not None:
            logits = logits + bias.to(logits.dtype)[:, None]
        return logits, self._rows(self.kept.pooled_values, self.first_node + nodes)


class Block(Search):
    """Queries of one chunk of some sequences: a row per query head and query, products with everything before them."""

    def __init__(self, shape: Shape, heap: Heap, kept: KeptLayer, chunk: int, sequences: Tensor, q: Tensor):
        """`q`: [sequences, queries, heads, dim], scaled."""
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
            self.known = self._products(kept.pooled_keys[sequences]) + self.tables.log_count

    def _products(self, keys: Tensor) -> Tensor:
        """[sequences, rows, keys]"""
        grouped = self.q.flatten(1, 2).unflatten(1, (self.kv_heads, -1))
        return (grouped @ keys.transpose(-1, -2)).flatten(1, 2)

    def _average(self, weights: Tensor, values: Tensor) -> Tensor:
        """[sequences, rows, value_dim]"""
        return (weights.unflatten(1, (self.kv_heads, -1)) @ values).flatten(1, 2)

    def _node_logits(self, nodes: Tensor) -> Tensor:
        return self.known.gather(-1, nodes)

    def attend(self, keys: Tensor, values: Tensor, hidden: Tensor, bias: Tensor | None) -> Tensor:
        """[sequences, queries, heads, value_dim]

        keys, values: [sequences, keys, kv_heads, dim] of the sinks and the own chunk, in the order of time.
        hidden: [queries, keys] which of them are later.
        """
        own_values = values.transpose(1, 2).to(self.q.dtype)
        own = self._products(keys.transpose(1, 2).to(self.q.dtype)).unflatten(1, (self.heads, self.queries))
        own = own.masked_fill(hidden, -math.inf).flatten(1, 2)
        if not self.past.tallest:
            out = self._average(own.softmax(-1), own_values)
            return out.unflatten(1, (self.heads, self.queries)).transpose(1, 2)
        groups = self._choose()
        member = torch.arange(self.shape.group, device=groups.device)
        slots = groups.clamp(max=self.keys.shape[2] // self.shape.group - 1)[..., None] * self.shape.group + member
        selection = self._products(self.keys).gather(-1, slots.flatten(-2))
        if self.past.few:
            none = (groups == self.heap.groups).repeat_interleave(self.shape.group, -1)
            selection = selection.masked_fill(none, -math.inf)
        nodes = self._rest(groups)
        pooled = self.known.gather(-1, nodes)
        if bias is not None:
            every = bias.to(pooled.dtype).expand(self.heads).repeat_interleave(self.queries)
            pooled = pooled + every[:, None]
        sizes = [part.shape[-1] for part in (own, selection, pooled)]
        weights = torch.cat([own, selection, pooled], -1).softmax(-1).split(sizes, -1)
        out = self._average(weights[0], own_values)
        for weight, places, at in (
            (weights[1], slots.flatten(-2), self.values),
            (weights[2], nodes, self.pooled_values),
        ):
            whole = weight.new_zeros(*weight.shape[:-1], at.shape[2])
            out = out + self._average(whole.scatter_add_(-1, places, weight), at)
        return out.unflatten(1, (self.heads, self.queries)).transpose(1, 2)
