"""The causal tree: the tree of a sequence that grows token by token.

A node of level l (leaves are level 0) has at most `branching[l − 1]` members; the last factor repeats, so that the depth
grows with the logarithm of the length. A node is closed when it is full, or when a token closes it: `closes` holds, for each
token, the height up to which it ends the families that contain it (a full stop ends a sentence, a blank line ends a
paragraph). It must follow from the tokens so far. The first `sinks` tokens are children of the root.

Every node except the last of each level is closed. A closed node never changes: a token attends to the same past in a full
pass as in the step in which it was the newest token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np

from hsa.errors import InvalidInput
from hsa.tree.hierarchy import Hierarchy, integers


@dataclass(frozen=True, eq=False)
class Level:
    """Nodes of one level, tree by tree."""

    tree: np.ndarray  # [nodes]
    end: np.ndarray  # [nodes] index within the tree of the token after the node
    leaves: np.ndarray  # [nodes] number of tokens in the node
    offsets: np.ndarray  # [nodes + 1] slice of members among the nodes of the level below
    closed: np.ndarray  # [nodes]


def cap(branching: Sequence[int], level: int) -> int:
    """Return the maximum number of members of a node of a level."""
    return branching[min(level, len(branching)) - 1]


def check_branching(branching: Any) -> tuple[int, ...]:
    valid = isinstance(branching, (tuple, list)) and branching
    if not valid or not all(isinstance(b, int) and not isinstance(b, bool) and b >= 2 for b in branching):
        raise InvalidInput(
            "branching",
            got=repr(branching),
            expected="members per family from the leaves up, 2 or more each, such as (16, 16)",
        )
    return tuple(branching)


def levels(
    lengths: Sequence[int], branching: Sequence[int], closes: np.ndarray | None, sinks: int, height: int | None = None
) -> list[Level]:
    """Return the levels from 0 (the tokens) up to `height`, by default up to the level with one node per tree.

    Sinks share no node with other tokens: at every level, the sinks of a tree have their own nodes.
    """
    sizes = np.asarray(lengths, np.int64)
    tokens = int(sizes.sum())
    tree = np.repeat(np.arange(len(sizes)), sizes)
    token = np.arange(tokens) - (np.cumsum(sizes) - sizes)[tree]
    ends_at = np.zeros(tokens, np.int64) if closes is None else closes
    last_sink = token == np.minimum(sinks, sizes)[tree] - 1
    result = [Level(tree, token + 1, np.ones(tokens, np.int64), np.arange(tokens + 1), np.ones(tokens, bool))]
    last = np.arange(tokens)  # last token of every node
    for level in count(1):
        growing = tree[result[-1].end > sinks]
        if level > height if height is not None else len(np.unique(growing)) == len(growing):
            return result
        members = cap(branching, level)
        stops = (ends_at[last] >= level) | last_sink[last]
        stops[:-1] |= tree[1:] != tree[:-1]
        begins = np.concatenate([[True], stops[:-1]])
        run = np.cumsum(begins) - 1
        index = np.arange(len(last)) - np.flatnonzero(begins)[run]
        first = np.flatnonzero(index % members == 0)
        offsets = np.append(first, len(last))
        last, tree = last[offsets[1:] - 1], tree[first]
        below = result[-1]
        is_complete = (np.diff(offsets) == members) | (ends_at[last] >= level) | last_sink[last]
        result.append(
            Level(
                tree,
                below.end[offsets[1:] - 1],
                np.add.reduceat(below.leaves, first),
                offsets,
                is_complete & below.closed[offsets[1:] - 1],
            )
        )
    raise AssertionError  # unreachable: levels shrink until each tree has one node


def causal_tree(lengths: Any, branching: Sequence[int], closes: Any = None, sinks: int = 0) -> Hierarchy:
    """Build the trees of sequences that grow token by token, for causal attention.

    Complete families never change when a token is added. Families may follow sentences and paragraphs: `closes` ends a
    family before it is full.

    Args:
        lengths: Number of tokens per sequence.
        branching: Maximum number of members per family, leaf families first; the last factor repeats.
        closes: Height up to which each token closes the families that contain it, 0 for none, `[tokens]`. None (the
            default) closes families only when they are full.
        sinks: Number of first tokens of every sequence that are children of the root.

    >>> print(causal_tree([9], (3, 2), closes=[0, 1, 0, 0, 2, 0, 0, 0, 0]).show())
    tree 0 · 9 leaves
    ├─ 2 members · 5 leaves
    │  ├─ 2 leaves
    │  └─ 3 leaves
    └─ 2 members · 4 leaves
       ├─ 3 leaves
       └─ 1 leaf
    """
    branching = check_branching(branching)
    if isinstance(sinks, bool) or not isinstance(sinks, int) or sinks < 0:
        raise InvalidInput("sinks", got=repr(sinks), expected="0 or a positive number of first tokens")
    sizes = tuple(integers("lengths", lengths).tolist())
    if closes is None:
        return _windows(sizes, branching, sinks)
    if min(sizes, default=1) < 1:
        raise InvalidInput(
            "lengths", got=list(sizes), expected="a token or more per sequence", fix="Leave empty sequences out"
        )
    heights = check_closes(closes, sum(sizes))
    by_level = levels(sizes, branching, heights, sinks)
    offsets = [level.offsets for level in by_level[1:]]
    top = np.bincount(by_level[-1].tree, minlength=len(sizes))
    if (top > 1).any() or len(offsets) == 0:
        offsets.append(np.concatenate([[0], np.cumsum(top)]))
    return Hierarchy.from_offsets(*offsets, sinks=sinks or None)


@lru_cache(maxsize=32)
def _windows(lengths: tuple[int, ...], branching: tuple[int, ...], sinks: int) -> Hierarchy:
    """Build trees of full windows. Cached, because lengths recur and operators keep their plans with the hierarchy."""
    return Hierarchy.regular(list(lengths), branching, repeat_last=True, sinks=sinks or None)


def check_closes(closes: Any, number: int) -> np.ndarray:
    array = integers("closes", closes)
    if array.shape != (number,) or (array < 0).any():
        raise InvalidInput(
            "closes",
            got=f"shape {array.shape}, values {array.min(initial=0)}..{array.max(initial=0)}",
            expected=f"shape ({number},), a height of 0 or more per token",
        )
    return array
