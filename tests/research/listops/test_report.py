from types import SimpleNamespace

import numpy as np
import pytest

from hsa.research.listops.generator import Expression
from hsa.research.listops.report import by_length, summary
from hsa.training.data.data_set import Example, build


def test_accuracy_by_length_splits_into_equal_parts():
    lengths = np.repeat([30, 20, 60, 50, 40], 7)
    right = np.repeat([1, 1, 0, 0, 1], 7) * np.tile([1, 1, 1, 1, 1, 0, 0], 5)
    shares = by_length(right, lengths)
    assert list(shares) == [20, 30, 40, 50, 60]
    assert list(shares.values()) == pytest.approx([5 / 7, 5 / 7, 5 / 7, 0, 0])
    assert list(by_length(np.array([True]), np.array([3]))) == [3.0]  # fewer expressions than parts


def results(**accuracies):
    return [SimpleNamespace(model=name, scores=SimpleNamespace(accuracy=share)) for name, share in accuracies.items()]


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        (
            {"flat": 0.3, "hierarchical": 0.4, "multiscale": 0.61, "deepsets": 0.35},
            "multiscale, which knows the tree of an expression, evaluates 61% of them correctly; deepsets, which does not "
            "know the tree of an expression, evaluates 35% of them correctly; the most frequent answer is right for 75%.",
        ),
        (
            {"hierarchical+talking": 0.4},
            "hierarchical+talking, which knows the tree of an expression, evaluates 40% of them correctly; the most "
            "frequent answer is right for 75%.",
        ),
    ],
)
def test_summary_names_the_best_model_of_each_side(accuracies, expected):
    leaves = Expression(0, (1, 2)).signal()
    prepared = SimpleNamespace(test=build([Example(leaves, answer, "") for answer in "1101"], "classification"))
    assert summary(prepared, results(**accuracies)) == expected
