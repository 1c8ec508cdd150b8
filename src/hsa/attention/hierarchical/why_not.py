"""Reasons why a backend cannot run a call of hierarchical attention. Does not import Triton."""

from __future__ import annotations

from torch import Tensor

from hsa.attention.hierarchical.call import HierarchicalCall
from hsa.attention.hierarchical.triton.plan import SIZES
from hsa.attention.kernels import available
from hsa.attention.kernels.available import padded
from hsa.attention.normalizers import Entmax
from hsa.attention.rounds import rooted
from hsa.attention.softmax import exact
from hsa.tree.hierarchy import Hierarchy

LEAST_ALPHA = 1 + 1 / 64
"""Smallest α of the kernels: closer to 1, powers of 1 / (α − 1) exceed the precision of float32."""
TILE_BYTES = 2**14
"""Largest tile of q, k or v in the kernels: all that is derived from it must fit the shared memory of small GPUs."""


def why_not_torch(call: HierarchicalCall) -> list[str]:
    reasons = _why_not_entmax(call)
    if call.family_attention is not exact and call.mixing is not None:
        reasons.append("mixing needs family_attention='exact'")
    return reasons


def why_not_reference(call: HierarchicalCall) -> list[str]:
    reasons = _why_not_entmax(call)
    if call.family_attention is not exact:
        reasons.append("the reference needs family_attention='exact'")
    return reasons


def _why_not_entmax(call: HierarchicalCall) -> list[str]:
    reasons = []
    if call.entmax is not None and call.family_attention is not exact:
        reasons.append("entmax needs family_attention='exact'")
    if call.entmax is not None and call.mixing is not None:
        reasons.append("mixing needs softmax")
    return reasons


def why_not_triton(call: HierarchicalCall) -> list[str]:
    reasons = available.why_not(call.q, call.v, call.backend) + why_not_alpha(call.entmax)
    if call.mixing is not None:
        reasons.append("the kernels do not mix heads")
    if call.family_attention is not exact:
        reasons.append("the kernels need family_attention='exact'")
    return reasons or why_not_tiles(rooted(call.hierarchy)[0], call.q, call.v, call.positions)


def why_not_alpha(entmax: Entmax | None) -> list[str]:
    """Return the reasons why the kernels cannot run this entmax; None stands for softmax."""
    if entmax is None or entmax.lowest >= LEAST_ALPHA:
        return []
    alpha = f"a tensor with least={entmax.least}" if isinstance(entmax.alpha, Tensor) else f"{entmax.alpha}"
    return [f"the kernels need an α that is known to be {LEAST_ALPHA} or more, got {alpha}"]


def why_not_tiles(forest: Hierarchy, q: Tensor, v: Tensor, positions: Tensor | None) -> list[str]:
    """Return the reasons why the kernels cannot hold the families of a rooted forest in tiles, for rows of these widths."""
    reasons = available.why_not_forest(forest)
    if reasons:
        return reasons
    largest, most = largest_family(forest), largest_run(q, v, positions)
    return (
        []
        if largest <= most
        else [f"a family has {largest:,} members; at most {most} fit with this dtype and head dim"]
    )


def largest_run(q: Tensor, v: Tensor, positions: Tensor | None) -> int:
    """Return the largest size of runs whose rows fit a tile, for rows of these widths; 0 if there is none."""
    widths = [q.shape[-1], v.shape[-1]] + ([] if positions is None else [positions.shape[-1]])
    row = q.element_size() * max(map(padded, widths))
    return max([0, *(size for size in SIZES if size * row <= TILE_BYTES)])


def largest_family(hierarchy: Hierarchy) -> int:
    return hierarchy.cached("largest family", lambda: int(hierarchy.structure.num_children.max(initial=0)))
