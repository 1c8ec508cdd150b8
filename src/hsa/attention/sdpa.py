"""`scaled_dot_product_attention` with PyTorch's signature, over a tree that is built from the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hsa.attention.checks import check_dropout
from hsa.attention.masks import Visible, read_mask
from hsa.attention.options import DEFAULTS, AttentionOptions, Kind, cross_queries
from hsa.errors import InvalidInput
from hsa.tree.jagged import Jagged, check_jagged, few
from hsa.tree.padding import Padding


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    kind: Kind = "clustered",
    branching: Sequence[int] | None = None,
    near: int | None = None,
    threshold: float | Sequence[float] | Tensor | None = None,
    top_k: int | None = None,
    sinks: int | None = None,
    tile: int | None = None,
) -> Tensor:
    """Attend as `torch.nn.functional.scaled_dot_product_attention` does, exactly where it matters and pooled elsewhere.

    Takes the arguments of PyTorch's function in the same order. The tree is built from the keys ("clustered") or from
    windows of consecutive tokens. Faster than PyTorch's function on long sequences only: see the README for the lengths.

    Args:
        query: `[batch, heads, queries, dim]`, or a nested tensor with the jagged layout.
        key: `[batch, kv_heads, keys, dim]`.
        value: `[batch, kv_heads, keys, value_dim]`.
        attn_mask: Mask that broadcasts to `[batch, heads, queries, keys]` (bool: True may attend; floating point: 0 or
            −∞) and hides padding, later keys, or both. Other masks are refused.
        dropout_p: Dropout on the weights.
        is_causal: Whether queries see nothing later than themselves. May be combined with a mask of padding.
        scale: Factor of the dot products, 1/√dim by default.
        enable_gqa: Whether `kv_heads` may be a divisor of `heads`.
        kind: "clustered" (multiscale attention over groups of similar keys), "multiscale" (over windows of consecutive
            keys) or "hierarchical" (the paper's operator over such windows; not causal).
        branching: Family sizes of the tree from the leaves up; the last one repeats. (8, 2), (16, 2) and (16,) by default.
            In causal attention that selects groups: keys per group, groups per node and nodes per chunk, (8, 8, 4).
        near: Number of neighbouring windows on each side that are exact: for "multiscale", 1 by default.
        threshold: Share of a query's attention from which it attends to a group exactly, in causal attention, or one per
            query head: for "clustered", 1/256 by default. Smaller is closer to softmax attention. Without `threshold` and
            `top_k`, causal "multiscale" attention is exact for neighbouring windows only.
        top_k: Number of further groups (8 by default) or windows (4) that are exact because the queries score them best. In
            causal attention: number of groups that each query selects, in place of `threshold`.
        sinks: Number of first tokens that are exact for all queries: 1 by default, 0 for "hierarchical".
        tile: Number of consecutive queries that share a selection in self-attention, 16 by default. In causal attention 64:
            there a query shares only what earlier queries of its tile have selected. Queries of another sequence share
            none, because a shared selection would leak.

    Attention with as many queries as keys is taken for self-attention: query i and key i are the same token. For
    cross-attention with equal lengths pass `kind="clustered", tile=1`. Kinds "multiscale" and "hierarchical" and causal
    attention return zeros for tokens that the mask hides; queries that it hides from every key get zeros too.

    Returns:
        `[batch, heads, queries, value_dim]`.

    Raises:
        InvalidInput: Shapes do not fit; a mask that cannot be honoured; options of another kind.

    >>> import torch
    >>> q, k, v = torch.randn(3, 2, 4, 100, 16).unbind(0)  # 2 sequences, 4 heads, 100 tokens
    >>> scaled_dot_product_attention(q, k, v, is_causal=True).shape
    torch.Size([2, 4, 100, 16])
    >>> mask = torch.arange(100) < torch.tensor([100, 60])[:, None]  # the second sequence has 60 tokens
    >>> scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None], kind="multiscale").shape
    torch.Size([2, 4, 100, 16])
    """
    options = AttentionOptions.of(
        kind, branching=branching, near=near, threshold=threshold, top_k=top_k, sinks=sinks, tile=tile
    )
    check_dropout(dropout_p)
    _check_heads(query, key, value, enable_gqa)
    query, key, value = _autocast(query, key, value)
    rest: dict[str, Any] = {"scale": scale, "dropout_p": dropout_p}
    if query.is_nested:
        return _attend_jagged(query, key, value, attn_mask, is_causal, options, rest)
    batch, heads, queries = query.shape[:3]
    keys = key.shape[2]
    visible = Visible(None, is_causal)
    if attn_mask is not None:
        attends = kind == "clustered" and not is_causal
        visible = read_mask(attn_mask, (batch, heads, queries, keys), padding_attends=attends).with_tokens(queries)
        is_causal = is_causal or visible.causal
    if is_causal and queries != keys:
        raise InvalidInput(
            "is_causal",
            expected=f"as many queries as keys, {keys}",
            got=f"{queries} queries",
            fix="For decoding with a cache see hsa.MultiscaleCache and hsa.ClusteredCache",
        )
    padding = padding_of(visible.keys, batch, keys)
    rest |= {"sequences": padding.lengths, "causal": is_causal}
    k, v = padding.pack(key), padding.pack(value)
    if queries != keys:
        rows = padding_of(None, batch, queries)
        groups = cross_queries(rows.lengths, query.device)
        out = rows.unpack(options.attend(rows.pack(query), k, v, queries=groups, **rest))
    elif kind == "clustered" and not is_causal and not padding.full:
        out = _attend_with_padding(query, k, v, padding, options, rest)
    else:
        out = padding.unpack(options.attend(padding.pack(query), k, v, **rest))
    return out if visible.queries is None else out.masked_fill(~visible.queries[:, None, :, None], 0)


def _attend_with_padding(
    query: Tensor, k: Tensor, v: Tensor, padding: Padding, options: AttentionOptions, rest: dict[str, Any]
) -> Tensor:
    """Attend from all positions, tokens and padding, as PyTorch does: the queries may be those of another sequence.

    Tokens and padding share no selection, so that padding does not matter to tokens.
    """
    batch, length = padding.shape
    is_token = padding.mask.to(query.device)
    order = torch.cat([x.flatten().nonzero().squeeze(-1) for x in (is_token, ~is_token)])
    lengths = [*padding.lengths, *(length - n for n in padding.lengths)]
    tile = options.tile or DEFAULTS[options.kind]["tile"]
    groups = cross_queries(lengths, query.device, tile=tile, trees=[*range(batch)] * 2)
    rows = query.transpose(1, 2).flatten(0, 1).index_select(0, order)
    out = options.attend(rows, k, v, queries=groups, **rest).index_select(0, order.argsort())
    return out.unflatten(0, (batch, length)).transpose(1, 2)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to the dtype of autocast where it is on, as PyTorch's function does; float64 stays."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def padding_of(present: Tensor | None, batch: int, length: int) -> Padding:
    """Return the tokens of a padded batch; without a mask, all of them."""
    if length == 0:
        raise InvalidInput("query, key, value", problem="sequences of length 0", expected="at least one token")
    return Padding(lengths=[length] * batch, width=length) if present is None else Padding(present)


def _check_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    tensors = {"query": query, "key": key, "value": value}
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise InvalidInput(name, expected="a tensor [batch, heads, length, dim]", got=type(x).__name__)
    for name, x in tensors.items():
        if query.is_nested or key.is_nested or value.is_nested:
            check_jagged(name, x)
        if x.ndim != 4:
            fix = "Add the missing dimensions with unsqueeze; for packed [leaves, heads, dim] use hsa.multiscale_attention"
            fix = fix if x.ndim < 4 else "Flatten the leading dimensions"
            raise InvalidInput(name, expected="shape [batch, heads, length, dim]", got=f"{tuple(x.shape)}", fix=fix)
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads != kv_heads and not enable_gqa:
        share = f"Pass enable_gqa=True if {heads // kv_heads} query heads share a key" if 0 < kv_heads < heads else None
        raise InvalidInput("key", expected=f"{heads} heads, as query", got=f"{kv_heads}", fix=share)
    if query.is_nested:
        return
    if not len(query) == len(key) == len(value):
        got = f"{len(query)}, {len(key)} and {len(value)}"
        raise InvalidInput("query, key, value", expected="equal numbers of sequences", got=got)
    if value.shape[2] != key.shape[2]:
        raise InvalidInput("value", expected=f"{key.shape[2]} rows, one per key", got=f"{value.shape[2]}")


def _attend_jagged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    options: AttentionOptions,
    rest: dict[str, Any],
) -> Tensor:
    if attn_mask is not None:
        raise InvalidInput("attn_mask", expected="None with nested tensors, which have no padding", got="a mask")
    q, k, v = (Jagged(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    query_lengths, key_lengths = q.lengths, k.lengths
    if v.lengths != key_lengths:
        raise InvalidInput("value", expected=f"sequences of {few(key_lengths)} tokens, as key", got=few(v.lengths))
    if len(query_lengths) != len(key_lengths) or (is_causal and query_lengths != key_lengths):
        raise InvalidInput("key", expected=f"sequences of {few(query_lengths)} tokens, as query", got=few(key_lengths))
    groups = None if query_lengths == key_lengths else cross_queries(query_lengths, query.device)
    return q.wrap(options.attend(q.rows, k.rows, v.rows, key_lengths, queries=groups, causal=is_causal, **rest))
