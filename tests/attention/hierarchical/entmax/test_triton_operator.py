"""Kernels of hierarchical attention with entmax: outputs and gradients equal those of the torch backend in float64."""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hsa import Entmax, Hierarchy, hierarchical_attention
from hsa.attention.entmax import entmax
from hsa.attention.hierarchical.entmax.inside import inside_weights
from hsa.attention.hierarchical.operator import HIERARCHICAL
from hsa.attention.hierarchical.triton import operator as kernels
from hsa.attention.hierarchical.triton.plan import tiles
from hsa.attention.hierarchical.why_not import why_not_tiles
from hsa.attention.kernels.triton.launch import compiled_for
from hsa.attention.rounds import rooted
from hsa.errors import Unsupported
from tests.forests import forests, sights
from tests.interpreter import DEVICE, quick_interpreter  # noqa: F401

HALVES = [torch.float16] if DEVICE == "cpu" else [torch.float16, torch.bfloat16]
TOLERANCE = HIERARCHICAL[0].tolerance
BOTH = [Entmax(1.5), Entmax(2.0)]
BY_LEVEL = torch.tensor([[1.1], [1.5], [1.3]])
LEARNED = [Entmax(BY_LEVEL, least=1.1), Entmax(BY_LEVEL, "logits", least=1.1)]
EVERY = [*BOTH, Entmax(1.5, counts="logits"), Entmax(2.0, counts="logits"), *LEARNED]


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(tree, tensors, d_out, dtype, backend, positions=None, **options):
    """Return the output and all gradients, that of α last if it is a tensor."""
    leaves = [x.detach().to(DEVICE, dtype).requires_grad_() for x in tensors]
    if positions is not None:
        leaves.append(positions.detach().to(DEVICE, dtype).requires_grad_())
        options["positions"] = leaves[-1]
    if isinstance(options["normalizer"].alpha, torch.Tensor):
        leaves.append(options["normalizer"].alpha.clone().to(DEVICE, dtype).requires_grad_())
        options["normalizer"] = replace(options["normalizer"], alpha=leaves[-1])
    out = hierarchical_attention(*leaves[:3], tree, backend=backend, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out.to(DEVICE, dtype))]


def check(tree, normalizer, dtype=torch.float32, positions=None, spread=1.0, seed=0, heads=2, dim=5, **options):
    """Compare with the torch backend. Errors of logits are multiplied by up to leaf_count (α = 2) in the weights."""
    tree, n = tree.to(DEVICE), tree.num_leaves
    widths = dim, dim, dim + 2, dim + 2
    q, k, v, d_out = (draw(seed + i, n, heads, width).to(dtype).double() for i, width in enumerate(widths))
    embedding = None if positions is None else draw(seed + 4, tree.num_nodes, *positions).to(dtype).double()
    arguments = (tree, (q * spread, k, v), d_out)
    options["normalizer"] = normalizer
    results = run(*arguments, dtype, "triton", embedding, **options)
    expected = run(*arguments, torch.float64, "torch", embedding, **options)
    # For α = 2 gradients jump where an entry leaves the support, which rounding may decide: compare them for seed 0 only.
    highest = float(torch.as_tensor(normalizer.alpha).max())
    of_alpha = ["α"] if isinstance(normalizer.alpha, torch.Tensor) else []
    names = ["out", "q", "k", "v", *([] if embedding is None else ["positions"]), *of_alpha]
    for name, x, y in zip(names if seed == 0 or highest < 2 else ["out"], results, expected, strict=False):
        scale = max(float(y.abs().max()), 1e-3)
        tolerance = TOLERANCE[dtype] * max(1.0, int(tree.structure.leaf_count.max()) ** (highest - 1) / 2)
        tolerance *= 4 if name == "α" else 1  # differences of large numbers are multiplied by 1 / (α − 1)²
        torch.testing.assert_close(
            x.double() / scale, y / scale, atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


@settings(max_examples=10)
@given(forests(), st.integers(0, 10**6), sights, st.sampled_from(EVERY))
def test_random_forests(forest, seed, options, normalizer):
    assume(not why_not_tiles(rooted(forest)[0], torch.empty(1, 1, 5), torch.empty(1, 1, 7), None))
    positions = None if seed % 3 else (1 + seed % 2, 3)
    check(forest, normalizer, seed=seed, positions=positions, **options)


REGULAR = [
    ((64, 33), (16, 2), {"include_self": False}),  # full runs, then a short one
    ((40,), (17, 2), {"include_self": True}),  # runs of 32
    ((80,), (40, 2), {"include_self": False}),  # runs of 64
    ((130,), (100,), {"causal": "paper-mask"}),  # runs of 128
    ((40,), (2, 2, 2), {"include_self": False}),  # many small families in a run
    ((150, 5), (2, 3), {"include_self": True}),  # a level between the leaves and the top
]


@pytest.mark.parametrize("normalizer", BOTH, ids=str)
@pytest.mark.parametrize(("lengths", "branching", "options"), REGULAR)
def test_sizes_of_families(lengths, branching, options, normalizer):
    check(Hierarchy.regular(lengths, branching), normalizer, heads=1, **options)


@pytest.mark.parametrize("normalizer", EVERY, ids=str)
def test_families_of_different_sizes_in_one_level(normalizer):
    tree = Hierarchy.from_nested([[3, 30, 17, 1], [2, [1, 5]], 1])
    check(tree, normalizer, heads=1, positions=(1, 3), include_self=True)


@pytest.mark.parametrize("counts", ["weighted", "logits"])
@pytest.mark.parametrize("alpha", [[1.1, 1.9], [[1.1, 2.0], [1.9, 1.5]], [[1.25], [1.75]]], ids=str)
def test_alpha_per_level_and_head(alpha, counts):
    tree = Hierarchy.from_nested([[3, [5, 2], 7], [[4, [1, 6]], 20]])
    check(tree, Entmax(torch.tensor(alpha), counts, least=1.1), include_self=False)


@pytest.mark.parametrize(("lengths", "branching", "options"), REGULAR[2:])
def test_learned_alpha_and_sizes_of_families(lengths, branching, options):
    check(Hierarchy.regular(lengths, branching), LEARNED[0], heads=1, **options)


@pytest.mark.parametrize("alpha", [1 + 1 / 64, 1.03], ids=str)
def test_alpha_close_to_1(alpha):
    check(Hierarchy.from_nested([[3, 30, 7], [5]]), Entmax(torch.tensor([[alpha]]), least=alpha), include_self=False)


@pytest.mark.parametrize("power", [1, 0])
def test_entmax_does_not_read_rows_without_weight(power):
    """Softmax (power 0), which has no weights of 0, reads all rows."""
    y = torch.tensor([torch.nan, torch.nan, 1.0, 3.0], device=DEVICE)[:, None, None].expand(4, 1, 5).contiguous()
    out, above = torch.empty_like(y), torch.full((2, 1, 5), 7.0, device=DEVICE)
    parent = torch.tensor([0, 0, 1, 1], dtype=torch.int32, device=DEVICE)
    weight = torch.tensor([[0.0], [0.5]], device=DEVICE)
    arguments = (y, weight, weight, weight, out, above, parent, 0, 4, 2, 1)
    constants = {"LEAVES": True, "ROWS": 32, "DV": 5, "BLOCK_DV": 16, "POWER": power, "OVERLAP": False}
    kernels._down(compiled_for(y, out), 1, arguments, constants)
    assert out[2:, 0, 0].tolist() == [7.5, 8.5]
    assert (out[:2] == 7).all() if power else out[:2].isnan().all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("normalizer", [*BOTH, LEARNED[0]], ids=str)
def test_half_precision(dtype, normalizer):
    check(Hierarchy.regular([60], (16, 2)), normalizer, dtype, heads=1, dim=16, include_self=False)


def rows_of(keys, values, tree, normalizer):
    """Return the output of queries that are all 1, so that every row has the same logits."""
    keys, options = keys.float().to(DEVICE)[:, None, None], {"include_self": True, "scale": 1.0, "backend": "triton"}
    parts = [
        hierarchical_attention(
            torch.ones_like(keys), keys, x[:, None].to(DEVICE), tree.to(DEVICE), normalizer=normalizer, **options
        )
        for x in values.split(32, dim=1)
    ]
    return torch.cat(parts, -1)[:, 0].double().cpu()


def flat_entmax(logits, counts, normalizer):
    return entmax(logits.float().double(), counts.double(), torch.tensor(normalizer.alpha, dtype=torch.float64))


HARD = {
    "equal": torch.zeros(7),
    "alone": torch.tensor([3.0]),
    "far apart": torch.tensor([-1e4, 1e4, 0.0]),
    "large": 1e4 + torch.arange(11) / 16,
    "halves": 2.0 ** -torch.arange(40),
    "a line": -torch.arange(128) / 64,
    "at the threshold": torch.tensor([0.0, -1.0, -1.0, -2.0]),  # for α = 2 the others get exactly 0
}


@pytest.mark.parametrize("normalizer", [*BOTH, Entmax(1.2), Entmax(1.9)], ids=str)
@pytest.mark.parametrize("values", HARD.values(), ids=HARD)
def test_hard_thresholds(values, normalizer):
    weights = rows_of(values, torch.eye(len(values)), Hierarchy.flat([len(values)]), normalizer)
    expected = flat_entmax(values, torch.ones(len(values)), normalizer)
    torch.testing.assert_close(weights, expected.expand_as(weights), atol=2e-6, rtol=0)
    order = normalizer.alpha - 1
    threshold = order * values.max().double() - expected.max() ** order
    assert (weights[:, order * values < threshold - 1e-5] == 0).all()  # exactly
    torch.testing.assert_close(weights.sum(-1), torch.ones(len(values), dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("normalizer", "spread"), [(Entmax(1.5), 0.05), (Entmax(2.0), 0.002)], ids=str)
def test_equal_keys_in_large_blocks_give_flat_entmax(normalizer, spread):
    """Errors of logits are multiplied by the number of leaves of a block."""
    count = torch.tensor([100, 100, 1, 50, 120, 90, 110, 3, 100])
    logits = 1 + spread * draw(0, len(count))
    keys, which = (torch.repeat_interleave(x, count, dim=0) for x in (logits, torch.eye(len(count))))
    weights = rows_of(keys, which, Hierarchy.from_nested([count.tolist()]), normalizer)
    expected = flat_entmax(logits, count, normalizer)
    assert 3 <= int((expected > 0).sum()) < len(count)
    torch.testing.assert_close(weights, expected.expand_as(weights), atol=2e-4, rtol=0)


def test_nan_does_not_loop_forever():
    q = torch.full((5, 1, 4), torch.nan, device=DEVICE)
    out = hierarchical_attention(q, q, q, Hierarchy.flat([5]).to(DEVICE), normalizer=Entmax(1.5), backend="triton")
    assert torch.isnan(out).all()


@pytest.mark.parametrize("normalizer", [Entmax(1.5), LEARNED[0]], ids=str)
def test_outputs_and_gradients_are_deterministic(normalizer):
    tree = Hierarchy.from_nested([[20, 7, 3], [5]]).to(DEVICE)
    tensors, d_out = [draw(i, tree.num_leaves, 1, 4) for i in range(3)], draw(3, tree.num_leaves, 1, 4)
    runs = [run(tree, tensors, d_out, torch.float32, "triton", normalizer=normalizer) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("power", [2, -1])
def test_custom_operators(power):
    tree = Hierarchy.from_nested([[2, 3]]).to(DEVICE)
    plan = tiles(tree)
    q, k, v, d_out = (draw(i, 5, 1, 4).float().to(DEVICE) for i in range(4))
    inside = inside_weights(tree, True, False, False)
    powers = torch.tensor([[2.5], [1.5]], device=DEVICE) if power < 0 else None
    common = (None, powers, plan.table, plan.layout, False, False, 0.5)
    entmax = inside, power, True
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(kernels.forward.traced, (*leaves, *common, True, *entmax))
    _, *kept = kernels.forward.traced(q, k, v, *common, True, *entmax)
    torch.library.opcheck(kernels.backward.traced, (d_out, q, k, v, *common, kept, *entmax))


@pytest.mark.parametrize("alpha", [2.0, BY_LEVEL], ids=["number", "tensor"])
def test_compiles_without_graph_breaks(alpha):
    tree = Hierarchy.from_nested([[2, 3]]).to(DEVICE)
    inputs = [draw(i, 5, 1, 4).float().to(DEVICE).requires_grad_() for i in range(3)]
    if isinstance(alpha, torch.Tensor):
        inputs.append(alpha.to(DEVICE).clone().requires_grad_())

    def attend(q, k, v, alpha=alpha):
        entmax = Entmax(alpha, least=1.1)
        return hierarchical_attention(q * 2, k, v, tree, normalizer=entmax, backend="triton").sin()

    expected = attend(*inputs)
    out = torch.compile(attend, fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(out, expected)
    gradients = (torch.autograd.grad(x.sum(), inputs) for x in (out, expected))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("normalizer", "reason"),
    [(Entmax(1.01), "got 1.01"), (Entmax(torch.tensor([1.5], device=DEVICE)), r"got a tensor with least=1\.0")],
    ids=["1.01", "tensor"],
)
def test_unsupported_alpha(normalizer, reason):
    q, tree = draw(0, 5, 1, 4).float().to(DEVICE), Hierarchy.flat([5]).to(DEVICE)
    with pytest.raises(Unsupported, match=reason):
        hierarchical_attention(q, q, q, tree, normalizer=normalizer, backend="triton")
    assert hierarchical_attention(q, q, q, tree, normalizer=normalizer).shape == q.shape  # another backend runs it


def test_alpha_1_is_softmax():
    q, tree = draw(0, 9, 1, 4).float().to(DEVICE), Hierarchy.from_nested([[3, 6]]).to(DEVICE)
    options = {"hierarchy": tree, "backend": "triton"}
    assert torch.equal(
        hierarchical_attention(q, q, q, normalizer=Entmax(1.0), **options), hierarchical_attention(q, q, q, **options)
    )
