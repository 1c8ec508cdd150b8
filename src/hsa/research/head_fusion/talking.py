"""Talking heads: logits and weights mixed across heads."""

from __future__ import annotations

import torch
from torch import nn

from hsa.attention.mixing import HeadMixing
from hsa.nn.head_fusion import HeadFusion


class TalkingHeads(HeadFusion):
    """Fusion that mixes logits and weights across heads (Shazeer et al., 2020, arXiv:2003.02436).

    It starts as concatenation.

    Args:
        heads: Number of heads.
        head_dim: Channels per head.

    >>> TalkingHeads(3, 8).mixing.logits
    tensor([[1., 0., 0.],
            [0., 1., 0.],
            [0., 0., 1.]], grad_fn=...)
    """

    def __init__(self, heads: int, head_dim: int):
        super().__init__(heads, head_dim)
        # Stored as differences from the identity, so that weight decay pulls towards concatenation.
        self.mix_logits = nn.Parameter(torch.zeros(heads, heads))
        self.mix_weights = nn.Parameter(torch.zeros(heads, heads))

    @property
    def mixing(self) -> HeadMixing:
        same = torch.eye(self.heads, dtype=self.mix_logits.dtype, device=self.mix_logits.device)
        return HeadMixing(same + self.mix_logits, same + self.mix_weights)
