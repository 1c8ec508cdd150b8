"""`MultiscaleCall` and `SelectCall`: the checked arguments that the backends of both functions receive."""

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
    """Checked arguments of `multiscale_attention`. The forest is rooted; k and v may have fewer heads than q."""

    q: Tensor
    v: Tensor
    selection: Selection
    limit: Tensor | None  # [queries] end of the keys that a query may see, as a leaf number; None for no limit
    clusters: KeyClusters | None
    positions: Tensor | None  # [nodes, 1 or heads, dim]
    include_self: bool
    pooled_bias: Tensor | None  # [1 or heads]; None for 0
    mixing: HeadMixing | None
    entmax: Entmax | None  # None for softmax
    dropout_p: float
    scale: float

    @property
    def needs_gradient(self) -> bool:
        """Whether any input needs a gradient."""
        mixing = () if self.mixing is None else (self.mixing.logits, self.mixing.weights)
        alpha = None if self.entmax is None else self.entmax.alpha
        return needs_gradient(self.q, self.k, self.v, self.positions, self.pooled_bias, alpha, *mixing)


@dataclass(frozen=True, eq=False, kw_only=True)
class SelectCall(Call):
    """Checked arguments of a search for the `top_k` best leaf families per group and head. The forest is rooted."""

    q: Tensor
    queries: Queries
    neighbourhood: Neighbourhood  # selected already
    clusters: KeyClusters | None
    positions: Tensor | None  # [nodes, 1 or heads, dim]
    limit: Tensor | None  # [queries] end of the keys that a query may see, as a leaf number; None for no limit
    top_k: int
    width: int | None  # of the beam; None to score every family
    scale: float
