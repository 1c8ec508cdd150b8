"""Backend "reference": the definition, one query, head and node at a time. Slow; to be read and to test the others."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hsa.attention.multiscale.call import MultiscaleCall, SelectCall
from hsa.attention.normalizers import Entmax
from hsa.tree.hierarchy import Hierarchy


def attend(call: MultiscaleCall) -> Tensor:
    """Compute `hsa.multiscale_attention` from checked arguments."""
    q, k, v, hierarchy, clusters, positions = call.q, call.k, call.v, call.hierarchy, call.clusters, call.positions
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads, group_of_heads = q.shape[1], q.shape[1] // k.shape[1]
    queries, families = call.selection.queries, call.selection.families
    out = []
    for i in range(len(q)):
        group = int(queries.group[i])
        leaf = None if queries.leaves is None else int(queries.leaves[i])
        similarities, biases, averages, counts, alphas = [], [], [], [], []
        for h in range(heads):
            kv_head = h // group_of_heads
            keys, values = k[:, kv_head].to(dtype), v[:, kv_head].to(dtype)
            order = list(range(len(k))) if clusters is None else clusters.order[kv_head].tolist()
            selected = families[group, min(h, families.shape[1] - 1)].tolist()
            logits, bias, means, count, alpha = [], [], [], [], []
            for node in list_of_nodes(hierarchy, int(queries.tree[group]), selected):
                members = order[_leaf_slice(hierarchy, node)]
                if call.limit is not None and max(members) >= int(call.limit[i]):
                    continue
                is_leaf = hierarchy.structure.num_children[node] == 0
                if is_leaf and members == [leaf] and not call.include_self:
                    continue
                logit = call.scale * (q[i, h].to(dtype) @ keys[members].mean(0))
                if positions is not None:
                    assert leaf is not None
                    own, other = _highest_distinct(hierarchy, int(hierarchy.structure.leaf_nodes[leaf]), node)
                    position = positions[:, min(h, positions.shape[1] - 1)].to(dtype)
                    logit = logit + position[own] @ position[other]
                more = logit.new_zeros(())
                if not is_leaf and call.pooled_bias is not None:
                    more = more + call.pooled_bias[min(h, len(call.pooled_bias) - 1)].to(dtype)
                logits.append(logit)
                bias.append(more)
                count.append(len(members))
                if call.entmax is not None:
                    alpha.append(_alpha(call.entmax, hierarchy, node, h, dtype))
                means.append(values[members].mean(0))
            similarities.append(logits)
            biases.append(bias)
            averages.append(means)
            counts.append(count)
            alphas.append(alpha)
        nothing = v.new_zeros(v.shape[-1], dtype=dtype)
        if call.mixing is not None and similarities[0]:  # all heads have the same list
            mixed = call.mixing.logits.to(dtype) @ torch.stack([torch.stack(x) for x in similarities])
            similarities = [list(x) for x in mixed]
        weights = []
        for logits, bias, count, alpha in zip(similarities, biases, counts, alphas, strict=True):
            z = [x + b for x, b in zip(logits, bias, strict=True)]
            if call.entmax is None or call.entmax.counts == "logits":
                z, count = [x + math.log(n) for x, n in zip(z, count, strict=True)], [1] * len(z)
            weights.append(_softmax(z) if call.entmax is None else _entmax(z, count, alpha))
        if call.mixing is not None and weights[0]:
            weights = [list(w) for w in call.mixing.weights.to(dtype) @ torch.stack([torch.stack(w) for w in weights])]
        row = [_average(w, means, nothing, call.dropout_p) for w, means in zip(weights, averages, strict=True)]
        out.append(torch.stack(row))
    return torch.stack(out).to(q.dtype) if out else q.new_empty(0, heads, v.shape[-1])


def _softmax(logits: list[Tensor]) -> list[Tensor]:
    """Return the softmax of the logits, 0 for logits of −∞ (also if all are)."""
    visible = [z for z in logits if z > -math.inf]
    weights = iter(torch.stack(visible).softmax(0) if visible else ())
    return [next(weights) if z > -math.inf else torch.zeros_like(z) for z in logits]


def _entmax(logits: list[Tensor], counts: list[int], alphas: list[Tensor]) -> list[Tensor]:
    """Return p = n u₊^{1/(α − 1)}, u = 1 + (α − 1)(z + 1 − 1/α − c), with the c for which they sum to 1.

    Bisection determines c; one Newton step from there gives it its gradient.
    """
    levelled = [z + (1 - 1 / a) for z, a in zip(logits, alphas, strict=True)]
    numbers = [(z.item(), n, a.item()) for z, n, a in zip(levelled, counts, alphas, strict=True) if z > -math.inf]
    if not numbers:
        return [torch.zeros_like(z) for z in logits]

    def total(c: float, power: int) -> float:
        """Return Σ n u₊^{1/(α − 1) − power}: the sum of the weights (power 0) or minus its derivative (power 1)."""
        inside = ((n, (a - 1) * (z - c), a) for z, n, a in numbers)
        return sum(n * math.exp(math.log1p(x) * (1 / (a - 1) - power)) for n, x, a in inside if x > -1)

    low = max(z for z, _, _ in numbers)  # here the weight of one entry alone is 1 or more
    high = low + math.log(sum(counts))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if total(middle, 0) >= 1 else (low, middle)

    def weights(c: float | Tensor) -> list[Tensor]:
        inside = [(a - 1) * (z - c) for z, a in zip(levelled, alphas, strict=True)]
        return [
            n * (x.log1p() / (a - 1)).exp() if x > -1 else torch.zeros_like(x)
            for x, n, a in zip(inside, counts, alphas, strict=True)
        ]

    return weights(low + (torch.stack(weights(low)).sum() - 1) / total(low, 1))


def _alpha(normalizer: Entmax, hierarchy: Hierarchy, node: int, head: int, dtype: torch.dtype) -> Tensor:
    """Return α at the height of the family that the node belongs to."""
    height = int(hierarchy.structure.height[hierarchy.structure.parent[node]])
    row = normalizer.at_height(height, dtype).reshape(-1)
    return row[min(head, len(row) - 1)]


def _average(weights: list[Tensor], means: list[Tensor], nothing: Tensor, dropout_p: float) -> Tensor:
    return F.dropout(torch.stack(weights), dropout_p) @ torch.stack(means) if means else nothing


def list_of_nodes(hierarchy: Hierarchy, node: int, selected: list[int]) -> list[int]:
    """Return the leaves of the selected families and the largest nodes that contain none, below `node`."""
    s = hierarchy.structure
    nodes = []
    for child in range(int(s.first_child[node]), int(s.first_child[node]) + int(s.num_children[node])):
        if any(_is_below(hierarchy, parent, child) for parent in selected):
            nodes += list_of_nodes(hierarchy, child, selected)
        else:
            nodes.append(child)
    return nodes


def _is_below(hierarchy: Hierarchy, node: int, ancestor: int) -> bool:
    """Return whether `node` is `ancestor` or lies below it."""
    while node >= 0 and node != ancestor:
        node = int(hierarchy.structure.parent[node])
    return node >= 0


def _leaf_slice(hierarchy: Hierarchy, node: int) -> slice:
    first = int(hierarchy.structure.first_leaf[node])
    return slice(first, first + int(hierarchy.structure.leaf_count[node]))


def _highest_distinct(hierarchy: Hierarchy, a: int, b: int) -> tuple[int, int]:
    """Return the first nodes in which the paths from the root to `a` and `b` differ."""

    def path(node: int) -> list[int]:
        above = int(hierarchy.structure.parent[node])
        return [*path(above), node] if above >= 0 else [node]

    for x, y in zip(path(a), path(b), strict=False):
        if x != y:
            return x, y
    return a, b  # the same leaf


def select(call: SelectCall) -> list[list[list[int]]]:
    """Return the `top_k` best leaf families outside the neighbourhood, by group and head."""
    q, k, hierarchy, clusters, positions = call.q, call.k, call.hierarchy, call.clusters, call.positions
    s = hierarchy.structure
    group_of_heads = q.shape[1] // k.shape[1]
    queries = call.queries
    result: list[list[list[int]]] = []
    for g in range(queries.num_groups):
        rows = range(int(queries.offsets[g]), int(queries.offsets[g + 1]))
        per_head = []
        for h in range(q.shape[1]):
            kv_head = h // group_of_heads
            order = list(range(len(k))) if clusters is None else clusters.order[kv_head].tolist()
            selected = call.neighbourhood.nodes[g, 0].tolist()
            candidates = [
                node
                for node in _leaf_family_parents(hierarchy)
                if s.tree[node] == int(queries.tree[g])
                and not any(_is_below(hierarchy, parent, node) for parent in selected if parent >= 0)
            ]
            score = dict.fromkeys(candidates, -1.0)
            for i in rows:
                logits = {}
                for node in candidates:
                    members = order[_leaf_slice(hierarchy, node)]
                    if call.limit is not None and max(members) >= int(call.limit[i]):
                        continue
                    logit = call.scale * (q[i, h] @ k[members, kv_head].mean(0)) + math.log(len(members))
                    if positions is not None:
                        leaf = int(s.leaf_nodes[int(queries.leaves[i])])  # type: ignore[index]
                        own, other = _highest_distinct(hierarchy, leaf, node)
                        position = positions[:, min(h, positions.shape[1] - 1)]
                        logit = logit + position[own] @ position[other]
                    logits[node] = logit
                if logits:
                    weights = torch.stack(list(logits.values())).softmax(0)
                    for node, weight in zip(logits, weights.tolist(), strict=True):
                        score[node] = max(score[node], 0.0) + weight
            best = sorted((n for n in candidates if score[n] >= 0), key=lambda n: -score[n])
            per_head.append(best[: call.top_k])
        result.append(per_head)
    return result


def _leaf_family_parents(hierarchy: Hierarchy) -> list[int]:
    """Return the parents of the leaf families below the roots, by first leaf."""
    s = hierarchy.structure
    parents = [int(s.parent[node]) for node in s.leaf_nodes]
    return list(dict.fromkeys(p for p in parents if s.parent[p] >= 0))
