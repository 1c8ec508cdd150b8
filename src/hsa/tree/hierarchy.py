"""`Hierarchy`: the index tensors of one tree or of a batch of trees (a forest), without features.

Invariants, stated once; everything else in the library relies on them.

- A batch is a forest. Trees never see each other.
- Nodes are ordered by depth, and inside one depth depth-first. Hence every family (all children of one parent) is one
  contiguous slice of nodes, and the number of children of every node *is* the whole forest.
- Leaves are numbered depth-first. Hence the leaves below any node are one contiguous slice of leaves, and the user's
  order is kept.
- Every tree has at least one leaf. A tree may be a single leaf; one-child chains are legal; depths may differ.
- Frozen. The structure lives on the host once (`Structure`, numpy); `to(device)` shares it, so that plans are built
  without a device synchronisation.
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
from hsa.tree.sinks import Sinks, cut_out_sinks, sink_leaves

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Structure:
    """The forest as numpy arrays, one entry per node unless said otherwise."""

    num_children: np.ndarray
    parent: np.ndarray  # −1 at roots
    depth: np.ndarray  # 0 at roots
    tree: np.ndarray
    leaf_count: np.ndarray
    first_leaf: np.ndarray
    first_child: np.ndarray
    height: np.ndarray  # 0 at leaves, else 1 + the highest child
    leaf_nodes: np.ndarray  # [leaves] the node of every leaf, depth-first
    leaf_offsets: np.ndarray  # [trees + 1] the leaves of every tree
    depth_offsets: np.ndarray  # [depth + 2] the nodes of every depth

    @property
    def is_leaf(self) -> np.ndarray:
        return self.num_children == 0

    @property
    def end_leaf(self) -> np.ndarray:
        return self.first_leaf + self.leaf_count

    @classmethod
    def from_num_children(cls, num_children: np.ndarray) -> Structure:
        """Derive everything from the number of children per node, nodes already in canonical order."""
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
    """A frozen forest. Build one with a constructor below; every constructor takes a batch and makes one tree per entry.

    >>> documents = Hierarchy.from_nested([[3, 2], [4]])  # two documents: sentences of 3 and 2 tokens; one of 4
    >>> documents
    Hierarchy(2 trees, 9 leaves, 14 nodes, 5 families, depth 2)
    >>> documents.leaf_count.tolist()  # two roots, three sentences, nine tokens
    [5, 4, 3, 2, 4, 1, 1, 1, 1, 1, 1, 1, 1, 1]

    The number of children alone gives the forest back; the parents, for example:

    >>> nodes = torch.arange(documents.num_nodes)
    >>> torch.equal(documents.parent[documents.num_trees :], nodes.repeat_interleave(documents.num_children))
    True
    """

    def __init__(self, structure: Structure, *, node_ids: np.ndarray | None = None, device: torch.device | str = "cpu"):
        self.structure = structure
        self.device = torch.empty(0, device=device).device  # "cuda" by its full name, as tensors have it
        self._node_ids = node_ids
        self._cache: dict[Any, Any] = {}
        self._frozen = True

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_frozen", False):
            raise AttributeError(f"Hierarchy is frozen: cannot set {name!r}; build a new one instead")
        super().__setattr__(name, value)

    @classmethod
    def from_parents(cls, parent: Any) -> Hierarchy:
        """Build any forest: `parent[i]` is the parent of node i, −1 at a root. Children keep index order.

        Leaves are taken depth-first; `leaf_ids` and `node_ids` give the original node of each leaf and node.

        >>> tree = Hierarchy.from_parents([4, 3, 3, 4, -1])  # 4 → (0, 3), 3 → (1, 2)
        >>> tree.leaf_ids.tolist(), tree.node_ids.tolist()
        ([0, 1, 2], [4, 0, 3, 1, 2])

        Raises:
            InvalidInput: not a vector of integers, a parent out of range, a cycle.
        """
        array = integers("parent", parent)
        if array.ndim != 1:
            raise InvalidInput(
                "parent",
                given=f"shape {tuple(array.shape)}",
                expected="a vector with one parent per node",
                fix="a node of a tree has exactly one parent; copy a node that is to appear under two",
            )
        outside = np.flatnonzero((array < -1) | (array >= len(array)))
        if len(outside):
            raise InvalidInput(
                f"parent[{outside[0]}]",
                given=int(array[outside[0]]),
                expected=f"−1 (a root) or a node in 0..{len(array) - 1}",
                fix="number the nodes from 0",
            )
        return cls._from_parent_array(array, np.arange(len(array)), keep_ids=True)

    @classmethod
    def _from_parent_array(cls, parent: np.ndarray, rank: np.ndarray, *, keep_ids: bool = False) -> Hierarchy:
        """Put nodes in canonical order: breadth-first, siblings by `rank`, a level at a time."""
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
                f"parent[{node}]", given=f"a cycle {cycle}", expected="a forest", fix="make one of them a root (−1)"
            )
        return cls(Structure.from_num_children(counts[node_ids]), node_ids=node_ids if keep_ids else None)

    @classmethod
    def flat(cls, lengths: Any) -> Hierarchy:
        """Build one family per tree: attention over it is ordinary softmax attention.

        >>> Hierarchy.flat([3, 2])
        Hierarchy(2 trees, 5 leaves, 7 nodes, 2 families, depth 1)
        """
        lengths = _lengths("lengths", lengths)
        return cls(Structure.from_num_children(np.concatenate([lengths, np.zeros(int(lengths.sum()), np.int64)])))

    @classmethod
    def regular(
        cls, lengths: Any, branching: Iterable[int], *, repeat_last: bool = False, sinks: Sinks = None
    ) -> Hierarchy:
        """Build fixed windows: `branching` from the leaves up. The last family of a level may be short.

        The nodes that remain after the last factor are joined under the root; a level with a single node is the root.
        With `repeat_last` the last factor repeats, so that the depth grows with the logarithm of the length.

        Args:
            lengths: leaves per tree.
            branching: members per family, leaf families first.
            sinks: leaves that hang directly under the root, such as [CLS] and [SEP]: the number of first leaves of
                every tree, their positions in every tree (`(0, -1)`: first and last), or a mask over all leaves. A sink
                inside a sequence splits it: windows start anew after it.

        >>> Hierarchy.regular([1000], (16, 8)).num_children[:1].tolist()  # 1000 → 63 → 8, joined under the root
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
            raise InvalidInput("branching", given=repr(branching), expected="factors, such as (16, 8)")
        factors = [_positive(f"branching[{i}]", b) for i, b in enumerate(branching)]
        if not factors:
            raise InvalidInput(
                "branching", given="()", expected="at least one factor", fix="use Hierarchy.flat for one family"
            )
        if repeat_last and factors[-1] < 2:
            raise InvalidInput(
                "branching",
                given=f"a last factor of {factors[-1]} to repeat",
                expected="2 or more",
                fix="a factor of 1 never comes down to one root",
            )
        return cls._from_parent_array(*_windows(lengths, factors, repeat_last, sink_leaves(sinks, lengths)))

    @classmethod
    def from_nested(cls, nested: Sequence[Any], *, sinks: Sinks = None) -> Hierarchy:
        """Build one tree per entry: an integer is a node with that many leaves, a list is a node with these children.

        >>> print(Hierarchy.from_nested([[3, [2, 1]]]).show())
        tree 0 · 6 leaves
        ├─ 3 leaves
        └─ 2 members · 3 leaves
           ├─ 2 leaves
           └─ 1 leaf
        """
        parent: list[np.ndarray] = []
        count = 0

        def add(entry: Any, above: int, where: str, path: tuple[int, ...]) -> None:
            nonlocal count
            node = count
            parent.append(np.array([above]))
            count += 1
            if isinstance(entry, (list, tuple)):
                if id(entry) in path:
                    raise InvalidInput(where, given="a list that contains itself", expected="a finite nesting")
                if not entry:
                    raise InvalidInput(where, given="an empty list", expected="at least one child", fix="leave it out")
                for i, child in enumerate(entry):
                    add(child, node, f"{where}[{i}]", (*path, id(entry)))
            else:
                leaves = _positive(where, entry)
                parent.append(np.full(leaves, node))
                count += leaves

        if not isinstance(nested, (list, tuple)):
            raise InvalidInput("nested", given=type(nested).__name__, expected="a list with one entry per tree")
        for i, entry in enumerate(nested):
            add(entry, -1, f"nested[{i}]", ())
        array = np.concatenate(parent) if parent else np.empty(0, np.int64)
        return cls._from_parent_array(array, np.arange(len(array)))._with_sinks(sinks)

    @classmethod
    def from_offsets(cls, *levels: Any, sinks: Sinks = None) -> Hierarchy:
        """Build from one offsets vector per level, from the leaves up; the last one makes the trees.

        `levels[0][i] : levels[0][i+1]` are the leaves of family i, `levels[1]` groups those families, and so on.

        >>> tokens, sentences = [0, 3, 5, 9], [0, 2, 3]  # sentences of 3, 2, 4 tokens; documents of 2 and 1 sentences
        >>> Hierarchy.from_offsets(tokens, sentences) == Hierarchy.from_nested([[3, 2], [4]])
        True
        """
        if not levels:
            raise InvalidInput("levels", given="none", expected="at least one offsets vector")
        arrays = [_offsets(f"levels[{i}]", level) for i, level in enumerate(levels)]
        for i, (below, above) in enumerate(pairwise(arrays)):
            if above[-1] != len(below) - 1:
                raise InvalidInput(
                    f"levels[{i + 1}][-1]",
                    given=int(above[-1]),
                    expected=f"{len(below) - 1}, the number of families of levels[{i}]",
                )
        # Canonical order is top-down, and families are given depth-first: the counts per level are the forest.
        counts = [np.diff(level) for level in reversed(arrays)]
        num_children = np.concatenate([*counts, np.zeros(int(arrays[0][-1]), np.int64)])
        return cls(Structure.from_num_children(num_children))._with_sinks(sinks)

    def _with_sinks(self, sinks: Sinks) -> Hierarchy:
        leaves = sink_leaves(sinks, np.diff(self.structure.leaf_offsets))
        return self._from_parent_array(*cut_out_sinks(self.structure, leaves)) if len(leaves) else self

    @staticmethod
    def collate(hierarchies: Iterable[Hierarchy]) -> Hierarchy:
        """Join many forests into one; `uncollate` gives the single trees back.

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
        """Return the single trees."""
        s = self.structure
        order = np.argsort(s.tree, kind="stable")  # canonical order holds inside each tree too
        bounds = np.cumsum(np.bincount(s.tree, minlength=self.num_trees))[:-1]
        parts = np.split(s.num_children[order], bounds) if self.num_trees else []
        return [Hierarchy(Structure.from_num_children(part), device=self.device) for part in parts]

    @property
    def num_trees(self) -> int:
        return len(self.structure.leaf_offsets) - 1

    @property
    def num_leaves(self) -> int:
        return len(self.structure.leaf_nodes)

    @property
    def num_nodes(self) -> int:
        return len(self.structure.num_children)

    @property
    def num_families(self) -> int:
        return int((self.structure.num_children > 0).sum())

    @property
    def depth(self) -> int:
        """The largest number of steps from a root to a leaf (0 for a forest of single leaves, or an empty one)."""
        return max(len(self.structure.depth_offsets) - 2, 0)

    @property
    def lengths(self) -> list[int]:
        """Leaves per tree."""
        return np.diff(self.structure.leaf_offsets).tolist()

    @property
    def num_children(self) -> Tensor:
        return self.tensor("num_children")

    @property
    def parent(self) -> Tensor:
        return self.tensor("parent")

    @property
    def leaf_count(self) -> Tensor:
        return self.tensor("leaf_count")

    @property
    def node_ids(self) -> Tensor:
        """The original node of every node, as given to `from_parents`; 0, 1, 2, … for other constructors."""
        ids = self._node_ids
        return self.cached("node_ids", lambda: self._to_tensor(np.arange(self.num_nodes) if ids is None else ids))

    @property
    def leaf_ids(self) -> Tensor:
        """The original node of every leaf, as given to `from_parents`; 0, 1, 2, … for other constructors."""
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
        with torch.inference_mode(False):  # what is built now must serve later calls with gradients too
            self._cache[key] = value = build()
        return value

    def cached(self, key: Any, build: Callable[[], T]) -> T:
        """Return what `build` makes, built once per hierarchy and key. Operators keep their plans here."""
        if key in self._cache:
            return self._cache[key]
        return self._build(key, build)

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
        """Return the forest as text, a row per family, cut after `max_rows` rows."""
        s = self.structure
        rows: list[str] = []
        # An explicit stack: chains may be deeper than Python's own.
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
    """Parents and first leaves of `Hierarchy.regular`. Node ids: leaves, then windows level by level, then roots."""
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

    ids = np.flatnonzero(~is_sink)  # the nodes of the current level, their segment, their index in it
    segment = np.cumsum(starts)[ids] - 1
    index = ids - segment_start[segment]
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
    # A tree that has come down to one window has its root; the others get one.
    is_root = (np.bincount(tree, minlength=len(lengths))[tree] == 1) & (tops >= num_leaves)
    rootless = np.ones(len(lengths), bool)
    rootless[tree[is_root]] = False
    parent[tops[~is_root]] = (next_id + np.cumsum(rootless) - 1)[tree[~is_root]]
    return np.concatenate([parent, np.full(rootless.sum(), -1)]), np.concatenate([first_leaf, tree_start[rootless]])


def ranges(begin: np.ndarray, count: np.ndarray) -> np.ndarray:
    """[begin₀, begin₀+1, …, begin₀+count₀−1, begin₁, …]"""
    return np.repeat(begin - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))


def integers(where: str, values: Any) -> np.ndarray:
    """Return integers, from any device or list, as an int64 array; anything else raises, naming `where`."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise InvalidInput(where, given=f"{array.dtype} values", expected="integers")
    return array.astype(np.int64)


def _positive(where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise InvalidInput(where, given=repr(value), expected="a positive integer")
    return int(value)


def _lengths(where: str, lengths: Any) -> np.ndarray:
    array = integers(where, lengths)
    if array.ndim != 1:
        raise InvalidInput(where, given=f"shape {array.shape}", expected="a vector: the leaves of every tree")
    bad = np.flatnonzero(array < 1)
    if len(bad):
        raise InvalidInput(
            f"{where}[{bad[0]}]",
            given=int(array[bad[0]]),
            expected="at least one leaf per tree",
            fix="leave empty sequences out of the batch",
        )
    return array


def _offsets(where: str, offsets: Any) -> np.ndarray:
    array = integers(where, offsets)
    if array.ndim != 1 or len(array) == 0 or array[0] != 0:
        raise InvalidInput(where, given=f"{array.tolist()[:4]}…", expected="a vector that starts with 0")
    bad = np.flatnonzero(np.diff(array) < 1)
    if len(bad):
        i = int(bad[0])
        raise InvalidInput(
            f"{where}[{i}:{i + 2}]",
            given=array[i : i + 2].tolist(),
            expected="rising offsets: a family has at least one member",
            fix="leave empty families out",
        )
    return array
