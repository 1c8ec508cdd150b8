"""Attention of one new token per sequence in a `ClusteredCache`: `clustered_attention` for the last query of a tile.

Pooled rows are scored for the selection anyway, so their logits are masked where they are not active. Only the keys of open
groups are gathered, into lists that are padded to the longest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hsa.attention.cache.clustered_rows import LEVELS, Layer
from hsa.attention.cache.interface import AttendOptions, Counted
from hsa.attention.clustered.layout import Shape
from hsa.attention.clustered.selection import NEVER


@dataclass(frozen=True)
class Rule:
    """Rule by which queries select groups; see `hsa.clustered_attention`."""

    threshold: float | None
    top_k: int | None
    spread: float
    share_lists: bool


@dataclass(frozen=True, eq=False)
class Step:
    """New tokens, one per sequence.

    Attributes:
        position: `[batch]` position of each token.
        chunks: Maximum number of complete chunks that a token sees.
        starts_tile: Whether any token is the first of its tile.
        completed: Sequence and number of the chunks that the tokens complete.
    """

    position: Tensor
    chunks: int
    starts_tile: bool
    completed: list[tuple[int, int]]

    @classmethod
    def of(cls, lengths: list[int], shape: Shape, device: torch.device) -> Step:
        """Return the step after sequences of these lengths."""
        return cls(
            position=torch.tensor(lengths, device=device),
            chunks=max(lengths) // shape.chunk,
            starts_tile=any(n % shape.tile == 0 for n in lengths),
            completed=[(i, n // shape.chunk) for i, n in enumerate(lengths) if (n + 1) % shape.chunk == 0],
        )


def attend_token(layer: Layer, q: Tensor, step: Step, shape: Shape, rule: Rule, options: AttendOptions) -> Tensor:
    """Return the attention `[batch, heads, value_dim]` of new tokens whose keys are stored, and extend the open groups."""
    heads, kv_heads, dtype = q.shape[1], layer["spread"].shape[1], torch.promote_types(q.dtype, torch.float32)
    q = (q.to(dtype) * options.scale).unflatten(1, (kv_heads, -1))  # [batch, kv_heads, share, dim]
    own, position = step.position // shape.chunk, step.position % shape.chunk
    near = torch.arange(len(q), device=q.device), slice(None), own
    hidden = torch.arange(shape.chunk, device=q.device) > position[:, None, None, None]
    # Logits [batch, kv_heads, share, n] and values [batch, kv_heads, n, value_dim] of all entries, kind by kind.
    logits = [_scores(q, layer["k_keys"][near]).masked_fill_(hidden, -math.inf)]
    values = [layer["v_keys"][near]]
    if step.starts_tile:
        starts = (step.position % shape.tile == 0)[:, None, None, None]
        layer["before"] = torch.where(starts, layer["first"], layer["before"])
        layer["first"] = layer["first"].masked_fill(starts, NEVER)
    if step.chunks:
        sees = torch.arange(step.chunks, device=q.device) < own[:, None]  # [batch, chunks]
        pooled = [_scores(q, _pooled(layer["k_" + level], step.chunks)) for level in LEVELS[1:]]
        for scores, size in zip(pooled, (shape.group, shape.node, shape.chunk), strict=True):
            scores.add_(math.log(size)).masked_fill_(~_per_row(sees, scores), -math.inf)
        wanted = _wanted(layer, q, logits[0], pooled, step.chunks, rule)
        is_open = _open(layer, wanted, sees, step.position % shape.tile, rule)
        bias = None if options.bias is None else options.bias.to(dtype).expand(heads).view(kv_heads, -1, 1)
        for scores, active in zip(pooled, _active(is_open, shape), strict=True):
            logits.append((scores if bias is None else scores + bias).masked_fill_(~active, -math.inf))
        values += [_pooled(layer["v_" + level], step.chunks) for level in LEVELS[1:]]
        groups, exists = _listed(is_open)
        by_list = q.unflatten(2, (is_open.shape[2], -1))  # [batch, kv_heads, lists, queries per list, dim]
        exact = _scores(by_list, _gather(layer["k_keys"], groups, shape))
        hidden = ~exists.repeat_interleave(shape.group, -1)[..., None, :]
        logits.append(exact.masked_fill_(hidden, -math.inf).flatten(2, 3))
    every = torch.cat(logits, -1)
    if options.counted is not None:
        _count(options.counted, every, step, shape, rule)
    parts = every.softmax(-1).split([x.shape[-1] for x in logits], -1)
    out = sum(weights @ v.to(dtype) for weights, v in zip(parts[: len(values)], values, strict=True))
    if step.chunks:
        exact_values = _gather(layer["v_keys"], groups, shape).to(dtype)
        out = out + (parts[-1].unflatten(2, (is_open.shape[2], -1)) @ exact_values).flatten(2, 3)
    assert isinstance(out, Tensor)
    return out.flatten(1, 2)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.to(q.dtype).transpose(-1, -2)


def _pooled(level: Tensor, chunks: int) -> Tensor:
    """Return the rows `[batch, kv_heads, rows, dim]` of the first chunks."""
    return level[:, :, :chunks].flatten(2, 3)


def _per_row(sees: Tensor, scores: Tensor) -> Tensor:
    """Return whether each row of a level is visible, `[batch, 1, 1, rows]`."""
    return sees.repeat_interleave(scores.shape[-1] // sees.shape[1], 1)[:, None, None]


def _wanted(layer: Layer, q: Tensor, near: Tensor, pooled: list[Tensor], chunks: int, rule: Rule) -> Tensor:
    """Return `[batch, kv_heads, share, groups]` the groups that the tokens want."""
    estimate = pooled[0]
    if rule.spread:
        estimate = estimate + rule.spread * _scores(q, _pooled(layer["spread"], chunks)).abs_()
    if rule.threshold is not None:
        bound = torch.cat([near, pooled[1]], -1).logsumexp(-1, keepdim=True) + math.log(rule.threshold)
        return estimate >= bound
    assert rule.top_k is not None
    if rule.top_k == 0:
        return torch.zeros_like(estimate, dtype=torch.bool)
    return estimate >= estimate.topk(min(rule.top_k, estimate.shape[-1]), -1).values[..., -1:]


def _open(layer: Layer, wanted: Tensor, sees: Tensor, row: Tensor, rule: Rule) -> Tensor:
    """Add wanted groups to the open ones; return whether groups are open, `[batch, kv_heads, lists, chunks, groups]`."""
    if rule.share_lists:
        wanted = wanted.any(2, keepdim=True)
    first = layer["first"][:, :, : sees.shape[1]]
    opens = wanted.flatten(1, 2).view_as(first) & sees[:, None, :, None] & (first == NEVER)
    first.copy_(torch.where(opens, row.to(torch.uint8)[:, None, None, None], first))
    first[:, :, 0, 0] = first[:, :, 0, 0].masked_fill(sees[:, :1], 0)  # the group of the first key
    return (first != NEVER).unflatten(1, wanted.shape[1:3])


def _active(is_open: Tensor, shape: Shape) -> list[Tensor]:
    """Return which groups, nodes and chunks are the largest without an open group, `[batch, kv_heads, lists, rows]`."""
    group = is_open.unflatten(-1, (shape.branching[2], shape.branching[1]))
    node = group.any(-1)
    chunk = node.any(-1)
    active = node[..., None] & ~group, chunk[..., None] & ~node, ~chunk
    return [x.flatten(3) for x in active]


def _listed(is_open: Tensor) -> tuple[Tensor, Tensor]:
    """Return `[batch, kv_heads, lists, longest]` the numbers of the open groups of each list, and whether they exist."""
    is_open = is_open.flatten(3)
    count = is_open.sum(-1)
    *which, group = is_open.nonzero(as_tuple=True)
    slot = (is_open.cumsum(-1) - 1)[(*which, group)]
    groups = is_open.new_zeros(*count.shape, int(count.max()), dtype=torch.long)
    groups[(*which, slot)] = group
    return groups, torch.arange(groups.shape[-1], device=groups.device) < count[..., None]


def _gather(keys: Tensor, groups: Tensor, shape: Shape) -> Tensor:
    """Return the keys of groups, `[batch, kv_heads, lists, keys, dim]`."""
    batch, kv_heads, chunks, _, dim = keys.shape
    head = torch.arange(batch * kv_heads, device=keys.device).view(batch, kv_heads, 1, 1)
    rows = keys.view(-1, shape.group * dim).index_select(0, (head * chunks * shape.groups + groups).flatten())
    return rows.view(*groups.shape[:-1], -1, dim)


def _count(counted: Counted, logits: Tensor, step: Step, shape: Shape, rule: Rule) -> None:
    """Add the entries that the tokens attend to, and the pooled rows that they score."""
    counted.entries += int((logits > -math.inf).sum())
    chunks = int((step.position // shape.chunk).sum())
    rows = shape.groups * (2 if rule.spread else 1) + (shape.rows[2] if rule.threshold is not None else 0)
    counted.scored += chunks * rows * logits.shape[1] * logits.shape[2]
