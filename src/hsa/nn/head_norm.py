"""LayerNorm over the channels of each head."""

from __future__ import annotations

from torch import Tensor, nn

from hsa.attention.kernels import available


class HeadNorm(nn.LayerNorm):
    """LayerNorm over the last dimension of `[leaves, heads, dim]`, by one kernel on a GPU.

    It computes in float32 or wider and returns the dtype of its input.

    Args:
        dim: Channels of a head.

    >>> import torch
    >>> HeadNorm(4)(torch.tensor([[[1.0, 1.0, 3.0, 3.0]]])).round(decimals=3).tolist()
    [[[-1.0, -1.0, 1.0, 1.0]]]
    """

    def __init__(self, dim: int):
        super().__init__(dim)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and not available.why_not(x, x, "auto"):
            from hsa.nn.triton.head_norm import head_norm

            with available.device_of(x):
                return head_norm(x, self.weight, self.bias, self.eps)
        return super().forward(x).to(x.dtype)
