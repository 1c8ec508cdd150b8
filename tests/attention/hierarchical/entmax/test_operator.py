"""Hierarchical entmax: both backends against each other, flat entmax, softmax, and the energy they come from."""

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
HEADS = 6  # as random_inputs has
seeds = st.integers(0, 10**6)
numbers = st.sampled_from([1.1, 1.5, 1.8, 2.0])
counted = st.sampled_from(["weighted", "logits"])


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
    found = energy(q, k, forest, **options)
    (slope,) = gradients_of_sum(found, q)
    weights = dense_weights(hierarchical_attention, q.detach(), k, forest, **options)
    leaves = torch.repeat_interleave(torch.tensor(forest.lengths), torch.tensor(forest.lengths))[:, None, None].double()
    expected = torch.einsum("hij,jhd->ihd", weights, k)
    torch.testing.assert_close(-leaves * q.shape[-1] ** 0.5 * slope, expected, rtol=1e-8, atol=1e-8)


def gradients_of_sum(found, q):
    finite = found[torch.isfinite(found)].sum()
    return torch.autograd.grad(finite, q) if finite.requires_grad else (torch.zeros_like(q),)


@few
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


@st.composite
def tied_keys(draw):
    """Blocks of 1 to 4 leaves below one root, and keys that are the same inside every block."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    return Hierarchy.from_parents(one_level(sizes)), torch.repeat_interleave(
        torch.arange(len(sizes)), torch.tensor(sizes)
    )


def one_level(sizes):
    return [-1] + [0] * len(sizes) + [block + 1 for block, size in enumerate(sizes) for _ in range(size)]


@given(tied_keys(), seeds, numbers, st.booleans())
def test_with_the_same_queries_and_keys_inside_blocks_it_is_flat_entmax(blocks, seed, alpha, include_self):
    forest, block = blocks
    q, k, _ = random_inputs(forest, seed)
    q, k = (torch.stack([x[block == b].mean(0) for b in block]) for x in (q, k))
    options = {"normalizer": Entmax(alpha), "include_self": include_self}
    found = dense_weights(hierarchical_attention, q, k, forest, **options)
    torch.testing.assert_close(found, flat_weights(q, k, forest, alpha, include_self), rtol=1e-8, atol=1e-8)


@given(forests(), seeds, st.booleans(), alphas())
def test_with_logits_0_every_key_weighs_the_same(forest, seed, include_self, alpha):
    """On any tree, and with any α on its levels."""
    q, k, _ = random_inputs(forest, seed)
    q = torch.zeros_like(q)
    found = dense_weights(hierarchical_attention, q, k, forest, normalizer=Entmax(alpha), include_self=include_self)
    torch.testing.assert_close(found, flat_weights(q, k, forest, 1.5, include_self), rtol=1e-9, atol=1e-9)


def test_counts_in_the_logits_are_another_operator():
    forest, alpha = Hierarchy.from_nested([[1, 5]]), 1.5
    q, k, _ = random_inputs(forest, 0)
    q = torch.zeros_like(q)
    found = dense_weights(hierarchical_attention, q, k, forest, normalizer=Entmax(alpha, "logits"), include_self=True)
    assert (found - flat_weights(q, k, forest, alpha, True)).abs().max() > 0.05


@few
@given(forests(), seeds, sights, counted)
def test_it_tends_to_softmax(forest, seed, sight, counts):
    q, k, v = random_inputs(forest, seed)
    soft = hierarchical_attention(q, k, v, forest, **sight)
    near = hierarchical_attention(q, k, v, forest, normalizer=Entmax(1 + 1e-5, counts), **sight)
    assert (near - soft).abs().max() <= 1e-4 * max(1.0, float(v.abs().max())) * tall(q, k)
    exactly = hierarchical_attention(q, k, v, forest, normalizer=Entmax(1.0, counts), **sight)
    assert torch.equal(exactly, soft)
    whole = energy(q, k, forest, **sight)
    near = energy(q, k, forest, normalizer=Entmax(1 + 1e-5, counts), **sight)
    finite = torch.isfinite(whole)
    assert torch.equal(near == math.inf, ~finite)
    torch.testing.assert_close(near[finite], whole[finite], rtol=1e-4, atol=1e-4 * tall(q, k))


def tall(q, k):
    """Derivatives by α grow with the square of the logits."""
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
def test_a_gradient_changes_no_value(forest, seed, sight, alpha, counts, with_positions):
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


def test_a_gradient_of_alpha_near_softmax_is_finite_and_right():
    """In float32, against float64."""
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
    found = hierarchical_attention(
        *(x.to(dtype).requires_grad_(with_gradient) for x in (q, k, v)), forest, normalizer=Entmax(), include_self=True
    )
    tolerance = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 1e-1}[dtype]
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def test_trees_do_not_see_each_other():
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
    """A geometric mean: exp of the softmax operator's `inner` of logits 0."""
    s = forest.structure
    assert (keys_inside(forest, True, False) == s.leaf_count).all()
    assert (keys_inside(forest, False, False) == s.leaf_count - 1).all()
    q = torch.zeros(forest.num_leaves, 1, 1, dtype=torch.float64)
    roots = keys_inside(forest, True, True)[: forest.num_trees]
    expected = (-energy(q, q, forest, causal="paper-mask")).exp()[:, 0]
    torch.testing.assert_close(torch.as_tensor(roots), expected, rtol=1e-10, atol=1e-10)


def reached(weights, logits, alpha):
    """Σ p z + H_α(p), all rows: entmax of every row has the most."""
    return (weights * logits + (weights - weights**alpha) / (alpha * (alpha - 1))).sum()


def tied(mass, inside, block):
    """A matrix of blocks: [blocks, blocks] logits of what rows give to blocks, [leaves, leaves] of keys in their own."""
    same = block[:, None] == block
    mass = mass.softmax(-1)
    own = inside.masked_fill(~same, -math.inf).softmax(-1) * mass.diagonal()[block][:, None]
    return torch.where(same, own, (mass / torch.bincount(block))[block][:, block])


def climbed(logits, block, alpha):
    """A tied matrix that reaches more than its neighbours."""
    start = [torch.zeros(int(block.max()) + 1, int(block.max()) + 1), torch.zeros(len(block), len(block))]
    parameters = [x.double().requires_grad_() for x in start]
    climb = torch.optim.LBFGS(parameters, max_iter=200, tolerance_change=1e-14, line_search_fn="strong_wolfe")

    def loss():
        climb.zero_grad()
        less = -reached(tied(*parameters, block), logits, alpha)
        less.backward()
        return less

    climb.step(loss)
    return tied(*parameters, block).detach()


@pytest.mark.parametrize(("alpha", "least", "most"), [(1 + 1e-4, -1e-6, 1e-6), (1.5, 0.005, 0.02), (2.0, 0.02, 0.06)])
def test_another_tied_matrix_is_nearer_to_flat_entmax(alpha, least, most):
    """Than the operator's, by a little; but not for softmax. The counter-example of the README."""
    forest, block = Hierarchy.from_nested([[2, 2]]), torch.tensor([0, 0, 1, 1])
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn(2, 4, 1, 2, generator=generator, dtype=torch.float64).unbind(0)
    logits = torch.einsum("ihd,jhd->hij", q, k)[0]
    options = {"normalizer": Entmax(alpha), "include_self": True, "scale": 1.0}
    operator = reached(dense_weights(hierarchical_attention, q, k, forest, **options)[0], logits, alpha)
    best = reached(climbed(logits, block, alpha), logits, alpha)
    flat = entmax(logits, torch.ones(4).double(), torch.tensor(alpha, dtype=torch.float64))
    assert best < reached(flat, logits, alpha)
    assert least < best - operator < most


@few
@given(seeds, numbers, st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_the_nearest_tied_row_is_weighted_entmax_of_mean_logits(seed, alpha, sizes):
    """No other row that is constant on blocks reaches as much."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    logits = torch.randn(len(block), generator=generator, dtype=torch.float64)
    counts = torch.tensor(sizes, dtype=torch.float64)
    mean = torch.zeros_like(counts).index_add(0, block, logits) / counts
    best = entmax(mean, counts, torch.tensor(alpha, dtype=torch.float64))
    other = torch.rand(200, len(sizes), generator=generator, dtype=torch.float64)
    other = torch.lerp(best, other / other.sum(-1, keepdim=True), torch.rand(200, 1, generator=generator).double() ** 4)
    most = reached((best / counts)[block], logits, alpha)
    assert all(reached((row / counts)[block], logits, alpha) <= most + 1e-12 for row in other)


@pytest.mark.parametrize("alpha", [1.2, torch.tensor([[1.5], [1.2]])], ids=["number", "tensor"])
def test_what_is_said_of_alpha_holds(alpha):
    assert Entmax(alpha, least=1.1).lowest == (1.1 if isinstance(alpha, torch.Tensor) else 1.2)
    with pytest.raises(HsaError, match=r"^Entmax.alpha: given 1\.2\d*, expected from 1\.4, as was said, to 2"):
        Entmax(alpha, least=1.4)
    for least in (0.9, 2.1, float("nan")):
        with pytest.raises(HsaError, match=r"^Entmax.least: given .*, expected from 1 to 2"):
            Entmax(alpha, least=least)


def test_rounding_breaks_no_word():
    Entmax(torch.tensor([1.3]).double(), least=1.3)  # a little below, as float32 has no 1.3


@pytest.mark.parametrize(
    "alpha", [0.5, 0.999, 2.01, math.nan, math.inf, -1, torch.tensor([1.5, 2.5]), torch.tensor([math.nan])]
)
def test_alpha_out_of_range(alpha):
    with pytest.raises(HsaError, match=r"Entmax.alpha: .*from 1 \(softmax\) to 2 \(sparsemax\)"):
        Entmax(alpha)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Entmax("1.5"), "a number or a tensor"),
        (lambda: Entmax(True), "a number or a tensor"),
        (lambda: Entmax(torch.tensor([2])), "torch.int64"),
        (lambda: Entmax(torch.full((2, 3, 4), 1.5)), r"\(2, 3, 4\)"),
        (lambda: Entmax(torch.zeros(0)), r"\(0,\)"),
        (lambda: Entmax(1.5, counts="x"), "Entmax.counts: given 'x'"),
    ],
)
def test_what_is_no_entmax(make, message):
    with pytest.raises(HsaError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalizer": "sparsemax"}, "normalizer: given 'sparsemax', expected 'softmax' or an hsa.Entmax"),
        ({"normalizer": Entmax(torch.full((5,), 1.5))}, r"normalizer.alpha: given shape \(5,\).*6 heads"),
        ({"normalizer": Entmax(), "family_attention": "linear"}, "entmax needs family_attention 'exact'"),
        ({"normalizer": Entmax(), "mixing": HeadMixing.identity(6)}, "heads that talk need softmax"),
        ({"normalizer": Entmax(), "causal": "paper-mask", "include_self": False}, "include_self=True"),
    ],
)
def test_arguments_that_do_not_fit(options, message):
    forest = Hierarchy.flat([4])
    with pytest.raises(HsaError, match=message):
        hierarchical_attention(*random_inputs(forest, 0), forest, **options)


def test_values_that_are_not_finite_are_named():
    forest = Hierarchy.flat([4])
    q, k, v = random_inputs(forest, 0)
    k[2, 1, 0] = math.nan
    with hsa.checking(), pytest.raises(HsaError, match="k: leaf 2"):
        hierarchical_attention(q, k, v, forest, normalizer=Entmax())
    q, k, v = random_inputs(forest, 0)
    q[0], k[1] = 1e200, 1e200  # finite, but their product is not
    with hsa.checking(), pytest.raises(HsaError, match="logit"):
        hierarchical_attention(q, k, v, forest, normalizer=Entmax())
