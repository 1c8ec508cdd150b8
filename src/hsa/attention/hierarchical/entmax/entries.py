"""Entries of the rows of families with entmax: which are visible, and how many keys each stands for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hsa.attention.hierarchical.entmax.inside import keys_inside
from hsa.attention.hierarchical.torch_sweeps import by_round
from hsa.attention.rounds import Bucket, Rounds
from hsa.attention.softmax import part_of
from hsa.tree.hierarchy import Hierarchy


@dataclass(frozen=True, eq=False)
class Entries:
    """Entries of a bucket's rows. The first dimension is 1 if all families are equal."""

    weight: Tensor | None  # [families or 1, 1, size, size] number of keys that an entry stands for; None: one each
    bias: Tensor | None  # [families or 1, 1, size, size] added to the logits of siblings; None: nothing
    hidden: Tensor | None  # [families or 1, 1, size, size]; None: no entry is hidden
    inside: Tensor | None  # [families or 1, 1, size] whether a member has an inside; None: no member has one
    keys: Tensor  # [families or 1, size] number of keys that a row sees; 1 if there are none

    def part(self, part: slice) -> Entries:
        bias, hidden, inside = (part_of(x, part) for x in (self.bias, self.hidden, self.inside))
        return Entries(part_of(self.weight, part), bias, hidden, inside, self.keys)


def entries_of(
    hierarchy: Hierarchy, plan: Rounds, include_self: bool, causal: bool, weighted: bool, dtype: torch.dtype
) -> list[list[Entries]]:
    """Return the entries of every bucket of every round of a rooted forest, built once."""

    def build() -> list[list[Entries]]:
        inside = torch.as_tensor(keys_inside(hierarchy, include_self, causal), device=hierarchy.device)
        sources = by_round(inside, plan)
        return [
            [
                _bucket_entries(bucket, members, bucket.mask(include_self, causal)[0], weighted, dtype)
                for bucket, members in zip(families.buckets, families.split(families.source(*sources)), strict=True)
            ]
            for families in plan.rounds
        ]

    return hierarchy.cached(("entmax", include_self, causal, weighted, dtype), build)


def _bucket_entries(bucket: Bucket, inside: Tensor, mask: Tensor, weighted: bool, dtype: torch.dtype) -> Entries:
    """Return the entries of a bucket.

    Args:
        inside: Number of keys that a leaf of each member sees inside it, `[families, size]`.
        mask: Visible siblings, `[families or 1, 1, size, size]`.
    """
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
    """Return a single row if the rows of all families are equal, else all of them."""
    return rows[:1] if bool((rows == rows[:1]).all()) else rows
