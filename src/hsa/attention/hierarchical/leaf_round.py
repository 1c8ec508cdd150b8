"""The first round, leaf families, which take most of the time, with hand-written gradients.

The results equal those of `torch_sweeps`. Two functions read every leaf once: `attend_leaves` computes attention within the
families and pools them, forward and backward in chunks that fit the CPU's cache; `finish_leaves` adds the output from above.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hsa.attention.derivatives import first_order
from hsa.attention.rounds import Bucket, Round
from hsa.attention.softmax import CHUNK, attend, gradients, part_of

GATHERED = 2**20
"""Numbers of each of q, k and v that are gathered at once."""


def attend_leaves(
    q: Tensor, k: Tensor, v: Tensor, families: Round, include_self: bool, causal: bool, scale: float
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Return the siblings' average per bucket, the log-mass inside each parent, and the pooled q, k and v of the parents."""
    inner, pooled_q, pooled_k, pooled_v, *averages = _AttendLeaves.apply(q, k, v, families, include_self, causal, scale)
    return averages, inner, [pooled_q, pooled_k, pooled_v]


def finish_leaves(families: Round, out: Tensor, weight: Tensor, averages: list[Tensor], overwrite: bool) -> Tensor:
    """Return out(P) + weight(P) · y of every leaf, `[members, heads, value_dim]`.

    `overwrite` allows it to write into y if no gradient is needed.
    """
    return _FinishLeaves.apply(families, out, weight, overwrite, *averages)


class _AttendLeaves(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, families: Round, include_self: bool, causal: bool, scale: float
    ) -> tuple[Tensor, ...]:
        dtype = torch.promote_types(q.dtype, torch.float32)
        parents = families.num_parents
        pooled = [x.new_empty(parents, *x.shape[1:], dtype=dtype) for x in (q, k, v)]
        inner = q.new_empty(parents, q.shape[1], dtype=dtype)
        averages, masses = [], []
        for bucket in families.buckets:
            bias, alone = bucket.bias(include_self, causal, dtype)
            results = []
            # Rows that are in order are read without a copy; other rows are gathered in chunks.
            whole = [slice(None)]
            for part in whole if bucket.rows is None else _chunks(bucket, q[0].numel(), GATHERED):
                parts = [_take(x, bucket, part) for x in (q, k, v)]
                qb, kb, vb = (x.transpose(1, 2) for x in parts)
                results.append(attend(qb, kb, vb, part_of(bias, part), scale))
                for target, x in zip(pooled, parts, strict=True):
                    _put_parents(target, bucket, bucket.mean(x, part), part)
            average, lse = (x[0] if len(x) == 1 else torch.cat(x) for x in zip(*results, strict=True))
            average = average.transpose(1, 2)
            mass = lse.transpose(1, 2)
            if alone is not None:
                mass = mass.masked_fill(alone, 0)
            _put_parents(inner, bucket, bucket.mean(mass))
            averages.append(average)
            masses.append(lse)
        ctx.families, ctx.options, ctx.scale = families, (include_self, causal), scale
        ctx.save_for_backward(q, k, v, *masses)
        return inner, *pooled, *averages

    @staticmethod
    @first_order
    def backward(ctx: Any, d_inner: Tensor, d_pq: Tensor, d_pk: Tensor, d_pv: Tensor, *d_averages: Tensor) -> Any:
        q, k, v, *masses = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        for bucket, lse, d_average in zip(ctx.families.buckets, masses, d_averages, strict=True):
            bias, alone = bucket.bias(*ctx.options, lse.dtype)
            idle = _idle(bucket, alone)
            share = bucket.leaf_share(lse.dtype)[:, :, None]  # [families or 1, 1, 1]: equal for all leaves of a family
            above = [bucket.of_parents(x) * share for x in (d_inner[..., None], d_pq, d_pk, d_pv)]
            for part in _chunks(bucket, q[0].numel()):
                d_mass, *d_means = (x[part].unsqueeze(2) for x in above)  # [families, heads, 1, dim]
                d_lse = d_mass.squeeze(-1)
                if idle is not None:
                    d_lse = d_lse.masked_fill(part_of(idle, part), 0)
                qb, kb, vb = (_take(x, bucket, part).transpose(1, 2) for x in (q, k, v))
                results = gradients(
                    qb,
                    kb,
                    vb,
                    part_of(bias, part),
                    lse[part],
                    d_average[part].transpose(1, 2),
                    d_lse,
                    ctx.scale,
                    plus=tuple(d_means),
                )
                for grad, result in zip(grads, results, strict=False):
                    _put(grad, bucket, part, result.transpose(1, 2))
        return *grads, None, None, None, None


class _FinishLeaves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, families: Round, out: Tensor, weight: Tensor, overwrite: bool, *averages: Tensor) -> Tensor:
        ctx.families = families
        ctx.save_for_backward(weight, *averages)
        if families.buckets[0].rows is None:
            target = averages[0] if overwrite and not any(ctx.needs_input_grad) else torch.empty_like(averages[0])
            return torch.addcmul(out[:, None], averages[0], weight[:, None, :, None], out=target).flatten(0, 1)
        result = averages[0].new_empty(families.num_members, *out.shape[1:])
        for bucket, average in zip(families.buckets, averages, strict=True):
            above, share = bucket.of_parents(out)[:, None], bucket.of_parents(weight)[:, None, :, None]
            _put(result, bucket, slice(None), torch.addcmul(above, average, share))
        return result

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, *averages = ctx.saved_tensors
        d_out = weight.new_empty(*weight.shape, grad.shape[-1])
        d_weight = torch.empty_like(weight)
        d_averages = []
        for bucket, average in zip(ctx.families.buckets, averages, strict=True):
            share = bucket.of_parents(weight)[:, None, :, None]
            d_average = torch.empty_like(average)
            for part in _chunks(bucket, average[0, 0].numel()):
                below = _take(grad, bucket, part)
                if bucket.present is not None:
                    below = below * bucket.present[part, :, None, None]
                torch.mul(below, share[part], out=d_average[part])
                _put_parents(d_out, bucket, below.sum(1), part)
                _put_parents(d_weight, bucket, (below * average[part]).sum((1, 3)), part)
            d_averages.append(d_average)
        return None, d_out, d_weight, None, *d_averages


def _idle(bucket: Bucket, alone: Tensor | None) -> Tensor | None:
    """Return the members without a mass, alone or padding, `[families or 1, 1, size]`."""
    idle = None if alone is None else alone.transpose(1, 2)
    if bucket.present is None:
        return idle
    padding = ~bucket.present[:, None]
    return padding if idle is None else idle | padding


def _chunks(bucket: Bucket, numbers_per_row: int, numbers: int = CHUNK) -> Iterator[slice]:
    """Return slices of families that fit the CPU's cache; one slice on a GPU."""
    on_cpu = bucket.share.device.type == "cpu"
    step = max(1, numbers // (numbers_per_row * bucket.size)) if on_cpu else bucket.families
    return (slice(begin, min(begin + step, bucket.families)) for begin in range(0, bucket.families, step))


def _take(x: Tensor, bucket: Bucket, part: slice = slice(None)) -> Tensor:
    """Return the rows of the members of some families, `[families, size, …]`."""
    if bucket.rows is None:
        return x.unflatten(0, (bucket.families, bucket.size))[part]
    rows = bucket.rows.view(bucket.families, bucket.size)[part]
    return x.index_select(0, rows.flatten()).unflatten(0, rows.shape)


def _put(target: Tensor, bucket: Bucket, part: slice, x: Tensor) -> None:
    """Copy `x`, `[families, size, …]`, to the members' rows, without padding."""
    if bucket.rows is None:
        target.unflatten(0, (bucket.families, bucket.size))[part] = x
        return
    rows, flat = bucket.rows.view(bucket.families, bucket.size)[part].flatten(), x.flatten(0, 1)
    if bucket.real is not None:
        assert bucket.present is not None
        real = bucket.real if part == slice(None) else bucket.present[part].flatten().nonzero().squeeze(-1)
        rows, flat = rows.index_select(0, real), flat.index_select(0, real)
    target.index_copy_(0, rows, flat.to(target.dtype))


def _put_parents(target: Tensor, bucket: Bucket, x: Tensor, part: slice = slice(None)) -> None:
    if bucket.parents is None:
        target[part] = x
    else:
        target.index_copy_(0, bucket.parents[part], x)
