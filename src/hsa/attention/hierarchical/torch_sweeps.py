"""Backend "torch": the up sweep and the down sweep, round by round, with all families of a round at once.

The up sweep computes attention within every family (`family_attention`). It gives each member its siblings' average `y` and
log-mass `outer`, and each parent its pooled query, key and value and its own log-mass `inner`. In the down sweep, each
member takes its parent's output, adds its siblings' average with the share of `outer` in its row, and passes on the share
of `inner`.

A leaf that sees itself does so within its family's attention, so no leaf has an inner mass in the sweeps. Whether a mass is
−∞ depends on the structure (`void`, `alone`), never on values: no infinity enters a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hsa.attention.hierarchical.call import HierarchicalCall
from hsa.attention.hierarchical.leaf_round import attend_leaves, finish_leaves
from hsa.attention.mixing import HeadMixing
from hsa.attention.rounds import Bucket, Rounds, rooted, rounds
from hsa.attention.softmax import attend_with_gradient, exact
from hsa.errors import InvalidInput


def attend(call: HierarchicalCall) -> Tensor:
    """Run `hsa.hierarchical_attention`."""
    forest, positions = rooted(call.hierarchy, call.positions)
    plan = rounds(forest)
    return down_sweep(_softmax_sweep(call, plan, positions), call.v, plan)


def energy(call: HierarchicalCall) -> Tensor:
    """Return −inner(root), `[trees, heads]`."""
    forest, positions = rooted(call.hierarchy, call.positions)
    plan = rounds(forest)
    return energy_of_roots(_softmax_sweep(call, plan, positions).inner, plan, call)


def energy_of_roots(inner: list[Tensor], plan: Rounds, call: HierarchicalCall) -> Tensor:
    """Return −inner of the roots, `[trees, heads]`, given inner of each round's parents; +∞ for trees without mass."""
    if not inner:
        return call.q.new_zeros(0, call.q.shape[1])
    result = -torch.cat(inner).index_select(0, plan.roots)
    return result if call.include_self else result.masked_fill(plan.void_roots[:, None], math.inf)


@dataclass(frozen=True)
class UpSweep:
    """Results of the up sweep so far: `[families, size, heads, …]` for each bucket of each round, unless noted otherwise."""

    average: list[list[Tensor]] = field(default_factory=list)  # y, the siblings' average
    side: list[list[Tensor | None]] = field(
        default_factory=list
    )  # the siblings' share of a member's row; None: all of it
    down: list[list[Tensor | None]] = field(default_factory=list)  # its own children's share; None: nothing
    inner: list[Tensor] = field(default_factory=list)  # per round: [parents, heads]
    pooled: tuple[list[Tensor], ...] = field(default_factory=lambda: ([], [], []))  # q, k, v of the parents per round
    fused_leaves: bool = False  # the first round ran in `leaf_round`: its averages may be overwritten


FamilyRows: TypeAlias = Callable[
    [int, int, Tensor, Tensor, Tensor, Tensor | None, float],
    tuple[Tensor, Tensor, Tensor | None, Tensor | None],
]
"""Attention within the families of one bucket: `(round, bucket, q, k, v, inner, scale) → (y, mass, side, down)`.

q, k, v and y are `[families, heads, size, dim]`. The others are `[families, size, heads]`: the log-mass inside each member
(None if all are leaves), the log-mass of its row, and the shares of the row, as in `UpSweep`.
"""


def up_sweep(
    up: UpSweep, call: HierarchicalCall, plan: Rounds, positions: Tensor | None, attend_families: FamilyRows
) -> None:
    """Sweep from the leaves to the roots, starting with the first round that is missing in `up`.

    Args:
        up: Results so far; new ones are appended.
        positions: Positions of the nodes of the rooted forest.
    """
    leaves = call.q, call.k, call.v
    no_inner = torch.zeros((), dtype=torch.promote_types(call.q.dtype, torch.float32), device=call.q.device)
    no_inner = no_inner.expand(call.q.shape[:2])
    by_height = None if positions is None else by_round(positions, plan)
    for r in range(len(up.inner), len(plan.rounds)):
        families = plan.rounds[r]
        parts = [families.split(families.source(x, above)) for x, above in zip(leaves, up.pooled, strict=True)]
        none: list[Tensor | None] = [None] * len(families.buckets)
        inners = families.split(families.source(no_inner, up.inner)) if families.earlier else none
        own_positions = none if by_height is None else families.split(families.source(*by_height))
        averages, masses, sides, downs = [], [], [], []
        for i, (q, k, v, inner, position) in enumerate(zip(*parts, inners, own_positions, strict=True)):
            q, k, scale = with_positions(q, k, position, call.scale)
            rows = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            y, mass, side, down = attend_families(r, i, *rows, inner, scale)
            averages.append(y.transpose(1, 2))
            masses.append(mass)
            sides.append(side)
            downs.append(down)
        for part, above in zip(parts, up.pooled, strict=True):
            above.append(families.pool(part))
        up.average.append(averages)
        up.side.append(sides)
        up.down.append(downs)
        up.inner.append(families.pool(masses))


def _softmax_sweep(call: HierarchicalCall, plan: Rounds, positions: Tensor | None) -> UpSweep:
    up = UpSweep(fused_leaves=_can_fuse_leaves(call, plan))
    if up.fused_leaves:
        families = plan.rounds[0]
        q, k, v = (families.source(x, []) for x in (call.q, call.k, call.v))
        averages, inner, means = attend_leaves(q, k, v, families, call.include_self, call.causal, call.scale)
        up.average.append(averages)
        up.side.append([None] * len(averages))
        up.down.append([None] * len(averages))
        up.inner.append(inner)
        for above, mean in zip(up.pooled, means, strict=True):
            above.append(mean)
    up_sweep(up, call, plan, positions, partial(_softmax_rows, call, plan))
    return up


def _can_fuse_leaves(call: HierarchicalCall, plan: Rounds) -> bool:
    """Return whether the first round can run in `leaf_round`. Compiled code does not need it."""
    plain = call.mixing is None and call.positions is None and call.family_attention is exact
    return plain and bool(plan.rounds) and plan.rounds[0].only_leaves and not torch.compiler.is_compiling()


def _softmax_rows(
    call: HierarchicalCall,
    plan: Rounds,
    r: int,
    i: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inner: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute `FamilyRows` with softmax."""
    bucket = plan.rounds[r].buckets[i]
    mask, alone = bucket.mask(call.include_self, call.causal)
    void = bucket.is_leaf if call.include_self else bucket.void
    if call.mixing is not None:
        return _attend_mixed(q, k, v, bucket.log_count, mask, scale, inner, void, alone, call.mixing)
    if call.family_attention is exact:
        bias, _ = bucket.bias(call.include_self, call.causal, q.dtype)
        y, outer = attend_with_gradient(q, k, v, bias, scale)
    else:
        y, outer = _pair(call.family_attention(q, k, v, bucket.log_count, mask, scale=scale))
    return y, *shares(inner, outer.transpose(1, 2), void, alone)


def _pair(result: Any) -> tuple[Tensor, Tensor]:
    if not (isinstance(result, tuple) and len(result) == 2 and all(isinstance(x, Tensor) for x in result)):
        raise InvalidInput(
            "family_attention",
            got=f"a function that returned {type(result).__name__}",
            expected="a function that returns two tensors (out, lse)",
        )
    return result


def by_round(nodes: Tensor, plan: Rounds) -> tuple[Tensor, list[Tensor]]:
    """Split rows `[nodes, …]` into those of the leaves and those of each round's parents."""
    by_slot = nodes.index_select(0, plan.node_of_slot)
    bounds = plan.slot_bounds
    return by_slot[: plan.num_leaves], [by_slot[a:b] for a, b in pairwise(bounds)]


def with_positions(q: Tensor, k: Tensor, position: Tensor | None, scale: float) -> tuple[Tensor, Tensor, float]:
    """Return queries, keys and a scale whose dot product is scale·q·k + ε·ε."""
    if position is None:
        return q, k, scale
    position = position.to(q.dtype).expand(*q.shape[:-1], -1)
    return torch.cat([q * scale, position], -1), torch.cat([k, position], -1), 1.0


def shares(
    inner: Tensor | None, outer: Tensor, void: Tensor | None, alone: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return log(e^inner + e^outer), and the shares of siblings and of own children in each row.

    Members that are `void` have no inner mass (None: all are void); members that are `alone` have no outer mass.
    """
    if alone is not None:
        outer = outer.masked_fill(alone, 0)
    if void is None or inner is None:
        return outer, None, None
    void = void[:, :, None]
    mass = torch.where(void, outer, torch.logaddexp(inner, outer))
    side = torch.sigmoid(outer - inner).masked_fill(void, 1)
    down = torch.sigmoid(inner - outer).masked_fill(void, 0)
    if alone is not None:
        mass = torch.where(alone & ~void, inner, mass)
        side = side.masked_fill(alone, 0)
        down = down.masked_fill(alone & ~void, 1)
    return mass, side, down


def _attend_mixed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_count: Tensor | None,
    mask: Tensor,
    scale: float,
    inner: Tensor | None,
    void: Tensor | None,
    alone: Tensor | None,
    mixing: HeadMixing,
) -> tuple[Tensor, Tensor, None, Tensor | None]:
    """Compute attention within families with mixed heads: averages weighted by their share of the row, masses, shares."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    logits = mixing.mix_logits(q.to(dtype) @ k.to(dtype).transpose(-1, -2) * scale)
    if log_count is not None:
        logits = logits + log_count.to(dtype)
    if alone is not None:  # keeps these rows finite; they get no weight below
        mask = mask | alone[:, None]
    logits = logits.masked_fill(~mask, -math.inf)
    outer = logits.logsumexp(-1)
    mass, side, down = shares(inner, outer.transpose(1, 2), void, alone)
    weights = (logits - outer[..., None]).exp()
    if side is not None:
        weights = weights * side.transpose(1, 2)[..., None]
    elif alone is not None:
        weights = weights.masked_fill(alone[:, None], 0)
    if down is not None:
        down = down @ mixing.weights.to(dtype).T
        if alone is not None:  # without siblings there is nothing to mix: everything is passed down
            down = torch.where(alone & ~void[:, :, None], torch.ones_like(down), down)  # type: ignore[index]
    return (mixing.mix_weights(weights) @ v.to(dtype)).to(v.dtype), mass, None, down


def down_sweep(up: UpSweep, v: Tensor, plan: Rounds) -> Tensor:
    """Sweep from the roots to the leaves; return the output of the leaves."""
    if not plan.rounds:
        return torch.empty_like(v)
    heads, width = v.shape[1:]
    outs: dict[int, Tensor] = {}
    weights: dict[int, Tensor] = {}
    for r in reversed(range(len(plan.rounds))):
        families, like = plan.rounds[r], up.inner[r]
        out, weight = from_above(plan, r, [(outs, like.new_zeros(1, heads, width)), (weights, like.new_ones(1, heads))])
        if families.only_leaves and not torch.compiler.is_compiling():
            outs[r] = finish_leaves(families, out.to(v.dtype), weight.to(v.dtype), up.average[r], up.fused_leaves)
            continue
        below = [
            _pass_down(bucket, out, weight, average, side, down)
            for bucket, average, side, down in zip(families.buckets, up.average[r], up.side[r], up.down[r], strict=True)
        ]
        outs[r] = families.join([out for out, _ in below])
        if families.earlier:
            weights[r] = families.join([weight for _, weight in below])
    return _leaf_rows(outs, plan).to(v.dtype)


def from_above(plan: Rounds, r: int, members: list[tuple[dict[int, Tensor], Tensor]]) -> list[Tensor]:
    """Return the rows of the parents of round r.

    Args:
        members: Pairs of the rows of the members of later rounds, by round, and the row of a root, `[1, …]`.
    """
    later, rows = plan.down[r]
    if rows is None:
        return [below[later[0]] for below, _ in members]
    return [torch.cat([*(below[s] for s in later), root]).index_select(0, rows) for below, root in members]


def _pass_down(
    bucket: Bucket, out: Tensor, weight: Tensor, average: Tensor, side: Tensor | None, down: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return out(C) = out(P) + weight(P)·side(C)·y(C) and weight(C) = weight(P)·down(C), `[families, size, heads, …]`."""
    out, weight = bucket.of_parents(out)[:, None], bucket.of_parents(weight)[:, None]
    share = weight if side is None else weight * side
    result = torch.addcmul(out.to(average.dtype), average, share.to(average.dtype)[..., None])
    return result, weight * (torch.zeros_like(weight) if down is None else down)


def _leaf_rows(outs: dict[int, Tensor], plan: Rounds) -> Tensor:
    if plan.leaf_rows is None:
        return outs[0]
    with_leaves = [outs[r] for r, families in enumerate(plan.rounds) if families.has_leaves]
    return torch.cat([out.to(with_leaves[0].dtype) for out in with_leaves]).index_select(0, plan.leaf_rows)
