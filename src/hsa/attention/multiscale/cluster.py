"""Clustered keys: an order of the keys, per head, under which a given tree groups similar keys.

Top down, the keys below a node are sorted along their first principal direction and handed to its children from left to
right, each taking as many as it has leaves; with two children that is a split at the median. The tree stays the same, only
the keys at its leaves are permuted, per key/value head. Leaves directly under a root (sinks) keep their key.

Causal use: keys move only inside *chunks* of consecutive keys that are complete, so that nothing later than a chunk's last
key shapes its order.

Precedents: Reformer (hashed buckets), the Routing Transformer (k-means), clustered key–value caches, Quest (pages by
bounds). New here is the tree, whose pooled remainder keeps every key's mass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from hsa.attention import dispatch
from hsa.attention.call import Call
from hsa.attention.checks import check_count, check_inputs
from hsa.attention.dispatch import Backend
from hsa.attention.kernels import available
from hsa.errors import InvalidInput
from hsa.tree.hierarchy import Hierarchy

ITERATIONS = 3
"""Power iterations for a principal direction, after a first product; a rough direction splits as well as an exact one."""


@dataclass(frozen=True, eq=False)
class KeyClusters:
    """An order of the keys of each head, from `cluster_keys`.

    Attributes:
        order: `[kv_heads, leaves]`: `order[head, slot]` is the leaf whose key sits at that leaf slot of the tree.
        chunk: keys per chunk inside which keys may move; None: the whole tree.
        operations: multiplications and additions of the power iterations, key by key, all heads together. A GPU may do
            more of them where matrix products are cheaper.
        made_for: digest of the hierarchy.
    """

    order: Tensor
    chunk: int | None = None
    operations: int = 0
    made_for: str | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class ClusterCall(Call):
    """A call of `cluster_keys`, checked."""

    chunk: int | None


@torch.no_grad()
@torch.compiler.disable
def cluster_keys(
    k: Float[Tensor, "leaves kv_heads dim"], hierarchy: Hierarchy, *, chunk: int | None = None, backend: str = "auto"
) -> KeyClusters:
    """Order the keys so that similar ones lie below the same nodes, for `select` and `multiscale_attention`.

    Deterministic, O(N log N) per level of a balanced tree such as `Hierarchy.regular(lengths, (8, 2), repeat_last=True)`.

    Args:
        k: one key per leaf.
        hierarchy: the tree to fill.
        chunk: for causal use: keys (sinks not counted) per chunk; keys move only inside complete chunks.
        backend: "auto", "triton" (CUDA) or "torch". Both give the same order where keys differ clearly.

    >>> k = torch.tensor([0.0, 9.5, 1.0, 8.0, 2.0, 7.0])[:, None, None]
    >>> cluster_keys(k, Hierarchy.regular([6], (3,))).order.tolist()
    [[0, 2, 4, 1, 3, 5]]
    """
    check_inputs({"k": k}, hierarchy)
    if chunk is not None:
        chunk = check_count("chunk", chunk, "a positive number of keys, or None", minimum=1)
    call = ClusterCall(k=k, hierarchy=hierarchy, chunk=chunk, backend=backend)
    order = dispatch.run("cluster_keys", CLUSTER, call)
    return KeyClusters(order, chunk, _all_operations(k, hierarchy, chunk), hierarchy.digest)


def _cluster_torch(call: ClusterCall) -> Tensor:
    """[kv_heads, leaves] the leaf whose key sits at each leaf slot."""
    k, hierarchy = call.k, call.hierarchy
    heads, dim = k.shape[1:]
    dtype = torch.promote_types(k.dtype, torch.float32)
    keys = k.to(dtype).reshape(-1, dim)  # [leaves · heads, dim]
    head = torch.arange(heads, device=k.device)[:, None]
    order = torch.arange(hierarchy.num_leaves, device=k.device).expand(heads, -1).contiguous()
    for slots, present in _levels(hierarchy, call.chunk):
        nodes, size = slots.shape
        leaves = order[:, slots.flatten()].view(heads, nodes, size)
        rows = leaves.view(heads, -1) * heads + head
        members = keys.index_select(0, rows.flatten()).view(heads, nodes, size, dim)
        coordinate = _principal_coordinate(members, present)
        # Equal coordinates keep the order of the leaves; padding stays at the end.
        if present is not None:
            coordinate = coordinate.masked_fill(~present, torch.inf)
        moved = leaves.gather(-1, coordinate.sort(dim=-1, stable=True).indices)
        if present is None:
            order[:, slots.flatten()] = moved.flatten(1)
        else:
            order[:, slots[present]] = moved[:, present]
    sort_inside_leaf_families(order, hierarchy)
    return order


def _cluster_triton(call: ClusterCall) -> Tensor:
    from hsa.attention.multiscale.triton.cluster import cluster_keys

    with available.device_of(call.k):
        return cluster_keys(call.k, call.hierarchy, call.chunk)


def _why_not_triton(call: ClusterCall) -> list[str]:
    return available.why_not(call.k, call.k, call.backend, widest=available.WIDEST_CLUSTERED)


CLUSTER = (Backend("triton", _cluster_triton, _why_not_triton), Backend("torch", _cluster_torch))


def _all_operations(k: Tensor, hierarchy: Hierarchy, chunk: int | None) -> int:
    heads, dim = k.shape[1:]

    def count() -> int:
        _, begin, end, useful = nodes_to_sort(hierarchy, chunk)
        sizes, nodes = np.unique((end - begin)[useful], return_counts=True)
        return sum(int(n) * _operations(int(size), dim) for size, n in zip(sizes, nodes, strict=True))

    return heads * hierarchy.cached(("clustering", chunk, dim), count)


def chunk_of_leaf(hierarchy: Hierarchy, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the chunk of every leaf, numbered through all trees, and which chunks are complete.

    Sinks do not count; a sink belongs to the chunk in progress where it stands.
    """

    def build() -> tuple[np.ndarray, np.ndarray]:
        s = hierarchy.structure
        movable = s.depth[s.leaf_nodes] > 1
        before = np.cumsum(movable) - movable
        tree = s.tree[s.leaf_nodes]
        start = np.append(before, movable.sum())[s.leaf_offsets]
        number = (before - start[tree]) // chunk
        per_tree = np.zeros(hierarchy.num_trees, np.int64)
        np.maximum.at(per_tree, tree, number + 1)
        number += (np.cumsum(per_tree) - per_tree)[tree]
        return number, np.bincount(number[movable], minlength=int(per_tree.sum())) == chunk

    return hierarchy.cached(("chunks", chunk), build)


def nodes_to_sort(hierarchy: Hierarchy, chunk: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the leaf slots whose keys may move; for every node, begin and end among them, and whether its keys are sorted.

    A node with one child, or whose children are all leaves, needs no sorting; a root's sinks take no part.
    """
    s = hierarchy.structure
    movable = s.depth[s.leaf_nodes] > 1
    slots_before = np.concatenate([[0], np.cumsum(movable)])
    slots = np.flatnonzero(movable)
    begin, end = slots_before[s.first_leaf], slots_before[s.end_leaf]
    useful = (s.height > 1) & (s.num_children > 1) & (end > begin)
    if chunk is not None:
        number, complete = chunk_of_leaf(hierarchy, chunk)
        of_slot = number[slots] if len(slots) else np.zeros(1, np.int64)
        first = of_slot[np.minimum(begin, len(of_slot) - 1)]
        last = of_slot[np.maximum(end - 1, 0)]
        useful &= (first == last) & complete[first]
    return slots, begin, end, useful


def _levels(hierarchy: Hierarchy, chunk: int | None) -> list[tuple[Tensor, Tensor | None]]:
    """Per depth and size, from the root down: leaf slots of the nodes to sort, and which are real (None: all)."""

    def build() -> list[tuple[Tensor, Tensor | None]]:
        s = hierarchy.structure
        slots, begin, end, useful = nodes_to_sort(hierarchy, chunk)
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

    return hierarchy.cached(("key levels", chunk), build)


def _principal_coordinate(members: Tensor, present: Tensor | None) -> Tensor:
    """`[…, size]` coordinates along the direction of largest spread, by power iteration. Overwrites the members.

    The iteration runs in the smaller of two spaces: of the dimensions, or of the members, where the leading vector is the
    coordinate itself.
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
    # A fixed start with no pattern in it, so that no spread is orthogonal to it.
    start = torch.arange(1, (dim if in_dimensions else size) + 1, device=members.device, dtype=torch.float64)
    direction = second @ (first @ start.mul(2.4).cos().to(members.dtype)[:, None])
    for _ in range(ITERATIONS):
        length = direction.norm(dim=-2, keepdim=True)
        direction = second @ (first @ (direction / torch.where(length > 0, length, torch.ones_like(length))))
    coordinate = (centred @ direction if in_dimensions else direction).squeeze(-1)
    # A direction and its opposite split alike: let the member farthest out be at the end.
    farthest = coordinate.gather(-1, coordinate.abs().argmax(-1, keepdim=True))
    return coordinate * farthest.sign()


def _iterates_in_dimensions(size: int, dim: int) -> bool:
    """Return which space is the smaller one; the same for all sizes that are padded together.

    A few iterations in one space differ from as many in the other: trees would depend on the others in their batch.
    """
    return 1 << (size - 1).bit_length() > dim


def operations_per_key(levels: float) -> float:
    """Estimate the operations of `cluster_keys` per key and dimension, in a tree with this number of levels."""
    return (4 * (ITERATIONS + 1) + 2) * levels


def _operations(size: int, dim: int) -> int:
    """Operations of `_principal_coordinate` for one node; comparisons of the sort are not counted."""
    project = 2 * size * dim if _iterates_in_dimensions(size, dim) else 0
    return 4 * (ITERATIONS + 1) * size * dim + project


def sort_inside_leaf_families(order: Tensor, hierarchy: Hierarchy) -> None:
    """Put the keys inside each leaf family, where their order is free, in the order of the leaves."""
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
) -> None:
    """Check that the order fits keys and hierarchy, and that no option needs the neighbours that keys have lost."""
    if clusters.order.shape != (k.shape[1], len(k)):
        raise InvalidInput(
            "clusters",
            given=f"shape {tuple(clusters.order.shape)}",
            expected=f"[{k.shape[1]} key/value heads, {len(k)} leaves]",
            fix="make them from the same keys with hsa.cluster_keys(k, hierarchy)",
        )
    if clusters.made_for not in (None, hierarchy.digest):
        raise InvalidInput(
            "clusters",
            given="clusters made for another hierarchy",
            expected="clusters for this one",
            fix="make them with hsa.cluster_keys(k, hierarchy)",
        )
    reasons = {
        "near": (near != 0, "neighbours", "near=0; select more with top_k"),
        "positions": (positions is not None, "positions", "positions=None; put positions into q and k"),
        "include_self": (not include_self, "an own leaf", "include_self=True"),
    }
    for name, (bad, what, expected) in reasons.items():
        if bad:
            raise InvalidInput(
                name,
                given="a value together with clusters",
                expected=expected,
                fix=f"clustered leaf families have no {what}",
            )


def check_chunked(clusters: KeyClusters | None, limit: Tensor | None) -> None:
    """Check that clusters are chunked where queries may see only some of the keys."""
    if clusters is not None and limit is not None and clusters.chunk is None:
        raise InvalidInput(
            "clusters",
            given="clusters of whole trees, for queries that may see only some of the keys",
            expected="clusters inside complete chunks",
            fix="use cluster_keys(k, hierarchy, chunk=256)",
        )
