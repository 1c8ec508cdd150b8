"""Hierarchical three-way attention with tied rows: the sweeps of hierarchical attention, with pairs of siblings in families.

Upwards, the members of a family attend to the pairs of their siblings, which gives each its average `y` and log-mass
`outer`, and each parent its pooled rows and its own log-mass `inner`. From there it is the same operator: rows are shared
out between siblings and own children, and handed down.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hsa.attention.hierarchical.torch_sweeps import UpSweep, down_sweep, shares
from hsa.attention.rounds import Bucket, Rounds, rooted, rounds
from hsa.research.trilinear.blocks import Blocks
from hsa.research.trilinear.streaming import attend_pairs
from hsa.tree.hierarchy import Hierarchy


def tied_rows(
    q: Tensor,
    k1: Tensor,
    k2: Tensor,
    v1: Tensor,
    v2: Tensor,
    hierarchy: Hierarchy,
    *,
    tensor: Tensor | None,
    scale: float,
) -> Tensor:
    """See `hsa.hierarchical_trilinear_attention`; q, k1 and k2 are in core form unless there is a full `tensor`."""
    forest, _ = rooted(hierarchy)
    plan = rounds(forest)
    dtype = torch.promote_types(q.dtype, torch.float32)
    blocks = forest.cached(("pairs of siblings", dtype), lambda: _blocks_of_rounds(plan, dtype))
    return down_sweep(up_sweep((q, k1, k2, v1, v2), plan, blocks, tensor, scale), v1, plan)


def up_sweep(
    leaves: tuple[Tensor, ...], plan: Rounds, blocks: list[list[Blocks]], tensor: Tensor | None, scale: float
) -> UpSweep:
    """Leaves → roots. `leaves`: q, k1, k2, v1, v2."""
    up = UpSweep()
    pooled: list[list[Tensor]] = [[] for _ in leaves]
    q = leaves[0]
    no_inner = q.new_zeros((), dtype=torch.promote_types(q.dtype, torch.float32)).expand(q.shape[:2])
    for families, families_blocks in zip(plan.rounds, blocks, strict=True):
        sources = [families.source(x, above) for x, above in zip(leaves, pooled, strict=True)]
        q, k1, k2, v1, v2 = sources
        out, lse = attend_pairs(q, k1, k2, v1, v2, tensor, families_blocks, scale)
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
    """A block per family: its members see each other's pairs."""
    rows = bucket.rows
    if rows is None:
        rows = torch.arange(bucket.families * bucket.size, device=bucket.share.device)
    rows = rows.view(bucket.families, bucket.size)
    bias, _ = bucket.bias(include_self=True, causal=False, dtype=dtype)
    bias = None if bias is None or not bool(bias.any()) else bias.squeeze(1)
    return Blocks(rows, rows, rows, bias, bias)
