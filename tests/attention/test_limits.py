"""Right results, without a crash and without much memory, for huge counts, deep nesting and empty forests."""

import numpy as np
import pytest
import torch

import hsa
from hsa.errors import InvalidInput

TREE = hsa.Hierarchy.regular([64], (4, 4))


def inputs(rows=64, **options):
    torch.manual_seed(5)
    return torch.randn(3, rows, 2, 8, **options).unbind(0)


@pytest.mark.parametrize(
    "options",
    [{"top_k": 10**7}, {"top_k": 10**7, "causal": True}, {"near": 2**70}, {"top_k": 2, "beam": 10**9}],
    ids=str,
)
def test_counts_beyond_the_tree_mean_all_of_it(options):
    q, k, v = inputs()
    selection = hsa.select(q, k, TREE, **options)
    assert selection.families.shape[-1] <= 2 * 16 + 1  # padded, but not to the count that was passed
    enough = {name: min(value, 16) for name, value in options.items()}
    expected = hsa.multiscale_attention(q, k, v, TREE, **enough)
    torch.testing.assert_close(
        hsa.multiscale_attention(q, k, v, TREE, selection=selection, causal="causal" in options), expected
    )


@pytest.mark.parametrize("branching", [(10**30,), (4, 10**30), (2**40, 2**40)], ids=str)
def test_huge_families(branching):
    capped = [min(b, 64) for b in branching]
    assert hsa.Hierarchy.regular([64, 3], branching).digest == hsa.Hierarchy.regular([64, 3], capped).digest
    x = inputs()[0].transpose(0, 1)[None]
    options = {"tile": 10**30, "sinks": 10**30}
    out = hsa.scaled_dot_product_attention(x, x, x, branching=branching, **options)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(x, x, x))


def test_too_many_leaves_are_refused():
    for build in (
        lambda: hsa.Hierarchy.flat([2**62]),
        lambda: hsa.Hierarchy.regular([2**31], (4,)),
        lambda: hsa.Hierarchy.from_nested([[3, 10**30]]),
    ):
        with pytest.raises(InvalidInput, match=r"expected at most 2,147,483,647 in all trees together"):
            build()


def test_deep_nesting():
    def nest(entry):
        for _ in range(5000):
            entry = [entry, 1]
        return [entry]

    tree = hsa.Hierarchy.from_nested(nest(3))
    assert (tree.num_leaves, int(tree.structure.depth.max())) == (5003, 5001)
    with pytest.raises(InvalidInput, match=r"nested\[0\](\[0\]){5000}: expected a positive integer, got 'x'"):
        hsa.Hierarchy.from_nested(nest("x"))


@pytest.mark.parametrize("parent", [torch.tensor([2**64 - 1, 0], dtype=torch.uint64), np.array([2**63, 0], np.uint64)])
def test_unsigned_parents_do_not_wrap_around(parent):
    with pytest.raises(InvalidInput, match="parent: expected integers of 64 bits with a sign, got"):
        hsa.Hierarchy.from_parents(parent)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("operator", [hsa.hierarchical_attention, hsa.multiscale_attention])
def test_an_empty_forest_has_gradients(operator, backend):
    x = inputs(0)[0].requires_grad_()
    out = operator(x, x, x, hsa.Hierarchy.flat([]), backend=backend)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad.shape == x.shape


def test_the_energy_of_an_empty_forest_has_gradients():
    x = inputs(0)[0].requires_grad_()
    (grad,) = torch.autograd.grad(hsa.energy(x, x, hsa.Hierarchy.flat([])).sum(), x)
    assert grad.shape == x.shape
