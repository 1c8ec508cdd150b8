"""Backend "torch" with entmax: the same sweeps, with the inside of every member as one more entry of its row.

Instead of masses, the sweeps keep gains over logits of 0, V − V₀. Pooled over the members of a family, the gain is the logit
of their parent's inside, whose weight is `keys_inside`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hsa.attention.entmax import deformed_log
from hsa.attention.hierarchical.call import HierarchicalCall
from hsa.attention.hierarchical.entmax.entries import Entries, entries_of
from hsa.attention.hierarchical.entmax.family import attend as attend_rows
from hsa.attention.hierarchical.torch_sweeps import UpSweep, down_sweep, energy_of_roots, up_sweep
from hsa.attention.rounds import Rounds, rooted, rounds
from hsa.tree.hierarchy import Hierarchy


@torch.compiler.disable  # the loop for c depends on values: compiled, it would have about a hundred graph breaks
def attend(call: HierarchicalCall) -> Tensor:
    """Run `hsa.hierarchical_attention`."""
    families = EntmaxFamilies(call)
    return down_sweep(families.up_sweep(), call.v, families.plan)


def energy(call: HierarchicalCall) -> Tensor:
    """Return −inner(root), `[trees, heads]`."""
    families = EntmaxFamilies(call)
    gains = families.up_sweep().inner
    inner = [gain + of_zeros for gain, of_zeros in zip(gains, families.inner_of_zeros(), strict=True)]
    return energy_of_roots(inner, families.plan, call)


def prepare(forest: Hierarchy, include_self: bool) -> None:
    """Build the plan and the entries of a rooted forest, for calls in float32 or less with `counts="weighted"`."""
    entries_of(forest, rounds(forest), include_self, causal=False, weighted=True, dtype=torch.float32)


class EntmaxFamilies:
    """Attention within the families of a call."""

    def __init__(self, call: HierarchicalCall):
        assert call.entmax is not None
        self.call, self.entmax = call, call.entmax
        self.forest, self.positions = rooted(call.hierarchy, call.positions)
        self.plan: Rounds = rounds(self.forest)
        self.dtype = torch.promote_types(call.q.dtype, torch.float32)
        self.weighted = call.entmax.counts == "weighted"
        self.entries: list[list[Entries]] = entries_of(
            self.forest, self.plan, call.include_self, call.causal, self.weighted, self.dtype
        )

    def up_sweep(self) -> UpSweep:
        """Sweep from the leaves to the roots; the averages include their share of the row."""
        up = UpSweep()
        up_sweep(up, self.call, self.plan, self.positions, self.attend)
        return up

    def attend(
        self, r: int, i: int, q: Tensor, k: Tensor, v: Tensor, inner: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, None, Tensor]:
        """Compute `FamilyRows` with entmax."""
        inside = None if inner is None else inner.transpose(1, 2)
        y, value, down = attend_rows(q, k, v, inside, self.alpha(r), self.entries[r][i], scale)
        return y, value.transpose(1, 2) - self.value_of_zeros(r, i), None, down.transpose(1, 2)

    def alpha(self, r: int) -> Tensor:
        """Return α of a round, `[]` or `[heads or 1]`."""
        return self.entmax.at_height(r + 1, self.dtype)

    def value_of_zeros(self, r: int, i: int) -> Tensor:
        """Return V₀, the value for logits of 0, `[families, size, heads or 1]`; 0 for `counts="logits"`."""
        keys = self.entries[r][i].keys[..., None].expand(self.plan.rounds[r].buckets[i].families, -1, -1)
        if not self.weighted:
            return torch.zeros_like(keys)
        alpha = self.alpha(r)
        return deformed_log(keys, alpha) / alpha

    def inner_of_zeros(self) -> list[Tensor]:
        """Return `inner` for logits of 0, `[parents, heads or 1]` per round."""
        return [
            families.pool([self.value_of_zeros(r, i) for i in range(len(families.buckets))])
            for r, families in enumerate(self.plan.rounds)
        ]
