"""Backend "reference" of clustered attention: the definition, one query, head and node at a time. Slow."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hsa.attention.clustered.call import ClusteredCall, SelectCall
from hsa.attention.clustered.keys import build_keys, levels_of
from hsa.attention.clustered.layout import Layout
from hsa.attention.clustered.selection import NEVER, TileSelection


def select(call: SelectCall) -> TileSelection:
    """Compute `hsa.select_groups` from checked arguments."""
    layout, shape, heads = call.layout, call.layout.shape, call.q.shape[1]
    kv_share, list_share = heads // call.k.shape[1], heads // call.lists
    first = torch.full((int(layout.tile_offset[-1]) * shape.groups * call.lists,), NEVER, dtype=torch.uint8)
    result = TileSelection(first.to(call.q.device), layout, call.lists)
    for tile in range(layout.num_tiles):
        opening = result.tile(tile)[0]  # [lists, groups]
        groups = opening.shape[1]
        if not groups:
            continue
        opening[:, 0] = 0
        sequence = int(layout.tile_sequence[tile])
        if call.opened is not None and layout.is_cut(sequence) and tile == layout.first_tiles[sequence]:
            before = call.opened[sequence][:, :groups]
            opening[:, : before.shape[1]][before] = 0
        for row in range(int(layout.tile_row[tile]), int(layout.tile_row[tile + 1])):
            since = row - int(layout.tile_row[tile]) if layout.causal else 0
            for head in range(heads):
                for group in _wanted(call, tile, row, head, head // kv_share):
                    entry = opening[head // list_share, group]
                    entry.copy_(torch.minimum(entry, torch.full_like(entry, since)))
    return result


def _wanted(call: SelectCall, tile: int, row: int, head: int, kv_head: int) -> list[int]:
    """Return the groups that a query wants: those with at least the share `threshold`, or the `top_k` best."""
    layout, shape = call.layout, call.layout.shape
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    q = call.q[row, head].to(dtype) * call.scale
    levels = [level[kv_head].flatten(0, 1).to(dtype) for level in levels_of(call.keys.k, shape)]
    means, spreads = (x[kv_head].flatten(0, 1).to(dtype) for x in call.keys.scored)
    first_chunk, chunks = int(layout.tile_chunk[tile]), int(layout.tile_chunks[tile])
    estimates = []
    for group in range(first_chunk * shape.groups, (first_chunk + chunks) * shape.groups):
        chunk = group // shape.groups
        scored = q[call.keys.channels[kv_head, chunk].long()]
        estimate = q @ levels[3][chunk] + scored @ means[group] + math.log(shape.group)
        estimates.append(estimate + call.spread * (scored @ spreads[group]).abs())
    if call.threshold is None:
        assert call.top_k is not None
        best = sorted(estimates, reverse=True)[: call.top_k]
        return [g for g, estimate in enumerate(estimates) if best and estimate >= best[-1]]
    masses = [q @ call.k[key, kv_head].to(dtype) for key in _exact_keys(layout, tile, row)]
    for node in range(first_chunk * shape.branching[2], (first_chunk + chunks) * shape.branching[2]):
        masses.append(q @ levels[2][node] + math.log(shape.node))
    threshold = call.threshold[head] if isinstance(call.threshold, tuple) else call.threshold
    bound = torch.stack(masses).logsumexp(0) + math.log(threshold)
    return [g for g, estimate in enumerate(estimates) if estimate >= bound]


def _exact_keys(layout: Layout, tile: int, row: int) -> range:
    """Return the rows of k that a query sees exactly."""
    more = row - int(layout.tile_row[tile]) if layout.causal else 0
    return range(int(layout.tile_exact[tile]), int(layout.tile_end[tile]) + more)


def attend(call: ClusteredCall) -> tuple[Tensor, Tensor]:
    """Compute `hsa.clustered_attention` from checked arguments: the output and its log-sum-exp `[queries, heads]`."""
    keys = call.keys or build_keys(call.k, call.v, call.layout, windows=call.windows)
    selection = call.selection or select(call.select(keys))
    layout, heads = call.layout, call.q.shape[1]
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    outputs, sums = [], []
    for tile in range(layout.num_tiles):
        for row in range(int(layout.tile_row[tile]), int(layout.tile_row[tile + 1])):
            for head in range(heads):
                kv_head = head // (heads // call.k.shape[1])
                q = call.q[row, head].to(dtype) * call.scale
                bias = (
                    0.0
                    if call.pooled_bias is None
                    else call.pooled_bias[min(head, len(call.pooled_bias) - 1)].to(dtype)
                )
                logits, values = [], []
                for key in _exact_keys(layout, tile, row):
                    logits.append(q @ call.k[key, kv_head].to(dtype))
                    values.append(call.v[key, kv_head].to(dtype))
                opening = selection.tile(tile)[0, head // (heads // selection.lists)]
                is_open = (opening <= row - int(layout.tile_row[tile])).tolist()
                for level, index in _entries(layout, int(layout.tile_chunk[tile]), is_open):
                    k, v = (levels_of(x, layout.shape)[level][kv_head].flatten(0, 1)[index] for x in (keys.k, keys.v))
                    size = (1, layout.shape.group, layout.shape.node, layout.shape.chunk)[level]
                    logits.append(q @ k.to(dtype) + math.log(size) + (bias if level else 0.0))
                    values.append(v.to(dtype))
                stacked = torch.stack(logits)
                weights = torch.nn.functional.dropout(stacked.softmax(0), call.dropout_p)
                outputs.append(weights @ torch.stack(values))
                sums.append(stacked.logsumexp(0))
    if not outputs:
        return call.q.new_empty(0, heads, call.v.shape[2]), call.q.new_empty(0, heads, dtype=dtype)
    return torch.stack(outputs).unflatten(0, (-1, heads)).to(call.q.dtype), torch.stack(sums).unflatten(0, (-1, heads))


def _entries(layout: Layout, first_chunk: int, is_open: list[bool]) -> list[tuple[int, int]]:
    """Return the rows of the tables, as level and index, that a query attends to: each key of the chunks exactly once."""
    shape, entries = layout.shape, []
    per_node, nodes = shape.branching[1:]
    for chunk in range(len(is_open) // shape.groups):
        number = first_chunk + chunk
        if not any(is_open[chunk * shape.groups : (chunk + 1) * shape.groups]):
            entries.append((3, number))
            continue
        for node in range(nodes):
            begin = chunk * shape.groups + node * per_node
            if not any(is_open[begin : begin + per_node]):
                entries.append((2, number * nodes + node))
                continue
            for group in range(begin, begin + per_node):
                index = first_chunk * shape.groups + group
                if is_open[group]:
                    entries += [(0, index * shape.group + key) for key in range(shape.group)]
                else:
                    entries.append((1, index))
    return entries
