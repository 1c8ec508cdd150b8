"""`MultiscaleCall` and `SelectCall`: calls of multiscale attention and of the selection, as their backends see them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hsa.attention.call import Call, needs_gradient
from hsa.attention.mixing import HeadMixing
from hsa.attention.multiscale.cluster import KeyClusters
from hsa.attention.multiscale.neighbourhood import Neighbourhood
from hsa.attention.multiscale.queries import Queries
from hsa.attention.multiscale.selection import Selection
from hsa.attention.normalizers import Entmax


@dataclass(frozen=True, eq=False, kw_only=True)
class MultiscaleCall(Call):
    """A call of `multiscale_attention`, checked. The forest is rooted; k and v may have fewer heads than q."""

    q: Tensor
    v: Tensor
    selection: Selection
    limit: Tensor | None  # [queries] keys before this leaf number may be seen; None: all
    clusters: KeyClusters | None
    positions: Tensor | None  # [nodes, 1 or heads, dim]
    include_self: bool
    pooled_bias: Tensor | None  # [1 or heads]; None: nothing to add
    mixing: HeadMixing | None
    entmax: Entmax | None  # None: softmax
    dropout_p: float
    scale: float

    @property
    def needs_gradient(self) -> bool:
        mixing = () if self.mixing is None else (self.mixing.logits, self.mixing.weights)
        alpha = None if self.entmax is None else self.entmax.alpha
        return needs_gradient(self.q, self.k, self.v, self.positions, self.pooled_bias, alpha, *mixing)


@dataclass(frozen=True, eq=False, kw_only=True)
class SelectCall(Call):
    """A search for the `top_k` best leaf families of every group and head. The forest is rooted."""

    q: Tensor
    queries: Queries
    neighbourhood: Neighbourhood  # selected already
    clusters: KeyClusters | None
    positions: Tensor | None  # [nodes, 1 or heads, dim]
    limit: Tensor | None  # [queries] keys before this leaf number may be seen; None: all
    top_k: int
    width: int | None  # of the beam; None: every family is scored
    scale: float
