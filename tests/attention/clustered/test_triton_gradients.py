"""Gradients of the kernels of clustered attention against the torch backend, in the interpreter or on a GPU."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hsa
from hsa.attention.clustered.keys import build_keys
from hsa.attention.clustered.layout import Shape, layout_of
from tests.attention.clustered.test_triton_operator import CASES, inputs
from tests.interpreter import DEVICE, quick_interpreter  # noqa: F401

gradient = pytest.importorskip("hsa.attention.clustered.triton.gradient")
operator = pytest.importorskip("hsa.attention.clustered.triton.operator")

MEMORY = {"one slab": {}, "many slabs": {"PART_BYTES": 2**16, "LIST_BYTES": 2**12}, "select again": {"KEPT_BYTES": 0}}


def gradients(tensors, lengths, backend, bias, **options):
    """Return the output, its log-sum-exp, and the gradients of the tensors and of the bias."""
    leaves = [x.detach().requires_grad_() for x in (*tensors, bias)]
    q, k, v, bias = leaves
    if bias.isinf().any():  # it has no gradient
        bias, leaves = bias.detach(), leaves[:3]
    results = hsa.clustered_attention(q, k, v, lengths, pooled_bias=bias, backend=backend, return_lse=True, **options)
    generator = torch.Generator().manual_seed(7)
    along = [torch.randn(x.shape, generator=generator).to(x) for x in results]
    return [*(x.detach() for x in results), *torch.autograd.grad(results, leaves, along)]


def close(ours, wanted, tolerance=2e-5):
    for a, b in zip(ours, wanted, strict=True):
        assert (a.double() - b.double()).abs().max() <= tolerance * max(1.0, float(b.abs().max()))


def bias_of(options, heads):
    """Return the options without their bias, and the bias per head."""
    options = dict(options)
    return options, torch.full((heads,), float(options.pop("pooled_bias", 0.3)), device=DEVICE)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_gradients_agree_with_torch(case):
    lengths, queries, sizes, options = case
    tensors = inputs(lengths, queries, sizes)
    options, bias = bias_of(options, sizes[0])
    ours, wanted = (
        gradients(tensors, lengths, backend, bias, query_lengths=queries, **options) for backend in ("triton", "torch")
    )
    close(ours, wanted)


@pytest.mark.parametrize("memory", MEMORY.values(), ids=MEMORY.keys())
@pytest.mark.parametrize("name", ["shared", "others"])
def test_slabs_do_not_change_gradients(memory, name, monkeypatch):
    lengths, queries, sizes, options = CASES[name]
    tensors = inputs(lengths, queries, sizes)
    options, bias = bias_of(options, sizes[0])
    wanted = gradients(tensors, lengths, "torch", bias, query_lengths=queries, **options)
    for limit, value in memory.items():
        monkeypatch.setattr(operator if limit == "KEPT_BYTES" else gradient, limit, value)
    close(gradients(tensors, lengths, "triton", bias, query_lengths=queries, **options), wanted)


@settings(max_examples=6)
@given(st.integers(0, 2**32 - 1))
def test_random_batches(seed):
    dice = Random(seed)
    torch.manual_seed(seed)
    lengths = [dice.choice([1, dice.randint(2, 63), 64, 128, dice.randint(65, 190)]) for _ in range(dice.randint(1, 3))]
    lengths[dice.randrange(len(lengths))] = dice.randint(130, 190)
    causal, tile = dice.random() < 0.6, dice.choice([16, 32, 64])
    queries = [dice.choice([n, n % tile, 0]) if causal else dice.randint(0, 40) for n in lengths]
    sizes = dice.choice([(2, 2, 16, 16), (4, 2, 16, 32), (2, 1, 32, 16)])
    rule = dice.choice([{"threshold": dice.choice([0.3, 0.05, 0.01])}, {"top_k": dice.randrange(4)}])
    options = {"causal": causal, "tile": tile, "branching": (8, 8, dice.choice([1, 2])), **rule}
    options |= {"share_lists": dice.random() < 0.5, "windows": dice.random() < 0.3, "query_lengths": queries}
    tensors = inputs(lengths, queries, sizes)
    bias = torch.randn(sizes[0], device=DEVICE)
    ours, wanted = (gradients(tensors, lengths, backend, bias, **options) for backend in ("triton", "torch"))
    close(ours, wanted)


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_equal_finite_differences_with_the_selection_held(causal):
    """Move all inputs in random directions, in float64."""
    tensors = inputs([400], None, (2, 1, 16, 16))
    keys = hsa.cluster(*tensors[1:], [400])
    selection = hsa.select_groups(*tensors[:2], keys, [400], causal=causal, top_k=1, tile=16)
    assert 0.1 < (selection.first != 255).float().mean() < 0.9
    bias, options = torch.tensor([0.3, -0.4], device=DEVICE), {"causal": causal, "tile": 16, "selection": selection}
    _, _, *ours = gradients(tensors, [400], "triton", bias, **options)
    generator = torch.Generator().manual_seed(7)
    wide = [x.double() for x in (*tensors, bias)]

    def loss(step, directions):
        q, k, v, b = (x + step * d for x, d in zip(wide, directions, strict=True))
        results = hsa.clustered_attention(
            q, k, v, causal=causal, tile=16, selection=selection, pooled_bias=b, return_lse=True, backend="torch"
        )
        generator.manual_seed(7)
        return sum((x * torch.randn(x.shape, generator=generator).to(torch.float32).to(x)).sum() for x in results)

    for number in range(4):  # one input at a time
        directions = [torch.randn_like(x) if i == number else torch.zeros_like(x) for i, x in enumerate(wide)]
        difference = (loss(1e-5, directions) - loss(-1e-5, directions)) / 2e-5
        slope = sum((d * x.double()).sum() for d, x in zip(directions, ours, strict=True))
        assert abs(slope - difference) < 1e-4 * max(1, abs(difference))


@pytest.mark.parametrize("windows", [False, True])
def test_gradients_flow_through_keys_that_are_passed(windows):
    lengths = [300, 600]
    tensors = inputs(lengths, None, (2, 1, 16, 32))
    options = {"causal": True, "threshold": 0.02}
    found = []
    for passed in (True, False):
        q, k, v = (x.detach().requires_grad_() for x in tensors)
        keys = hsa.cluster(k, v, lengths, windows=windows) if passed else None
        out = hsa.clustered_attention(q, k, v, lengths, keys=keys, windows=windows, backend="triton", **options)
        found.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    close(*found)


def test_gradients_of_clustered_keys():
    """The kernel passes the gradients of all rows of a page down to its keys."""
    lengths = [300, 20, 512]
    _, k, v = (x.requires_grad_() for x in inputs(lengths, None, (1, 2, 16, 48)))
    layout = layout_of(lengths, shape=Shape.of(causal=False), causal=False)
    ours = gradient.build_keys_with_gradient(k, v, layout, windows=False)
    wanted = build_keys(k, v, layout, windows=False, order=ours.order)
    along = torch.randn_like(ours.k), torch.randn_like(ours.v)
    pairs = [torch.autograd.grad((x.k, x.v), (k, v), along, retain_graph=True) for x in (ours, wanted)]
    close(*pairs)
    d_k, d_v = torch.autograd.grad(ours.k, (k, v), along[0])
    close((d_k, d_v), (pairs[1][0], torch.zeros_like(v)))


def test_gradients_are_the_same_every_time():
    tensors, bias = inputs([700], None, (2, 1, 16, 16)), torch.zeros(2, device=DEVICE)
    options = {"causal": True, "threshold": 0.01}
    first = gradients(tensors, [700], "triton", bias, **options)
    torch.use_deterministic_algorithms(True)
    try:
        again = gradients(tensors, [700], "triton", bias, **options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_gradients_of_one_result_and_of_some_inputs():
    q, k, v = inputs([300], None, (2, 1, 16, 16))
    options = {"causal": True, "threshold": 0.05, "return_lse": True}
    for leaf, result in ((q, 0), (k, 1), (v, 0)):
        leaf.requires_grad_()
        found = [
            torch.autograd.grad(hsa.clustered_attention(q, k, v, backend=b, **options)[result].sum(), leaf)
            for b in ("triton", "torch")
        ]
        close(*found)
        leaf.requires_grad_(False)


def test_second_derivatives_are_refused():
    q, k, v = (x.requires_grad_() for x in inputs([300], None, (2, 1, 16, 16)))
    out = hsa.clustered_attention(q, k, v, backend="triton")
    with pytest.raises(hsa.HsaError, match="create_graph=True"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_wide_heads_are_refused():
    q, k, v = (x.requires_grad_() for x in inputs([300], None, (1, 1, 128, 128)))
    with pytest.raises(hsa.HsaError, match="at most 512 bytes together, not 1024"):
        hsa.clustered_attention(q, k, v, backend="triton")
    hsa.clustered_attention(q, k, v).sum().backward()  # another backend runs it
    assert k.grad.abs().sum() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
def test_half_precision(dtype, dim):
    """Compare with float64 and the same selection and order of keys."""
    lengths, sizes = [1500, 700], (4, 2, dim, dim)
    tensors = inputs(lengths, None, sizes, dtype)
    keys = hsa.cluster(*tensors[1:], lengths)
    selection = hsa.select_groups(*tensors[:2], keys, lengths, causal=True, threshold=1 / 128)
    bias, options = torch.zeros(4, device=DEVICE), {"causal": True, "selection": selection}
    ours = gradients(tensors, lengths, "triton", bias, **options)
    wanted = gradients([x.double() for x in tensors], lengths, "torch", bias.double(), **options)
    close(ours, wanted, 3e-2 if dtype == torch.bfloat16 else 4e-3)


@pytest.mark.gpu
def test_gradients_in_a_cuda_graph():
    q, k, v = (x.requires_grad_() for x in inputs([1500], None, (4, 2, 64, 64), torch.bfloat16))
    static = [x.detach().clone().requires_grad_() for x in (q, k, v)]

    def step():
        out = hsa.clustered_attention(*static, causal=True, threshold=1 / 64)
        return torch.autograd.grad(out.square().sum(), static)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        for x, y in zip(static, inputs([1500], None, (4, 2, 64, 64), torch.bfloat16), strict=True):
            x.copy_(y)
    graph.replay()
    close(found, step(), 1e-3)
