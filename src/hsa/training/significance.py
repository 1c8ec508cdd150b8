"""Margin by which the scores of two models may differ by chance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def margin(first: Sequence[float], second: Sequence[float] | float, examples: int | None) -> float | None:
    """Return the largest difference of two mean scores that chance explains (95 %); None if it cannot be estimated.

        √( (t · spread of the difference over seeds)² + (1.96 · spread of the two accuracies over test examples)² )

    Both models answer the same test examples and tend to err on the same ones, so the second term is an upper estimate.

    Args:
        first, second: Scores, one per seed; a single number for a second model that does not depend on a seed.
        examples: Number of test examples that an accuracy is a share of; None for scores that are not shares, such as R².

    >>> round(margin([0.8], [0.9], 1000), 4)  # one seed: the test examples alone
    0.031
    >>> margin([0.8], [0.9], None) is None
    True
    """
    fixed = isinstance(second, float)
    second = [second] if isinstance(second, float) else second
    seeds = [scores for scores in (first, second) if len(scores) > 1]
    freedom = sum(len(scores) - 1 for scores in seeds)
    if not freedom and examples is None:
        return None
    by_seeds = 0.0
    if freedom:  # pooled variance: assumes the same spread for both models, even if one has a single seed
        shared = sum((len(scores) - 1) * statistics.variance(scores) for scores in seeds) / freedom
        by_seeds = _student(freedom) * math.sqrt(shared * (1 / len(first) + (0 if fixed else 1 / len(second))))
    if examples is None:
        return by_seeds
    # One more right and one more wrong answer (Agresti and Caffo, 2000): a perfect score on few examples is not certain.
    shares = [(examples * statistics.fmean(scores) + 1) / (examples + 2) for scores in (first, second)]
    by_examples = _NORMAL * math.sqrt(sum(p * (1 - p) for p in shares) / (examples + 2))
    return math.hypot(by_seeds, by_examples)


def paired_margin(won: int, lost: int, examples: int) -> float:
    """Return the largest difference of two accuracies on the same test examples that chance explains (95 %).

    Unlike `margin`, it counts the examples on which exactly one of the two is right, each number plus one (Bonett and
    Price, 2012).

    Args:
        won: Number of examples that only the first answers correctly.
        lost: Number of examples that only the second answers correctly.
        examples: Number of test examples.

    >>> round(paired_margin(40, 16, 1000), 4), round(margin([0.924], [0.9], 1000), 4)
    (0.0148, 0.0249)
    """
    more, fewer = (won + 1) / (examples + 2), (lost + 1) / (examples + 2)
    return _NORMAL * math.sqrt((more + fewer - (more - fewer) ** 2) / (examples + 2))


_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_NORMAL = 1.95996


def _student(freedom: int) -> float:
    """Return the two-sided 95 % point of Student's t, from a table or an expansion around the normal distribution."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z, n = _NORMAL, freedom
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n * n)
