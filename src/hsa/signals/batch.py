"""`Batch`, `collate` and `uncollate`: signals as leaf values per modality and a hierarchy, and back.

`uncollate(collate(signals)) == signals`, dtypes, domains and order included. A whole data set is one large batch, from
which `select` takes the trees of a training step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hsa.errors import InvalidInput
from hsa.signals.coordinates import coordinates
from hsa.signals.domains import Domain, Grid
from hsa.signals.signal import Leaf, Signal
from hsa.signals.values import Kind, Value, as_value, kind_of, kind_of_stack, stack
from hsa.tree.hierarchy import Hierarchy, Structure, integers, ranges
from hsa.tree.positions import NodePositions

# Values of consecutive leaves: a stack, or one value in a list.
_Part = Tensor | tuple[str, ...] | list[Value]


@dataclass(frozen=True, eq=False)
class Batch:
    """Signals as one forest: a tree per signal, leaf values per modality. Made by `collate`.

    Attributes:
        values: Modality → values of its leaves: one tensor `[leaves, *leaf shape]` if all have one dtype and shape, else
            a list.
        leaves: Modality → leaf of `hierarchy` of each of these values, ascending.
        hierarchy: One tree per signal.
        distinct_domains: The domains that occur.
        domain_ids: Index of its domain for every internal node, in node order.

    >>> from hsa.signals import Set
    >>> page = Signal.of(["a", "cat"], "text"), Signal.of(torch.zeros(3, 5), "patch")
    >>> batch = collate([Signal(Set(2), page), Leaf("dog", "text")])
    >>> batch
    Batch(Hierarchy(2 trees, 6 leaves, 9 nodes, 3 families, depth 2), text: 3 strings, patch: float32[3, 5])
    >>> batch.leaves["text"], batch.path(2)
    (tensor([0, 1, 5]), 'signals[0][1][0]')
    """

    values: dict[str, Tensor | list[Value]]
    leaves: dict[str, Tensor]
    hierarchy: Hierarchy
    distinct_domains: tuple[Domain, ...]
    domain_ids: np.ndarray

    @property
    def domains(self) -> tuple[Domain, ...]:
        """Domain of every internal node, in node order."""
        return tuple(self.distinct_domains[i] for i in self.domain_ids.tolist())

    @cached_property
    def positions(self) -> NodePositions:
        """Position of every node in its family, for position embeddings."""
        s = self.hierarchy.structure
        domain = np.full(self.hierarchy.num_nodes, -1)
        domain[s.num_children > 0] = self.domain_ids
        above = s.parent[self.hierarchy.num_trees :]
        member = np.arange(self.hierarchy.num_trees, self.hierarchy.num_nodes) - s.first_child[above]
        parts = [coordinates(distinct) for distinct in self.distinct_domains]
        return NodePositions.merge(parts, domain[above], member, self.hierarchy)

    def select(self, trees: Any) -> Batch:
        """Return the batch of some of these trees, in this order; a tree may occur twice.

        >>> batch = collate([Signal.of([3, 1], "token"), Signal.of([4], "token"), Signal.of([1, 5], "token")])
        >>> batch.select([2, 0]).values["token"]
        tensor([1, 5, 3, 1])
        """
        selected = integers("trees", trees).reshape(-1)
        outside = np.flatnonzero((selected < 0) | (selected >= self.hierarchy.num_trees))
        if len(outside):
            raise InvalidInput(
                f"trees[{outside[0]}]",
                got=int(selected[outside[0]]),
                expected=f"a tree in 0..{self.hierarchy.num_trees - 1}",
            )
        s = self.hierarchy.structure
        begin, count = self._slices
        nodes = ranges(begin[:, selected].ravel(), count[:, selected].ravel())
        hierarchy = Hierarchy(Structure.from_num_children(s.num_children[nodes]), device=self.hierarchy.device)
        values: dict[str, Tensor | list[Value]] = {}
        leaves: dict[str, Tensor] = {}
        moved = hierarchy.structure.leaf_offsets[:-1] - s.leaf_offsets[selected]
        for name, bounds in self._value_bounds.items():
            counts = bounds[selected + 1] - bounds[selected]
            if not counts.any():
                continue
            rows = torch.from_numpy(ranges(bounds[selected], counts))
            held = self.values[name]
            values[name] = held[rows.to(held.device)] if isinstance(held, Tensor) else [held[i] for i in rows.tolist()]
            shift = torch.from_numpy(np.repeat(moved, counts)).to(self.leaves[name].device)
            leaves[name] = self.leaves[name][rows.to(shift.device)] + shift
        inner = nodes[s.num_children[nodes] > 0]
        ids = self.domain_ids[self._family_of_node[inner]]
        return Batch(values, leaves, hierarchy, *_compact(self.distinct_domains, ids))

    @staticmethod
    def join(batches: Iterable[Batch]) -> Batch:
        """Join batches, their trees one after another.

        >>> batch = collate([Signal.of([3, 1], "token"), Signal.of([4], "token")])
        >>> Batch.join([batch, batch]).values["token"]
        tensor([3, 1, 4, 3, 1, 4])
        """
        parts = list(batches)
        structures = [part.hierarchy.structure for part in parts]
        depth = np.concatenate([np.empty(0, np.int64), *(s.depth for s in structures)])
        rank = np.repeat(np.arange(len(parts)), [len(s.depth) for s in structures])
        order = np.lexsort((rank, depth))
        num_children = np.concatenate([np.empty(0, np.int64), *(s.num_children for s in structures)])
        numbers: dict[Domain, int] = {}
        ids = np.full(len(num_children), -1)
        ids[num_children > 0] = np.concatenate(
            [np.empty(0, np.int64)]
            + [
                np.array([numbers.setdefault(domain, len(numbers)) for domain in part.distinct_domains], np.int64)[
                    part.domain_ids
                ]
                for part in parts
            ]
        )
        ids = ids[order]
        device = parts[0].hierarchy.device if parts else "cpu"
        shifts = np.cumsum([0, *(part.hierarchy.num_leaves for part in parts)])[:-1].tolist()
        held: dict[str, list[_Part]] = {}
        leaves: dict[str, list[Tensor]] = {}
        for part, shift in zip(parts, shifts, strict=True):
            for name, values in part.values.items():
                stacks = [values] if isinstance(values, Tensor) else [[value] for value in values]
                held.setdefault(name, []).extend(stacks)
                leaves.setdefault(name, []).append(part.leaves[name] + shift)
        return Batch(
            values={name: _merge(stacks) for name, stacks in held.items()},
            leaves={name: torch.cat(listed) for name, listed in leaves.items()},
            hierarchy=Hierarchy(Structure.from_num_children(num_children[order]), device=device),
            distinct_domains=tuple(numbers),
            domain_ids=ids[ids >= 0],
        )

    @cached_property
    def _slices(self) -> tuple[np.ndarray, np.ndarray]:
        """First node and number of nodes `[depths, trees]`: nodes of one tree at one depth are a slice."""
        s, trees = self.hierarchy.structure, self.hierarchy.num_trees
        depths = len(s.depth_offsets) - 1
        count = np.bincount(s.depth * trees + s.tree, minlength=depths * trees)
        return (np.cumsum(count) - count).reshape(depths, trees), count.reshape(depths, trees)

    @cached_property
    def _family_of_node(self) -> np.ndarray:
        """Index of every internal node in `domain_ids`."""
        return np.cumsum(self.hierarchy.structure.num_children > 0) - 1

    @cached_property
    def _value_bounds(self) -> dict[str, np.ndarray]:
        """Modality → offset of the first value of each tree."""
        offsets = self.hierarchy.structure.leaf_offsets
        return {name: np.searchsorted(leaves.cpu().numpy(), offsets) for name, leaves in self.leaves.items()}

    def to(self, device: torch.device | str) -> Batch:
        """Return this batch with its tensors on another device."""

        def move(values: Tensor | list[Value]) -> Tensor | list[Value]:
            if isinstance(values, Tensor):
                return values.to(device)
            return [value.to(device) if isinstance(value, Tensor) else value for value in values]

        moved = replace(
            self,
            values={name: move(values) for name, values in self.values.items()},
            leaves={name: leaves.to(device) for name, leaves in self.leaves.items()},
            hierarchy=self.hierarchy.to(device),
        )
        if "positions" in self.__dict__:
            moved.__dict__["positions"] = self.positions.to(device)
        return moved

    def path(self, leaf: int) -> str:
        """Return the path of a leaf in the list of signals."""
        if not 0 <= leaf < self.hierarchy.num_leaves:
            raise InvalidInput("leaf", got=leaf, expected=f"a leaf in 0..{self.hierarchy.num_leaves - 1}")
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
    """Collate signals into one batch: a tree per signal, leaves in reading order.

    Args:
        signals: Signals; a lone `Leaf` is a tree of one leaf.
        modalities: Modalities that a model knows, in the order for `values`; a leaf of another modality raises.

    Raises:
        InvalidInput: For an object that is not a signal, or a leaf of another modality; the message has its path.

    >>> signals = [Signal.of([3, 1, 4], "token"), Signal.of([1, 5], "token")]
    >>> collate(signals).values["token"]
    tensor([3, 1, 4, 1, 5])
    >>> uncollate(collate(signals)) == signals
    True
    """
    roots = list(signals)
    for i, root in enumerate(roots):
        if not isinstance(root, (Signal, Leaf)):
            raise InvalidInput(
                f"signals[{i}]", got=f"a value of type {type(root).__name__}", expected="a Signal or a Leaf"
            )
    num_children, domains, holders = _levels(roots)
    distinct = dict.fromkeys(domains)
    number = {domain: i for i, domain in enumerate(distinct)}
    structure = Structure.from_num_children(num_children)
    parts: dict[str, list[tuple[int, _Part]]] = {}  # modality → first leaf and values
    for node, modality, part in holders:
        parts.setdefault(modality, []).append((int(structure.first_leaf[node]), part))
    for listed in parts.values():
        listed.sort(key=lambda entry: entry[0])
    order = sorted(parts, key=lambda name: parts[name][0][0])  # by first appearance
    if modalities is not None:
        known = tuple(dict.fromkeys(modalities))
        for name in order:
            if name not in known:
                raise InvalidInput(
                    _path(structure, domains, parts[name][0][0]),
                    got=f"modality {name!r}",
                    expected=f"one of {known}",
                    fix=f"Add {name!r} to modalities, or leave these leaves out",
                )
        order = [name for name in known if name in parts]
    return Batch(
        values={name: _merge([part for _, part in parts[name]]) for name in order},
        leaves={name: _leaf_numbers(parts[name]) for name in order},
        hierarchy=Hierarchy(structure),
        distinct_domains=tuple(distinct),
        domain_ids=np.array([number[domain] for domain in domains], np.int64),
    )


def uncollate(batch: Batch) -> list[Signal | Leaf]:
    """Return the signals of a batch: the inverse of `collate`.

    >>> signals = [Signal.of([3, 1, 4], "token"), Leaf(2.5, "number")]
    >>> uncollate(collate(signals)) == signals
    True
    """
    s = batch.hierarchy.structure
    names = list(batch.values)
    modality = np.empty(len(s.leaf_nodes), np.int64)  # per leaf
    row = np.empty(len(s.leaf_nodes), np.int64)  # per leaf: in the values of its modality
    for i, name in enumerate(names):
        leaves = batch.leaves[name].cpu().numpy()
        modality[leaves] = i
        row[leaves] = np.arange(len(leaves))
    changes = np.concatenate([[0], np.cumsum(np.diff(modality) != 0)])
    uniform = (s.height == 1) & (changes[s.end_leaf - 1] == changes[s.first_leaf])

    in_stack = np.concatenate([[False], uniform])[s.parent + 1]  # leaves that need no object of their own
    nodes = np.flatnonzero(~in_stack)
    domains = list(batch.domains)
    built: dict[int, Signal | Leaf] = {}
    facts = (nodes, s.num_children[nodes], s.first_child[nodes], s.first_leaf[nodes], uniform[nodes])
    for node, size, child, leaf, stacked in zip(*(fact[::-1].tolist() for fact in facts), strict=True):
        # Nodes are ordered by depth: going backwards, children come before their parents.
        name, begin = names[modality[leaf]], int(row[leaf])
        if size == 0:
            built[node] = Leaf(batch.values[name][begin], name)
            continue
        domain = domains.pop()
        if stacked:
            built[node] = Signal.of(_on(domain, batch.values[name][begin : begin + size]), name, domain)
        else:
            built[node] = Signal(domain, [built.pop(i) for i in range(child, child + size)])
    return [built[root] for root in range(batch.hierarchy.num_trees)]


def _compact(domains: tuple[Domain, ...], ids: np.ndarray) -> tuple[tuple[Domain, ...], np.ndarray]:
    """Return only the domains that occur, and the ids renumbered."""
    used, renumbered = np.unique(ids, return_inverse=True)
    return tuple(domains[i] for i in used.tolist()), renumbered.astype(np.int64)


def _levels(roots: list[Any]) -> tuple[np.ndarray, list[Domain], list[tuple[int, str, _Part]]]:
    """Return children per node and domains, in node order, and every node that holds values, with their modality.

    Nodes of a hierarchy are in breadth-first order. An integer in a level stands for that many leaves of a stack.
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
    """Merge into one tensor if all values have one dtype and shape, else into a list."""
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
    """Return rows with the axes of the domain, if it is a grid."""
    if isinstance(domain, Grid) and isinstance(rows, Tensor):
        return rows.reshape(*domain.shape, *rows.shape[1:])
    return rows


def _path(structure: Structure, domains: Sequence[Domain], leaf: int) -> str:
    family = np.cumsum(structure.num_children > 0) - 1  # index in `domains` of every internal node
    node = int(structure.leaf_nodes[leaf])
    steps: list[str] = []
    while (above := int(structure.parent[node])) >= 0:
        steps.append(domains[family[above]].step(node - int(structure.first_child[above])))
        node = above
    return "".join([f"signals[{node}]", *reversed(steps)])
