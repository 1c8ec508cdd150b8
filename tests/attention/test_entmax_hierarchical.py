"""Hierarchical entmax: both backends against each other, flat entmax, softmax, and the energy they come from."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa import Entmax, Hierarchy, dense_weights, energy, hierarchical_attention
from hsa.attention.entmax import entmax
from tests.forests import forests, gradients, random_inputs, random_positions

HEADS = 6  # as random_inputs has
seeds = st.integers(0, 10**6)
selves = st.sampled_from([(False, False), (True, False), (True, True)])  # include_self, causal
numbers = st.sampled_from([1.1, 1.5, 1.8, 2.0])
counted = st.sampled_from(["weighted", "logits"])


def options_of(how):
    return {"include_self": how[0], "causal": how[1]}


@st.composite
def alphas(draw, requires_grad=False):
    """A number; or a tensor of any of the shapes."""
    shape = draw(st.sampled_from([None, (HEADS,), (1,), (2, HEADS), (3, 1)]))
    if shape is None:
        return draw(numbers)
    generator = torch.Generator().manual_seed(draw(seeds))
    alpha = 1.05 + 0.9 * torch.rand(shape, generator=generator, dtype=torch.float64)
    return alpha.requires_grad_(requires_grad)


def flat_weights(q, k, forest, alpha, include_self):
    """Entmax attention inside every tree, [heads, leaves, leaves]; rows without a key are 0."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    tree = torch.repeat_interleave(torch.arange(forest.num_trees), torch.tensor(forest.lengths))
    allowed = tree[:, None] == tree
    if not include_self:
        allowed = allowed & ~torch.eye(len(q), dtype=torch.bool)
    return entmax(
        logits.masked_fill(~allowed, -math.inf), torch.ones(len(q)).double(), torch.tensor(alpha, dtype=torch.float64)
    )


@given(forests(), seeds, selves, alphas(requires_grad=True), counted, st.booleans())
def test_torch_equals_reference(forest, seed, how, alpha, counts, with_positions):
    q, k, v = random_inputs(forest, seed, requires_grad=True)
    positions = random_positions(forest, seed, requires_grad=True) if with_positions else None
    options = {"positions": positions, "normalizer": Entmax(alpha, counts), **options_of(how)}
    fast = hierarchical_attention(q, k, v, forest, backend="torch", **options)
    slow = hierarchical_attention(q, k, v, forest, backend="reference", **options)
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)
    inputs = [q, k, v, positions, alpha if isinstance(alpha, torch.Tensor) else None]
    for a, b in zip(gradients(fast, inputs), gradients(slow, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


@given(forests(), seeds, selves, alphas(requires_grad=True), counted)
def test_energy_of_torch_equals_reference(forest, seed, how, alpha, counts):
    q, k, _ = random_inputs(forest, seed, requires_grad=True)
    options = {"normalizer": Entmax(alpha, counts), **options_of(how)}
    fast, slow = (energy(q, k, forest, backend=backend, **options) for backend in ("torch", "reference"))
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)
    inputs = [q, k, alpha if isinstance(alpha, torch.Tensor) else None]
    finite = torch.isfinite(slow).all(1)
    for a, b in zip(gradients(fast[finite], inputs), gradients(slow[finite], inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


@given(forests(), seeds, selves, alphas(), counted)
def test_the_gradient_of_the_energy_is_the_operator(forest, seed, how, alpha, counts):
    q, k, _ = random_inputs(forest, seed, kv_heads=HEADS)
    q = q.requires_grad_()
    options = {"normalizer": Entmax(alpha, counts), **options_of(how)}
    found = energy(q, k, forest, **options)
    (slope,) = gradients_of_sum(found, q)
    weights = dense_weights(hierarchical_attention, q.detach(), k, forest, **options)
    leaves = torch.repeat_interleave(torch.tensor(forest.lengths), torch.tensor(forest.lengths))[:, None, None].double()
    expected = torch.einsum("hij,jhd->ihd", weights, k)
    torch.testing.assert_close(-leaves * q.shape[-1] ** 0.5 * slope, expected, rtol=1e-8, atol=1e-8)


def gradients_of_sum(found, q):
    finite = found[torch.isfinite(found)].sum()
    return torch.autograd.grad(finite, q) if finite.requires_grad else (torch.zeros_like(q),)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), seeds, numbers, counted, st.booleans())
def test_one_family_is_flat_entmax(lengths, seed, alpha, counts, include_self):
    forest = Hierarchy.flat(lengths)
    q, k, _ = random_inputs(forest, seed)
    expected = flat_weights(q, k, forest, alpha, include_self)
    for backend in ("torch", "reference"):
        found = dense_weights(
            hierarchical_attention,
            q,
            k,
            forest,
            normalizer=Entmax(alpha, counts),
            include_self=include_self,
            backend=backend,
        )
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
