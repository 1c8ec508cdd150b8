"""Backend "torch" with entmax: the sweeps of `levelwise`, with the inside of every member as one more entry of its row.

Values are kept as what they gain on logits 0, V − V₀: pooled over the members that is the logit of their parent's inside,
whose weight is `keys_inside`. Without a gradient the down sweep visits only what has a weight: a family is entered in the
heads that hand something down to it, and everything below it in the others stays as it came.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hsa.attention.arguments import check_inputs, check_positions, repeat_heads, scale_or_default
from hsa.attention.entmax import deformed_log
from hsa.attention.hierarchical.inside import keys_inside
from hsa.attention.hierarchical.levelwise import UpSweep, by_round, down_sweep, from_above, leaves_of, with_positions
from hsa.attention.hierarchical.sparse_family import Entries, attend, chunks, weights
from hsa.attention.normalizers import Entmax, resolve_normalizer
from hsa.attention.rounds import Bucket, Rounds, rooted, rounds
from hsa.errors import InvalidInput
from hsa.hierarchy import Hierarchy

KEPT = 256
"""Members of the largest families whose weights are kept for the down sweep; larger ones are never skipped."""


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
    prune = not (learned and torch.is_grad_enabled())
    keep = KEPT if prune else 0
    up = up_sweep(q, k, v, hierarchy, plan, positions, include_self, causal, normalizer, scale, keep)
    return _visit(up, v, plan) if prune else down_sweep(up, v, plan)


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
    up = up_sweep(q, k, k[..., :0], hierarchy, plan, positions, include_self, causal, normalizer, scale, keep=0)
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
    entmax = resolve_normalizer(normalizer, q)
    if entmax is None:
        raise InvalidInput("normalizer", given="softmax", expected="an hsa.Entmax: softmax leaves nothing out")
    positions = check_positions(positions, q, hierarchy)
    forest, positions = rooted(hierarchy, positions)
    plan = rounds(forest)
    k, scale = repeat_heads(k, q.shape[1]), scale_or_default(scale, q)
    up = up_sweep(q, k, k[..., :0], forest, plan, positions, include_self, causal, entmax, scale, keep=0)
    handed = q.new_zeros(forest.num_nodes, q.shape[1], dtype=torch.promote_types(q.dtype, torch.float32))
    down: dict[int, Tensor] = {}
    for r in reversed(range(len(plan.rounds))):
        families = plan.rounds[r]
        (weight,) = from_above(plan, r, [(down, up.inner[r].new_ones(1, q.shape[1]))])
        handed[plan.node_of_slot[plan.slot_bounds[r] : plan.slot_bounds[r + 1]]] = weight
        down[r] = families.join(_hand_down(families.buckets, weight, up.down[r]))
    if forest is hierarchy:
        return handed
    result = handed.new_zeros(hierarchy.num_nodes, q.shape[1])
    kept = forest.node_ids < hierarchy.num_nodes  # the others are roots above trees of a single leaf
    result[forest.node_ids[kept]] = handed[kept]
    return result


@dataclass(frozen=True)
class _Up(UpSweep):
    """Averages have their share of the row in them; where weights are kept they are not made yet."""

    of_zeros: list[Tensor] = field(default_factory=list)  # per round: `inner` of logits 0, [parents, heads or 1]
    kept: list[list[Tensor | None]] = field(default_factory=list)
    """Per round and bucket the weights `[families, heads, size, size]`, with members' values in place of averages."""


def up_sweep(
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
    keep: int,
) -> _Up:
    """Leaves → roots. `keep`: the largest families whose weights are kept in place of averages; 0: none."""
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
        kept: list[Tensor | None] = []
        downs: list[Tensor | None] = []
        for entries, qb, kb, vb, inner, spot in zip(structure[r], qs, ks, vs, inners, spots, strict=True):
            qb, kb, factor = with_positions(qb, kb, spot, scale)
            logit = None if inner is None else inner.transpose(1, 2)
            inputs = qb.transpose(1, 2), kb.transpose(1, 2)
            if qb.shape[1] <= keep:
                p, value, down = weights(*inputs, logit, alpha, entries, factor)
                kept.append(p)
                averages.append(vb)
            else:
                y, value, down = attend(*inputs, vb.transpose(1, 2), logit, alpha, entries, factor)
                kept.append(None)
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
        up.kept.append(kept)
    return up


def _visit(up: _Up, v: Tensor, plan: Rounds) -> Tensor:
    """Roots → leaves, only where there is a weight."""
    if not plan.rounds:
        return torch.empty_like(v)
    heads, width = v.shape[1:]
    outs: dict[int, Tensor] = {}
    downs: dict[int, Tensor] = {}
    for r in reversed(range(len(plan.rounds))):
        families, like = plan.rounds[r], up.inner[r]
        out, weight = from_above(plan, r, [(outs, like.new_zeros(1, heads, width)), (downs, like.new_ones(1, heads))])
        outs[r] = families.join(
            [
                _enter(_of_parents(out, bucket), _of_parents(weight, bucket), values, p)
                for bucket, values, p in zip(families.buckets, up.average[r], up.kept[r], strict=True)
            ]
        )
        if families.earlier:
            downs[r] = families.join(_hand_down(families.buckets, weight, up.down[r]))
    return leaves_of(outs, plan).to(v.dtype)


def _enter(out: Tensor, weight: Tensor, values: Tensor, p: Tensor | None) -> Tensor:
    """out(P) + weight(P) · Σ p v for every member, `[families, size, heads, dim]`.

    Args:
        out, weight: of the parents, `[families, heads, …]`.
        values: of the members; their averages where no weights `p` were kept.
    """
    out = out.to(torch.promote_types(values.dtype, torch.float32))
    if p is None:
        return torch.addcmul(out[:, None], values.to(out.dtype), weight[:, None, :, None])
    result = out.new_empty(values.shape)
    for part in chunks(p):
        above, share, some, p_part = out[part], weight[part], values[part], p[part]
        entered = share > 0
        if 2 * int(entered.sum()) > entered.numel():  # to pick them costs more than it saves
            y = (p_part @ some.transpose(1, 2).to(out.dtype)).transpose(1, 2)
            torch.addcmul(above[:, None], y, share[:, None, :, None], out=result[part])
            continue
        result[part] = above[:, None]
        f, h = entered.nonzero(as_tuple=True)
        own = p_part[f, h] * share[f, h][:, None, None]
        result[part][f, :, h] = torch.baddbmm(above[f, h][:, None], own, some[f, :, h].to(out.dtype))
    return result


def _hand_down(buckets: Sequence[Bucket], weight: Tensor, shares: Sequence[Tensor | None]) -> list[Tensor]:
    """weight(P) · p of the inside, `[families, size, heads]`."""
    return [
        _of_parents(weight, bucket)[:, None] * share
        for bucket, share in zip(buckets, shares, strict=True)
        if share is not None
    ]


def _of_parents(x: Tensor, bucket: Bucket) -> Tensor:
    return x if bucket.parents is None else x.index_select(0, bucket.parents)


def entries_of(
    hierarchy: Hierarchy, plan: Rounds, include_self: bool, causal: bool, weighted: bool, dtype: torch.dtype
) -> list[list[Entries]]:
    """Per round and bucket what rows consist of; built once per hierarchy."""

    def build() -> list[list[Entries]]:
        inside = torch.as_tensor(keys_inside(hierarchy, include_self, causal), device=hierarchy.device)
        places = by_round(inside, plan)
        return [
            [
                _bucket_entries(bucket, members, bucket.mask(include_self, causal)[0], weighted, dtype)
                for bucket, members in zip(families.buckets, families.split(families.source(*places)), strict=True)
            ]
            for families in plan.rounds
        ]

    return hierarchy.cached(("entmax", include_self, causal, weighted, dtype), build)


def _bucket_entries(bucket: Bucket, inside: Tensor, mask: Tensor, weighted: bool, dtype: torch.dtype) -> Entries:
    """Args: `inside` `[families, size]` keys that a leaf of each member sees inside it; `mask` of the siblings."""
    if bucket.is_leaf is None:  # every entry is one key
        keys = mask[:, 0].sum(-1).clamp(min=1).to(dtype)
        return Entries(None, None, None if bool(mask.all()) else ~mask, None, keys)
    has_inside = ((inside > 0) & ~bucket.is_leaf)[:, None]
    own = torch.eye(bucket.size, dtype=torch.bool, device=mask.device) & has_inside[..., None]
    counts = inside.new_ones(()) if bucket.log_count is None else bucket.log_count.exp().round()
    weight = torch.where(own, inside[:, None, :, None], counts)
    hidden = ~(mask | own)
    keys = weight.masked_fill(hidden, 0).sum(-1)[:, 0].clamp(min=1).to(dtype)
    weight = _once(weight.masked_fill(hidden, 1)).to(dtype)
    bias = None if weighted else _once(weight.masked_fill(own, 1).log())
    return Entries(weight if weighted else None, bias, _once(hidden), _once(has_inside), _once(keys))


def _once(rows: Tensor) -> Tensor:
    """One row where all families are alike."""
    return rows[:1] if bool((rows == rows[:1]).all()) else rows
