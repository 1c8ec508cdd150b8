"""Backend "torch" of clustered attention: dense scores of all groups, then a gathered list per tile and head.

Tiles of one sequence that see the same chunks are a block: their groups are scored together, and their lists are built
together. Lists of similar length are then read together. Logits are laid out as `[keys, queries]`, so that a row of a table
is active for a range of one row of logits. They are logarithms to base 2, as `exp2` is several times faster than `exp`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hsa.attention.clustered.call import ClusteredCall, SelectCall
from hsa.attention.clustered.keys import ClusteredKeys, build_keys, levels_of
from hsa.attention.clustered.layout import Layout, Shape
from hsa.attention.clustered.selection import NEVER, Lists, TileSelection, lists_of
from hsa.attention.clustered.threshold import log_of
from hsa.tree.lasting import lasting

SCORES = {"cpu": 2**20, "cuda": 2**26}
"""Number of scores in memory at once, unless a single tile has more. On a CPU, they fit its cache."""
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Block:
    """Consecutive tiles of one sequence, with the same number of queries and the same visible chunks."""

    tile: int
    tiles: int
    queries: int  # per tile
    row: int  # first row of q
    first_chunk: int
    chunks: int
    exact: int  # first row of k that is exact
    end: int  # end of the exact rows of the first query

    @property
    def rows(self) -> slice:
        """Rows of q."""
        return slice(self.row, self.row + self.tiles * self.queries)


def blocks(layout: Layout, tiles_at_once: int) -> Iterator[Block]:
    """Yield all tiles in blocks."""
    sizes = np.diff(layout.tile_row)
    begin = 0
    while begin < layout.num_tiles:
        end = begin + 1
        while (
            end < layout.num_tiles
            and end - begin < tiles_at_once
            and layout.tile_sequence[end] == layout.tile_sequence[begin]
            and layout.tile_chunks[end] == layout.tile_chunks[begin]
            and sizes[end] == sizes[begin]
        ):
            end += 1
        yield Block(
            tile=begin,
            tiles=end - begin,
            queries=int(sizes[begin]),
            row=int(layout.tile_row[begin]),
            first_chunk=int(layout.tile_chunk[begin]),
            chunks=int(layout.tile_chunks[begin]),
            exact=int(layout.tile_exact[begin]),
            end=int(layout.tile_end[begin]),
        )
        begin = end


def _scores_at_once(x: Tensor) -> int:
    return SCORES.get(x.device.type, SCORES["cpu"])


def _tiles_at_once(q: Tensor, layout: Layout) -> int:
    """Return the number of tiles whose estimates are in memory at once: two per query, head and group."""
    per_tile = 2 * q.shape[1] * layout.shape.tile * layout.shape.groups * int(layout.tile_chunks.max(initial=1))
    return max(1, _scores_at_once(q) // max(1, per_tile))


def _queries(q: Tensor, scale: float, block: Block) -> Tensor:
    """Return the queries of a block `[heads, tiles, queries, dim]`, wide enough for sums, and scaled for base 2."""
    q = q[block.rows].to(torch.promote_types(q.dtype, torch.float32)).transpose(0, 1).contiguous() * (scale * LOG2_E)
    return q.view(len(q), block.tiles, block.queries, q.shape[2])


@torch.no_grad()
def select(call: SelectCall, exact: Tensor | None = None) -> TileSelection:
    """Compute `hsa.select_groups` from checked arguments.

    Args:
        exact: `[queries, heads]` log-sum-exp of the exact logits to base 2, if it is known.
    """
    layout = call.layout
    first = call.q.new_empty(int(layout.tile_offset[-1]) * layout.shape.groups * call.lists, dtype=torch.uint8)
    result = TileSelection(first, layout, call.lists)
    cut = {int(tile): s for s, tile in enumerate(layout.first_tiles) if tile >= 0 and layout.is_cut(s)}
    table = _estimate_table(call)
    for block in blocks(layout, _tiles_at_once(call.q, layout)):
        if block.chunks == 0:
            continue
        opening = _first_rows(call, table, block, exact)
        if block.tile in cut and call.opened is not None:
            before = call.opened[cut[block.tile], :, : opening.shape[-1]]
            opening[0, :, : before.shape[-1]].masked_fill_(before, 0)
        result.tile(block.tile, block.tiles).copy_(opening)
    return result


def _estimate_table(call: SelectCall) -> Tensor:
    """Return `[chunks, signs, groups, kv_heads, channels + 1]`: the means of groups ± their spreads, and 1.

    The larger one of the two products with (q, log |G|) is the estimate of a group, less the logit of its chunk.
    """
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    table, spread = (x.to(dtype).unsqueeze(2) for x in call.keys.scored)  # [kv_heads, chunks, 1, groups, channels]
    if call.spread:
        spread = spread * call.spread
        table = torch.cat([table + spread, table - spread], 2)
    return F.pad(table, (0, 1), value=1.0).permute(1, 2, 3, 0, 4).contiguous()


def _first_rows(call: SelectCall, table: Tensor, block: Block, exact: Tensor | None) -> Tensor:
    """Return `[tiles, lists, groups]` the first query of each tile for which a group is open."""
    q = _queries(call.q, call.scale, block)
    table = table[block.first_chunk : block.first_chunk + block.chunks]
    margins = _margins(call, q, table, block, exact).reshape(-1, block.queries)
    first = torch.full((len(margins),), NEVER, dtype=torch.uint8, device=q.device)
    opened = (margins.amax(1) >= 0).nonzero().squeeze(1)  # few: only they are searched for the first query
    if call.layout.causal:
        left = torch.arange(block.queries, 0, -1, dtype=q.dtype, device=q.device)
        left = margins.index_select(0, opened).ge_(0).mul_(left).amax(1)  # several times faster than argmax
        first[opened] = (block.queries - left).to(torch.uint8)
    else:
        first[opened] = 0
    first = first.view(*table.shape[:3], call.lists, -1, block.tiles).amin((1, 4))  # over signs, and heads of a list
    first = first.permute(3, 2, 0, 1).reshape(block.tiles, call.lists, -1)
    first[..., 0] = 0  # the group of the first key, a sink in most models
    return first


def _margins(call: SelectCall, q: Tensor, table: Tensor, block: Block, exact: Tensor | None) -> Tensor:
    """Return products of the table with queries `[chunks, signs, groups, heads · queries]`, less what a group must have."""
    rows, log_count = q.view(table.shape[3], -1, q.shape[3]), math.log2(call.layout.shape.group)
    channels = call.keys.channels[:, block.first_chunk, None].long().expand(-1, rows.shape[1], -1)
    scored = rows.gather(2, channels)
    chunks = slice(block.first_chunk, block.first_chunk + block.chunks)
    of_chunks = torch.bmm(call.keys.k[:, chunks, -1].to(q.dtype), rows.transpose(1, 2))
    of_chunks = of_chunks.transpose(0, 1).reshape(block.chunks, 1, 1, -1)
    if call.threshold is not None:
        log_threshold = log_of(call.threshold, q, math.log2, (-1, 1, 1))
        bound = (_normalizer(call, q, block, exact) + (log_threshold - log_count)).view(*rows.shape[:2], 1)
        unknown = bound.isnan()  # queries with NaN want nothing, and must not affect the others of their tile
        scored = torch.cat([scored.masked_fill(unknown, 0), -bound.masked_fill(unknown, math.inf)], -1)
        return _products(table, scored).add_(of_chunks.masked_fill_(unknown.view(-1), 0))
    assert call.top_k is not None
    estimates = _products(table, F.pad(scored, (0, 1), value=log_count)).add_(of_chunks)
    best = estimates.amax(1).flatten(0, 1)
    number = min(call.top_k, len(best))
    bound = best.topk(number, 0).values[-1] if number else best.new_full((1,), math.inf)
    return estimates.sub_(bound).nan_to_num_(-math.inf)


def _products(table: Tensor, rows: Tensor) -> Tensor:
    """Return the products `[…, heads · rows]` of a table `[…, heads, dim]` with rows `[heads, rows, dim]`."""
    heads, _, dim = rows.shape
    if table.device.type != "cpu" or table.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return torch.einsum("...hd,hrd->...hr", table, rows).flatten(-2)
    # A convolution with kernels of size 1 and a group per head gives the same products. oneDNN computes it twice as fast as
    # MKL computes torch.bmm, measured on an AMD CPU with AVX-512.
    pixels = table.view(1, 1, -1, heads * dim).permute(0, 3, 1, 2)  # the format "channels last"
    out = F.conv2d(pixels, rows.flatten(0, 1)[..., None, None], groups=heads)
    return out.permute(0, 2, 3, 1).reshape(*table.shape[:-2], -1)


def _normalizer(call: SelectCall, q: Tensor, block: Block, exact: Tensor | None) -> Tensor:
    """Return `[heads, tiles, queries]` the log-sum-exp of the exact logits and of the pooled nodes."""
    layout, shape = call.layout, call.layout.shape
    nodes = levels_of(call.keys.k, shape)[2][:, block.first_chunk : block.first_chunk + block.chunks]
    nodes = nodes.flatten(1, 2).to(q.dtype)
    pooled = torch.bmm(nodes, q.view(len(nodes), -1, q.shape[3]).transpose(1, 2))
    lse = _softmax(pooled)[2].view(q.shape[:3]) + math.log2(shape.node)
    if exact is not None:
        return torch.logaddexp2(lse, exact[block.rows].T.view(lse.shape))
    for tiles in _spans(block, layout):
        near = _softmax(_exact_logits(q[:, tiles], call.k, block, tiles, layout))[2]
        lse[:, tiles] = torch.logaddexp2(lse[:, tiles], near.view(len(q), -1, block.queries))
    return lse


def _spans(block: Block, layout: Layout) -> list[slice]:
    """Return the tiles of a block in parts that see the same exact keys, apart from causality inside a tile."""
    if layout.causal:
        return [slice(i, i + 1) for i in range(block.tiles)]
    return [slice(0, block.tiles)] if block.exact < block.end else []


def _exact_rows(block: Block, tiles: slice, layout: Layout) -> slice:
    """Return the rows of k that the last query of some tiles of a block sees exactly."""
    return slice(block.exact, block.end + (tiles.stop * block.queries - 1 if layout.causal else 0))


def _exact_logits(q: Tensor, k: Tensor, block: Block, tiles: slice, layout: Layout) -> Tensor:
    """Return `[kv_heads, exact keys, heads of each · tiles · queries]`, −∞ for keys that a query does not see."""
    k = k[_exact_rows(block, tiles, layout)].to(q.dtype).transpose(0, 1)
    logits = torch.bmm(k, q.reshape(len(k), -1, q.shape[3]).transpose(1, 2))
    later = block.queries - 1 if layout.causal else 0  # number of keys that the first query does not see
    if later:
        hidden = torch.ones(later, block.queries, dtype=torch.bool, device=q.device).tril_()
        last = logits[:, logits.shape[1] - later :]
        last.view(*last.shape[:2], -1, block.queries).masked_fill_(hidden[:, None], -math.inf)
    return logits


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights of logits `[batch, keys, queries]`, which are overwritten, their sums, and their log-sum-exp.

    Weights are relative to the largest one of a query, so that their sum is at least 1 if the query sees any key.
    """
    largest = logits.detach().amax(1, keepdim=True).clamp_(min=torch.finfo(logits.dtype).min)
    weights = logits.sub_(largest).exp2_()
    mass = weights.sum(1).clamp(min=1)
    return weights, mass, mass.log2() + largest.squeeze(1)


@torch.compiler.disable(reason="the torch backend of hsa.clustered_attention depends on values, such as the lists")
def attend(call: ClusteredCall) -> tuple[Tensor, Tensor]:
    """Compute `hsa.clustered_attention` from checked arguments: the output and its log-sum-exp `[queries, heads]`."""
    if not call.needs_gradient or not call.layout.num_tiles:
        return _select_and_attend(call)[:2]
    keys = call.keys or build_keys(call.k, call.v, call.layout, windows=call.windows)
    selection = call.selection or select(call.select(keys))
    every = blocks(call.layout, call.layout.num_tiles)
    parts = [checkpoint(_attend, call, keys, selection, block, use_reentrant=False) for block in every]
    out, lse = torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
    return out.to(call.q.dtype), lse / LOG2_E


def select_and_attend(call: ClusteredCall) -> tuple[Tensor, TileSelection]:
    """Return the attention to given keys, and the selection."""
    out, _, selection = _select_and_attend(call)
    return out, replace(selection, keys=call.keys, before=call.opened)


def _select_and_attend(call: ClusteredCall) -> tuple[Tensor, Tensor, TileSelection]:
    """Return the output, its log-sum-exp and the selection, without gradients."""
    keys = call.keys or build_keys(call.k, call.v, call.layout, windows=call.windows)
    every = list(blocks(call.layout, call.layout.num_tiles))
    wide = torch.promote_types(call.q.dtype, torch.float32)
    out = call.q.new_empty(*call.q.shape[:2], call.v.shape[2], dtype=wide)
    lse = call.q.new_empty(call.q.shape[:2], dtype=wide)
    for block in every:
        out[block.rows], lse[block.rows] = _attend_exact(call, block)
    selection = call.selection or select(call.select(keys), lse)
    for block in every:
        if block.chunks:
            near = out[block.rows], lse[block.rows]
            out[block.rows], lse[block.rows] = _merged(near, _attend_lists(call, keys, selection, block))
    return out.to(call.q.dtype), lse / LOG2_E, selection


def _attend(call: ClusteredCall, keys: ClusteredKeys, selection: TileSelection, block: Block) -> tuple[Tensor, Tensor]:
    """Attend from a block of tiles: `[queries, heads, value_dim]` and `[queries, heads]`, to base 2."""
    near = _attend_exact(call, block)
    return _merged(near, _attend_lists(call, keys, selection, block)) if block.chunks else near


def _merged(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the attention to the keys of both, each given as output and log-sum-exp."""
    lse = torch.logaddexp2(a[1], b[1])
    return a[0] * (a[1] - lse).exp2()[..., None] + b[0] * (b[1] - lse).exp2()[..., None], lse


def _attend_exact(call: ClusteredCall, block: Block) -> tuple[Tensor, Tensor]:
    """Attend to the exact keys from a block of tiles: `[queries, heads, value_dim]` and `[queries, heads]`."""
    if _is_triangle(call, block):
        return _attend_triangle(call, block)
    q, layout = _queries(call.q, call.scale, block), call.layout
    if not (spans := _spans(block, layout)):
        number = block.tiles * block.queries
        return q.new_zeros(number, len(q), call.v.shape[2]), q.new_full((number, len(q)), -math.inf)
    outs, sums = [], []
    for tiles in spans:
        values = call.v[_exact_rows(block, tiles, layout)].to(q.dtype).transpose(0, 1)
        out, lse = _read(_exact_logits(q[:, tiles], call.k, block, tiles, layout), values, call.dropout_p)
        sums.append(lse.view(len(q), -1))
        outs.append(out.view(*sums[-1].shape, values.shape[2]))
    return torch.cat(outs, 1).transpose(0, 1), torch.cat(sums, 1).T


def _is_triangle(call: ClusteredCall, block: Block) -> bool:
    """Return whether the queries of a block are as many as its exact keys, so that PyTorch's flash kernel can attend."""
    fits = call.layout.causal and block.end == block.exact + 1 and call.q.shape[2] == call.v.shape[2]
    return fits and call.q.device.type == "cpu" and not call.needs_gradient and not call.dropout_p


def _attend_triangle(call: ClusteredCall, block: Block) -> tuple[Tensor, Tensor]:
    """Attend from each query of a block to the exact keys up to its own."""
    keys = slice(block.exact, block.exact + block.tiles * block.queries)
    wide = torch.promote_types(call.q.dtype, torch.float32)
    q, k, v = (x.to(wide).transpose(0, 1)[None] for x in (call.q[block.rows], call.k[keys], call.v[keys]))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # unlike the public function, returns sums
    out, lse = flash(q, k, v, is_causal=True, scale=call.scale)
    return out[0].transpose(0, 1), lse[0].T * LOG2_E


def _attend_lists(
    call: ClusteredCall, keys: ClusteredKeys, selection: TileSelection, block: Block
) -> tuple[Tensor, Tensor]:
    """Attend to the listed rows of the tables: `[queries, heads, value_dim]` and `[queries, heads]`."""
    q = _queries(call.q, call.scale, block)
    first = selection.tile(block.tile, block.tiles).transpose(0, 1).flatten(0, 1)  # [lists · tiles, groups]
    lists = lists_of(first, call.layout, block.queries, block.first_chunk)
    share = len(q) // selection.lists  # number of heads per list
    of_lists = q.unflatten(0, (-1, share)).transpose(1, 2).flatten(0, 1)  # [lists · tiles, heads of each, queries, dim]
    lengths, order = lists.lengths.sort()
    parts = []
    for batch, longest in _batches(lengths.tolist(), _entries_at_once(call, q, share * block.queries)):
        which = order[batch]
        entries = Lists(lists.entries[which, :longest], lengths[batch], block.queries)
        head = which // block.tiles * share  # first head of the list
        parts.append(_attend_batch(call, keys, of_lists[which], entries, head))
    back = order.argsort()
    out, lse = (torch.cat(part)[back].unflatten(0, (-1, block.tiles)) for part in zip(*parts, strict=True))
    # [lists, tiles, heads of each, queries, …] → [queries of the block, heads, …]
    return out.permute(1, 3, 0, 2, 4).flatten(2, 3).flatten(0, 1), lse.permute(1, 3, 0, 2).flatten(2, 3).flatten(0, 1)


def _entries_at_once(call: ClusteredCall, q: Tensor, queries: int) -> int:
    """Return the number of listed rows, for this number of queries each, to read at once.

    With gradients, all lists of a block are read at once, as each reading adds a gradient of the size of a table.
    """
    return sys.maxsize if call.needs_gradient else _scores_at_once(q) // queries


def _batches(lengths: list[int], most: int) -> Iterator[tuple[slice, int]]:
    """Yield slices of lists, sorted by length, and the length of their longest.

    A batch has at most this number of entries, or one list, and an eighth of it may be padding.
    """
    begin = total = 0
    for end, longest in enumerate(lengths):
        entries = (end + 1 - begin) * longest
        if end > begin and (entries > most or entries - total - longest > most // 8):
            yield slice(begin, end), lengths[end - 1]
            begin, total = end, 0
        total += longest
    yield slice(begin, len(lengths)), lengths[-1]


def _attend_batch(
    call: ClusteredCall, keys: ClusteredKeys, q: Tensor, lists: Lists, head: Tensor
) -> tuple[Tensor, Tensor]:
    """Attend from queries `[batch, heads of each, queries, dim]` to one list of rows each.

    Args:
        head: `[batch]` first head of each list.
    """
    batch, share, queries, dim = q.shape
    rows_per_head = keys.k.shape[1] * keys.k.shape[2]
    rows = lists.rows + (head // (call.q.shape[1] // len(keys.k)) * rows_per_head)[:, None]
    k, v = (t.flatten(0, 2).index_select(0, rows.view(-1)).to(q.dtype) for t in (keys.k, keys.v))
    kinds = lists.kinds
    mask = _masks(queries, call.layout.shape, q.dtype, q.device).index_select(0, kinds.view(-1))
    logits = mask.view(batch, -1, 1, queries).expand(-1, -1, share, -1).contiguous()
    if call.pooled_bias is not None:
        bias = call.pooled_bias.to(q.dtype).expand(call.q.shape[1]) * LOG2_E
        bias = bias[head[:, None, None] + torch.arange(share, device=q.device)]  # [batch, 1, heads of each]
        is_pooled = kinds >= (queries + 1) ** 2
        logits = logits + torch.where(is_pooled[..., None], bias, 0.0)[..., None]
    logits = logits.flatten(2).baddbmm_(k.view(batch, -1, dim), q.flatten(1, 2).transpose(1, 2))
    out, lse = _read(logits, v.view(batch, logits.shape[1], v.shape[1]), call.dropout_p)
    return out.unflatten(1, (share, queries)), lse.unflatten(1, (share, queries))


@lru_cache(maxsize=16)
def _masks(queries: int, shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `[kinds, queries]`, kinds as in `Lists`: log |B| for the queries in an interval, −∞ for others."""
    with lasting():
        query = torch.arange(queries, device=device)
        bound = torch.arange(queries + 1, device=device)[:, None]
        active = (query >= bound)[:, None] & (query < bound)  # [begin, end, queries]
        counts = torch.tensor([1, shape.group, shape.node, shape.chunk], dtype=dtype, device=device)
        return torch.where(active, counts.log2().view(4, 1, 1, 1), -math.inf).flatten(0, 2)


def _read(logits: Tensor, values: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
    """Return means `[batch, queries, value_dim]` of values `[batch, keys, value_dim]`, and the log-sum-exp of the logits.

    The logits `[batch, keys, queries]` are overwritten.
    """
    weights, mass, lse = _softmax(logits)
    return torch.bmm(F.dropout(weights, dropout_p).transpose(1, 2), values) / mass[..., None], lse
