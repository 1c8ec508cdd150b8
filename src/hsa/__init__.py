"""hsa: hierarchical self-attention for PyTorch.

The names below load with the module they live in, when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hsa.attention.cache.clustered import ClusteredCache
    from hsa.attention.cache.multiscale import MultiscaleCache
    from hsa.attention.checks import checking
    from hsa.attention.dense import dense_weights
    from hsa.attention.flops import Flops, flops, flops_flat, flops_regular
    from hsa.attention.hierarchical.operator import energy, hierarchical_attention
    from hsa.attention.mixing import HeadMixing
    from hsa.attention.multiscale.cluster import KeyClusters, cluster_keys
    from hsa.attention.multiscale.operator import multiscale_attention
    from hsa.attention.multiscale.queries import Queries
    from hsa.attention.multiscale.select import select
    from hsa.attention.multiscale.selection import Partition, Selection
    from hsa.attention.normalizers import Entmax
    from hsa.errors import HsaError
    from hsa.research.trilinear.operator import hierarchical_trilinear_attention, trilinear_attention
    from hsa.signals import Leaf, Signal
    from hsa.signals.batch import Batch, collate, uncollate
    from hsa.tree.causal_tree import causal_tree
    from hsa.tree.hierarchy import Hierarchy
    from hsa.tree.padding import Padding

_HOMES = {
    "hsa.attention.checks": ("checking",),
    "hsa.attention.cache.clustered": ("ClusteredCache",),
    "hsa.attention.cache.multiscale": ("MultiscaleCache",),
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
    "hsa.attention.multiscale.select": ("select",),
    "hsa.attention.multiscale.cluster": (
        "KeyClusters",
        "cluster_keys",
    ),
    "hsa.attention.multiscale.operator": ("multiscale_attention",),
    "hsa.attention.multiscale.selection": (
        "Selection",
        "Partition",
    ),
    "hsa.attention.multiscale.queries": ("Queries",),
    "hsa.attention.normalizers": ("Entmax",),
    "hsa.research.trilinear.operator": (
        "hierarchical_trilinear_attention",
        "trilinear_attention",
    ),
    "hsa.signals.batch": (
        "Batch",
        "collate",
        "uncollate",
    ),
    "hsa.errors": ("HsaError",),
    "hsa.tree.causal_tree": ("causal_tree",),
    "hsa.tree.hierarchy": ("Hierarchy",),
    "hsa.tree.padding": ("Padding",),
    "hsa.signals": (
        "Leaf",
        "Signal",
    ),
}

__all__ = [
    "Batch",
    "ClusteredCache",
    "Entmax",
    "Flops",
    "HeadMixing",
    "Hierarchy",
    "HsaError",
    "KeyClusters",
    "Leaf",
    "MultiscaleCache",
    "Padding",
    "Partition",
    "Queries",
    "Selection",
    "Signal",
    "causal_tree",
    "checking",
    "cluster_keys",
    "collate",
    "dense_weights",
    "energy",
    "flops",
    "flops_flat",
    "flops_regular",
    "hierarchical_attention",
    "hierarchical_trilinear_attention",
    "multiscale_attention",
    "select",
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
