"""Attention with relative positions to a segment and what came before it (Dai et al., *Transformer-XL*, 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hsa.attention.flops import Flops, entry_operations
from hsa.baselines.transformer_xl.segments import Bucket, Segments
from hsa.nn.attention import note_flops

_BASE = 10_000.0


class DistanceFeatures:
    """r_d = sin(d · f), cos(d · f) of falling frequencies f: for any distance d, and nothing about it is learned.

    Args:
        width: of r.

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
        """`[count + 1, width]`, distances count − 1 … 0, and −1, which makes room for `relative_shift`."""
        key = (device, dtype)
        known = len(self._tables[key]) if key in self._tables else 0
        if known < count + 1:  # twice as many: distances come one by one where a text is written
            with torch.inference_mode(False):  # what is made now must serve later calls with gradients too
                self._tables[key] = self._make(max(count + 1, 2 * known), device).to(dtype)
        table = self._tables[key]
        return table[len(table) - count - 1 :]

    def _make(self, count: int, device: torch.device) -> Tensor:
        wide = torch.float64  # at distance 100,000 a float32 phase is off by a hundredth
        waves = -(-self.width // 2)
        frequencies = _BASE ** (-torch.arange(waves, device=device, dtype=wide) / waves)
        phase = torch.arange(count - 2, -2, -1, device=device, dtype=wide)[:, None] * frequencies
        return torch.cat([phase.sin(), phase.cos()], -1)[:, : self.width]


def relative_shift(x: Tensor) -> Tensor:
    """From logits by distance to logits by key: a view.

        out[…, i, j] = x[…, i, j + rows − 1 − i]

    Args:
        x: `[…, rows, keys + 1]`; column c holds distance keys − 1 − c, of which −1 is never looked at.

    Returns `[…, rows, keys]`: the last row is at distance 0 from the last key. Keys after a row's own have no meaning.

    >>> relative_shift(torch.tensor([[2, 1, 0, -1], [2, 1, 0, -1]])).tolist()  # each row's distance from three keys
    [[1, 0, -1], [2, 1, 0]]
    """
    rows, columns = x.shape[-2:]
    return x.flatten(-2)[..., rows - 1 : -1].unflatten(-1, (rows, columns - 1))


class RelativeAttention(nn.Module):
    """Causal attention to a segment and the memory before it, where only distances count.

        logits_ij = ((q_i + u)·k_j + (q_i + w)·W_r r_(i−j)) / √d        q = W_q x        k, v = W_kv x or W_kv memory

    No gradient flows into the memory; it does flow into W_kv.

    Args:
        width: of the token vectors.
        heads: of attention.

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
        """What attention adds to every token, and what can be carried on from here.

        Args:
            x: `[tokens, width]`.
            carried: `[rows, width]`, x of earlier tokens; or, where `projected`, `[rows, 2·width]`, their keys and values.
                None for no earlier tokens.
            segments: from `plan_segments`.
            projected: whether keys and values are carried: they save work where weights do not change.

        Returns:
            `[tokens, width]`; and `[rows + tokens, width or 2·width]`, of which `segments.keep` are those to carry.
        """
        note_flops(Flops(self._operations(segments), 0))
        own = self.key_value(x)
        rows = _after(carried, own if projected else x)
        remembered = rows if projected else self._remember(rows, own, segments)
        attended = self._attend(self.query(x), own, remembered, segments)
        return self.output(attended), rows

    def _remember(self, rows: Tensor, own: Tensor, segments: Segments) -> Tensor:
        """Keys and values of all that is remembered in this pass, without a gradient into the rows."""
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
        # Few queries: fold W_r into them rather than apply it to all distances.
        width, longest = self.heads * self.head_dim, segments.longest
        folds = len(q) * (width + self.heads * longest) < longest * (width + len(q))
        distances = features if folds else self.distance(features)
        parts = []
        for bucket in segments.buckets:
            keys, values = self._keys(own, remembered, bucket)
            asked = self._split(q.index_select(0, bucket.queries), bucket.length)
            near = distances[len(distances) - bucket.memory - bucket.length - 1 :]
            bias = relative_shift(self._distance_logits((asked + w) * scale, near, folds))
            bias = bias + bucket.mask.to(bias.dtype)
            attended = F.scaled_dot_product_attention(asked + u, keys, values, attn_mask=bias, scale=scale)
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
        """`[segments · length, width]` → `[segments, heads, length, head_dim]`"""
        return rows.view(-1, length, self.heads, self.head_dim).transpose(1, 2)

    def _distance_logits(self, queries: Tensor, distances: Tensor, folds: bool) -> Tensor:
        """`[segments, heads, length, distances]`"""
        if folds:
            weight = self.distance.weight.unflatten(0, (self.heads, self.head_dim)).to(queries.dtype)
            return (queries @ weight) @ distances.T.to(queries.dtype)
        return queries @ distances.view(-1, self.heads, self.head_dim).permute(1, 2, 0)

    def _operations(self, segments: Segments) -> int:
        """Every pair compares contents and distance."""
        width = self.heads * self.head_dim
        return segments.entries * entry_operations(2 * width, self.heads, value_width=width)


def _after(carried: Tensor | None, rows: Tensor) -> Tensor:
    """What was carried here and what is new, without gradients."""
    return rows.detach() if carried is None else torch.cat([carried.to(rows.dtype), rows]).detach()
