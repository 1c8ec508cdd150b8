"""One converted layer: padded queries, keys and values → the operator → padded outputs, with a count on request."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hsa.attention.cache import interface as cache
from hsa.attention.dense import dense_weights
from hsa.attention.flops import Flops, flops
from hsa.attention.hierarchical.operator import hierarchical_attention
from hsa.attention.multiscale.cluster import KeyClusters, cluster_keys, operations_per_key
from hsa.attention.multiscale.operator import multiscale_attention
from hsa.attention.multiscale.select import select
from hsa.attention.softmax import exact
from hsa.huggingface.sequences import Sequences
from hsa.huggingface.settings import LayerSettings
from hsa.huggingface.trees import tree_of


@dataclass
class Counted:
    """Operations of attention in the forward passes inside `counting()`: of each layer, and of exact attention there."""

    layers: dict[int, Flops] = field(default_factory=dict)
    exact: dict[int, int] = field(default_factory=dict)

    def add(self, layer: int, found: Flops, exact: int) -> None:
        before = self.layers.get(layer, Flops(0, 0))
        self.layers[layer] = Flops(
            *(getattr(before, name) + getattr(found, name) for name in ("attention", "pooling", "choice", "finding"))
        )
        self.exact[layer] = self.exact.get(layer, 0) + exact

    @property
    def total(self) -> int:
        return sum(layer.total for layer in self.layers.values())

    @property
    def ratio(self) -> float:
        """How many times fewer operations than exact attention, everything counted."""
        return sum(self.exact.values()) / self.total if self.total else math.nan


_counter: ContextVar[Counted | None] = ContextVar("hsa_counter", default=None)


@contextlib.contextmanager
def counting() -> Iterator[Counted]:
    """Counts the operations of attention of every forward pass of models on "hsa" attention inside this context."""
    counted = Counted()
    token = _counter.set(counted)
    try:
        yield counted
    finally:
        _counter.reset(token)


def is_counting() -> bool:
    return _counter.get() is not None


def count_step(layer: int, q: Tensor, sequences: Sequences, taken: cache.Counted) -> None:
    """Adds a layer that attends to a cache of trees."""
    counted = _counter.get()
    if counted is not None:
        dim = q.shape[-1]
        found = Flops((4 * dim + 1) * taken.entries, taken.pooling, (2 * dim + 1) * taken.scored, taken.clustering)
        counted.add(layer, found, exact_operations(q, sequences))


def count_exact(layer: int, q: Tensor, sequences: Sequences) -> None:
    """Adds a layer that attends exactly."""
    counted = _counter.get()
    if counted is not None:
        operations = exact_operations(q, sequences)
        counted.add(layer, Flops(operations, 0), operations)


def count_mask(layer: int, q: Tensor, mask: Tensor | None) -> None:
    """Adds a layer that attends exactly to what a mask `[batch, heads or 1, queries, keys]` of another form lets it see."""
    counted = _counter.get()
    if counted is not None and mask is not None and mask.ndim == 4:
        seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        asks = seen.diagonal(seen.shape[-1] - seen.shape[-2], -2, -1)  # padded queries see others but no padding
        pairs = int((seen & asks[..., None]).expand(len(q), *seen.shape[1:]).sum()) // seen.shape[1]
        operations = (4 * q.shape[1] * q.shape[-1] + q.shape[1]) * pairs
        counted.add(layer, Flops(operations, 0), operations)


def exact_operations(q: Tensor, sequences: Sequences) -> int:
    """Of softmax attention: an entry per query and key that it may see, as `flops_flat` counts them."""
    heads, dim = q.shape[1], q.shape[-1]
    pairs = 0
    for asking, total in zip(sequences.queries.lengths, sequences.keys.lengths, strict=True):
        pairs += asking * total - (asking * (asking - 1) // 2 if sequences.causal else 0)
    return (4 * heads * dim + heads) * pairs


_probe: ContextVar[tuple[Sequence[float], dict[int, Tensor]] | None] = ContextVar("hsa_probe", default=None)


@contextlib.contextmanager
def probing(biases: Sequence[float]) -> Iterator[dict[int, Tensor]]:
    """How far converted layers are from exact attention on their own inputs, for each bias of pooled nodes.

    Yields what forward passes inside this context fill: layer → `[biases, heads]` sums of squared differences.
    """
    errors: dict[int, Tensor] = {}
    token = _probe.set((biases, errors))
    try:
        yield errors
    finally:
        _probe.reset(token)


def is_probing() -> bool:
    return _probe.get() is not None


def exact_is_cheaper(settings: LayerSettings, length: int, *, causal: bool) -> bool:
    """Whether a sequence of so many tokens is so short that exact attention takes no more operations; then it is done.

    Per query, in entries of attention: the families that are exact, a share of every node above them, half an entry for each
    family that is scored, and what finding takes. In causal layers only where nothing would be pooled: what a token sees
    must not depend on how long the text becomes.
    """
    if settings.operator != "multiscale" or settings.hierarchy not in ("keys", "windows"):
        return False
    size, found = settings.branching[0], settings.hierarchy == "keys"
    families = -(-length // size)
    if causal:
        return (found and length <= settings.chunk_size) or (families <= settings.top_k and settings.sinks != "special")
    own = 0 if found else (1 + 2 * settings.near) * size
    levels = math.log(families, settings.branching[-1])
    scored = families / 2 if settings.top_k else 0.0
    finding = operations_per_key(levels) / 4 if found else 0.0
    return own + settings.top_k * size + levels + scored + finding >= length


def attend(
    settings: LayerSettings,
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    *,
    scale: float | None,
    dropout_p: float,
    weights: bool,
    orders: list[KeyClusters] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`[batch, queries, heads, dim]`, and on request the dense weights `[batch, heads, queries, keys]`.

    `orders` takes the order of the keys, if one was found.
    """
    settings.check_direction(layer, may_look_ahead=not sequences.causal)
    packed = sequences.queries.pack(q), sequences.keys.pack(k), sequences.keys.pack(v)
    tree = tree_of(settings, sequences)
    if settings.operator == "hierarchical":
        inside: Any = partial(_dropped, dropout_p=dropout_p) if dropout_p else "exact"
        operator: partial[Tensor] = partial(
            hierarchical_attention, include_self=True, family_attention=inside, scale=scale
        )
        found = flops(tree, *_width(packed[0])) if _counter.get() is not None else None
    else:
        operator, found = _multiscale(settings, packed[0], packed[1], tree, sequences, scale, dropout_p)
        if orders is not None and operator.keywords["clusters"] is not None:
            orders.append(operator.keywords["clusters"])
    counted = _counter.get()
    if counted is not None and found is not None:
        counted.add(layer, found, exact_operations(q, sequences))
    if _probe.get() is not None and settings.operator == "multiscale":
        _note_errors(operator, layer, packed, tree, (q, k, v), sequences, scale)
    out = sequences.queries.unpack(operator(*packed, tree)).transpose(1, 2)
    dense = _dense(operator, packed[0], packed[1], tree, sequences) if weights else None
    return out, dense


def _note_errors(
    operator: Callable[..., Tensor],
    layer: int,
    packed: tuple[Tensor, Tensor, Tensor],
    tree: Any,
    padded: tuple[Tensor, Tensor, Tensor],
    sequences: Sequences,
    scale: float | None,
) -> None:
    probe = _probe.get()
    assert probe is not None
    biases, errors = probe
    q, k, v = padded
    exact, _ = attend_exactly(q, k, v, sequences.allowed(), causal=sequences.causal, scale=scale, dropout_p=0.0)
    exact = sequences.queries.pack(exact.transpose(1, 2)).float()
    found = [(operator(*packed, tree, pooled_bias=bias).float() - exact).square().sum((0, 2)) for bias in biases]
    errors[layer] = errors.get(layer, 0) + torch.stack(found)


def attend_exactly(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, scale: float | None, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention with its weights `[batch, heads, queries, keys]`; `mask` as PyTorch's attention takes it."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    logits = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is None and causal:
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    if mask is not None:
        # Not −∞: a padded query may see nothing, and what it gives must be a number.
        lowest = torch.finfo(logits.dtype).min
        logits = logits.masked_fill(~mask, lowest) if mask.dtype == torch.bool else logits + mask
    weights = torch.nn.functional.dropout(logits.softmax(-1), dropout_p)
    return (weights @ v).transpose(1, 2), weights


def _multiscale(
    settings: LayerSettings,
    q: Tensor,
    k: Tensor,
    tree: Any,
    sequences: Sequences,
    scale: float | None,
    dropout_p: float,
) -> tuple[partial[Tensor], Flops | None]:
    causal = sequences.causal
    clusters = None
    if settings.hierarchy == "keys":
        clusters = cluster_keys(k, tree, chunk=settings.chunk_size if causal else settings.chunk)
    share = None if causal else settings.share  # written token by token, nothing could be shared
    if share is None and (clusters is not None or (causal and settings.top_k)):
        share = 1
    selection = select(
        q,
        k,
        tree,
        queries=sequences.groups(tree, share),
        near=settings.near,
        top_k=settings.top_k,
        beam=settings.beam,
        clusters=clusters,
        causal=causal,
        scale=scale,
    )
    operator = partial(
        multiscale_attention,
        selection=selection,
        clusters=clusters,
        causal=causal,
        pooled_bias=bias_of(settings, q.device),
        dropout_p=dropout_p,
        scale=scale,
    )
    if _counter.get() is None:
        return operator, None
    return operator, flops(selection, *_width(q), hierarchy=tree, clusters=clusters)


def bias_of(settings: LayerSettings, device: torch.device) -> float | Tensor:
    """Of pooled nodes: a number, or one per head."""
    bias = settings.pooled_bias
    return torch.tensor(bias, device=device) if isinstance(bias, tuple) else bias


def _width(q: Tensor) -> tuple[int, int]:
    return q.shape[1] * q.shape[2], q.shape[1]


def _dropped(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor, *, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Attention inside a family with dropout on its weights. An operator is linear in its values, so weights are what it
    makes of the identity; families are small."""
    size = k.shape[-2]
    identity = torch.eye(size, dtype=v.dtype, device=v.device).expand(*k.shape[:-1], size)
    weights, lse = exact(q, k, identity, bias, mask, scale=scale)
    return torch.nn.functional.dropout(weights, dropout_p) @ v, lse


def _dense(operator: Callable[..., Tensor], q: Tensor, k: Tensor, tree: Any, sequences: Sequences) -> Tensor:
    weights = dense_weights(operator, q, k, tree)  # [heads, queries, keys]
    batch, seq = sequences.mask.shape
    asking = sequences.queries.mask.shape[1]
    heads = len(weights)
    dense = weights.new_zeros(batch, heads, asking, seq)
    row = col = 0
    for b, (n, total) in enumerate(zip(sequences.queries.lengths, sequences.keys.lengths, strict=True)):
        block = weights[:, row : row + n, col : col + total]
        asks, there = sequences.queries.mask[b], sequences.mask[b]
        rows, cols = (where.to(dense.device).nonzero().squeeze(-1) for where in (asks, there))
        dense[b, :, rows[:, None], cols] = block
        row, col = row + n, col + total
    return dense
