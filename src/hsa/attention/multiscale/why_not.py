"""Reasons why the kernels cannot run a call of multiscale attention or of `select`. Does not import Triton."""

from __future__ import annotations

import torch

from hsa.attention.kernels import available
from hsa.attention.kernels.available import padded
from hsa.attention.multiscale.call import MultiscaleCall, SelectCall
from hsa.attention.multiscale.leaf_families import leaf_families
from hsa.tree.hierarchy import Hierarchy

MOST_SELECTED = 256
"""Maximum number of selected families per group and head that a program can hold."""
MOST_QUERIES = 2**20
"""Maximum number of queries per group: their blocks lie along a short dimension of the launch grid."""
MOST_PARENTS = 128
"""Maximum number of rows that a beam descends from at once: its width, or the paths to the neighbourhood's ends."""
BEST_BYTES = 2**16
"""Maximum bytes of the best families' keys that a program of the exact search keeps beside those it scores."""


def why_not_triton(call: MultiscaleCall) -> list[str]:
    """Return the reasons why the kernels cannot run `multiscale_attention`; an empty list if they can."""
    reasons = [] if call.entmax is None else ["it has no entmax"]
    reasons += available.why_not(call.q, call.v, call.backend)
    if reasons:
        return reasons
    if call.positions is not None:
        reasons.append("it does not take positions")
    if call.dropout_p > 0:
        reasons.append("it has no dropout")
    if call.mixing is not None:
        reasons.append("it does not mix heads")
    reasons += available.why_not_forest(call.hierarchy)
    width, largest = call.selection.families.shape[-1], call.selection.queries.largest_group
    if largest > MOST_QUERIES:
        reasons.append(f"a group has {largest:,} queries, more than {MOST_QUERIES:,}")
    if width > MOST_SELECTED:
        reasons.append(f"a group has up to {width} selected families, more than {MOST_SELECTED}")
    if call.needs_gradient and torch.are_deterministic_algorithms_enabled():
        reasons.append(
            "it sums the gradients of keys and values in no fixed order, but deterministic algorithms are enabled"
        )
    return reasons


def why_not_triton_search(call: SelectCall) -> list[str]:
    """Return the reasons why the kernels cannot search for `select`; an empty list if they can."""
    reasons = available.why_not(call.q, call.q, call.backend)
    if reasons:
        return reasons
    if call.positions is not None:
        return ["it does not take positions"]
    reasons = available.why_not_forest(call.hierarchy)
    best_bytes = padded(call.top_k) * padded(call.q.shape[-1]) * call.q.element_size()
    if call.width is None and best_bytes > BEST_BYTES:
        reasons.append(f"top_k={call.top_k} is more than a program can keep at this head dimension")
    if reasons or call.width is None:
        return reasons
    has_neighbourhood = call.neighbourhood.bounds is not None
    parents = max(call.width, 1 + 2 * _deepest(call.hierarchy)) if has_neighbourhood else call.width
    return [] if parents <= MOST_PARENTS else [f"the beam reads {parents} rows at once, more than {MOST_PARENTS}"]


def _deepest(hierarchy: Hierarchy) -> int:
    """Return the depth of the deepest leaf family."""

    def build() -> int:
        nodes = leaf_families(hierarchy).nodes.cpu().numpy()
        return int(hierarchy.structure.depth[nodes].max(initial=0))

    return hierarchy.cached("deepest leaf family", build)
