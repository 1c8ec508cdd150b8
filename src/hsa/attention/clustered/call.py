"""`ClusteredCall` and `SelectCall`: the checked arguments that the backends of clustered attention receive."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hsa.attention.call import needs_gradient
from hsa.attention.clustered.keys import ClusteredKeys
from hsa.attention.clustered.layout import Layout
from hsa.attention.clustered.selection import TileSelection


@dataclass(frozen=True, eq=False, kw_only=True)
class SelectCall:
    """Checked arguments of `hsa.select_groups`."""

    q: Tensor
    k: Tensor  # packed, in their own order
    keys: ClusteredKeys
    layout: Layout
    threshold: float | None
    top_k: int | None
    spread: float
    lists: int  # number of lists per tile: query heads, or key/value heads if the heads of a group share them
    opened: Tensor | None  # [sequences, lists, groups] groups that earlier queries of a cut tile have opened
    scale: float
    backend: str


@dataclass(frozen=True, eq=False, kw_only=True)
class ClusteredCall:
    """Checked arguments of `hsa.clustered_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    keys: ClusteredKeys | None  # None to build them from k and v
    layout: Layout
    windows: bool
    selection: TileSelection | None  # None to select
    threshold: float | None
    top_k: int | None
    spread: float
    lists: int
    opened: Tensor | None
    pooled_bias: Tensor | None  # [1 or heads]; None for 0
    dropout_p: float
    scale: float
    backend: str

    @property
    def needs_gradient(self) -> bool:
        """Whether any input needs a gradient."""
        tables = () if self.keys is None else (self.keys.k, self.keys.v)
        return needs_gradient(self.q, self.k, self.v, self.pooled_bias, *tables)

    def select(self, keys: ClusteredKeys) -> SelectCall:
        """Return the call that selects groups for this one."""
        return SelectCall(
            q=self.q,
            k=self.k,
            keys=keys,
            layout=self.layout,
            threshold=self.threshold,
            top_k=self.top_k,
            spread=self.spread,
            lists=self.lists,
            opened=self.opened,
            scale=self.scale,
            backend=self.backend,
        )
