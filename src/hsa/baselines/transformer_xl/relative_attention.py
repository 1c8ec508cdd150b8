"""Attention with relative positions to a segment and the memory before it (Dai et al., *Transformer-XL*, 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hsa.attention.flops import Flops, entry_operations
from hsa.baselines.transformer_xl.segments import Bucket, Segments
from hsa.nn.attention import note_flops

_BASE = 10_000.0


class DistanceFeatures:
    """Fixed features of any distance d: r_d = sin(d · f), cos(d · f) with falling frequencies f.

    Args:
        width: Width of r.

    >>> features = DistanceFeatures(4)(2, torch.device("cpu"), torch.float32)
    >>> features.shape
    torch.Size([3, 4])
    >>> features[1].tolist()  # distance 0
    [0.0, 0.0, 1.0, 1.0]
    """

    def __init__(self, width: int):
        self.width = width
        self._tables: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def __call__(self, count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return `[count + 1, width]`: distances count − 1 … 0, and −1, the spare column of `relative_shift`."""
        key = (device, dtype)
        known = len(self._tables[key]) if key in self._tables else 0
        if known < count + 1:  # double the table: in generation, distances grow one by one
            with torch.inference_mode(False):  # tables are cached, and later calls may need gradients
                self._tables[key] = self._make(max(count + 1, 2 * known), device).to(dtype)
        table = self._tables[key]
        return table[len(table) - count - 1 :]

    def _make(self, count: int, device: torch.device) -> Tensor:
        wide = torch.float64  # at distance 100,000, a float32 phase is wrong by 0.01
        waves = -(-self.width // 2)
        frequencies = _BASE ** (-torch.arange(waves, device=device, dtype=wide) / waves)
        phase = torch.arange(count - 2, -2, -1, device=device, dtype=wide)[:, None] * frequencies
        return torch.cat([phase.sin(), phase.cos()], -1)[:, : self.width]


def relative_shift(x: Tensor) -> Tensor:
    """Turn logits by distance into logits by key, as a view.

        out[…, i, j] = x[…, i, j + rows − 1 − i]

    Args:
        x: `[…, rows, keys + 1]`. Column c holds distance keys − 1 − c; the last, −1, only makes the view possible.

    Returns:
        `[…, rows, keys]`. The last row has distance 0 to the last key. Entries of keys after a row's own are meaningless.

    >>> relative_shift(torch.tensor([[2, 1, 0, -1], [2, 1, 0, -1]])).tolist()  # each row's distance from three keys
    [[1, 0, -1], [2, 1, 0]]
    """
    rows, columns = x.shape[-2:]
    return x.flatten(-2)[..., rows - 1 : -1].unflatten(-1, (rows, columns - 1))


class RelativeAttention(nn.Module):
    """Causal attention to a segment and the memory before it, with relative positions.

        logits_ij = ((q_i + u)·k_j + (q_i + w)·W_r r_(i−j)) / √d        q = W_q x        k, v = W_kv x or W_kv memory

    Gradients flow into W_kv, but not into the memory.

    Args:
        width: Width of the token vectors.
        heads: Number of heads.

    >>> from hsa.baselines.transformer_xl.segments import plan_segments
    >>> attention = RelativeAttention(16, 2)
    >>> attention(torch.randn(7, 16), None, plan_segments([5, 2], segment=3, memory=2))[0].shape
    torch.Size([7, 16])
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.distance = nn.Linear(width, width, bias=False)
        self.u = nn.Parameter(torch.zeros(heads * self.head_dim))
        self.w = nn.Parameter(torch.zeros(heads * self.head_dim))
        self.output = nn.Linear(width, width, bias=False)
        self.features = DistanceFeatures(width)

    def forward(
        self, x: Tensor, carried: Tensor | None, segments: Segments, *, projected: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Attend, and return the rows from which the next pass can carry its memory.

        Args:
            x: `[tokens, width]` New tokens.
            carried: Memory: x of earlier tokens `[rows, width]`; or, if `projected`, their keys and values
                `[rows, 2·width]`. None if there are no earlier tokens.
            segments: Plan made by `plan_segments`.
            projected: Whether the memory holds keys and values, which saves work while weights do not change.

        Returns:
            Attention output `[tokens, width]`, and rows `[rows + tokens, width or 2·width]`; `segments.keep` selects the
            rows to carry on.
        """
        note_flops(Flops(self._operations(segments), 0))
        own = self.key_value(x)
        rows = _after(carried, own if projected else x)
        remembered = rows if projected else self._remember(rows, own, segments)
        attended = self._attend(self.query(x), own, remembered, segments)
        return self.output(attended), rows

    def _remember(self, rows: Tensor, own: Tensor, segments: Segments) -> Tensor:
        """Return keys and values of the rows that this pass remembers, without a gradient into the rows."""
        if segments.recalls and torch.is_grad_enabled():
            return self.key_value(rows)
        before = self.key_value(rows[: len(rows) - len(own)])
        return torch.cat([before, own]) if segments.recalls else before

    def _attend(self, q: Tensor, own: Tensor, remembered: Tensor, segments: Segments) -> Tensor:
        if not len(q):
            return q
        scale = self.head_dim**-0.5
        u, w = (bias.to(q.dtype).view(self.heads, 1, self.head_dim) for bias in (self.u, self.w))
        features = self.features(segments.longest, q.device, self.distance.weight.dtype)
        # With few queries, it is cheaper to apply W_r to them than to all distances.
        width, longest = self.heads * self.head_dim, segments.longest
        folds = len(q) * (width + self.heads * longest) < longest * (width + len(q))
        distances = features if folds else self.distance(features)
        parts = []
        for bucket in segments.buckets:
            keys, values = self._keys(own, remembered, bucket)
            queries = self._split(q.index_select(0, bucket.queries), bucket.length)
            near = distances[len(distances) - bucket.memory - bucket.length - 1 :]
            bias = relative_shift(self._distance_logits((queries + w) * scale, near, folds))
            bias = bias + bucket.mask.to(bias.dtype)
            attended = F.scaled_dot_product_attention(queries + u, keys, values, attn_mask=bias, scale=scale)
            parts.append(attended.transpose(1, 2).flatten(0, 1).flatten(1))
        return torch.cat(parts).index_select(0, segments.back)

    def _keys(self, own: Tensor, remembered: Tensor, bucket: Bucket) -> tuple[Tensor, Tensor]:
        rows = own.index_select(0, bucket.queries).unflatten(0, (bucket.segments, bucket.length))
        if bucket.memory:
            before = remembered.index_select(0, bucket.remembered).unflatten(0, (bucket.segments, bucket.memory))
            rows = torch.cat([before, rows], 1)
        keys, values = rows.chunk(2, -1)
        length = rows.shape[1]
        return self._split(keys.flatten(0, 1), length), self._split(values.flatten(0, 1), length)

    def _split(self, rows: Tensor, length: int) -> Tensor:
        """Reshape `[segments · length, width]` to `[segments, heads, length, head_dim]`."""
        return rows.view(-1, length, self.heads, self.head_dim).transpose(1, 2)

    def _distance_logits(self, queries: Tensor, distances: Tensor, folds: bool) -> Tensor:
        """Return logits by distance `[segments, heads, length, distances]`."""
        if folds:
            weight = self.distance.weight.unflatten(0, (self.heads, self.head_dim)).to(queries.dtype)
            return (queries @ weight) @ distances.T.to(queries.dtype)
        return queries @ distances.view(-1, self.heads, self.head_dim).permute(1, 2, 0)

    def _operations(self, segments: Segments) -> int:
        """Return the number of operations; every pair of query and key compares contents and distance."""
        width = self.heads * self.head_dim
        return segments.entries * entry_operations(2 * width, self.heads, value_width=width)


def _after(carried: Tensor | None, rows: Tensor) -> Tensor:
    """Return the carried rows followed by the new ones, without gradients."""
    return rows.detach() if carried is None else torch.cat([carried.to(rows.dtype), rows]).detach()
