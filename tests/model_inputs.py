"""Random signals that a model can read, and small models that read them."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import strategies as st
from torch import nn

from hsa.nn.embedding import Modality
from hsa.nn.encoder import HierarchicalEncoder
from hsa.nn.encoder_config import EncoderConfig
from hsa.signals import Graph, Grid, Leaf, Sequence, Set, Signal, Table
from hsa.tree.positions import KINDS, NodePositions

TOKENS = 499
PATCH = (2, 3, 3)
MODALITIES = {
    "text": Modality(tokens=TOKENS, width=7),
    "number": Modality(numbers=1, center=0.3, scale=1.7),
    "patch": Modality(numbers=prod(PATCH), center=127.0, scale=64.0),
}
KEYS = ("title", "body", "price", "a b")
DOMAINS = ("sequence", "set", "grid", "graph", "table")


@st.composite
def domains(draw, size: int, kinds: tuple[str, ...] = DOMAINS):
    kind = draw(st.sampled_from(kinds))
    if kind == "sequence":
        return Sequence(size)
    if kind == "set":
        return Set(size)
    if kind == "grid":
        return Grid(draw(st.sampled_from([(size,), (1, size), (size, 1), (1, size, 1)])))
    if kind == "graph":
        nodes = st.integers(0, size - 1)
        return Graph(size, draw(st.lists(st.tuples(nodes, nodes), max_size=5)))
    return Table(draw(st.permutations(KEYS))[:size])


@st.composite
def readable(draw, names=tuple(MODALITIES), kinds=DOMAINS, trees: tuple[int, int] = (1, 4), depth: int = 3):
    """Draw signals of known modalities. All leaves differ, so that selections have no ties."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tokens = iter(torch.randperm(TOKENS, generator=generator).tolist())

    def leaf(name):
        if name == "text":
            return Leaf(next(tokens), name)
        if name == "number":
            return Leaf(torch.randn((), generator=generator, dtype=torch.float64).item(), name)
        return Leaf(torch.randint(0, 256, PATCH, generator=generator, dtype=torch.uint8), name)

    def signal(below):
        if below == 0 or draw(st.integers(0, 3)) == 0:
            return leaf(draw(st.sampled_from(names)))
        members = [signal(below - 1) for _ in range(draw(st.integers(1, 3)))]
        return Signal(draw(domains(len(members), kinds)), members)

    return [signal(depth) for _ in range(draw(st.integers(*trees)))]


def exact(module: nn.Module, seed: int = 3) -> nn.Module:
    """Return the module in float64, without dropout, and with random parameters, none of them 0."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.double().parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return module.eval()


def encoder(kind: str = "hierarchical", modalities=MODALITIES, kinds=KINDS, keys=KEYS, **changes):
    """Return a small encoder whose dimensions are different primes (twice a prime for sines and cosines)."""
    sizes = {"width": 13, "heads": 3, "head_dim": 5, "feed_forward": 17, "position_width": 22, "position_dim": 2}
    sizes |= {"layers": 2, "near": 0, "include_self": False}
    config = EncoderConfig(kind=kind, **{**sizes, **changes})
    return exact(HierarchicalEncoder(config, modalities, kinds, keys))


ENCODERS = {
    "hierarchical": {},
    "hierarchical with self": {"kind": "hierarchical", "include_self": True},
    "hierarchical in windows": {"kind": "hierarchical", "windows": (3, 2)},
    "hierarchical pooled": {"kind": "hierarchical", "pool": "families", "layers": 3},
    "hierarchical sparse": {"kind": "hierarchical", "entmax": "learned", "entmax_levels": 2},
    "multiscale": {},
    "multiscale sparse": {"kind": "multiscale", "entmax": "learned", "near": 1},
    "multiscale refined": {"kind": "multiscale", "near": 1, "top_k": 1},
    "clustered": {"group": 2, "top_k": 1, "tile": 3},
    "bottom-up": {},
    "flat": {},
    "flat pooled": {"kind": "flat", "pool": "families", "position_input": True},
    "none": {},
    "none with positions": {"kind": "none", "position_input": True},
}
"""Options of the encoders under test, by name."""


def encoder_named(name: str, **more):
    options = {"kind": name, **ENCODERS[name], **more}
    return encoder(**options)


def position_of_nodes(positions: NodePositions) -> list[tuple | None]:
    """Return the position of every node: None, (kind, numbers) or ("table", key)."""
    distinct: list[tuple | None] = [None]
    for kind in KINDS:
        if kind == "table":
            distinct += [(kind, key) for key in positions.keys]
        elif kind in positions.numbers:
            distinct += [(kind, tuple(row)) for row in positions.numbers[kind].tolist()]
    return [distinct[row] for row in positions.row.tolist()]


def num_leaves(signal: Signal | Leaf) -> int:
    return signal.num_leaves if isinstance(signal, Signal) else 1
