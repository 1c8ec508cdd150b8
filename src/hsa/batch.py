"""`collate` and `uncollate`: a list of signals ↔ their leaf values per modality and the hierarchy they hang in.

Exact inverses: `uncollate(collate(signals)) == signals`, dtypes, domains and order included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hsa.errors import InvalidInput
from hsa.hierarchy import Hierarchy, Structure
from hsa.signals.domains import Domain, Grid
from hsa.signals.signal import Leaf, Signal
from hsa.signals.values import Kind, Value, as_value, kind_of, kind_of_stack, stack

# Values of consecutive leaves: a stack, or one value in a list.
_Part = Tensor | tuple[str, ...] | list[Value]


@dataclass(frozen=True, eq=False)
class Batch:
    """Many signals as one forest.

    >>> from hsa.signals import Set
    >>> page = Signal.of(["a", "cat"], "text"), Signal.of(torch.zeros(3, 5), "patch")
    >>> batch = collate([Signal(Set(2), page), Leaf("dog", "text")])
    >>> batch
    Batch(Hierarchy(2 trees, 6 leaves, 9 nodes, 3 families, depth 2), text: 3 strings, patch: float32[3, 5])
    >>> batch.leaves["text"], batch.path(2)
    (tensor([0, 1, 5]), 'signals[0][1][0]')

    Attributes:
        values: modality → the values of its leaves: one tensor `[leaves, *leaf shape]` when all have one dtype and
            shape, else a list.
        leaves: modality → the leaf of `hierarchy` that each of these values is, rising.
        hierarchy: one tree per signal.
        domains: of every internal node, in node order.
    """

    values: dict[str, Tensor | list[Value]]
    leaves: dict[str, Tensor]
    hierarchy: Hierarchy
    domains: tuple[Domain, ...]

    def to(self, device: torch.device | str) -> Batch:
        """This batch with its tensors on another device."""

        def move(values: Tensor | list[Value]) -> Tensor | list[Value]:
            if isinstance(values, Tensor):
                return values.to(device)
            return [value.to(device) if isinstance(value, Tensor) else value for value in values]

        return replace(
            self,
            values={name: move(values) for name, values in self.values.items()},
            leaves={name: leaves.to(device) for name, leaves in self.leaves.items()},
            hierarchy=self.hierarchy.to(device),
        )

    def path(self, leaf: int) -> str:
        """Where a leaf lies in the list of signals."""
        if not 0 <= leaf < self.hierarchy.num_leaves:
            raise InvalidInput("leaf", given=leaf, expected=f"0..{self.hierarchy.num_leaves - 1}")
        return _path(self.hierarchy.structure, self.domains, leaf)

    def __repr__(self) -> str:
        def size(values: Tensor | list[Value]) -> str:
            if isinstance(values, Tensor):
                return f"{str(values.dtype).removeprefix('torch.')}{list(values.shape)}"
            return f"{len(values):,} {'strings' if all(isinstance(v, str) for v in values) else 'values'}"

        return (
            ", ".join(
                [f"Batch({self.hierarchy!r}", *(f"{name}: {size(values)}" for name, values in self.values.items())]
            )
            + ")"
        )


def collate(signals: Iterable[Signal | Leaf], modalities: Iterable[str] | None = None) -> Batch:
    """Signals as one batch: a tree each, leaves in the order they are read.

    Args:
        signals: a lone `Leaf` is a tree of one leaf.
        modalities: the ones a model knows; a leaf of another one raises. They also give the order of `values`.

    >>> signals = [Signal.of([3, 1, 4], "token"), Signal.of([1, 5], "token")]
    >>> collate(signals).values["token"]
    tensor([3, 1, 4, 1, 5])
    >>> uncollate(collate(signals)) == signals
    True

    Raises:
        InvalidInput: naming the path, something that is no signal, or a leaf of an undeclared modality.
    """
    roots = list(signals)
    for i, root in enumerate(roots):
        if not isinstance(root, (Signal, Leaf)):
            raise InvalidInput(f"signals[{i}]", given=type(root).__name__, expected="a Signal or a Leaf")
    num_children, domains, holders = _levels(roots)
    structure = Structure.from_num_children(num_children)
    parts: dict[str, list[tuple[int, _Part]]] = {}  # modality → first leaf and values
    for node, modality, part in holders:
        parts.setdefault(modality, []).append((int(structure.first_leaf[node]), part))
    for listed in parts.values():
        listed.sort(key=lambda entry: entry[0])
    order = sorted(parts, key=lambda name: parts[name][0][0])  # of appearance
    if modalities is not None:
        known = tuple(dict.fromkeys(modalities))
        for name in order:
            if name not in known:
                raise InvalidInput(
                    _path(structure, domains, parts[name][0][0]),
                    given=f"modality {name!r}",
                    expected=f"one of {known}",
                    fix=f"add {name!r} to modalities, or leave these leaves out",
                )
        order = [name for name in known if name in parts]
    return Batch(
        values={name: _merge([part for _, part in parts[name]]) for name in order},
        leaves={name: _leaf_numbers(parts[name]) for name in order},
        hierarchy=Hierarchy(structure),
        domains=tuple(domains),
    )


def uncollate(batch: Batch) -> list[Signal | Leaf]:
    """The signals of a batch, each as it was."""
    s = batch.hierarchy.structure
    names = list(batch.values)
    modality = np.empty(len(s.leaf_nodes), np.int64)  # per leaf
    place = np.empty(len(s.leaf_nodes), np.int64)  # in the values of its modality
    for i, name in enumerate(names):
        leaves = batch.leaves[name].cpu().numpy()
        modality[leaves] = i
        place[leaves] = np.arange(len(leaves))
    changes = np.concatenate([[0], np.cumsum(np.diff(modality) != 0)])
    uniform = (s.height == 1) & (changes[s.end_leaf - 1] == changes[s.first_leaf])

    in_stack = np.concatenate([[False], uniform])[s.parent + 1]  # leaves that need no object of their own
    nodes = np.flatnonzero(~in_stack)
    domains = list(batch.domains)
    built: dict[int, Signal | Leaf] = {}
    facts = (nodes, s.num_children[nodes], s.first_child[nodes], s.first_leaf[nodes], uniform[nodes])
    for node, size, child, leaf, stacked in zip(*(fact[::-1].tolist() for fact in facts), strict=True):
        # Children come before parents: nodes are ordered by depth, and we go backwards.
        name, begin = names[modality[leaf]], int(place[leaf])
        if size == 0:
            built[node] = Leaf(batch.values[name][begin], name)
            continue
        domain = domains.pop()
        if stacked:
            built[node] = Signal.of(_on(domain, batch.values[name][begin : begin + size]), name, domain)
        else:
            built[node] = Signal(domain, [built.pop(i) for i in range(child, child + size)])
    return [built[root] for root in range(batch.hierarchy.num_trees)]


def _levels(roots: list[Any]) -> tuple[np.ndarray, list[Domain], list[tuple[int, str, _Part]]]:
    """Children per node and domains, in node order; and every node that brings values, with their modality.

    Breadth-first is the order of a hierarchy's nodes. The leaves of a stack go through as one number.
    """
    counts: list[int] = []
    repeats: list[int] = []
    domains: list[Domain] = []
    holders: list[tuple[int, str, _Part]] = []
    level, node = roots, 0
    while level:
        below: list[Any] = []
        for item in level:
            count, times = 0, 1
            if isinstance(item, int):
                times = item
            elif isinstance(item, Leaf):
                holders.append((node, item.modality, [item.value]))
            else:
                count = item.domain.size
                domains.append(item.domain)
                if item.values is None:
                    below.extend(item.members)
                else:
                    holders.append((node, item.modalities[0], item.values))
                    below.append(count)
            counts.append(count)
            repeats.append(times)
            node += times
        level = below
    return np.repeat(np.array(counts, np.int64), np.array(repeats, np.int64)), domains, holders


def _merge(parts: list[_Part]) -> Tensor | list[Value]:
    """One tensor where all values have one dtype and shape, else a list."""
    kinds: set[Kind] = {kind_of(part[0]) if isinstance(part, list) else kind_of_stack(part) for part in parts}
    if len(kinds) == 1 and str not in kinds:
        runs: list[Any] = []
        for single, group in groupby(parts, key=lambda part: isinstance(part, list)):
            run = list(group)
            runs.extend([stack([part[0] for part in run])] if single else run)
        return torch.cat(runs)
    merged: list[Value] = []
    for part in parts:
        if isinstance(part, Tensor):
            merged.extend(as_value(value, "value") for value in part.unbind())
        else:
            merged.extend(part)
    return merged


def _leaf_numbers(parts: list[tuple[int, _Part]]) -> Tensor:
    first = np.array([leaf for leaf, _ in parts], np.int64)
    count = np.array([len(part) for _, part in parts], np.int64)
    return torch.from_numpy(np.repeat(first - np.cumsum(count) + count, count) + np.arange(count.sum()))


def _on(domain: Domain, rows: Any) -> Any:
    """Rows with the axes of a grid."""
    if isinstance(domain, Grid) and isinstance(rows, Tensor):
        return rows.reshape(*domain.shape, *rows.shape[1:])
    return rows


def _path(structure: Structure, domains: Sequence[Domain], leaf: int) -> str:
    family = np.cumsum(structure.num_children > 0) - 1  # the place in `domains` of every internal node
    node = int(structure.leaf_nodes[leaf])
    steps: list[str] = []
    while (above := int(structure.parent[node])) >= 0:
        steps.append(domains[family[above]].step(node - int(structure.first_child[above])))
        node = above
    return "".join([f"signals[{node}]", *reversed(steps)])
