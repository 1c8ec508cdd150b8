"""Random nested signals: every domain, unequal depths, mixed modalities, dtypes and shapes."""

import torch
from hypothesis import strategies as st

from hsa.signals import Graph, Grid, Leaf, Sequence, Set, Signal, Table

MODALITIES = ("text", "token", "patch", "audio")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)

arrays = st.builds(
    lambda dtype, shape, seed: (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 9).to(dtype),
    st.sampled_from(DTYPES),
    st.sampled_from([(), (3,), (2, 3), (0,)]),
    st.integers(0, 99),
)
values = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.floats(), st.booleans(), st.text(max_size=3), st.sampled_from("ab"), arrays
)
leaves = st.builds(Leaf, values, st.sampled_from(MODALITIES))


@st.composite
def domains(draw, size: int):
    kind = draw(st.sampled_from(["sequence", "set", "grid", "graph", "table"]))
    if kind == "sequence":
        return Sequence(size)
    if kind == "set":
        return Set(size)
    if kind == "grid":
        rows = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        return Grid((rows, size // rows))
    if kind == "graph":
        nodes = st.integers(0, size - 1)
        return Graph(size, draw(st.lists(st.tuples(nodes, nodes), max_size=3)))
    return Table(draw(st.lists(st.text(max_size=3), min_size=size, max_size=size, unique=True)))


@st.composite
def on_a_domain(draw, members):
    listed = draw(st.lists(members, min_size=1, max_size=4))
    return Signal(draw(domains(len(listed))), listed)


@st.composite
def stacks(draw):
    size = draw(st.integers(1, 6))
    value = draw(values)
    stacked = value.expand(size, *value.shape).clone() if isinstance(value, torch.Tensor) else [value] * size
    return Signal.of(stacked, draw(st.sampled_from(MODALITIES)), Set(size))


signals = st.recursive(
    st.one_of(on_a_domain(leaves), stacks()), lambda inner: on_a_domain(inner | leaves), max_leaves=8
)
