"""Registration of `HierarchicalEncoder` as an architecture of classifiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from hsa.models.options import ModelOptions
from hsa.models.registry import Architecture, Extra
from hsa.nn.encoder import HierarchicalEncoder
from hsa.nn.encoder_config import EncoderConfig
from hsa.registry import KINDS
from hsa.tree.hierarchy import Hierarchy


def usual_levels(hierarchy: Hierarchy) -> int:
    """Return the number of levels that at least half of the documents have, 1 or more."""
    return max(1, int(np.median(hierarchy.structure.height[: hierarchy.num_trees])))  # roots come first


def configure(options: ModelOptions, extra: Extra, hierarchy: Hierarchy, changes: Mapping[str, Any]) -> EncoderConfig:
    """Return the configuration for the options, with the changes of a model; α only for kinds of attention that use it."""
    sizes = {f.name: getattr(options, f.name) for f in fields(EncoderConfig) if hasattr(options, f.name)}
    sizes["entmax_levels"] = len(options.windows) + 1 if options.windows else usual_levels(hierarchy)
    if not KINDS.get(changes["kind"]).takes_entmax:
        sizes["entmax"] = None
    return EncoderConfig(**{**sizes, **changes})


TREE = Architecture(
    EncoderConfig, HierarchicalEncoder, configure, explanation="hsa.analysis.attention_matrix:ATTENTION_MATRIX"
)
