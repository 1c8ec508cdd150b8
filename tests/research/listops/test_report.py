from types import SimpleNamespace

import numpy as np
import pytest

from hsa.research.listops.generator import Expression
from hsa.research.listops.report import by_depth, depths, summary
from hsa.training.data.data_set import Example, build


def nested(levels):
    return Expression(0, (1, 2 if levels == 1 else nested(levels - 1)))


def test_depth_is_the_number_of_nested_operations():
    examples = [Example(nested(levels).signal(), "1", str(levels)) for levels in (3, 1, 2, 5)]
    assert depths(build(examples, "classification")).tolist() == [3, 1, 2, 5]


def test_accuracy_by_depth_leaves_out_rare_depths():
    depth = np.repeat([1, 2, 4], [40, 20, 19])
    right = np.concatenate([np.repeat([True, False], [10, 30]), np.ones(20, bool), np.zeros(19, bool)])
    assert by_depth(right, depth) == {1: 0.25, 2: 1.0}


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
