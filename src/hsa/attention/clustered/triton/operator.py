"""Backend "triton" of clustered attention: launches, in slabs of tiles that bound the memory of selections and lists."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hsa.attention.clustered.call import ClusteredCall, SelectCall
from hsa.attention.clustered.keys import ClusteredKeys
from hsa.attention.clustered.layout import Layout, Slab
from hsa.attention.clustered.selection import TileSelection
from hsa.attention.clustered.triton.attend import _attend
from hsa.attention.clustered.triton.cluster import build_keys
from hsa.attention.clustered.triton.select import _first_rows, _largest, _lower, _normalizers
from hsa.attention.kernels.available import padded

SLAB_BYTES = 2**28
"""Maximum bytes of the selection and the lists of the tiles that are processed at once."""
LOG2_E = math.log2(math.e)
NORMALIZERS = {"BLOCK": 64, "num_warps": 4, "num_stages": 3}
SELECT = {"BLOCK": 64, "num_warps": 4, "num_stages": 3}
LOWER = {"BLOCK": 16, "num_warps": 4}
ATTEND = {"BLOCK": 64, "ENTRIES": 16, "num_stages": 3}
"""Sizes and options of the launches."""


def select(call: SelectCall) -> TileSelection:
    """Compute `hsa.select_groups` from checked arguments."""
    layout = call.layout
    first = call.q.new_empty(int(layout.tile_offset[-1]) * layout.shape.groups * call.lists, dtype=torch.uint8)
    if len(first):
        (slab,) = layout.slabs(call.q.device)
        select_tiles(call, slab, first, _bounds(call, slab))
        _open_again(call, first)
    return TileSelection(first, layout, call.lists)


def attend(call: ClusteredCall) -> tuple[Tensor, Tensor]:
    """Compute `hsa.clustered_attention` from checked arguments: the output and its log-sum-exp `[queries, heads]`."""
    keys = call.keys or build_keys(call.k, call.v, call.layout, windows=call.windows)
    q, layout = call.q, call.layout
    out = q.new_empty(*q.shape[:2], call.v.shape[2])
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    selection = call.selection
    if selection is None and call.opened is not None:
        selection = select(call.select(keys))
    if selection is not None:
        for slab in layout.slabs(q.device):
            attend_tiles(call, keys, slab, selection.first, selection.lists, out, lse)
        return out, lse
    bounds, selecting = None, call.select(keys)
    for slab in layout.slabs(q.device, SLAB_BYTES // (call.lists * _bytes(layout))):
        first = q.new_empty(slab.chunks * layout.shape.groups * call.lists, dtype=torch.uint8)
        if slab.chunks:
            bounds = _bounds(selecting, slab, bounds)
            select_tiles(selecting, slab, first, bounds)
        attend_tiles(call, keys, slab, first, call.lists, out, lse)
    return out, lse


def _bytes(layout: Layout) -> int:
    """Return the bytes of the selection and the lists of one chunk that a tile sees."""
    groups, nodes = layout.shape.groups, layout.shape.branching[2]
    return groups + nodes + 1 + 4 * (groups + nodes + 2)


def _weighs(spread: float) -> int:
    """Return how kernels weigh spreads: 0 for not at all, 1 for with 1, 2 for with another weight."""
    return int(spread) if spread in (0.0, 1.0) else 2


def _constants(layout: Layout, q: Tensor) -> dict[str, Any]:
    shape, dim = layout.shape, q.shape[2]
    return {
        "CHUNK": shape.chunk,
        "GROUPS": shape.groups,
        "NODES": shape.branching[2],
        "DIM": dim,
        "D": padded(dim),
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }


def _bounds(call: SelectCall, slab: Slab, bounds: Tensor | None = None) -> Tensor:
    """Return `[queries, heads]` the estimate from which each query wants a group."""
    q, k, keys, shape = call.q, call.k, call.keys, call.layout.shape
    heads, chunks = q.shape[1], call.layout.num_chunks
    bounds = q.new_empty(q.shape[:2], dtype=torch.float32) if bounds is None else bounds
    constants, scale = _constants(call.layout, q), call.scale * LOG2_E
    if call.threshold is not None:
        _normalizers[(len(slab.tiles) * heads,)](
            q, k, keys.k, slab.tiles, bounds, heads, k.shape[1], chunks, *q.stride()[:2], *k.stride()[:2], scale,
            math.log2(call.threshold), TILE=shape.tile, CAUSAL=call.layout.causal, LOG_NODE=math.log2(shape.node),
            LOG_GROUP=math.log2(shape.group), **constants, **NORMALIZERS,
        )  # fmt: skip
        return bounds
    assert call.top_k is not None
    if call.top_k == 0:
        return bounds.fill_(math.inf)
    _largest[(len(slab.tiles) * heads,)](
        q, keys.k, keys.spread, slab.tiles, bounds, heads, k.shape[1], chunks, *q.stride()[:2], call.spread,
        call.top_k, TILE=shape.tile, SPREAD=_weighs(call.spread), KEPT=padded(call.top_k), **constants,
    )  # fmt: skip
    return bounds


def select_tiles(call: SelectCall, slab: Slab, first: Tensor, bounds: Tensor) -> None:
    """Write the first query for which each group is open, for some tiles."""
    q, keys, shape = call.q, call.keys, call.layout.shape
    _first_rows[(len(slab.tiles) * call.lists,)](
        q, keys.k, keys.spread, slab.tiles, bounds, first, q.shape[1], call.k.shape[1], call.lists, call.layout.num_chunks,
        *q.stride()[:2], call.spread, TILE=shape.tile, CAUSAL=call.layout.causal, SPREAD=_weighs(call.spread), **_constants(call.layout, q), **SELECT,
    )  # fmt: skip


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


def attend_tiles(
    call: ClusteredCall,
    keys: ClusteredKeys,
    slab: Slab,
    first: Tensor,
    lists: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Lower a selection to lists, and attend from some tiles."""
    q, k, v, shape = call.q, call.k, call.v, call.layout.shape
    heads, nodes, tiles, chunks = q.shape[1], shape.branching[2], slab.tiles, slab.chunks
    upper = first.new_empty(chunks * lists * (nodes + 1))
    key_list = first.new_empty(chunks * lists * shape.groups, dtype=torch.int32)
    pooled_list = first.new_empty(chunks * lists * (nodes + 2), dtype=torch.int32)
    counts = first.new_zeros(len(tiles) * lists * 2, dtype=torch.int32)
    constants = _constants(call.layout, q)
    if chunks:
        sizes = {name: constants[name] for name in ("CHUNK", "GROUPS", "NODES")}
        _lower[(len(tiles) * lists,)](
            first, tiles, upper, key_list, pooled_list, counts, lists, call.layout.num_chunks, TILE=shape.tile, **sizes, **LOWER
        )
    bias = call.pooled_bias
    if bias is not None:
        bias = (bias.to(torch.float32) * LOG2_E).expand(heads).contiguous()
    _attend[(len(tiles) * heads,)](
        q, k, v, keys.k, keys.v, first, upper, key_list, pooled_list, counts, tiles, q if bias is None else bias, out, lse,
        heads, k.shape[1], lists, call.layout.num_chunks, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        call.scale * LOG2_E, TILE=shape.tile, VALUE_DIM=v.shape[2], DV=padded(v.shape[2]), CAUSAL=call.layout.causal,
        BIASED=bias is not None, LOG_GROUP=math.log2(shape.group), LOG_NODE=math.log2(shape.node),
        LOG_CHUNK=math.log2(shape.chunk), num_warps=4 if shape.tile <= 64 else 8,
        **constants, **ATTEND,
    )  # fmt: skip
