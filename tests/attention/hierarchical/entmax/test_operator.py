"""Hierarchical entmax: both backends against each other, flat entmax, softmax, and the gradient of the energy."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hsa
from hsa import Entmax, HeadMixing, Hierarchy, HsaError, dense_weights, energy, hierarchical_attention
from hsa.attention.entmax import entmax
from hsa.attention.hierarchical.entmax.inside import keys_inside
from hsa.attention.hierarchical.entmax.zeros import zeros
from tests.forests import forests, gradients, random_inputs, random_positions, sights

few = settings(max_examples=30)
HEADS = 6  # heads of random_inputs
seeds = st.integers(0, 10**6)
numbers = st.sampled_from([1.1, 1.5, 1.8, 2.0])
counted = st.sampled_from(["weighted", "logits"])


@st.composite
def alphas(draw, requires_grad=False):
    """Draw a number, or a tensor of any allowed shape."""
    shape = draw(st.sampled_from([None, (HEADS,), (1,), (2, HEADS), (3, 1)]))
    if shape is None:
        return draw(numbers)
    generator = torch.Generator().manual_seed(draw(seeds))
    alpha = 1.05 + 0.9 * torch.rand(shape, generator=generator, dtype=torch.float64)
    return alpha.requires_grad_(requires_grad)


def flat_weights(q, k, forest, alpha, include_self):
    """Return the matrix of entmax attention within every tree, [heads, leaves, leaves]; rows without a key are 0."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    tree = torch.repeat_interleave(torch.arange(forest.num_trees), torch.tensor(forest.lengths))
    allowed = tree[:, None] == tree
    if not include_self:
        allowed = allowed & ~torch.eye(len(q), dtype=torch.bool)
    return entmax(
        logits.masked_fill(~allowed, -math.inf), torch.ones(len(q)).double(), torch.tensor(alpha, dtype=torch.float64)
    )


@few
@given(forests(), seeds, sights, alphas(requires_grad=True), counted, st.booleans())
def test_torch_equals_reference(forest, seed, sight, alpha, counts, with_positions):
    q, k, v = random_inputs(forest, seed, requires_grad=True)
    positions = random_positions(forest, seed, requires_grad=True) if with_positions else None
    options = {"positions": positions, "normalizer": Entmax(alpha, counts), **sight}
    fast = hierarchical_attention(q, k, v, forest, backend="torch", **options)
    slow = hierarchical_attention(q, k, v, forest, backend="reference", **options)
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)
    inputs = [q, k, v, positions, alpha if isinstance(alpha, torch.Tensor) else None]
    for a, b in zip(gradients(fast, inputs), gradients(slow, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


@few
@given(forests(), seeds, sights, alphas(requires_grad=True), counted)
def test_energy_of_torch_equals_reference(forest, seed, sight, alpha, counts):
    q, k, _ = random_inputs(forest, seed, requires_grad=True)
    options = {"normalizer": Entmax(alpha, counts), **sight}
    fast, slow = (energy(q, k, forest, backend=backend, **options) for backend in ("torch", "reference"))
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)
    inputs = [q, k, alpha if isinstance(alpha, torch.Tensor) else None]
    finite = torch.isfinite(slow).all(1)
    for a, b in zip(gradients(fast[finite], inputs), gradients(slow[finite], inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


@few
@given(forests(), seeds, sights, alphas(), counted)
def test_the_gradient_of_the_energy_is_the_operator(forest, seed, sight, alpha, counts):
    q, k, _ = random_inputs(forest, seed, kv_heads=HEADS)
    q = q.requires_grad_()
    options = {"normalizer": Entmax(alpha, counts), **sight}
    energies = energy(q, k, forest, **options)
    (slope,) = gradients_of_sum(energies, q)
    weights = dense_weights(hierarchical_attention, q.detach(), k, forest, **options)
    leaves = torch.repeat_interleave(torch.tensor(forest.lengths), torch.tensor(forest.lengths))[:, None, None].double()
    expected = torch.einsum("hij,jhd->ihd", weights, k)
    torch.testing.assert_close(-leaves * q.shape[-1] ** 0.5 * slope, expected, rtol=1e-8, atol=1e-8)


def gradients_of_sum(energies, q):
    finite = energies[torch.isfinite(energies)].sum()
    return torch.autograd.grad(finite, q) if finite.requires_grad else (torch.zeros_like(q),)


@few
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), seeds, numbers, counted, st.booleans())
def test_one_family_is_flat_entmax(lengths, seed, alpha, counts, include_self):
    forest = Hierarchy.flat(lengths)
    q, k, _ = random_inputs(forest, seed)
    expected = flat_weights(q, k, forest, alpha, include_self)
    for backend in ("torch", "reference"):
        options = {"normalizer": Entmax(alpha, counts), "include_self": include_self, "backend": backend}
        weights = dense_weights(hierarchical_attention, q, k, forest, **options)
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-9)


@st.composite
def block_trees(draw):
    """Draw a tree of blocks of 1 to 4 leaves below one root, and return it with the block of every leaf."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    block = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return Hierarchy.from_parents(one_level(sizes)), block


def one_level(sizes):
    return [-1] + [0] * len(sizes) + [block + 1 for block, size in enumerate(sizes) for _ in range(size)]


@given(block_trees(), seeds, numbers, st.booleans())
def test_equal_queries_and_keys_within_blocks_give_flat_entmax(blocks, seed, alpha, include_self):
    forest, block = blocks
    q, k, _ = random_inputs(forest, seed)
    q, k = (torch.stack([x[block == b].mean(0) for b in block]) for x in (q, k))
    options = {"normalizer": Entmax(alpha), "include_self": include_self}
    weights = dense_weights(hierarchical_attention, q, k, forest, **options)
    torch.testing.assert_close(weights, flat_weights(q, k, forest, alpha, include_self), rtol=1e-8, atol=1e-8)


@given(forests(), seeds, st.booleans(), alphas())
def test_logits_of_0_give_every_key_the_same_weight(forest, seed, include_self, alpha):
    """This holds on any tree and with a different α on each level."""
    q, k, _ = random_inputs(forest, seed)
    q = torch.zeros_like(q)
    weights = dense_weights(hierarchical_attention, q, k, forest, normalizer=Entmax(alpha), include_self=include_self)
    torch.testing.assert_close(weights, flat_weights(q, k, forest, 1.5, include_self), rtol=1e-9, atol=1e-9)


def test_counts_in_the_logits_give_unequal_weights_to_equal_keys():
    forest, alpha = Hierarchy.from_nested([[1, 5]]), 1.5
    q, k, _ = random_inputs(forest, 0)
    q = torch.zeros_like(q)
    weights = dense_weights(hierarchical_attention, q, k, forest, normalizer=Entmax(alpha, "logits"), include_self=True)
    assert (weights - flat_weights(q, k, forest, alpha, True)).abs().max() > 0.05


@few
@given(forests(), seeds, sights, counted)
def test_the_limit_for_alpha_1_is_softmax(forest, seed, sight, counts):
    q, k, v = random_inputs(forest, seed)
    soft = hierarchical_attention(q, k, v, forest, **sight)
    near = hierarchical_attention(q, k, v, forest, normalizer=Entmax(1 + 1e-5, counts), **sight)
    assert (near - soft).abs().max() <= 1e-4 * max(1.0, float(v.abs().max())) * sensitivity(q, k)
    exactly = hierarchical_attention(q, k, v, forest, normalizer=Entmax(1.0, counts), **sight)
    assert torch.equal(exactly, soft)
    whole = energy(q, k, forest, **sight)
    near = energy(q, k, forest, normalizer=Entmax(1 + 1e-5, counts), **sight)
    finite = torch.isfinite(whole)
    assert torch.equal(near == math.inf, ~finite)
    torch.testing.assert_close(near[finite], whole[finite], rtol=1e-4, atol=1e-4 * sensitivity(q, k))


def sensitivity(q, k):
    """Return a bound of derivatives by α, which grow with the square of the logits."""
    return 1 + float(q.norm(dim=-1).max() * k.norm(dim=-1).max()) ** 2 / q.shape[-1]


@few
@given(forests(), seeds, sights, alphas(), counted)
def test_rows_sum_to_one(forest, seed, sight, alpha, counts):
    q, k, v = random_inputs(forest, seed)
    total = hierarchical_attention(q, k, torch.ones_like(v), forest, normalizer=Entmax(alpha, counts), **sight)
    sees = torch.repeat_interleave(torch.tensor(forest.lengths), torch.tensor(forest.lengths)) > (
        not sight["include_self"]
    )
    torch.testing.assert_close(total, sees.double()[:, None, None].expand_as(total), rtol=1e-9, atol=1e-9)


@few
@given(forests(), seeds, sights, alphas(), counted, st.booleans())
def test_values_do_not_depend_on_whether_a_gradient_is_needed(forest, seed, sight, alpha, counts, with_positions):
    q, k, v = random_inputs(forest, seed)
    q = 5 * q
    positions = random_positions(forest, seed) if with_positions else None
    options = {"positions": positions, "normalizer": Entmax(alpha, counts), "backend": "torch", **sight}
    with torch.no_grad():
        without = hierarchical_attention(q, k, v, forest, **options)
    assert torch.equal(hierarchical_attention(q, k, v.requires_grad_(), forest, **options), without)


@pytest.mark.parametrize(
    ("sight", "counts"), [({"include_self": False}, "logits"), ({"causal": "paper-mask"}, "weighted")]
)
def test_gradcheck(sight, counts):
    forest = Hierarchy.from_nested([[3, [1, 2]], [2]])
    q, k, v = random_inputs(forest, 4, heads=2, kv_heads=1, requires_grad=True)
    positions = random_positions(forest, 4, heads=2, requires_grad=True)
    alpha = torch.tensor([[1.3, 1.7], [1.2, 1.9]], dtype=torch.float64, requires_grad=True)

    def run(q, k, v, positions, alpha):
        options = {"positions": positions, "normalizer": Entmax(alpha, counts), **sight}
        return hierarchical_attention(q, k, v, forest, **options), energy(q, k, forest, **options)

    assert torch.autograd.gradcheck(run, (q, k, v, positions, alpha), fast_mode=True)


def test_the_gradient_of_alpha_near_softmax_in_float32():
    forest = Hierarchy.from_nested([[3, 2], 4])
    inputs = random_inputs(forest, 2)
    slopes = []
    for dtype in (torch.float64, torch.float32):
        alpha = torch.full((HEADS,), 1 + 1e-3, dtype=dtype, requires_grad=True)
        out = hierarchical_attention(*(x.to(dtype) for x in inputs), forest, normalizer=Entmax(alpha))
        slopes.append(gradients(out.double(), [alpha])[0].double())
    torch.testing.assert_close(slopes[1], slopes[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_gradient", [False, True])
def test_lower_precision(dtype, with_gradient):
    forest = Hierarchy.from_nested([[3, [2, 5]], 1, [[7]]])
    q, k, v = random_inputs(forest, 3)
    expected = hierarchical_attention(q, k, v, forest, normalizer=Entmax(), include_self=True)
    out = hierarchical_attention(
        *(x.to(dtype).requires_grad_(with_gradient) for x in (q, k, v)), forest, normalizer=Entmax(), include_self=True
    )
    tolerance = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 1e-1}[dtype]
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def test_trees_do_not_attend_to_each_other():
    a, b = Hierarchy.from_nested([[2, 3]]), Hierarchy.from_nested([[2, 3], [4, [1, 2]]])
    q, k, v = random_inputs(b, 3)
    alone = hierarchical_attention(q[:5], k[:5], v[:5], a, normalizer=Entmax())
    torch.testing.assert_close(hierarchical_attention(q, k, v, b, normalizer=Entmax())[:5], alone)


def test_an_empty_forest():
    forest = Hierarchy.flat([])
    q, k, v = random_inputs(forest, 0)
    assert hierarchical_attention(q, k, v, forest, normalizer=Entmax()).shape == v.repeat(1, 3, 1).shape
    assert energy(q, k, forest, normalizer=Entmax()).shape == (0, HEADS)
    assert zeros(q, k, forest, normalizer=Entmax()).visited_fraction == 1


@given(forests())
def test_keys_inside_are_those_that_leaves_see(forest):
    """The causal mask gives exp of the softmax operator's `inner` for logits of 0, a geometric mean."""
    s = forest.structure
    assert (keys_inside(forest, True, False) == s.leaf_count).all()
    assert (keys_inside(forest, False, False) == s.leaf_count - 1).all()
    q = torch.zeros(forest.num_leaves, 1, 1, dtype=torch.float64)
    roots = keys_inside(forest, True, True)[: forest.num_trees]
    expected = (-energy(q, q, forest, causal="paper-mask")).exp()[:, 0]
    torch.testing.assert_close(torch.as_tensor(roots), expected, rtol=1e-10, atol=1e-10)


def objective(weights, logits, alpha):
    """Return Σ p z + H_α(p) over all rows, which entmax of every row maximises."""
    return (weights * logits + (weights - weights**alpha) / (alpha * (alpha - 1))).sum()


def tied(mass, inside, block):
    """Return a tied matrix.

    Args:
        mass: Logits of the weights that the rows of a block give to each block, [blocks, blocks].
        inside: Logits of the keys in a row's own block, [leaves, leaves].
        block: Block of every leaf.
    """
    same = block[:, None] == block
    mass = mass.softmax(-1)
    own = inside.masked_fill(~same, -math.inf).softmax(-1) * mass.diagonal()[block][:, None]
    return torch.where(same, own, (mass / torch.bincount(block))[block][:, block])


def best_tied_matrix(logits, block, alpha):
    """Return a tied matrix that is a local maximum of the objective."""
    start = [torch.zeros(int(block.max()) + 1, int(block.max()) + 1), torch.zeros(len(block), len(block))]
    parameters = [x.double().requires_grad_() for x in start]
    optimiser = torch.optim.LBFGS(parameters, max_iter=200, tolerance_change=1e-14, line_search_fn="strong_wolfe")

    def step():
        optimiser.zero_grad()
        loss = -objective(tied(*parameters, block), logits, alpha)
        loss.backward()
        return loss

    optimiser.step(step)
    return tied(*parameters, block).detach()


@pytest.mark.parametrize(("alpha", "least", "most"), [(1 + 1e-4, -1e-6, 1e-6), (1.5, 0.005, 0.02), (2.0, 0.02, 0.06)])
def test_another_tied_matrix_is_slightly_closer_to_flat_entmax_than_the_operator(alpha, least, most):
    """The counter-example of the README; for softmax there is none."""
    forest, block = Hierarchy.from_nested([[2, 2]]), torch.tensor([0, 0, 1, 1])
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn(2, 4, 1, 2, generator=generator, dtype=torch.float64).unbind(0)
    logits = torch.einsum("ihd,jhd->hij", q, k)[0]
    options = {"normalizer": Entmax(alpha), "include_self": True, "scale": 1.0}
    operator = objective(dense_weights(hierarchical_attention, q, k, forest, **options)[0], logits, alpha)
    best = objective(best_tied_matrix(logits, block, alpha), logits, alpha)
    flat = entmax(logits, torch.ones(4).double(), torch.tensor(alpha, dtype=torch.float64))
    assert best < objective(flat, logits, alpha)
    assert least < best - operator < most


@few
@given(seeds, numbers, st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_the_best_tied_row_is_weighted_entmax_of_mean_logits(seed, alpha, sizes):
    """No other row that is constant on blocks has a larger objective."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    logits = torch.randn(len(block), generator=generator, dtype=torch.float64)
    counts = torch.tensor(sizes, dtype=torch.float64)
    mean = torch.zeros_like(counts).index_add(0, block, logits) / counts
    best = entmax(mean, counts, torch.tensor(alpha, dtype=torch.float64))
    other = torch.rand(200, len(sizes), generator=generator, dtype=torch.float64)
    other = torch.lerp(best, other / other.sum(-1, keepdim=True), torch.rand(200, 1, generator=generator).double() ** 4)
    most = objective((best / counts)[block], logits, alpha)
    assert all(objective((row / counts)[block], logits, alpha) <= most + 1e-12 for row in other)


@pytest.mark.parametrize("alpha", [1.2, torch.tensor([[1.5], [1.2]])], ids=["number", "tensor"])
def test_the_lower_bound_of_alpha(alpha):
    assert Entmax(alpha, least=1.1).lowest == (1.1 if isinstance(alpha, torch.Tensor) else 1.2)
    message = r"^Entmax.alpha: expected a number from 1\.4 \(least\) to 2 \(sparsemax\), got 1\.2\d*\. Keep"
    with pytest.raises(HsaError, match=message):
        Entmax(alpha, least=1.4)
    for least in (0.9, 2.1, float("nan")):
        with pytest.raises(HsaError, match=rf"^Entmax.least: expected a number from 1 to 2, got {least}$"):
            Entmax(alpha, least=least)


def test_the_lower_bound_tolerates_rounding():
    Entmax(torch.tensor([1.3]).double(), least=1.3)  # slightly below 1.3, which float32 cannot represent


@pytest.mark.parametrize(
    "alpha", [0.5, 0.999, 2.01, math.nan, math.inf, -1, torch.tensor([1.5, 2.5]), torch.tensor([math.nan])]
)
def test_alpha_out_of_range(alpha):
    with pytest.raises(HsaError, match=r"Entmax.alpha: expected a number from 1 \(softmax\) to 2 \(sparsemax\), got"):
        Entmax(alpha)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Entmax("1.5"), "a number or a tensor"),
        (lambda: Entmax(True), "a number or a tensor"),
        (lambda: Entmax(torch.tensor([2])), "torch.int64"),
        (lambda: Entmax(torch.full((2, 3, 4), 1.5)), r"\(2, 3, 4\)"),
        (lambda: Entmax(torch.zeros(0)), r"\(0,\)"),
        (lambda: Entmax(1.5, counts="x"), "Entmax.counts: expected .*, got 'x'"),
    ],
)
def test_invalid_entmax(make, message):
    with pytest.raises(HsaError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalizer": "sparsemax"}, "normalizer: expected 'softmax' or an hsa.Entmax, got 'sparsemax'"),
        ({"normalizer": Entmax(torch.full((5,), 1.5))}, r"normalizer.alpha: expected .* 6 heads, got shape \(5,\)"),
        ({"normalizer": Entmax(), "family_attention": "linear"}, "entmax needs family_attention='exact'"),
        ({"normalizer": Entmax(), "mixing": HeadMixing.identity(6)}, "mixing needs softmax"),
        ({"normalizer": Entmax(), "causal": "paper-mask", "include_self": False}, "include_self=True"),
    ],
)
def test_invalid_combinations(options, message):
    forest = Hierarchy.flat([4])
    with pytest.raises(HsaError, match=message):
        hierarchical_attention(*random_inputs(forest, 0), forest, **options)


def test_checking_names_values_that_are_not_finite():
    forest = Hierarchy.flat([4])
    q, k, v = random_inputs(forest, 0)
    k[2, 1, 0] = math.nan
    with hsa.checking(), pytest.raises(HsaError, match="k: leaf 2"):
        hierarchical_attention(q, k, v, forest, normalizer=Entmax())
    q, k, v = random_inputs(forest, 0)
    q[0], k[1] = 1e200, 1e200  # finite, but their product is not
    with hsa.checking(), pytest.raises(HsaError, match="logit"):
        hierarchical_attention(q, k, v, forest, normalizer=Entmax())
