"""Kernels of hierarchical attention: outputs and gradients equal those of the torch backend in float64."""

import pytest

pytest.importorskip("triton")

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hsa import Hierarchy, hierarchical_attention
from hsa.attention.hierarchical.operator import HIERARCHICAL
from hsa.attention.hierarchical.triton import operator as kernels
from hsa.attention.hierarchical.triton import sweeps
from hsa.attention.hierarchical.triton.plan import Layout, tiles
from hsa.attention.hierarchical.why_not import why_not_tiles
from hsa.attention.kernels.levels import levels
from hsa.attention.kernels.triton.launch import compiled_for
from hsa.attention.rounds import rooted
from hsa.errors import Unsupported
from tests.forests import forests, sights
from tests.interpreter import DEVICE, quick_interpreter  # noqa: F401

few = settings(max_examples=15)
HALVES = [torch.float16] if DEVICE == "cpu" else [torch.float16, torch.bfloat16]
TOLERANCE = HIERARCHICAL[0].tolerance


def inputs(tree, heads=2, dim=5, value_dim=7, kv_heads=None, seed=0, spread=1.0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).mul(spread).to(DEVICE)

    n, kv_heads = tree.num_leaves, kv_heads or heads
    return draw(n, heads, dim), draw(n, kv_heads, dim), draw(n, kv_heads, value_dim), draw(n, heads, value_dim)


def run(tree, tensors, d_out, dtype, backend, positions=None, **options):
    """Return the output and all gradients."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
    if positions is not None:
        leaves.append(positions.detach().to(dtype).requires_grad_())
        options["positions"] = leaves[-1]
    out = hierarchical_attention(*leaves[:3], tree, backend=backend, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out.to(dtype))]


def check(tree, dtype=torch.float32, positions=None, spread=1.0, seed=0, options=None, **sizes):
    tree, options = tree.to(DEVICE), {"include_self": False} if options is None else options
    *tensors, d_out = inputs(tree, seed=seed, spread=spread, **sizes)
    tensors = [x.to(dtype).double() for x in tensors]
    embedding = None
    if positions is not None:
        embedding = torch.randn(tree.num_nodes, *positions, generator=torch.Generator().manual_seed(seed)).double()
        embedding = embedding.to(DEVICE).to(dtype).double()
    expected = run(tree, tensors, d_out, torch.float64, "torch", embedding, **options)
    for name, x, y in zip(
        ["out", "q", "k", "v", "positions"],
        run(tree, tensors, d_out, dtype, "triton", embedding, **options),
        expected,
        strict=False,
    ):
        assert torch.isfinite(x).all(), name
        scale = max(float(y.abs().max()), 1e-3)
        torch.testing.assert_close(
            x.double() / scale, y / scale, atol=TOLERANCE[dtype], rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


@few
@given(forests(), st.integers(0, 10**6), sights)
def test_random_forests(forest, seed, options):
    assume(not why_not_tiles(rooted(forest)[0], torch.empty(1, 1, 5), torch.empty(1, 1, 7), None))
    check(forest, seed=seed, options=options)


@settings(max_examples=8)
@given(forests(), st.integers(0, 10**6), st.sampled_from([(3,), (2, 4)]))
def test_positions(forest, seed, shape):
    assume(not why_not_tiles(rooted(forest)[0], torch.empty(1, 1, 5), torch.empty(1, 1, 7), None))
    check(forest, seed=seed, positions=shape, options={"include_self": seed % 2 == 0})


REGULAR = [
    ((64, 33), (16, 2)),  # full runs, then a short one
    ((130,), (17, 3)),  # runs of 32
    ((140,), (40, 2)),  # runs of 64
    ((260,), (100,)),  # runs of 128
    ((90,), (2, 2, 2)),  # many small families in a run
    ((300, 5), (3, 3)),  # several levels below the top, and a small tree
]


@pytest.mark.parametrize(("lengths", "branching"), REGULAR)
def test_sizes_of_families(lengths, branching):
    check(Hierarchy.regular(lengths, branching), dim=16, value_dim=16)


def test_families_of_different_sizes_in_one_level():
    check(Hierarchy.from_nested([[3, 40, 17, 1, 16, 90], [2, 30]]), dim=16, value_dim=16, options={})


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 256])
def test_head_dims(dim):
    check(Hierarchy.regular([40], (6, 3)), heads=1, dim=dim, value_dim=dim)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision(dtype):
    check(Hierarchy.regular([150], (16, 4)), dtype, dim=32, value_dim=32)
    check(Hierarchy.from_nested([[20, 7, 3], [5]]), dtype, dim=16, value_dim=32, options={})


@pytest.mark.parametrize("dtype", HALVES)
def test_large_logits(dtype):
    check(Hierarchy.regular([60], (8, 4)), dtype, dim=16, value_dim=16, spread=60.0)


def test_grouped_heads():
    check(Hierarchy.regular([50], (6, 3)), heads=6, kv_heads=2)


def test_rows_that_are_not_contiguous():
    tree = Hierarchy.regular([50], (6, 3)).to(DEVICE)
    packed = torch.randn(50, 3, 2, 16, device=DEVICE)
    q, k, v = packed.unbind(1)
    expected = hierarchical_attention(q.double(), k.double(), v.double(), tree)
    torch.testing.assert_close(
        hierarchical_attention(q, k, v, tree, backend="triton").double(), expected, atol=2e-5, rtol=0
    )
    columns = torch.randn(16, 2, 50, device=DEVICE).permute(2, 1, 0)  # the last stride is not 1
    expected = hierarchical_attention(columns.double(), columns.double(), columns.double(), tree)
    out = hierarchical_attention(columns, columns, columns, tree, backend="triton")
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=0)


def test_a_tree_does_not_depend_on_the_rest_of_its_batch():
    one, other = Hierarchy.from_nested([[5, 3]]), Hierarchy.regular([70], (16, 2))
    q, k, v, _ = inputs(Hierarchy.collate([one, other]).to(DEVICE))
    both = hierarchical_attention(
        *(x.float() for x in (q, k, v)), Hierarchy.collate([one, other]).to(DEVICE), backend="triton"
    )
    alone = hierarchical_attention(*(x[:8].float() for x in (q, k, v)), one.to(DEVICE), backend="triton")
    torch.testing.assert_close(both[:8], alone, atol=1e-6, rtol=0)


def test_outputs_and_gradients_are_deterministic():
    tree = Hierarchy.from_nested([[20, 7, 3, 40], [5]]).to(DEVICE)
    *tensors, d_out = inputs(tree)
    for a, b in zip(
        run(tree, tensors, d_out, torch.float32, "triton"),
        run(tree, tensors, d_out, torch.float32, "triton"),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_custom_operators():
    tree = Hierarchy.regular([40], (6, 3)).to(DEVICE)
    plan = tiles(tree)
    q, k, v, d_out = (x.float() for x in inputs(tree, heads=1))
    for positions in (None, torch.randn(len(plan.node), 1, 3, device=DEVICE)):
        leaves = [None if x is None else x.clone().requires_grad_() for x in (q, k, v, positions)]
        arguments = (*leaves, None, plan.table, plan.layout, True, False, 0.5, True)
        torch.library.opcheck(kernels.forward.traced, arguments)
        _, *kept = kernels.forward.traced(*(None if x is None else x.detach() for x in leaves), *arguments[4:])
        torch.library.opcheck(
            kernels.backward.traced, (d_out, q, k, v, positions, None, plan.table, plan.layout, True, False, 0.5, kept)
        )


def test_compiles_without_graph_breaks():
    tree = Hierarchy.regular([40], (6, 3)).to(DEVICE)
    q, k, v, _ = (x.float().requires_grad_() for x in inputs(tree, heads=1))

    def attend(q, k, v):
        return hierarchical_attention(q * 2, k, v, tree, backend="triton").sin()

    expected = attend(q, k, v)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    out = compiled(q, k, v)
    torch.testing.assert_close(out, expected)
    for a, b in zip(
        torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_second_derivatives_are_refused():
    tree = Hierarchy.flat([5]).to(DEVICE)
    q = torch.randn(5, 1, 8, device=DEVICE, requires_grad=True)
    with pytest.raises(Unsupported, match="first derivatives only"):
        torch.autograd.grad(hierarchical_attention(q, q, q, tree, backend="triton").sum(), q, create_graph=True)


def test_launches_with_equal_keys_can_share_a_compiled_kernel(monkeypatch):
    """The key determines what Triton specialises on; a kernel compiled for other strides would read wrong addresses."""
    kernel_names = ("up", "down", "top", "d_up", "d_down", "d_top")
    names, seen = {getattr(sweeps, name): sweeps.__dict__[name].arg_names for name in kernel_names}, {}

    def record(self, key, programs, arguments, constants):
        special = []
        for name, x in zip(names[self.kernel], arguments, strict=False):
            if name in sweeps.VARYING or isinstance(x, float):
                continue
            dtype, aligned = compiled_for(x)[0] if isinstance(x, torch.Tensor) else (None, compiled_for(x)[0])
            special.append((name, dtype, None if name in sweeps.UNALIGNED else aligned))
        known = seen.setdefault((self.kernel, key, *constants.values()), special)
        assert known == special

    monkeypatch.setattr(kernels.Launcher, "__call__", record)
    for heads in (1, 2, 3, 16):
        for dim in (5, 8, 16):
            for lengths in ([30], [64, 7], [257]):
                tree = Hierarchy.regular(lengths, (4, 3)).to(DEVICE)
                big = torch.randn(tree.num_leaves, 16, dim, dtype=torch.float16, device=DEVICE)
                wide = torch.randn(tree.num_leaves, 16, 2 * dim, dtype=torch.float16, device=DEVICE)
                for x in (big[:, :heads], big[:, :heads].contiguous(), wide[:, :heads, :dim]):
                    x = x.detach().requires_grad_()
                    out = hierarchical_attention(x, x, x, tree, backend="triton")
                    for d_out in (torch.ones_like(out), big[:, :heads]):
                        torch.autograd.grad(out, x, d_out, retain_graph=True)
    assert len(seen) > 20


def test_a_plan_built_in_inference_mode_can_be_used_in_training():
    fresh, tree = (Hierarchy.regular([40], (6, 3)).to(DEVICE) for _ in range(2))
    *tensors, d_out = inputs(tree, heads=1)
    with torch.inference_mode():
        out = hierarchical_attention(*(x.float() for x in tensors), tree, backend="triton")
    after = run(tree, tensors, d_out, torch.float32, "triton")
    assert torch.equal(after[0], out)
    assert all(
        torch.equal(a, b) for a, b in zip(after, run(fresh, tensors, d_out, torch.float32, "triton"), strict=True)
    )


@few
@given(forests())
def test_every_family_is_in_one_run(forest):
    forest, _ = rooted(forest)
    assume(not why_not_tiles(forest, torch.empty(1, 1, 5), torch.empty(1, 1, 7), None))
    plan, chained = tiles(forest), levels(forest)
    layout = Layout.read(plan.layout)
    assert layout.integers() == plan.layout
    rows, parts = layout.leaves + layout.above, plan.table.numpy()
    begin, end = parts[2 * rows :][: layout.runs], parts[2 * rows + layout.runs :][: layout.runs]
    parent = parts[:rows]
    for number, level in enumerate(layout.levels):
        offset = layout.leaves if number else 0
        covered = np.zeros(level.end - level.begin, int)
        for job in level.jobs:
            for i in range(job.first, job.first + job.count):
                assert 0 < end[i] - begin[i] <= job.size
                covered[begin[i] - level.begin : end[i] - level.begin] += 1
                above = parent[offset + begin[i] : offset + end[i]]
                assert not job.single or len(set(above)) == 1
                if begin[i] > level.begin:
                    assert parent[offset + begin[i] - 1] != above[0]  # no family is split
        assert (covered == 1).all()
    assert chained.num_rows == rows


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float64}, "the kernels do not support torch.float64"),
        ({"dim": 257}, "head dims must be 1 to 256, not 257"),
        ({"tree": Hierarchy.flat([129])}, "a family has 129 members"),
        ({"tree": Hierarchy.flat([100]), "dim": 200}, "at most"),
        ({"family_attention": "linear"}, "the kernels need family_attention='exact'"),
        ({"positions": torch.zeros(6, 2000, device=DEVICE)}, "at most 0"),
    ],
)
def test_unsupported_calls(change, reason):
    tree = change.pop("tree", Hierarchy.flat([5])).to(DEVICE)
    dim, dtype = change.pop("dim", 8), change.pop("dtype", torch.float32)
    q = torch.randn(tree.num_leaves, 1, dim, dtype=dtype, device=DEVICE)
    with pytest.raises(Unsupported, match=reason):
        hierarchical_attention(q, q, q, tree, backend="triton", **change)
    assert hierarchical_attention(q, q, q, tree, **change).shape == q.shape  # another backend runs it


def test_a_comb_is_not_supported():
    parent = [-1] + [i for node in range(60) for i in (2 * node, 2 * node)]
    comb = Hierarchy.from_parents(parent).to(DEVICE)
    q = torch.randn(comb.num_leaves, 1, 8, device=DEVICE)
    with pytest.raises(Unsupported, match="very different depths"):
        hierarchical_attention(q, q, q, comb, backend="triton")


@pytest.mark.skipif(DEVICE == "cuda", reason="tests the CPU")
def test_auto_never_selects_the_interpreter():
    q = torch.randn(5, 1, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "forward", None)  # would fail
        hierarchical_attention(q, q, q, Hierarchy.flat([5]))
        patch.setenv("TRITON_INTERPRET", "0")
        with pytest.raises(Unsupported, match="the kernels run on CUDA, but the tensors are on cpu"):
            hierarchical_attention(q, q, q, Hierarchy.flat([5]), backend="triton")
