"""Attention of one layer without a cache: exact, over a tree, or the cheaper of the two for each sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hsa.attention.clustered.keys import ClusteredKeys
from hsa.attention.clustered.layout import BRANCHING, TILE
from hsa.attention.clustered.operator import cluster, clustered_attention, select_groups
from hsa.attention.clustered.selection import TileSelection
from hsa.attention.dense import dense_weights
from hsa.attention.flops import flops
from hsa.attention.hierarchical.operator import hierarchical_attention
from hsa.attention.multiscale.cluster import cluster_keys
from hsa.attention.multiscale.operator import multiscale_attention
from hsa.attention.multiscale.select import select
from hsa.attention.multiscale.selection import Selection
from hsa.attention.softmax import exact
from hsa.errors import InvalidInput
from hsa.huggingface.layer_plan import Call, LayerPlan
from hsa.huggingface.loading import transformers_library
from hsa.huggingface.observe import COUNTER, PROBE, Probe, count_exact, exact_operations, is_observed
from hsa.huggingface.sequences import Sequences
from hsa.huggingface.settings import LayerSettings
from hsa.huggingface.trees import tree_of
from hsa.tree.hierarchy import Hierarchy

PURPOSE = "attention over trees in pre-trained models"
_UNKNOWN_TO_TORCH = ("softcap", "s_aux")


class Output(NamedTuple):
    """Output of a layer, with weights if requested, and the structure of causal layers that select groups."""

    values: Tensor  # [batch, queries, heads, dim]
    weights: Tensor | None = None  # [batch, heads, queries, keys]
    keys: ClusteredKeys | None = None
    selection: TileSelection | None = None


class _Prepared(NamedTuple):
    """An operator, its fourth argument, and what it was prepared from."""

    operator: partial[Tensor]
    forest: Hierarchy | list[int]
    structure: Hierarchy | Selection | TileSelection
    counting: dict[str, Any]  # further arguments of `flops`
    keys: ClusteredKeys | None = None


def attend(plan: LayerPlan, call: Call, sequences: Sequences, *, keep: bool = False) -> Output:
    """Attend in one layer along the path of its plan.

    Args:
        keep: Whether to return the structure of causal layers that select groups.
    """
    path = plan.path(call, sequences)
    if path == "tree":
        return attend_tree(plan, call, sequences, keep=keep)
    if path == "exact":
        count_exact(plan.number, call.query, sequences)
        return attend_softmax(call, sequences.allowed(), sequences.causal)
    short = plan.short(sequences)
    parts = [[row for row, is_short in enumerate(short) if is_short is wanted] for wanted in (True, False)]
    outputs = [attend(plan, call.part(rows), sequences.part(rows)) for rows in parts]
    order = torch.tensor(parts[0] + parts[1], device=call.query.device).argsort()
    weights = torch.cat([out.weights for out in outputs])[order] if call.weights else None  # type: ignore[misc]
    return Output(torch.cat([out.values for out in outputs])[order], weights)


def attend_tree(
    plan: LayerPlan, call: Call, sequences: Sequences, opened: Tensor | None = None, *, keep: bool = False
) -> Output:
    """Attend over the trees of a converted layer.

    `opened` are the groups that earlier queries of each sequence's first tile have opened, `[batch, heads, groups]`. Caches
    without trees do not know them; then none are. For `keep` see `attend`.
    """
    assert plan.settings is not None
    settings, causal = plan.settings.resolved(sequences.causal), sequences.causal
    packed = sequences.queries.pack(call.query), sequences.keys.pack(call.key), sequences.keys.pack(call.value)
    is_whole = not causal or sequences.first_query == 0
    if settings.uses_tiles(causal) and is_whole and not (keep or call.weights or is_observed()):
        out = _attend_tiles(settings, call, sequences, packed)
        return Output(sequences.queries.unpack(out).transpose(1, 2))
    if settings.uses_tiles(causal):
        prepared = _prepare_tiles(settings, call, sequences, packed, opened)
    elif settings.kind == "hierarchical":
        prepared = _prepare_hierarchical(settings, call, sequences)
    else:
        prepared = _prepare_multiscale(settings, call, sequences, packed)
    operator, forest, structure, options, keys = prepared
    run = operator if keys is None else partial(operator, keys=keys)
    q, k, v = packed
    counted, probe = COUNTER.get(), PROBE.get()
    if counted is not None:
        heads, dim = q.shape[1:]
        counted.add(
            plan.number, flops(structure, heads * dim, heads, **options), exact_operations(call.query, sequences)
        )
    if probe is not None and settings.kind != "hierarchical":
        probe.add(plan.number, _errors(run, probe, packed, forest, call, sequences))
    out = run(q, k, v, forest)
    values = sequences.queries.unpack(out).transpose(1, 2)
    weights = _dense(operator, q, k, forest, sequences) if call.weights else None
    return Output(values, weights, keys, structure if isinstance(structure, TileSelection) else None)


def _attend_tiles(
    settings: LayerSettings, call: Call, sequences: Sequences, packed: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Attend in one call, which kernels repeat without checks for other layers and texts of the same lengths."""
    return clustered_attention(
        *packed,
        sequences.keys.lengths,
        query_lengths=sequences.queries.lengths if sequences.first_query else None,
        causal=sequences.causal,
        threshold=settings.threshold,
        top_k=settings.top_k,
        windows=settings.kind == "multiscale",
        branching=None if settings.branching == BRANCHING else settings.branching,
        tile=settings.tile or TILE,
        exact_until=settings.exact_until or 0,
        pooled_bias=bias_of(settings, call.query.device),
        dropout_p=call.dropout_p,
        scale=call.scale,
    )


def _prepare_tiles(
    settings: LayerSettings,
    call: Call,
    sequences: Sequences,
    packed: tuple[Tensor, Tensor, Tensor],
    opened: Tensor | None,
) -> _Prepared:
    q, k, v = packed
    lengths = sequences.keys.lengths
    shape: dict[str, Any] = {"windows": settings.kind == "multiscale", "branching": settings.branching}
    causal = sequences.causal
    shared: dict[str, Any] = {"query_lengths": sequences.queries.lengths, "causal": causal, "tile": settings.tile}
    shared |= {"exact_until": settings.exact_until, "scale": call.scale}
    keys = cluster(k, v, lengths, **shape)
    if opened is None and causal:
        groups = max(keys.chunks) * keys.shape.groups
        opened = torch.zeros(len(lengths), q.shape[1], groups, dtype=torch.bool, device=q.device)
    rule: dict[str, Any] = {"threshold": settings.threshold, "top_k": settings.top_k, "opened": opened}
    selection = select_groups(q, k, keys, lengths, **rule, **shared)
    operator = partial(
        clustered_attention,
        selection=selection,
        pooled_bias=bias_of(settings, q.device),
        dropout_p=call.dropout_p,
        **shape,
        **shared,
    )
    return _Prepared(operator, lengths, selection, {}, keys)


def _prepare_hierarchical(settings: LayerSettings, call: Call, sequences: Sequences) -> _Prepared:
    tree = tree_of(settings, sequences)
    inside: Any = partial(_attend_family, dropout_p=call.dropout_p) if call.dropout_p else "exact"
    operator = partial(hierarchical_attention, include_self=True, family_attention=inside, scale=call.scale)
    return _Prepared(operator, tree, tree, {})


def _prepare_multiscale(
    settings: LayerSettings, call: Call, sequences: Sequences, packed: tuple[Tensor, Tensor, Tensor]
) -> _Prepared:
    q, k, _ = packed
    tree = tree_of(settings, sequences)
    clusters = cluster_keys(k, tree) if settings.kind == "clustered" else None
    shared: dict[str, Any] = {"clusters": clusters, "causal": sequences.causal, "scale": call.scale}
    queries = sequences.tiles(tree, settings.tile)
    selection = select(q, k, tree, queries=queries, near=settings.near, top_k=settings.top_k, **shared)
    bias = bias_of(settings, q.device)
    operator = partial(multiscale_attention, selection=selection, pooled_bias=bias, dropout_p=call.dropout_p, **shared)
    return _Prepared(operator, tree, selection, {"hierarchy": tree, "clusters": clusters})


def attend_softmax(call: Call, mask: Tensor | None, causal: bool) -> Output:
    """Attend with PyTorch's attention, or with `attend_exactly` if weights are requested, which PyTorch does not return."""
    for name in _UNKNOWN_TO_TORCH:
        if call.others.get(name) is not None:
            raise InvalidInput(
                type(call.module).__name__,
                expected="attention that PyTorch's scaled_dot_product_attention supports",
                got=f"attention with {name}",
            )
    if call.weights and call.others.get("position_bias") is None:
        options: dict[str, Any] = {"causal": causal, "scale": call.scale, "dropout_p": call.dropout_p}
        return Output(*attend_exactly(call.query, call.key, call.value, mask, **options))
    run = transformers_library(PURPOSE).AttentionInterface()["sdpa"]
    options = {"dropout": call.dropout_p, "scaling": call.scale, "is_causal": causal, **call.others}
    return Output(*run(call.module, call.query, call.key, call.value, mask, **options))


def attend_exactly(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, scale: float | None, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Return softmax attention and its weights, `[batch, heads, queries, keys]`; `mask` is as for PyTorch's attention."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    logits = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is None and causal:
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    if mask is not None:
        # Not −∞: a padded query may see no key, and its output must be finite.
        lowest = torch.finfo(logits.dtype).min
        logits = logits.masked_fill(~mask, lowest) if mask.dtype == torch.bool else logits + mask
    weights = torch.nn.functional.dropout(logits.softmax(-1), dropout_p)
    return (weights @ v).transpose(1, 2), weights


def bias_of(settings: LayerSettings, device: torch.device) -> float | Tensor:
    """Return the bias of pooled nodes: one number, or `[heads]`."""
    bias = settings.pooled_bias
    return torch.tensor(bias, device=device) if isinstance(bias, tuple) else bias


def _attend_family(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor, *, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Attend inside a family with dropout of its weights.

    Attention is linear in its values, so passing the identity as values returns the weights. Families are small.
    """
    size = k.shape[-2]
    identity = torch.eye(size, dtype=v.dtype, device=v.device).expand(*k.shape[:-1], size)
    weights, lse = exact(q, k, identity, bias, mask, scale=scale)
    return torch.nn.functional.dropout(weights, dropout_p) @ v, lse


def _errors(
    operator: Callable[..., Tensor],
    probe: Probe,
    packed: tuple[Tensor, Tensor, Tensor],
    forest: Hierarchy | list[int],
    call: Call,
    sequences: Sequences,
) -> Tensor:
    """Return squared distances from exact attention, `[biases, heads]`."""
    plain = replace(call, dropout_p=0.0, weights=False)  # in memory that does not grow with queries × keys
    values = attend_softmax(plain, sequences.allowed(), sequences.causal).values
    exact_output = sequences.queries.pack(values.transpose(1, 2)).float()
    outputs = (operator(*packed, forest, pooled_bias=bias) for bias in probe.biases)
    return torch.stack([(out.float() - exact_output).square().sum((0, 2)) for out in outputs])


def _dense(
    operator: Callable[..., Tensor], q: Tensor, k: Tensor, forest: Hierarchy | list[int], sequences: Sequences
) -> Tensor:
    """Return the attention weights of a padded batch, `[batch, heads, queries, keys]`."""
    weights = dense_weights(operator, q, k, forest)  # [heads, queries, keys]
    batch, keys = sequences.mask.shape
    queries = sequences.queries.mask.shape[1]
    dense = weights.new_zeros(batch, len(weights), queries, keys)
    row = col = 0
    for b, (n, total) in enumerate(zip(sequences.queries.lengths, sequences.keys.lengths, strict=True)):
        block = weights[:, row : row + n, col : col + total]
        masks = sequences.queries.mask[b], sequences.mask[b]
        rows, cols = (mask.to(dense.device).nonzero().squeeze(-1) for mask in masks)
        dense[b, :, rows[:, None], cols] = block
        row, col = row + n, col + total
    return dense
