"""Kernels of three-way attention compared with the definition in float64: ragged trees, limits, sets, dtypes, strides."""

import pytest

pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa import Hierarchy
from hsa.errors import Unsupported
from hsa.research import trilinear_attention
from hsa.research.trilinear.call import Rows
from hsa.research.trilinear.triton import tiles as trilinear_tiles
from hsa.research.trilinear.triton.operator import operator, trilinear_core
from hsa.research.trilinear.triton.tiles import Tile
from tests.interpreter import DEVICE, quick_interpreter  # noqa: F401

DIM, VALUE_DIM = 7, 5


@pytest.fixture
def small_tiles(monkeypatch):
    """Make tiles small and not square, so that few rows need several tiles."""
    for table in (trilinear_tiles.SINGLE, trilinear_tiles.HALF):
        for kernel, width in table:
            monkeypatch.setitem(table, (kernel, width), Tile(16, 32 if kernel == "queries" else 16, 2, 1))


def offsets_of(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device=DEVICE)


def inputs(lengths, first=None, second=None, *, heads=1, dim=DIM, value_dim=VALUE_DIM, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sets = lengths, first or lengths, second or lengths
    rows = [sum(sets[s]) for s in (0, 1, 2, 1, 2)]
    widths = dim, dim, dim, value_dim, value_dim
    made = [torch.randn(n, heads, d, generator=generator) for n, d in zip(rows, widths, strict=True)]
    return [x.to(DEVICE, dtype).requires_grad_() for x in made], [offsets_of(x) for x in sets]


def definition(q, k1, k2, v1, v2, offsets, first_offsets, second_offsets, left=None, right=None, scale=1.0):
    results = []
    for tree in range(len(offsets) - 1):
        trees = ((q, offsets), (k1, first_offsets), (k2, second_offsets), (v1, first_offsets), (v2, second_offsets))
        a, b, c, d, e = (x[o[tree] : o[tree + 1]] for x, o in trees)
        i = torch.arange(len(a), device=q.device)[:, None]
        near = [torch.arange(len(x), device=q.device) - i for x in (b, c)]
        seen = [((left is None) | (x >= -(left or 0))) & ((right is None) | (x <= (right or 0))) for x in near]
        logits = torch.einsum("ihd,jhd,khd->hijk", a, b, c) * scale
        logits = logits.masked_fill(~(seen[0][:, :, None] & seen[1][:, None]), -torch.inf)
        weights = logits.flatten(2).softmax(-1).view_as(logits)
        results.append(torch.einsum("hijk,jhc,khc->ihc", weights, d, e))
    return torch.cat(results)


def compare(made, offsets, tolerance, left=None, right=None, scale=0.4, of=lambda x: x):
    """Compare output and gradients, relative to the largest value; `of` maps the leaves of autograd to kernel inputs."""
    out = trilinear_core(Rows(*map(of, made)), offsets, left=left, right=right, scale=scale)
    exact = [x.detach().double().requires_grad_() for x in made]
    expected = definition(*map(of, exact), *offsets, left, right, scale)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(7)).to(out)
    ours = out, *torch.autograd.grad(out, made, weight)
    theirs = expected, *torch.autograd.grad(expected, exact, weight.double())
    for name, x, y in zip(("out", "d_q", "d_k1", "d_k2", "d_v1", "d_v2"), ours, theirs, strict=True):
        assert x.shape == y.shape, name
        error = float((x.double() - y).detach().abs().max() / y.detach().abs().max().clamp(min=0.1))
        assert error < (tolerance if name == "out" else 2 * tolerance), (name, error)


LIMITS = {"all": (None, None), "causal": (None, 0), "window": (4, 4), "causal window": (17, 0), "ahead": (1, 5)}


@pytest.mark.parametrize(("left", "right"), LIMITS.values(), ids=LIMITS)
def test_ragged_trees(small_tiles, left, right):
    made, offsets = inputs((19, 1, 3))
    compare(made, offsets, 1e-5, left, right)


def test_several_whole_tiles(small_tiles):
    made, offsets = inputs((33,))
    compare(made, offsets, 1e-5, left=20, right=0)


def test_window_of_one_sees_itself():
    (q, k1, k2, v1, v2), offsets = inputs((5, 3))
    out = trilinear_core(Rows(q, k1, k2, v1, v2), offsets, left=0, right=0, scale=0.4)
    torch.testing.assert_close(out, v1 * v2)


def test_other_sets(small_tiles):
    made, offsets = inputs((5, 17, 2), (18, 3, 1), (7, 1, 33), heads=2)
    compare(made, offsets, 1e-5)


def test_empty_trees(small_tiles):
    made, offsets = inputs((3, 0, 4, 0, 2, 0), (2, 1, 0, 0, 5, 0), (6, 1, 3, 2, 1, 0))
    out = trilinear_core(Rows(*made), offsets, left=None, right=None, scale=0.4)
    grads = torch.autograd.grad(out.square().sum(), made)
    assert not out[3:7].any()  # the first set has no rows in their tree
    rows = [[0, 1, 2, 7, 8], [0, 1, 3, 4, 5, 6, 7], [*range(6), 12]]
    kept = [x.detach()[rows[s]].requires_grad_() for x, s in zip(made, (0, 1, 2, 1, 2), strict=True)]
    others = [offsets_of(x) for x in ((3, 2), (2, 5), (6, 1))]
    expected = definition(*kept, *others, scale=0.4)
    torch.testing.assert_close(out[rows[0]], expected, atol=1e-5, rtol=1e-5)
    for x, y, s in zip(grads, torch.autograd.grad(expected.square().sum(), kept), (0, 1, 2, 1, 2), strict=True):
        torch.testing.assert_close(x[rows[s]], y, atol=1e-5, rtol=1e-5)
        assert not torch.cat([x, x.new_zeros(1, *x.shape[1:])])[[i for i in range(len(x)) if i not in rows[s]]].any()


@pytest.mark.parametrize("lengths", [(0,), (0, 0)])
def test_no_rows(lengths):
    made, offsets = inputs(lengths)
    out = trilinear_core(Rows(*made), offsets, left=None, right=None, scale=1.0)
    assert out.shape == (0, 1, VALUE_DIM)
    assert [x.shape for x in torch.autograd.grad(out.sum(), made)] == [x.shape for x in made]


@settings(max_examples=6)
@given(
    lengths=st.lists(st.integers(1, 18), min_size=1, max_size=2),
    left=st.none() | st.integers(0, 19),
    right=st.none() | st.integers(0, 19),
    seed=st.integers(0, 99),
)
def test_any_lengths_and_limits(lengths, left, right, seed):
    with pytest.MonkeyPatch.context() as patch:
        small_tiles.__wrapped__(patch)
        made, offsets = inputs(lengths, seed=seed)
        compare(made, offsets, 2e-5, left, right)


@pytest.mark.parametrize(("dim", "value_dim"), [(1, 1), (16, 33), (61, 3), (128, 17), (19, 128)])
def test_widths(dim, value_dim):
    made, offsets = inputs((5, 2), dim=dim, value_dim=value_dim)
    compare(made, offsets, 1e-5, scale=dim**-0.5)


@pytest.mark.parametrize("causal", [False, True])
def test_half_precision(small_tiles, causal):
    made, offsets = inputs((17, 2), dtype=torch.float16)
    compare(made, offsets, 4e-3, right=0 if causal else None)


@pytest.mark.parametrize("scale", [-0.7, 0.0, 40.0])
def test_scales(small_tiles, scale):
    """Cover all signs, and scales so large that one pair dominates."""
    made, offsets = inputs((17,))
    compare(made, offsets, 1e-3, scale=scale)
    compare([x.detach()[:9].requires_grad_() for x in made], [offsets_of([9])] * 3, 1e-3, right=0, scale=scale)


def test_padding_does_not_overflow():
    """All logits are far below 0, the logit of padding."""
    made = [torch.full((3, 1, DIM), x, device=DEVICE).requires_grad_() for x in (1.0, 1.0, -1.0, 0.5, 2.0)]
    compare(made, [offsets_of([3])] * 3, 1e-4, scale=40.0)


def test_strided_rows():
    made, offsets = inputs((6, 5), heads=3)

    def strided(x):
        return torch.stack([x * 2, x, x * 3], 2)[:, :, 1]

    compare(made, offsets, 1e-5, of=strided)
    compare(made, offsets, 1e-5, of=lambda x: x.transpose(0, 2).contiguous().transpose(0, 2))


def test_compiles_without_graph_breaks():
    made, offsets = inputs((6, 3))

    def attend(*made):
        return trilinear_core(Rows(*[x * 2 for x in made]), offsets, left=4, right=0, scale=-0.3).sin()

    expected = attend(*made)
    out = torch.compile(attend, fullgraph=True, backend="aot_eager")(*made)
    torch.testing.assert_close(out, expected)
    ours, theirs = (torch.autograd.grad(x.sum(), made) for x in (out, expected))
    torch.testing.assert_close(ours, theirs)


def test_operator_registration():
    made, offsets = inputs((4, 3))
    torch.library.opcheck(
        operator.traced, (*made, *offsets, None, 0, 0.5), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, 3)])
def test_public_operator(causal, window):
    forest = Hierarchy.flat([7, 4]).to(DEVICE)
    made, _ = inputs((7, 4))
    ours, theirs = (
        trilinear_attention(*made, forest, causal=causal, window=window, backend=backend)
        for backend in ("triton", "dense")
    )
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_too_wide_is_refused():
    made, _ = inputs((3,), dim=129)
    with pytest.raises(Unsupported, match="head dims must be 1 to 128, not 129"):
        trilinear_attention(*made, Hierarchy.flat([3]).to(DEVICE), backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3), (torch.float32, 2e-5)], ids=str
)
@pytest.mark.parametrize(("left", "right"), LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("dim", [16, 32, 64, 128])
def test_tiles_on_tensor_cores(dtype, tolerance, left, right, dim):
    made, offsets = inputs((211, 1, 64, 130), dim=dim, value_dim=dim, dtype=dtype)
    compare(made, offsets, tolerance, left, right, scale=dim**-0.5)
    made, offsets = inputs((70, 129), (133, 5), (1, 200), dim=dim, value_dim=dim, dtype=dtype)
    if left is None and right is None:
        compare(made, offsets, tolerance, scale=dim**-0.5)


@pytest.mark.gpu
def test_graph_capture_is_deterministic():
    def step():
        out = trilinear_core(Rows(*made), offsets, left=None, right=0, scale=0.2)
        return out, *torch.autograd.grad(out.sum(), made)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # autograd remembers the stream of the first use, which must be that of the capture
        made, offsets = inputs((300, 41), dim=32, value_dim=32, dtype=torch.bfloat16)
        expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = step()
    graph.replay()
    for x, y in zip(out, expected, strict=True):
        assert torch.equal(x, y)
