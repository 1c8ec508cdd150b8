"""Options of attention over sequences that come without a tree: how the tree is built and what is exact."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from hsa.attention.checks import check_count
from hsa.attention.chunks import check_chunk, default_chunk
from hsa.attention.hierarchical.operator import hierarchical_attention
from hsa.attention.multiscale.cluster import cluster_keys
from hsa.attention.multiscale.operator import multiscale_attention
from hsa.attention.multiscale.queries import Queries
from hsa.errors import InvalidInput
from hsa.tree.hierarchy import Hierarchy

Kind: TypeAlias = Literal["clustered", "multiscale", "hierarchical"]
DEFAULTS: dict[str, dict[str, Any]] = {
    "clustered": {"branching": (8, 2), "top_k": 8, "sinks": 1, "tile": 16, "chunk": None},
    "multiscale": {"branching": (16, 2), "near": 1, "top_k": None, "sinks": 1, "tile": 16},
    "hierarchical": {"branching": (16,), "sinks": 0},
}
"""Options of each kind and their defaults; a kind has no others."""
MULTISCALE_TOP_K = 4
"""Default of `top_k` for "multiscale". Causal attention has 0 instead: there each query would need its own selection."""

_TREES: OrderedDict[Any, Hierarchy] = OrderedDict()
"""Trees of recent calls: batches of equal lengths recur, and kernels keep their plans with the tree."""
_LOCK = Lock()
_KEPT_LEAVES = 2**18
"""Maximum number of leaves of all kept trees; a tree and its plans take up to 500 bytes per leaf."""


@dataclass(frozen=True)
class AttentionOptions:
    """Kind of attention, shape of the tree and selection; `of` fills in defaults and checks.

    Args:
        kind: "clustered" (multiscale attention over clustered keys), "multiscale" (over windows of consecutive keys) or
            "hierarchical" (the paper's operator over such windows; not causal).
        branching: Family sizes from the leaves up. The last one repeats up to the root.
        near: For "multiscale": number of neighbouring leaf families on each side that are exact.
        top_k: For "clustered" and "multiscale": number of leaf families that are exact because the queries score them best.
        sinks: Number of first tokens that hang directly under the root, so that every query attends to them exactly.
        tile: For "clustered" and "multiscale": number of consecutive queries that share a selection in self-attention.
            Causal queries that select by score, and queries of another sequence, share none: that would leak.
        chunk: For "clustered": number of tokens whose keys are clustered together in causal attention.

    >>> options = AttentionOptions.of("multiscale", branching=(4, 2), sinks=0)
    >>> print(options.tree([10], "cpu").show())
    tree 0 · 10 leaves
    ├─ 2 members · 8 leaves
    │  ├─ 4 leaves
    │  └─ 4 leaves
    └─ 1 member · 2 leaves
       └─ 2 leaves
    """

    kind: Kind
    branching: tuple[int, ...]
    near: int = 0
    top_k: int | None = 0
    sinks: int = 0
    tile: int = 1
    chunk: int | None = None

    @classmethod
    def of(cls, kind: Kind, **given: Any) -> AttentionOptions:
        """Check the options that are not None and take the defaults of the kind for the others."""
        if kind not in DEFAULTS:
            raise InvalidInput("kind", expected=f"one of {', '.join(map(repr, DEFAULTS))}", got=repr(kind))
        defaults = DEFAULTS[kind]
        values = dict(defaults)
        for name, value in given.items():
            if value is None:
                continue
            if name not in defaults:
                able = " and ".join(repr(other) for other, options in DEFAULTS.items() if name in options)
                raise InvalidInput(name, expected=f"no value, as {name} is an option of kind {able}", got=repr(value))
            minimum = 1 if name in ("tile", "chunk") or (name, kind) == ("top_k", "clustered") else 0
            is_tree = name == "branching"
            expected = f"an integer of at least {minimum}"
            values[name] = check_branching(value) if is_tree else check_count(name, value, expected, minimum)
        if kind == "clustered":
            values["chunk"] = values["chunk"] or default_chunk(values["branching"])
            check_chunk(values["chunk"], values["branching"])
        return cls(kind, **values)

    @torch.compiler.disable
    def tree(self, lengths: Sequence[int], device: torch.device | str) -> Hierarchy:
        """Return the tree of every sequence, from a cache if the same was built before."""
        key = (tuple(lengths), self.branching, self.sinks, str(device))
        with _LOCK:
            if key in _TREES:
                _TREES.move_to_end(key)
                return _TREES[key]
        tree = Hierarchy.regular(lengths, self.branching, repeat_last=True, sinks=self.sinks).to(device)
        with _LOCK:
            _TREES[key] = tree
            while sum(kept.num_leaves for kept in _TREES.values()) > _KEPT_LEAVES and len(_TREES) > 1:
                _TREES.popitem(last=False)
        return tree

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tree: Hierarchy,
        *,
        queries: Queries | None = None,
        causal: bool = False,
        scale: float | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """Attend over packed tensors.

        Args:
            q: `[queries, heads, dim]`.
            k, v: `[leaves, kv_heads, dim]`.
            tree: Forest of the keys.
            queries: Groups of queries that are not the leaves; see `cross_queries`.
        """
        if self.kind == "hierarchical":
            self.check_hierarchical(queries, causal, dropout_p, instead="Use kind='clustered' or kind='multiscale'")
            return hierarchical_attention(q, k, v, tree, scale=scale)
        top_k = self.top_k
        if top_k is None:
            top_k = 0 if causal else MULTISCALE_TOP_K
        clusters = cluster_keys(k, tree, chunk=self.chunk if causal else None) if self.kind == "clustered" else None
        if queries is None and top_k > 0 and not causal:
            queries = Queries.windows(tree, self.tile)
        return multiscale_attention(
            q,
            k,
            v,
            tree,
            near=self.near,
            top_k=top_k,
            clusters=clusters,
            queries=queries,
            causal=causal,
            scale=scale,
            dropout_p=dropout_p,
        )

    @staticmethod
    def check_hierarchical(queries: Queries | None, causal: bool, dropout_p: float, *, instead: str) -> None:
        if causal:
            raise InvalidInput(
                "is_causal",
                expected="False for hierarchical attention, whose rows are tied so that earlier tokens see later ones",
                got="True",
                fix=instead,
            )
        if queries is not None:
            raise InvalidInput(
                "key",
                expected="the tokens of query: hierarchical attention is self-attention",
                got="other tokens",
                fix=instead,
            )
        if dropout_p:
            raise InvalidInput("dropout_p", expected="0 for hierarchical attention", got=dropout_p, fix=instead)


@torch.compiler.disable
def cross_queries(
    lengths: Sequence[int], device: torch.device | str, *, tile: int = 1, trees: Sequence[int] | None = None
) -> Queries:
    """Group queries that are not leaves: runs of them, one after another, in tiles that share a selection.

    Args:
        lengths: Number of queries of each run.
        device: Device of the forest.
        tile: Number of queries per tile. The queries of a decoder need a selection each: a shared one would leak later
            queries.
        trees: Tree that each run attends to; by default tree i for run i.

    >>> cross_queries([5, 2], "cpu", tile=3).offsets.tolist()
    [0, 3, 5, 7]
    """
    offsets, tree, start = [0], [], 0
    for i, length in zip(range(len(lengths)) if trees is None else trees, lengths, strict=True):
        ends = [*range(start + tile, start + length, tile), start + length] if length else []
        offsets += ends
        tree += [i] * len(ends)
        start += length
    return Queries(torch.tensor(offsets, device=device), torch.tensor(tree, device=device, dtype=torch.long))


def check_branching(branching: Any) -> tuple[int, ...]:
    """Return the factors of a tree of windows as a tuple of integers of at least 2."""
    if not isinstance(branching, Iterable) or isinstance(branching, str) or not (factors := tuple(branching)):
        raise InvalidInput("branching", expected="family sizes from the leaves up, such as (8, 2)", got=repr(branching))
    return tuple(check_count(f"branching[{i}]", b, "an integer of at least 2", 2) for i, b in enumerate(factors))
