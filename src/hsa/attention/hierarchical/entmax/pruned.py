"""Entmax without a gradient: rows that no weight can reach are not solved, and what gets no weight is not entered.

V rises with every logit of a row, and by as much as all of them do; hence V − V₀ is at most the row's largest logit, and
the mean of these over the members of A bounds the logit ζ(A) of its inside. In the row of A the siblings alone push the
normaliser to c ≥ max (z + ln_α n). So where

    bound of ζ(A)  ≤  max over siblings (z + ln_α n) − 1/(α − 1)

the inside of A has no weight, whatever it is exactly, and nothing below A has to be known. Upwards, all logits and bounds;
downwards, which families are needed, in which heads; upwards, the rows of those; downwards, only where there is a weight.
Products of queries and keys are made in any case. What is saved is the search for c, most of the work, and weights × values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hsa.attention.entmax import deformed_log
from hsa.attention.hierarchical.entmax.entries import Entries, entries_of, hand_down, of_parents
from hsa.attention.hierarchical.entmax.family import (
    attend,
    chunks,
    family_logits,
    gain_of,
    solve_rows,
    split_rows,
    value_of,
)
from hsa.attention.hierarchical.torch_sweeps import by_round, from_above, leaves_of, with_positions
from hsa.attention.normalizers import Entmax
from hsa.attention.rounds import Rounds
from hsa.tree.hierarchy import Hierarchy

KEPT = 256
"""Members of the largest families whose logits are kept; larger ones are always solved and entered."""
UNBOUNDED = 1e30
"""The bound of rows that were not looked at: finite, because shares of padding are 0."""
MOST = 0.75
"""To pick rows costs more than it saves where so many are needed."""


class Weights(NamedTuple):
    """Of the siblings, for some families of a bucket."""

    p: Tensor  # [families, heads, size, size], or [picked, size, size]
    families: Tensor | None  # [picked]; None: all, in all heads
    heads: Tensor | None


@dataclass
class Families:
    """A bucket on its way."""

    entries: Entries
    values: Tensor  # [families, size, heads, dim] of the members
    parts: list[slice] = field(default_factory=list)  # families that are worked on together
    logits: list[Tensor] = field(default_factory=list)  # of each: [families, heads, size, size], insides left out
    weights: list[Weights] = field(default_factory=list)  # in place of these
    hopeless: Tensor | None = None  # [families, heads, size] members whose insides get no weight; None: not known
    large: tuple[Tensor, Tensor, float] | None = None  # queries, keys and scale of families whose logits are not kept
    average: Tensor | None = None  # of these, in place of weights


@dataclass
class Sweep:
    """All that the four sweeps share."""

    plan: Rounds
    entmax: Entmax
    dtype: torch.dtype
    heads: int
    families: list[list[Families]] = field(default_factory=list)  # per round, per bucket
    down: list[list[Tensor]] = field(default_factory=list)  # [families, size, heads] shares of the insides

    def alpha(self, r: int) -> Tensor:
        return self.entmax.at_height(r + 1, self.dtype)


def hierarchical_attention(
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
) -> Tensor:
    """See `hsa.hierarchical_attention`; the forest is rooted."""
    if not plan.rounds:
        return torch.empty_like(v)
    sweep = compare(q, k, v, hierarchy, plan, positions, include_self, causal, entmax, scale)
    solve(sweep, needed(sweep))
    return _enter_all(sweep, v)


def compare(
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
    kept: int | None = None,
) -> Sweep:
    """Leaves → roots: all logits, and what the gains of rows are at most. `kept`: in place of `KEPT`."""
    sweep = Sweep(plan, entmax, torch.promote_types(q.dtype, torch.float32), q.shape[1])
    structure = entries_of(hierarchy, plan, include_self, causal, entmax.counts == "weighted", sweep.dtype)
    pooled: tuple[list[Tensor], ...] = ([], [], [])
    bounds: list[Tensor] = []
    no_inner = torch.zeros((), dtype=sweep.dtype, device=q.device).expand(q.shape[:2])
    places = None if positions is None else by_round(positions, plan)
    for r, families in enumerate(plan.rounds):
        qs, ks, vs = (families.split(families.source(x, above)) for x, above in zip((q, k, v), pooled, strict=True))
        insides = families.split(families.source(no_inner, bounds)) if families.earlier else [None] * len(qs)
        spots = [None] * len(qs) if places is None else families.split(families.source(*places))
        found, tops = [], []
        for entries, qb, kb, vb, inside, spot in zip(structure[r], qs, ks, vs, insides, spots, strict=True):
            qb, kb, factor = with_positions(qb, kb, spot, scale)
            inputs = qb.transpose(1, 2), kb.transpose(1, 2)
            bound = None if inside is None else inside.transpose(1, 2)
            if qb.shape[1] > (KEPT if kept is None else kept):
                found.append(Families(entries, vb, large=(*inputs, factor)))
                top = no_inner.new_full(inputs[0].shape[:3], UNBOUNDED)
            else:
                found.append(Families(entries, vb, list(chunks(inputs[0]))))
                top = _bounded(found[-1], *inputs, bound, sweep.alpha(r), factor)
            if entmax.counts == "logits":  # rows of logits 0 have a value there
                top = top - gain_of(torch.zeros_like(top), entries, sweep.alpha(r))
            tops.append(top.transpose(1, 2))
        for parts, above in zip((qs, ks, vs), pooled, strict=True):
            above.append(families.pool(parts))
        bounds.append(families.pool(tops))
        sweep.families.append(found)
    return sweep


def _bounded(rows: Families, q: Tensor, k: Tensor, inside: Tensor | None, alpha: Tensor, scale: float) -> Tensor:
    """What the logits of every row are at most; and the logits, and whose insides get no weight, into `rows`.

    Args:
        inside: `[families, heads, size]` bounds of the logits of the insides.
    """
    tops, hopeless = [], []
    of_members, of_rows = (alpha, alpha) if alpha.ndim == 0 else (alpha[:, None], alpha[:, None, None])
    for part in rows.parts:
        some = rows.entries.part(part)
        z = family_logits(q[part], k[part], None, some, scale)
        rows.logits.append(z)
        top = z.amax(-1)
        if some.inside is not None and inside is not None:
            least = top if some.weight is None else (z + deformed_log(some.weight, of_rows)).amax(-1)
            limit = least - 1 / (of_members - 1)
            limit = limit - 64 * torch.finfo(z.dtype).eps * (1 + limit.abs())  # bounds are rounded too
            hopeless.append(some.inside & (inside[part] <= limit))
            top = torch.where(some.inside & ~hopeless[-1], torch.maximum(top, inside[part]), top)
        tops.append(top.masked_fill_(top == -math.inf, 0))  # rows that see nothing
    rows.hopeless = torch.cat(hopeless) if hopeless else None
    return torch.cat(tops)


def needed(sweep: Sweep) -> list[Tensor]:
    """Roots → leaves: per round `[parents, heads]` whose rows have to be known."""
    below: dict[int, Tensor] = {}
    found = []
    for r in reversed(range(len(sweep.plan.rounds))):
        families = sweep.plan.rounds[r]
        first = sweep.families[r][0].values
        (here,) = from_above(sweep.plan, r, [(below, first.new_ones(1, sweep.heads, dtype=torch.bool))])
        found.append(here)
        if families.earlier:
            below[r] = families.join(
                [
                    _open_insides(of_parents(here, bucket), rows)
                    for bucket, rows in zip(families.buckets, sweep.families[r], strict=True)
                ]
            )
    return found[::-1]


def _open_insides(here: Tensor, rows: Families) -> Tensor:
    """`[families, size, heads]`: insides that may have a weight, in families that are needed."""
    result = here[:, None].expand(-1, rows.values.shape[1], -1)
    if rows.entries.inside is not None:
        result = result & rows.entries.inside.transpose(1, 2)
    return result if rows.hopeless is None else result & ~rows.hopeless.transpose(1, 2)


def solve(sweep: Sweep, wanted: Sequence[Tensor]) -> None:
    """Leaves → roots: weights in place of logits, for the families that are `wanted`, `[parents, heads]` per round."""
    inner: list[Tensor] = []
    like = sweep.families[0][0].values
    no_inner = torch.zeros((), dtype=sweep.dtype, device=like.device).expand(sweep.plan.num_leaves, sweep.heads)
    for r, families in enumerate(sweep.plan.rounds):
        alpha = sweep.alpha(r)
        insides = families.split(families.source(no_inner, inner)) if families.earlier else None
        gains, downs = [], []
        for i, (bucket, rows) in enumerate(zip(families.buckets, sweep.families[r], strict=True)):
            inside = None if insides is None else insides[i].transpose(1, 2)
            if rows.large is not None:
                queries, keys, scale = rows.large
                values = rows.values.transpose(1, 2)
                average, value, down = attend(queries, keys, values, inside, alpha, rows.entries, scale)
                rows.average = average.transpose(1, 2)
            else:
                value, down = _solve_needed(rows, inside, of_parents(wanted[r], bucket), alpha)
            if sweep.entmax.counts == "weighted":
                value = gain_of(value, rows.entries, alpha)
            gains.append(value.transpose(1, 2))
            downs.append(down.transpose(1, 2))
        inner.append(families.pool(gains))
        sweep.down.append(downs)


def _solve_needed(rows: Families, inside: Tensor | None, wanted: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Values of rows and shares of their insides, `[families, heads, size]`.

    Where rows are not `wanted` these are any numbers: they meet weights of 0.
    """
    values, downs = [], []
    of_rows = alpha if alpha.ndim == 0 else alpha[:, None, None]
    for part, z in zip(rows.parts, rows.logits, strict=True):
        some, want = rows.entries.part(part), wanted[part]
        if some.inside is not None:
            assert inside is not None
            assert rows.hopeless is not None
            own = z.diagonal(dim1=-2, dim2=-1)
            own.copy_(torch.where(some.inside, inside[part].masked_fill(rows.hopeless[part], -math.inf), own))
        if int(want.sum()) >= MOST * want.numel():
            solved = solve_rows(z, of_rows, some)
            values.append(value_of(solved, of_rows))
            p, down = split_rows(solved, some)
            downs.append(down)
            rows.weights.append(Weights(p, None, None))
            continue
        f, h = want.nonzero(as_tuple=True)
        picked, own_alpha = some.picked(f), of_rows[h] if alpha.ndim and len(alpha) > 1 else of_rows
        solved = solve_rows(z[f, h], own_alpha, picked)
        values.append(z.new_zeros(z.shape[:3]).index_put_((f, h), value_of(solved, own_alpha)))
        p, down = split_rows(solved, picked)
        downs.append(z.new_zeros(z.shape[:3]).index_put_((f, h), down))
        rows.weights.append(Weights(p, f, h))
    rows.logits.clear()
    return torch.cat(values), torch.cat(downs)


def _enter_all(sweep: Sweep, v: Tensor) -> Tensor:
    """Roots → leaves, only where there is a weight."""
    heads, width = v.shape[1:]
    plan = sweep.plan
    outs: dict[int, Tensor] = {}
    downs: dict[int, Tensor] = {}
    for r in reversed(range(len(plan.rounds))):
        families, like = plan.rounds[r], sweep.down[r][0]
        out, weight = from_above(plan, r, [(outs, like.new_zeros(1, heads, width)), (downs, like.new_ones(1, heads))])
        outs[r] = families.join(
            [
                _enter(of_parents(out, bucket), of_parents(weight, bucket), rows)
                for bucket, rows in zip(families.buckets, sweep.families[r], strict=True)
            ]
        )
        if families.earlier:
            downs[r] = families.join(hand_down(families.buckets, weight, sweep.down[r]))
    return leaves_of(outs, plan).to(v.dtype)


def _enter(out: Tensor, weight: Tensor, rows: Families) -> Tensor:
    """out(P) + weight(P) · Σ p v for every member, `[families, size, heads, dim]`.

    Args:
        out, weight: of the parents, `[families, heads, …]`.
    """
    values = rows.values
    out = out.to(torch.promote_types(values.dtype, torch.float32))
    if rows.average is not None:
        return torch.addcmul(out[:, None], rows.average.to(out.dtype), weight[:, None, :, None])
    result = out.new_empty(values.shape)
    for part, (p, f, h) in zip(rows.parts, rows.weights, strict=True):
        above, share, some = out[part], weight[part], values[part]
        if f is None or h is None:
            y = (p @ some.transpose(1, 2).to(out.dtype)).transpose(1, 2)
            torch.addcmul(above[:, None], y, share[:, None, :, None], out=result[part])
        else:
            result[part] = above[:, None]
            own = p.mul_(share[f, h][:, None, None])
            result[part][f, :, h] = torch.baddbmm(above[f, h][:, None], own, some[f, :, h].to(out.dtype))
    return result
