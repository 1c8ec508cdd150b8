"""Backend "streaming": pairs of leaves in chunks, with a running softmax; no more logits at once than a fixed number.

A chunk is some blocks, some of their queries i and some leaves j, with all leaves k: `pair(i, j) @ k2ᵀ` gives the logits,
and `weights @ v2`, multiplied by v1 and summed over j, the output. One log-sum-exp per query is kept, and the weights are
computed again for the gradient. Beyond the inputs and their gradients the memory is fixed (or one row of k, if longer).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hsa.research.trilinear.blocks import Blocks, plan
from hsa.research.trilinear.call import Rows, TrilinearCall
from hsa.research.trilinear.pair_queries import join, join_gradients, turn, turn_gradients

CHUNK = {"cpu": 2**20, "cuda": 2**26}
"""Most logits at once: on a CPU they stay in its cache, on a GPU they keep it busy."""


def run(call: TrilinearCall) -> Tensor:
    """Run a call in core form, or with a full tensor."""
    planned = plan(call.forests, call.left, call.right)
    out, _ = attend_pairs(call.rows, call.full, planned.blocks, call.scale)
    return out.index_select(0, planned.slot)


def attend_pairs(rows: Rows, tensor: Tensor | None, blocks: Sequence[Blocks], scale: float) -> tuple[Tensor, Tensor]:
    """Return softmax over pairs (j, k) of scale · pair(i, j)·k2_k + biases, applied to v1_j∘v2_k, and its log-sum-exp.

    Args:
        rows: the inputs; any number of rows each.
        tensor: `[heads, dim, dim, dim]`; None for the core.
        blocks: which rows meet.

    Returns:
        `[queries of all blocks, heads, value_dim]` and `[queries of all blocks, heads]`, block after block. A query that
        sees no pair gets 0 and −∞, and no gradient.
    """
    return _AttendPairs.apply(tuple(blocks), scale, tensor, *rows)


class _AttendPairs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, blocks: tuple[Blocks, ...], scale: float, tensor: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows = Rows(*inputs)
        q, v1 = rows.q, rows.v1
        tensor = None if tensor is None else tensor.to(_accurate(q))
        heads, entries = q.shape[1], sum(group.queries.numel() for group in blocks)
        out = v1.new_empty(entries, heads, v1.shape[-1], dtype=_accurate(v1))
        lse = q.new_empty(entries, heads, dtype=_accurate(q))
        for group, group_out, group_lse in zip(blocks, *_by_group(blocks, out, lse), strict=True):
            for part in _parts(group, rows, tensor):
                for queries in part.query_slices:
                    turned = turn(part.asked(q, queries) * scale, tensor)
                    result, mass = _attend(part, queries, turned)
                    group_out[part.blocks, queries] = result.transpose(1, 2)
                    group_lse[part.blocks, queries] = mass.transpose(1, 2)
        ctx.blocks, ctx.scale = blocks, scale
        ctx.save_for_backward(out, lse, tensor, *rows)
        return out.to(v1.dtype), lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> Any:
        out, lse, tensor, *inputs = ctx.saved_tensors
        rows, accurate = Rows(*inputs), lse.dtype
        grads = [torch.zeros_like(x, dtype=accurate) for x in rows]
        d_tensor = None if tensor is None else torch.zeros_like(tensor, dtype=accurate)
        # weights · (d_weights − row), of the weights that are computed again
        row = (d_out.to(accurate) * out.to(accurate)).sum(-1) - d_lse
        lse = lse.masked_fill(lse == -math.inf, math.inf)  # no weight in rows that see nothing
        for group, *of_queries in zip(ctx.blocks, *_by_group(ctx.blocks, d_out, lse, row), strict=True):
            for part in _parts(group, rows, tensor):
                d_keys = [torch.zeros_like(x, dtype=accurate) for x in (part.k1, part.k2, part.v1, part.v2)]
                for queries in part.query_slices:
                    asked = part.asked(rows.q, queries) * ctx.scale
                    turned = turn(asked, tensor)
                    sums = [x[part.blocks, queries].transpose(1, 2).to(accurate) for x in of_queries]
                    d_turned = _gradients(part, queries, turned, sums, d_keys)
                    d_asked, d_part = turn_gradients(d_turned, asked, tensor)
                    if d_tensor is not None and d_part is not None:
                        d_tensor += d_part
                    _add(grads[0], group.queries[part.blocks, queries], d_asked * ctx.scale)
                for grad, indices, d_key in zip(
                    grads[1:], (group.first, group.second, group.first, group.second), d_keys, strict=True
                ):
                    _add(grad, indices[part.blocks], d_key)
        return None, None, d_tensor, *(grad.to(x.dtype) for grad, x in zip(grads, rows, strict=True))


@dataclass(frozen=True, eq=False)
class _Part:
    """Blocks of a group computed together, and the rows they see: `[blocks, heads, leaves, dim]`, ready for products."""

    group: Blocks
    blocks: slice
    k1: Tensor
    k2: Tensor
    v1: Tensor
    v2: Tensor
    query_slices: list[slice]
    leaf_slices: list[slice]

    def asked(self, q: Tensor, queries: slice) -> Tensor:
        return _take(q, self.group.queries[self.blocks, queries]).to(_accurate(q))

    def bias(self, queries: slice, leaves: slice) -> Tensor | None:
        """`[blocks or 1, 1, queries, leaves j, leaves k]`"""
        first, second = (
            None if x is None else (x if len(x) == 1 else x[self.blocks])[:, None, queries]
            for x in (self.group.first_bias, self.group.second_bias)
        )
        of_j = None if first is None else first[..., leaves, None]
        of_k = None if second is None else second[..., None, :]
        return of_k if of_j is None else of_j if of_k is None else of_j + of_k


def _attend(part: _Part, queries: slice, turned: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output `[blocks, heads, queries, value_dim]` and its log-sum-exp."""
    top = turned.new_full(turned.shape[:3], -math.inf)
    mass = turned.new_zeros(turned.shape[:3])
    total = turned.new_zeros(*turned.shape[:3], part.v1.shape[-1])
    for leaves in part.leaf_slices:
        logits, _ = _logits(part, queries, leaves, turned)
        higher = torch.maximum(top, logits.amax((-2, -1)))
        base = higher.masked_fill(higher == -math.inf, 0)
        weights = logits.sub_(base[..., None, None]).exp_()
        fade = (top - base).exp_()
        mass.mul_(fade).add_(weights.sum((-2, -1)))
        averages = _product(weights, part.v2)
        total.mul_(fade[..., None]).add_((averages * part.v1[:, :, None, leaves]).sum(3))
        top = higher
    out = total.div_(mass.masked_fill(mass == 0, 1)[..., None])
    return out, mass.log_().add_(top.masked_fill_(top == -math.inf, 0))


def _gradients(part: _Part, queries: slice, turned: Tensor, sums: list[Tensor], d_keys: list[Tensor]) -> Tensor:
    """Return that of `turned`; add those of k1, k2, v1 and v2 to `d_keys`. `sums`: d_out, lse and row of the queries."""
    d_out, lse, row = sums
    d_k1, d_k2, d_v1, d_v2 = d_keys
    d_turned = torch.zeros_like(turned)
    for leaves in part.leaf_slices:
        logits, pairs = _logits(part, queries, leaves, turned)
        weights = logits.sub_(lse[..., None, None]).exp_()
        averages = _product(weights, part.v2)
        d_v1[:, :, leaves] += (averages * d_out[:, :, :, None]).sum(2)
        d_averages = d_out[:, :, :, None] * part.v1[:, :, None, leaves]
        d_v2 += _product(weights.flatten(2, 3).mT, d_averages.flatten(2, 3).to(part.v2.dtype))
        d_logits = _product(d_averages, part.v2.mT).sub_(row[..., None, None]).mul_(weights)
        d_k2 += _product(d_logits.flatten(2, 3).mT, pairs.flatten(2, 3).to(part.k2.dtype))
        d_pairs = _product(d_logits, part.k2)
        d_part, d_leaves = join_gradients(d_pairs, turned, part.k1[:, :, leaves].to(turned.dtype))
        d_turned += d_part
        d_k1[:, :, leaves] += d_leaves
    return d_turned


def _logits(part: _Part, queries: slice, leaves: slice, turned: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits `[blocks, heads, queries, leaves j, leaves k]` and pairs `[blocks, heads, queries, leaves j, dim]`."""
    pairs = join(turned, part.k1[:, :, leaves].to(turned.dtype))
    logits = _product(pairs, part.k2.mT)
    bias = part.bias(queries, leaves)
    return logits if bias is None else logits.add_(bias), pairs


def _parts(group: Blocks, rows: Rows, tensor: Tensor | None) -> Iterator[_Part]:
    """Cut the blocks of a group into parts of at most `CHUNK` logits."""
    _, k1, k2, v1, v2 = rows
    numbers, heads, dim = CHUNK.get(k1.device.type, CHUNK["cuda"]), k1.shape[1], k1.shape[2]
    (blocks, size), reach = group.queries.shape, group.first.shape[1]
    pairs = numbers // (heads * (group.second.shape[1] + dim + v1.shape[-1]))
    leaf_step = min(max(pairs, 1), reach)
    query_step = min(max(pairs // leaf_step, 1), size)
    if tensor is not None:
        query_step = min(max(numbers // (heads * dim**2), 1), query_step)
    block_step = max(pairs // (leaf_step * query_step), 1)
    for part in _slices(blocks, block_step):
        first, second = group.first[part], group.second[part]
        yield _Part(
            group,
            part,
            k1=_factors(k1, first),
            k2=_factors(k2, second),
            v1=_factors(v1, first),
            v2=_factors(v2, second),
            query_slices=list(_slices(size, query_step)),
            leaf_slices=list(_slices(reach, leaf_step)),
        )


def _slices(total: int, step: int) -> Iterator[slice]:
    return (slice(begin, min(begin + step, total)) for begin in range(0, total, step))


def _take(x: Tensor, rows: Tensor) -> Tensor:
    """`[rows, heads, dim]` → `[blocks, heads, length, dim]`"""
    return x.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2).contiguous()


def _add(target: Tensor, rows: Tensor, x: Tensor) -> None:
    """Add rows to where `_take` took them from."""
    target.index_add_(0, rows.flatten(), x.transpose(1, 2).flatten(0, 1))


def _by_group(blocks: tuple[Blocks, ...], *rows: Tensor) -> list[list[Tensor]]:
    """Split rows of all queries into views `[blocks, size, …]`, one per group."""
    counts = [group.queries.numel() for group in blocks]
    return [
        [x.unflatten(0, group.queries.shape) for group, x in zip(blocks, row.split(counts), strict=True)]
        for row in rows
    ]


def _accurate(x: Tensor) -> torch.dtype:
    """Return the dtype of sums and exponentials."""
    return torch.promote_types(x.dtype, torch.float32)


def _factors(x: Tensor, rows: Tensor) -> Tensor:
    """Take rows, in the dtype of the factors of products: half precision where there are tensor cores.

    Not float16: the weights of many pairs are too small for it.
    """
    in_half = x.is_cuda and x.dtype == torch.bfloat16
    return _take(x, rows).to(x.dtype if in_half else _accurate(x))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a `[blocks, heads, …, n]` by b `[blocks, heads, n, m]`, whose dtype is that of the factors."""
    flat = a.flatten(2, -2).flatten(0, 1).to(b.dtype), b.flatten(0, 1)
    in_half = b.dtype == torch.bfloat16  # products, but not their sums
    result = torch.bmm(*flat, out_dtype=torch.float32) if in_half else torch.bmm(*flat)
    return result.view(*a.shape[:-1], b.shape[-1])
