"""Rotary positions (Su et al., *RoFormer*, 2021) of packed queries and keys, from the position number of every token."""

from __future__ import annotations

import torch
from torch import Tensor

from hsa.errors import InvalidInput


def rotary_angles(positions: Tensor, dim: int, base: float = 10_000.0) -> Tensor:
    """Cosines and sines of position · base^(−2i/dim), worked out once for all layers.

    Args:
        positions: `[tokens]`, the number of every token in its own sequence.
        dim: channels of a head, an even number.

    Returns `[2, tokens, 1, dim / 2]` in float32.

    >>> rotary_angles(torch.tensor([0, 1]), 4)[0, :, 0].tolist()  # cos 0 = 1
    [[1.0, 1.0], [0.540302..., 0.9999...]]
    """
    if dim % 2:
        raise InvalidInput("head_dim", given=dim, expected="an even number: rotary positions turn channels in pairs")
    wide = torch.float64  # at position 100,000 a float32 phase is off by a hundredth
    frequencies = base ** (-torch.arange(0, dim, 2, device=positions.device, dtype=wide) / dim)
    phase = positions.to(wide)[:, None, None] * frequencies
    return torch.stack([phase.cos(), phase.sin()]).to(torch.float32)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """`x` `[tokens, heads, dim]` turned: channel pairs (i, i + dim/2) by the angle of frequency i.

    >>> x = torch.tensor([[[1.0, 0.0]]])
    >>> rotate(x, rotary_angles(torch.tensor([1]), 2)).tolist()  # cos 1, sin 1
    [[[0.540302..., 0.841470...]]]
    """
    cos, sin = angles.to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
