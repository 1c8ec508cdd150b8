"""Multiscale attention with entmax: both backends, flat entmax as the oracle, causality, optimality."""

import math

import entmax as package
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hsa
from hsa import Entmax, Hierarchy, HsaError, Queries, cluster_keys, dense_weights, multiscale_attention, select
from hsa.attention.mixing import HeadMixing
from hsa.attention.multiscale.operator import MULTISCALE
from tests.attention.multiscale.test_operator import select_all
from tests.forests import forests, gradients, random_inputs, random_positions, windows

seeds = st.integers(0, 10**6)
counts = st.sampled_from(["weighted", "logits"])
HEADS = 2
shapes = [(), (1,), (HEADS,), (1, HEADS), (2, 1), (3, HEADS)]
few = settings(max_examples=5)  # the reference is slow


def small_inputs(forest, seed, **options):
    return random_inputs(forest, seed, heads=HEADS, kv_heads=options.pop("kv_heads", 1), **options)


def random_alpha(seed, shape):
    """Return numbers between 1.1 and 1.9 that need a gradient."""
    generator = torch.Generator().manual_seed(seed + 3)
    return (1.1 + 0.8 * torch.rand(shape, generator=generator, dtype=torch.float64)).requires_grad_()


def entmax_of(alpha, how="weighted", seed=0):
    """Return an entmax with this α: a number, or the shape of a random tensor."""
    return Entmax(random_alpha(seed, alpha) if isinstance(alpha, tuple) else alpha, how)


def both_backends(q, k, v, forest, normalizer, positions=None, pooled_bias=0.0, more=(), **options):
    """Compare values and gradients of the backends "torch" and "reference"."""
    options = {"positions": positions, "pooled_bias": pooled_bias, "normalizer": normalizer, **options}
    fast, slow = (multiscale_attention(q, k, v, forest, backend=b, **options) for b in ("torch", "reference"))
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)
    inputs = [q, k, v, positions, *more]
    inputs += [x for x in (pooled_bias, normalizer.alpha) if isinstance(x, torch.Tensor)]
    for a, b in zip(gradients(fast, inputs), gradients(slow, inputs), strict=True):
        # A weight that is 0 in one backend may be 1e-16 in the other, and its slope is the root of that: 1e-8.
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(multiscale_attention(q, k, v, forest, **options), fast, rtol=1e-12, atol=1e-12)


@settings(max_examples=12)
@given(forests(), seeds, st.sampled_from([1.5, 2.0, *shapes]), counts, st.integers(0, 2), st.data())
def test_torch_equals_reference(forest, seed, alpha, how, near, data):
    q, k, v = small_inputs(forest, seed, requires_grad=True)
    positions = random_positions(forest, seed, heads=HEADS, requires_grad=True) if data.draw(st.booleans()) else None
    causal, include_self = data.draw(st.booleans()), data.draw(st.booleans())
    bias = torch.linspace(-1, 1, HEADS, dtype=torch.float64, requires_grad=True)
    selection = select(q, k, forest, near=near, top_k=data.draw(st.integers(0, 2)), causal=causal)
    options = {"selection": selection, "causal": causal, "include_self": include_self}
    both_backends(q, k, v, forest, entmax_of(alpha, how, seed), positions, bias, **options)


@few
@given(windows(), seeds, st.integers(1, 3), st.integers(1, 5))
def test_torch_equals_reference_with_clusters(forest, seed, top_k, size):
    q, k, v = small_inputs(forest, seed, kv_heads=2, requires_grad=True)
    order = cluster_keys(k, forest)
    selection = select(q, k, forest, queries=Queries.windows(forest, size), top_k=top_k, clusters=order)
    both_backends(q, k, v, forest, entmax_of((3, HEADS), seed=seed), selection=selection, clusters=order)


@few
@given(windows(), seeds, st.data())
def test_torch_equals_reference_for_other_queries(forest, seed, data):
    sizes = [data.draw(st.integers(0, 4)) for _ in range(forest.num_trees + 1)]
    tree = [*range(forest.num_trees), 0]
    visible = [data.draw(st.integers(0, forest.lengths[t])) for t, n in zip(tree, sizes, strict=True) for _ in range(n)]
    queries = Queries(
        torch.tensor([0, *sizes]).cumsum(0), torch.tensor(tree), visible=torch.tensor(visible, dtype=torch.long)
    )
    q, k, v = small_inputs(forest, seed, queries=sum(sizes), requires_grad=True)
    selection = select(q, k, forest, queries=queries, causal=True)
    both_backends(q, k, v, forest, entmax_of((2, 1), seed=seed), selection=selection, causal=True)


@few
@given(forests(), seeds, st.sampled_from([1.5, (3, HEADS)]), counts)
def test_torch_equals_reference_with_talking_heads(forest, seed, alpha, how):
    q, k, v = small_inputs(forest, seed, requires_grad=True)
    generator = torch.Generator().manual_seed(seed)
    maps = torch.randn(2, HEADS, HEADS, generator=generator, dtype=torch.float64)
    mixing = HeadMixing(*(x.clone().requires_grad_() for x in maps))
    more = [mixing.logits, mixing.weights]
    both_backends(q, k, v, forest, entmax_of(alpha, how, seed), pooled_bias=-0.5, mixing=mixing, more=more)


def flat_entmax(q, k, forest, alpha, include_self=True, causal=False):
    """Return the weights of the package `entmax` inside every tree, [heads, leaves, leaves]; 0 for rows without keys."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    tree = torch.repeat_interleave(torch.arange(forest.num_trees), torch.tensor(forest.lengths))
    allowed = tree[:, None] == tree
    allowed = allowed.tril() if causal else allowed
    allowed = allowed if include_self else allowed & ~torch.eye(len(q), dtype=torch.bool)
    exact = {1.5: package.entmax15, 2.0: package.sparsemax}.get(alpha)
    logits = logits.masked_fill(~allowed, -1e9)
    weights = exact(logits, -1) if exact else package.entmax_bisect(logits, alpha=alpha, n_iter=80)
    return weights.masked_fill(~allowed, 0)


@given(forests(), seeds, st.sampled_from([1.2, 1.5, 2.0]), st.booleans(), counts)
def test_all_selected_is_entmax_attention(forest, seed, alpha, include_self, how):
    q, k, _ = random_inputs(forest, seed)
    options = {"selection": select_all(forest), "include_self": include_self, "normalizer": Entmax(alpha, how)}
    weights = dense_weights(multiscale_attention, q, k, forest, **options)
    torch.testing.assert_close(weights, flat_entmax(q, k, forest, alpha, include_self), rtol=0, atol=1e-10)


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
def test_identical_keys_inside_nodes(alpha):
    """Pooling equal keys is exact, but not with leaf counts among the logits."""
    forest = Hierarchy.regular([27], (3, 3))
    q, k, _ = random_inputs(forest, 1)
    k = k[::9].repeat_interleave(9, 0)
    flat = flat_entmax(q, k, forest, alpha)
    result = dense_weights(multiscale_attention, q, k, forest, normalizer=Entmax(alpha))
    torch.testing.assert_close(result, flat, rtol=0, atol=1e-10)
    other = dense_weights(multiscale_attention, q, k, forest, normalizer=Entmax(alpha, "logits"))
    assert (other - flat).abs().sum(-1).max() > 0.2


@given(forests(), seeds, counts)
def test_softmax_is_the_limit(forest, seed, how):
    q, k, v = random_inputs(forest, seed)
    soft = multiscale_attention(q, k, v, forest)
    for alpha in (1 + 1e-5, torch.full((2, 1), 1 + 1e-5, dtype=torch.float64)):
        near = multiscale_attention(q, k, v, forest, normalizer=Entmax(alpha, how))
        # To first order, weights differ by (α − 1)/2 · p · (log p)², less its mean.
        distance = 1 + torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(3, 1)).abs().max() + math.log(len(k))
        assert (near - soft).abs().max() <= 1e-5 * distance**2 * v.abs().max() + 1e-9
    assert torch.equal(multiscale_attention(q, k, v, forest, normalizer=Entmax(1.0)), soft)


@given(forests(), seeds, st.sampled_from([1.5, 2.0, (3, 6)]), st.booleans(), counts)
def test_rows_sum_to_one(forest, seed, alpha, include_self, how):
    q, k, v = random_inputs(forest, seed)
    options = {"normalizer": entmax_of(alpha, how, seed), "include_self": include_self}
    total = multiscale_attention(q, k, torch.ones_like(v), forest, **options)
    sees = torch.repeat_interleave(torch.tensor(forest.lengths), torch.tensor(forest.lengths)) > (not include_self)
    torch.testing.assert_close(total, sees.double()[:, None, None].expand_as(total), rtol=0, atol=1e-12)


def objective(weights, logits, alpha):
    """Return Σ p z + Σ (p − p^α) / (α (α − 1)) of every row, which entmax maximises."""
    return (weights * logits + (weights - weights**alpha) / (alpha * (alpha - 1))).sum(-1)


@settings(max_examples=10)
@given(forests(), seeds, st.sampled_from([1.2, 1.5, 2.0]))
def test_rows_are_optimal_among_those_tied_over_their_lists(forest, seed, alpha):
    """No other row that is constant on the nodes of its list is better; more selected families are."""
    q, k, _ = random_inputs(forest, seed)
    logits = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(3, 1)) * q.shape[-1] ** -0.5
    last = None
    for near in (0, 1, 2):
        selection = select(q, k, forest, near=near)
        weights = dense_weights(multiscale_attention, q, k, forest, selection=selection, normalizer=Entmax(alpha))
        best = objective(weights, logits, alpha)
        for other in range(4):
            draws = random_inputs(forest, seed + other + 1)[0], k * (0.1 + 3 * other)
            # Softmax rows of other queries and keys are tied over the same lists.
            random = dense_weights(multiscale_attention, *draws, forest, selection=selection)
            for share in (1.0, 0.1, 1e-3):
                mixed = (1 - share) * weights + share * random
                assert (objective(mixed, logits, alpha) <= best + 1e-10).all()
        assert last is None or (best >= last - 1e-10).all()
        last = best
    flat = objective(flat_entmax(q, k, forest, alpha), logits, alpha)
    assert (best <= flat + 1e-9).all()


def test_rows_are_optimal_with_an_alpha_per_level():
    """Every node has the α of its family; the rows maximise the sum over both levels."""
    forest = Hierarchy.regular([18], (3, 3))
    q, k, v = random_inputs(forest, 3, kv_heads=6)
    alpha = random_alpha(3, (2, 6)).detach()
    result = multiscale_attention(q, k, v, forest, normalizer=Entmax(alpha))
    for i, h in ((0, 0), (7, 2), (17, 5)):
        first = i // 3 * 3
        blocks = [[j] for j in range(first, first + 3)]
        blocks += [list(range(j, j + 3)) for j in range(i // 9 * 9, i // 9 * 9 + 9, 3) if j != first]
        blocks += [list(range(9 * (1 - i // 9), 9 * (1 - i // 9) + 9))]
        z = torch.stack([q[i, h] @ k[b, h].mean(0) * q.shape[-1] ** -0.5 for b in blocks])
        n = torch.tensor([len(b) for b in blocks], dtype=torch.float64)
        a = torch.stack([alpha[min({1: 1, 3: 2, 9: 3}[len(b)], 2) - 1, h] for b in blocks])
        # Maximise over p = w² / Σ w², which can reach 0.
        w = torch.ones_like(z).requires_grad_()
        optimizer = torch.optim.LBFGS(
            [w], max_iter=500, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
        )

        def loss(z=z, n=n, a=a, w=w, optimizer=optimizer):
            optimizer.zero_grad()
            p = w**2 / (w**2).sum()
            value = -(p * z + (p - n ** (1 - a) * p**a) / (a * (a - 1))).sum()
            value.backward()
            return value

        optimizer.step(loss)
        p = (w**2 / (w**2).sum()).detach()
        row = (p[:, None] * torch.stack([v[b, h].mean(0) for b in blocks])).sum(0)
        torch.testing.assert_close(row, result[i, h], rtol=0, atol=1e-5)


def test_causal_rows_do_not_depend_on_later_tokens():
    forest = Hierarchy.regular([13], (3, 2))
    q, k, v = random_inputs(forest, 5)
    for normalizer in (Entmax(1.5), Entmax(2.0), entmax_of((3, 6), seed=5)):
        for leaf in range(13):
            jacobians = torch.autograd.functional.jacobian(
                lambda *x, leaf=leaf, normalizer=normalizer: multiscale_attention(
                    *x, forest, causal=True, normalizer=normalizer
                )[leaf].sum(),
                (q, k, v),
            )
            assert all((j[leaf + 1 :] == 0).all() and ((j[: leaf + 1] != 0).any() or leaf == 0) for j in jacobians)


@pytest.mark.parametrize(("shape", "how"), [((3, HEADS), "weighted"), ((HEADS,), "logits")])
def test_gradcheck(shape, how):
    forest = Hierarchy.from_nested([[2, [1, 2]], 1])
    q, k, v = small_inputs(forest, 1, dim=2, value_dim=1, requires_grad=True)
    positions = random_positions(forest, 1, heads=HEADS, requires_grad=True)
    alpha = random_alpha(1, shape)

    def run(q, k, v, positions, alpha):
        return multiscale_attention(q, k, v, forest, positions=positions, normalizer=Entmax(alpha, how))

    assert torch.autograd.gradcheck(run, (q, k, v, positions, alpha))


def test_equal_rows_of_alpha_equal_one_row():
    forest = Hierarchy.from_nested([[3, [1, 2]], 5])
    q, k, v = random_inputs(forest, 1)
    one = random_alpha(0, (6,)).detach()
    each = Entmax(one.expand(3, 6))
    torch.testing.assert_close(
        multiscale_attention(q, k, v, forest, normalizer=Entmax(one)),
        multiscale_attention(q, k, v, forest, normalizer=each),
        rtol=0,
        atol=1e-12,
    )


def test_without_pooled_nodes_it_is_entmax_inside_families():
    lengths = [3, 4, 2]
    forest, flat = Hierarchy.from_nested([lengths]), Hierarchy.flat(lengths)
    q, k, v = random_inputs(forest, 2)
    inside = multiscale_attention(q, k, v, forest, normalizer=Entmax(1.5), pooled_bias=-math.inf)
    torch.testing.assert_close(inside, multiscale_attention(q, k, v, flat, normalizer=Entmax(1.5)))


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_dropout(backend):
    forest = Hierarchy.regular([17], (3, 2))
    q, k, _ = random_inputs(forest, 2)
    v = torch.eye(17, dtype=torch.float64)[:, None].expand(17, 2, 17)
    options = {"normalizer": Entmax(1.2), "backend": backend}
    whole = multiscale_attention(q, k, v, forest, **options)
    dropped = multiscale_attention(q, k, v, forest, dropout_p=0.25, **options)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.75)
    assert 0.6 < kept[whole > 0].double().mean() < 0.9


def test_trees_do_not_see_each_other():
    a, b = Hierarchy.from_nested([[2, 3]]), Hierarchy.from_nested([[2, 3], [4, [1, 2]]])
    q, k, v = random_inputs(b, 3)
    normalizer = entmax_of((2, 6), seed=3)
    alone = multiscale_attention(q[:5], k[:5], v[:5], a, normalizer=normalizer)
    torch.testing.assert_close(alone, multiscale_attention(q, k, v, b, normalizer=normalizer)[:5], rtol=0, atol=1e-12)


@pytest.mark.parametrize("forest", [Hierarchy.from_parents([-1]), Hierarchy.flat([1]), Hierarchy.flat([])])
@pytest.mark.parametrize("alpha", [1.5, 1.3])
def test_single_leaves_and_empty_batches(forest, alpha):
    q, k, v = random_inputs(forest, 0)
    out = multiscale_attention(q, k, v, forest, normalizer=Entmax(alpha))
    torch.testing.assert_close(out, v.repeat_interleave(3, 1))
    assert (multiscale_attention(q, k, v, forest, normalizer=Entmax(alpha), include_self=False) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("alpha", [1 + 1e-6, 1.3, 1.5, 2.0])
def test_lower_precision(dtype, alpha):
    forest = Hierarchy.regular([13, 5], (3, 2))
    q, k, v = small_inputs(forest, 4, dtype=dtype)
    normalizer = Entmax(alpha)
    exact = multiscale_attention(q.double(), k.double(), v.double(), forest, normalizer=normalizer)
    for backend in MULTISCALE[1:]:
        out = multiscale_attention(q, k, v, forest, normalizer=normalizer, backend=backend.name)
        assert out.dtype == dtype
        assert (out.double() - exact).abs().max() < backend.tolerance[dtype] * exact.abs().max()


@pytest.mark.parametrize("alpha", [1.01, 1.5, 2.0, (2, 6)])
def test_huge_logits(alpha):
    forest = Hierarchy.regular([29], (3, 2))
    q, k, v = random_inputs(forest, 6, dtype=torch.float32)
    q, k, v = ((1e15 * q).requires_grad_(), (1e15 * k).requires_grad_(), v.requires_grad_())
    out = multiscale_attention(q, k, v, forest, normalizer=entmax_of(alpha))
    assert out.isfinite().all()
    assert all(x.isfinite().all() for x in gradients(out, [q, k, v]))
    hard = multiscale_attention(q, k, v, forest)  # softmax of such logits also selects one entry
    torch.testing.assert_close(out, hard)


def test_infinite_logits_are_reported():
    forest = Hierarchy.flat([5])
    q, k, v = random_inputs(forest, 6, dtype=torch.float32)
    with hsa.checking(), pytest.raises(HsaError, match="a logit is"):
        multiscale_attention(1e30 * q, 1e30 * k, v, forest, normalizer=Entmax(1.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalizer": "entmax"}, "expected 'softmax' or an hsa.Entmax"),
        ({"normalizer": Entmax(torch.full((5,), 1.5))}, r"normalizer.alpha: expected .*, got shape \(5,\)"),
        ({"normalizer": Entmax(1.5), "backend": "triton"}, "triton: it has no entmax"),
    ],
)
def test_bad_input(options, message):
    forest = Hierarchy.flat([4])
    q, k, v = random_inputs(forest, 0)
    with pytest.raises(HsaError, match=message):
        multiscale_attention(q, k, v, forest, **options)
