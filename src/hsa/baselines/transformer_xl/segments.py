"""Plans for reading texts segment by segment: the query rows of every segment, and the rows it remembers.

The memory of a layer holds its *inputs* at earlier tokens. These are known before the layer runs, so all segments of all
texts pass through a layer at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hsa.nn.buckets import group_by_size, padded_rows, rows_after_padding

_AT_ONCE = 2**25
"""Maximum number of query-key pairs per call, padding included: 1 GiB of logits with eight heads in float32."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """Segments of similar sizes that share one call. Keys are the remembered tokens, then the segment's own."""

    queries: Tensor  # [segments · length] rows of the segments; padding repeats a segment's last row
    remembered: Tensor  # [segments · memory] remembered rows; padding comes first
    segments: int
    length: int
    memory: int
    mask: Tensor  # [segments or 1, 1, length, memory + length] 0 for visible keys, −∞ for hidden ones


@dataclass(frozen=True, eq=False)
class Segments:
    """Plan of one pass over the next tokens of some texts.

    Remembered rows are numbered with the carried memory first, text by text, then the tokens of this pass.
    """

    buckets: tuple[Bucket, ...]
    back: Tensor  # [tokens] row of every token among the rows of all buckets
    longest: int  # largest number of keys of a bucket
    entries: int  # pairs of query and key
    recalls: bool  # whether segments of this pass remember tokens of this pass
    kept: tuple[int, ...]  # number of rows per text to carry on
    keep: Tensor  # [Σ kept] the rows to carry on


def plan_segments(
    lengths: Sequence[int],
    segment: int,
    memory: int,
    *,
    carried: Sequence[int] | None = None,
    begun: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> Segments:
    """Plan a pass over the next tokens of texts.

    Args:
        lengths: Number of tokens of every text in this pass.
        segment: Number of tokens per segment.
        memory: Number of tokens that a segment remembers.
        carried: Number of memory rows of every text; 0 by default.
        begun: Number of these rows that belong to an unfinished segment; 0 by default.
        device: Device of the plan.

    >>> plan = plan_segments([5, 2], segment=3, memory=2)
    >>> plan.entries  # (1 + 2 + 3) + (3 + 4), and 1 + 2
    16
    >>> plan.kept  # 2 remembered tokens and the 2 of the unfinished segment; the 2 of the unfinished segment
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
    # An unfinished segment also remembers its own earlier tokens.
    unfinished = np.minimum(memory, (had - old)[text]) + old[text]
    remembers = np.where(index == 0, unfinished, np.minimum(memory, had[text] + start))
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
        torch.from_numpy(rows_after_padding(groups, rows.first[text] + start, length)).to(device),
        max((bucket.memory + bucket.length for bucket in buckets), default=0),
        int((length * remembers + length * (length + 1) // 2).sum()),
        bool((start[remembers > 0] > 0).any()),
        tuple(kept.tolist()),
        torch.from_numpy(keep).to(device),
    )


def plan_step(
    texts: int, segment: int, memory: int, *, carried: int, begun: int, device: torch.device | str = "cpu"
) -> Segments:
    """Plan one more token of texts at the same position; equal to `plan_segments`, but built on the device.

    Generation needs a new plan for every token, because the memory or the segment grows.

    Args:
        texts: Number of texts.
        segment, memory, device: See `plan_segments`.
        carried, begun: See `plan_segments`; the same for all texts. carried − begun is at most `memory`, so that the token
            sees all carried rows.

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
    """Row offsets of the tokens of every text."""

    first: np.ndarray  # [texts] first row among the new tokens
    end: np.ndarray  # [texts] end among the carried rows
    carried: int  # carried rows of all texts

    def remembered(self, text: np.ndarray, offset: np.ndarray) -> np.ndarray:
        """Return the remembered row of a token at this offset from the first new token; negative ones were carried."""
        return np.where(offset < 0, self.end[text] + offset, self.carried + self.first[text] + offset)


def _groups(remembers: np.ndarray, length: np.ndarray) -> list[np.ndarray]:
    """Group segments of similar sizes, with at most `_AT_ONCE` pairs per group."""
    groups = []
    for same in group_by_size(remembers, length):
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
    queries = padded_rows(rows.first[text] + start, length)
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
