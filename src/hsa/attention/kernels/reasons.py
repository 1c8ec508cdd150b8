"""What each operator's kernels cannot do, as reasons for the dispatcher. Imports no Triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hsa.attention.hierarchical.triton import plan as tiles
from hsa.attention.kernels.available import padded
from hsa.attention.kernels.levels import levels
from hsa.attention.multiscale.leaf_families import leaf_families
from hsa.attention.multiscale.selection import Selection
from hsa.attention.normalizers import Entmax
from hsa.tree.hierarchy import Hierarchy

MOST_OPEN = 256
"""Open families of a group and head that a program can hold."""
MOST_QUERIES = 2**20
"""Of a group: its blocks of queries are programs along a short dimension of the grid."""
MOST_PARENTS = 128
"""Rows that a beam may descend from at once: its width, and the start's paths to both ends of the open range."""
BEST_BYTES = 2**16
"""Of the keys of the best families that a program of the exact search keeps beside those it looks at."""
POWERS = {1.5: 2, 2.0: 1}
"""1 / (α − 1) of the entmax that hierarchical kernels are compiled for; others are slower."""
LEAST_ALPHA = 1 + 1 / 64
"""Closer to 1, powers of up to 1 / (α − 1) lose what float32 has."""
TILE_BYTES = 2**14
"""Of q, k or v in one tile of the sweeps: all that is made of them has to fit the shared memory, also of small GPUs."""


def forest_reasons(hierarchy: Hierarchy) -> list[str]:
    """Against a rooted forest, whatever the operator."""
    if hierarchy.num_leaves == 0:
        return ["there are no leaves"]
    if levels(hierarchy) is None:
        return ["leaves hang at very different depths, so that equal depths would take too many rows"]
    return []


def entmax_reasons(normalizer: Any) -> list[str]:
    """Against the normalizer of hierarchical attention."""
    if not isinstance(normalizer, Entmax) or normalizer.is_softmax:
        return []
    if normalizer.lowest >= LEAST_ALPHA:
        return []
    known = f"a tensor, least={normalizer.least}" if isinstance(normalizer.alpha, Tensor) else f"{normalizer.alpha}"
    return [f"its entmax needs an α known to be {LEAST_ALPHA} or more: given {known}"]


def hierarchical_reasons(hierarchy: Hierarchy, q: Tensor, v: Tensor, positions: Tensor | None) -> list[str]:
    reasons = forest_reasons(hierarchy)
    if reasons:
        return reasons
    largest = largest_family(hierarchy)
    widths = [q.shape[-1], v.shape[-1]] + ([] if positions is None else [positions.shape[-1]])
    row = q.element_size() * max(map(padded, widths))
    most = max([0, *(size for size in tiles.SIZES if size * row <= TILE_BYTES)])
    return [] if largest <= most else [f"a family has {largest:,} members; for this dtype and head dim at most {most}"]


def largest_family(hierarchy: Hierarchy) -> int:
    return hierarchy.cached("largest family", lambda: int(hierarchy.structure.num_children.max(initial=0)))


def multiscale_reasons(hierarchy: Hierarchy, selection: Selection, needs_grad: bool) -> list[str]:
    reasons = forest_reasons(hierarchy)
    width = selection.families.shape[-1]
    if selection.queries.most > MOST_QUERIES:
        reasons.append(f"a group has {selection.queries.most:,} queries, more than {MOST_QUERIES:,}")
    if width > MOST_OPEN:
        reasons.append(f"a group has up to {width} open families, more than {MOST_OPEN}")
    if needs_grad and torch.are_deterministic_algorithms_enabled():
        reasons.append(
            "its gradients of keys and values add up in no fixed order, and deterministic ones are asked for"
        )
    return reasons


def choice_reasons(hierarchy: Hierarchy, q: Tensor, top_k: int, width: int | None, any_open: bool) -> list[str]:
    """`width` of the beam; None: exact."""
    reasons = forest_reasons(hierarchy)
    if width is None and padded(top_k) * padded(q.shape[-1]) * q.element_size() > BEST_BYTES:
        reasons.append(f"top_k={top_k} is more than a program can keep at this head dim")
    if reasons or width is None:
        return reasons
    deepest = hierarchy.cached("deepest leaf family", lambda: _deepest(hierarchy))
    parents = max(width, 1 + 2 * deepest) if any_open else width
    return [] if parents <= MOST_PARENTS else [f"the beam looks at {parents} rows at once, more than {MOST_PARENTS}"]


def _deepest(hierarchy: Hierarchy) -> int:
    nodes = leaf_families(hierarchy).nodes.cpu().numpy()
    return int(hierarchy.structure.depth[nodes].max(initial=0))
