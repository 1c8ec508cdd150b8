"""Helpers: layers of every kind with every head fusion, and trees for them."""

from __future__ import annotations

import torch
from torch import Tensor

from hsa import Hierarchy
from hsa.baselines.deepsets import NoAttention
from hsa.nn.attention import Clustered, Flat, Hierarchical, Multiscale
from hsa.nn.causal_attention import CausalClustered, CausalFlat, CausalMultiscale
from hsa.nn.cross_attention import CrossAttention
from hsa.nn.decoder import DecoderLayer
from hsa.nn.grouped_linear import Groups
from hsa.nn.head_fusion import head_fusion
from hsa.nn.layer import EncoderLayer
from hsa.research.trilinear.module import HierarchicalTrilinear, Trilinear
from hsa.tree.causal_tree import causal_tree

WIDTH, HEADS, DIM, SOURCE = 13, 3, 5, 7
WIDE = HEADS * 2 * DIM  # width of decoders, whose heads divide it; rotary positions need an even number of channels
FUSIONS = ("talking", "collaborative", "over-heads")
ATTENTIONS = {
    "hierarchical": Hierarchical,
    "hierarchical with self": lambda: Hierarchical(include_self=True),
    "multiscale": lambda: Multiscale(HEADS, near=1),
    "multiscale top_k": lambda: Multiscale(HEADS, top_k=1),
    "clustered": lambda top_k=1: Clustered(HEADS, group=2, top_k=top_k, tile=3),
    "flat": Flat,
    "none": NoAttention,
    "trilinear": Trilinear,
    "hierarchical-trilinear": HierarchicalTrilinear,
}
CAUSAL = {
    "flat": CausalFlat,
    "hierarchical": lambda: CausalMultiscale(HEADS),
    "clustered": lambda top_k=1: CausalClustered(HEADS, branching=(2, 2, 1), tile=2, top_k=top_k),
}
SELECTING = ("multiscale top_k", "clustered")  # each head has its own selection
NOT_PAIRS = ("none", "trilinear", "hierarchical-trilinear")  # do not compare one query with one key


def fits(fusion: str, attention: str) -> bool:
    if fusion in ("concatenation", "over-heads"):
        return True
    return attention not in NOT_PAIRS and not (fusion == "talking" and attention in SELECTING)


ENCODERS = [(f, a) for f in FUSIONS for a in ATTENTIONS if fits(f, a)]
DECODERS = [(f, a) for f in FUSIONS for a in CAUSAL if fits(f, a)]
CROSSES = [(f, r) for f in FUSIONS for r in (None, 0, 2) if not (f == "talking" and r)]

LENGTHS = [13, 1, 6]
NESTED = ([3, 2, 4], [1], [2, [2, 1]])
TREE = Hierarchy.from_nested(NESTED)
CAUSAL_TREES = {
    "flat": Hierarchy.flat(LENGTHS),
    "hierarchical": causal_tree(LENGTHS, (3, 2), sinks=1),
    "clustered": Hierarchy.flat(LENGTHS),
}


def make_fusion(name, width, dim, full):
    """Return a fusion; if `full`, with as many shared channels as all heads have."""
    return head_fusion(name, width, HEADS, dim, shared_dim=HEADS * dim if full and name == "collaborative" else None)


def encoder_layer(attention, fusion="concatenation", *, full=False, **options) -> EncoderLayer:
    made = make_fusion(fusion, WIDTH, DIM, full)
    module = ATTENTIONS[attention](**options)
    return EncoderLayer(WIDTH, HEADS, module, fusion=made, head_dim=DIM, feed_forward=11)


def decoder_layer(attention, fusion="concatenation", *, full=False, kv_heads=None, **options) -> DecoderLayer:
    made = make_fusion(fusion, WIDE, 2 * DIM, full)
    module = CAUSAL[attention](**options)
    return DecoderLayer(WIDE, HEADS, module, kv_heads=kv_heads, fusion=made, feed_forward=11)


def cross_layer(top_k, fusion="concatenation", *, full=False) -> CrossAttention:
    return CrossAttention(WIDE, HEADS, SOURCE, top_k=top_k, fusion=make_fusion(fusion, WIDE, 2 * DIM, full))


def attend(layer: EncoderLayer, x: Tensor, tree: Hierarchy, positions: Tensor | None = None) -> Tensor:
    return layer(x, tree, Groups((len(x),), None, None), positions)


def angles_of(positions: Tensor, dim: int) -> Tensor:
    """Return the same as `rotary_angles`, in float64."""
    phase = positions.double()[:, None, None] * 100.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return torch.stack([phase.cos(), phase.sin()])


def token_positions() -> Tensor:
    """Return the position of every token in its text, for texts of `LENGTHS`."""
    return torch.cat([torch.arange(n) for n in LENGTHS])


def randn(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def finite(layer: torch.nn.Module, out: Tensor) -> Tensor:
    """Return `out` after checking that it and its gradients are finite."""
    out.square().sum().backward()
    assert out.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())
    return out
