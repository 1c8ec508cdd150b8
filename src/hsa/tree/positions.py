"""`NodePositions`: the position of every node of a forest in its family, as tensors.

Few positions are distinct (the seventh words of all sentences have the same position), so a position embedding is computed
once for each distinct position and looked up for each node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hsa.tree.hierarchy import Hierarchy

KINDS = ("sequence", "grid", "graph", "table")
"""Kinds of domains whose members have positions. Members of a set have none."""


@dataclass(frozen=True, eq=False)
class Coordinates:
    """Positions of the members of one domain: one row of numbers or one key per member; nothing for a set."""

    kind: str | None
    numbers: np.ndarray | None = None  # [members, width]
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class NodePositions:
    """Distinct positions of each kind, and the position of every node.

    Attributes:
        row: Index of every node's position, `[nodes]`: 0 for nodes without a position (roots, members of sets), else 1 +
            the index among the distinct positions of all kinds, one kind after another in the order of `KINDS`.
        numbers: Distinct positions by kind, `[positions, width]`: "sequence" (the index), "grid" (an index per axis),
            "graph" (features).
        keys: Distinct keys of tables.
    """

    row: Tensor
    numbers: dict[str, Tensor]
    keys: tuple[str, ...]

    def to(self, device: torch.device | str) -> NodePositions:
        return NodePositions(
            self.row.to(device), {kind: numbers.to(device) for kind, numbers in self.numbers.items()}, self.keys
        )

    def keep(self, nodes: Tensor) -> NodePositions:
        """Return the positions of some of the nodes."""
        return replace(self, row=self.row[nodes])

    @staticmethod
    def of_sequences(hierarchy: Hierarchy) -> NodePositions:
        """Return the positions of a forest in which every family is a sequence.

        >>> NodePositions.of_sequences(Hierarchy.flat([3, 2])).row.tolist()
        [0, 0, 1, 2, 3, 1, 2]
        """

        def build() -> NodePositions:
            s = hierarchy.structure
            above = s.parent[hierarchy.num_trees :]
            member = np.arange(hierarchy.num_trees, hierarchy.num_nodes) - s.first_child[above]
            row = np.concatenate([np.zeros(hierarchy.num_trees, np.int64), member + 1])
            index = np.arange(row.max(initial=0), dtype=np.float32)[:, None]
            return NodePositions(torch.from_numpy(row), {"sequence": torch.from_numpy(index)}, ()).to(hierarchy.device)

        return hierarchy.cached("sequence positions", build)

    @staticmethod
    def merge(
        domains: Sequence[Coordinates], domain: np.ndarray, member: np.ndarray, hierarchy: Hierarchy
    ) -> NodePositions:
        """Return the positions of a forest, given those of its domains.

        Args:
            domains: Distinct domains.
            domain: Domain of the family of every node except the roots, `[nodes - roots]`.
            member: Index of every node except the roots in its family, `[nodes - roots]`.
        """
        distinct: dict[str, list[np.ndarray]] = {}
        keys: dict[str, int] = {}
        local: list[np.ndarray] = []  # rows of each domain among the distinct positions of its kind
        longest = 0
        for coordinates in domains:
            if coordinates.kind is None:
                local.append(np.empty(0, np.int64))
            elif coordinates.kind == "table":
                local.append(np.array([keys.setdefault(key, len(keys)) for key in coordinates.keys], np.int64))
            elif coordinates.numbers is not None and coordinates.kind == "sequence":
                longest = max(longest, len(coordinates.numbers))
                local.append(np.arange(len(coordinates.numbers)))
            elif coordinates.numbers is not None:
                listed = distinct.setdefault(coordinates.kind, [])
                local.append(sum(map(len, listed)) + np.arange(len(coordinates.numbers)))
                listed.append(coordinates.numbers)
        if longest:
            distinct["sequence"] = [np.arange(longest)[:, None]]
        numbers = {kind: np.concatenate(distinct[kind]).astype(np.float32) for kind in KINDS if kind in distinct}
        first, total = {}, 1
        for kind in KINDS:
            first[kind] = total
            total += len(keys) if kind == "table" else len(numbers.get(kind, ()))
        rows = [
            np.zeros(1, np.int64) if coordinates.kind is None else first[coordinates.kind] + row
            for coordinates, row in zip(domains, local, strict=True)
        ]
        begin = np.cumsum([0, *map(len, rows)])[:-1]
        is_set = np.array([coordinates.kind is None for coordinates in domains], bool)
        table = np.concatenate(rows) if rows else np.empty(0, np.int64)
        below = table[begin[domain] + np.where(is_set[domain], 0, member)] if len(domain) else member
        row = np.concatenate([np.zeros(hierarchy.num_trees, np.int64), below])
        return NodePositions(
            torch.from_numpy(row), {kind: torch.from_numpy(array) for kind, array in numbers.items()}, tuple(keys)
        ).to(hierarchy.device)
