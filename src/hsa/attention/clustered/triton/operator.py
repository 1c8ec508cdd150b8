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
LOG2_E = math.log2(math.e)

_normalizers = Launcher(select_kernels.normalizers)
_largest = Launcher(select_kernels.largest)
_first_rows = Launcher(select_kernels.first_rows)
_lower = Launcher(select_kernels.lower)
_attend = Launcher(attend_kernels.attend)


def select(call: SelectCall) -> TileSelection:
    """Compute `hsa.select_groups` from checked arguments."""
    call = replace(call, q=aligned(call.q), k=aligned(call.k))
    layout = call.layout
    first = call.q.new_empty(int(layout.tile_offset[-1]) * layout.shape.groups * call.lists, dtype=torch.uint8)
    if len(first):
        (slab,) = layout.slabs(call.q.device)
        _select_tiles(call, slab, first, _bounds(call, slab))
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
        for slab in layout.slabs(q.device):
            _attend_tiles(call, keys, slab, selection.first, selection.lists, out, lse)
        return out, lse
    bounds = None
    for slab in layout.slabs(q.device, SLAB_BYTES // (call.lists * _bytes(layout))):
        first = q.new_empty(slab.chunks * layout.shape.groups * call.lists, dtype=torch.uint8)
        if slab.chunks:
            bounds = _bounds(selecting, slab, bounds)
            _select_tiles(selecting, slab, first, bounds)
        _attend_tiles(call, keys, slab, first, call.lists, out, lse)
    return out, lse


def _bytes(layout: Layout) -> int:
    """Return the bytes of the selection and the lists of one chunk that a tile sees."""
    groups, nodes = layout.shape.groups, layout.shape.branching[2]
    return groups + 4 * groups + 12 * (nodes + 2)


def _constants(layout: Layout, q: Tensor) -> dict[str, Any]:
    shape, dim = layout.shape, q.shape[2]
    return {
        "TILE": shape.tile,
        "CHUNK": shape.chunk,
        "GROUPS": shape.groups,
        "NODES": shape.branching[2],
        "DIM": dim,
        "D": padded(dim),
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }


def _sizes(q: Tensor, row_bytes: int, tile: int, rows: int) -> tuple[int, dict[str, int]]:
    """Return the rows per step, `rows` or fewer, and the launch options, so that all stages fit the shared memory.

    Args:
        row_bytes: Bytes that a step loads per row.
        tile: Number of queries of a program, which stay in shared memory.
    """
    rows = rows if q.element_size() == 2 else min(rows, 32)  # wider types take too many registers
    left = shared_memory(q.device) - tile * padded(q.shape[2]) * q.element_size() - 2**13
    for stages in (3, 2):
        if rows * row_bytes * stages <= left:
            return rows, {"num_warps": 4 if tile <= 64 else 8, "num_stages": stages}
    return _sizes(q, row_bytes, tile, rows // 2) if rows > 16 else (16, {"num_warps": 4, "num_stages": 1})


def _bounds(call: SelectCall, slab: Slab, bounds: Tensor | None = None) -> Tensor:
    """Return `[queries, heads]` the estimate from which each query wants a group."""
    q, k, keys, shape = call.q, call.k, call.keys, call.layout.shape
    heads, chunks = q.shape[1], call.layout.num_chunks
    bounds = q.new_empty(q.shape[:2], dtype=torch.float32) if bounds is None else bounds
    constants = _constants(call.layout, q)
    if call.threshold is not None:
        tensors = (q, k, keys.k, slab.tiles, bounds)
        sizes = (heads, k.shape[1], chunks, *q.stride()[:2], *k.stride()[:2])
        numbers = (call.scale * LOG2_E, math.log2(call.threshold))
        block, launch = _sizes(q, constants["D"] * q.element_size(), shape.tile, 64)
        constants |= {"CAUSAL": call.layout.causal, "LOG_NODE": math.log2(shape.node), "BLOCK": block, **launch}
        constants |= {"LOG_GROUP": math.log2(shape.group)}
        arguments = (*tensors, *sizes, *numbers)
        _normalizers(compiled_for(*tensors, *sizes), len(slab.tiles) * heads, arguments, constants)
        return bounds
    if call.top_k == 0:
        return bounds.fill_(math.inf)
    return _largest_estimates(call, slab, bounds)


def _largest_estimates(call: SelectCall, slab: Slab, bounds: Tensor) -> Tensor:
    q, keys = call.q, call.keys
    assert call.top_k is not None
    tensors = (q, keys.k, keys.spread, slab.tiles, bounds)
    sizes = (q.shape[1], call.k.shape[1], call.layout.num_chunks, *q.stride()[:2], call.top_k)
    constants = _constants(call.layout, q) | {"SPREAD": _weighs(call.spread), "KEPT": padded(call.top_k)}
    arguments = (*tensors, *sizes, call.spread)
    _largest(compiled_for(*tensors, *sizes), len(slab.tiles) * q.shape[1], arguments, {**constants, "num_stages": 1})
    return bounds


def _weighs(spread: float) -> int:
    """Return how kernels weigh spreads: 0 for not at all, 1 for with 1, 2 for with another weight."""
    return int(spread) if spread in (0.0, 1.0) else 2


def _select_tiles(call: SelectCall, slab: Slab, first: Tensor, bounds: Tensor) -> None:
    """Write the first query for which each group is open, for some tiles."""
    q, keys, shape = call.q, call.keys, call.layout.shape
    tensors = (q, keys.k, keys.spread, slab.tiles, bounds, first)
    sizes = (q.shape[1], call.k.shape[1], call.lists, call.layout.num_chunks, *q.stride()[:2])
    block, launch = _sizes(q, 2 * padded(q.shape[2]) * q.element_size(), shape.tile, 64)
    constants = {**_constants(call.layout, q), "CAUSAL": call.layout.causal, "SPREAD": _weighs(call.spread)}
    constants |= {"BLOCK": block, **launch, "num_warps": 4}
    _first_rows(
        compiled_for(*tensors, *sizes), len(slab.tiles) * call.lists, (*tensors, *sizes, call.spread), constants
    )


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
    q, k, v, shape = call.q, call.k, call.v, call.layout.shape
    heads, nodes, tiles, chunks = q.shape[1], shape.branching[2], slab.tiles, slab.chunks
    key_list = first.new_empty(chunks * lists * shape.groups, dtype=torch.int32)
    pooled_list = first.new_empty(chunks * lists * (nodes + 2), dtype=torch.int32)
    ends = first.new_empty(chunks * lists * (nodes + 2) * 8)
    counts = first.new_zeros(len(tiles) * lists * 2, dtype=torch.int32)
    if chunks:
        _lower_tiles(call.layout, slab, lists, (first, tiles, key_list, pooled_list, ends, counts))
    bias = call.pooled_bias
    if bias is not None:
        bias = (bias.to(torch.float32) * LOG2_E).expand(heads).contiguous()
    lowered = (keys.k, keys.v, key_list, pooled_list, ends, counts, tiles)
    tensors = (q, k, v, *lowered, lse if bias is None else bias, out, lse)
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    sizes = (heads, k.shape[1], lists, call.layout.num_chunks, *strides)
    constants, value_dim = _constants(call.layout, q), v.shape[2]
    rows, launch = _sizes(q, (constants["D"] + padded(value_dim)) * q.element_size(), shape.tile, 128)
    constants |= {"VALUE_DIM": value_dim, "DV": padded(value_dim), "CAUSAL": call.layout.causal}
    constants |= {"BIASED": bias is not None, "LOG_GROUP": math.log2(shape.group), "LOG_NODE": math.log2(shape.node)}
    constants |= {"LOG_CHUNK": math.log2(shape.chunk), "BLOCK": min(64, rows), "ENTRIES": rows // 8, **launch}
    arguments = (*tensors, *sizes, call.scale * LOG2_E)
    _attend(compiled_for(*tensors, *sizes), len(tiles) * heads, arguments, constants)


def _lower_tiles(layout: Layout, slab: Slab, lists: int, tensors: tuple[Tensor, ...]) -> None:
    shape, sizes = layout.shape, (lists, layout.num_chunks)
    constants = {"CHUNK": shape.chunk, "GROUPS": shape.groups, "NODES": shape.branching[2], "BLOCK": 16}
    _lower(compiled_for(*tensors, *sizes), len(slab.tiles) * lists, (*tensors, *sizes), constants)
