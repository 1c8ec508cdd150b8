"""Clustered attention: each query attends exactly to the keys near it and to groups that matter to it, pooled elsewhere."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from jaxtyping import Float
from torch import Tensor

from hsa.attention.call import needs_gradient
from hsa.attention.checks import (
    Rows,
    check_all_finite,
    check_count,
    check_dropout,
    check_packed,
    check_same_device,
    check_type,
    scale_or_default,
    without_autocast,
)
from hsa.attention.clustered import reference, torch_tiles
from hsa.attention.clustered.call import ClusteredCall, SelectCall, repeat_key, repeated
from hsa.attention.clustered.keys import ClusteredKeys, build_keys, check_keys
from hsa.attention.clustered.layout import BRANCHING, TILE, Layout, Shape, layout_of
from hsa.attention.clustered.selection import TileSelection
from hsa.attention.clustered.threshold import THRESHOLD, Threshold, check_number_of_heads, check_threshold
from hsa.attention.clustered.why_not import why_not_cluster, why_not_triton, why_not_triton_select
from hsa.attention.dispatch import Backend, choose, connected
from hsa.attention.kernels import available, repeat
from hsa.attention.multiscale.operator import per_head
from hsa.errors import InvalidInput

Result = tuple[Tensor, Tensor]


def _attend_triton(call: ClusteredCall) -> Result:
    from hsa.attention.clustered.triton.operator import attend

    with available.device_of(call.q):
        return attend(call)


def _select_triton(call: SelectCall) -> TileSelection:
    from hsa.attention.clustered.triton.operator import select

    with available.device_of(call.q):
        return select(call)


ATTEND: tuple[Backend[ClusteredCall, Result], ...] = (
    Backend("triton", _attend_triton, why_not_triton),
    Backend("torch", torch_tiles.attend),
    Backend("reference", reference.attend),
)
SELECT: tuple[Backend[SelectCall, TileSelection], ...] = (
    Backend("triton", _select_triton, why_not_triton_select),
    Backend("torch", torch_tiles.select),
    Backend("reference", reference.select),
)


@torch.compiler.disable
def cluster(
    k: Float[Tensor, "keys kv_heads dim"],
    v: Float[Tensor, "keys kv_heads value_dim"],
    lengths: Sequence[int] | Tensor,
    *,
    windows: bool = False,
    branching: Sequence[int] = BRANCHING,
) -> ClusteredKeys:
    """Order the keys of each complete chunk into groups of similar keys, with the pooled rows of groups, nodes and chunks.

    Splits each chunk at the median of its first principal direction, recursively, per key/value head. The result depends on
    complete chunks only, so causal attention can use it, and a cache can append to it. `clustered_attention` calls this
    function itself; call it to use the same keys several times.

    Args:
        k: `[keys, kv_heads, dim]`, sequences one after another.
        v: `[keys, kv_heads, value_dim]`.
        lengths: Number of keys of every sequence.
        windows: Whether to leave keys in their order, so that groups are windows of consecutive keys.
        branching: Keys per group, groups per node, nodes per chunk: powers of two.

    Returns:
        Tables of keys and values in their new order.

    >>> keys = cluster(torch.randn(600, 2, 16), torch.randn(600, 2, 16), [600])
    >>> keys
    ClusteredKeys(2 chunks of 256 keys, 2 heads, clusters)
    """
    layout = layout_of(lengths, shape=Shape.of(branching, 1, causal=False), causal=False)
    _check({"k": k, "v": v}, layout)
    with without_autocast(k):
        return _build(k, v, layout, windows)


def _build(k: Tensor, v: Tensor, layout: Layout, windows: bool) -> ClusteredKeys:
    if why_not_cluster(k, v, layout.shape):
        return build_keys(k, v, layout, windows=windows)
    if needs_gradient(k, v):
        from hsa.attention.clustered.triton.gradient import build_keys_with_gradient as build_by_kernel
    else:
        from hsa.attention.clustered.triton.cluster import build_keys as build_by_kernel

    with available.device_of(k):
        return build_by_kernel(k, v, layout, windows=windows)


@torch.no_grad()
@torch.compiler.disable
def select_groups(
    q: Float[Tensor, "queries heads dim"],
    k: Float[Tensor, "keys kv_heads dim"],
    keys: ClusteredKeys,
    lengths: Sequence[int] | Tensor,
    *,
    query_lengths: Sequence[int] | Tensor | None = None,
    recent: Sequence[int] | Tensor | None = None,
    causal: bool = False,
    threshold: float | Sequence[float] | Tensor | None = None,
    top_k: int | None = None,
    spread: float | None = None,
    share_lists: bool = False,
    opened: Tensor | None = None,
    tile: int = TILE,
    exact_until: int = 0,
    scale: float | None = None,
    backend: str = "auto",
) -> TileSelection:
    """Select the groups of keys that each tile of queries attends to exactly.

    Pass the result to `clustered_attention(selection=…)`. All arguments have the same meaning there.

    >>> q, k, v = torch.randn(3, 600, 2, 16).unbind(0)
    >>> keys = cluster(k, v, [600])
    >>> select_groups(q, k, keys, [600], causal=True, top_k=2).tile(9).shape  # the last tile: 2 heads, 64 groups
    torch.Size([1, 2, 64])
    """
    _check_are_keys(keys)
    _check_causal(causal)
    shape = Shape.of(keys.shape.branching, tile, exact_until, causal=causal)
    layout = layout_of(lengths, query_lengths, recent, shape=shape, causal=causal, capacity=keys.capacity)
    _check({"q": q, "k": k}, layout)
    check_keys(keys, layout, k, None)
    threshold, top_k, spread = check_rule(threshold, top_k, spread, q.shape[1])
    lists = _number_of_lists(q, k, share_lists)
    call = SelectCall(
        q=q,
        k=k,
        keys=keys,
        layout=layout,
        threshold=threshold,
        top_k=top_k,
        spread=spread,
        lists=lists,
        opened=_check_opened(opened, layout, lists, q),
        scale=scale_or_default(scale, q),
        backend=backend,
    )
    with without_autocast(q):
        selection = choose("select_groups", SELECT, backend, call).run(call)
    return replace(selection, keys=keys, before=call.opened)


@torch.no_grad()
def select_and_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: ClusteredKeys,
    lengths: Sequence[int],
    *,
    opened: Tensor | None,
    rule: Mapping[str, Any],
    pooled_bias: float | Tensor,
    **tiles: Any,
) -> tuple[Tensor, TileSelection]:
    """Return the causal attention to the pages of a cache, and the selection. Kernels repeat calls of one layout.

    Args:
        q, k, v, keys, lengths, opened, pooled_bias: See `clustered_attention`.
        rule: Options of `select_groups` by which queries want groups.
        tiles: Further options of both functions.
    """
    key, tensors = None, (q, k, v, keys.k, keys.v, keys.scores, keys.channels)
    if (
        opened is None
        and type(pooled_bias) is float
        and pooled_bias == 0
        and not available.why_not(q, v, tiles["backend"])
    ):
        shared = (tiles["tile"], tiles["exact_until"], tiles["scale"], tiles["backend"])
        options = (*rule.values(), *shared, keys.capacity, keys.order is None)
        key = repeat_key(q, k, v, lengths, tiles["query_lengths"], options)
    if key is not None:
        of_keys = repeat.layout_of(keys.k, keys.v, keys.scores), keys.channels.data_ptr() % 16 == 0
        key = key, of_keys, keys.shape, keys.chunks, tuple(tiles["recent"])
        if (result := repeated(key, *tensors)) is not None:
            out, first, layout, lists = result
            return out, TileSelection(first, layout, lists, keys)

    def run() -> tuple[Tensor, TileSelection]:
        call = _call(q, k, v, lengths, keys=keys, opened=opened, pooled_bias=pooled_bias, **rule, **tiles)
        if choose("clustered_attention", ATTEND, call.backend, call).name == "torch":  # reads the exact keys once
            with without_autocast(q):
                return torch_tiles.select_and_attend(call)
        selection = select_groups(q, k, keys, lengths, opened=opened, causal=True, **rule, **tiles)
        out = clustered_attention(
            q, k, v, lengths, keys=keys, selection=selection, pooled_bias=pooled_bias, causal=True, **tiles
        )
        return out, selection

    if key is None:
        return run()
    from hsa.attention.clustered.triton.operator import record

    return record(key, tensors, run)


@overload
def clustered_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Any = ..., *, return_lse: Literal[False] = ..., **options: Any
) -> Tensor: ...
@overload
def clustered_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Any = ..., *, return_lse: Literal[True], **options: Any
) -> tuple[Tensor, Tensor]: ...
@torch.compiler.disable
def clustered_attention(
    q: Float[Tensor, "queries heads dim"],
    k: Float[Tensor, "keys kv_heads dim"],
    v: Float[Tensor, "keys kv_heads value_dim"],
    lengths: Sequence[int] | Tensor | None = None,
    *,
    query_lengths: Sequence[int] | Tensor | None = None,
    recent: Sequence[int] | Tensor | None = None,
    causal: bool = False,
    threshold: float | Sequence[float] | Tensor | None = None,
    top_k: int | None = None,
    spread: float | None = None,
    share_lists: bool = False,
    windows: bool = False,
    branching: Sequence[int] | None = None,
    tile: int = TILE,
    exact_until: int = 0,
    keys: ClusteredKeys | None = None,
    opened: Tensor | None = None,
    selection: TileSelection | None = None,
    pooled_bias: float | Tensor = 0.0,
    dropout_p: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from every query exactly to the keys that matter to it, and to pooled nodes for the rest.

    Keys are cut into chunks. The complete chunks that a tile of queries sees are read through trees of groups of similar
    keys (`cluster`); the remaining keys are exact: in causal attention those of the query's own chunk up to the query,
    otherwise those after the last complete chunk. A query *wants* a group G if its estimated share is large enough,

        estimate(q, G) = scale · q·mean(k, G) + log |G| + spread · |scale · q·s_G|  ≥  Z(q) + log threshold

    with s_G the principal direction of the group's keys times the standard deviation along it, and Z the log-sum-exp of the
    exact logits and of the pooled nodes. From head dim 64 on, the products with s_G, and with the mean of a group relative
    to that of its chunk, take half of the channels: those in which the keys of the first chunk are long and vary.

    A group is *open* for a query if the query or an earlier one of its tile wants it (without `causal`: any query of the
    tile). The keys of open groups are exact; everything else is read through the largest nodes B without an open group,
    with logit scale · q·mean(k, B) + log |B| and value mean(v, B). Nothing depends on later tokens, and with all groups
    open the result is softmax attention. The group of the first key is always open.

    Args:
        q: `[queries, heads, dim]`, sequences one after another.
        k: `[keys, kv_heads, dim]`. There may be fewer key/value heads than query heads.
        v: `[keys, kv_heads, value_dim]`.
        lengths: Number of keys of every sequence. By default one sequence.
        query_lengths: Number of queries of every sequence, by default one per key. In causal attention the queries are the
            last tokens of their sequence.
        recent: Number of keys of every sequence that k and v hold, the last ones, if `keys` holds the others. At least
            those that the first query sees exactly.
        causal: Whether queries see nothing later than themselves.
        threshold: Share of a query's attention from which it wants a group, or one per query head; smaller is more exact.
            1/256 by default.
        top_k: Number of groups that each query wants, the best ones, in place of `threshold`.
        spread: Weight of the spread of a group's keys in its estimate, 1 by default.
        share_lists: Whether the query heads of a key/value head open groups together.
        windows: Whether groups are windows of consecutive keys instead of clusters.
        branching: Keys per group, groups per node, nodes per chunk: powers of two. (8, 8, 4) by default.
        tile: Number of consecutive queries per tile: a power of two.
        exact_until: Number of tokens up to which attention is exact, in whole chunks: in causal attention that of the
            first queries of a sequence, otherwise that of sequences with fewer keys in complete chunks.
        keys: Result of `cluster` for these keys, to use it several times.
        opened: `TileSelection.opened()` of the preceding queries, if the first query is not the first of its tile.
        selection: Result of `select_groups`, in place of `threshold`, `top_k`, `spread`, `share_lists` and `opened`.
        pooled_bias: Number, or one per head, added to the logits of pooled nodes. 0 is closest to softmax; −∞ drops them.
        dropout_p: Dropout on the weights.
        scale: Factor of the dot products, 1/√dim by default.
        return_lse: Whether to return the log-sum-exp of the logits too, `[queries, heads]`.
        backend: "auto", "triton" (CUDA), "torch" or "reference".

    Returns:
        `[queries, heads, value_dim]`.

    Raises:
        InvalidInput: Shapes, dtypes, devices or options do not fit each other.

    >>> q, k, v = torch.randn(3, 1000, 2, 16).unbind(0)
    >>> clustered_attention(q, k, v, causal=True, threshold=1 / 64).shape
    torch.Size([1000, 2, 16])
    >>> clustered_attention(q[:8], k, v, query_lengths=[8]).shape  # eight other queries
    torch.Size([8, 2, 16])
    """
    key = None
    if all(x is None for x in (keys, selection, opened, recent, branching)) and dropout_p == 0:
        if threshold is not None and not isinstance(threshold, (int, float)):
            threshold = check_threshold(threshold)  # a tuple, by which calls can be recognised
        rule = (threshold, top_k, spread, share_lists, windows, tile, exact_until)
        options = (causal, *rule, pooled_bias, scale, backend)
        key = repeat_key(q, k, v, lengths, query_lengths, options)
        if key is not None and (results := repeated(key, q, k, v)) is not None:
            return (results[0], results[1]) if return_lse else results[0]
    call = _call(
        q,
        k,
        v,
        lengths,
        query_lengths=query_lengths,
        recent=recent,
        causal=causal,
        threshold=threshold,
        top_k=top_k,
        spread=spread,
        share_lists=share_lists,
        windows=windows,
        branching=branching,
        tile=tile,
        exact_until=exact_until,
        keys=keys,
        opened=opened,
        selection=selection,
        pooled_bias=pooled_bias,
        dropout_p=dropout_p,
        scale=scale,
        backend=backend,
        repeats_as=key,
    )
    with without_autocast(q):
        out, lse = choose("clustered_attention", ATTEND, backend, call).run(call)
    out = out if out.numel() else connected(out, call)
    return (out, lse) if return_lse else out


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Any,
    *,
    keys: ClusteredKeys | None,
    causal: bool = True,
    query_lengths: Any,
    recent: Any,
    threshold: Any,
    top_k: int | None,
    spread: float | None,
    share_lists: bool,
    windows: bool = False,
    branching: Sequence[int] | None = None,
    tile: int,
    exact_until: int,
    opened: Tensor | None,
    selection: TileSelection | None = None,
    pooled_bias: float | Tensor,
    dropout_p: float = 0.0,
    scale: float | None,
    backend: str,
    repeats_as: Hashable = None,
) -> ClusteredCall:
    """Check the arguments of `clustered_attention`."""
    _check_causal(causal)
    if selection is not None:
        check_type("selection", selection, TileSelection, "Use hsa.select_groups(q, k, keys, lengths, …)")
        branching = selection.layout.shape.branching if keys is None and branching is None else branching
    if lengths is None:
        if not isinstance(k, Tensor) or k.ndim == 0:
            raise InvalidInput("k", expected="a tensor [keys, heads, head_dim]", got=type(k).__name__)
        lengths = [len(k)]
    branching = _branching(branching, keys, windows)
    shape = Shape.of(branching, tile, exact_until, causal=causal)
    capacity = None if keys is None else keys.capacity
    layout = layout_of(lengths, query_lengths, recent, shape=shape, causal=causal, capacity=capacity)
    if keys is None and layout.recent != layout.lengths:
        raise InvalidInput(
            "recent", expected="None without `keys`", got="other lengths", fix="Pass keys=hsa.cluster(…)"
        )
    _check({"q": q, "k": k, "v": v}, layout)
    if keys is not None:
        check_keys(keys, layout, k, v)
    lists = _number_of_lists(q, k, share_lists)
    if selection is None:
        threshold, top_k, spread = check_rule(threshold, top_k, spread, q.shape[1])
        opened = _check_opened(opened, layout, lists, q)
    else:
        others = {"threshold": threshold, "top_k": top_k, "spread": spread, "opened": opened}
        _check_selection(selection, layout, q, k, keys, **others, share_lists=share_lists or None)
        threshold, spread = None, 1.0
        if keys is None and selection.keys is not None:  # the same groups, of these keys and values
            keys = build_keys(k, v, layout, windows=selection.keys.order is None, order=selection.keys.order)
    check_dropout(dropout_p)
    return ClusteredCall(
        q=q,
        k=k,
        v=v,
        keys=keys,
        layout=layout,
        windows=windows,
        selection=selection,
        threshold=threshold,
        top_k=top_k,
        spread=spread,
        lists=lists,
        opened=opened,
        pooled_bias=per_head(pooled_bias, q),
        dropout_p=dropout_p,
        scale=scale_or_default(scale, q),
        backend=backend,
        repeats_as=repeats_as,
    )


def _check(tensors: dict[str, Any], layout: Layout) -> None:
    packed = "sequences one after another, without padding"
    queries = Rows(layout.num_queries, "the number of queries", f"Pass one row per query, {packed}", "queries")
    rows = Rows(sum(layout.recent), "the sum of the lengths", f"Pass one row per key, {packed}", "keys")
    check_packed(tensors, {name: queries if name == "q" else rows for name in tensors})
    check_same_device(tensors)
    check_all_finite(tensors)


def _check_are_keys(keys: Any) -> None:
    if not isinstance(keys, ClusteredKeys):
        fix = "Use hsa.cluster(k, v, lengths)"
        raise InvalidInput("keys", expected="an hsa.ClusteredKeys", got=type(keys).__name__, fix=fix)


def _check_causal(causal: Any) -> None:
    if not isinstance(causal, bool):
        raise InvalidInput("causal", expected="True or False", got=repr(causal))


def _branching(branching: Any, keys: Any, windows: bool) -> Any:
    """Return the branching: that of the keys if there are any."""
    if keys is None:
        return BRANCHING if branching is None else branching
    _check_are_keys(keys)
    if branching is not None and branching != keys.shape.branching:
        expected = f"{keys.shape.branching}, as the keys, or None"
        raise InvalidInput("branching", expected=expected, got=repr(branching))
    if windows and keys.order is not None:
        raise InvalidInput("windows", expected="False, as the keys are clustered", got="True")
    return keys.shape.branching


def _number_of_lists(q: Tensor, k: Tensor, share_lists: bool) -> int:
    return k.shape[1] if share_lists else q.shape[1]


def check_rule(
    threshold: Any, top_k: int | None, spread: float | None, heads: int | None = None
) -> tuple[Threshold | None, int | None, float]:
    """Check how queries want groups, and fill in the default.

    Args:
        heads: Number of query heads, if it is known.
    """
    if threshold is not None and top_k is not None:
        raise InvalidInput("top_k", expected="None with a threshold", got=repr(top_k), fix="Pass one of the two")
    spread = 1.0 if spread is None else spread
    if isinstance(spread, bool) or not isinstance(spread, (int, float)) or not 0 <= spread < math.inf:
        raise InvalidInput("spread", expected="a number of 0 or more", got=repr(spread))
    if top_k is not None:
        return None, check_count("top_k", top_k, "a number of groups, 0 or more"), float(spread)
    checked = check_threshold(THRESHOLD if threshold is None else threshold)
    if heads is not None:
        check_number_of_heads(checked, heads)
    return checked, None, float(spread)


def _check_opened(opened: Any, layout: Layout, lists: int, q: Tensor) -> Tensor | None:
    cut = [s for s in range(len(layout.lengths)) if layout.is_cut(s)]
    if opened is None:
        for s in cut:
            if layout.tile_chunks[layout.first_tiles[s]]:
                first = layout.lengths[s] - layout.queries[s]
                raise InvalidInput(
                    "opened",
                    problem=f"the first query of sequence {s} is token {first}, inside a tile of {layout.shape.tile}",
                    expected="the groups that the queries of this tile before it have opened",
                    fix="Pass opened=selection.opened() of the preceding queries, or begin with the first query of a tile",
                )
        return None
    groups = max((int(layout.tile_chunks[layout.first_tiles[s]]) for s in cut), default=0) * layout.shape.groups
    wanted = (
        f"a boolean tensor [sequences, lists, groups] of at least {(len(layout.lengths), lists, groups)} on {q.device}"
    )
    if not isinstance(opened, Tensor) or opened.dtype != torch.bool or opened.ndim != 3:
        got = type(opened).__name__ if not isinstance(opened, Tensor) else f"{opened.dtype} of {tuple(opened.shape)}"
        raise InvalidInput("opened", expected=wanted, got=got, fix="Use TileSelection.opened()")
    fits = opened.shape[:2] == (len(layout.lengths), lists) and opened.shape[2] >= groups
    if not fits or opened.device != q.device:
        raise InvalidInput("opened", expected=wanted, got=f"shape {tuple(opened.shape)} on {opened.device}")
    return opened


def _check_selection(
    selection: TileSelection, layout: Layout, q: Tensor, k: Tensor, keys: ClusteredKeys | None, **others: Any
) -> None:
    for name, value in others.items():
        if value is not None:
            fix = f"Pass {name} to hsa.select_groups, or leave selection out"
            raise InvalidInput(name, expected="no value together with a selection", got="one", fix=fix)
    fix = "Make it with hsa.select_groups for the queries and keys that attention gets"
    made = selection.layout
    same = (made.lengths, made.queries, made.shape, made.causal) == (
        layout.lengths,
        layout.queries,
        layout.shape,
        layout.causal,
    )
    if not same:
        raise InvalidInput(
            "selection", expected="one made for these sequences and tiles", got="one for others", fix=fix
        )
    if selection.keys is not None and keys is not None and selection.keys.order is not keys.order:
        raise InvalidInput("selection", expected="one made with these keys", got="one made with others", fix=fix)
    if selection.lists not in (q.shape[1], k.shape[1]):
        raise InvalidInput(
            "selection", expected=f"{q.shape[1]} or {k.shape[1]} lists per tile", got=selection.lists, fix=fix
        )
    if selection.first.device != q.device:
        raise InvalidInput("selection", expected=f"a selection on {q.device}", got=f"one on {selection.first.device}")
