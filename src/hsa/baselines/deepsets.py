"""DeepSets (Zaheer et al., NeurIPS 2017): no attention, so leaves interact only in pooling."""

from __future__ import annotations

from torch import Tensor

from hsa.attention.mixing import HeadMixing
from hsa.nn.attention import Attention
from hsa.nn.attention_kinds import AttentionKind
from hsa.tree.hierarchy import Hierarchy


class NoAttention(Attention):
    """Identity in place of attention: every leaf keeps its own value. Needs no queries and keys."""

    parts = ("v",)
    uses_positions = False
    mixes = False

    def forward(
        self, v: Tensor, hierarchy: Hierarchy, positions: Tensor | None, mixing: HeadMixing | None = None
    ) -> Tensor:
        return v


NONE = AttentionKind(lambda config: NoAttention(), has_matrix=False)
