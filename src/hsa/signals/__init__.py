"""What the user has: nested signals, the domains they live on, and readers that make them."""

from hsa.signals.domains import Domain, Graph, Grid, Sequence, Set, Table
from hsa.signals.signal import Leaf, Signal

__all__ = ["Domain", "Graph", "Grid", "Leaf", "Sequence", "Set", "Signal", "Table"]
