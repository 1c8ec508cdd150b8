"""Backend "torch": the up sweep and the down sweep, round by round, all families of a round at once.

Upwards, every family is attended to once (`family_attention`), which gives each member its siblings' average `y` and
log-mass `outer`, and each parent its pooled query, key, value and its own log-mass `inner`. Downwards, each member takes
its parent's output, adds its siblings' average with the share `outer` has in its row, and passes on the share of `inner`.

A leaf that sees itself does so inside its family's attention, so for the sweeps no leaf has an inner mass. Where a mass
is −∞ is a matter of structure (`void`, `alone`), never of values: no infinity enters a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hsa.attention.hierarchical.leaf_round import attend_leaves, finish_leaves
from hsa.attention.mixing import HeadMixing
from hsa.attention.rounds import Bucket, Round, Rounds, rooted, rounds
from hsa.attention.softmax import attend_with_gradient, exact
from hsa.errors import InvalidInput
from hsa.tree.hierarchy import Hierarchy

FamilyAttention: TypeAlias = Callable[..., tuple[Tensor, Tensor]]


def hierarchical_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hierarchy: Hierarchy,
    *,
    positions: Tensor | None,
    include_self: bool,
    causal: bool,
    family_attention: FamilyAttention,
    mixing: HeadMixing | None,
    scale: float,
) -> Tensor:
    """See `hsa.hierarchical_attention`; arguments are checked, and q, k, v have the same heads."""
    hierarchy, positions = rooted(hierarchy, positions)
    plan = rounds(hierarchy)
    up = up_sweep(
        q,
        k,
        v,
        plan,
        positions=positions,
        include_self=include_self,
        causal=causal,
        family_attention=family_attention,
        mixing=mixing,
        scale=scale,
    )
    return down_sweep(up, v, plan)


def energy(
    q: Tensor,
    k: Tensor,
    hierarchy: Hierarchy,
    *,
    positions: Tensor | None,
    include_self: bool,
    causal: bool,
    family_attention: FamilyAttention,
    scale: float,
) -> Tensor:
    """−inner(root), `[trees, heads]`."""
    hierarchy, positions = rooted(hierarchy, positions)
    plan = rounds(hierarchy)
    up = up_sweep(
        q,
        k,
        k[..., :0],
        plan,
        positions=positions,
        include_self=include_self,
        causal=causal,
        family_attention=family_attention,
        scale=scale,
    )
    if not up.inner:
        return q.new_zeros(0, q.shape[1])
    inner = torch.cat(up.inner).index_select(0, plan.roots)
    return -inner if include_self else (-inner).masked_fill(plan.void_roots[:, None], math.inf)


@dataclass(frozen=True)
class UpSweep:
    """What the down sweep needs. Per round, and in it per bucket: `[families, size, heads, …]`."""

    average: list[list[Tensor]] = field(default_factory=list)  # y: the siblings' average
    side: list[list[Tensor | None]] = field(default_factory=list)  # the siblings' share of a member's row; None: all
    down: list[list[Tensor | None]] = field(default_factory=list)  # its own children's share; None: nothing
    inner: list[Tensor] = field(default_factory=list)  # per round: [parents, heads]
    by_hand: bool = False  # the averages of the first round are ours to overwrite


def up_sweep(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Rounds,
    *,
    positions: Tensor | None,
    include_self: bool,
    causal: bool,
    family_attention: FamilyAttention,
    scale: float,
    mixing: HeadMixing | None = None,
) -> UpSweep:
    """Leaves → roots."""
    by_hand = bool(plan.rounds) and mixing is None and _by_hand(plan.rounds[0], positions, family_attention)
    up = UpSweep(by_hand=by_hand)
    pooled: tuple[list[Tensor], ...] = ([], [], [])
    no_inner = torch.zeros((), dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    no_inner = no_inner.expand(q.shape[:2])
    places = None if positions is None else by_round(positions, plan)
    for r, families in enumerate(plan.rounds):
        if r == 0 and by_hand:
            q0, k0, v0 = (families.source(x, []) for x in (q, k, v))
            averages, inner, means = attend_leaves(q0, k0, v0, families, include_self, causal, scale)
            up.average.append(averages)
            up.side.append([None] * len(averages))
            up.down.append([None] * len(averages))
            up.inner.append(inner)
            for above, mean in zip(pooled, means, strict=True):
                above.append(mean)
            continue
        qs, ks, vs = (families.split(families.source(x, above)) for x, above in zip((q, k, v), pooled, strict=True))
        inners = families.split(families.source(no_inner, up.inner)) if families.earlier else [no_inner] * len(qs)
        spots = [None] * len(qs) if places is None else families.split(families.source(*places))
        averages, masses, sides, downs = [], [], [], []
        for bucket, qb, kb, vb, inner, spot in zip(families.buckets, qs, ks, vs, inners, spots, strict=True):
            qb, kb, factor = with_positions(qb, kb, spot, scale)
            inputs = qb.transpose(1, 2), kb.transpose(1, 2), vb.transpose(1, 2)
            mask, alone = bucket.mask(include_self, causal)
            void = bucket.is_leaf if include_self else bucket.void
            if mixing is not None:
                y, mass, side, down = _attend_mixed(*inputs, bucket.log_count, mask, factor, inner, void, alone, mixing)
            else:
                if family_attention is exact:
                    bias, _ = bucket.bias(include_self, causal, qb.dtype)
                    y, outer = attend_with_gradient(*inputs, bias, factor)
                else:
                    y, outer = _pair(family_attention(*inputs, bucket.log_count, mask, scale=factor))
                mass, side, down = shares(inner, outer.transpose(1, 2), void, alone)
            averages.append(y.transpose(1, 2))
            masses.append(mass)
            sides.append(side)
            downs.append(down)
        for parts, above in zip((qs, ks, vs), pooled, strict=True):
            above.append(families.pool(parts))
        up.average.append(averages)
        up.side.append(sides)
        up.down.append(downs)
        up.inner.append(families.pool(masses))
    return up


def _by_hand(families: Round, positions: Tensor | None, family_attention: FamilyAttention) -> bool:
    """The first round has a faster form; a compiler makes its own."""
    return (
        families.only_leaves and positions is None and family_attention is exact and not torch.compiler.is_compiling()
    )


def _pair(result: Any) -> tuple[Tensor, Tensor]:
    if not (isinstance(result, tuple) and len(result) == 2 and all(isinstance(x, Tensor) for x in result)):
        raise InvalidInput(
            "family_attention",
            given=f"a function that returned {type(result).__name__}",
            expected="(out, lse), tensors",
        )
    return result


def by_round(positions: Tensor, plan: Rounds) -> tuple[Tensor, list[Tensor]]:
    """Positions of the leaves, and of the parents of every round."""
    by_slot = positions.index_select(0, plan.node_of_slot)
    bounds = plan.slot_bounds
    return by_slot[: plan.num_leaves], [by_slot[a:b] for a, b in pairwise(bounds)]


def with_positions(q: Tensor, k: Tensor, spot: Tensor | None, scale: float) -> tuple[Tensor, Tensor, float]:
    """scale·q·k + ε·ε as one longer dot product."""
    if spot is None:
        return q, k, scale
    spot = spot.to(q.dtype).expand(*q.shape[:-1], -1)
    return torch.cat([q * scale, spot], -1), torch.cat([k, spot], -1), 1.0


def shares(
    inner: Tensor, outer: Tensor, void: Tensor | None, alone: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """log(e^inner + e^outer), and how a row divides between siblings and own children.

    `void` members have no inner mass, members that are `alone` no outer mass.
    """
    if alone is not None:
        outer = outer.masked_fill(alone, 0)
    if void is None:
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
    inner: Tensor,
    void: Tensor | None,
    alone: Tensor | None,
    mixing: HeadMixing,
) -> tuple[Tensor, Tensor, None, Tensor | None]:
    """Attention inside families whose heads talk: averages that have their share of the row in them, masses, shares."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    logits = mixing.mix_logits(q.to(dtype) @ k.to(dtype).transpose(-1, -2) * scale)
    if log_count is not None:
        logits = logits + log_count.to(dtype)
    if alone is not None:  # such rows stay finite, and get no weight below
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
        if alone is not None:  # without siblings there is nothing to mix: all is handed down
            down = torch.where(alone & ~void[:, :, None], torch.ones_like(down), down)  # type: ignore[index]
    return (mixing.mix_weights(weights) @ v.to(dtype)).to(v.dtype), mass, None, down


def down_sweep(up: UpSweep, v: Tensor, plan: Rounds) -> Tensor:
    """Roots → leaves."""
    if not plan.rounds:
        return torch.empty_like(v)
    heads, width = v.shape[1:]
    outs: dict[int, Tensor] = {}
    weights: dict[int, Tensor] = {}
    for r in reversed(range(len(plan.rounds))):
        families, like = plan.rounds[r], up.inner[r]
        out, weight = from_above(plan, r, [(outs, like.new_zeros(1, heads, width)), (weights, like.new_ones(1, heads))])
        if families.only_leaves and not torch.compiler.is_compiling():
            outs[r] = finish_leaves(families, out.to(v.dtype), weight.to(v.dtype), up.average[r], up.by_hand)
            continue
        below = [
            _hand_down(bucket, out, weight, average, side, down)
            for bucket, average, side, down in zip(families.buckets, up.average[r], up.side[r], up.down[r], strict=True)
        ]
        outs[r] = families.join([out for out, _ in below])
        if families.earlier:
            weights[r] = families.join([weight for _, weight in below])
    return leaves_of(outs, plan).to(v.dtype)


def from_above(plan: Rounds, r: int, members: list[tuple[dict[int, Tensor], Tensor]]) -> list[Tensor]:
    """Of the parents of round r, what they got as members of later rounds; `members`: that, and the row of roots."""
    later, rows = plan.down[r]
    if rows is None:
        return [got[later[0]] for got, _ in members]
    return [torch.cat([*(got[s] for s in later), root]).index_select(0, rows) for got, root in members]


def _hand_down(
    bucket: Bucket, out: Tensor, weight: Tensor, average: Tensor, side: Tensor | None, down: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out(C) = out(P) + weight(P)·side(C)·y(C) and weight(C) = weight(P)·down(C), `[families, size, heads, …]`."""
    if bucket.parents is not None:
        out, weight = out.index_select(0, bucket.parents), weight.index_select(0, bucket.parents)
    out, weight = out[:, None], weight[:, None]
    share = weight if side is None else weight * side
    result = torch.addcmul(out.to(average.dtype), average, share.to(average.dtype)[..., None])
    return result, weight * (torch.zeros_like(weight) if down is None else down)


def leaves_of(outs: dict[int, Tensor], plan: Rounds) -> Tensor:
    if plan.leaf_rows is None:
        return outs[0]
    with_leaves = [outs[r] for r, families in enumerate(plan.rounds) if families.has_leaves]
    return torch.cat([out.to(with_leaves[0].dtype) for out in with_leaves]).index_select(0, plan.leaf_rows)
