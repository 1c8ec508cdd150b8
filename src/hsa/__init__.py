"""hsa: hierarchical self-attention for PyTorch.

The names below load with the module they live in, when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hsa.attention.arguments import checking
    from hsa.attention.cache.found import FoundCache
    from hsa.attention.cache.pooled import HierarchicalCache
    from hsa.attention.dense import dense_weights
    from hsa.attention.flops import Flops, flops, flops_flat, flops_regular
    from hsa.attention.hierarchical.operator import energy, hierarchical_attention
    from hsa.attention.mixing import HeadMixing
    from hsa.attention.multiscale.choice import open_families
    from hsa.attention.multiscale.find_keys import KeyOrder, find_key_order
    from hsa.attention.multiscale.operator import multiscale_attention
    from hsa.attention.multiscale.partition import Opened, Partition
    from hsa.attention.multiscale.queries import Queries
    from hsa.attention.normalizers import Entmax
    from hsa.attention.trilinear.operator import hierarchical_trilinear_attention, trilinear_attention
    from hsa.batch import Batch, collate, uncollate
    from hsa.errors import HsaError
    from hsa.growth import grown
    from hsa.hierarchy import Hierarchy
    from hsa.padding import Padding
    from hsa.signals import Leaf, Signal

_HOMES = {
    "hsa.attention.arguments": ("checking",),
    "hsa.attention.cache.found": ("FoundCache",),
    "hsa.attention.cache.pooled": ("HierarchicalCache",),
    "hsa.attention.dense": ("dense_weights",),
    "hsa.attention.flops": (
        "Flops",
        "flops",
        "flops_flat",
        "flops_regular",
    ),
    "hsa.attention.hierarchical.operator": (
        "energy",
        "hierarchical_attention",
    ),
    "hsa.attention.mixing": ("HeadMixing",),
    "hsa.attention.multiscale.choice": ("open_families",),
    "hsa.attention.multiscale.find_keys": (
        "KeyOrder",
        "find_key_order",
    ),
    "hsa.attention.multiscale.operator": ("multiscale_attention",),
    "hsa.attention.multiscale.partition": (
        "Opened",
        "Partition",
    ),
    "hsa.attention.multiscale.queries": ("Queries",),
    "hsa.attention.normalizers": ("Entmax",),
    "hsa.attention.trilinear.operator": (
        "hierarchical_trilinear_attention",
        "trilinear_attention",
    ),
    "hsa.batch": (
        "Batch",
        "collate",
        "uncollate",
    ),
    "hsa.errors": ("HsaError",),
    "hsa.growth": ("grown",),
    "hsa.hierarchy": ("Hierarchy",),
    "hsa.padding": ("Padding",),
    "hsa.signals": (
        "Leaf",
        "Signal",
    ),
}

__all__ = [
    "Batch",
    "Entmax",
    "Flops",
    "FoundCache",
    "HeadMixing",
    "HierarchicalCache",
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
    "grown",
    "hierarchical_attention",
    "hierarchical_trilinear_attention",
    "multiscale_attention",
    "open_families",
    "trilinear_attention",
    "uncollate",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(home), name)
            return value
    raise AttributeError(f"module 'hsa' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
