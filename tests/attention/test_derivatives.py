"""Second derivatives are right or refused; transforms of torch.func and forward-mode differentiation are refused."""

import pytest
import torch
from torch.autograd import forward_ad

import hsa
from hsa.errors import Unsupported
from hsa.nn.token_loss import mean_token_loss
from hsa.research import trilinear_attention

TREE = hsa.Hierarchy.from_nested([[3, 2], [4]])
ENTMAX = hsa.Entmax(1.5)


def sdpa(q, k, v):
    return hsa.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), kind="multiscale")


FIRST_ORDER = {
    "multiscale": lambda q, k, v: hsa.multiscale_attention(q, k, v, TREE, top_k=1),
    "hierarchical": lambda q, k, v: hsa.hierarchical_attention(q, k, v, TREE),
    "hierarchical entmax": lambda q, k, v: hsa.hierarchical_attention(q, k, v, TREE, normalizer=ENTMAX),
    "three-way": lambda q, k, v: trilinear_attention(q, k, k, v, v, TREE, backend="streaming"),
    "sdpa": sdpa,
}
ANY_ORDER = {
    "multiscale": lambda q, k, v: hsa.multiscale_attention(q, k, v, TREE, top_k=1, backend="reference"),
    "multiscale entmax": lambda q, k, v: hsa.multiscale_attention(q, k, v, TREE, normalizer=ENTMAX),
    "hierarchical": lambda q, k, v: hsa.hierarchical_attention(q, k, v, TREE, backend="reference"),
    "hierarchical entmax": lambda q, k, v: hsa.hierarchical_attention(
        q, k, v, TREE, normalizer=ENTMAX, backend="reference"
    ),
    "three-way": lambda q, k, v: trilinear_attention(q, k, k, v, v, TREE, backend="dense"),
}


def inputs():
    torch.manual_seed(3)
    return [torch.randn(9, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("name", FIRST_ORDER)
def test_second_derivatives_are_refused(name):
    """The incoming gradient of a sum is a constant, for which PyTorch alone would return a constant without a word."""
    q, k, v = inputs()
    with pytest.raises(Unsupported, match=r'first derivatives only.*backend="reference"'):
        torch.autograd.grad(FIRST_ORDER[name](q, k, v).sum(), q, create_graph=True)
    (grad,) = torch.autograd.grad(FIRST_ORDER[name](q, k, v).sum(), q)
    assert grad.isfinite().all()


@pytest.mark.parametrize("name", ANY_ORDER)
def test_second_derivatives(name):
    q, k, v = inputs()
    assert torch.autograd.gradgradcheck(ANY_ORDER[name], (q, k, v))


def test_second_derivatives_of_the_loss_of_tokens_are_refused():
    torch.manual_seed(4)
    hidden, weight = torch.randn(5, 3, requires_grad=True), torch.randn(7, 3)
    with pytest.raises(Unsupported, match="first derivatives only"):
        torch.autograd.grad(mean_token_loss(hidden, weight, torch.arange(5)), hidden, create_graph=True)


@pytest.mark.parametrize("name", FIRST_ORDER)
def test_transforms_are_refused(name):
    q, k, v = (x.detach() for x in inputs())
    attend = FIRST_ORDER[name]
    transforms = (
        lambda: torch.func.vmap(lambda v: attend(q, k, v))(torch.stack([v, v])),
        lambda: torch.func.grad(lambda q: attend(q, k, v).sum())(q),
        lambda: torch.func.jvp(lambda k: attend(q, k, v), (k,), (k,)),
    )
    for transform in transforms:
        with pytest.raises(Unsupported, match=r"outside torch.func transforms"):
            transform()
    with forward_ad.dual_level():
        assert attend(q, k, v).isfinite().all()  # no tangents
        with pytest.raises(Unsupported, match="without a tangent"):
            attend(q, forward_ad.make_dual(k, k), v)
