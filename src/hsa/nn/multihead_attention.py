"""Attention over trees with projections, used as `torch.nn.MultiheadAttention(batch_first=True)` is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hsa.attention.checks import check_dropout
from hsa.attention.clustered.threshold import check_number_of_heads
from hsa.attention.hierarchical.operator import hierarchical_attention
from hsa.attention.options import AttentionOptions
from hsa.errors import InvalidInput
from hsa.nn.layouts import Forest, Masks, Tokens, jagged_layout, packed_layout, padded_layout
from hsa.tree.hierarchy import Hierarchy


class MultiheadAttention(nn.Module):
    """Base of the attentions: projections, masks and the three forms of input.

    Parameters have the names and shapes of `torch.nn.MultiheadAttention`, so that state dicts load both ways.
    """

    batch_first = True
    _qkv_same_embed_dim = False  # keeps torch.nn.TransformerEncoderLayer from its fused path, which knows only softmax
    options: AttentionOptions
    causal = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        if not batch_first:
            raise InvalidInput("batch_first", expected="True: tokens are [batch, length, embed_dim]", got="False")
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise InvalidInput(
                "num_heads", expected=f"a positive divisor of embed_dim, which is {embed_dim}", got=num_heads
            )
        check_dropout(dropout)
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.head_dim = embed_dim // num_heads
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        where = {"device": device, "dtype": dtype}
        self.has_one_weight = self.kdim == self.vdim == embed_dim
        if self.has_one_weight:
            self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim, **where))
        else:
            self.q_proj_weight = nn.Parameter(torch.empty(embed_dim, embed_dim, **where))
            self.k_proj_weight = nn.Parameter(torch.empty(embed_dim, self.kdim, **where))
            self.v_proj_weight = nn.Parameter(torch.empty(embed_dim, self.vdim, **where))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim, **where)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **where)
        for name, parameter in self.named_parameters(recurse=False):
            if name.endswith("weight"):
                nn.init.xavier_uniform_(parameter)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    def extra_repr(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self.options).items() if value is not None)
        return f"{self.embed_dim}, num_heads={self.num_heads}, causal={self.causal}, {options}"

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        hierarchy: Hierarchy | None = None,
        query_hierarchy: Hierarchy | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Attend from `query` to `key` and `value`; without these, to itself.

        Args:
            query: `[batch, queries, embed_dim]`; or a nested tensor with the jagged layout; or one sequence,
                `[queries, embed_dim]`; or, with `hierarchy`, packed `[leaves, embed_dim]`.
            key, value: In the same form. Self-attention needs none, or `query` again.
            key_padding_mask: `[batch, keys]`, True (or −∞) at padding.
            need_weights: Whether to return the weights as well. They take memory quadratic in the length.
            attn_mask: `[queries, keys]` or `[batch · heads, queries, keys]`, True (or −∞) where a query may not attend. It
                may hide later keys; other masks are refused.
            average_attn_weights: Whether weights are averaged over heads.
            is_causal: Whether queries see nothing later than themselves; no mask is needed.
            hierarchy: Forest of the keys, for packed input.
            query_hierarchy: Forest of the queries, for packed cross-attention: tree i reads tree i of the keys.

        Returns:
            The output in the form of `query`, zeros at padding. With `key` or `need_weights`, as in PyTorch, a pair of it
            and the weights, `[batch, queries, keys]` (`[batch, heads, queries, keys]` unless averaged) or None.
        """
        key_rows = query if key is None else key
        tokens = Tokens(query, key_rows, key_rows if value is None else value)
        masks = Masks(key_padding_mask, attn_mask)
        if hierarchy is not None:
            layout = packed_layout(tokens, masks, hierarchy, query_hierarchy)
        elif any(x.is_nested for x in tokens):
            layout = jagged_layout(tokens, masks)
        else:
            layout = padded_layout(tokens, masks, self.num_heads)
        causal = self.causal or is_causal or layout.causal
        if causal and tokens.is_cross:
            raise InvalidInput(
                "is_causal",
                expected="self-attention: the same tensor as query and key",
                got="another tensor as key",
                fix="Leave key and value out, or pass query again",
            )
        q, k, v = self._project(layout.rows)
        options = {"queries": layout.queries, "causal": causal}

        def weigh(q: Tensor, k: Tensor, v: Tensor, sequences: Forest) -> Tensor:
            return self._attend(q, k, v, sequences, dropout_p=0.0, **options)

        dropout_p = self.dropout if self.training else 0.0
        attended = self._attend(q, k, v, layout.sequences, dropout_p=dropout_p, **options)
        out = layout.restore(self.out_proj(attended.flatten(1)))
        if not need_weights:
            return out if key is None else (out, None)
        weights = layout.weights(weigh, q, k)
        return out, weights.mean(-3) if average_attn_weights else weights

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, sequences: Forest, **options: Any) -> Tensor:
        return self.options.attend(q, k, v, sequences, **options)

    def _project(self, rows: Tokens) -> list[Tensor]:
        """Project rows to `[rows, heads, head_dim]`."""
        for name, x, width in zip(rows._fields, rows, (self.embed_dim, self.kdim, self.vdim), strict=True):
            if x.shape[-1] != width:
                raise InvalidInput(name, expected=f"a width of {width}", got=f"{x.shape[-1]}")
        if self.has_one_weight and rows.query is rows.key is rows.value:
            projected = list(F.linear(rows.query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1))
        else:
            weights: list[Any] = [getattr(self, f"{name}_proj_weight", None) for name in "qkv"]
            weights = list(self.in_proj_weight.chunk(3)) if self.has_one_weight else weights
            biases: list[Any] = [None] * 3 if self.in_proj_bias is None else list(self.in_proj_bias.chunk(3))
            projected = [F.linear(*part) for part in zip(rows, weights, biases, strict=True)]
        return [x.unflatten(-1, (self.num_heads, self.head_dim)) for x in projected]


class HierarchicalAttention(MultiheadAttention):
    """Multi-head attention by the paper's operator, on your tree or on windows of consecutive tokens.

    Args:
        embed_dim: Width of the tokens.
        num_heads: Number of heads, a divisor of `embed_dim`.
        bias: Whether projections have a bias.
        kdim, vdim: Widths of keys and values, `embed_dim` by default.
        batch_first: True, as tokens are `[batch, length, embed_dim]`; for code written for PyTorch's module.
        branching: Family sizes from the leaves up, for input without a tree; the last one repeats.
        include_self: Whether tokens attend to themselves. The paper's experiments pass False.

    See `MultiheadAttention.forward` for the call. It is self-attention and not causal; dropout and cross-attention need
    `MultiscaleAttention`.

    >>> attention = HierarchicalAttention(32, 4)
    >>> attention(torch.randn(2, 50, 32)).shape  # padded
    torch.Size([2, 50, 32])
    >>> attention(torch.randn(9, 32), hierarchy=Hierarchy.from_nested([[3, 2], [4]])).shape  # packed, with a tree
    torch.Size([9, 32])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        branching: Sequence[int] | None = None,
        include_self: bool = True,
        device: Any = None,
        dtype: Any = None,
    ):
        base: dict[str, Any] = {
            "kdim": kdim,
            "vdim": vdim,
            "batch_first": batch_first,
            "device": device,
            "dtype": dtype,
        }
        super().__init__(embed_dim, num_heads, 0.0, bias, **base)
        self.options = AttentionOptions.of("hierarchical", branching=branching)
        self.include_self = include_self

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, sequences: Forest, **options: Any) -> Tensor:
        self.options.check_hierarchical(**options, instead="Use hsa.nn.MultiscaleAttention")
        tree = self.options.forest(sequences, k.device)
        return hierarchical_attention(q, k, v, tree, include_self=self.include_self)


class MultiscaleAttention(MultiheadAttention):
    """Multi-head attention that is exact where it matters and pooled elsewhere.

    Args:
        embed_dim: Width of the tokens.
        num_heads: Number of heads, a divisor of `embed_dim`.
        dropout: Dropout on the weights, in training.
        bias: Whether projections have a bias.
        kdim, vdim: Widths of keys and values, `embed_dim` by default.
        batch_first: True, as tokens are `[batch, length, embed_dim]`; for code written for PyTorch's module.
        causal: Whether queries never see later tokens; also `is_causal=True` in a call.
        kind: "multiscale" pools the nodes of your tree, or windows of consecutive tokens; "clustered" pools groups of
            similar keys. Clustered keys, and causal attention with `threshold` or `top_k`, take only the lengths of a tree.
        branching, near, threshold, top_k, sinks, tile: See `hsa.scaled_dot_product_attention`.

    See `MultiheadAttention.forward` for the call.

    >>> attention = MultiscaleAttention(32, 4, causal=True)
    >>> attention(torch.randn(2, 50, 32), key_padding_mask=torch.arange(50) >= torch.tensor([[50], [30]])).shape
    torch.Size([2, 50, 32])
    >>> _ = attention.load_state_dict(nn.MultiheadAttention(32, 4).state_dict())
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        causal: bool = False,
        kind: Literal["multiscale", "clustered"] = "multiscale",
        branching: Sequence[int] | None = None,
        near: int | None = None,
        threshold: float | Sequence[float] | Tensor | None = None,
        top_k: int | None = None,
        sinks: int | None = None,
        tile: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ):
        base: dict[str, Any] = {
            "kdim": kdim,
            "vdim": vdim,
            "batch_first": batch_first,
            "device": device,
            "dtype": dtype,
        }
        super().__init__(embed_dim, num_heads, dropout, bias, **base)
        if kind not in ("multiscale", "clustered"):
            fix = "For the paper's operator use HierarchicalAttention"
            raise InvalidInput("kind", expected="'multiscale' or 'clustered'", got=repr(kind), fix=fix)
        self.options = AttentionOptions.of(
            kind, branching=branching, near=near, threshold=threshold, top_k=top_k, sinks=sinks, tile=tile
        )
        check_number_of_heads(self.options.threshold, num_heads)
        self.causal = causal
        if causal:
            self.options.tiles()  # refuses options that do not fit
