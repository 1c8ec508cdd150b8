"""Transformer layers with attention over trees, used as those of `torch.nn` are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hsa.errors import InvalidInput
from hsa.nn.multihead_attention import HierarchicalAttention, MultiheadAttention, MultiscaleAttention
from hsa.tree.hierarchy import Hierarchy

Activation = str | Callable[[Tensor], Tensor]


class _EncoderLayer(nn.TransformerEncoderLayer):
    """PyTorch's encoder layer with another self-attention."""

    def __init__(self, attention: MultiheadAttention, dim_feedforward: int, dropout: float, **options: Any):
        _check_batch_first(options.pop("batch_first"))
        super().__init__(
            attention.embed_dim, attention.num_heads, dim_feedforward, dropout, batch_first=True, **options
        )
        self.self_attn = attention  # type: ignore[assignment]

    def forward(  # type: ignore[override]
        self,
        src: Tensor,
        hierarchy: Hierarchy | None = None,
        *,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Apply attention and the feed-forward network.

        Args:
            src: `[batch, length, d_model]`; or a nested tensor with the jagged layout; or, with `hierarchy`, packed
                `[leaves, d_model]`.
            hierarchy: Forest of the tokens, for packed input.
            src_mask: `[length, length]`, True (or −∞) where a token may not attend: causal, or refused.
            src_key_padding_mask: `[batch, length]`, True (or −∞) at padding.
            is_causal: Whether tokens see nothing later than themselves; no mask is needed.

        Returns:
            The same form as `src`.
        """
        _check_hierarchy(hierarchy, "src_mask")
        masks: dict[str, Any] = {
            "attn_mask": src_mask,
            "key_padding_mask": src_key_padding_mask,
            "is_causal": is_causal,
        }

        def attend(x: Tensor) -> Tensor:
            with _named("src"):
                return self.dropout1(self.self_attn(x, hierarchy=hierarchy, **masks))

        if self.norm_first:
            x = src + attend(self.norm1(src))
            return x + self._ff_block(self.norm2(x))
        x = self.norm1(src + attend(src))
        return self.norm2(x + self._ff_block(x))


class HierarchicalEncoderLayer(_EncoderLayer):
    """Encoder layer whose self-attention is the paper's operator, on your tree or on windows of consecutive tokens.

    Takes the arguments of `torch.nn.TransformerEncoderLayer`, those of `HierarchicalAttention`, and state dicts of the
    former. It fits into `torch.nn.TransformerEncoder`.

    Args:
        d_model: Width of the tokens.
        nhead: Number of heads.
        dim_feedforward: Inner width of the feed-forward network.
        dropout: Dropout on residual branches and inside the feed-forward network. This attention has none on its weights.
        activation: Activation of the feed-forward network: "relu", "gelu" or a function.
        norm_first: Whether layer norms come before attention and feed-forward network, not after them.
        attention: Options of `HierarchicalAttention`: `branching`, `include_self`.

    >>> import torch
    >>> layer = HierarchicalEncoderLayer(32, 4)
    >>> layer(torch.randn(2, 50, 32)).shape  # padded
    torch.Size([2, 50, 32])
    >>> layer(torch.randn(9, 32), Hierarchy.from_nested([[3, 2], [4]])).shape  # packed, with a tree
    torch.Size([9, 32])
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = True,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        **attention: Any,
    ):
        where = {"device": device, "dtype": dtype}
        super().__init__(
            HierarchicalAttention(d_model, nhead, bias=bias, **attention, **where),
            dim_feedforward,
            dropout,
            activation=activation,
            layer_norm_eps=layer_norm_eps,
            batch_first=batch_first,
            norm_first=norm_first,
            bias=bias,
            **where,
        )


class MultiscaleEncoderLayer(_EncoderLayer):
    """Encoder layer whose self-attention is exact where it matters and pooled elsewhere.

    Takes the arguments of `torch.nn.TransformerEncoderLayer`, those of `MultiscaleAttention`, and state dicts of the
    former. It fits into `torch.nn.TransformerEncoder`. With `causal=True` it is a layer of a language model.

    Args:
        d_model: Width of the tokens.
        nhead: Number of heads.
        dim_feedforward: Inner width of the feed-forward network.
        dropout: Dropout on residual branches, inside the feed-forward network and on the weights of attention.
        activation: Activation of the feed-forward network: "relu", "gelu" or a function.
        norm_first: Whether layer norms come before attention and feed-forward network, not after them.
        attention: Options of `MultiscaleAttention`: `causal`, `kind`, `threshold`, `top_k`, …

    >>> import torch
    >>> layer = MultiscaleEncoderLayer(32, 4, norm_first=True, causal=True)
    >>> nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)(torch.randn(2, 50, 32)).shape
    torch.Size([2, 50, 32])
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = True,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        **attention: Any,
    ):
        where = {"device": device, "dtype": dtype}
        super().__init__(
            MultiscaleAttention(d_model, nhead, dropout, bias, **attention, **where),
            dim_feedforward,
            dropout,
            activation=activation,
            layer_norm_eps=layer_norm_eps,
            batch_first=batch_first,
            norm_first=norm_first,
            bias=bias,
            **where,
        )


class MultiscaleDecoderLayer(nn.TransformerDecoderLayer):
    """Decoder layer with multiscale self-attention, multiscale attention to another sequence and a feed-forward network.

    Takes the arguments and state dicts of `torch.nn.TransformerDecoderLayer` and fits into `torch.nn.TransformerDecoder`.

    Args:
        d_model: Width of the tokens.
        nhead: Number of heads.
        dim_feedforward: Inner width of the feed-forward network.
        dropout: Dropout on residual branches, inside the feed-forward network and on the weights of attention.
        activation: Activation of the feed-forward network: "relu", "gelu" or a function.
        norm_first: Whether layer norms come before attention and feed-forward network, not after them.
        causal: Whether self-attention never sees later tokens; also `tgt_is_causal=True` in a call.
        attention: Further options of `MultiscaleAttention`, for both attentions: `kind`, `near`, `top_k`, …; `threshold` is
            for self-attention alone, which must then be causal.

    >>> import torch
    >>> layer = MultiscaleDecoderLayer(32, 4, causal=True)
    >>> layer(torch.randn(2, 20, 32), torch.randn(2, 50, 32)).shape
    torch.Size([2, 20, 32])
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = True,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        causal: bool = False,
        **attention: Any,
    ):
        _check_batch_first(batch_first)
        super().__init__(
            d_model,
            nhead,
            dim_feedforward,
            dropout,
            activation,
            layer_norm_eps,
            batch_first=True,
            norm_first=norm_first,
            bias=bias,
            device=device,
            dtype=dtype,
        )
        options = {**attention, "device": device, "dtype": dtype}
        self.self_attn = MultiscaleAttention(d_model, nhead, dropout, bias, causal=causal, **options)  # type: ignore[assignment]
        options.pop("threshold", None)
        self.multihead_attn = MultiscaleAttention(d_model, nhead, dropout, bias, **options)  # type: ignore[assignment]

    def forward(  # type: ignore[override]
        self,
        tgt: Tensor,
        memory: Tensor,
        hierarchy: Hierarchy | None = None,
        memory_hierarchy: Hierarchy | None = None,
        *,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Apply self-attention, attention to `memory` and the feed-forward network.

        Args:
            tgt: `[batch, length, d_model]`; or a nested tensor; or, with the two hierarchies, packed `[leaves, d_model]`.
            memory: The other sequences, in the same form.
            hierarchy, memory_hierarchy: Forests of `tgt` and `memory`, for packed input.
            tgt_mask, memory_mask: Masks as in `HierarchicalEncoderLayer`; `memory_mask` may hide padding only.
            tgt_key_padding_mask, memory_key_padding_mask: `[batch, length]`, True (or −∞) at padding.
            tgt_is_causal: Whether tokens see nothing later than themselves; no mask is needed.

        Returns:
            The same form as `tgt`.
        """
        _check_hierarchy(hierarchy, "tgt_mask")
        if memory_is_causal:
            raise InvalidInput("memory_is_causal", expected="False: memory has no order relative to tgt", got="True")
        about_self: dict[str, Any] = {"attn_mask": tgt_mask, "key_padding_mask": tgt_key_padding_mask}
        about_self |= {"is_causal": tgt_is_causal, "hierarchy": hierarchy}
        about_memory: dict[str, Any] = {"attn_mask": memory_mask, "key_padding_mask": memory_key_padding_mask}
        about_memory |= {"hierarchy": memory_hierarchy, "query_hierarchy": hierarchy}

        def attend(x: Tensor) -> Tensor:
            with _named("tgt"):
                return self.dropout1(self.self_attn(x, **about_self))

        def cross(x: Tensor) -> Tensor:
            with _named("tgt", "memory"):
                return self.dropout2(self.multihead_attn(x, memory, memory, **about_memory)[0])

        x = tgt
        if self.norm_first:
            x = x + attend(self.norm1(x))
            x = x + cross(self.norm2(x))
            return x + self._ff_block(self.norm3(x))
        x = self.norm1(x + attend(x))
        x = self.norm2(x + cross(x))
        return self.norm3(x + self._ff_block(x))


@contextmanager
def _named(query: str, key: str | None = None) -> Iterator[None]:
    """Name the arguments of a layer in the errors of its attention."""
    masked = query if key is None else key
    names = {"query": query, "key": masked, "value": masked, "key_padding_mask": f"{masked}_key_padding_mask"}
    try:
        yield
    except InvalidInput as error:
        raise error.moved(
            names.get(error.where, f"{masked}_mask" if error.where == "attn_mask" else error.where)
        ) from None


def _check_batch_first(batch_first: bool) -> None:
    if not batch_first:
        raise InvalidInput("batch_first", expected="True: tokens are [batch, length, d_model]", got="False")


def _check_hierarchy(hierarchy: Any, mask: str) -> None:
    if hierarchy is not None and not isinstance(hierarchy, Hierarchy):
        got, fix = type(hierarchy).__name__, f"Pass a mask by name: {mask}=…"
        raise InvalidInput("hierarchy", expected="an hsa.Hierarchy", got=got, fix=fix)
