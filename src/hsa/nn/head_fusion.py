"""How the heads of an attention layer become one: four ways, interchangeable in every layer.

A layer hands its fusion what heads compare (`compare`), gives the attention its `mixing`, and lets it weigh what the heads
bring back (`weigh`) before the output projection adds them up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hsa.attention.mixing import HeadMixing
from hsa.errors import InvalidInput
from hsa.nn.fusion_names import FusionName
from hsa.nn.grouped_linear import GroupedLinear
from hsa.nn.penalties import add_penalty


def head_fusion(
    name: FusionName,
    width: int,
    heads: int,
    head_dim: int,
    *,
    shared_dim: int | None = None,
    penalty: float = 0.01,
) -> HeadFusion:
    """A fusion by its name.

    Args:
        name: "concatenation", "talking" (heads mix logits and weights), "collaborative" (one query and key projection for
            all heads), "over-heads" (every token weighs its heads).
        width, heads, head_dim: of the layer.
        shared_dim: for "collaborative": channels of the shared queries and keys; half of all heads' by default.
        penalty: for "over-heads": how strongly tokens are kept from all choosing the same head.

    >>> head_fusion("collaborative", 32, 4, 8).key_dim
    16
    """
    if name not in get_args(FusionName):
        raise InvalidInput("fusion", given=repr(name), expected=f"one of {', '.join(get_args(FusionName))}")
    if name == "talking":
        return TalkingHeads(heads, head_dim)
    if name == "collaborative":
        return CollaborativeHeads(heads, head_dim, max(1, heads // 2) * head_dim if shared_dim is None else shared_dim)
    if name == "over-heads":
        return AttentionOverHeads(heads, head_dim, width, penalty=penalty)
    return Concatenation(heads, head_dim)


class HeadFusion(nn.Module):
    """What all of them share.

    Args:
        heads: of the layer.
        head_dim: channels of a head.
    """

    output_gain = 1
    """The output projection starts so many times larger, to begin where concatenation does."""

    def __init__(self, heads: int, head_dim: int):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.blocks = heads
        """Queries, and keys, have so many blocks of `head_dim` channels before `compare`."""

    @property
    def key_dim(self) -> int:
        """Channels of queries and keys per head after `compare`."""
        return self.head_dim

    @property
    def mixing(self) -> HeadMixing | None:
        """For the attention."""
        return None

    def compare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """`[leaves, blocks, head_dim]` → `[leaves, heads, key_dim]`: what heads compare."""
        return q, k

    def weigh(self, attended: Tensor, x: Tensor) -> Tensor:
        """What heads saw, `[leaves, heads, dim]`, each in its share; x is what the layer was given, `[leaves, width]`."""
        return attended

    @torch.no_grad()
    def scale_output(self, output: nn.Linear | GroupedLinear) -> None:
        """Called once, when the layer's output projection has its first weights."""
        output.weight *= self.output_gain


class Concatenation(HeadFusion):
    """Heads know nothing of each other: out_i = W_O [head_1; …; head_M]."""


class TalkingHeads(HeadFusion):
    """Logits and weights are mixed across heads (Shazeer et al., 2020, arXiv:2003.02436). Starts as concatenation.

    >>> TalkingHeads(3, 8).mixing.logits
    tensor([[1., 0., 0.],
            [0., 1., 0.],
            [0., 0., 1.]], grad_fn=...)
    """

    def __init__(self, heads: int, head_dim: int):
        super().__init__(heads, head_dim)
        # What is added to the identity, so that weight decay leads back to it.
        self.mix_logits = nn.Parameter(torch.zeros(heads, heads))
        self.mix_weights = nn.Parameter(torch.zeros(heads, heads))

    @property
    def mixing(self) -> HeadMixing:
        same = torch.eye(self.heads, dtype=self.mix_logits.dtype, device=self.mix_logits.device)
        return HeadMixing(same + self.mix_logits, same + self.mix_weights)


class CollaborativeHeads(HeadFusion):
    """One query and one key projection for all heads; each weighs their channels in its own way.

        logit_h(i→j) = Σ_r mixing[h, r] · q_ir · k_jr / √head_dim

    (Cordonnier, Loukas & Jaggi, 2020, arXiv:2006.16362.) With `shared_dim` = heads·head_dim and a mixing of ones in the
    blocks of the heads it is concatenation; `hsa.research.collaborative.heads` finds it for trained layers.

    >>> fusion = CollaborativeHeads(4, 8, shared_dim=16)
    >>> q, k = fusion.compare(*torch.randn(2, 5, 2, 8).unbind(0))
    >>> q.shape, k.shape
    (torch.Size([5, 4, 16]), torch.Size([5, 4, 16]))
    """

    def __init__(self, heads: int, head_dim: int, shared_dim: int):
        super().__init__(heads, head_dim)
        if shared_dim < 1 or shared_dim % head_dim:
            raise InvalidInput(
                "shared_dim",
                given=shared_dim,
                expected=f"a multiple of {head_dim}, the channels of a head: they are normalised and rotated together",
            )
        if shared_dim > heads * head_dim:
            raise InvalidInput(
                "shared_dim",
                given=shared_dim,
                expected=f"at most {heads * head_dim}, the channels of all heads: more can compare nothing more",
            )
        self.blocks = shared_dim // head_dim
        self.mix_channels = nn.Parameter(torch.randn(heads, shared_dim) * math.sqrt(head_dim / shared_dim))

    @property
    def key_dim(self) -> int:
        return self.blocks * self.head_dim

    def compare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        # Attention divides by √key_dim, a head of its own by √head_dim. Keys are mixed: each head finds its own tree.
        mixing = self.mix_channels * math.sqrt(self.key_dim / self.head_dim)
        return q.flatten(1)[:, None].expand(-1, self.heads, -1), k.flatten(1)[:, None] * mixing.to(k.dtype)


class AttentionOverHeads(HeadFusion):
    """A second attention, of every token over its heads.

        out_i = Σ_m β_im W_m head_m(i)        β_i = softmax over heads of (W_q norm(x_i)) · key_m / √query_dim

    β sums to 1: uniform, it is concatenation with W_O / M. While training, `penalty` times the divergence of the mean of β
    over all tokens from uniform is added to the loss (see `hsa.nn.penalties`): tokens may choose, but not all the same.

    >>> fusion = AttentionOverHeads(3, 8, width=24)
    >>> fusion.weights(torch.randn(5, 24)).sum(-1)
    tensor([1., 1., 1., 1., 1.], grad_fn=...)
    """

    def __init__(self, heads: int, head_dim: int, width: int, *, query_dim: int = 16, penalty: float = 0.01):
        super().__init__(heads, head_dim)
        self.output_gain = heads
        if not 0 <= penalty < math.inf:
            raise InvalidInput("penalty", given=penalty, expected="a number, 0 or more")
        self.penalty = penalty
        self.query = nn.Linear(width, query_dim)
        self.keys = nn.Parameter(torch.zeros(heads, query_dim))  # β starts uniform

    def weights(self, x: Tensor) -> Tensor:
        """β, `[leaves, heads]`."""
        q = self.query(F.layer_norm(x, x.shape[-1:]))
        logits = q @ self.keys.T.to(q.dtype) * self.keys.shape[1] ** -0.5
        return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))

    def weigh(self, attended: Tensor, x: Tensor) -> Tensor:
        β = self.weights(x)
        if self.training and self.penalty > 0 and len(β):
            add_penalty(self.penalty * concentration(β))
        return attended * β[..., None].to(attended.dtype)


def concentration(β: Tensor) -> Tensor:
    """KL(mean over tokens of β ‖ uniform): 0 when all heads are used alike, log M when all choose the same.

    >>> round(concentration(torch.tensor([[1.0, 0.0], [0.0, 1.0]])).item(), 6)
    0.0
    >>> round(concentration(torch.tensor([[1.0, 0.0], [1.0, 0.0]])).item(), 6)  # log 2
    0.693147
    """
    used = β.mean(0)
    share = (used * len(used)).clamp(min=torch.finfo(used.dtype).tiny)  # a head that nobody uses has a slope too
    return (used * share.log()).sum()


def check_fusion(
    fusion: HeadFusion, heads: int, head_dim: int, parts: Sequence[str] = ("q", "k", "v"), *, mixes: bool = True
) -> None:
    """It is one for a layer of these sizes, whose attention takes these parts and has something to mix, or not."""
    if (fusion.heads, fusion.head_dim) != (heads, head_dim):
        raise InvalidInput(
            "fusion",
            given=f"one for {fusion.heads} heads of {fusion.head_dim} channels",
            expected=f"{heads} heads of {head_dim}, as the layer has",
        )
    kind = type(fusion).__name__
    if tuple(parts[:3]) != ("q", "k", "v") and (fusion.mixing is not None or isinstance(fusion, CollaborativeHeads)):
        raise InvalidInput(
            "fusion",
            given=f"{kind} for an attention of {', '.join(parts)}",
            expected="one query and one key to compare",
            fix="use concatenation or over-heads",
        )
    if fusion.mixing is not None and not mixes:
        raise InvalidInput(
            "fusion",
            given=f"{kind} for heads that each look at nodes of their own choice",
            expected="heads that look at the same nodes",
            fix="use multiscale attention without top_k, hierarchical or flat attention, or another fusion",
        )
