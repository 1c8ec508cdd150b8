"""Hierarchical three-way attention: the sweeps of hierarchical attention, with pairs of siblings in families.

In the upward sweep, members of a family attend to the pairs of their siblings, which yields the average `y` and log-mass
`outer` of each member, and the pooled rows and log-mass `inner` of the parent. The rest is hierarchical attention: the
weight of each row is divided between siblings and children, and passed down.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hsa.attention.hierarchical.torch_sweeps import UpSweep, down_sweep, shares
from hsa.attention.rounds import Bucket, Rounds, rooted, rounds
from hsa.research.trilinear.blocks import Blocks
from hsa.research.trilinear.call import Rows, TrilinearCall
from hsa.research.trilinear.streaming import attend_pairs


def run(call: TrilinearCall) -> Tensor:
    """Run a call in core form, or with a full tensor."""
    forest, _ = rooted(call.forests.queries)
    plan = rounds(forest)
    dtype = torch.promote_types(call.rows.q.dtype, torch.float32)
    blocks = forest.cached(("pairs of siblings", dtype), lambda: _blocks_of_rounds(plan, dtype))
    return down_sweep(up_sweep(call, plan, blocks), call.rows.v1, plan)


def up_sweep(call: TrilinearCall, plan: Rounds, blocks: list[list[Blocks]]) -> UpSweep:
    """Compute attention inside families and pool, from the leaves to the roots."""
    up = UpSweep()
    pooled: list[list[Tensor]] = [[] for _ in call.rows]
    q = call.rows.q
    no_inner = q.new_zeros((), dtype=torch.promote_types(q.dtype, torch.float32)).expand(q.shape[:2])
    for families, families_blocks in zip(plan.rounds, blocks, strict=True):
        sources = Rows(*(families.source(x, above) for x, above in zip(call.rows, pooled, strict=True)))
        out, lse = attend_pairs(sources, call.full, families_blocks, call.scale)
        entries = [bucket.families * bucket.size for bucket in families.buckets]
        inners = families.split(families.source(no_inner, up.inner))
        averages, masses, sides, downs = [], [], [], []
        for bucket, y, outer, inner in zip(
            families.buckets, out.split(entries), lse.split(entries), inners, strict=True
        ):
            shape = bucket.families, bucket.size
            _, alone = bucket.mask(include_self=True, causal=False)
            mass, side, down = shares(inner, outer.unflatten(0, shape), bucket.is_leaf, alone)
            averages.append(y.unflatten(0, shape))
            masses.append(mass)
            sides.append(side)
            downs.append(down)
        for source, above in zip(sources, pooled, strict=True):
            above.append(families.pool(families.split(source)))
        up.average.append(averages)
        up.side.append(sides)
        up.down.append(downs)
        up.inner.append(families.pool(masses))
    return up


def _blocks_of_rounds(plan: Rounds, dtype: torch.dtype) -> list[list[Blocks]]:
    return [[_blocks(bucket, dtype) for bucket in families.buckets] for families in plan.rounds]


def _blocks(bucket: Bucket, dtype: torch.dtype) -> Blocks:
    """Build a block per family, in which every member sees all pairs of members."""
    rows = bucket.rows
    if rows is None:
        rows = torch.arange(bucket.families * bucket.size, device=bucket.share.device)
    rows = rows.view(bucket.families, bucket.size)
    bias, _ = bucket.bias(include_self=True, causal=False, dtype=dtype)
    bias = None if bias is None or not bool(bias.any()) else bias.squeeze(1)
    return Blocks(rows, rows, rows, bias, bias)
