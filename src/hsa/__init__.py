"""hsa: hierarchical self-attention for PyTorch."""

from hsa.attention.arguments import checking
from hsa.attention.dense import dense_weights
from hsa.attention.flops import Flops, flops, flops_flat, flops_regular
from hsa.attention.hierarchical.operator import energy, hierarchical_attention
from hsa.attention.multiscale.choice import open_families
from hsa.attention.multiscale.find_keys import KeyOrder, find_key_order
from hsa.attention.multiscale.operator import multiscale_attention
from hsa.attention.multiscale.partition import Opened, Partition
from hsa.attention.multiscale.queries import Queries
from hsa.batch import Batch, collate, uncollate
from hsa.errors import HsaError
from hsa.hierarchy import Hierarchy
from hsa.padding import Padding
from hsa.signals import Leaf, Signal

__all__ = [
    "Batch",
    "Flops",
    "Hierarchy",
    "HsaError",
    "KeyOrder",
    "Leaf",
    "Opened",
    "Padding",
    "Partition",
    "Queries",
    "Signal",
    "checking",
    "collate",
    "dense_weights",
    "energy",
    "find_key_order",
    "flops",
    "flops_flat",
    "flops_regular",
    "hierarchical_attention",
    "multiscale_attention",
    "open_families",
    "uncollate",
]
