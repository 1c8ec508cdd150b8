"""Attention over trees for PyTorch.

- `scaled_dot_product_attention`, `multiscale_attention`, `hierarchical_attention`: functions of q, k and v.
- `hsa.nn`: modules; `hsa.models`: classifiers and language models; `hsa.load`: models that `hsa train` saved.
- `hsa.huggingface`: attention over trees in pre-trained transformers.
- `Signal`, `collate`, `hsa.signals`: your data as trees; `Hierarchy`: the trees themselves.

Names load on first use.
"""

from typing import TYPE_CHECKING

from hsa.exports import lazy

if TYPE_CHECKING:
    from hsa import baselines as baselines
    from hsa import generation as generation
    from hsa import huggingface as huggingface
    from hsa import models as models
    from hsa import nn as nn
    from hsa import research as research
    from hsa import signals as signals
    from hsa.attention.cache.clustered import ClusteredCache as ClusteredCache
    from hsa.attention.cache.multiscale import MultiscaleCache as MultiscaleCache
    from hsa.attention.cache.tied import TiedCache as TiedCache
    from hsa.attention.checks import checking as checking
    from hsa.attention.clustered.keys import ClusteredKeys as ClusteredKeys
    from hsa.attention.clustered.operator import cluster as cluster
    from hsa.attention.clustered.operator import clustered_attention as clustered_attention
    from hsa.attention.clustered.operator import select_groups as select_groups
    from hsa.attention.clustered.selection import TileSelection as TileSelection
    from hsa.attention.dense import dense_weights as dense_weights
    from hsa.attention.flops import Flops as Flops
    from hsa.attention.flops import flops as flops
    from hsa.attention.flops import flops_flat as flops_flat
    from hsa.attention.flops import flops_regular as flops_regular
    from hsa.attention.hierarchical.operator import energy as energy
    from hsa.attention.hierarchical.operator import hierarchical_attention as hierarchical_attention
    from hsa.attention.mixing import HeadMixing as HeadMixing
    from hsa.attention.multiscale.cluster import KeyClusters as KeyClusters
    from hsa.attention.multiscale.cluster import cluster_keys as cluster_keys
    from hsa.attention.multiscale.operator import multiscale_attention as multiscale_attention
    from hsa.attention.multiscale.queries import Queries as Queries
    from hsa.attention.multiscale.select import select as select
    from hsa.attention.multiscale.selection import Partition as Partition
    from hsa.attention.multiscale.selection import Selection as Selection
    from hsa.attention.normalizers import Entmax as Entmax
    from hsa.attention.sdpa import scaled_dot_product_attention as scaled_dot_product_attention
    from hsa.errors import HsaError as HsaError
    from hsa.errors import InvalidInput as InvalidInput
    from hsa.signals.batch import Batch as Batch
    from hsa.signals.batch import collate as collate
    from hsa.signals.batch import uncollate as uncollate
    from hsa.signals.signal import Leaf as Leaf
    from hsa.signals.signal import Signal as Signal
    from hsa.training.load import load as load
    from hsa.tree.causal_tree import causal_tree as causal_tree
    from hsa.tree.hierarchy import Hierarchy as Hierarchy
    from hsa.tree.padding import Padding as Padding

_HOMES = {
    "hsa.attention.cache.clustered": "ClusteredCache",
    "hsa.attention.cache.multiscale": "MultiscaleCache",
    "hsa.attention.cache.tied": "TiedCache",
    "hsa.attention.checks": "checking",
    "hsa.attention.dense": "dense_weights",
    "hsa.attention.flops": "Flops flops flops_flat flops_regular",
    "hsa.attention.hierarchical.operator": "energy hierarchical_attention",
    "hsa.attention.mixing": "HeadMixing",
    "hsa.attention.clustered.keys": "ClusteredKeys",
    "hsa.attention.clustered.operator": "cluster clustered_attention select_groups",
    "hsa.attention.clustered.selection": "TileSelection",
    "hsa.attention.multiscale.cluster": "KeyClusters cluster_keys",
    "hsa.attention.multiscale.operator": "multiscale_attention",
    "hsa.attention.multiscale.queries": "Queries",
    "hsa.attention.multiscale.select": "select",
    "hsa.attention.multiscale.selection": "Partition Selection",
    "hsa.attention.normalizers": "Entmax",
    "hsa.attention.sdpa": "scaled_dot_product_attention",
    "hsa.errors": "HsaError InvalidInput",
    "hsa.signals.batch": "Batch collate uncollate",
    "hsa.signals.signal": "Leaf Signal",
    "hsa.training.load": "load",
    "hsa.tree.causal_tree": "causal_tree",
    "hsa.tree.hierarchy": "Hierarchy",
    "hsa.tree.padding": "Padding",
}

__getattr__, __dir__, __all__ = lazy(__name__, _HOMES, "baselines generation huggingface models nn research signals")
