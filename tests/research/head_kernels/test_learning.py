"""Learned weights of kernels: optimality, and performance on held-out examples."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa.errors import InvalidInput
from hsa.research.head_kernels.gram import centred, centred_alignment, input_conditional, linear_grams
from hsa.research.head_kernels.learning import (
    CONDITIONAL,
    FLAT,
    OWN,
    SINGLE,
    UNIFORM,
    Targets,
    can_halve,
    compare_sums,
    fit_gating,
    flat_mkl,
    halves,
    leave_one_out,
    ridge_score,
    scaled,
    target_kernel,
)
from tests.research.head_kernels.test_gram import features, generator, seeds, symmetric


def weighted(weights, grams):
    return (weights[:, None, None] * grams).sum(0)


def labelled(seed, n=17, classes=3):
    return Targets.of_classes([i % classes for i in np.random.default_rng(seed).permutation(n)])


@given(seeds)
def test_known_weights_are_recovered(seed):
    grams = linear_grams(features(seed, heads=4, n=19))
    weights = torch.tensor([0.5, 0.0, 0.2, 0.3], dtype=torch.float64)
    result = flat_mkl(grams, 3 * weighted(weights, grams) + 1)
    torch.testing.assert_close(result.weights, weights, atol=1e-8, rtol=0)
    assert result.alignment == pytest.approx(1)


@given(seeds, st.booleans())
def test_optimality(seed, positive):
    """The Karush-Kuhn-Tucker conditions hold, and no other weights align better."""
    grams = linear_grams(features(seed, n=17)) if positive else symmetric(seed, n=17)
    target = target_kernel(labelled(seed))
    result = flat_mkl(grams, target)
    assert float(result.weights.min()) >= 0
    assert float(result.weights.sum()) == pytest.approx(1)
    assert result.alignment == pytest.approx(centred_alignment(weighted(result.weights, grams), target))
    single = max(centred_alignment(gram, target) for gram in grams)
    assert result.alignment >= single - 1e-9
    if single > 0:
        flat, wanted = centred(grams).flatten(1), centred(target).flatten()
        unit = flat / flat.norm(dim=1, keepdim=True)
        v = result.weights * flat.norm(dim=1)
        v = v * (v @ unit @ wanted) / (v @ unit @ unit.T @ v)  # the best multiple
        gradient = unit @ wanted - unit @ unit.T @ v
        assert float(gradient.max()) <= 1e-9 * float(wanted.norm())
        assert float((gradient * v).abs().max()) <= 1e-9 * float(wanted.norm() * v.norm())
        torch.testing.assert_close(result.slack, gradient / wanted.norm(), atol=1e-9, rtol=0)
    uniform = torch.full((5,), 0.2, dtype=torch.float64)
    for weights in (uniform, *torch.rand(9, 5, dtype=torch.float64, generator=generator(seed))):
        assert result.alignment >= centred_alignment(weighted(weights, grams), target) - 1e-9


@given(seeds)
def test_equals_search_over_all_subsets(seed):
    """Solve the quadratic programme by trying every set of non-zero weights."""
    grams, target = linear_grams(features(seed, n=17)), target_kernel(labelled(seed))
    flat, wanted = centred(grams).flatten(1), centred(target).flatten()
    products, towards = flat @ flat.T, flat @ wanted
    best, weights = np.inf, None
    for size in range(1, 6):
        for some in map(list, itertools.combinations(range(5), size)):
            v = torch.zeros(5, dtype=torch.float64)
            v[some] = torch.linalg.solve(products[some][:, some], towards[some])
            loss = float(v @ products @ v - 2 * towards @ v)
            if v.min() >= 0 and loss < best:
                best, weights = loss, v / v.sum()
    torch.testing.assert_close(flat_mkl(grams, target).weights, weights, atol=1e-8, rtol=0)


@given(seeds)
def test_best_single_kernel_may_get_no_weight(seed):
    """The third kernel is closest to the target, but contains a part that the sum of the first two avoids."""
    one, other, wrong = (gram / gram.norm() for gram in linear_grams(features(seed, heads=3, n=17)))
    grams = torch.stack([one, other, one + other + 0.4 * wrong])
    target = one + other - 0.1 * wrong
    result = flat_mkl(grams, target)
    assert result.weights[2] == 0
    assert float(result.weights.min()) >= 0
    assert result.alignment > centred_alignment(grams[2], target)
    single = [centred_alignment(gram, target) for gram in grams]
    assert single[2] == max(single)


def test_many_kernels_with_duplicates():
    """Use more kernels than dimensions, each twice."""
    few = torch.cat([linear_grams(features(3, heads=60, n=9, dim=2))] * 2)
    target = target_kernel(labelled(1, 9))
    result = flat_mkl(few, target)
    assert bool(torch.isfinite(result.weights).all())
    assert float(result.slack.max()) < 1e-9
    assert result.alignment >= max(centred_alignment(gram, target) for gram in few)
    assert result.alignment == pytest.approx(flat_mkl(few[:60], target).alignment)


def test_constant_and_negative_kernels():
    constant = torch.ones(3, 7, 7)
    target = target_kernel(labelled(1, 7))
    assert flat_mkl(constant, target).weights.tolist() == pytest.approx([1 / 3] * 3)
    assert flat_mkl(constant, target).alignment == 0
    one = torch.cat([constant, target[None]])
    assert flat_mkl(one, target).weights.tolist() == [0, 0, 0, 1]
    against = torch.stack([-target, -target + torch.eye(7), torch.ones(7, 7)])
    result = flat_mkl(against, target)
    assert result.weights.tolist() == [0, 1, 0]  # the best of negative alignments
    assert result.alignment < 0
    with pytest.raises(InvalidInput, match=r"target: expected .*, got a constant kernel"):
        flat_mkl(against, torch.ones(7, 7))


def test_targets():
    numbers = Targets.of_numbers([1.0, 2.0, 6.0])
    expected = torch.tensor([[4.0, 2, -6], [2, 1, -3], [-6, -3, 9]], dtype=torch.float64)
    torch.testing.assert_close(target_kernel(numbers), expected)
    assert len(numbers.part(torch.tensor([0, 2]))) == 2
    for call, message in [
        (lambda: Targets.of_classes(["a", "a"]), "label: expected at least 2 classes, got nothing but 'a'"),
        (lambda: Targets.of_classes([]), "label: no labels; expected at least 2 classes"),
        (lambda: Targets.of_numbers([2.0, 2.0]), "label: expected finite numbers .* not all equal, got equal numbers"),
        (lambda: Targets.of_numbers([2.0, np.nan]), "label: expected finite numbers .*, got infinite or NaN values"),
        (lambda: Targets.of_numbers([]), "label: expected finite numbers .*, got no numbers"),
    ]:
        with pytest.raises(InvalidInput, match=message):
            call()


@given(st.lists(st.integers(0, 3), min_size=18, max_size=60), seeds)
def test_halves(labels, seed):
    if len(set(labels)) < 2:
        return
    targets = Targets.of_classes(labels)
    if not can_halve(targets):
        with pytest.raises(InvalidInput, match="label: expected at least 18 examples, and at least 2"):
            halves(targets, seed)
        return
    learn, hold = halves(targets, seed)
    assert sorted([*learn.tolist(), *hold.tolist()]) == list(range(len(labels)))
    for label in set(labels):
        both = [sum(labels[i] == label for i in part.tolist()) for part in (learn, hold)]
        assert abs(both[0] - both[1]) <= 1
    assert all(len({labels[i] for i in part.tolist()}) > 1 for part in (learn, hold))


def test_too_few_to_halve():
    assert not can_halve(Targets.of_classes("ab" * 8))
    assert can_halve(Targets.of_classes("ab" * 9))
    assert not can_halve(Targets.of_classes("a" * 30 + "b"))
    assert can_halve(Targets.of_classes("a" * 30 + "bb"))
    assert can_halve(Targets.of_numbers(np.arange(18)))


def two_experts(n=80):
    """Return two heads, a switch and classes; the switch tells which head knows the class, the other is random."""
    source = np.random.default_rng(0)
    sign, switch = source.choice([-1.0, 1.0], (2, n))
    outputs = np.stack([np.where(switch > 0, sign, source.choice([-1.0, 1.0], n)), np.where(switch < 0, sign, 0)])
    outputs[1][switch > 0] = source.choice([-1.0, 1.0], int((switch > 0).sum()))
    heads = [torch.tensor(values)[:, None] for values in outputs]
    return heads, torch.tensor(switch)[:, None], Targets.of_classes(sign)


def test_conditional_weights_learn_which_head_is_right():
    heads, switch, targets = two_experts()
    grams, target = linear_grams(heads), target_kernel(targets)
    flat = flat_mkl(grams, target)
    gating = fit_gating(grams, target, switch, flat.weights)
    beta = gating.weights(switch)
    torch.testing.assert_close(beta.sum(1), torch.ones(80, dtype=torch.float64))
    assert gating.steps > 0
    right = (beta.argmax(1) == (switch[:, 0] < 0)).double().mean()
    assert float(right) == 1
    assert centred_alignment(input_conditional(grams, beta), target) > flat.alignment + 0.1


def test_gating_without_a_gain_stays_at_global_weights():
    grams = linear_grams(features(5, n=40))
    target = target_kernel(labelled(5, 40))
    start = flat_mkl(grams, target).weights
    gating = fit_gating(grams, target, torch.zeros(40, 2, dtype=torch.float64), start, steps=0)
    assert (gating.steps, gating.linear.abs().max()) == (0, 0)
    beta = gating.weights(torch.randn(40, 2, dtype=torch.float64)).square()
    torch.testing.assert_close(beta / beta.sum(1, keepdim=True), ((start + 0.002) / 1.01).expand(40, -1))
    with pytest.raises(InvalidInput, match="z: expected at least 9 examples, to hold out a third, got 8"):
        fit_gating(grams[:, :8, :8], target[:8, :8], torch.zeros(8, 2), start)


def test_ridge_regression():
    """Predict linear functions of the features, and fail on noise."""
    rows = torch.randn(31, 3, dtype=torch.float64)
    y = rows @ torch.tensor([1.0, -2, 0.5], dtype=torch.float64) + 4
    learn, hold = torch.arange(20), torch.arange(20, 31)
    gram = rows @ rows.T
    assert ridge_score(gram, Targets.of_numbers(y.numpy()), learn, hold) > 0.999
    assert ridge_score(gram, Targets.of_classes((y > 4).tolist()), learn, hold) > 0.8
    noise = torch.randn(31, dtype=torch.float64)
    assert ridge_score(gram, Targets.of_numbers(noise.numpy()), learn, hold) < 0.5
    assert ridge_score(0 * gram, Targets.of_classes([0, 1, 1] * 10 + [0]), learn, hold) == pytest.approx(
        sum(([0, 1, 1] * 10 + [0])[20:]) / 11
    )
    # The kernel is centred, so that shifts of the features do not matter.
    shifted = (rows + 3) @ (rows + 3).T
    assert ridge_score(shifted, Targets.of_numbers(y.numpy()), learn, hold) > 0.999


@given(seeds, st.sampled_from([1e-3, 0.1, 30.0]))
def test_leaving_one_out(seed, ridge):
    """Compare the closed form with refitting to all other rows, by normal equations with an intercept."""
    n, dim = 11, 23  # more features than rows, so that a fit can be exact
    rows = torch.randn(n, dim, dtype=torch.float64, generator=generator(seed))
    y = torch.randn(n, 2, dtype=torch.float64, generator=generator(seed + 1))
    result = leave_one_out(*torch.linalg.eigh(centred(rows @ rows.T)), y, ridge)
    for i in range(n):
        others = [j for j in range(n) if j != i]
        x, t = rows[others] - rows[others].mean(0), y[others] - y[others].mean(0)
        map_ = torch.linalg.solve(x.T @ x + ridge * torch.eye(dim, dtype=torch.float64), x.T @ t)
        predicted = (rows[i] - rows[others].mean(0)) @ map_ + y[others].mean(0)
        torch.testing.assert_close(result[i], y[i] - predicted, atol=1e-8, rtol=1e-6)


def test_ridge_avoids_overfitting():
    """Use many features, with one that matters."""
    rows = torch.randn(200, 150, dtype=torch.float64)
    y = rows[:, :1] + 2 * torch.randn(200, 1, dtype=torch.float64)
    learn, hold = torch.arange(100), torch.arange(100, 200)
    targets = Targets.of_numbers(y[:, 0].numpy())
    score = ridge_score(rows @ rows.T, targets, learn, hold)
    assert score > -0.1
    assert ridge_score(rows @ rows.T * 1e-6, targets, learn, hold) == pytest.approx(score)  # at any scale


def test_scaling_uses_only_known_rows():
    some = torch.randn(11, 3, dtype=torch.float64) * 7 + 5
    known = torch.arange(6)
    result = scaled(some, known)
    assert result[:6].mean(0).abs().max() < 1e-12
    assert float(result[:6].square().sum(1).mean()) == pytest.approx(1)
    changed = torch.cat([some[:6], 100 * some[6:]])
    assert torch.equal(scaled(changed, known)[:6], result[:6])
    assert scaled(torch.full((11, 3), 2.7), known).abs().max() == 0


@settings(max_examples=3)
@given(seeds)
def test_comparing_sums(seed):
    """One head knows the classes: learned weights prefer it, and improve results on held-out examples."""
    targets = labelled(seed, 48, 2)
    knows = targets.values[:, :1] + 0.1 * torch.randn(48, 1, dtype=torch.float64, generator=generator(seed))
    heads = [*features(seed, heads=6, n=48), 100 * knows]
    own = torch.zeros(48, 7, dtype=torch.float64)
    own[:, 6] = 1
    done = []
    result = {s.name: s for s in compare_sums(heads, targets, own=own, splits=2, seed=seed, watch=done.append)}
    assert list(result) == [UNIFORM, SINGLE, FLAT, CONDITIONAL, OWN]
    assert done == [1, 1]
    for split in range(2):
        learn, _ = halves(targets, seed + split)
        grams = linear_grams([scaled(head[learn], torch.arange(len(learn))) for head in heads])
        best = flat_mkl(grams, target_kernel(targets.part(learn)))
        assert result[FLAT].learned[split] == pytest.approx(best.alignment)
    for name, entry in result.items():
        assert [len(v) for v in (entry.learned, entry.held, entry.score)] == [2, 2, 2]
        assert all(a >= b for a, b in zip(result[FLAT].learned, entry.learned, strict=True)) or name == CONDITIONAL
    for name in (SINGLE, FLAT, CONDITIONAL):
        assert all(a > b for a, b in zip(result[name].held, result[UNIFORM].held, strict=True))
    assert result[SINGLE].held == pytest.approx(result[OWN].held)
    assert min(result[SINGLE].score) > 0.8


def test_numbers_as_targets():
    targets = Targets.of_numbers(np.random.default_rng(0).normal(size=40))
    heads = [targets.values + 0.1 * torch.randn(40, 1), torch.randn(40, 3)]
    result = {s.name: s for s in compare_sums(heads, targets, splits=2)}
    assert min(result[FLAT].score) > 0.9
    assert OWN not in result
