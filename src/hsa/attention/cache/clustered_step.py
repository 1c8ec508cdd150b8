"""Attention of one new token per sequence in a `ClusteredCache`: `clustered_attention` for the last query of a tile.

All groups are estimated, for the selection. The rows that are attended to, pooled ones and keys of open groups, are
gathered into lists that are padded to the longest.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hsa.attention.cache.clustered_rows import Layer, Rule
from hsa.attention.cache.interface import AttendOptions, Counted
from hsa.attention.clustered.flops import selection_operations
from hsa.attention.clustered.keys import EIGHT_BITS, UNIT
from hsa.attention.clustered.layout import Shape
from hsa.attention.clustered.selection import NEVER
from hsa.attention.clustered.threshold import log_of


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
    if chunks < shape.exact_chunks:
        return _attend_exactly(layer, q, position, chunks + 1, shape, options)
    near = slice(None), torch.arange(len(q), device=q.device), own, slice(shape.chunk)
    hidden = torch.arange(shape.chunk, device=q.device) > (position % shape.chunk)[:, None, None, None]
    # Logits [batch, kv_heads, lists, queries per list, n] and values [batch, kv_heads, lists or 1, n, value_dim], by kind.
    exact = (q @ layer["k"][near].transpose(0, 1).to(dtype).transpose(-1, -2)).masked_fill_(hidden, -math.inf)
    lists = len(layer["first"]) // kv_heads
    logits, values = [exact.unflatten(2, (lists, -1))], [layer["v"][near].transpose(0, 1).unsqueeze(2)]
    starts = (row == 0)[:, None, None]
    layer["before"] = torch.where(starts, layer["first"], layer["before"])
    layer["first"] = layer["first"].masked_fill(starts, NEVER)
    if chunks:
        sees = torch.arange(chunks, device=q.device) < own[:, None]  # [batch, chunks]
        is_exact = own < shape.exact_chunks  # all groups are open
        wanted = _wanted(layer, q, exact, chunks, sees, shape, rule) | is_exact[:, None, None, None]
        is_open = _open(layer, wanted, sees, row, rule)
        # The largest nodes without an open group.
        active, exists = _listed(torch.cat(_active(is_open, shape, sees), -1))
        rows, log_count = _rows_of_means(active, chunks, shape)
        of_means = _products(q, layer["k"], rows, shape) + log_count[..., None, :].to(dtype)
        if options.bias is not None:
            of_means = of_means + options.bias.to(dtype).expand(heads).view(kv_heads, lists, -1, 1)
        logits.append(of_means.masked_fill(~exists[..., None, :], -math.inf))
        values.append(_gather(layer["v"], rows, shape))
        # The keys of open groups.
        opened, exists = _listed(is_open.flatten(3))
        rows = opened // shape.groups * shape.page + opened % shape.groups * shape.group
        rows = (rows[..., None] + torch.arange(shape.group, device=q.device)).flatten(-2)
        hidden = ~exists.repeat_interleave(shape.group, -1)[..., None, :]
        logits.append(_products(q, layer["k"], rows, shape).masked_fill_(hidden, -math.inf))
        values.append(_gather(layer["v"], rows, shape))
    joined = torch.cat(logits, -1)
    if options.counted is not None:
        _count(options.counted, joined, position, q.shape[-1], shape, rule)
    parts = joined.softmax(-1).split([x.shape[-1] for x in logits], -1)
    out = sum(weights @ v.to(dtype) for weights, v in zip(parts, values, strict=True))
    assert isinstance(out, Tensor)
    return out.flatten(1, 3)


def _attend_exactly(
    layer: Layer, q: Tensor, position: Tensor, chunks: int, shape: Shape, options: AttendOptions
) -> Tensor:
    """Return the exact attention of new tokens `[batch, kv_heads, share, dim]` to the keys of these chunks."""
    logits = _scores(q, layer["k"], chunks, slice(shape.chunk)).flatten(3)
    hidden = torch.arange(logits.shape[-1], device=q.device) > position[:, None, None, None]
    weights = logits.masked_fill_(hidden, -math.inf).softmax(-1).unflatten(3, (chunks, shape.chunk))
    if options.counted is not None:
        options.counted.entries += int((~hidden).sum()) * q.shape[1] * q.shape[2]
    values = layer["v"][:, :, :chunks, : shape.chunk].to(q.dtype)
    return torch.einsum("bhscr,hbcrd->bhsd", weights, values).flatten(1, 2)


def _scores(q: Tensor, pages: Tensor, chunks: int, rows: slice) -> Tensor:
    """Return the products `[batch, kv_heads, share, chunks, rows]` of queries with some rows of every page.

    On a CPU sequence by sequence and head by head, because a product of several would copy these rows.
    """
    if pages.device.type != "cpu":
        return torch.einsum("bhsd,hbcrd->bhscr", q, pages[:, :, :chunks, rows].to(q.dtype))
    products = []
    for b, of_sequence in enumerate(q):
        for h, of_head in enumerate(of_sequence):
            y = pages[h, b, :chunks, rows].to(q.dtype).transpose(1, 2)
            products.append(torch.bmm(of_head.expand(chunks, -1, -1), y))  # [chunks, share, rows]
    return torch.stack(products).unflatten(0, q.shape[:2]).transpose(2, 3)


def _wanted(layer: Layer, q: Tensor, near: Tensor, chunks: int, sees: Tensor, shape: Shape, rule: Rule) -> Tensor:
    """Return `[batch, kv_heads, share, groups]` the groups that the tokens want."""
    hidden = ~sees[:, None, None, :, None]
    nodes, roots = _scores(q, layer["k"], chunks, slice(shape.starts[2], None)).split(shape.rows[2:], -1)
    channels = layer["channels"][:, :, 0].transpose(0, 1).unsqueeze(2).long()  # [batch, kv_heads, 1, channels]
    scored = q.gather(-1, channels.expand(-1, -1, q.shape[2], -1))
    scores = layer["scores"]
    products = _scores(scored, scores.flatten(3, 5), chunks, slice(None)).unflatten(-1, scores.shape[3:6])
    if scores.dtype == EIGHT_BITS:
        products = products / UNIT
    mean, deviation = (x.flatten(-2) for x in products.unbind(-2))
    estimate = mean + rule.spread * deviation.abs() + (roots + math.log(shape.group))
    estimate = estimate.masked_fill(hidden, -math.inf).flatten(3)
    if rule.threshold is not None:
        of_nodes = (nodes + math.log(shape.node)).masked_fill(hidden, -math.inf).flatten(3)
        bound = torch.cat([near, of_nodes], -1).logsumexp(-1, keepdim=True)
        bound = bound + log_of(rule.threshold, q, shape=(*q.shape[1:3], 1))
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


def _active(is_open: Tensor, shape: Shape, sees: Tensor) -> list[Tensor]:
    """Return which groups, nodes and chunks are the largest without an open group, `[batch, kv_heads, lists, rows]`."""
    group = is_open.unflatten(-1, (shape.branching[2], shape.branching[1]))
    node = group.any(-1)
    chunk = node.any(-1)
    active = node[..., None] & ~group, chunk[..., None] & ~node, ~chunk & sees[:, None, None]
    return [x.flatten(3) for x in active]


def _rows_of_means(number: Tensor, chunks: int, shape: Shape) -> tuple[Tensor, Tensor]:
    """Return the rows, from the first page of a sequence on, of means: groups of all chunks, then nodes, then roots.

    Also return the logs of their numbers of keys.
    """
    rows, log_count, before = torch.zeros_like(number), torch.zeros_like(number, dtype=torch.float64), 0
    for start, size in zip(shape.starts[1:], shape.rows[1:], strict=True):
        own = number - before
        rows = torch.where(own >= 0, own // size * shape.page + start + own % size, rows)
        log_count.masked_fill_(own >= 0, math.log(shape.chunk // size))
        before += chunks * size
    return rows, log_count


def _products(q: Tensor, pages: Tensor, rows: Tensor, shape: Shape) -> Tensor:
    """Return the products `[batch, kv_heads, lists, queries per list, n]` of queries with rows of the pages."""
    return q.unflatten(2, (rows.shape[2], -1)) @ _gather(pages, rows, shape).to(q.dtype).transpose(-1, -2)


def _listed(flags: Tensor) -> tuple[Tensor, Tensor]:
    """Return `[…, longest]` the numbers of the flags that are set, `[…, flags]`, and whether they exist."""
    count = flags.sum(-1)
    *which, number = flags.nonzero(as_tuple=True)
    slot = (flags.cumsum(-1) - 1)[(*which, number)]
    numbers = flags.new_zeros(*count.shape, int(count.max()), dtype=torch.long)
    numbers[(*which, slot)] = number
    return numbers, torch.arange(numbers.shape[-1], device=flags.device) < count[..., None]


def _gather(pages: Tensor, rows: Tensor, shape: Shape) -> Tensor:
    """Return rows `[batch, kv_heads, lists, n]`, counted from the first page of a sequence, as `[…, n, dim]`."""
    kv_heads, batch, chunks, _, dim = pages.shape
    first = torch.arange(kv_heads * batch, device=pages.device).view(kv_heads, batch, 1, 1).transpose(0, 1)
    rows = rows + first * (chunks * shape.page)
    return pages.view(-1, dim).index_select(0, rows.flatten()).view(*rows.shape, dim)


def _count(counted: Counted, logits: Tensor, position: Tensor, dim: int, shape: Shape, rule: Rule) -> None:
    """Add the entries that the tokens attend to, and the pooled rows that they must score."""
    counted.entries += int((logits > -math.inf).sum())
    chunks = position // shape.chunk
    products = selection_operations(shape, dim, rule.spread, rule.top_k)
    counted.selection += int(chunks[chunks >= shape.exact_chunks].sum()) * products * logits[0, ..., 0].numel()
