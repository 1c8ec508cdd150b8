"""Interface of a batch, as the modules need it: leaf values per modality, their forest and the positions of its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from hsa.tree.hierarchy import Hierarchy
from hsa.tree.positions import NodePositions


class Inputs(Protocol):
    """Batch of trees, such as `hsa.Batch` or any object with the same four properties."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Values of the leaves of each modality, `[leaves of the modality, …]`."""

    @property
    def leaves(self) -> Mapping[str, Tensor]:
        """Indices of the leaves of each modality, in ascending order."""

    @property
    def hierarchy(self) -> Hierarchy:
        """Forest of all leaves."""

    @property
    def positions(self) -> NodePositions:
        """Positions of the nodes in their families."""
