"""Rotary position embeddings of packed queries and keys (Su et al., *RoFormer*, 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from hsa.errors import InvalidInput


def rotary_angles(positions: Tensor, dim: int, base: float = 10_000.0) -> Tensor:
    """Return the cosines and sines of position · base^(−2i/dim), which all layers share.

    Args:
        positions: Index of each token in its sequence, `[tokens]`.
        dim: Channels of a head, an even number.
        base: Base of the frequencies.

    Returns:
        `[2, tokens, 1, dim / 2]` in float32.

    >>> rotary_angles(torch.tensor([0, 1]), 4)[0, :, 0].tolist()  # cos 0 = 1
    [[1.0, 1.0], [0.540302..., 0.9999...]]
    """
    if dim % 2:
        raise InvalidInput("head_dim", got=dim, expected="an even number: channels are rotated in pairs")
    wide = torch.float64  # in float32, the phase at position 100,000 is off by 0.01
    frequencies = base ** (-torch.arange(0, dim, 2, device=positions.device, dtype=wide) / dim)
    phase = positions.to(wide)[:, None, None] * frequencies
    return torch.stack([phase.cos(), phase.sin()]).to(torch.float32)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the channel pairs (i, i + dim/2) of `x`, `[tokens, heads, dim]`, by the angle of frequency i.

    >>> x = torch.tensor([[[1.0, 0.0]]])
    >>> rotate(x, rotary_angles(torch.tensor([1]), 2)).tolist()  # cos 1, sin 1
    [[[0.540302..., 0.841470...]]]
    """
    cos, sin = angles.to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
