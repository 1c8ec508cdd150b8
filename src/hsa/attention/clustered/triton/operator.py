"""Backend "triton" of clustered attention: launches, in slabs of tiles that bound the memory of selections and lists."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from hsa.attention.clustered.call import ClusteredCall, SelectCall, keep
from hsa.attention.clustered.keys import ClusteredKeys, scored_dim
from hsa.attention.clustered.layout import Layout
from hsa.attention.clustered.selection import TileSelection
from hsa.attention.clustered.slabs import Slab, slabs_within
from hsa.attention.clustered.threshold import log_of
from hsa.attention.clustered.triton import attend as attend_kernels
from hsa.attention.clustered.triton import select as select_kernels
from hsa.attention.clustered.triton.cluster import build_keys, unit_of
from hsa.attention.clustered.triton.lists import lower
from hsa.attention.clustered.triton.tiles import aligned
from hsa.attention.kernels.available import padded, shared_memory
from hsa.attention.kernels.triton.launch import Launcher, Prepared, compiled_for
from hsa.attention.kernels.triton.recording import constant, empty, recording_of

SLAB_BYTES = 2**29
"""Maximum bytes of the selection and the lists of the tiles that are processed at once."""
KEPT_BYTES = 2**29
"""Maximum bytes of a selection that is kept for gradients; a larger one is computed again."""
QUERIES = 128
"""Number of queries that a program selects for, with head dim 64 in half precision; fewer for wider heads."""
ROWS = 64
"""Maximum number of rows that a step of `attend` reads."""
RECORDED_BYTES = 2**30
"""Maximum bytes of the memory of a selection and its attention whose launches are kept."""
LOG2_E = math.log2(math.e)

_normalizers = Launcher(select_kernels.normalizers)
_largest = Launcher(select_kernels.largest)
_select = Launcher(select_kernels.select)
_lower = Launcher(lower)
_attend = Launcher(attend_kernels.attend)


@dataclass(frozen=True)
class Sizes:
    """Whatever determines the compiled kernels of a call, beside its layout and its slab."""

    dtype: torch.dtype
    device: torch.device
    heads: int
    kv_heads: int
    lists: int
    dim: int
    value_dim: int
    strides: tuple[int, ...]  # of q, k and v, without those of the last dimension
    is_aligned: tuple[bool, ...]  # whether tensors that a caller may have made start at multiples of 16 bytes

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Properties that Triton specialises kernels on."""
        return self.dtype, compiled_for(self.heads, self.kv_heads, self.lists, *self.strides), self.is_aligned

    @property
    def bytes(self) -> int:
        """Number of bytes of an element."""
        return self.dtype.itemsize

    @property
    def precision(self) -> str:
        """Precision of products."""
        return "ieee" if self.dtype == torch.float32 else "tf32"

    def bundle(self, layout: Layout) -> int:
        """Return the number of tiles whose queries a program selects for."""
        return max(1, QUERIES * 128 // max(128, self.dim * self.bytes) // layout.shape.tile)

    def chunk_bytes(self, layout: Layout) -> int:
        """Return the bytes of the products of the queries of a tile with the mean of a chunk."""
        return 4 * self.heads * layout.shape.tile

    def step(self, row_bytes: int, tile: int, rows: int) -> tuple[int, dict[str, int]]:
        """Return the rows per step, `rows` or fewer, and the launch options, so that all stages fit the shared memory.

        Args:
            row_bytes: Bytes that a step loads per row.
            tile: Number of queries of a program, which stay in shared memory.
        """
        rows = rows if self.bytes == 2 else min(rows, 32)  # wider types take too many registers
        left = shared_memory(self.device) - tile * self.dim * self.bytes - 2**13
        for stages in (3, 2):
            if rows * row_bytes * stages <= left:
                return rows, {"num_warps": 4 if tile <= 64 else 8, "num_stages": stages}
        return self.step(row_bytes, tile, rows // 2) if rows > 16 else (16, {"num_warps": 4, "num_stages": 1})


def sizes_of(q: Tensor, k: Tensor, v: Tensor, lists: int, *others: Tensor) -> Sizes:
    return Sizes(
        q.dtype, q.device, q.shape[1], k.shape[1], lists, q.shape[2], v.shape[2],
        (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2]), tuple([x.data_ptr() % 16 == 0 for x in others]),
    )  # fmt: skip


def select(call: SelectCall) -> TileSelection:
    """Compute `hsa.select_groups` from checked arguments."""
    call = replace(call, q=aligned(call.q), k=aligned(call.k))
    layout, keys = call.layout, call.keys
    first = empty(call.q, selection_bytes(layout, call.lists), dtype=torch.uint8)
    if len(first):
        sizes = sizes_of(call.q, call.k, keys.v, call.lists, keys.k, keys.scores, keys.channels)
        bounds = empty(call.q, *call.q.shape[:2], dtype=torch.float32)
        most = SLAB_BYTES // sizes.chunk_bytes(layout)
        for slab in slabs_within(layout, call.q.device, sizes.bundle(layout), most, whole=True):
            select_tiles(call, sizes, slab, bounds, first)
        _open_again(call, first)
    return TileSelection(first, layout, call.lists)


def selection_bytes(layout: Layout, lists: int) -> int:
    """Return the size of the selection of all tiles."""
    return int(layout.tile_offset[-1]) * layout.shape.groups * lists


def attend(call: ClusteredCall) -> tuple[Tensor, Tensor]:
    """Compute `hsa.clustered_attention` from checked arguments: the output and its log-sum-exp `[queries, heads]`."""
    given, call = call, replace(call, q=aligned(call.q), k=aligned(call.k), v=aligned(call.v))
    if call.needs_gradient:
        from hsa.attention.clustered.triton.gradient import attend_with_gradient

        return attend_with_gradient(call)
    with recording_of(call.q, call.k, call.v) as recording:
        result = attend_forward(call, call.keys or build_keys(call.k, call.v, call.layout, windows=call.windows))
    is_copied = call.q is not given.q or call.k is not given.k or call.v is not given.v
    is_launched = call.pooled_bias is None  # by kernels alone
    if call.repeats_as is not None and is_launched and not is_copied and result.slabs == 1:
        keep(call.repeats_as, recording.replay([result.out, result.lse]))
    return result.out, result.lse


def record(
    key: Hashable, tensors: tuple[Tensor, ...], run: Callable[[], tuple[Tensor, TileSelection]]
) -> tuple[Tensor, TileSelection]:
    """Select and attend, and keep the launches for calls of the same key.

    Args:
        tensors: Tensors that differ between calls: q, k and v, and those of the clustered keys.
        run: The call.
    """
    if any(aligned(x) is not x for x in tensors[:3]):
        return run()
    with recording_of(*tensors) as recording:
        out, selection = run()
    made = {x.data_ptr() for x in recording.memory}
    if recording.nbytes <= RECORDED_BYTES and out.data_ptr() in made and selection.first.data_ptr() in made:
        replay, layout, lists = recording.replay([out, selection.first]), selection.layout, selection.lists
        keep(key, lambda *others: (*replay(*others), layout, lists))
    return out, selection


@dataclass(frozen=True, eq=False)
class Result:
    """Output of a call, and tensors that its gradients need.

    Attributes:
        selection: Selection of all tiles; None if slabs have selected for themselves.
        counts: `[tiles, lists, 2]` numbers of open groups and of pooled rows.
        slabs: Number of slabs.
    """

    out: Tensor
    lse: Tensor
    selection: Tensor | None
    counts: Tensor
    slabs: int


def attend_forward(call: ClusteredCall, keys: ClusteredKeys, keep: bool = False) -> Result:
    """Select and attend.

    Args:
        keep: Whether gradients follow. The selection is then kept if it is not too large.
    """
    q, layout, selection, selecting = call.q, call.layout, call.selection, call.select(keys)
    out = empty(q, *q.shape[:2], call.v.shape[2])
    lse = empty(q, *q.shape[:2], dtype=torch.float32)  # bounds, until `attend` stores the sums
    fits = keep and selection_bytes(layout, call.lists) <= KEPT_BYTES
    if selection is None and (fits or call.opened is not None):
        selection = select(selecting)
    lists = call.lists if selection is None else selection.lists
    given = [keys.k, keys.v, keys.scores, keys.channels, *([] if selection is None else [selection.first])]
    sizes = sizes_of(q, call.k, call.v, lists, *given)
    counts = empty(q, layout.num_tiles, lists, 2, dtype=torch.int32)
    groups = layout.shape.groups * lists  # per chunk
    most = SLAB_BYTES // (13 * groups + sizes.chunk_bytes(layout))
    every = slabs_within(layout, q.device, sizes.bundle(layout), most, whole=selection is not None)
    for slab in every:
        held, padding = slab.chunks * groups, slab.num_tiles * lists * ROWS
        # All start at multiples of 16 bytes, which compiled kernels rely on.
        parts = [held + padding // layout.shape.group, held + padding, held + padding, held // 4]
        *listed, first = empty(q, sum(parts), dtype=torch.int32).split(parts)
        first = first.view(torch.uint8)
        if selection is not None:
            first = selection.first
        elif slab.chunks:
            select_tiles(selecting, sizes, slab, lse, first)
        _attend_tiles(call, keys, sizes, slab, first, [*listed, counts], out, lse)
    return Result(out, lse, None if selection is None else selection.first, counts, len(every))


@lru_cache(maxsize=512)
def _normalizer_kernel(sizes: Sizes, layout: Layout, slab: Slab, per_head: bool) -> Prepared:
    shape = layout.shape
    block, launch = sizes.step(sizes.dim * sizes.bytes, shape.tile, 64)
    constants = {
        "TILE": shape.tile, "CHUNK": shape.chunk, "GROUPS": shape.groups, "NODES": shape.branching[2],
        "DIM": sizes.dim, "CAUSAL": layout.causal, "LOG_NODE": math.log2(shape.node), "LOG_GROUP": math.log2(shape.group),
        "PER_HEAD": per_head, "PRECISION": sizes.precision, "BLOCK": block, **launch,
    }  # fmt: skip
    return Prepared(_normalizers, (sizes.key, compiled_for(slab.num_tiles, layout.num_pages)), constants)


@lru_cache(maxsize=512)
def _select_kernels(
    sizes: Sizes, layout: Layout, slab: Slab, scores: torch.dtype, number: int | None, weighs: int
) -> tuple[Prepared | None, Prepared]:
    """Return the kernels that find the bounds of `top_k`, if there is one, and that select."""
    shape, bundle = layout.shape, sizes.bundle(layout)
    channels, key = scored_dim(sizes.dim), (sizes.key, scores)
    common: dict[str, Any] = {"TILE": shape.tile, "GROUPS": shape.groups, "CHANNELS": channels}
    common |= {"UNIT": unit_of(scores), "SPREAD": weighs, "PRECISION": sizes.precision}
    largest = None
    if number:
        numbers = compiled_for(slab.num_tiles, layout.num_pages, number)
        largest = Prepared(_largest, (*key, numbers), {**common, "KEPT": padded(number), "num_stages": 1})
    block, launch = sizes.step(2 * channels * sizes.bytes, bundle * shape.tile, 32)
    if scores.itemsize == 1 and sizes.dim <= 64:
        launch["maxnreg"] = 128  # more programs at once hide the latencies of each other
    # The groups of a step are those of one chunk.
    common |= {"TILES": bundle, "CAUSAL": layout.causal, "BLOCK": min(block, shape.groups), **launch, "num_warps": 4}
    return largest, Prepared(_select, (*key, compiled_for(slab.num_bundles, layout.num_pages)), common)


def select_tiles(call: SelectCall, sizes: Sizes, slab: Slab, bounds: Tensor, first: Tensor) -> None:
    """Write the first query for which each group is open, for some tiles.

    Args:
        bounds: Memory for the estimate from which each query wants a group, `[queries, heads]`.
        first: Memory for the result.
    """
    q, k, keys, layout, pages = call.q, call.k, call.keys, call.layout, call.layout.num_pages
    weighs = int(call.spread) if call.spread in (0.0, 1.0) else 2  # not at all, with 1, with another weight
    tiles, strides = constant(slab.tiles), sizes.strides
    of_chunks = empty(q, slab.chunks * sizes.heads * layout.shape.tile, dtype=torch.float32)
    shared = (slab.num_tiles, sizes.heads, sizes.kv_heads, pages, *strides[:2])
    # With top_k, these bounds are not used, except that nothing reaches those of top_k=0.
    threshold = math.inf if call.threshold is None else log_of(call.threshold, bounds, math.log2)
    if isinstance(threshold, Tensor):
        constant(threshold)
    _normalizer_kernel(sizes, layout, slab, isinstance(threshold, Tensor))(
        slab.num_tiles * sizes.heads,
        (q, k, keys.k, tiles, bounds, of_chunks, *shared, *strides[2:4], call.scale * LOG2_E, threshold),
    )
    largest, select_groups = _select_kernels(sizes, layout, slab, keys.scores.dtype, call.top_k, weighs)
    if largest is not None:
        tensors: tuple[Tensor, ...] = (q, keys.scores, keys.channels, tiles, bounds, of_chunks)
        largest(slab.num_tiles * sizes.heads, (*tensors, *shared, call.top_k, call.spread))
    tensors = (q, keys.scores, keys.channels, tiles, constant(slab.bundles), bounds, of_chunks, first)
    numbers = (slab.num_bundles, sizes.heads, sizes.kv_heads, sizes.lists, pages)
    select_groups(slab.num_bundles * sizes.lists, (*tensors, *numbers, *strides[:2], call.spread))


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


def lower_constants(layout: Layout, rows: int, gradient: bool = False) -> dict[str, Any]:
    """Return the compile-time constants and options of `lower`, for steps of this number of rows."""
    shape = layout.shape
    return {
        "TILE": shape.tile, "CHUNK": shape.chunk, "GROUPS": shape.groups, "NODES": shape.branching[2],
        "ENTRIES": rows // shape.group, "ROWS": rows, "LOG_GROUP": math.log2(shape.group),
        "LOG_NODE": math.log2(shape.node), "LOG_CHUNK": math.log2(shape.chunk), "BLOCK": 256 // shape.groups,
        "GRADIENT": gradient, "num_warps": 1,
    }  # fmt: skip


def attend_constants(sizes: Sizes, layout: Layout, rows: int) -> dict[str, Any]:
    """Return the compile-time constants that `attend` and its gradients share."""
    shape = layout.shape
    return {
        "TILE": shape.tile, "CHUNK": shape.chunk, "GROUPS": shape.groups, "NODES": shape.branching[2], "DIM": sizes.dim,
        "VALUE_DIM": sizes.value_dim, "DV": padded(sizes.value_dim), "CAUSAL": layout.causal,
        "PRECISION": sizes.precision, "BLOCK": rows, "ENTRIES": rows // shape.group,
    }  # fmt: skip


@lru_cache(maxsize=512)
def _attend_kernels(sizes: Sizes, layout: Layout, slab: Slab, biased: bool) -> tuple[Prepared, ...]:
    shape = layout.shape
    rows, options = sizes.step((sizes.dim + padded(sizes.value_dim)) * sizes.bytes, shape.tile, ROWS)
    if sizes.dim + padded(sizes.value_dim) <= 128 and sizes.bytes == 2:
        options["maxnreg"] = 128
    constants = attend_constants(sizes, layout, rows) | {"BIASED": biased, **options}
    key = sizes.key, compiled_for(slab.num_tiles, layout.num_pages)
    to_lists = Prepared(_lower, key, lower_constants(layout, rows))
    # With a fixed reference, then again without it where that fails. In float16, weights above 65,504 would overflow.
    passes = ((False, False),) if sizes.dtype == torch.float16 else ((True, False), (False, True))
    return to_lists, *(Prepared(_attend, key, {**constants, "FIXED": fixed, "AGAIN": again}) for fixed, again in passes)


def bias_of(bias: Tensor, sizes: Sizes) -> Tensor:
    """Return the bias of pooled rows for every head, to base 2."""
    return (bias.to(torch.float32) * LOG2_E).expand(sizes.heads).contiguous()


def _attend_tiles(
    call: ClusteredCall,
    keys: ClusteredKeys,
    sizes: Sizes,
    slab: Slab,
    first: Tensor,
    listed: list[Tensor],
    out: Tensor,
    lse: Tensor,
) -> None:
    """Lower a selection to lists, and attend from some tiles.

    Args:
        first: First query for which each group is open.
        listed: Memory for the lists of keys, of pooled rows and of their kinds, and for the lengths.
    """
    bias, tiles, lists = call.pooled_bias, constant(slab.tiles), sizes.lists
    to_lists, *passes = _attend_kernels(sizes, call.layout, slab, bias is not None)
    counts = listed[-1]
    to_lists(slab.num_tiles * lists, (first, tiles, *listed, counts, counts, slab.num_tiles, lists))
    bias = lse if bias is None else bias_of(bias, sizes)
    tensors = (call.q, call.k, call.v, keys.k, keys.v, *listed, tiles, bias, out, lse)
    numbers = (slab.num_tiles, sizes.heads, sizes.kv_heads, lists, call.layout.num_pages, *sizes.strides)
    for attend_lists in passes:
        attend_lists(slab.num_tiles * sizes.heads, (*tensors, *numbers, call.scale * LOG2_E))
