"""Kernels of HeadNorm, compared with PyTorch's layer norm in float64."""

import pytest

pytest.importorskip("triton")

import torch
import torch.nn.functional as F

from hsa.nn.head_norm import HeadNorm
from hsa.nn.triton import head_norm as kernels
from hsa.nn.triton.head_norm import head_norm
from tests.interpreter import DEVICE, quick_interpreter  # noqa: F401

EPSILON = 1e-5


def compare(x, dim, tolerance):
    torch.manual_seed(1)
    weight, bias = (torch.randn(dim, device=DEVICE) for _ in range(2))
    d_out = torch.randn(x.shape, device=DEVICE).to(x.dtype)
    leaves = [part.detach().requires_grad_() for part in (x, weight, bias)]
    out = head_norm(*leaves, EPSILON)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = F.layer_norm(exact[0], (dim,), exact[1], exact[2], EPSILON)
    assert out.dtype == x.dtype
    result = [out, *torch.autograd.grad(out, leaves, d_out)]
    wanted = [expected, *torch.autograd.grad(expected, exact, d_out.double())]
    for one, other in zip(result, wanted, strict=True):
        torch.testing.assert_close(
            one.double(), other, rtol=0, atol=tolerance * max(1.0, float(other.detach().abs().max()))
        )


@pytest.mark.parametrize("dim", [1, 5, 16, 32, 100])
@pytest.mark.parametrize("leaves", [1, 3, 200])
def test_head_norm_is_layer_norm(dim, leaves, monkeypatch):
    monkeypatch.setattr(kernels, "PROGRAMS", 2)  # so that each program processes several blocks
    compare(torch.randn(leaves, 3, dim).add(0.5).to(DEVICE), dim, 2e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_half_precision(dtype, tolerance):
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter computes bfloat16 wrongly")
    compare(torch.randn(150, 2, 32).to(DEVICE, dtype), 32, tolerance)


def test_rows_with_strides():
    projected = torch.randn(40, 3 * 4 * 8, device=DEVICE)
    compare(projected.split(32, -1)[1].unflatten(-1, (4, 8)), 8, 2e-5)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, d_out):
        return None


def test_no_gradient_of_the_output():
    x = torch.randn(5, 2, 8, device=DEVICE, requires_grad=True)
    weight, bias = torch.ones(8, device=DEVICE, requires_grad=True), torch.zeros(8, device=DEVICE)
    out = head_norm(x, weight, bias, EPSILON)
    (NoGradient.apply(out) + x).sum().backward()
    assert weight.grad is None
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("dim", [5, 16])
def test_custom_operators(dim):
    x, d_out = torch.randn(2, 7, 2, dim, device=DEVICE).unbind(0)
    weight, bias = torch.randn(2, dim, device=DEVICE).unbind(0)
    leaves = [part.clone().requires_grad_() for part in (x, weight, bias)]
    torch.library.opcheck(kernels.operator.traced, (*leaves, EPSILON))
    torch.library.opcheck(kernels.gradient.traced, (x, weight, d_out, EPSILON))


def test_compiles_without_graph_breaks():
    x, weight, bias = inputs = [
        torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((7, 2, 8), (8,), (8,))
    ]

    def normed(x, weight, bias):
        return head_norm(x * 2, weight, bias, EPSILON).sin()

    expected = normed(x, weight, bias)
    out = torch.compile(normed, fullgraph=True, backend="aot_eager")(x, weight, bias)
    torch.testing.assert_close(out, expected)
    for a, b in zip(*(torch.autograd.grad(y.sum(), inputs) for y in (out, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_no_leaves():
    x = torch.empty(0, 2, 8, device=DEVICE, requires_grad=True)
    weight = torch.ones(8, device=DEVICE, requires_grad=True)
    out = head_norm(x, weight, torch.zeros(8, device=DEVICE), EPSILON)
    out.sum().backward()
    assert out.shape == x.shape
    assert weight.grad.tolist() == [0.0] * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_module_is_layer_norm_and_keeps_the_dtype(dtype):
    """Check both the kernel and PyTorch's implementation."""
    module = HeadNorm(24).to(DEVICE)
    torch.nn.init.normal_(module.weight)
    x = torch.randn(7, 2, 24, device=DEVICE).to(dtype)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16):
        out = (module if dtype != torch.float64 else module.double())(x)
    expected = F.layer_norm(x.double(), (24,), module.weight.double(), module.bias.double())
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=0.05 if dtype == torch.bfloat16 else 1e-5)
