import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsa.training.metrics import class_scores, number_scores

CLASSES = 5
pairs = st.lists(st.tuples(st.integers(0, CLASSES - 1), st.integers(0, CLASSES - 1)), min_size=1, max_size=30)
numbers = st.floats(-100, 100).map(lambda x: round(x, 3))
number_pairs = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=30)


def arrays(listed):
    return (np.array(column) for column in zip(*listed, strict=True))


@given(pairs)
def test_scores_of_classes(listed):
    predicted, true = arrays(listed)
    scores = class_scores(predicted, true, CLASSES)
    f1 = []
    for label in set(predicted.tolist()) | set(true.tolist()):
        right = sum(p == t == label for p, t in listed)
        precision = right / max(1, (predicted == label).sum())
        recall = right / max(1, (true == label).sum())
        f1.append(2 * precision * recall / (precision + recall) if right else 0.0)
    assert scores.main == scores.accuracy == pytest.approx(np.mean(predicted == true))
    assert scores.f1 == pytest.approx(np.mean(f1))


@given(pairs)
def test_renamed_classes_score_the_same(listed):
    predicted, true = arrays(listed)
    renamed = np.array([3, 0, 4, 1, 2])
    ours, theirs = class_scores(predicted, true, CLASSES), class_scores(renamed[predicted], renamed[true], CLASSES)
    assert (ours.accuracy, ours.f1) == pytest.approx((theirs.accuracy, theirs.f1))


@given(number_pairs)
def test_scores_of_numbers(listed):
    predicted, true = arrays(listed)
    scores = number_scores(predicted, true)
    assert scores.mean_absolute_error == pytest.approx(np.mean([abs(p - t) for p, t in listed]))
    if len(set(true.tolist())) > 1:
        assert scores.main == scores.r2
        assert scores.r2 == pytest.approx(
            1 - sum((p - t) ** 2 for p, t in listed) / sum((t - true.mean()) ** 2 for _, t in listed)
        )


@given(st.lists(numbers, min_size=2, max_size=30, unique=True))
def test_r2_of_perfect_mean_and_constant_predictions(listed):
    true = np.array(listed)
    assert number_scores(true, true).r2 == 1
    assert number_scores(np.full_like(true, true.mean()), true).r2 == pytest.approx(0, abs=1e-9)
    assert number_scores(true, np.full_like(true, 3.0)).r2 == 0
