"""Backend "torch" with entmax: the sweeps of `levelwise`, with the inside of every member as one more entry of its row.

Values are kept as what they gain on logits 0, V − V₀: pooled over the members that is the logit of their parent's inside,
whose weight is `keys_inside`. Without a gradient, on a CPU, `pruned` leaves out what gets no weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hsa.attention import normalizers
from hsa.attention.arguments import check_inputs, check_positions, repeat_heads, scale_or_default
from hsa.attention.entmax import deformed_log
from hsa.attention.hierarchical.entmax import pruned
from hsa.attention.hierarchical.entmax.entries import entries_of, hand_down
from hsa.attention.hierarchical.entmax.family import attend
from hsa.attention.hierarchical.torch_sweeps import UpSweep, by_round, down_sweep, from_above, with_positions
from hsa.attention.normalizers import Entmax, resolve_entmax
from hsa.attention.rounds import Rounds, rooted, rounds
from hsa.tree.hierarchy import Hierarchy


@torch.compiler.disable  # the search for c asks values when to stop: compiled, it would fall into a hundred pieces
def hierarchical_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hierarchy: Hierarchy,
    *,
    positions: Tensor | None,
    include_self: bool,
    causal: bool,
    normalizer: Entmax,
    scale: float,
) -> Tensor:
    """See `hsa.hierarchical_attention`; arguments are checked, and q, k, v have the same heads."""
    hierarchy, positions = rooted(hierarchy, positions)
    plan = rounds(hierarchy)
    learned = [x for x in (q, k, v, positions, normalizer.alpha) if isinstance(x, Tensor) and x.requires_grad]
    arguments = q, k, v, hierarchy, plan, positions, include_self, causal, normalizer, scale
    if normalizers.SKIPS and not q.is_cuda and not (learned and torch.is_grad_enabled()):  # on a GPU it saves no time
        return pruned.hierarchical_attention(*arguments)
    return down_sweep(_up_sweep(*arguments), v, plan)


def prepare(hierarchy: Hierarchy, *, include_self: bool, causal: bool = False) -> None:
    """Build what depends on the forest alone, ahead of the first call in float32 or less with `counts="weighted"`."""
    forest, _ = rooted(hierarchy)
    entries_of(forest, rounds(forest), include_self, causal, True, torch.float32)


def energy(
    q: Tensor,
    k: Tensor,
    hierarchy: Hierarchy,
    *,
    positions: Tensor | None,
    include_self: bool,
    causal: bool,
    normalizer: Entmax,
    scale: float,
) -> Tensor:
    """−inner(root), `[trees, heads]`."""
    hierarchy, positions = rooted(hierarchy, positions)
    plan = rounds(hierarchy)
    if not plan.rounds:
        return q.new_zeros(0, q.shape[1])
    up = _up_sweep(q, k, k[..., :0], hierarchy, plan, positions, include_self, causal, normalizer, scale)
    inner = [gain + of_zeros for gain, of_zeros in zip(up.inner, up.of_zeros, strict=True)]
    result = -torch.cat(inner).index_select(0, plan.roots)
    return result if include_self else result.masked_fill(plan.void_roots[:, None], math.inf)


@dataclass(frozen=True)
class Visited:
    """How much of a forest the down sweep enters, in families times heads."""

    families: tuple[int, ...]
    """Entered, per height from 1: families of leaves only come first."""
    of: tuple[int, ...]
    """There are, likewise."""

    @property
    def fraction(self) -> float:
        """Of all families; 1.0 of an empty forest."""
        return sum(self.families) / sum(self.of) if sum(self.of) else 1.0


def visited(q: Tensor, k: Tensor, hierarchy: Hierarchy, *, normalizer: Entmax, **options: Any) -> Visited:
    """What `hsa.hierarchical_attention` enters without a gradient; the same arguments.

    >>> q = torch.tensor([[9.0, 0.0]] * 2 + [[0.0, 9.0]] * 2)[:, None]  # two pairs of leaves
    >>> visited(q, q.flip(0), Hierarchy.from_nested([[2, 2]]), normalizer=Entmax(2.0))  # each looks at the other only
    Visited(families=(0, 1), of=(2, 1))
    """
    handed = handed_down(q, k, hierarchy, normalizer=normalizer, **options)
    s, heads = hierarchy.structure, q.shape[1]
    height = torch.as_tensor(s.height, device=handed.device)
    heights = range(1, int(s.height.max(initial=0)) + 1)
    entered = tuple(int((handed[height == h] > 0).sum()) for h in heights)
    return Visited(entered, tuple(int((s.height == h).sum()) * heads for h in heights))


@torch.no_grad()
def handed_down(
    q: Tensor,
    k: Tensor,
    hierarchy: Hierarchy,
    *,
    normalizer: Entmax,
    positions: Tensor | None = None,
    include_self: bool = False,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """`[nodes, heads]`: the part of a leaf's row that is left for what is inside each of its ancestors.

    1 at roots, exactly 0 where attention has left out everything inside a node, and 0 at leaves.
    """
    check_inputs({"q": q, "k": k}, hierarchy)
    entmax = resolve_entmax(normalizer, q)
    positions = check_positions(positions, q, hierarchy)
    forest, positions = rooted(hierarchy, positions)
    plan = rounds(forest)
    k, scale = repeat_heads(k, q.shape[1]), scale_or_default(scale, q)
    up = _up_sweep(q, k, k[..., :0], forest, plan, positions, include_self, causal, entmax, scale)
    handed = q.new_zeros(forest.num_nodes, q.shape[1], dtype=torch.promote_types(q.dtype, torch.float32))
    down: dict[int, Tensor] = {}
    for r in reversed(range(len(plan.rounds))):
        families = plan.rounds[r]
        (weight,) = from_above(plan, r, [(down, up.inner[r].new_ones(1, q.shape[1]))])
        handed[plan.node_of_slot[plan.slot_bounds[r] : plan.slot_bounds[r + 1]]] = weight
        down[r] = families.join(hand_down(families.buckets, weight, up.down[r]))
    if forest is hierarchy:
        return handed
    result = handed.new_zeros(hierarchy.num_nodes, q.shape[1])
    kept = forest.node_ids < hierarchy.num_nodes  # the others are roots above trees of a single leaf
    result[forest.node_ids[kept]] = handed[kept]
    return result


@dataclass(frozen=True)
class _Up(UpSweep):
    """Averages have their share of the row in them."""

    of_zeros: list[Tensor] = field(default_factory=list)  # per round: `inner` of logits 0, [parents, heads or 1]


def _up_sweep(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hierarchy: Hierarchy,
    plan: Rounds,
    positions: Tensor | None,
    include_self: bool,
    causal: bool,
    entmax: Entmax,
    scale: float,
) -> _Up:
    """Leaves → roots."""
    up = _Up()
    dtype = torch.promote_types(q.dtype, torch.float32)
    weighted = entmax.counts == "weighted"
    structure = entries_of(hierarchy, plan, include_self, causal, weighted, dtype)
    pooled: tuple[list[Tensor], ...] = ([], [], [])
    no_inner = torch.zeros((), dtype=dtype, device=q.device).expand(q.shape[:2])
    places = None if positions is None else by_round(positions, plan)
    for r, families in enumerate(plan.rounds):
        alpha = entmax.at_height(r + 1, dtype)
        qs, ks, vs = (families.split(families.source(x, above)) for x, above in zip((q, k, v), pooled, strict=True))
        inners = families.split(families.source(no_inner, up.inner)) if families.earlier else [None] * len(qs)
        spots = [None] * len(qs) if places is None else families.split(families.source(*places))
        averages, gains, zeros = [], [], []
        downs: list[Tensor | None] = []
        for entries, qb, kb, vb, inner, spot in zip(structure[r], qs, ks, vs, inners, spots, strict=True):
            qb, kb, factor = with_positions(qb, kb, spot, scale)
            logit = None if inner is None else inner.transpose(1, 2)
            inputs = qb.transpose(1, 2), kb.transpose(1, 2)
            y, value, down = attend(*inputs, vb.transpose(1, 2), logit, alpha, entries, factor)
            averages.append(y.transpose(1, 2))
            value = value.transpose(1, 2)
            of_zeros = torch.zeros_like(value[..., :1])
            if weighted:
                of_zeros = (deformed_log(entries.keys[..., None], alpha) / alpha).expand(len(value), -1, -1)
            gains.append(value - of_zeros)
            zeros.append(of_zeros)
            downs.append(down.transpose(1, 2))
        for parts, above in zip((qs, ks, vs), pooled, strict=True):
            above.append(families.pool(parts))
        up.average.append(averages)
        up.side.append([None] * len(averages))
        up.down.append(downs)
        up.inner.append(families.pool(gains))
        up.of_zeros.append(families.pool(zeros))
    return up
