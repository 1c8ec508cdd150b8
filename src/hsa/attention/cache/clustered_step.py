"""Attention of one new token per sequence in a `ClusteredCache`: `clustered_attention` for the last query of a tile.

Pooled rows are scored for the selection anyway, so their logits are masked where they are not active. Only the keys of open
groups are gathered, into lists that are padded to the longest.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hsa.attention.cache.clustered_rows import Layer, Rule, as_keys
from hsa.attention.cache.interface import AttendOptions, Counted
from hsa.attention.clustered.keys import levels_of
from hsa.attention.clustered.layout import Shape
from hsa.attention.clustered.selection import NEVER


def attend_token(
    layer: Layer, q: Tensor, position: Tensor, chunks: int, shape: Shape, rule: Rule, options: AttendOptions
) -> Tensor:
    """Return the attention `[batch, heads, value_dim]` of new tokens whose keys are stored, and extend the open groups.

    Args:
        layer: Tensors of the layer.
        q: `[batch, heads, dim]` queries of the new tokens.
        position: `[batch]` their positions.
        chunks: Maximum number of complete chunks that a token sees.
    """
    heads, kv_heads, dtype = q.shape[1], len(layer["k"]), torch.promote_types(q.dtype, torch.float32)
    q = (q.to(dtype) * options.scale).unflatten(1, (kv_heads, -1))  # [batch, kv_heads, share, dim]
    own, row = position // shape.chunk, position % shape.tile
    near = slice(None), torch.arange(len(q), device=q.device), own, slice(shape.chunk)
    hidden = torch.arange(shape.chunk, device=q.device) > (position % shape.chunk)[:, None, None, None]
    # Logits [batch, kv_heads, share, n] and values [batch, kv_heads, n, value_dim] of all entries, kind by kind.
    logits = [_scores(q, layer["k"][near].transpose(0, 1)).masked_fill_(hidden, -math.inf)]
    values = [layer["v"][near].transpose(0, 1)]
    starts = (row == 0)[:, None, None]
    layer["before"] = torch.where(starts, layer["first"], layer["before"])
    layer["first"] = layer["first"].masked_fill(starts, NEVER)
    if chunks:
        sees = torch.arange(chunks, device=q.device) < own[:, None]  # [batch, chunks]
        pooled = [_scores(q, level) for level in _levels(layer["k"], chunks, shape)]
        for scores, size in zip(pooled, (shape.group, shape.node, shape.chunk), strict=True):
            scores.add_(math.log(size)).masked_fill_(~_per_row(sees, scores), -math.inf)
        wanted = _wanted(layer, q, logits[0], pooled, chunks, shape, rule)
        is_open = _open(layer, wanted, sees, row, rule)
        bias = None if options.bias is None else options.bias.to(dtype).expand(heads).view(kv_heads, -1, 1)
        for scores, active in zip(pooled, _active(is_open, shape), strict=True):
            logits.append((scores if bias is None else scores + bias).masked_fill_(~active, -math.inf))
        values += _levels(layer["v"], chunks, shape)
        groups, exists = _listed(is_open)
        by_list = q.unflatten(2, (is_open.shape[2], -1))  # [batch, kv_heads, lists, queries per list, dim]
        exact = _scores(by_list, _gather(layer["k"], groups, shape))
        hidden = ~exists.repeat_interleave(shape.group, -1)[..., None, :]
        logits.append(exact.masked_fill_(hidden, -math.inf).flatten(2, 3))
    every = torch.cat(logits, -1)
    if options.counted is not None:
        _count(options.counted, every, position, shape, rule)
    parts = every.softmax(-1).split([x.shape[-1] for x in logits], -1)
    out = sum(weights @ v.to(dtype) for weights, v in zip(parts[: len(values)], values, strict=True))
    if chunks:
        exact_values = _gather(layer["v"], groups, shape).to(dtype)
        out = out + (parts[-1].unflatten(2, (is_open.shape[2], -1)) @ exact_values).flatten(2, 3)
    assert isinstance(out, Tensor)
    return out.flatten(1, 2)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.to(q.dtype).transpose(-1, -2)


def _levels(pages: Tensor, chunks: int, shape: Shape) -> list[Tensor]:
    """Return the groups, nodes and roots `[batch, kv_heads, rows, dim]` of the first chunks."""
    _, *means = levels_of(pages[:, :, :chunks].flatten(0, 1), shape)
    return [x.reshape(*pages.shape[:2], -1, pages.shape[4]).transpose(0, 1) for x in means]


def _per_row(sees: Tensor, scores: Tensor) -> Tensor:
    """Return whether each row of a level is visible, `[batch, 1, 1, rows]`."""
    return sees.repeat_interleave(scores.shape[-1] // sees.shape[1], 1)[:, None, None]


def _wanted(
    layer: Layer, q: Tensor, near: Tensor, pooled: list[Tensor], chunks: int, shape: Shape, rule: Rule
) -> Tensor:
    """Return `[batch, kv_heads, share, groups]` the groups that the tokens want."""
    estimate = pooled[0]
    if rule.spread:
        few = {name: x[:, :, :chunks] for name, x in layer.items()}
        spread = as_keys(few, [], shape).spread.unflatten(1, (len(q), chunks)).flatten(2, 3).transpose(0, 1)
        estimate = estimate + rule.spread * _scores(q, spread).abs_()
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
    first = layer["first"][:, :, : sees.shape[1]]  # [lists, batch, chunks, groups]
    wanted_by_list = wanted.flatten(1, 2).transpose(0, 1).unflatten(2, first.shape[2:])
    opens = wanted_by_list & sees[:, :, None] & (first == NEVER)
    first.copy_(torch.where(opens, row.to(torch.uint8)[:, None, None], first))
    first[:, :, 0, 0] = first[:, :, 0, 0].masked_fill(sees[:, 0], 0)  # the group of the first key
    return (first != NEVER).transpose(0, 1).unflatten(1, wanted.shape[1:3])


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


def _gather(pages: Tensor, groups: Tensor, shape: Shape) -> Tensor:
    """Return the keys of groups `[batch, kv_heads, lists, longest]`, as `[batch, kv_heads, lists, keys, dim]`."""
    kv_heads, batch, chunks, _, dim = pages.shape
    page = torch.arange(kv_heads * batch, device=pages.device).view(kv_heads, batch, 1, 1).transpose(0, 1) * chunks
    page = page + groups // shape.groups
    row = page * shape.page + groups % shape.groups * shape.group
    row = row[..., None] + torch.arange(shape.group, device=pages.device)
    return pages.view(-1, dim).index_select(0, row.flatten()).view(*groups.shape[:-1], -1, dim)


def _count(counted: Counted, logits: Tensor, position: Tensor, shape: Shape, rule: Rule) -> None:
    """Add the entries that the tokens attend to, and the pooled rows that they score."""
    counted.entries += int((logits > -math.inf).sum())
    chunks = int((position // shape.chunk).sum())
    rows = shape.groups * (2 if rule.spread else 1) + (shape.rows[2] if rule.threshold is not None else 0)
    counted.scored += chunks * rows * logits.shape[1] * logits.shape[2]
