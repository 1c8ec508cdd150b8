"""Forms in which modules take tokens: a padded batch, a nested tensor, or packed rows with a tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from hsa.attention.dense import dense_weights
from hsa.attention.masks import Visible, read_mask, shows
from hsa.attention.multiscale.queries import Queries
from hsa.attention.options import cross_queries
from hsa.attention.sdpa import padding_of
from hsa.errors import InvalidInput
from hsa.tree.hierarchy import Hierarchy
from hsa.tree.jagged import Jagged, few
from hsa.tree.padding import Padding

Forest: TypeAlias = Hierarchy | Sequence[int]
"""A forest, or the lengths of sequences."""
Operator: TypeAlias = Callable[[Tensor, Tensor, Tensor, Forest], Tensor]


class Tokens(NamedTuple):
    """Query, key and value as they were passed. `key is query` means self-attention."""

    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def is_cross(self) -> bool:
        """Whether key and query are different tokens. Checkpointing and autocast detach one tensor into two equal views."""
        return self.key is not self.query and not _same_memory(self.key, self.query)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    if a.is_nested or b.is_nested or torch.compiler.is_compiling():
        return False
    return a.data_ptr() == b.data_ptr() != 0 and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


class Masks(NamedTuple):
    """Masks as `torch.nn.MultiheadAttention` takes them: True, or −∞, hides."""

    key_padding_mask: Tensor | None
    attn_mask: Tensor | None

    def refuse(self, why: str) -> None:
        for name, mask in self._asdict().items():
            if mask is not None:
                raise InvalidInput(name, expected=f"None: {why}", got="a mask")


@dataclass(frozen=True)
class Layout:
    """Packed rows of the tokens of one call, and the way back to the form of the query."""

    rows: Tokens  # [rows, dim] each
    sequences: Forest  # of the keys
    queries: Queries | None  # None: the leaves
    restore: Callable[[Tensor], Tensor]  # [rows, dim] → the form of the query
    weights: Callable[[Operator, Tensor, Tensor], Tensor]  # operator, q, k → [batch, heads, queries, keys]
    causal: bool = False


def packed_layout(tokens: Tokens, masks: Masks, tree: Hierarchy, query_hierarchy: Hierarchy | None) -> Layout:
    """Lay out `[leaves, dim]`; in cross-attention, tree i of the queries reads tree i of the keys."""
    if not isinstance(tree, Hierarchy):
        raise InvalidInput("hierarchy", expected="an hsa.Hierarchy", got=type(tree).__name__)
    masks.refuse("packed rows have no padding; pass is_causal=True for causal attention")
    if tokens.is_cross and query_hierarchy is None:
        expected = "the forest of the queries, which are not the keys"
        raise InvalidInput("query_hierarchy", problem="not given", expected=expected)
    query_tree = query_hierarchy if tokens.is_cross and query_hierarchy is not None else tree
    if query_tree.num_trees != tree.num_trees:
        got = f"{query_tree.num_trees}"
        raise InvalidInput("query_hierarchy", expected=f"{tree.num_trees} trees, as hierarchy", got=got)
    for name, x, forest in zip(tokens._fields, tokens, (query_tree, tree, tree), strict=True):
        if x.ndim != 2 or len(x) != forest.num_leaves:
            expected = f"shape [leaves, dim] for {forest}"
            raise InvalidInput(name, expected=expected, got=f"{tuple(x.shape)}")
    queries = cross_queries(query_tree.lengths, tree.device) if tokens.is_cross else None
    return Layout(tokens, tree, queries, lambda rows: rows, lambda operator, q, k: dense_weights(operator, q, k, tree))


def jagged_layout(tokens: Tokens, masks: Masks) -> Layout:
    """Lay out nested tensors `[batch, tokens, dim]`."""
    masks.refuse("nested tensors have no padding; pass is_causal=True for causal attention")
    query = Jagged("query", tokens.query)
    key = Jagged("key", tokens.key) if tokens.is_cross else query
    value = key if tokens.value is tokens.key else Jagged("value", tokens.value)
    if len(key.lengths) != len(query.lengths):
        raise InvalidInput("key", expected=f"{len(query.lengths)} sequences, as query", got=f"{len(key.lengths)}")
    if value.lengths != key.lengths:
        raise InvalidInput("value", expected=f"sequences of {few(key.lengths)} tokens, as key", got=few(value.lengths))

    def no_weights(operator: Operator, q: Tensor, k: Tensor) -> Tensor:
        raise InvalidInput("need_weights", expected="False for nested tensors", got="True", fix="Pass a padded batch")

    rows = Tokens(query.rows, key.rows, value.rows)
    queries = cross_queries(query.lengths, query.rows.device) if tokens.is_cross else None
    return Layout(rows, key.lengths, queries, query.wrap, no_weights)


def padded_layout(tokens: Tokens, masks: Masks, num_heads: int) -> Layout:
    """Lay out `[batch, length, dim]`, or `[length, dim]` for one sequence."""
    one = tokens.query.ndim == 2
    for name, x in zip(tokens._fields, tokens, strict=True):
        if x.ndim != tokens.query.ndim or x.ndim not in (2, 3) or (not one and len(x) != len(tokens.query)):
            batched = tokens.query.ndim == 3 and x is not tokens.query
            expected = f"shape [{f'{len(tokens.query)} sequences' if batched else 'batch'}, length, dim]"
            expected = "shape [length, dim]" if one else expected
            fix = "For packed [leaves, dim] pass the tree as well: hierarchy=…" if one else None
            raise InvalidInput(name, expected=expected, got=f"{tuple(x.shape)}", fix=fix)
    if tokens.key.shape[-2] != tokens.value.shape[-2]:
        raise InvalidInput("value", expected="as many rows as key", got=f"shape {tuple(tokens.value.shape)}")
    query, key, value = (x[None] if one else x for x in tokens)
    batch, queries, keys = len(query), query.shape[1], key.shape[1]
    visible = read_masks(masks, (batch, num_heads, queries, keys), tokens.is_cross).with_tokens(queries)
    key_padding = padding_of(visible.keys, batch, keys)
    query_padding = padding_of(None, batch, queries) if tokens.is_cross else key_padding
    query_rows = query_padding.pack_tokens(query)
    key_rows = key_padding.pack_tokens(key) if tokens.is_cross else query_rows
    value_rows = key_rows if tokens.value is tokens.key else key_padding.pack_tokens(value)
    sees_nothing = None if visible.queries is None else ~visible.queries

    def restore(rows: Tensor) -> Tensor:
        padded = query_padding.unpack_tokens(rows)
        padded = padded if sees_nothing is None else padded.masked_fill(sees_nothing[..., None], 0)
        return padded[0] if one else padded

    def weights(operator: Operator, q: Tensor, k: Tensor) -> Tensor:
        dense = _padded_weights(operator, q, k, query_padding, key_padding)
        dense = dense if sees_nothing is None else dense.masked_fill(sees_nothing[:, None, :, None], 0)
        return dense[0] if one else dense

    groups = cross_queries(query_padding.lengths, query.device) if tokens.is_cross else None
    rows = Tokens(query_rows, key_rows, value_rows)
    return Layout(rows, key_padding.lengths, groups, restore, weights, visible.causal)


def read_masks(masks: Masks, shape: tuple[int, int, int, int], is_cross: bool) -> Visible:
    """Return the meaning of both masks together.

    Args:
        shape: Numbers of sequences, heads, queries and keys.
        is_cross: Whether the queries are not the keys, so that none of them is padding.
    """
    batch, _, _, keys = shape
    present = None
    if masks.key_padding_mask is not None:
        present = _shown(masks.key_padding_mask, "key_padding_mask")
        present = present[None] if present.ndim == 1 else present
        if present.shape != (batch, keys):
            expected = f"shape [{batch} sequences, {keys} keys]"
            raise InvalidInput("key_padding_mask", expected=expected, got=f"{tuple(masks.key_padding_mask.shape)}")
    if masks.attn_mask is None:
        return Visible(present, causal=False)
    shown = _shown(masks.attn_mask, "attn_mask")
    if shown.ndim == 3 and len(shown) == shape[0] * shape[1]:
        shown = shown.unflatten(0, shape[:2])
    visible = read_mask(shown, shape, padding_attends=is_cross)
    if visible.keys is not None and present is not None:
        return visible._replace(keys=visible.keys & present)
    return visible if present is None else visible._replace(keys=present)


def _shown(mask: Tensor, where: str) -> Tensor:
    """Return a mask of PyTorch's modules as bool, True where a query may attend."""
    return ~mask if isinstance(mask, Tensor) and mask.dtype == torch.bool else shows(mask, where)


def _padded_weights(operator: Operator, q: Tensor, k: Tensor, queries: Padding, keys: Padding) -> Tensor:
    """Return `[batch, heads, queries, keys]`: attention is linear in its values, so one-hot values give its weights."""
    batch, width = keys.shape
    one_hot = torch.eye(width, dtype=k.dtype, device=k.device).expand(batch, -1, -1)
    return queries.unpack(operator(q, k, keys.pack_tokens(one_hot)[:, None].expand(-1, k.shape[1], -1), keys.lengths))
