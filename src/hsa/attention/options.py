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
from hsa.attention.clustered.layout import BRANCHING, TILE, Shape
from hsa.attention.clustered.operator import clustered_attention
from hsa.attention.clustered.threshold import Threshold, check_threshold
from hsa.attention.hierarchical.operator import hierarchical_attention
from hsa.attention.multiscale.cluster import cluster_keys
from hsa.attention.multiscale.operator import multiscale_attention
from hsa.attention.multiscale.queries import Queries
from hsa.errors import InvalidInput
from hsa.tree.hierarchy import Hierarchy

Kind: TypeAlias = Literal["clustered", "multiscale", "hierarchical"]
DEFAULTS: dict[str, dict[str, Any]] = {
    "clustered": {"branching": (8, 2), "threshold": None, "top_k": 8, "sinks": 1, "tile": 16},
    "multiscale": {"branching": (16, 2), "near": 1, "threshold": None, "top_k": 4, "sinks": 1, "tile": 16},
    "hierarchical": {"branching": (16,), "sinks": 0},
}
"""Options of each kind and their defaults; a kind has no others. Causal attention differs: see `AttentionOptions.tiles`."""

_TREES: OrderedDict[Any, Hierarchy] = OrderedDict()
"""Trees of recent calls: batches of equal lengths recur, and kernels keep their plans with the tree."""
_LOCK = Lock()
_KEPT_LEAVES = 2**18
"""Maximum number of leaves of all kept trees; a tree and its plans take up to 500 bytes per leaf."""


@dataclass(frozen=True)
class AttentionOptions:
    """Kind of attention, shape of the tree and selection, as they were passed; None for a default. `of` checks them.

    Args:
        kind: "clustered" (groups of similar keys), "multiscale" (windows of consecutive keys) or "hierarchical" (the paper's
            operator over such windows; not causal).
        branching: Family sizes from the leaves up. The last one repeats up to the root.
        near: For "multiscale": number of neighbouring leaf families on each side that are exact.
        threshold: Share of a query's attention from which a group is exact, in causal attention, or one per query head.
        top_k: For "clustered" and "multiscale": number of leaf families that are exact because the queries score them best.
        sinks: Number of first tokens that hang directly under the root, so that every query attends to them exactly.
        tile: For "clustered" and "multiscale": number of consecutive queries that share a selection in self-attention.
            Queries of another sequence share none: that would leak.

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
    branching: tuple[int, ...] | None = None
    near: int | None = None
    threshold: Threshold | None = None
    top_k: int | None = None
    sinks: int | None = None
    tile: int | None = None

    @classmethod
    def of(cls, kind: Kind, **given: Any) -> AttentionOptions:
        """Check the options that are not None, each on its own."""
        if kind not in DEFAULTS:
            raise InvalidInput("kind", expected=f"one of {', '.join(map(repr, DEFAULTS))}", got=repr(kind))
        values: dict[str, Any] = {}
        for name, value in given.items():
            if value is None:
                continue
            if name not in DEFAULTS[kind]:
                able = " and ".join(repr(other) for other, options in DEFAULTS.items() if name in options)
                raise InvalidInput(name, expected=f"no value, as {name} is an option of kind {able}", got=repr(value))
            minimum = 1 if name == "tile" or (name, kind) == ("top_k", "clustered") else 0
            if name == "branching":
                values[name] = check_branching(value)
            elif name == "threshold":
                values[name] = check_threshold(value)
            else:
                values[name] = check_count(name, value, f"an integer of at least {minimum}", minimum)
        return cls(kind, **values)

    def tiles(self) -> dict[str, Any] | None:
        """Return the options of `clustered_attention` for causal attention; None if that is multiscale attention.

        Kind "multiscale" uses windows with a `threshold` or `top_k`, and otherwise selects neighbouring families only.
        """
        windows = self.kind == "multiscale"
        if self.kind == "hierarchical" or (windows and self.threshold is None and not self.top_k):
            return None
        for name, value, usual in (("sinks", self.sinks, 1), ("near", self.near, None)):
            if value not in (None, usual):
                raise InvalidInput(
                    name,
                    expected=f"no value in causal attention that selects groups of kind {self.kind!r}",
                    got=value,
                    fix="There the group of the first token and the chunk of each query are always exact",
                )
        shape = Shape.of(self.branching or BRANCHING, self.tile or TILE, causal=True)
        rule = {"threshold": self.threshold, "top_k": self.top_k}
        return {"windows": windows, "branching": shape.branching, "tile": shape.tile, **rule}

    @torch.compiler.disable
    def tree(self, lengths: Sequence[int], device: torch.device | str) -> Hierarchy:
        """Return the tree of every sequence, from a cache if the same was built before."""
        branching, sinks = self._value("branching"), self._value("sinks")
        key = (tuple(lengths), branching, sinks, str(device))
        with _LOCK:
            if key in _TREES:
                _TREES.move_to_end(key)
                return _TREES[key]
        tree = Hierarchy.regular(lengths, branching, repeat_last=True, sinks=sinks).to(device)
        with _LOCK:
            _TREES[key] = tree
            while sum(kept.num_leaves for kept in _TREES.values()) > _KEPT_LEAVES and len(_TREES) > 1:
                _TREES.popitem(last=False)
        return tree

    def _value(self, name: str) -> Any:
        """Return an option, or its default."""
        given = getattr(self, name)
        return DEFAULTS[self.kind].get(name) if given is None else given

    def forest(self, sequences: Hierarchy | Sequence[int], device: torch.device) -> Hierarchy:
        """Return a given forest, or build one for sequences of these lengths. Clustered keys need their own."""
        if isinstance(sequences, Hierarchy):
            if self.kind != "clustered":
                return sequences
            sequences = sequences.lengths
        return self.tree(sequences, device)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: Hierarchy | Sequence[int],
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
            sequences: Forest of the keys, or the lengths of their sequences.
            queries: Groups of queries that are not the leaves; see `cross_queries`.
        """
        if self.kind == "hierarchical":
            self.check_hierarchical(queries, causal, dropout_p, instead="Use kind='clustered' or kind='multiscale'")
            return hierarchical_attention(q, k, v, self.forest(sequences, k.device), scale=scale)
        if causal and (tiles := self.tiles()) is not None:
            lengths = sequences.lengths if isinstance(sequences, Hierarchy) else sequences
            return clustered_attention(q, k, v, lengths, causal=True, scale=scale, dropout_p=dropout_p, **tiles)
        if self.threshold is not None:
            raise InvalidInput(
                "threshold",
                expected="no value without causality",
                got=self.threshold,
                fix="Pass is_causal=True for causal attention, or select groups with top_k",
            )
        tree = self.forest(sequences, k.device)
        top_k = 0 if causal else self._value("top_k")
        if queries is None and top_k > 0:
            queries = Queries.windows(tree, self._value("tile"))
        return multiscale_attention(
            q,
            k,
            v,
            tree,
            near=self._value("near") or 0,
            top_k=top_k,
            clusters=cluster_keys(k, tree) if self.kind == "clustered" else None,
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
