"""Alternatives to concatenating the heads of a layer; each works in every layer (see `hsa.nn.head_fusion`)."""

from hsa.research.head_fusion.collaborative import CollaborativeHeads
from hsa.research.head_fusion.over_heads import AttentionOverHeads
from hsa.research.head_fusion.talking import TalkingHeads

__all__ = ["AttentionOverHeads", "CollaborativeHeads", "TalkingHeads"]
