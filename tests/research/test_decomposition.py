"""CP decomposition: exact and planted ones, errors that never rise, and invalid input."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa.errors import InvalidInput
from hsa.research.decomposition import CP, decompose, exact_cp, relative_error

SHAPES = [(3, 5, 7), (7, 3, 5), (5, 7, 3), (1, 3, 2), (3, 3, 3)]


def random_tensor(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_cp(rank, dims=(5, 7, 11), seed=0):
    return CP(*(random_tensor(rank, dim, seed=seed + i) for i, dim in enumerate(dims)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_exact_cp_equals_the_tensor_and_has_the_smallest_rank_bound(shape, lead):
    tensor = random_tensor(*lead, *shape)
    cp = exact_cp(tensor)
    assert cp.rank == min(a * b for a, b in itertools.combinations(shape, 2))
    assert torch.equal(cp.tensor(), tensor)


@settings(max_examples=15)
@given(st.permutations((3, 5, 7)), st.integers(1, 4), st.integers(0, 1000))
def test_planted_factors_of_any_orientation_are_recovered(dims, rank, seed):
    """A random sum of few outer products has one decomposition of that rank; a start near it converges to it."""
    planted = random_cp(rank, dims, seed)
    tensor = planted.tensor()
    near = CP(
        *(factor + 0.05 * random_tensor(*factor.shape, seed=seed) for factor in (planted.a, planted.b, planted.c))
    )
    result = decompose(tensor, rank, start=near, iterations=300, tolerance=0)
    assert result.error < 1e-5
    assert relative_error(tensor, result.cp) == pytest.approx(result.error, abs=1e-12)
    torch.testing.assert_close(result.cp.tensor(), tensor, atol=1e-4, rtol=0)


@pytest.mark.parametrize("seed", range(3))
def test_planted_factors_are_recovered_from_a_random_start(seed):
    assert decompose(random_cp(3).tensor(), 3, iterations=1000, tolerance=0, seed=seed).error < 1e-6


def test_error_is_the_distance_relative_to_the_norm():
    tensor = random_tensor(3, 7, 5)
    result = decompose(tensor, 4, iterations=7)
    expected = (tensor - result.cp.tensor()).norm() / tensor.norm()
    assert result.error == pytest.approx(float(expected), rel=1e-10)
    assert result.iterations <= 7
    assert [factor.shape for factor in (result.cp.a, result.cp.b, result.cp.c)] == [(4, 3), (4, 7), (4, 5)]


@pytest.mark.parametrize("dense", [True, False])
def test_error_falls_with_iterations(dense):
    source = random_cp(17, (3, 7, 5))
    source = source.tensor() if dense else source
    start = random_cp(5, (3, 7, 5), seed=9)
    errors = [decompose(source, 5, start=start, iterations=n, tolerance=0).error for n in range(30)]
    assert all(after < before for before, after in itertools.pairwise(errors[:4]))
    assert all(after <= before * (1 + 1e-9) for before, after in itertools.pairwise(errors))


def test_error_falls_with_the_rank_to_zero():
    tensor = random_tensor(3, 5, 7)
    errors = [decompose(tensor, rank, iterations=300).error for rank in (1, 3, 6, 15)]
    assert all(after < before for before, after in itertools.pairwise(errors))
    assert errors[-1] < 1e-12


def test_dense_tensor_and_its_factors_give_the_same_result():
    source, start = random_cp(17, (5, 11, 7)), random_cp(4, (5, 11, 7), seed=9)
    dense, factored = (decompose(x, 4, start=start, iterations=9, tolerance=0) for x in (source.tensor(), source))
    assert dense.iterations == factored.iterations == 9
    torch.testing.assert_close(dense.cp.tensor(), factored.cp.tensor(), atol=1e-8, rtol=0)


def test_an_iteration_solves_each_least_squares_problem():
    """The factor solved for last is the best for the two others."""
    tensor = random_tensor(3, 5, 7)
    cp = decompose(tensor, 4, iterations=1).cp
    pairs = torch.einsum("rb,rc->bcr", cp.b, cp.c).reshape(-1, 4)
    best = torch.linalg.lstsq(pairs, tensor.reshape(3, -1).T).solution
    torch.testing.assert_close(cp.a, best, atol=1e-5, rtol=0)


def test_cp_of_sufficient_rank_is_unchanged():
    source = random_cp(4, (5, 11, 7))
    same, padded = decompose(source, 4), decompose(source, 9)
    assert (same.error, padded.error) == (pytest.approx(0, abs=1e-12), pytest.approx(0, abs=1e-12))
    assert padded.cp.a.shape == (9, 5)
    torch.testing.assert_close(padded.cp.tensor(), source.tensor(), atol=1e-12, rtol=0)


@pytest.mark.parametrize("amounts", [(1.0, 1.0), (1.0, -0.3)])
def test_components_shared_by_slices_are_kept_once(amounts):
    """Slices with the same matrices in different amounts need half of the components, without any iteration."""
    b, c = random_tensor(3, 7), random_tensor(3, 11, seed=1)
    a = torch.cat([amount * torch.eye(2, dtype=torch.float64)[[i] * 3] for i, amount in enumerate(amounts)])
    result = decompose(CP(a, torch.cat([b, b]), torch.cat([c, c])), 3, iterations=0)
    assert result.error < 1e-7


def test_initial_components_are_the_strongest():
    """Choose the orthogonal components with the largest norms, in whichever factor these are."""
    amounts, lengths = torch.tensor([[2.0, 5.0, 1.0, 3.0], [2.0, 1.0, 4.5, 0.1]], dtype=torch.float64)
    source = CP(torch.diag(amounts), torch.eye(4, 7).double() * lengths[:, None], torch.eye(4, 5).double())
    squares = (amounts * lengths).square()
    for rank, kept in ((1, [1]), (2, [1, 2]), (3, [0, 1, 2])):
        left = 1 - squares[kept].sum() / squares.sum()
        assert decompose(source, rank, iterations=0).error == pytest.approx(float(left.sqrt()))


def test_component_explained_by_others_is_not_chosen():
    """The two strongest are nearly parallel; the weakest is orthogonal to both."""
    one, two, three = torch.eye(3, 7, dtype=torch.float64)
    source = CP(
        torch.eye(3).double(), torch.stack([2 * one, 1.9 * one + 0.01 * two, three]), torch.eye(5).double()[[0, 0, 1]]
    )
    assert decompose(source, 2, iterations=0).error < 0.01


def test_collinear_components_stay_finite():
    """This tensor has no best approximation of rank 2: factors grow and become collinear."""
    x, y = random_tensor(2, 5)
    tensor = sum(torch.einsum("a,b,c->abc", *parts) for parts in ((x, x, y), (x, y, x), (y, x, x)))
    result = [decompose(tensor, 2, iterations=300, tolerance=0, seed=seed) for seed in range(3)]
    assert min(each.error for each in result) < 1e-4
    for each in result:
        assert each.error < 0.1
        assert float(each.cp.a.norm()) > 1000
        assert all(bool(factor.isfinite().all()) for factor in (each.cp.a, each.cp.b, each.cp.c))


@pytest.mark.parametrize("source", [torch.zeros(2, 3, 5), CP(torch.zeros(2, 2), torch.ones(2, 3), torch.ones(2, 5))])
def test_zero_tensor(source):
    result = decompose(source, 1)
    assert (result.error, result.iterations) == (0.0, 0)
    assert not result.cp.tensor().any()


def test_copies_of_one_component():
    ones = CP(torch.ones(4, 3), torch.ones(4, 5), torch.ones(4, 7))
    result = decompose(ones, 3)
    assert result.error < 1e-6
    torch.testing.assert_close(result.cp.tensor(), ones.tensor())


def test_dtype_is_kept():
    result = decompose(random_tensor(3, 5, 7).float(), 15)
    assert result.cp.a.dtype == torch.float32
    assert result.error < 1e-6


def test_result_has_no_gradient():
    assert not decompose(random_tensor(3, 5, 7).requires_grad_(), 2, iterations=2).cp.a.requires_grad


@pytest.mark.parametrize("rank", [0, 16, -1, 2.0, True])
def test_rank_out_of_range(rank):
    with pytest.raises(InvalidInput, match=f"rank: expected 1 to 15, .* of shape 5 × 7 × 3, got {rank}"):
        decompose(random_tensor(5, 7, 3), rank)


@pytest.mark.parametrize(
    ("source", "where"),
    [
        (torch.ones(3, 5), "tensor"),
        (torch.ones(2, 3, 5, 7), "tensor"),
        (torch.ones(3, 0, 5), "tensor"),
        (torch.full((3, 5, 7), torch.nan), "tensor: expected finite values, got"),
        (CP(torch.ones(2, 3), torch.ones(3, 3), torch.ones(2, 3)), r"tensor: expected three factors .*, got \[2, 3\]"),
        (CP(torch.ones(2, 3), torch.ones(2, 3), torch.full((2, 3), torch.inf)), "tensor: expected finite values, got"),
    ],
)
def test_invalid_tensors(source, where):
    with pytest.raises(InvalidInput, match=where):
        decompose(source, 1)


def test_invalid_start():
    with pytest.raises(InvalidInput, match=r"start: expected .* shapes \[2, 3\], \[2, 7\], \[2, 5\], got"):
        decompose(random_tensor(3, 7, 5), 2, start=random_cp(2, (3, 5, 7)))
    with pytest.raises(InvalidInput, match="tensor"):
        exact_cp(torch.ones(3, 5))
