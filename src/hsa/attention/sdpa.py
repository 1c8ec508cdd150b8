"""`scaled_dot_product_attention` with PyTorch's signature, over a tree that is built from the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hsa.attention.checks import check_dropout
from hsa.attention.masks import read_mask
from hsa.attention.options import AttentionOptions, Kind
from hsa.errors import InvalidInput
from hsa.tree.jagged import Jagged, few
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
    top_k: int | None = None,
    sinks: int | None = None,
    tile: int | None = None,
    chunk: int | None = None,
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
        near: Number of neighbouring windows on each side that are exact: for "multiscale", 1 by default.
        top_k: Number of further groups (8 by default) or windows (4; 0 in causal attention) that are exact because the
            queries score them best.
        sinks: Number of first tokens that are exact for all queries: 1 by default, 0 for "hierarchical".
        tile: Number of consecutive queries that share a selection, 16 by default. Causal queries that select by score
            share none, because a shared selection would leak.
        chunk: Number of tokens whose keys are clustered together in causal attention: for "clustered", 256 by default.

    With as many queries as keys, kinds "multiscale" and "hierarchical" and causal attention take query i and key i for the
    same token, and return zeros for tokens that the mask hides.

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
        kind, branching=branching, near=near, top_k=top_k, sinks=sinks, tile=tile, chunk=chunk
    )
    check_dropout(dropout_p)
    _check_heads(query, key, value, enable_gqa)
    rest: dict[str, Any] = {"scale": scale, "dropout_p": dropout_p}
    if query.is_nested:
        return _attend_jagged(query, key, value, attn_mask, is_causal, options, rest)
    batch, heads, queries = query.shape[:3]
    keys = key.shape[2]
    present = None
    if attn_mask is not None:
        present, hides_later = read_mask(attn_mask, (batch, heads, queries, keys))
        is_causal = is_causal or hides_later
    if is_causal and queries != keys:
        raise InvalidInput(
            "is_causal",
            expected=f"as many queries as keys, {keys}",
            got=f"{queries} queries",
            fix="For decoding with a cache see hsa.MultiscaleCache and hsa.ClusteredCache",
        )
    padding = padding_of(present, batch, keys)
    # Clustered groups have no neighbours, so that a query needs no position; hidden queries get rows as PyTorch gives them.
    are_leaves = queries == keys and (kind != "clustered" or is_causal or padding.full)
    rows = padding if are_leaves else padding_of(None, batch, queries)
    tree = options.tree(padding.lengths, query.device)
    lengths = None if are_leaves else rows.lengths
    q, k, v = rows.pack(query), padding.pack(key), padding.pack(value)
    return rows.unpack(options.attend(q, k, v, tree, query_lengths=lengths, causal=is_causal, **rest))


def padding_of(present: Tensor | None, batch: int, length: int) -> Padding:
    """Return the tokens of a padded batch; without a mask, all of them."""
    return Padding(lengths=[length] * batch, width=length) if present is None else Padding(present)


def _check_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise InvalidInput(name, expected="a tensor [batch, heads, length, dim]", got=type(x).__name__)
        if x.ndim != 4:
            fix = "Add the missing dimensions with unsqueeze; for packed [leaves, heads, dim] use hsa.multiscale_attention"
            raise InvalidInput(name, expected="shape [batch, heads, length, dim]", got=f"{tuple(x.shape)}", fix=fix)
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads != kv_heads and not enable_gqa:
        fix = f"Pass enable_gqa=True if {heads // max(kv_heads, 1)} query heads share a key"
        raise InvalidInput("key", expected=f"{heads} heads, as query", got=f"{kv_heads}", fix=fix)
    if query.is_nested or key.is_nested or value.is_nested:
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
    tree = options.tree(key_lengths, query.device)
    lengths = None if query_lengths == key_lengths else query_lengths
    return q.wrap(options.attend(q.rows, k.rows, v.rows, tree, query_lengths=lengths, causal=is_causal, **rest))
