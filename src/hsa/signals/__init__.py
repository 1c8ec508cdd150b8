"""Nested signals, their domains, and readers that build them from files and Python objects."""

from hsa.signals.domains import Domain, Graph, Grid, Sequence, Set, Table
from hsa.signals.signal import Leaf, Signal

__all__ = ["Domain", "Graph", "Grid", "Leaf", "Sequence", "Set", "Signal", "Table"]
