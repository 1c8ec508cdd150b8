"""A linear map per modality, applied to all leaves at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Groups:
    """Leaves sorted by modality.

    Attributes:
        sizes: Number of leaves of each modality of the model.
        order: Leaves in order of their modality; None if they are in that order already.
        back: Inverse of `order`.
    """

    sizes: tuple[int, ...]
    order: Tensor | None
    back: Tensor | None

    @staticmethod
    def of(leaves: Mapping[str, Tensor], modalities: Sequence[str], groups: int | None = None) -> Groups:
        """Build one group per modality; further `groups` are empty."""
        sizes = tuple(len(leaves[name]) if name in leaves else 0 for name in modalities)
        sizes += (0,) * ((groups or len(sizes)) - len(sizes))
        if sum(size > 0 for size in sizes) <= 1:
            return Groups(sizes, None, None)
        order = torch.cat([leaves[name] for name in modalities if name in leaves])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return Groups(sizes, order, back)


class GroupedLinear(nn.Module):
    """Linear map y = W_m x + b_m, where m is the modality of the leaf.

    Args:
        groups: Number of modalities.
        inputs: Width of x.
        outputs: Width of y.
        bias: Whether to add b_m.

    >>> leaves = {"text": torch.tensor([0, 2, 3]), "patch": torch.tensor([1])}
    >>> layer = GroupedLinear(2, 5, 7)
    >>> layer(torch.randn(4, 5), Groups.of(leaves, ("text", "patch"))).shape
    torch.Size([4, 7])
    """

    def __init__(self, groups: int, inputs: int, outputs: int, *, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(groups, outputs)) if bias else None
        nn.init.uniform_(self.weight, -1 / math.sqrt(inputs), 1 / math.sqrt(inputs))

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        """Map the leaves, `[leaves, inputs]` → `[leaves, outputs]`."""
        if groups.order is None:
            only = next((i for i, size in enumerate(groups.sizes) if size), 0)
            return F.linear(x, self.weight[only].T, None if self.bias is None else self.bias[only])
        if groups.back is None:
            raise AssertionError("an order without its inverse")
        y = _grouped_product(x.index_select(0, groups.order), self.weight, groups.sizes)
        if self.bias is not None:
            y = y + self.bias.repeat_interleave(_on(y, groups.sizes), dim=0, output_size=len(y)).to(y.dtype)
        return y.index_select(0, groups.back)


def _grouped_product(x: Tensor, weight: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Multiply by one kernel if there is one (half precision on CUDA), else modality by modality."""
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    x, weight = x.to(dtype), weight.to(dtype)
    half = dtype in (torch.bfloat16, torch.float16)
    if half and x.is_cuda and hasattr(F, "grouped_mm") and weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0:
        return F.grouped_mm(x, weight, offs=_on(x, sizes).cumsum(0, dtype=torch.int32))
    return torch.cat([part @ w for part, w in zip(x.split(sizes), weight, strict=True)])


def _on(like: Tensor, sizes: tuple[int, ...]) -> Tensor:
    return torch.tensor(sizes, device=like.device)
