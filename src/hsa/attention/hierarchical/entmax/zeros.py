"""How much entmax leaves out: weights inside families that are exactly 0, level by level."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hsa.attention.arguments import check_inputs, check_positions, repeat_heads, scale_or_default
from hsa.attention.hierarchical.entmax.pruned import Families, compare, solve
from hsa.attention.normalizers import Entmax, resolve_entmax
from hsa.attention.rounds import Bucket, rooted, rounds
from hsa.tree.hierarchy import Hierarchy


@dataclass(frozen=True)
class Zeros:
    """Weights of families' rows, in entries times heads, per height of the family from 1."""

    zeros: tuple[int, ...]
    """Exactly 0."""
    of: tuple[int, ...]
    """There are: for every member its visible siblings, what is inside it, and a leaf itself where it sees itself."""


@torch.no_grad()
def zeros(
    q: Tensor,
    k: Tensor,
    hierarchy: Hierarchy,
    *,
    normalizer: Entmax,
    positions: Tensor | None = None,
    include_self: bool = False,
    causal: bool = False,
    scale: float | None = None,
) -> Zeros:
    """Counted in the rows that `hsa.hierarchical_attention` makes of the same arguments, entered or not.

    >>> q = torch.tensor([[9.0, 0.0]] * 2 + [[0.0, 9.0]] * 2)[:, None]  # two pairs of leaves
    >>> zeros(q, q.flip(0), Hierarchy.from_nested([[2, 2]]), normalizer=Entmax(2.0))  # each pair looks at the other only
    Zeros(zeros=(0, 2), of=(4, 4))
    """
    check_inputs({"q": q, "k": k}, hierarchy)
    entmax = resolve_entmax(normalizer, q)
    forest, positions = rooted(hierarchy, check_positions(positions, q, hierarchy))
    plan = rounds(forest)
    k, scale = repeat_heads(k, q.shape[1]), scale_or_default(scale, q)
    if not plan.rounds:
        return Zeros((), ())
    largest = int(forest.structure.num_children.max())
    sweep = compare(q, k, k[..., :0], forest, plan, positions, include_self, causal, entmax, scale, kept=largest)
    everything = torch.ones((), dtype=torch.bool, device=q.device)
    solve(sweep, [everything.expand(families.num_parents, q.shape[1]) for families in plan.rounds])
    found = [
        [_count(*bucket) for bucket in zip(rows, downs, families.buckets, strict=True)]
        for rows, downs, families in zip(sweep.families, sweep.down, plan.rounds, strict=True)
    ]
    return Zeros(*(tuple(sum(counts[i] for counts in level) for level in found) for i in range(2)))


def _count(rows: Families, down: Tensor, bucket: Bucket) -> tuple[int, int]:
    """Zeros and entries of a bucket."""
    p, entries = torch.cat([weights.p for weights in rows.weights]), rows.entries
    if entries.inside is not None:  # there the diagonal is free
        p.diagonal(dim1=-2, dim2=-1).add_(down.transpose(1, 2))
    visible = torch.ones_like(p, dtype=torch.bool)
    if entries.hidden is not None:
        visible &= ~entries.hidden
    if bucket.present is not None:
        visible &= bucket.present[:, None, :, None]
    return int(((p == 0) & visible).sum()), int(visible.sum())
