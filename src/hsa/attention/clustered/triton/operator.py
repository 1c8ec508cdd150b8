"""Backend "triton" of clustered attention: launches, in slabs of tiles that bound the memory of selections and lists."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hsa.attention.clustered.call import ClusteredCall, SelectCall
from hsa.attention.clustered.keys import ClusteredKeys
from hsa.attention.clustered.layout import Layout, Slab
from hsa.attention.clustered.selection import TileSelection
from hsa.attention.clustered.triton import attend as attend_kernels
from hsa.attention.clustered.triton import select as select_kernels
from hsa.attention.clustered.triton.cluster import build_keys
from hsa.attention.clustered.triton.tiles import aligned
from hsa.attention.kernels.available import padded, shared_memory
from hsa.attention.kernels.triton.launch import Launcher, compiled_for

SLAB_BYTES = 2**28
"""Maximum bytes of the selection and the lists of the tiles that are processed at once."""
QUERIES = 256
"""Number of queries that a program selects for at most, with head dim 64 in half precision."""
LOG2_E = math.log2(math.e)

_select = Launcher(select_kernels.select)
_largest = Launcher(select_kernels.largest)
_lower = Launcher(select_kernels.lower)
_attend = Launcher(attend_kernels.attend)


def select(call: SelectCall) -> TileSelection:
    """Compute `hsa.select_groups` from checked arguments."""
    call = replace(call, q=aligned(call.q), k=aligned(call.k))
    layout = call.layout
    first = call.q.new_empty(int(layout.tile_offset[-1]) * layout.shape.groups * call.lists, dtype=torch.uint8)
    if len(first):
        (slab,) = layout.slabs(call.q.device, _bundle(call.q, layout))
        _select_tiles(call, slab, first)
        _open_again(call, first)
    return TileSelection(first, layout, call.lists)


def attend(call: ClusteredCall) -> tuple[Tensor, Tensor]:
    """Compute `hsa.clustered_attention` from checked arguments: the output and its log-sum-exp `[queries, heads]`."""
    call = replace(call, q=aligned(call.q), k=aligned(call.k), v=aligned(call.v))
    keys = call.keys or build_keys(call.k, call.v, call.layout, windows=call.windows)
    q, layout, selection, selecting = call.q, call.layout, call.selection, call.select(keys)
    out = q.new_empty(*q.shape[:2], call.v.shape[2])
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    if selection is None and call.opened is not None:
        selection = select(selecting)
    if selection is not None:
        for slab in layout.slabs(q.device, _bundle(q, layout)):
            _attend_tiles(call, keys, slab, selection.first, selection.lists, out, lse)
        return out, lse
    for slab in layout.slabs(q.device, _bundle(q, layout), SLAB_BYTES // (call.lists * 9 * layout.shape.groups)):
        first = q.new_empty(slab.chunks * layout.shape.groups * call.lists, dtype=torch.uint8)
        if slab.chunks:
            _select_tiles(selecting, slab, first)
        _attend_tiles(call, keys, slab, first, call.lists, out, lse)
    return out, lse


def _bundle(q: Tensor, layout: Layout) -> int:
    """Return the number of tiles whose queries a program selects for."""
    queries = QUERIES * 128 // max(128, q.shape[2] * q.element_size())
    return max(1, queries // layout.shape.tile)


def _constants(layout: Layout, q: Tensor) -> dict[str, Any]:
    shape = layout.shape
    return {
        "TILE": shape.tile,
        "CHUNK": shape.chunk,
        "GROUPS": shape.groups,
        "NODES": shape.branching[2],
        "DIM": q.shape[2],
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }


def _sizes(q: Tensor, row_bytes: int, tile: int, rows: int) -> tuple[int, dict[str, int]]:
    """Return the rows per step, `rows` or fewer, and the launch options, so that all stages fit the shared memory.

    Args:
        row_bytes: Bytes that a step loads per row.
        tile: Number of queries of a program, which stay in shared memory.
    """
    rows = rows if q.element_size() == 2 else min(rows, 32)  # wider types take too many registers
    left = shared_memory(q.device) - tile * q.shape[2] * q.element_size() - 2**13
    for stages in (3, 2):
        if rows * row_bytes * stages <= left:
            return rows, {"num_warps": 4 if tile <= 64 else 8, "num_stages": stages}
    return _sizes(q, row_bytes, tile, rows // 2) if rows > 16 else (16, {"num_warps": 4, "num_stages": 1})


def _largest_estimates(call: SelectCall, slab: Slab) -> Tensor:
    """Return `[queries, heads]` the smallest estimate of the `top_k` largest ones of each query."""
    q, keys, number = call.q, call.keys, call.top_k
    bounds = q.new_empty(q.shape[:2], dtype=torch.float32)
    if number == 0:
        return bounds.fill_(math.inf)
    assert number is not None
    tensors = (q, keys.k, keys.spread, slab.tiles, bounds)
    sizes = (q.shape[1], call.k.shape[1], call.layout.num_chunks, *q.stride()[:2], number)
    constants = _constants(call.layout, q) | {"SPREAD": _weighs(call.spread), "KEPT": padded(number)}
    arguments = (*tensors, *sizes, call.spread)
    _largest(compiled_for(*tensors, *sizes), len(slab.tiles) * q.shape[1], arguments, {**constants, "num_stages": 1})
    return bounds


def _weighs(spread: float) -> int:
    """Return how kernels weigh spreads: 0 for not at all, 1 for with 1, 2 for with another weight."""
    return int(spread) if spread in (0.0, 1.0) else 2


def _select_tiles(call: SelectCall, slab: Slab, first: Tensor) -> None:
    """Write the first query for which each group is open, for some tiles."""
    q, k, keys, shape = call.q, call.k, call.keys, call.layout.shape
    bundle = _bundle(q, call.layout)
    bounds = first if call.top_k is None else _largest_estimates(call, slab)
    tensors = (q, k, keys.k, keys.spread, slab.tiles, slab.bundles, bounds, first)
    strides = (*q.stride()[:2], *k.stride()[:2])
    sizes = (len(slab.bundles), q.shape[1], k.shape[1], call.lists, call.layout.num_chunks, *strides)
    numbers = (call.scale * LOG2_E, math.log2(call.threshold or 1.0), call.spread)
    block, launch = _sizes(q, 2 * q.shape[2] * q.element_size(), bundle * shape.tile, 64)
    launch["num_warps"] = 4
    constants = _constants(call.layout, q) | {"TILES": bundle, "CAUSAL": call.layout.causal, "BLOCK": block, **launch}
    constants |= {"BOUNDED": call.top_k is not None, "SPREAD": _weighs(call.spread)}
    constants |= {"LOG_NODE": math.log2(shape.node), "LOG_GROUP": math.log2(shape.group)}
    arguments = (*tensors, *sizes, *numbers)
    _select(compiled_for(*tensors, *sizes), len(slab.bundles) * call.lists, arguments, constants)


def _open_again(call: SelectCall, first: Tensor) -> None:
    """Open what earlier queries have opened in tiles that are cut."""
    if call.opened is None:
        return
    selection = TileSelection(first, call.layout, call.lists)
    for sequence, tile in enumerate(call.layout.first_tiles):
        if tile >= 0 and call.layout.is_cut(sequence):
            opening = selection.tile(int(tile))[0]
            before = call.opened[sequence, :, : opening.shape[1]]
            opening[:, : before.shape[1]].masked_fill_(before, 0)


def _attend_tiles(
    call: ClusteredCall, keys: ClusteredKeys, slab: Slab, first: Tensor, lists: int, out: Tensor, lse: Tensor
) -> None:
    """Lower a selection to lists, and attend from some tiles."""
    q, k, v, shape, tiles = call.q, call.k, call.v, call.layout.shape, slab.tiles
    heads, value_dim = q.shape[1], v.shape[2]
    rows, options = _sizes(q, (q.shape[2] + padded(value_dim)) * q.element_size(), shape.tile, 128)
    entries = rows // shape.group
    key_list = first.new_empty(slab.chunks * lists * shape.groups + len(tiles) * lists * entries, dtype=torch.int32)
    pooled_list = first.new_empty(slab.chunks * lists * shape.groups, dtype=torch.int32)
    counts = first.new_empty(len(tiles) * lists * 8, dtype=torch.int32)
    constants = {"TILE": shape.tile, "LOG_TILE": shape.tile.bit_length() - 1}
    constants |= {"GROUPS": shape.groups, "NODES": shape.branching[2], "ENTRIES": entries}
    tensors: tuple[Tensor, ...] = (first, tiles, key_list, pooled_list, counts)
    sizes: tuple[int, ...] = (len(tiles), lists)
    launch = {"BLOCK": 512 // shape.groups, "num_warps": 1}
    _lower(compiled_for(*tensors, *sizes), len(tiles) * lists, (*tensors, *sizes), constants | launch)

    bias = call.pooled_bias
    if bias is not None:
        bias = (bias.to(torch.float32) * LOG2_E).expand(heads).contiguous()
    tensors = (q, k, v, keys.k, keys.v, key_list, pooled_list, counts, tiles, lse if bias is None else bias, out, lse)
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    sizes = (len(tiles), heads, k.shape[1], lists, call.layout.num_chunks, *strides)
    constants |= _constants(call.layout, q) | {"VALUE_DIM": value_dim, "DV": padded(value_dim)}
    constants |= {"CAUSAL": call.layout.causal, "BIASED": bias is not None, "LOG_GROUP": math.log2(shape.group)}
    constants |= {"LOG_NODE": math.log2(shape.node), "LOG_CHUNK": math.log2(shape.chunk)}
    constants |= {"BLOCK": min(64, rows), **options}
    arguments = (*tensors, *sizes, call.scale * LOG2_E)
    _attend(compiled_for(*tensors, *sizes), len(tiles) * heads, arguments, constants)
