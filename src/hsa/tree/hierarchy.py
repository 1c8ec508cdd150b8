"""`Hierarchy`: the index tensors of a tree or of a batch of trees (a forest), without features.

The rest of the library relies on these invariants:

- A batch is a forest. Trees never attend to each other.
- Nodes are ordered by depth, and within one depth depth-first. Hence every family (all children of one parent) is one
  contiguous slice of nodes, and the number of children of every node determines the whole forest.
- Leaves are numbered depth-first. Hence the leaves below any node are one contiguous slice of leaves, and the user's
  order is kept.
- Every tree has at least one leaf. A tree may be a single leaf; one-child chains are legal; depths may differ.
- A forest is frozen. Its structure is kept on the host (`Structure`, numpy) and shared by `to(device)`, so that plans are
  built without a device synchronisation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise, repeat
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from hsa.errors import InvalidInput
from hsa.tree.lasting import lasting
from hsa.tree.sinks import Sinks, cut_out_sinks, sink_leaves

T = TypeVar("T")
MOST_LEAVES = 2**31 - 1
"""Largest number of leaves of a forest: indices on a GPU have 32 bits."""


@dataclass(frozen=True, eq=False)
class Structure:
    """A forest as numpy arrays, with one entry per node unless noted otherwise."""

    num_children: np.ndarray
    parent: np.ndarray  # −1 at roots
    depth: np.ndarray  # 0 at roots
    tree: np.ndarray
    leaf_count: np.ndarray
    first_leaf: np.ndarray
    first_child: np.ndarray
    height: np.ndarray  # 0 at leaves, else 1 + the height of the highest child
    leaf_nodes: np.ndarray  # [leaves] node of every leaf, depth-first
    leaf_offsets: np.ndarray  # [trees + 1] slice of leaves of every tree
    depth_offsets: np.ndarray  # [depth + 2] slice of nodes of every depth

    @property
    def is_leaf(self) -> np.ndarray:
        return self.num_children == 0

    @property
    def end_leaf(self) -> np.ndarray:
        return self.first_leaf + self.leaf_count

    @classmethod
    def from_num_children(cls, num_children: np.ndarray) -> Structure:
        """Derive all arrays from the number of children per node, with nodes in the order of the invariants."""
        num_nodes = len(num_children)
        num_trees = num_nodes - int(num_children.sum())
        first_child = num_trees + np.cumsum(num_children) - num_children
        parent = np.concatenate([np.full(num_trees, -1), np.repeat(np.arange(num_nodes), num_children)])
        offsets = [0] if num_nodes == 0 else [0, num_trees]
        while offsets[-1] < num_nodes:
            offsets.append(offsets[-1] + int(num_children[offsets[-2] : offsets[-1]].sum()))
        levels = list(pairwise(offsets))

        depth = np.repeat(np.arange(len(levels)), np.diff(offsets))
        leaf_count = (num_children == 0).astype(np.int64)
        height = np.zeros(num_nodes, np.int64)
        parents = [begin + np.flatnonzero(num_children[begin:end]) for begin, end in levels[:-1]]
        below = [(above, *bounds) for above, bounds in zip(parents, levels[1:], strict=True)]
        for above, begin, end in reversed(below):  # children to parents; every family is a slice
            first = first_child[above] - begin
            leaf_count[above] = np.add.reduceat(leaf_count[begin:end], first)
            height[above] = np.maximum.reduceat(height[begin:end], first) + 1

        tree = np.arange(num_nodes)
        first_leaf = np.zeros(num_nodes, np.int64)
        first_leaf[:num_trees] = np.cumsum(leaf_count[:num_trees]) - leaf_count[:num_trees]
        for above, begin, end in below:  # parents to children
            counts = num_children[above]
            before = np.cumsum(leaf_count[begin:end]) - leaf_count[begin:end]
            first_leaf[begin:end] = before + np.repeat(first_leaf[above] - before[first_child[above] - begin], counts)
            tree[begin:end] = np.repeat(tree[above], counts)

        leaves = np.flatnonzero(num_children == 0)
        leaf_nodes = np.empty(len(leaves), np.int64)
        leaf_nodes[first_leaf[leaves]] = leaves
        return cls(
            num_children=num_children,
            parent=parent,
            depth=depth,
            tree=tree,
            leaf_count=leaf_count,
            first_leaf=first_leaf,
            first_child=first_child,
            height=height,
            leaf_nodes=leaf_nodes,
            leaf_offsets=np.concatenate([[0], np.cumsum(leaf_count[:num_trees])]).astype(np.int64),
            depth_offsets=np.array(offsets, np.int64),
        )


class Hierarchy:
    """A tree over the tokens of a sequence, or one per sequence of a batch (a forest). The leaves are the tokens, in order.

    Build it with `regular` (windows), `from_nested` or `from_offsets` (levels such as sentences and paragraphs),
    `from_parents` (any tree) or `flat` (no levels). It is immutable and holds no features.

    >>> documents = Hierarchy.from_nested([[3, 2], [4]])  # sentences of 3 and 2 tokens; one sentence of 4 tokens
    >>> documents
    Hierarchy(2 trees, 9 leaves, 14 nodes, 5 families, depth 2)
    >>> documents.leaf_count.tolist()  # two roots, three sentences, nine tokens
    [5, 4, 3, 2, 4, 1, 1, 1, 1, 1, 1, 1, 1, 1]

    The number of children of every node determines the forest. The parents, for example:

    >>> nodes = torch.arange(documents.num_nodes)
    >>> torch.equal(documents.parent[documents.num_trees :], nodes.repeat_interleave(documents.num_children))
    True
    """

    def __init__(self, structure: Structure, *, node_ids: np.ndarray | None = None, device: torch.device | str = "cpu"):
        self.structure = structure
        self.device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0", as for tensors
        self._node_ids = node_ids
        self._cache: dict[Any, Any] = {}
        self._frozen = True

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_frozen", False):
            raise AttributeError(f"Hierarchy is frozen: cannot set {name!r}; build a new one instead")
        super().__setattr__(name, value)

    @classmethod
    def from_parents(cls, parent: Any) -> Hierarchy:
        """Build any forest from the parent of every node.

        Leaves are numbered depth-first; `leaf_ids` and `node_ids` map leaves and nodes back to the entries of `parent`.

        Args:
            parent: Parent of every node, −1 at roots. Siblings keep the order of their indices.

        >>> tree = Hierarchy.from_parents([4, 3, 3, 4, -1])  # 4 → (0, 3), 3 → (1, 2)
        >>> tree.leaf_ids.tolist(), tree.node_ids.tolist()
        ([0, 1, 2], [4, 0, 3, 1, 2])

        Raises:
            InvalidInput: `parent` is not a vector of integers, an entry is out of range, or the nodes form a cycle.
        """
        array = integers("parent", parent)
        if array.ndim != 1:
            raise InvalidInput(
                "parent",
                got=f"shape {tuple(array.shape)}",
                expected="a vector with one parent per node",
                fix="A node has exactly one parent; repeat a node to place it under two",
            )
        outside = np.flatnonzero((array < -1) | (array >= len(array)))
        if len(outside):
            raise InvalidInput(
                f"parent[{outside[0]}]",
                got=int(array[outside[0]]),
                expected=f"−1 (a root) or a node in 0..{len(array) - 1}",
                fix="Number the nodes from 0",
            )
        return cls._from_parent_array(array, np.arange(len(array)), keep_ids=True)

    @classmethod
    def _from_parent_array(cls, parent: np.ndarray, rank: np.ndarray, *, keep_ids: bool = False) -> Hierarchy:
        """Put nodes in the order of the invariants: breadth-first, siblings sorted by `rank`."""
        num_nodes = len(parent)
        order = np.lexsort((rank, parent))
        counts = np.bincount(parent[parent >= 0], minlength=num_nodes)
        num_roots = int((parent < 0).sum())
        begin_of_children = num_roots + np.cumsum(counts) - counts
        level = order[:num_roots]
        levels = []
        while len(level):
            levels.append(level)
            level = order[ranges(begin_of_children[level], counts[level])]
        node_ids = np.concatenate(levels) if levels else np.empty(0, np.int64)
        if len(node_ids) < num_nodes:
            lost = np.setdiff1d(np.arange(num_nodes), node_ids)
            path, node = [], int(lost[0])
            while node not in path:
                path.append(node)
                node = int(parent[node])
            cycle = " → ".join(str(n) for n in [*path[path.index(node) :], node])
            raise InvalidInput(
                f"parent[{node}]",
                got=f"the cycle {cycle}",
                expected="a forest",
                fix="Set the parent of one of these nodes to −1, a root",
            )
        return cls(Structure.from_num_children(counts[node_ids]), node_ids=node_ids if keep_ids else None)

    @classmethod
    def flat(cls, lengths: Any) -> Hierarchy:
        """Build trees of a single family each, over which attention is ordinary softmax attention.

        Args:
            lengths: Number of leaves per tree.

        >>> Hierarchy.flat([3, 2])
        Hierarchy(2 trees, 5 leaves, 7 nodes, 2 families, depth 1)
        """
        lengths = _lengths("lengths", lengths)
        return cls(Structure.from_num_children(np.concatenate([lengths, np.zeros(int(lengths.sum()), np.int64)])))

    @classmethod
    def regular(
        cls, lengths: Any, branching: Iterable[int], *, repeat_last: bool = False, sinks: Sinks = None
    ) -> Hierarchy:
        """Build trees of windows: families of `branching[0]` leaves, families of `branching[1]` of those, and so on.

        The last family of a level may be smaller. The nodes that remain after the last factor become the children of the
        root; a level with a single node is the root.

        Args:
            lengths: Number of leaves per tree.
            branching: Number of members per family, leaf families first.
            repeat_last: Whether the last factor repeats, so that the depth grows with the logarithm of the length.
            sinks: Leaves that are children of the root, such as [CLS] and [SEP]: the number of first leaves of
                every tree, their positions in every tree (`(0, -1)`: first and last), or a mask over all leaves. A sink
                inside a sequence splits it: a new window starts after it.

        >>> Hierarchy.regular([1000], (16, 8)).num_children[:1].tolist()  # 1000 leaves → 63 → 8 children of the root
        [8]
        >>> print(Hierarchy.regular([7], (3,), sinks=(0, -1)).show())
        tree 0 · 7 leaves
        ├─ leaf 0
        ├─ 3 leaves
        ├─ 2 leaves
        └─ leaf 6
        """
        lengths = _lengths("lengths", lengths)
        if not isinstance(branching, Iterable):
            raise InvalidInput("branching", got=repr(branching), expected="factors, such as (16, 8)")
        longest = max(2, int(lengths.max(initial=0)))  # larger families than that are no different
        factors = [min(_positive(f"branching[{i}]", b), longest) for i, b in enumerate(branching)]
        if not factors:
            raise InvalidInput(
                "branching", got="()", expected="at least one factor", fix="Use Hierarchy.flat for one family"
            )
        if repeat_last and factors[-1] < 2:
            raise InvalidInput(
                "branching",
                got=f"a last factor of {factors[-1]} to repeat",
                expected="2 or more",
                fix="Repeating a factor of 1 never reaches a single root",
            )
        return cls._from_parent_array(*_windows(lengths, factors, repeat_last, sink_leaves(sinks, lengths)))

    @classmethod
    def from_nested(cls, nested: Sequence[Any], *, sinks: Sinks = None) -> Hierarchy:
        """Build trees from nested lists: a list is a node with these children, an integer n is a node with n leaves.

        Args:
            nested: One entry per tree.
            sinks: Leaves that are children of the root; see `regular`.

        >>> print(Hierarchy.from_nested([[3, [2, 1]]]).show())
        tree 0 · 6 leaves
        ├─ 3 leaves
        └─ 2 members · 3 leaves
           ├─ 2 leaves
           └─ 1 leaf
        """
        if not isinstance(nested, (list, tuple)):
            raise InvalidInput("nested", got=type(nested).__name__, expected="a list with one entry per tree")
        parent: list[np.ndarray] = []
        count = 0
        # The lists around the current entry, its index in each, and their nodes: a stack, as nesting may be deep.
        lists, path, nodes, open_ids = [nested], [0], [-1], {id(nested)}

        while lists:
            if path[-1] == len(lists[-1]):
                open_ids.remove(id(lists.pop()))
                nodes.pop()
                path.pop()
                if path:
                    path[-1] += 1
                continue
            entry = lists[-1][path[-1]]
            parent.append(np.array([nodes[-1]]))
            if not isinstance(entry, (list, tuple)):
                try:
                    leaves = _positive("nested", entry)
                    _check_total("nested", count + leaves)
                except InvalidInput as error:
                    raise error.moved(_at(path)) from None
                parent.append(np.full(leaves, count))
                count += 1 + leaves
                path[-1] += 1
                continue
            if id(entry) in open_ids:
                raise InvalidInput(_at(path), got="a list that contains itself", expected="a finite nesting")
            if not entry:
                raise InvalidInput(_at(path), got="an empty list", expected="at least one child", fix="Leave it out")
            lists.append(entry)
            open_ids.add(id(entry))
            nodes.append(count)
            path.append(0)
            count += 1
        array = np.concatenate(parent) if parent else np.empty(0, np.int64)
        return cls._from_parent_array(array, np.arange(len(array)))._with_sinks(sinks)

    @classmethod
    def from_offsets(cls, *levels: Any, sinks: Sinks = None) -> Hierarchy:
        """Build trees from one vector of offsets per level, from the leaves up.

        Args:
            levels: `levels[0][i]` to `levels[0][i + 1]` are the leaves of leaf family i, `levels[1]` groups these
                families, and so on. The groups of the last level are the trees.
            sinks: Leaves that are children of the root; see `regular`.

        >>> tokens, sentences = [0, 3, 5, 9], [0, 2, 3]  # sentences of 3, 2, 4 tokens; documents of 2 and 1 sentences
        >>> Hierarchy.from_offsets(tokens, sentences) == Hierarchy.from_nested([[3, 2], [4]])
        True
        """
        if not levels:
            raise InvalidInput("levels", problem="not given", expected="at least one vector of offsets")
        arrays = [_offsets(f"levels[{i}]", level) for i, level in enumerate(levels)]
        for i, (below, above) in enumerate(pairwise(arrays)):
            if above[-1] != len(below) - 1:
                raise InvalidInput(
                    f"levels[{i + 1}][-1]",
                    got=int(above[-1]),
                    expected=f"{len(below) - 1}, the number of families of levels[{i}]",
                )
        # Nodes are ordered by depth, and offsets list families depth-first: the counts, top level first, are the forest.
        counts = [np.diff(level) for level in reversed(arrays)]
        num_children = np.concatenate([*counts, np.zeros(int(arrays[0][-1]), np.int64)])
        return cls(Structure.from_num_children(num_children))._with_sinks(sinks)

    def _with_sinks(self, sinks: Sinks) -> Hierarchy:
        leaves = sink_leaves(sinks, np.diff(self.structure.leaf_offsets))
        return self._from_parent_array(*cut_out_sinks(self.structure, leaves)) if len(leaves) else self

    @staticmethod
    def collate(hierarchies: Iterable[Hierarchy]) -> Hierarchy:
        """Join forests into one; `uncollate` splits it into single trees again.

        >>> a, b = Hierarchy.flat([3]), Hierarchy.from_nested([[2, 2]])
        >>> Hierarchy.collate([a, b]).uncollate() == [a, b]
        True
        """
        parts = list(hierarchies)
        sizes = np.array([h.num_nodes for h in parts], np.int64)
        shifts = np.cumsum(sizes) - sizes
        parents = [
            np.where(h.structure.parent < 0, -1, h.structure.parent + shift)
            for h, shift in zip(parts, shifts, strict=True)
        ]
        array = np.concatenate(parents) if parents else np.empty(0, np.int64)
        device = parts[0].device if parts else torch.device("cpu")
        return Hierarchy._from_parent_array(array, np.arange(len(array))).to(device)

    def uncollate(self) -> list[Hierarchy]:
        """Return the trees of the forest, one hierarchy each."""
        s = self.structure
        order = np.argsort(s.tree, kind="stable")  # keeps the order of nodes within each tree
        bounds = np.cumsum(np.bincount(s.tree, minlength=self.num_trees))[:-1]
        parts = np.split(s.num_children[order], bounds) if self.num_trees else []
        return [Hierarchy(Structure.from_num_children(part), device=self.device) for part in parts]

    @property
    def num_trees(self) -> int:
        """Number of trees."""
        return len(self.structure.leaf_offsets) - 1

    @property
    def num_leaves(self) -> int:
        """Number of leaves of all trees."""
        return len(self.structure.leaf_nodes)

    @property
    def num_nodes(self) -> int:
        """Number of nodes, leaves included."""
        return len(self.structure.num_children)

    @property
    def num_families(self) -> int:
        """Number of families, that is, of nodes with children."""
        return int((self.structure.num_children > 0).sum())

    @property
    def depth(self) -> int:
        """Largest number of steps from a root to a leaf (0 for a forest of single leaves, or an empty one)."""
        return max(len(self.structure.depth_offsets) - 2, 0)

    @property
    def lengths(self) -> list[int]:
        """Number of leaves per tree."""
        return np.diff(self.structure.leaf_offsets).tolist()

    @property
    def num_children(self) -> Tensor:
        """Number of children of every node, 0 at leaves, `[nodes]`."""
        return self.tensor("num_children")

    @property
    def parent(self) -> Tensor:
        """Parent of every node, −1 at roots, `[nodes]`."""
        return self.tensor("parent")

    @property
    def leaf_count(self) -> Tensor:
        """Number of leaves below every node, 1 at leaves, `[nodes]`."""
        return self.tensor("leaf_count")

    @property
    def node_ids(self) -> Tensor:
        """Index of every node in the `parent` passed to `from_parents`; 0, 1, 2, … for other constructors."""
        ids = self._node_ids
        return self.cached("node_ids", lambda: self._to_tensor(np.arange(self.num_nodes) if ids is None else ids))

    @property
    def leaf_ids(self) -> Tensor:
        """Index of every leaf in the `parent` passed to `from_parents`; 0, 1, 2, … for other constructors."""
        ids, nodes = self._node_ids, self.structure.leaf_nodes
        return self.cached(
            "leaf_ids", lambda: self._to_tensor(np.arange(self.num_leaves) if ids is None else ids[nodes])
        )

    @cached_property
    def digest(self) -> str:
        """Fingerprint of the structure: equal forests have equal digests."""
        return hashlib.blake2b(self.structure.num_children.tobytes(), digest_size=16).hexdigest()

    def tensor(self, name: str) -> Tensor:
        """Return a field of `Structure` as a tensor on this hierarchy's device."""
        return self.cached(("structure", name), lambda: self._to_tensor(getattr(self.structure, name)))

    def _to_tensor(self, array: np.ndarray) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(array, dtype=np.int64)).to(self.device)

    @torch.compiler.disable
    def _build(self, key: Any, build: Callable[[], T]) -> T:
        with lasting():
            self._cache[key] = value = build()
        return value

    def cached(self, key: Any, build: Callable[[], T]) -> T:
        """Return `build()`, called once per hierarchy and key. Operators keep their plans here."""
        if key in self._cache:
            return self._cache[key]
        return self._build(key, build)

    def peek(self, key: Any) -> Any:
        """Return what `cached` keeps for a key; None if there is nothing."""
        return self._cache.get(key)

    def to(self, device: torch.device | str) -> Hierarchy:
        """Return this forest with its tensors on another device; the host structure is shared."""
        moved = Hierarchy(self.structure, node_ids=self._node_ids, device=device)
        return self if moved.device == self.device else moved

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hierarchy) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        def count(n: int, one: str, many: str) -> str:
            return f"{n:,} {one if n == 1 else many}"

        return (
            f"Hierarchy({count(self.num_trees, 'tree', 'trees')}, {count(self.num_leaves, 'leaf', 'leaves')}, "
            f"{count(self.num_nodes, 'node', 'nodes')}, {count(self.num_families, 'family', 'families')}, "
            f"depth {self.depth})"
        )

    def show(self, max_rows: int = 60) -> str:
        """Return a drawing of the forest, one line per family, cut after `max_rows` lines."""
        s = self.structure
        rows: list[str] = []
        # An explicit stack: chains may be deeper than Python's recursion limit.
        stack = [(root, "", "") for root in reversed(range(self.num_trees))]
        while stack and len(rows) < max_rows:
            node, stem, indent = stack.pop()
            members, leaves = int(s.num_children[node]), int(s.leaf_count[node])
            size = f"{leaves:,} {'leaf' if leaves == 1 else 'leaves'}"
            if s.parent[node] < 0:
                label = f"tree {node} · {size}"
            elif members == 0:
                label = f"leaf {s.first_leaf[node]}"
            elif s.height[node] == 1:
                label = size
            else:
                label = f"{members:,} {'member' if members == 1 else 'members'} · {size}"
            rows.append(stem + label)
            if s.height[node] > 1:
                children = range(int(s.first_child[node]), int(s.first_child[node]) + members)
                for child in reversed(children):
                    last = child == children[-1]
                    stack.append((child, indent + ("└─ " if last else "├─ "), indent + ("   " if last else "│  ")))
        return "\n".join([*rows, "…"] if stack else rows)


def _windows(
    lengths: np.ndarray, factors: list[int], repeat_last: bool, sinks: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return parents and first leaves of the nodes of `Hierarchy.regular`.

    Nodes are numbered in this order: leaves, windows level by level, roots.
    """
    num_leaves = int(lengths.sum())
    tree_start = np.cumsum(lengths) - lengths
    is_sink = np.zeros(num_leaves, bool)
    is_sink[sinks] = True
    # A segment is a run of leaves of one tree without a sink.
    starts = np.zeros(num_leaves, bool)
    starts[tree_start] = True
    starts[1:] |= is_sink[:-1]
    starts &= ~is_sink
    segment_start = np.flatnonzero(starts)

    ids = np.flatnonzero(~is_sink)  # nodes of the current level
    segment = np.cumsum(starts)[ids] - 1  # segment of every node
    index = ids - segment_start[segment]  # index of every node in its segment
    size = np.bincount(segment, minlength=len(segment_start))
    links, first_leaves, span = [], [np.arange(num_leaves)], 1
    next_id = num_leaves
    growing = size > 0
    for factor in chain(factors, repeat(factors[-1]) if repeat_last else ()):
        if not growing.any():
            break
        windows = np.where(growing, -(-size // factor), 0)
        first_window = next_id + np.cumsum(windows) - windows
        joins = growing[segment]
        links.append((ids[joins], first_window[segment[joins]] + index[joins] // factor))
        segment = np.repeat(np.arange(len(size)), windows)
        ids = next_id + np.arange(len(segment))
        index = ids - first_window[segment]
        span *= factor
        first_leaves.append(segment_start[segment] + index * span)
        next_id += len(ids)
        size = windows
        growing = size > 1

    first_leaf = np.concatenate(first_leaves)
    parent = np.full(next_id, -1)
    for below, above in links:
        parent[below] = above
    tops = np.flatnonzero(parent < 0)
    tree = np.searchsorted(tree_start, first_leaf[tops], side="right") - 1
    # A tree with a single top window has that window as its root; the others get a new root.
    is_root = (np.bincount(tree, minlength=len(lengths))[tree] == 1) & (tops >= num_leaves)
    rootless = np.ones(len(lengths), bool)
    rootless[tree[is_root]] = False
    parent[tops[~is_root]] = (next_id + np.cumsum(rootless) - 1)[tree[~is_root]]
    return np.concatenate([parent, np.full(rootless.sum(), -1)]), np.concatenate([first_leaf, tree_start[rootless]])


def ranges(begin: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return the concatenated ranges [begin₀, begin₀+1, …, begin₀+count₀−1, begin₁, …]."""
    return np.repeat(begin - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))


def integers(where: str, values: Any) -> np.ndarray:
    """Return a tensor, array or list of integers as an int64 array; raise an error at `where` for other values."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise InvalidInput(where, got=f"{array.dtype} values", expected="integers")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise InvalidInput(
            where, got=int(array.max()), expected="integers of 64 bits with a sign", fix="Use dtype int64"
        )
    return array.astype(np.int64)


def _positive(where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise InvalidInput(where, got=repr(value), expected="a positive integer")
    return int(value)


def _lengths(where: str, lengths: Any) -> np.ndarray:
    array = integers(where, lengths)
    if array.ndim != 1:
        raise InvalidInput(where, got=f"shape {array.shape}", expected="a vector, the number of leaves of every tree")
    bad = np.flatnonzero(array < 1)
    if len(bad):
        raise InvalidInput(
            f"{where}[{bad[0]}]",
            got=int(array[bad[0]]),
            expected="at least one leaf per tree",
            fix="Leave empty sequences out of the batch",
        )
    _check_total(where, sum(array.tolist()))
    return array


def _at(path: list[int]) -> str:
    return "nested" + "".join(f"[{i}]" for i in path)


def _check_total(where: str, leaves: int) -> None:
    if leaves > MOST_LEAVES:
        raise InvalidInput(where, got=f"{leaves:,} leaves", expected=f"at most {MOST_LEAVES:,} in all trees together")


def _offsets(where: str, offsets: Any) -> np.ndarray:
    array = integers(where, offsets)
    if array.ndim != 1 or len(array) == 0 or array[0] != 0:
        raise InvalidInput(where, got=f"{array.tolist()[:4]}…", expected="a vector that starts with 0")
    bad = np.flatnonzero(np.diff(array) < 1)
    if len(bad):
        i = int(bad[0])
        raise InvalidInput(
            f"{where}[{i}:{i + 2}]",
            got=array[i : i + 2].tolist(),
            expected="increasing offsets, as a family has at least one member",
            fix="Leave empty families out",
        )
    return array
