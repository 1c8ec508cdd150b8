"""Properties of alignments, redundancy and sums of kernels."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa.errors import InvalidInput
from hsa.research.head_kernels.gram import (
    alignment_matrix,
    centred,
    centred_alignment,
    effective_number,
    input_conditional,
    linear_grams,
    redundancy,
    similarity_gram,
)
from hsa.research.head_kernels.pruning import Curve, at_random, lowest_weight_first, most_redundant_first, steps

seeds = st.integers(0, 10_000)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def features(seed, heads=5, n=13, dim=3):
    return list(torch.randn(heads, n, dim, dtype=torch.float64, generator=generator(seed)))


def symmetric(seed, heads=5, n=13):
    """Return symmetric matrices with eigenvalues of both signs."""
    some = torch.randn(heads, n, n, dtype=torch.float64, generator=generator(seed))
    return some + some.mT


@given(seeds)
def test_centring_subtracts_the_mean_of_the_features(seed):
    rows = features(seed, heads=1)[0]
    shifted = rows - rows.mean(0)
    torch.testing.assert_close(centred(rows @ rows.T), shifted @ shifted.T)
    n = len(rows)
    middle = torch.eye(n, dtype=torch.float64) - 1 / n
    some = symmetric(seed)
    torch.testing.assert_close(centred(some), middle @ some @ middle)


@given(seeds, st.floats(0.01, 100), st.floats(-50, 50))
def test_alignment_ignores_scale_and_shift(seed, scale, shift):
    one, other = symmetric(seed, 2)
    assert centred_alignment(one, one) == pytest.approx(1)
    assert centred_alignment(one, -one) == pytest.approx(-1)
    expected = centred_alignment(one, other)
    assert -1 <= expected <= 1
    assert centred_alignment(scale * one + shift, other) == pytest.approx(expected, abs=1e-9)
    assert centred_alignment(other, one) == pytest.approx(expected)
    rows = torch.randn(13, generator=generator(seed + 1), dtype=torch.float64)
    shifted = one + rows[:, None] + rows  # as if features were shifted
    assert centred_alignment(shifted, other) == pytest.approx(expected, abs=1e-9)


@given(seeds)
def test_linear_cka(seed):
    """Compare with ‖XᵀY‖² / (‖XᵀX‖ ‖YᵀY‖) of centred features, the formula of Kornblith et al."""
    x, y = features(seed, 2)
    xc, yc = x - x.mean(0), y - y.mean(0)
    cka = (xc.T @ yc).norm() ** 2 / ((xc.T @ xc).norm() * (yc.T @ yc).norm())
    assert centred_alignment(x @ x.T, y @ y.T) == pytest.approx(float(cka))


@given(seeds)
def test_alignment_matrix(seed):
    for grams in (symmetric(seed), linear_grams(features(seed))):
        table = alignment_matrix(grams)
        assert torch.equal(table, table.T)
        for i in range(5):
            for j in range(5):
                assert float(table[i, j]) == pytest.approx(centred_alignment(grams[i], grams[j]), abs=1e-12)
        assert float(torch.linalg.eigvalsh(table).min()) > -1e-10
    assert float(alignment_matrix(linear_grams(features(seed))).min()) >= 0


def test_constant_kernels_have_no_alignment():
    grams = torch.cat([linear_grams(features(1, 2)), torch.full((1, 13, 13), 7.3, dtype=torch.float64)])
    table = alignment_matrix(grams)
    assert table[2].abs().max() == table[:, 2].abs().max() == 0
    assert float(redundancy(table)[2]) == 1
    assert effective_number(table) == pytest.approx(effective_number(table[:2, :2]))
    assert most_redundant_first(table)[0] == 2
    assert effective_number(torch.zeros(3, 3)) == 0


@given(seeds)
def test_duplicates(seed):
    grams = linear_grams(features(seed, 3))
    table = alignment_matrix(torch.cat([grams, 2.5 * grams[1:2] + 1]))
    assert redundancy(table)[[1, 3]].tolist() == pytest.approx([1, 1])
    assert redundancy(table)[0] == pytest.approx(float(table[0, 1:].max()))
    assert redundancy(table)[0] < 0.999
    assert most_redundant_first(table)[0] in (1, 3)
    first, *others = most_redundant_first(table)
    left = [i for i in range(4) if i != first]  # without its duplicate, it is no longer redundant
    assert others == [left[i] for i in most_redundant_first(table[left][:, left])]
    again = alignment_matrix(torch.cat([grams, grams, grams]))
    assert effective_number(again) == pytest.approx(effective_number(alignment_matrix(grams)))


def test_effective_number():
    """Unrelated kernels count fully; k groups of equal kernels count as k."""
    apart = torch.block_diag(*[torch.ones(3, 3)] * 4)
    assert effective_number(apart) == pytest.approx(4)
    assert effective_number(torch.tensor([[1.0, 0.5], [0.5, 1.0]])) == pytest.approx(
        np.exp(-0.75 * np.log(0.75) - 0.25 * np.log(0.25))
    )
    assert redundancy(torch.ones(1, 1)).tolist() == [0]
    assert redundancy(torch.tensor([[1.0, -0.4], [-0.4, 1.0]], dtype=torch.float64)).tolist() == [-0.4, -0.4]


@given(seeds)
def test_conditional_sums(seed):
    rows = features(seed)
    grams, source = linear_grams(rows), generator(seed)
    weights = torch.rand(5, dtype=torch.float64, generator=source)
    same = input_conditional(grams, weights.expand(13, -1))
    torch.testing.assert_close(same, (weights.square()[:, None, None] * grams).sum(0))
    beta = torch.rand(13, 5, dtype=torch.float64, generator=source).softmax(-1)
    result = input_conditional(grams, beta)
    weighted = torch.cat([b[:, None] * head for b, head in zip(beta.T, rows, strict=True)], 1)
    torch.testing.assert_close(result, weighted @ weighted.T)  # weighted heads, concatenated
    assert float(torch.linalg.eigvalsh(result).min()) > -1e-10


@given(seeds)
def test_similarities_of_tokens(seed):
    q, k = torch.randn(2, 11, 3, dtype=torch.float64, generator=generator(seed))
    gram, share = similarity_gram(q, k, 0.7)
    torch.testing.assert_close(gram, gram.T)
    torch.testing.assert_close(gram[2, 5], 0.35 * (q[2] @ k[5] + q[5] @ k[2]))
    whole = (0.7 * q @ k.T).square().sum()
    assert gram.square().sum() + share * whole == pytest.approx(float(whole))  # the parts are orthogonal
    assert similarity_gram(q, q, 0.7)[1] == pytest.approx(0, abs=1e-12)
    turn = torch.tensor([[0.0, 1], [-1, 0]], dtype=torch.float64)
    assert similarity_gram(q[:, :2], q[:, :2] @ turn, 0.7)[1] == pytest.approx(1)
    assert similarity_gram(0 * q, k, 0.7)[1] == 0


@given(seeds)
def test_most_redundant_heads_are_removed_first(seed):
    table = alignment_matrix(symmetric(seed, 7))
    order = most_redundant_first(table)
    assert sorted(order) == list(range(7))
    left = list(range(7))
    for head in order[:-1]:
        assert redundancy(table[left][:, left])[left.index(head)] == redundancy(table[left][:, left]).max()
        left.remove(head)


def test_tie_between_two_heads():
    """Remove the one of the two most similar heads that is also similar to others."""
    table = torch.eye(4)
    for i, j, value in [(0, 1, 0.9), (1, 2, 0.5), (1, 3, 0.5), (2, 3, 0.6)]:
        table[i, j] = table[j, i] = value
    assert most_redundant_first(table)[0] == 1


def test_other_orders():
    weights, slack = torch.tensor([0.2, 0.0, 0.8, 0.0]), torch.tensor([0.0, -0.1, 0.0, -0.3])
    assert lowest_weight_first(weights, slack) == [3, 1, 0, 2]
    assert sorted(at_random(11, 5)) == list(range(11))
    assert at_random(11, 5) == at_random(11, 5) != at_random(11, 6)


@given(st.integers(1, 150), st.integers(1, 20))
def test_steps(heads, points):
    counts = steps(heads, points)
    assert (counts[0], counts[-1]) == (0, heads)
    assert counts == sorted(set(counts))
    assert len(counts) <= points + 1
    assert len(counts) == heads + 1 or points < heads


def test_removable_heads():
    curve = Curve("c", [0, 1, 3, 7], [[0.9, 0.9, 0.88, 0.9], [0.9, 0.89, 0.9, 0.9]])
    assert curve.mean == pytest.approx([0.9, 0.895, 0.89, 0.9])
    assert curve.removable(0.007) == 1  # points after a drop do not count
    assert curve.removable(0.004) == 0
    assert curve.removable(0.2) == 7


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: centred(torch.ones(2, 3)), r"gram: expected .*, got shape \(2, 3\)"),
        (lambda: centred(torch.full((2, 2), torch.nan)), "gram: expected finite values, got infinite or NaN values"),
        (lambda: alignment_matrix(torch.ones(3, 3)), r"grams: expected .*, got shape \(3, 3\)"),
        (lambda: alignment_matrix(torch.ones(0, 3, 3)), "grams: expected .*, got shape"),
        (lambda: centred_alignment(torch.ones(3, 3), torch.ones(2, 2)), r"other: expected .*, got shape \(2, 2\)"),
        (lambda: input_conditional(torch.ones(5, 3, 3), torch.ones(5, 3)), r"weights: expected .*, got shape \(5, 3\)"),
        (lambda: similarity_gram(torch.ones(5, 3), torch.ones(5, 2), 1), r"k: expected .*, got shape \(5, 2\)"),
        (lambda: effective_number(torch.ones(2, 3)), "alignment: expected .*, got shape"),
        (lambda: steps(5, 0), "points: expected .*, got 0"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(InvalidInput, match=message):
        call()
