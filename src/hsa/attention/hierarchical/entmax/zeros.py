"""Statistics of the sparsity of entmax: weights that are exactly 0, and families without weight, level by level."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from hsa.attention.checks import check_inputs, check_positions, repeat_heads, scale_or_default
from hsa.attention.hierarchical.call import HierarchicalCall
from hsa.attention.hierarchical.entmax.family import alpha_of_rows, solve_families
from hsa.attention.hierarchical.entmax.torch_sweeps import EntmaxFamilies
from hsa.attention.hierarchical.operator import check_paper_mask
from hsa.attention.hierarchical.torch_sweeps import UpSweep, from_above
from hsa.attention.normalizers import Entmax, resolve_entmax
from hsa.tree.hierarchy import Hierarchy


@dataclass(frozen=True)
class Zeros:
    """Numbers of zeros of one call, summed over heads. Tuples have one entry per height of the families, from 1."""

    zeros: tuple[int, ...]
    """Number of weights that are exactly 0."""
    entries: tuple[int, ...]
    """Number of weights: for every member its visible siblings and its inside, and itself for a leaf that sees itself."""
    visited: tuple[int, ...] = ()
    """Number of families with a positive weight from above, summed over heads."""
    families: tuple[int, ...] = ()
    """Number of families, times heads."""
    passed_down: Tensor | None = field(default=None, repr=False, compare=False)
    """Share of a leaf's row that is left for the inside of each of its ancestors, `[nodes, heads]`: 1 at roots, 0 at leaves
    and where attention gives no weight to the inside of a node."""

    @property
    def visited_fraction(self) -> float:
        """Share of families with a positive weight; 1.0 in an empty forest."""
        return sum(self.visited) / sum(self.families) if sum(self.families) else 1.0


@torch.no_grad()
def zeros(
    q: Tensor,
    k: Tensor,
    hierarchy: Hierarchy,
    *,
    normalizer: Entmax,
    positions: Tensor | None = None,
    include_self: bool = True,
    causal: Literal["paper-mask"] | None = None,
    scale: float | None = None,
) -> Zeros:
    """Count the zeros among the weights that `hsa.hierarchical_attention` computes for the same arguments.

    >>> q = torch.tensor([[9.0, 0.0]] * 2 + [[0.0, 9.0]] * 2)[:, None]  # two pairs of leaves; each attends to the other only
    >>> zeros(q, q.flip(0), Hierarchy.from_nested([[2, 2]]), normalizer=Entmax(2.0), include_self=False)
    Zeros(zeros=(0, 2), entries=(4, 4), visited=(0, 1), families=(2, 1))
    """
    check_inputs({"q": q, "k": k}, hierarchy)
    k = repeat_heads(k, q.shape[1])
    call = HierarchicalCall(
        q=q,
        k=k,
        v=k[..., :0],
        hierarchy=hierarchy,
        positions=check_positions(positions, q, hierarchy),
        include_self=include_self,
        causal=check_paper_mask(causal, include_self),
        entmax=resolve_entmax(normalizer, q),
        scale=scale_or_default(scale, q),
        backend="torch",
    )
    counting = _Counting(call)
    passed = _passed_down(counting, counting.up_sweep())
    s, heads = hierarchy.structure, q.shape[1]
    height = torch.as_tensor(s.height, device=passed.device)
    heights = range(1, int(s.height.max(initial=0)) + 1)
    return Zeros(
        zeros=tuple(counting.zeros),
        entries=tuple(counting.seen),
        visited=tuple(int((passed[height == h] > 0).sum()) for h in heights),
        families=tuple(int((s.height == h).sum()) * heads for h in heights),
        passed_down=passed,
    )


class _Counting(EntmaxFamilies):
    """Up sweep that also counts weights."""

    def __init__(self, call: HierarchicalCall):
        super().__init__(call)
        self.zeros, self.seen = [0] * len(self.plan.rounds), [0] * len(self.plan.rounds)

    def attend(
        self, r: int, i: int, q: Tensor, k: Tensor, v: Tensor, inner: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, None, Tensor]:
        bucket, entries = self.plan.rounds[r].buckets[i], self.entries[r][i]
        inside = None if inner is None else inner.transpose(1, 2)
        for part, some, rows in solve_families(q, k, inside, alpha_of_rows(self.alpha(r)), entries, scale):
            visible = torch.ones_like(rows.p, dtype=torch.bool)
            if some.hidden is not None:
                visible &= ~some.hidden
            if bucket.present is not None:
                visible &= bucket.present[part, None, :, None]
            self.zeros[r] += int(((rows.p == 0) & visible).sum())
            self.seen[r] += int(visible.sum())
        return super().attend(r, i, q, k, v, inner, scale)


def _passed_down(families: EntmaxFamilies, up: UpSweep) -> Tensor:
    """Return `Zeros.passed_down` for the nodes of the user's forest, which has no roots above single leaves."""
    call, plan, forest = families.call, families.plan, families.forest
    heads = call.q.shape[1]
    passed = torch.zeros(forest.num_nodes, heads, dtype=families.dtype, device=call.q.device)
    below: dict[int, Tensor] = {}
    for r in reversed(range(len(plan.rounds))):
        buckets = plan.rounds[r].buckets
        (weight,) = from_above(plan, r, [(below, passed.new_ones(1, heads))])
        passed[plan.node_of_slot[plan.slot_bounds[r] : plan.slot_bounds[r + 1]]] = weight
        shares = zip(buckets, up.down[r], strict=True)
        parts = [bucket.of_parents(weight)[:, None] * down for bucket, down in shares if down is not None]
        below[r] = plan.rounds[r].join(parts)
    if forest is call.hierarchy:
        return passed
    result = passed.new_zeros(call.hierarchy.num_nodes, heads)
    kept = forest.node_ids < call.hierarchy.num_nodes  # leaves out the roots added above trees of a single leaf
    result[forest.node_ids[kept]] = passed[kept]
    return result
