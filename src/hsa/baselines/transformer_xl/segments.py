"""Texts read segment by segment: which rows every segment asks for, and which it remembers.

A layer's memory are the *inputs* of that layer at earlier tokens. Those are known before the layer begins, so that all
segments of all texts go through a layer at once: only layers wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hsa.nn.buckets import alike, padded, way_back

_AT_ONCE = 2**25
"""Pairs of query and key, padding included, in one call: a gigabyte of logits with eight heads in float32."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """Segments that share a call: keys are the remembered tokens, then the segment's own."""

    queries: Tensor  # [segments · length] rows of the segments; padding repeats a segment's last row
    remembered: Tensor  # [segments · memory] rows of what is remembered; padding comes first
    segments: int
    length: int
    memory: int
    mask: Tensor  # [segments or 1, 1, length, memory + length] 0, and −∞ for keys that a query does not see


@dataclass(frozen=True, eq=False)
class Segments:
    """What one pass over texts that go on needs to know of their lengths.

    What is remembered is numbered so: first the rows of the memory that was carried here, text after text, then those of
    this pass.
    """

    buckets: tuple[Bucket, ...]
    back: Tensor  # [tokens] the row of every token among the rows of all buckets
    longest: int  # keys of a bucket
    entries: int  # pairs of query and key
    recalls: bool  # tokens of this pass are remembered by later segments of this pass
    kept: tuple[int, ...]  # rows per text that are carried on
    keep: Tensor  # [Σ kept] which these are


def plan_segments(
    lengths: Sequence[int],
    segment: int,
    memory: int,
    *,
    carried: Sequence[int] | None = None,
    begun: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> Segments:
    """The segments of texts, each of which goes on where it stopped.

    Args:
        lengths: tokens of every text in this pass.
        segment: tokens of a segment.
        memory: tokens before a segment that it remembers.
        carried: rows of memory that every text brings along; none by default.
        begun: how many of them belong to a segment that goes on; none by default.
        device: where the plan is used.

    >>> plan = plan_segments([5, 2], segment=3, memory=2)
    >>> plan.entries  # (1 + 2 + 3) + (3 + 4), and 1 + 2
    16
    >>> plan.kept  # two tokens before the segment of two that has begun; the segment of two
    (4, 2)
    """
    sizes = np.asarray(lengths, np.int64)
    had = np.zeros_like(sizes) if carried is None else np.asarray(carried, np.int64)
    old = np.zeros_like(sizes) if begun is None else np.asarray(begun, np.int64)
    count = -(-(old + sizes) // segment)
    text = np.repeat(np.arange(len(sizes)), count)
    index = np.arange(len(text)) - np.repeat(np.cumsum(count) - count, count)
    start = np.maximum(0, index * segment - old[text])  # among the new tokens of the text
    end = np.minimum(sizes[text], (index + 1) * segment - old[text])
    # Of a segment that goes on, its own earlier tokens are remembered too.
    goes_on = np.minimum(memory, (had - old)[text]) + old[text]
    remembers = np.where(index == 0, goes_on, np.minimum(memory, had[text] + start))
    length = end - start
    rows = _Rows(np.cumsum(sizes) - sizes, np.cumsum(had), int(had.sum()))
    groups = _groups(remembers, length)
    buckets = tuple(_bucket(rows, text[g], start[g], length[g], remembers[g], device) for g in groups)
    now_begun = (old + sizes) % segment
    kept = np.minimum(had + sizes, memory + now_begun)
    every = np.repeat(np.arange(len(sizes)), kept)
    offset = np.arange(len(every)) - np.repeat(np.cumsum(kept) - kept, kept)
    keep = rows.remembered(every, (sizes - kept)[every] + offset)
    return Segments(
        buckets,
        torch.from_numpy(way_back(groups, rows.first[text] + start, length)).to(device),
        max((bucket.memory + bucket.length for bucket in buckets), default=0),
        int((length * remembers + length * (length + 1) // 2).sum()),
        bool((start[remembers > 0] > 0).any()),
        tuple(kept.tolist()),
        torch.from_numpy(keep).to(device),
    )


def plan_step(
    texts: int, segment: int, memory: int, *, carried: int, begun: int, device: torch.device | str = "cpu"
) -> Segments:
    """What `plan_segments` gives for one token more of texts that are all at the same position: made on the device.

    Whoever writes needs another plan for every token, because the memory grows, or the segment does.

    Args:
        texts: how many.
        carried, begun: of each of them; carried - begun is at most `memory`, so that a token sees all that is carried.

    >>> plan_step(2, 3, 5, carried=4, begun=1).keep.tolist()  # all of the first text, then of the second
    [0, 1, 2, 3, 8, 4, 5, 6, 7, 9]
    """
    rows = torch.arange(texts * (carried + 1), device=device)
    old, new = rows[: texts * carried], rows[texts * carried :]
    bucket = Bucket(
        queries=rows[:texts],
        remembered=old,
        segments=texts,
        length=1,
        memory=carried,
        mask=torch.zeros(1, 1, 1, carried + 1, device=device),
    )
    kept = min(carried + 1, memory + (begun + 1) % segment)
    keep = torch.cat([old.view(texts, carried), new[:, None]], 1)[:, carried + 1 - kept :]
    return Segments(
        buckets=(bucket,),
        back=rows[:texts],
        longest=carried + 1,
        entries=texts * (carried + 1),
        recalls=False,
        kept=(kept,) * texts,
        keep=keep.flatten(),
    )


@dataclass(frozen=True, eq=False)
class _Rows:
    """Where the tokens of a text lie."""

    first: np.ndarray  # [texts] of the new tokens
    end: np.ndarray  # [texts] of the carried ones
    carried: int

    def remembered(self, text: np.ndarray, offset: np.ndarray) -> np.ndarray:
        """The row of a token, counted from the first new one of its text: those before it were carried here."""
        return np.where(offset < 0, self.end[text] + offset, self.carried + self.first[text] + offset)


def _groups(remembers: np.ndarray, length: np.ndarray) -> list[np.ndarray]:
    """Segments of like sizes, and not too many of them."""
    groups = []
    for same in alike(remembers, length):
        size = int(length[same].max())
        most = max(1, _AT_ONCE // (size * (size + int(remembers[same].max()))))
        groups += np.split(same, range(most, len(same), most))
    return groups


def _bucket(
    rows: _Rows,
    text: np.ndarray,
    start: np.ndarray,
    length: np.ndarray,
    remembers: np.ndarray,
    device: torch.device | str,
) -> Bucket:
    longest, memory = int(length.max()), int(remembers.max())
    queries = padded(rows.first[text] + start, length)
    offset = np.arange(-memory, 0)
    absent = offset < -remembers[:, None]
    remembered = np.where(absent, 0, rows.remembered(text[:, None], start[:, None] + offset))
    unseen = np.arange(-memory, longest) > np.arange(longest)[:, None]
    if absent.any():
        unseen = unseen | np.pad(absent, ((0, 0), (0, longest)))[:, None]
    mask = np.where(unseen, np.float32(-np.inf), np.float32(0))
    return Bucket(
        torch.from_numpy(queries.reshape(-1)).to(device),
        torch.from_numpy(remembered.reshape(-1)).to(device),
        len(text),
        longest,
        memory,
        torch.from_numpy(mask.reshape(-1, 1, longest, memory + longest)).to(device),
    )
