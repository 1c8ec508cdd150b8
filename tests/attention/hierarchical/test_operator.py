"""Hierarchical attention: the reference against independent oracles, every other path against the reference."""

import inspect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa import Entmax, Hierarchy, HsaError, dense_weights, energy, hierarchical_attention, multiscale_attention
from hsa.attention.hierarchical.operator import HIERARCHICAL
from tests.forests import (
    SIGHTS,
    forests,
    gradients,
    random_inputs,
    random_positions,
    sights,
    softmax_weights,
    total_kl,
)

seeds = st.integers(0, 10**6)
ON_THE_CPU = [backend for backend in HIERARCHICAL if backend.name != "triton"]  # see test_triton_operator.py
BACKENDS = [backend.name for backend in ON_THE_CPU]


@given(forests(), seeds, sights, st.booleans())
def test_torch_equals_reference(forest, seed, sight, with_positions):
    q, k, v = random_inputs(forest, seed, requires_grad=True)
    positions = random_positions(forest, seed, requires_grad=True) if with_positions else None
    options = {"positions": positions, **sight}
    fast = hierarchical_attention(q, k, v, forest, backend="torch", **options)
    slow = hierarchical_attention(q, k, v, forest, backend="reference", **options)
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-10)
    inputs = [q, k, v, positions]
    for a, b in zip(gradients(fast, inputs), gradients(slow, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    with torch.no_grad():  # another path: averages are overwritten
        torch.testing.assert_close(hierarchical_attention(q, k, v, forest, **options), slow, rtol=1e-10, atol=1e-10)


@given(forests(), seeds, sights)
def test_energy_torch_equals_reference(forest, seed, sight):
    q, k, _ = random_inputs(forest, seed)
    fast = energy(q, k, forest, backend="torch", **sight)
    torch.testing.assert_close(fast, energy(q, k, forest, backend="reference", **sight), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3), seed=seeds, include_self=st.booleans())
def test_a_flat_tree_is_softmax_attention(backend, lengths, seed, include_self):
    forest = Hierarchy.flat(lengths)
    q, k, _ = random_inputs(forest, seed)
    flat = softmax_weights(q, k, forest, include_self=include_self)
    weights = dense_weights(hierarchical_attention, q, k, forest, include_self=include_self, backend=backend)
    torch.testing.assert_close(weights, flat, rtol=1e-10, atol=1e-10)


@given(forests(), seeds, sights)
def test_rows_with_visible_leaves_sum_to_one(forest, seed, sight):
    q, k, _ = random_inputs(forest, seed)
    weights = dense_weights(hierarchical_attention, q, k, forest, **sight)
    length = torch.repeat_interleave(torch.tensor(forest.lengths), torch.tensor(forest.lengths))
    expected = ((length > 1) | sight["include_self"]).double().expand(weights.shape[:2])
    torch.testing.assert_close(weights.sum(-1), expected, rtol=1e-10, atol=1e-10)
    assert (weights >= 0).all()


def siblings(forest):
    s = forest.structure
    for parent in s.num_children.nonzero()[0]:
        children = range(s.first_child[parent], s.first_child[parent] + s.num_children[parent])
        for a in children:
            for b in children:
                if a != b:
                    yield tuple(slice(s.first_leaf[n], s.first_leaf[n] + s.leaf_count[n]) for n in (a, b))


@given(forests(), seeds, st.booleans())
def test_weights_are_tied_for_each_pair_of_siblings(forest, seed, include_self):
    q, k, _ = random_inputs(forest, seed)
    weights = dense_weights(hierarchical_attention, q, k, forest, include_self=include_self)
    for rows, columns in siblings(forest):
        block = weights[:, rows, columns].flatten(1)
        torch.testing.assert_close(block, block[:, :1].expand_as(block), rtol=1e-10, atol=1e-12)


@given(forests(), seeds, st.booleans())
def test_the_gradient_of_the_energy_is_the_operator(forest, seed, include_self):
    q, k, _ = random_inputs(forest, seed, heads=2, requires_grad=True)
    energies = energy(q, k, forest, include_self=include_self)
    some = energies[energies.isfinite()].sum()  # a tree of one leaf without self has no mass
    (grad,) = torch.autograd.grad(some, q, allow_unused=True, materialize_grads=True)
    length = torch.repeat_interleave(torch.tensor(forest.lengths), torch.tensor(forest.lengths))[:, None, None].double()
    q, k = q.detach(), k.detach()
    weights = dense_weights(hierarchical_attention, q, k, forest, include_self=include_self)
    expected = torch.einsum("hij,jhd->ihd", weights, k)
    torch.testing.assert_close(-length * q.shape[-1] ** 0.5 * grad, expected, rtol=1e-10, atol=1e-10)


def tied_matrix(forest, free):
    """Return a tied stochastic matrix: in each family, a member divides its row among its siblings and its children."""
    s = forest.structure
    free = iter(free)
    total = torch.zeros(forest.num_leaves, forest.num_leaves, dtype=torch.float64)

    def walk(node, weight):
        nonlocal total
        children = range(s.first_child[node], s.first_child[node] + s.num_children[node])
        for child in children:
            others = [c for c in children if c != child]
            inside = [torch.zeros((), dtype=torch.float64)] * bool(s.leaf_count[child] > 1)
            shares = torch.stack([*(next(free) for _ in others), *inside]).softmax(0)
            for share, other in zip(shares, others, strict=False):
                block = torch.zeros_like(total)
                rows, columns = (slice(s.first_leaf[n], s.end_leaf[n]) for n in (child, other))
                block[rows, columns] = 1 / int(s.leaf_count[other])
                total = total + weight * share * block
            if inside:
                walk(child, weight * shares[-1])

    walk(0, torch.ones((), dtype=torch.float64))
    return total


@pytest.mark.parametrize("nested", [[[3, 2]], [[[2, 1], 2]], [[[1, 2], [2]]]])
def test_closest_to_softmax_among_all_tied_matrices(nested):
    """Theorem 3.2: L-BFGS over all tied stochastic matrices finds the operator's matrix, with the same divergence."""
    forest = Hierarchy.from_nested(nested)
    q, k, _ = random_inputs(forest, 3, heads=1, kv_heads=1)
    flat = softmax_weights(q, k, forest, include_self=False)[0]
    ours = dense_weights(hierarchical_attention, q, k, forest, include_self=False)[0]
    free = torch.zeros(len(list(siblings(forest))), dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [free], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def divergence():
        optimiser.zero_grad()
        weights = tied_matrix(forest, free)[flat > 0]
        loss = (weights * (weights / flat[flat > 0]).log()).sum()
        loss.backward()
        return loss

    optimiser.step(divergence)
    best = tied_matrix(forest, free).detach()
    torch.testing.assert_close(best, ours, rtol=1e-6, atol=1e-7)
    assert abs(total_kl(ours, flat) - total_kl(best, flat)) < 1e-10


@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), seeds)
def test_sets_are_permutation_equivariant(sizes, seed):
    forest = Hierarchy.from_nested([sizes])
    q, k, v = random_inputs(forest, seed)
    order = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(seed))
    bounds = torch.tensor([0, *sizes]).cumsum(0)
    rows = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in order])
    moved = Hierarchy.from_nested([[sizes[i] for i in order]])
    out = hierarchical_attention(q, k, v, forest)
    again = hierarchical_attention(q[rows], k[rows], v[rows], moved)
    torch.testing.assert_close(again, out[rows], rtol=1e-10, atol=1e-10)


@given(st.lists(forests(), min_size=2, max_size=3), seeds, sights)
def test_trees_of_a_batch_do_not_attend_to_each_other(parts, seed, sight):
    batch = Hierarchy.collate(parts)
    q, k, v = random_inputs(batch, seed)
    out = hierarchical_attention(q, k, v, batch, **sight)
    begin = 0
    for part in parts:
        rows = slice(begin, begin + part.num_leaves)
        alone = hierarchical_attention(q[rows], k[rows], v[rows], part, **sight)
        torch.testing.assert_close(out[rows], alone, rtol=1e-10, atol=1e-10)
        begin += part.num_leaves


@pytest.mark.parametrize("sight", SIGHTS, ids=str)
@pytest.mark.parametrize("value_dim", [2, 3])  # the fused and the plain path within families
def test_gradcheck(sight, value_dim):
    forest = Hierarchy.collate([Hierarchy.from_nested([[3, [2, 1]]], sinks=(0,)), Hierarchy.from_parents([-1])])
    q, k, v = random_inputs(forest, 1, heads=2, kv_heads=1, dim=2, value_dim=value_dim, requires_grad=True)
    positions = random_positions(forest, 1, heads=2, requires_grad=True)

    def run(q, k, v, positions):
        return hierarchical_attention(q, k, v, forest, positions=positions, **sight)

    assert torch.autograd.gradcheck(run, (q, k, v, positions))
    assert torch.autograd.gradcheck(lambda q, k, v: run(q, k, v, None), (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ON_THE_CPU, ids=BACKENDS)
def test_declared_tolerances(backend, dtype):
    forest = Hierarchy.collate([Hierarchy.regular([61], (5, 3)), Hierarchy.from_nested([[7, [2, 11]]], sinks=(0,))])
    for seed in range(5):
        q, k, v = random_inputs(forest, seed, dim=16, value_dim=16, dtype=dtype)
        options = {"include_self": seed % 2 == 1}
        exact = hierarchical_attention(q.double(), k.double(), v.double(), forest, backend="reference", **options)
        out = hierarchical_attention(q, k, v, forest, backend=backend.name, **options)
        assert out.dtype == dtype
        error = (out.double() - exact).abs().max() / exact.abs().max()
        assert error < backend.tolerance[dtype]


def test_causal_mask_of_the_paper_hides_right_siblings_but_leaks():
    """Erratum 7: the weight matrix is lower triangular, yet earlier outputs change with the last query."""
    forest = Hierarchy.regular([16], (4, 4))
    q, k, v = random_inputs(forest, 5)
    options = {"causal": "paper-mask"}
    weights = dense_weights(hierarchical_attention, q, k, forest, **options)
    assert weights.triu(1).abs().max() == 0
    out = hierarchical_attention(q, k, v, forest, **options)
    q_later = q.clone()
    q_later[-1] += 1
    moved = (hierarchical_attention(q_later, k, v, forest, **options) - out).abs().amax((1, 2)) > 1e-9
    assert moved.tolist() == [False] * 12 + [True] * 4


def test_the_mask_of_the_paper_needs_include_self():
    forest = Hierarchy.flat([3])
    with pytest.raises(HsaError, match=r"include_self=True.*multiscale_attention"):
        hierarchical_attention(*random_inputs(forest, 0), forest, causal="paper-mask", include_self=False)


@pytest.mark.parametrize("causal", [True, False, "yes"])
def test_the_leaking_mask_has_no_other_name(causal):
    forest = Hierarchy.flat([3])
    q, k, v = random_inputs(forest, 0)
    message = (
        rf"causal: expected None, or 'paper-mask'.*leaks.*, got {causal!r}\..*multiscale_attention\(causal=True\)$"
    )
    with pytest.raises(HsaError, match=message):
        hierarchical_attention(q, k, v, forest, causal=causal)
    with pytest.raises(HsaError, match=message):
        energy(q, k, forest, causal=causal)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_leaf(backend):
    for forest in (Hierarchy.flat([1]), Hierarchy.from_parents([-1]), Hierarchy.from_nested([[[1]]])):
        q, k, v = random_inputs(forest, 0, heads=2)
        assert hierarchical_attention(q, k, v, forest, include_self=False, backend=backend).abs().max() == 0
        torch.testing.assert_close(hierarchical_attention(q, k, v, forest, backend=backend), v)
        assert energy(q, k, forest, include_self=False, backend=backend).tolist() == [[math.inf, math.inf]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_batch(backend):
    forest = Hierarchy.flat([])
    q, k, v = random_inputs(forest, 0)
    assert hierarchical_attention(q, k, v, forest, backend=backend).shape == (0, 6, 5)
    assert energy(q, k, forest).shape == (0, 6)


def test_half_precision_with_huge_logits():
    forest = Hierarchy.from_nested([[5, [3, 4]]])
    q, k, v = random_inputs(forest, 2, dim=16, value_dim=16, dtype=torch.float16)
    q, k = q * 60, k * 60
    logits = torch.einsum("ihd,jhd->ijh", q.double(), k.double().repeat_interleave(3, 1)) / 4
    assert logits.abs().max() > 1e4
    for include_self in (False, True):
        exact = hierarchical_attention(
            q.double(), k.double(), v.double(), forest, include_self=include_self, backend="reference"
        )
        out = hierarchical_attention(q, k, v, forest, include_self=include_self)
        assert out.isfinite().all()
        assert (out.double() - exact).abs().max() < 4e-3 * exact.abs().max()


def test_autocast_does_not_lower_the_precision():
    forest = Hierarchy.regular([40], (4, 4))
    q, k, v = random_inputs(forest, 1, dtype=torch.float32)
    plain = hierarchical_attention(q, k, v, forest)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(hierarchical_attention(q, k, v, forest), plain)


def test_grouped_heads_are_repeated_heads():
    forest = Hierarchy.regular([23], (3, 3))
    q, k, v = random_inputs(forest, 1)
    repeated = [x.repeat_interleave(3, 1) for x in (k, v)]
    torch.testing.assert_close(
        hierarchical_attention(q, k, v, forest), hierarchical_attention(q, *repeated, forest), rtol=0, atol=0
    )


@pytest.mark.parametrize("name", ["flex", "mine"])
def test_family_attention_is_replaceable(name):
    forest = Hierarchy.from_nested([[13, [2, 1], 5]], sinks=(0,))
    q, k, v = random_inputs(forest, 1)
    calls = []

    def mine(q, k, v, bias, mask, *, scale):
        calls.append(q.shape)
        logits = q @ k.transpose(-1, -2) * scale + (0 if bias is None else bias)
        logits = logits.masked_fill(~mask, -math.inf)
        lse = logits.logsumexp(-1)
        return logits.softmax(-1).nan_to_num(0) @ v, lse

    for include_self in (False, True):
        exact = hierarchical_attention(q, k, v, forest, include_self=include_self)
        function = mine if name == "mine" else name
        other = hierarchical_attention(q, k, v, forest, include_self=include_self, family_attention=function)
        torch.testing.assert_close(other, exact, rtol=1e-10, atol=1e-10)
    assert bool(calls) == (name == "mine")


@pytest.mark.parametrize("include_self", [False, True])
def test_linear_family_attention_approximates(include_self):
    forest = Hierarchy.from_nested([[50, [30, 20, 1]]], sinks=(0,))
    q, k, v = (0.5 * x for x in random_inputs(forest, 1, dim=8, requires_grad=True))
    out = hierarchical_attention(q, k, v, forest, include_self=include_self, family_attention="linear")
    exact = hierarchical_attention(q, k, v, forest, include_self=include_self)
    assert (out - exact).norm() < 0.1 * exact.norm()
    small = Hierarchy.from_nested([[3, [2, 1]]])
    inputs = random_inputs(small, 1, heads=2, kv_heads=1, dim=2, value_dim=2, requires_grad=True)
    options = {"include_self": include_self, "family_attention": "linear"}
    assert torch.autograd.gradcheck(lambda q, k, v: hierarchical_attention(q, k, v, small, **options), inputs)


@given(forests(), seeds, st.booleans())
def test_linear_family_attention_is_stochastic(forest, seed, include_self):
    q, k, _ = random_inputs(forest, seed)
    options = {"include_self": include_self, "family_attention": "linear"}
    weights = dense_weights(hierarchical_attention, q, k, forest, **options)
    exact = dense_weights(hierarchical_attention, q, k, forest, include_self=include_self)
    torch.testing.assert_close(weights.sum(-1), exact.sum(-1), rtol=1e-8, atol=1e-8)
    assert (weights > -1e-9).all()


def test_linear_family_attention_refuses_a_causal_mask():
    forest = Hierarchy.flat([4])
    with pytest.raises(HsaError, match="cannot hide siblings"):
        hierarchical_attention(*random_inputs(forest, 0), forest, causal="paper-mask", family_attention="linear")


def test_long_families_are_padded_and_masked():
    sizes = [33, 34, 41, 47, 9, 10, 11, 1]
    forest = Hierarchy.from_nested([sizes])
    q, k, v = random_inputs(forest, 1, heads=2, kv_heads=1, requires_grad=True)
    fast, slow = (hierarchical_attention(q, k, v, forest, backend=b) for b in ("torch", "reference"))
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-10)
    for a, b in zip(gradients(fast, [q, k, v]), gradients(slow, [q, k, v]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_the_defaults_of_both_functions_are_the_same():
    attend, of_energy = (inspect.signature(f).parameters for f in (hierarchical_attention, energy))
    assert set(attend) - set(of_energy) == {"v", "mixing"}
    assert all(attend[name] == of_energy[name] for name in of_energy)
    assert attend["include_self"].default is True
    assert inspect.signature(multiscale_attention).parameters["include_self"].default is True


def test_refusals_list_every_backend():
    forest = Hierarchy.flat([3])
    inputs = random_inputs(forest, 0)
    with pytest.raises(HsaError, match=r"(?s)torch: entmax needs.*reference: entmax needs"):
        hierarchical_attention(*inputs, forest, normalizer=Entmax(), family_attention="linear")
    with pytest.raises(HsaError, match="reference: the reference needs family_attention='exact'"):
        hierarchical_attention(*inputs, forest, backend="reference", family_attention="linear")
    with pytest.raises(HsaError, match=r"expected 'auto' or one of \['triton', 'torch', 'reference'\], got 'cuda'"):
        hierarchical_attention(*inputs, forest, backend="cuda")


def test_memory_stays_linear():
    """Check that no tensor is larger than four times q, forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes = [x.untyped_storage().nbytes() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
            Largest.numel = max([Largest.numel, *sizes])
            return result

    ragged = Hierarchy.from_nested([[[5 + i % 36 for i in range(j, j + 5)] for j in range(0, 150, 5)]])
    for forest in (Hierarchy.regular([4096], (16, 8, 8, 16)), ragged):
        q, k, v = random_inputs(forest, 0, heads=2, kv_heads=2, dim=64, value_dim=64, requires_grad=True)
        q, k, v = (x.detach().float().requires_grad_() for x in (q, k, v))
        Largest.numel = 0
        with Largest():
            hierarchical_attention(q, k, v, forest).sum().backward()
        assert q.nbytes <= Largest.numel <= 4 * q.nbytes


@pytest.mark.slow
def test_a_quarter_million_leaves_forward_and_backward():
    forest = Hierarchy.regular([262_144], (16, 8, 8, 16))
    q, k, v = (torch.randn(262_144, 8, 64, requires_grad=True) for _ in range(3))
    hierarchical_attention(q, k, v, forest).sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"q": lambda q: q[:-1]},
            r"q: expected 11 rows, the number of leaves in Hierarchy.*, got 10 rows\. .*per leaf",
        ),
        ({"v": lambda v: v[:-1]}, r"v: expected 11 rows, .*, got 10 rows"),
        ({"k": lambda k: k.float()}, r"k: expected dtype torch.float64, as q, got dtype torch.float32"),
        ({"k": lambda k: k[..., :2]}, r"k: expected head_dim 3, as q, got head_dim 2"),
        ({"k": lambda k: k[:, [0, 1, 0, 1]]}, r"k: expected 6 heads, as q, or a divisor of that .*, got 4 heads"),
        ({"v": lambda v: v[:, :1]}, r"v: expected 2 heads, as k, got 1 heads"),
        ({"q": lambda q: q[None]}, r"q: expected \[leaves, .*\], got shape \(1, 11, 6, 3\)\. .*hsa.Padding"),
        ({"q": lambda q: q.long()}, r"q: expected a floating-point dtype.*, got dtype torch.int64"),
        ({"q": lambda q: q.tolist()}, r"q: expected a tensor.*, got list"),
        ({"q": lambda q: q[:, :0]}, r"q: expected at least one head.*, got shape \(11, 0, 3\)"),
        ({"v": lambda v: v.to(torch.float8_e4m3fn)}, r"v: expected a floating.*, got dtype torch.float8_e4m3fn"),
        ({"v": lambda v: v.to("meta")}, r"v: expected device cpu, as the hierarchy, got device meta"),
    ],
)
def test_invalid_inputs(change, message):
    forest = Hierarchy.from_nested([[3, 2], [6]])
    inputs = dict(zip("qkv", random_inputs(forest, 0), strict=True))
    inputs = {name: change.get(name, lambda x: x)(x) for name, x in inputs.items()}
    with pytest.raises(HsaError, match=message):
        hierarchical_attention(**inputs, hierarchy=forest)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (torch.zeros(11, 2), r"positions: expected \[16 nodes, dim\].*, got shape \(11, 2\)"),
        (torch.zeros(16, 5, 2), r"\[16 nodes, 6 heads, dim\]"),
        (
            torch.zeros(16, 2, dtype=torch.float32),
            r"positions: expected dtype torch.float64, .*, got dtype torch.float32",
        ),
        ("sinusoidal", r"positions: expected a tensor, got str"),
        (torch.zeros(16, 2, dtype=torch.long), r"positions: expected dtype torch.float64, as q, got dtype torch.int64"),
    ],
)
def test_invalid_positions(positions, message):
    forest = Hierarchy.from_nested([[3, 2], [6]])
    with pytest.raises(HsaError, match=message):
        hierarchical_attention(*random_inputs(forest, 0), forest, positions=positions)


def test_the_users_values_are_never_overwritten():
    """A family attention may return its values, which the sweeps must not overwrite even if no gradient is needed."""
    forest = Hierarchy.regular([8], (2, 2))
    q, k, v = random_inputs(forest, 0, kv_heads=6)
    before = v.clone()
    through = hierarchical_attention(q, k, v, forest, family_attention=lambda q, k, v, b, m, *, scale: (v, q[..., 0]))
    assert torch.equal(v, before)
    assert not torch.equal(through, v)


def test_unknown_family_attention():
    forest = Hierarchy.flat([3])
    for wrong in (["exact"], None):
        with pytest.raises(HsaError, match="family_attention: expected"):
            hierarchical_attention(*random_inputs(forest, 0), forest, family_attention=wrong)
    with pytest.raises(
        HsaError, match=r"expected a function that returns .*\(out, lse\), got a function that returned Tensor"
    ):
        hierarchical_attention(*random_inputs(forest, 0), forest, family_attention=lambda q, *_, scale: q)
    with pytest.raises(HsaError, match=r"family_attention: expected one of.*, got 'fast'"):
        hierarchical_attention(*random_inputs(forest, 0), forest, family_attention="fast")


def test_two_buckets_whose_entries_are_the_members_in_order():
    """A small family of subtrees comes before a large one."""
    tree = Hierarchy.from_nested([[[1, 1], [1] * 200]])
    q, k, v = torch.randn(3, tree.num_leaves, 2, 3, dtype=torch.float64).unbind(0)
    expected = hierarchical_attention(q, k, v, tree, backend="reference", include_self=True)
    torch.testing.assert_close(hierarchical_attention(q, k, v, tree, include_self=True), expected)
