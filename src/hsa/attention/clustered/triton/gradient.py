"""Gradients of clustered attention and of clustered keys: launches of the kernels in `backward`.

Tiles are processed in slabs, whose parts of the gradients of keys and values fit a fixed amount of memory. The forward pass
counts the rows of all lists, and copies the counts to the host without waiting, so that slabs are as large as memory allows.
Inside a CUDA graph nothing is known of the lists, and slabs are sized for lists of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hsa.attention.clustered.call import ClusteredCall
from hsa.attention.clustered.keys import ClusteredKeys
from hsa.attention.clustered.layout import Layout
from hsa.attention.clustered.slabs import KEY_BLOCK, Slab, key_blocks, number_within, readers, slabs, tile_table
from hsa.attention.clustered.triton import backward as kernels
from hsa.attention.clustered.triton.cluster import build_keys
from hsa.attention.clustered.triton.lists import lower
from hsa.attention.clustered.triton.operator import (
    Sizes,
    attend_constants,
    attend_forward,
    bias_of,
    lower_constants,
    select_tiles,
    sizes_of,
)
from hsa.attention.clustered.triton.tiles import aligned
from hsa.attention.derivatives import first_order
from hsa.attention.kernels.available import padded, shared_memory
from hsa.attention.kernels.triton.launch import Launcher, Prepared, compiled_for
from hsa.attention.kernels.triton.recording import empty

PART_BYTES = 2**31
"""Maximum bytes of the parts of gradients of the tiles that are processed at once."""
LIST_BYTES = 2**30
"""Maximum bytes of their lists, and of the lists of the readers of chunks."""

REDUCE = {"KEYS": 4, "MEANS": 16, "maxnreg": 128}
"""Numbers of parts of groups and of means that a program of `reduce` reads at once, and its registers."""
TRANSPOSE = {"BLOCK": 16, "num_warps": 1}
"""Number of tiles that a program of `transpose` reads at once."""

_attend_gradients = Launcher(kernels.attend_gradients)
_lower = Launcher(lower)
_transpose = Launcher(kernels.transpose)
_reduce = Launcher(kernels.reduce)
_finish = Launcher(kernels.finish)


class HostCounts:
    """Numbers of listed rows of all tiles, `[tiles, lists, 2]`, on their way to the host."""

    def __init__(self, counts: Tensor):
        self.counts, self.arrived = counts, None
        if counts.device.type == "cuda":
            self.counts = counts.to("cpu", non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def read(self) -> np.ndarray:
        """Wait for the counts, and return them."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.counts.numpy()


def attend_with_gradient(call: ClusteredCall) -> tuple[Tensor, Tensor]:
    """Compute `hsa.clustered_attention` with gradients: the output and its log-sum-exp `[queries, heads]`."""
    keys = call.keys
    pages = (None, None) if keys is None else (keys.k, keys.v)
    return Attend.apply(call.q, call.k, call.v, *pages, call.pooled_bias, call)


class Attend(torch.autograd.Function):
    """Clustered attention. Without given keys, it clusters the keys itself, and their gradients flow to k and v."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_pages: Tensor | None,
        v_pages: Tensor | None,
        bias: Tensor | None,
        call: ClusteredCall,
    ) -> tuple[Tensor, Tensor]:
        keys = call.keys or build_keys(k, v, call.layout, windows=call.windows)
        result = attend_forward(call, keys, keep=True)
        ctx.counts = None if q.is_cuda and torch.cuda.is_current_stream_capturing() else HostCounts(result.counts)
        ctx.owns_keys = call.keys is None
        ctx.keys = replace(keys, k=_NOTHING, v=_NOTHING, scores=_NOTHING, channels=_NOTHING, order=None)
        # Tensors are saved in the context only, which checks that nobody changes them.
        nothing = _NOTHING
        ctx.call = replace(
            call, q=nothing, k=nothing, v=nothing, keys=None, selection=None, opened=None, pooled_bias=None
        )
        scored = (keys.scores, keys.channels) if result.selection is None else (None, None)
        saved = q, k, v, keys.k, keys.v, *scored, keys.order, bias, result.selection, result.out, result.lse
        ctx.lists = result.counts.shape[1]
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        return result.out, result.lse

    @staticmethod
    @first_order
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if d_out is None and d_lse is None:
            return (None,) * 7
        q, k, v, k_pages, v_pages, scores, channels, order, bias, selection, out, lse = ctx.saved_tensors
        keys = replace(ctx.keys, k=k_pages, v=v_pages, order=order)
        if selection is None:
            keys = replace(keys, scores=scores, channels=channels)
        call = replace(ctx.call, q=q, k=k, v=v, keys=keys, pooled_bias=bias)
        run = Gradients(call, keys, ctx.lists, out, lse, selection, d_out, d_lse)
        counts = run.most_rows() if ctx.counts is None else ctx.counts.read()
        run.tiles(counts)
        d_k, d_v = run.keys(ctx.owns_keys)
        d_pages = (None, None) if ctx.owns_keys else run.pages()
        d_bias = None if bias is None else run.d_bias.sum(0).sum_to_size(bias.shape).to(bias.dtype)
        return run.d_q, d_k, d_v, *d_pages, d_bias, None


_NOTHING = torch.empty(0)


class Gradients:
    """Computation of the gradients of one call."""

    def __init__(
        self,
        call: ClusteredCall,
        keys: ClusteredKeys,
        lists: int,
        out: Tensor,
        lse: Tensor,
        selection: Tensor | None,
        d_out: Tensor | None,
        d_lse: Tensor | None,
    ):
        q, layout, device = call.q, call.layout, call.q.device
        self.call, self.keys_of_call, self.out, self.lse, self.selection = call, keys, out, lse, selection
        self.d_out = aligned(torch.zeros_like(out) if d_out is None else d_out)
        self.d_lse = None if d_lse is None else d_lse.contiguous()
        self.sizes = sizes_of(q, call.k, call.v, lists, keys.k, keys.v, self.d_out)
        self.rows, self.options = step_of(self.sizes, layout)
        self.width = q.shape[2] + call.v.shape[2]
        self.d_q = torch.empty_like(q, memory_format=torch.contiguous_format)
        self.deltas = torch.empty_like(lse)
        self.d_bias = lse.new_zeros(layout.num_tiles, q.shape[1])
        # Gradients of the rows of pages, keys and values side by side.
        shape = len(keys.k), layout.num_pages, layout.shape.page, self.width
        self.sums = torch.empty(shape, dtype=torch.float32, device=device)
        if layout.capacity is not None:
            self.sums.zero_()  # pages that are not in use

    def most_rows(self) -> np.ndarray:
        """Return the largest possible numbers of open groups and of pooled rows, `[tiles, 1, 2]`."""
        groups = self.call.layout.tile_chunks * self.call.layout.shape.groups
        return np.repeat(np.stack([groups, groups], 1)[:, None], self.sizes.lists, 1)

    def tiles(self, counts: np.ndarray) -> None:
        """Compute the gradients of queries, and add up those of the rows of pages, slab by slab."""
        layout, sizes, device = self.call.layout, self.sizes, self.call.q.device
        steps = -(-counts[..., 0] * layout.shape.group // self.rows) + -(-counts[..., 1] // self.rows)
        rows = steps.sum(1) * self.rows
        bundle = sizes.bundle(layout)
        share = sizes.heads // sizes.lists
        by_rows = number_within(layout, bundle, rows, PART_BYTES // (self.width * sizes.bytes * share))
        units = 2 * layout.shape.groups + layout.shape.branching[2] + 1
        per_chunk = sizes.lists * (13 * layout.shape.groups + 4 * units + 8)
        by_lists = number_within(layout, bundle, layout.tile_chunks, LIST_BYTES // per_chunk)
        whole = self.selection is not None
        every = slabs(layout, device, bundle, max(by_rows, by_lists), whole)
        capacity = max((int(rows[slab.members].sum()) for slab in every), default=0)
        parts = self.call.q.new_empty(max(1, capacity * share), self.width)
        for number, slab in enumerate(every):
            self._slab(slab, parts, capacity, units, again=number > 0)
        if not every:
            self.sums.zero_()

    def _slab(self, slab: Slab, parts: Tensor, capacity: int, units: int, *, again: bool) -> None:
        call, sizes, keys, lists = self.call, self.sizes, self.keys_of_call, self.sizes.lists
        layout, q, tiles = call.layout, call.q, slab.tiles
        held, padding = slab.chunks * layout.shape.groups * lists, slab.num_tiles * lists * self.rows
        seen = readers(layout, slab, q.device)
        counted = layout.num_tiles * lists * 2
        memory = [held + padding // layout.shape.group, held + padding, held + padding, held // 4]
        memory += [slab.chunks * lists * 2, counted, seen.total * lists * units, len(seen.chunks) * lists * units]
        memory = [-(-n // 4) * 4 for n in (*memory, slab.num_tiles * lists)]  # multiples of 16 bytes
        ints = q.new_empty(sum(memory), dtype=torch.int32).split(memory)
        key_list, pooled_rows, pooled_kinds, first, prefixes, counts, transposed, lengths, rows = ints
        if self.selection is not None:
            first = self.selection
        elif slab.chunks:
            first = first.view(torch.uint8)
            bounds = empty(q, *q.shape[:2], dtype=torch.float32)
            select_tiles(call.select(keys), sizes, slab, bounds, first)
        else:
            first = first.view(torch.uint8)
        launches = _kernels(sizes, layout, slab, call.pooled_bias is not None, self.d_lse is not None, again)
        listed = (key_list, pooled_rows, pooled_kinds, counts)
        launches.lower(slab.num_tiles * lists, (first, tiles, *listed, prefixes, rows, slab.num_tiles, lists))
        rows = rows[: slab.num_tiles * lists]
        offsets = rows.cumsum(0) - rows
        bias = self.lse if call.pooled_bias is None else bias_of(call.pooled_bias, sizes)
        launches.attend(
            slab.num_tiles * sizes.heads,
            (q, call.k, call.v, keys.k, keys.v, *listed, offsets, tiles, bias,
             self.out, self.d_out, self.lse, self.lse if self.d_lse is None else self.d_lse, self.deltas, self.d_q,
             self.d_bias, parts, slab.num_tiles, sizes.heads, sizes.kv_heads, lists, layout.num_pages, capacity,
             *sizes.strides, *self.d_out.stride()[:2], call.scale),
        )  # fmt: skip
        if not layout.num_chunks:
            return
        chunks = len(seen.chunks)
        launches.transpose(
            chunks * lists,
            (first, tiles, seen.tiles, seen.chunks, prefixes, counts, offsets, transposed, lengths, lists),
        )
        launches.reduce(
            chunks * sizes.kv_heads * units,
            (parts, transposed, lengths, seen.chunks, self.sums, lists, sizes.kv_heads, layout.num_pages,
             sizes.heads // lists, capacity),
        )  # fmt: skip

    def keys(self, owned: bool) -> tuple[Tensor, Tensor]:
        """Return the gradients of k and v: those of exact keys, and, if pages are their own, those of the pages."""
        call, keys, d = self.call, self.keys_of_call, self.call.q.shape[2]
        sums = self.sums[..., :d], self.sums[..., d:]
        exact = self.d_out, self.lse, self.deltas
        return finish(call.q, call.k, call.v, exact, call.layout, keys.order, sums if owned else None, call.scale)

    def pages(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of the pages of keys and values."""
        d_k, d_v = self.sums.split([self.call.q.shape[2], self.call.v.shape[2]], -1)
        return d_k.to(self.call.k.dtype), d_v.to(self.call.v.dtype)


def step_of(sizes: Sizes, layout: Layout) -> tuple[int, dict[str, int]]:
    """Return the rows per step of `attend_gradients`, and its launch options.

    A program keeps the queries of a tile and the gradients of their outputs in shared memory, and for every row of a step
    its key and value, its weights and the gradients of its logits.
    """
    tile, row = layout.shape.tile, (sizes.dim + padded(sizes.value_dim)) * sizes.bytes
    rows = 64 if sizes.bytes == 2 else 32  # wider types take too many registers
    left = shared_memory(sizes.device) - tile * row - 2 * rows * tile * sizes.bytes - 2**13
    stages = max(1, min(3, left // (rows * row)))
    return rows, {"num_warps": 4 if row <= 256 and tile <= 64 else 8, "num_stages": stages}


@dataclass(frozen=True)
class _Launches:
    lower: Prepared
    attend: Prepared
    transpose: Prepared
    reduce: Prepared


@lru_cache(maxsize=512)
def _kernels(sizes: Sizes, layout: Layout, slab: Slab, biased: bool, of_lse: bool, again: bool) -> _Launches:
    shape = layout.shape
    rows, options = step_of(sizes, layout)
    key = sizes.key, compiled_for(slab.num_tiles, layout.num_pages, sizes.heads // sizes.lists)
    tree = {"CHUNK": shape.chunk, "GROUPS": shape.groups, "NODES": shape.branching[2]}
    width = sizes.dim + sizes.value_dim
    rows_of_sums = {"WIDTH": width, "PADDED": padded(width), "num_warps": max(1, padded(width) // 128)}
    attend = attend_constants(sizes, layout, rows) | {"BIASED": biased, "OF_LSE": of_lse, **options}
    return _Launches(
        lower=Prepared(_lower, key, lower_constants(layout, rows, gradient=True)),
        attend=Prepared(_attend_gradients, key, attend),
        transpose=Prepared(_transpose, key, {**tree, "ROWS": rows, **TRANSPOSE}),
        reduce=Prepared(_reduce, key, {**tree, **rows_of_sums, "AGAIN": again, **REDUCE}),
    )


def finish(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    exact: tuple[Tensor, Tensor, Tensor] | None,
    layout: Layout,
    order: Tensor | None,
    sums: tuple[Tensor, Tensor] | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of k and v.

    Args:
        exact: Gradient of the output, log-sum-exps and deltas of the queries that see keys exactly; None for none.
        order: `ClusteredKeys.order`.
        sums: Gradients of the pages of keys and values `[kv_heads, pages, rows, dim]`; None for none.
    """
    d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    blocks = key_blocks(layout, k.device)
    d_out, lse, deltas = exact or (q, q, q)
    k_sums, v_sums = sums or (k, v)
    orders = blocks if order is None else order
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *d_out.stride()[:2])
    shape, (_, kv_heads, dim), value_dim = layout.shape, k.shape, v.shape[2]
    constants = {
        "TILE": shape.tile, "CHUNK": shape.chunk, "GROUPS": shape.groups, "NODES": shape.branching[2], "DIM": dim,
        "VALUE_DIM": value_dim, "DV": padded(value_dim), "CAUSAL": layout.causal, "WINDOWS": order is None,
        "PRECISION": "ieee" if k.dtype == torch.float32 else "tf32", "BLOCK": KEY_BLOCK, "PAGES": sums is not None,
        "EXACT": exact is not None, "num_warps": 4 if (dim + value_dim) * k.element_size() <= 256 else 8, "num_stages": 1,
    }  # fmt: skip
    tensors = (q, k, v, d_out, lse, deltas, blocks, tile_table(layout, k.device), orders, k_sums, v_sums, d_k, d_v)
    numbers = (q.shape[1], kv_heads, layout.num_pages, k_sums.stride(-2), v_sums.stride(-2), *strides)
    if len(blocks):
        _finish(compiled_for(*tensors, *numbers), len(blocks) * kv_heads, (*tensors, *numbers, scale), constants)
    return d_k, d_v


def build_keys_with_gradient(k: Tensor, v: Tensor, layout: Layout, *, windows: bool) -> ClusteredKeys:
    """Return the clustered keys of packed k `[keys, kv_heads, dim]` and v, whose gradients flow to k and v."""
    keys = build_keys(k.detach(), v.detach(), layout, windows=windows)
    k_pages, v_pages = Pages.apply(k, v, keys, layout)
    return replace(keys, k=k_pages, v=v_pages)


class Pages(torch.autograd.Function):
    """The pages of clustered keys, as functions of keys and values."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, keys: ClusteredKeys, layout: Layout) -> tuple[Tensor, Tensor]:
        ctx.layout, ctx.widths = layout, (k.shape, v.shape)
        ctx.save_for_backward(keys.order)
        ctx.set_materialize_grads(False)
        return keys.k, keys.v

    @staticmethod
    @first_order
    def backward(ctx: Any, d_k: Tensor | None, d_v: Tensor | None) -> tuple[Tensor | None, ...]:
        given = d_k if d_k is not None else d_v
        if given is None:
            return (None,) * 4
        (order,) = ctx.saved_tensors
        shapes = [(*given.shape[:3], shape[2]) for shape in ctx.widths]
        sums = [given.new_zeros(s) if d is None else d.contiguous() for d, s in zip((d_k, d_v), shapes, strict=True)]
        k, v = (given.new_empty(shape) for shape in ctx.widths)
        return *finish(k, k, v, None, ctx.layout, order, (sums[0], sums[1]), 1.0), None, None
