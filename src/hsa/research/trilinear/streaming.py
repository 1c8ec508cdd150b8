"""Backend "streaming": pairs of leaves in chunks of a fixed number of logits, with a running softmax.

A chunk consists of some blocks, some of their queries i and some leaves j, with all leaves k: `pair(i, j) @ k2ᵀ` are the
logits, and `weights @ v2`, multiplied by v1 and summed over j, is the output. Only a log-sum-exp per query is stored; the
weights are recomputed for the gradient. Beyond inputs and gradients, memory is constant (or one row of k, if longer).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hsa.attention.derivatives import first_order
from hsa.research.trilinear.blocks import Blocks, plan
from hsa.research.trilinear.call import Rows, TrilinearCall
from hsa.research.trilinear.pair_queries import contract, contract_gradients, join, join_gradients

CHUNK = {"cpu": 2**20, "cuda": 2**26}
"""Maximum number of logits per chunk: few enough for the cache of a CPU, enough to keep a GPU busy."""


def run(call: TrilinearCall) -> Tensor:
    """Run a call in core form, or with a full tensor."""
    planned = plan(call.forests, call.left, call.right)
    out, _ = attend_pairs(call.rows, call.full, planned.blocks, call.scale)
    return out.index_select(0, planned.slot)


def attend_pairs(rows: Rows, tensor: Tensor | None, blocks: Sequence[Blocks], scale: float) -> tuple[Tensor, Tensor]:
    """Compute softmax over pairs (j, k) of scale · pair(i, j)·k2_k + biases, applied to v1_j∘v2_k.

    Args:
        rows: Inputs, with any number of rows each.
        tensor: `[heads, dim, dim, dim]` Full tensor T; None for the core.
        blocks: Blocks of queries, with the leaves they see.
        scale: Factor of the logits.

    Returns:
        Output `[queries of all blocks, heads, value_dim]` and log-sum-exps `[queries of all blocks, heads]`, block by block.
        A query that sees no pair gets 0 and −∞, and no gradient.
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
                    contracted = contract(part.load_queries(q, queries) * scale, tensor)
                    result, mass = _attend(part, queries, contracted)
                    group_out[part.blocks, queries] = result.transpose(1, 2)
                    group_lse[part.blocks, queries] = mass.transpose(1, 2)
        ctx.blocks, ctx.scale = blocks, scale
        ctx.save_for_backward(out, lse, tensor, *rows)
        return out.to(v1.dtype), lse

    @staticmethod
    @first_order
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> Any:
        out, lse, tensor, *inputs = ctx.saved_tensors
        rows, accurate = Rows(*inputs), lse.dtype
        grads = [torch.zeros_like(x, dtype=accurate) for x in rows]
        d_tensor = None if tensor is None else torch.zeros_like(tensor, dtype=accurate)
        # The gradient of logits is weights · (d_weights − row), with recomputed weights.
        row = (d_out.to(accurate) * out.to(accurate)).sum(-1) - d_lse
        lse = lse.masked_fill(lse == -math.inf, math.inf)  # weights of 0 in rows that see nothing
        for group, *of_queries in zip(ctx.blocks, *_by_group(ctx.blocks, d_out, lse, row), strict=True):
            for part in _parts(group, rows, tensor):
                d_keys = [torch.zeros_like(x, dtype=accurate) for x in (part.k1, part.k2, part.v1, part.v2)]
                for queries in part.query_slices:
                    scaled = part.load_queries(rows.q, queries) * ctx.scale
                    contracted = contract(scaled, tensor)
                    sums = [x[part.blocks, queries].transpose(1, 2).to(accurate) for x in of_queries]
                    d_contracted = _gradients(part, queries, contracted, sums, d_keys)
                    d_scaled, d_part = contract_gradients(d_contracted, scaled, tensor)
                    if d_tensor is not None and d_part is not None:
                        d_tensor += d_part
                    _add(grads[0], group.queries[part.blocks, queries], d_scaled * ctx.scale)
                for grad, indices, d_key in zip(
                    grads[1:], (group.first, group.second, group.first, group.second), d_keys, strict=True
                ):
                    _add(grad, indices[part.blocks], d_key)
        return None, None, d_tensor, *(grad.to(x.dtype) for grad, x in zip(grads, rows, strict=True))


@dataclass(frozen=True, eq=False)
class _Part:
    """Blocks of a group that are computed together, and the rows they see, `[blocks, heads, leaves, dim]`."""

    group: Blocks
    blocks: slice
    k1: Tensor
    k2: Tensor
    v1: Tensor
    v2: Tensor
    query_slices: list[slice]
    leaf_slices: list[slice]

    def load_queries(self, q: Tensor, queries: slice) -> Tensor:
        return _take(q, self.group.queries[self.blocks, queries]).to(_accurate(q))

    def bias(self, queries: slice, leaves: slice) -> Tensor | None:
        """Return the sum of both biases, `[blocks or 1, 1, queries, leaves j, leaves k]`."""
        first, second = (
            None if x is None else (x if len(x) == 1 else x[self.blocks])[:, None, queries]
            for x in (self.group.first_bias, self.group.second_bias)
        )
        of_j = None if first is None else first[..., leaves, None]
        of_k = None if second is None else second[..., None, :]
        return of_k if of_j is None else of_j if of_k is None else of_j + of_k


def _attend(part: _Part, queries: slice, contracted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output `[blocks, heads, queries, value_dim]` and its log-sum-exp."""
    top = contracted.new_full(contracted.shape[:3], -math.inf)
    mass = contracted.new_zeros(contracted.shape[:3])
    total = contracted.new_zeros(*contracted.shape[:3], part.v1.shape[-1])
    for leaves in part.leaf_slices:
        logits, _ = _logits(part, queries, leaves, contracted)
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


def _gradients(part: _Part, queries: slice, contracted: Tensor, sums: list[Tensor], d_keys: list[Tensor]) -> Tensor:
    """Return the gradient of `contracted`, and add those of k1, k2, v1 and v2 to `d_keys`; `sums` are d_out, lse and row."""
    d_out, lse, row = sums
    d_k1, d_k2, d_v1, d_v2 = d_keys
    d_contracted = torch.zeros_like(contracted)
    for leaves in part.leaf_slices:
        logits, pairs = _logits(part, queries, leaves, contracted)
        weights = logits.sub_(lse[..., None, None]).exp_()
        averages = _product(weights, part.v2)
        d_v1[:, :, leaves] += (averages * d_out[:, :, :, None]).sum(2)
        d_averages = d_out[:, :, :, None] * part.v1[:, :, None, leaves]
        d_v2 += _product(weights.flatten(2, 3).mT, d_averages.flatten(2, 3).to(part.v2.dtype))
        d_logits = _product(d_averages, part.v2.mT).sub_(row[..., None, None]).mul_(weights)
        d_k2 += _product(d_logits.flatten(2, 3).mT, pairs.flatten(2, 3).to(part.k2.dtype))
        d_pairs = _product(d_logits, part.k2)
        d_part, d_leaves = join_gradients(d_pairs, contracted, part.k1[:, :, leaves].to(contracted.dtype))
        d_contracted += d_part
        d_k1[:, :, leaves] += d_leaves
    return d_contracted


def _logits(part: _Part, queries: slice, leaves: slice, contracted: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits `[blocks, heads, queries, leaves j, leaves k]` and pairs `[blocks, heads, queries, leaves j, dim]`."""
    pairs = join(contracted, part.k1[:, :, leaves].to(contracted.dtype))
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
    """Gather rows of `[rows, heads, dim]` as `[blocks, heads, length, dim]`."""
    return x.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2).contiguous()


def _add(target: Tensor, rows: Tensor, x: Tensor) -> None:
    """Add to the rows that `_take` gathers: its transpose."""
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
    """Gather rows in the dtype of matrix products: bfloat16 on GPUs, for tensor cores.

    float16 is avoided, because weights of many pairs underflow.
    """
    in_half = x.is_cuda and x.dtype == torch.bfloat16
    return _take(x, rows).to(x.dtype if in_half else _accurate(x))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a `[blocks, heads, …, n]` by b `[blocks, heads, n, m]` in the dtype of b."""
    flat = a.flatten(2, -2).flatten(0, 1).to(b.dtype), b.flatten(0, 1)
    in_half = b.dtype == torch.bfloat16  # only the products; sums are in float32
    result = torch.bmm(*flat, out_dtype=torch.float32) if in_half else torch.bmm(*flat)
    return result.view(*a.shape[:-1], b.shape[-1])
