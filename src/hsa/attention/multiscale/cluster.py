"""Clustered keys: an order of the keys, per head, that puts similar keys below the same nodes of a tree.

From the root down, the keys below a node are sorted along their first principal direction and distributed to its
children from left to right, as many to each child as it has leaves; with two equal children that is a split at the
median. The tree stays the same; only the keys at its leaves are permuted, per key/value head. Leaves directly under a
root (sinks) keep their keys.

Related methods: Reformer (hash buckets), the Routing Transformer (k-means), clustered key–value caches, Quest (pages
with bounds). The tree is new here: its pooled nodes keep the mass of the keys that are not selected.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from hsa.attention import dispatch
from hsa.attention.call import Call
from hsa.attention.checks import check_inputs
from hsa.attention.dispatch import Backend
from hsa.attention.kernels import available
from hsa.attention.multiscale.queries import Queries
from hsa.errors import InvalidInput
from hsa.tree.hierarchy import Hierarchy

ITERATIONS = 3
"""Number of power iterations for a principal direction, after one first product. An approximate direction is enough."""


@dataclass(frozen=True, eq=False)
class KeyClusters:
    """Order of the keys of each head, in groups of similar keys; the result of `cluster_keys`.

    Attributes:
        order: `[kv_heads, leaves]`: `order[head, slot]` is the leaf whose key lies at this leaf slot of the tree.
        operations: Number of multiplications and additions of the power iterations, summed over heads. A GPU may do
            more where matrix products are cheaper.
        made_for: Digest of the hierarchy, to check that the order is used with no other; None skips the check.

    >>> clusters = cluster_keys(torch.randn(32, 2, 8), Hierarchy.regular([32], (8, 2)))
    >>> clusters.order.shape
    torch.Size([2, 32])
    """

    order: Tensor
    operations: int = 0
    made_for: str | None = None


@torch.no_grad()
@torch.compiler.disable
def cluster_keys(
    k: Float[Tensor, "leaves kv_heads dim"], hierarchy: Hierarchy, *, backend: str = "auto"
) -> KeyClusters:
    """Order the keys of each head so that similar keys lie below the same nodes of the tree.

    Pass the result to `select(clusters=…)` and `multiscale_attention(clusters=…)`. It is deterministic, and takes
    O(N log N) per level of a balanced tree such as `Hierarchy.regular(lengths, (8, 2), repeat_last=True)`.

    Args:
        k: Keys `[leaves, kv_heads, dim]`, one row per leaf.
        hierarchy: Forest whose leaves take the keys.
        backend: "auto", "triton" (CUDA) or "torch". The backends agree except where keys are nearly equal.

    Returns:
        The order of the keys of every key/value head.

    >>> k = torch.tensor([0.0, 9.5, 1.0, 8.0, 2.0, 7.0])[:, None, None]
    >>> cluster_keys(k, Hierarchy.regular([6], (3,))).order.tolist()
    [[0, 2, 4, 1, 3, 5]]
    """
    check_inputs({"k": k}, hierarchy)
    order = dispatch.run("cluster_keys", CLUSTER, Call(k=k, hierarchy=hierarchy, backend=backend))
    return KeyClusters(order, _all_operations(k, hierarchy), hierarchy.digest)


def _cluster_torch(call: Call) -> Tensor:
    """Return `[kv_heads, leaves]` the leaf whose key lies at each leaf slot."""
    k, hierarchy = call.k, call.hierarchy
    heads, dim = k.shape[1:]
    dtype = torch.promote_types(k.dtype, torch.float32)
    keys = k.to(dtype).reshape(-1, dim)  # [leaves · heads, dim]
    head = torch.arange(heads, device=k.device)[:, None]
    order = torch.arange(hierarchy.num_leaves, device=k.device).expand(heads, -1).contiguous()
    for slots, present in _levels(hierarchy):
        nodes, size = slots.shape
        leaves = order[:, slots.flatten()].view(heads, nodes, size)
        rows = leaves.view(heads, -1) * heads + head
        members = keys.index_select(0, rows.flatten()).view(heads, nodes, size, dim)
        coordinate = _principal_coordinate(members, present)
        # Equal coordinates keep the order of the leaves; padding stays at the end, also behind keys that are not finite.
        coordinate = coordinate.nan_to_num_(torch.finfo(dtype).max)
        if present is not None:
            coordinate = coordinate.masked_fill(~present, torch.inf)
        moved = leaves.gather(-1, coordinate.sort(dim=-1, stable=True).indices)
        if present is None:
            order[:, slots.flatten()] = moved.flatten(1)
        else:
            order[:, slots[present]] = moved[:, present]
    sort_inside_leaf_families(order, hierarchy)
    return order


def _cluster_triton(call: Call) -> Tensor:
    from hsa.attention.multiscale.triton.cluster import cluster_keys

    with available.device_of(call.k):
        return cluster_keys(call.k, call.hierarchy)


def _why_not_triton(call: Call) -> list[str]:
    return available.why_not(call.k, call.k, call.backend, widest=available.WIDEST_CLUSTERED)


CLUSTER = (Backend("triton", _cluster_triton, _why_not_triton), Backend("torch", _cluster_torch))


def _all_operations(k: Tensor, hierarchy: Hierarchy) -> int:
    heads, dim = k.shape[1:]

    def count() -> int:
        _, begin, end, useful = nodes_to_sort(hierarchy)
        sizes, nodes = np.unique((end - begin)[useful], return_counts=True)
        return sum(int(n) * _operations(int(size), dim) for size, n in zip(sizes, nodes, strict=True))

    return heads * hierarchy.cached(("clustering", dim), count)


def nodes_to_sort(hierarchy: Hierarchy) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the leaf slots whose keys may move; for every node, its range of them, and whether to sort its keys.

    A node with one child, or with leaf children only, needs no sorting. The sinks of a root do not move.
    """
    s = hierarchy.structure
    movable = s.depth[s.leaf_nodes] > 1
    slots_before = np.concatenate([[0], np.cumsum(movable)])
    slots = np.flatnonzero(movable)
    begin, end = slots_before[s.first_leaf], slots_before[s.end_leaf]
    useful = (s.height > 1) & (s.num_children > 1) & (end > begin)
    return slots, begin, end, useful


def _levels(hierarchy: Hierarchy) -> list[tuple[Tensor, Tensor | None]]:
    """Return the leaf slots `[nodes, size]` of the nodes to sort, by depth and size, and which are not padding."""

    def build() -> list[tuple[Tensor, Tensor | None]]:
        s = hierarchy.structure
        slots, begin, end, useful = nodes_to_sort(hierarchy)
        result = []
        for depth in range(hierarchy.depth):
            nodes = np.flatnonzero(useful & (s.depth == depth))
            size = (end - begin)[nodes]
            padded = 2 ** np.ceil(np.log2(np.maximum(size, 1))).astype(np.int64)
            for width in np.unique(padded)[::-1]:
                some = nodes[padded == width]
                width = int((end - begin)[some].max())
                grid = begin[some][:, None] + np.arange(width)
                present = grid < end[some][:, None]
                grid = slots[np.where(present, grid, begin[some][:, None])]
                padding = None if present.all() else torch.as_tensor(present).to(hierarchy.device)
                result.append((torch.as_tensor(grid).to(hierarchy.device), padding))
        return result

    return hierarchy.cached("key levels", build)


def _principal_coordinate(members: Tensor, present: Tensor | None) -> Tensor:
    """Return coordinates `[…, size]` along the first principal direction, by power iteration. Overwrites `members`.

    The iteration runs in the smaller of two spaces: that of the dimensions, or that of the members, where the leading
    vector is the coordinate itself.
    """
    size, dim = members.shape[-2:]
    if present is None:
        centred = members.sub_(members.mean(-2, keepdim=True))
    else:
        weight = present[..., None].to(members.dtype)
        mean = (members * weight).sum(-2, keepdim=True) / weight.sum(-2, keepdim=True)
        centred = members.sub_(mean).mul_(weight)
    across = centred.transpose(-1, -2)
    in_dimensions = _iterates_in_dimensions(size, dim)
    first, second = (centred, across) if in_dimensions else (across, centred)
    # A fixed, irregular start: a regular one could be orthogonal to the principal direction.
    start = torch.arange(1, (dim if in_dimensions else size) + 1, device=members.device, dtype=torch.float64)
    direction = second @ (first @ start.mul(2.4).cos().to(members.dtype)[:, None])
    for _ in range(ITERATIONS):
        length = direction.norm(dim=-2, keepdim=True)
        direction = second @ (first @ (direction / torch.where(length > 0, length, torch.ones_like(length))))
    coordinate = (centred @ direction if in_dimensions else direction).squeeze(-1)
    # The sign of a direction is arbitrary: make the coordinate of the outermost member positive.
    farthest = coordinate.gather(-1, coordinate.abs().argmax(-1, keepdim=True))
    return coordinate * farthest.sign()


def _iterates_in_dimensions(size: int, dim: int) -> bool:
    """Return whether to iterate in the space of the dimensions rather than of the members.

    Both spaces give slightly different results after a few iterations. Nodes that are padded to one size therefore use
    the same space; otherwise the order of a tree would depend on the other trees in its batch.
    """
    return 1 << (size - 1).bit_length() > dim


def operations_per_key(levels: float) -> float:
    """Estimate the operations of `cluster_keys` per key and dimension, in a tree with this number of levels."""
    return (4 * (ITERATIONS + 1) + 2) * levels


def _operations(size: int, dim: int) -> int:
    """Count the operations of `_principal_coordinate` for one node, without the comparisons of the sort."""
    project = 2 * size * dim if _iterates_in_dimensions(size, dim) else 0
    return 4 * (ITERATIONS + 1) * size * dim + project


def sort_inside_leaf_families(order: Tensor, hierarchy: Hierarchy) -> None:
    """Sort the keys inside each leaf family, where any order would do, by leaf."""
    s = hierarchy.structure
    family = hierarchy.cached("parent of leaf", lambda: torch.as_tensor(s.parent[s.leaf_nodes]).to(order.device))
    by_family = torch.argsort(family, stable=True)
    key = family[by_family] * hierarchy.num_leaves + order[:, by_family]
    order[:, by_family] = key.sort(-1).values % max(hierarchy.num_leaves, 1)


def check_clusters(
    clusters: KeyClusters,
    k: Tensor,
    hierarchy: Hierarchy,
    *,
    near: int = 0,
    positions: Tensor | None = None,
    include_self: bool = True,
    causal: bool = False,
    queries: Queries | None = None,
) -> None:
    """Check that clusters fit keys and hierarchy, and that no other option needs the original order of the keys."""
    if clusters.order.shape != (k.shape[1], len(k)):
        raise InvalidInput(
            "clusters",
            got=f"shape {tuple(clusters.order.shape)}",
            expected=f"an order of shape ({k.shape[1]} key/value heads, {len(k)} leaves)",
            fix="Make it from the same keys with hsa.cluster_keys(k, hierarchy)",
        )
    if clusters.made_for not in (None, hierarchy.digest):
        raise InvalidInput(
            "clusters",
            got="clusters of another one",
            expected="clusters of this hierarchy",
            fix="Make them with hsa.cluster_keys(k, hierarchy)",
        )
    if near != 0:
        raise InvalidInput(
            "near",
            got=near,
            expected="0 with clusters",
            fix="Clustered leaf families have no neighbours; select more of them with top_k",
        )
    if positions is not None:
        raise InvalidInput(
            "positions",
            got="a tensor",
            expected="None with clusters",
            fix="Clustered leaf families have no positions; add positions to q and k",
        )
    if not include_self:
        raise InvalidInput(
            "include_self",
            got=include_self,
            expected="True with clusters",
            fix="A query has no leaf of its own among clustered keys",
        )
    fix = "For causal attention over clustered keys, use hsa.clustered_attention(q, k, v, lengths, causal=True)"
    if causal:
        raise InvalidInput("causal", got=causal, expected="False with clusters", fix=fix)
    if queries is not None and queries.visible is not None:
        raise InvalidInput("queries.visible", got="a tensor", expected="None with clusters", fix=fix)
