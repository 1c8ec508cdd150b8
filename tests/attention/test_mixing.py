"""Talking heads: both operators against their references and against the formulas of talking-heads attention."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa import Hierarchy, HsaError, hierarchical_attention, multiscale_attention, select
from hsa.attention.mixing import HeadMixing
from tests.forests import forests, gradients, random_inputs, random_positions, sights

seeds = st.integers(0, 10**6)
HEADS = 6  # heads of random_inputs


def random_mixing(seed, heads=HEADS, requires_grad=True):
    generator = torch.Generator().manual_seed(seed + 2)
    maps = torch.randn(2, heads, heads, generator=generator, dtype=torch.float64) / heads**0.5
    return HeadMixing(*(m.clone().requires_grad_(requires_grad) for m in maps))


def talking_heads(q, k, v, lengths, mixing, *, include_self=True, causal=False):
    """Compute Shazeer et al.'s U·softmax(P·logits), applied to the values, sequence by sequence."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out = []
    for a, b, c in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        logits = torch.einsum("ihd,jhd->hij", a, b) * q.shape[-1] ** -0.5
        logits = torch.einsum("gh,hij->gij", mixing.logits, logits)
        seen = torch.ones(len(a), len(a), dtype=torch.bool)
        seen = seen.tril() if causal else seen
        seen = seen if include_self else seen & ~torch.eye(len(a), dtype=torch.bool)
        weights = logits.masked_fill(~seen, -1e300).softmax(-1).masked_fill(~seen, 0)
        out.append(torch.einsum("gh,hij,jgd->igd", mixing.weights, weights, c))
    return torch.cat(out)


@given(forests(), seeds, sights, st.booleans())
def test_hierarchical_torch_equals_reference(forest, seed, sight, with_positions):
    q, k, v = random_inputs(forest, seed, requires_grad=True)
    positions = random_positions(forest, seed, requires_grad=True) if with_positions else None
    mixing = random_mixing(seed)
    options = {"positions": positions, **sight, "mixing": mixing}
    fast = hierarchical_attention(q, k, v, forest, backend="torch", **options)
    slow = hierarchical_attention(q, k, v, forest, backend="reference", **options)
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)
    inputs = [q, k, v, positions, mixing.logits, mixing.weights]
    for a, b in zip(gradients(fast, inputs), gradients(slow, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@settings(max_examples=30)
@given(forests(), seeds, st.booleans(), st.booleans(), st.integers(0, 1), st.booleans())
def test_multiscale_torch_equals_reference(forest, seed, causal, include_self, near, with_positions):
    q, k, v = random_inputs(forest, seed, requires_grad=True)
    positions = random_positions(forest, seed, requires_grad=True) if with_positions else None
    mixing = random_mixing(seed)
    selection = select(q, k, forest, near=near, causal=causal)
    bias = torch.linspace(-1, 1, HEADS, dtype=torch.float64, requires_grad=True)
    options = {
        "selection": selection,
        "causal": causal,
        "include_self": include_self,
        "mixing": mixing,
        "pooled_bias": bias,
    }
    fast = multiscale_attention(q, k, v, forest, backend="torch", positions=positions, **options)
    slow = multiscale_attention(q, k, v, forest, backend="reference", positions=positions, **options)
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)
    inputs = [q, k, v, positions, bias, mixing.logits, mixing.weights]
    for a, b in zip(gradients(fast, inputs), gradients(slow, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("forest", [Hierarchy.from_parents([-1]), Hierarchy.flat([1])], ids=["leaf", "family"])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_the_row_of_a_single_leaf_is_mixed(forest, backend):
    q, k, v = random_inputs(forest, 0)
    mixing = random_mixing(0, requires_grad=False)
    expected = talking_heads(q, k, v, [1], mixing)
    result = hierarchical_attention(q, k, v, forest, include_self=True, mixing=mixing, backend=backend)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(multiscale_attention(q, k, v, forest, mixing=mixing, backend=backend), expected)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), seeds, st.booleans())
def test_on_a_flat_tree_both_operators_are_talking_heads_attention(lengths, seed, include_self):
    forest, mixing = Hierarchy.flat(lengths), random_mixing(seed, requires_grad=False)
    q, k, v = random_inputs(forest, seed)
    expected = talking_heads(q, k, v, lengths, mixing, include_self=include_self)
    for backend in ("torch", "reference"):
        result = hierarchical_attention(q, k, v, forest, include_self=include_self, mixing=mixing, backend=backend)
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)
    result = multiscale_attention(q, k, v, forest, include_self=include_self, mixing=mixing)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)
    if include_self:
        result = multiscale_attention(q, k, v, forest, causal=True, mixing=mixing)
        expected = talking_heads(q, k, v, lengths, mixing, causal=True)
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)


@given(forests(), seeds, sights)
def test_two_identities_change_nothing(forest, seed, sight):
    q, k, v = random_inputs(forest, seed)
    plain = HeadMixing.identity(HEADS, torch.float64)
    torch.testing.assert_close(
        hierarchical_attention(q, k, v, forest, mixing=plain, **sight),
        hierarchical_attention(q, k, v, forest, **sight),
        rtol=1e-10,
        atol=1e-10,
    )
    torch.testing.assert_close(
        multiscale_attention(q, k, v, forest, mixing=plain),
        multiscale_attention(q, k, v, forest),
        rtol=1e-10,
        atol=1e-10,
    )


@given(forests(), seeds, st.booleans())
def test_rows_sum_to_one_if_the_rows_of_the_weight_mixing_do(forest, seed, include_self):
    q, k, v = random_inputs(forest, seed)
    mixing = random_mixing(seed, requires_grad=False)
    mixing = HeadMixing(mixing.logits, mixing.weights.softmax(-1))
    ones = torch.ones_like(v)
    total = hierarchical_attention(q, k, ones, forest, include_self=include_self, mixing=mixing)
    sees = torch.repeat_interleave(torch.tensor(forest.lengths), torch.tensor(forest.lengths)) > (not include_self)
    torch.testing.assert_close(total, sees.double()[:, None, None].expand_as(total), rtol=1e-10, atol=1e-10)


def test_causal_rows_do_not_depend_on_later_leaves():
    forest = Hierarchy.regular([13], (3, 2))
    q, k, v = random_inputs(forest, 5)
    mixing = random_mixing(5, requires_grad=False)
    for leaf in range(13):
        jacobians = torch.autograd.functional.jacobian(
            lambda *x, leaf=leaf: multiscale_attention(*x, forest, causal=True, mixing=mixing)[leaf].sum(), (q, k, v)
        )
        assert all((j[leaf + 1 :] == 0).all() and ((j[: leaf + 1] != 0).any() or leaf == 0) for j in jacobians)


def test_gradcheck():
    forest = Hierarchy.from_nested([[3, [1, 2]], 1])
    q, k, v = random_inputs(forest, 1, heads=2, kv_heads=2, requires_grad=True)
    mixing = random_mixing(1, heads=2)

    def run(q, k, v, logits, weights):
        mixed = HeadMixing(logits, weights)
        return hierarchical_attention(q, k, v, forest, include_self=True, mixing=mixed) + multiscale_attention(
            q, k, v, forest, mixing=mixed
        )

    assert torch.autograd.gradcheck(run, (q, k, v, mixing.logits, mixing.weights))


def test_trees_do_not_attend_to_each_other():
    a, b = Hierarchy.from_nested([[2, 3]]), Hierarchy.from_nested([[2, 3], [4, [1, 2]]])
    q, k, v = random_inputs(b, 3)
    mixing = random_mixing(3, requires_grad=False)
    for operator in (hierarchical_attention, multiscale_attention):
        alone = operator(q[:5], k[:5], v[:5], a, mixing=mixing)
        torch.testing.assert_close(alone, operator(q, k, v, b, mixing=mixing)[:5], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("operator", [hierarchical_attention, multiscale_attention])
@pytest.mark.parametrize(
    ("mixing", "message"),
    [
        (torch.eye(6), "HeadMixing"),
        (HeadMixing(torch.eye(6), torch.eye(5)), r"mixing.weights: expected .*, got \(5, 5\)"),
        (HeadMixing(torch.eye(6).long(), torch.eye(6)), "mixing.logits"),
        (HeadMixing(None, torch.eye(6)), "mixing.logits: expected .*, got NoneType"),
    ],
)
def test_invalid_mixing(operator, mixing, message):
    forest = Hierarchy.flat([4])
    q, k, v = random_inputs(forest, 0)
    with pytest.raises(HsaError, match=message):
        operator(q, k, v, forest, mixing=mixing)


def test_heads_with_different_lists_cannot_be_mixed():
    forest = Hierarchy.regular([32], (4, 2))
    q, k, v = random_inputs(forest, 0)
    selection = select(q, k, forest, top_k=1)
    with pytest.raises(HsaError, match="Leave out top_k and clusters"):
        multiscale_attention(q, k, v, forest, selection=selection, mixing=random_mixing(0))


def test_mixing_needs_exact_family_attention():
    forest = Hierarchy.flat([4])
    q, k, v = random_inputs(forest, 0)
    with pytest.raises(HsaError, match="torch: mixing needs family_attention='exact'"):
        hierarchical_attention(q, k, v, forest, mixing=random_mixing(0), family_attention="linear", backend="torch")
