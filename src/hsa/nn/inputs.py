"""What the modules read: leaf values per modality, the forest they hang in, and the positions of its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from hsa.tree.hierarchy import Hierarchy
from hsa.tree.positions import NodePositions


class Inputs(Protocol):
    """`hsa.Batch` is one; anything with these four will do."""

    @property
    def values(self) -> Mapping[str, Any]:
        """modality → `[leaves of it, …]`"""

    @property
    def leaves(self) -> Mapping[str, Tensor]:
        """modality → the leaves its values belong to, rising"""

    @property
    def hierarchy(self) -> Hierarchy: ...

    @property
    def positions(self) -> NodePositions: ...
