"""Trees of converted layers: windows of tokens, sentences of the text, or the result of a function."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from hsa.errors import InvalidInput
from hsa.huggingface.sequences import Sequences
from hsa.huggingface.settings import FUNCTION, LayerSettings
from hsa.tree.hierarchy import Hierarchy

_KEPT = 64
_WINDOWS: OrderedDict[Any, Hierarchy] = OrderedDict()
"""Window trees of recent batches. Batches of the same lengths recur, and kernels store their plans in the tree."""


def tree_of(settings: LayerSettings, sequences: Sequences) -> Hierarchy:
    """Return a tree for each sequence, with one leaf per token and none for padding."""
    settings = settings.resolved(sequences.causal)
    kind = settings.tree
    if callable(kind):
        return sequences.cached(("tree", kind), lambda: _tree_from_function(kind, sequences))
    if kind == FUNCTION:
        raise InvalidInput(
            "tree",
            problem="the trees of this model came from a function, which its config cannot hold",
            expected="that function",
            fix="Call hsa.huggingface.convert(model, tree=function) after loading",
        )
    build = _sentence_tree if kind == "sentences" else _window_tree
    return sequences.cached(
        (build, settings.branching, settings.repeats_last, settings.sinks), lambda: build(settings, sequences)
    )


def _window_tree(settings: LayerSettings, sequences: Sequences) -> Hierarchy:
    assert settings.branching is not None
    sinks, device = sequences.sink_mask(settings.sinks), sequences.mask.device
    lengths, shape = sequences.keys.lengths, (settings.branching, settings.repeats_last)
    key = (tuple(lengths), *shape, sinks.tobytes() if isinstance(sinks, np.ndarray) else sinks, device)
    if key not in _WINDOWS:
        _WINDOWS[key] = Hierarchy.regular(lengths, shape[0], repeat_last=shape[1], sinks=sinks).to(device)
        if len(_WINDOWS) > _KEPT:
            _WINDOWS.popitem(last=False)
    _WINDOWS.move_to_end(key)
    return _WINDOWS[key]


def _tree_from_function(function: Callable[..., Any], sequences: Sequences) -> Hierarchy:
    ids = sequences.known_ids("a tree function").split(sequences.keys.lengths)
    tree = function(list(ids))
    if not isinstance(tree, Hierarchy):
        raise InvalidInput("tree(ids)", expected="an hsa.Hierarchy", got=f"a value of type {type(tree).__name__}")
    if tree.lengths != sequences.keys.lengths:
        raise InvalidInput(
            "tree(ids)",
            expected=f"trees of {_few(sequences.keys.lengths)} leaves, one per sequence, without leaves for padding",
            got=f"trees of {_few(tree.lengths)} leaves",
        )
    return tree.to(sequences.mask.device)


def _sentence_tree(settings: LayerSettings, sequences: Sequences) -> Hierarchy:
    assert settings.branching is not None
    ids, lengths = sequences.known_ids("tree='sentences'"), sequences.keys.lengths
    sinks = sequences.sink_mask(settings.sinks)
    starts = sequences.vocabulary.sentence_starts(ids.tolist(), lengths)
    tree = sentence_tree(starts, lengths, settings.branching, settings.repeats_last, sinks)
    return tree.to(sequences.mask.device)


def sentence_tree(
    starts: np.ndarray, lengths: list[int], branching: tuple[int, ...], repeat_last: bool, sinks: Any = None
) -> Hierarchy:
    """Build trees of sentences, each split into pieces of at most `branching[0]` tokens. The other factors group sentences.

    >>> starts = np.array([1, 0, 0, 1, 0, 0, 0, 0, 1, 0], bool)
    >>> print(sentence_tree(starts, [10], (4, 2), True).show())
    tree 0 · 10 leaves
    ├─ 2 members · 8 leaves
    │  ├─ 1 member · 3 leaves
    │  │  └─ 3 leaves
    │  └─ 2 members · 5 leaves
    │     ├─ 4 leaves
    │     └─ 1 leaf
    └─ 1 member · 2 leaves
       └─ 1 member · 2 leaves
          └─ 2 leaves
    """
    starts = starts.copy()
    ends = np.cumsum(lengths)
    starts[ends - lengths] = True
    begin = np.flatnonzero(starts)
    size = np.diff(np.append(begin, len(starts)))
    pieces = -(-size // branching[0])
    first_piece = np.cumsum(pieces) - pieces
    piece = np.repeat(begin - first_piece * branching[0], pieces) + np.arange(int(pieces.sum())) * branching[0]
    levels = [np.append(piece, len(starts)), np.append(first_piece, len(piece))]
    members = np.bincount(np.searchsorted(ends, begin, side="right"), minlength=len(lengths))  # sentences of each tree
    factors = list(branching[1:])
    while members.max() > 1 and factors:
        factor = factors[0] if len(factors) == 1 and repeat_last else factors.pop(0)
        if members.max() <= factor:
            break
        groups = -(-members // factor)
        first = np.cumsum(members) - members
        begin = np.repeat(first - (np.cumsum(groups) - groups) * factor, groups) + np.arange(groups.sum()) * factor
        levels.append(np.append(begin, members.sum()))
        members = groups
    levels.append(np.concatenate([[0], np.cumsum(members)]))
    return Hierarchy.from_offsets(*levels, sinks=sinks)


def _few(lengths: list[int]) -> str:
    return ", ".join(map(str, lengths[:4])) + (", …" if len(lengths) > 4 else "")
