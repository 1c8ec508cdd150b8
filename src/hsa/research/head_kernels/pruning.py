"""Removal of heads from a model: orders of removal, and the scores of the pruned models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hsa.errors import InvalidInput
from hsa.research.head_kernels.heads import Answer, Head, Heads

BY_REDUNDANCY, BY_WEIGHT, BY_CHANCE = "redundancy", "MKL weight", "random"
"""Names of the orders of removal."""
Score = Callable[[Tensor], float]
"""Function that scores answers `[examples, channels]`."""


def most_redundant_first(alignment: Tensor) -> list[int]:
    """Return an order of removal by redundancy, recomputed after each removal.

    Constant kernels come first. Then, of the two kernels with the highest alignment, the one with the higher total
    alignment with the remaining kernels is removed.

    Args:
        alignment: `[kernels, kernels]` Result of `alignment_matrix`.
    """
    table = alignment.double().clone()
    constant = (table.diagonal() <= 0).nonzero()[:, 0].tolist()
    table.fill_diagonal_(-torch.inf)
    order, left = list(constant), [i for i in range(len(table)) if i not in set(constant)]
    while len(left) > 1:
        some = table[left][:, left]
        nearest = some.max(1).values
        total = some.masked_fill(torch.eye(len(left), dtype=torch.bool), 0.0).sum(1)
        pair = (nearest == nearest.max()).nonzero()[:, 0]
        order.append(left.pop(int(pair[total[pair].argmax()])))
    return order + left


def lowest_weight_first(weights: Tensor, slack: Tensor) -> list[int]:
    """Return an order of removal by weight; among equal weights, often 0, by slack."""
    return np.lexsort((slack.numpy(), weights.numpy())).tolist()


def at_random(count: int, seed: int) -> list[int]:
    """Return a random order of removal."""
    return np.random.default_rng(seed).permutation(count).tolist()


def steps(heads: int, points: int) -> list[int]:
    """Return the number of removed heads at each point of a curve, from none to all, with smaller steps at first.

    >>> steps(72, 9), steps(3, 8)
    ([0, 1, 4, 8, 14, 22, 32, 44, 57, 72], [0, 1, 2, 3])
    """
    if points < 1:
        raise InvalidInput("points", got=points, expected="1 or more")
    if points >= heads:
        return list(range(heads + 1))
    return sorted({round(heads * (i / points) ** 2) for i in range(points + 1)})


@dataclass(frozen=True)
class Curve:
    """Scores of a model by number of removed heads."""

    name: str
    removed: list[int]
    scores: list[list[float]]  # a list per draw; several for random orders

    @property
    def mean(self) -> list[float]:
        return np.mean(self.scores, 0).tolist()

    def removable(self, loss: float) -> int:
        """Return the number of heads that can be removed before the mean score falls by `loss` or more."""
        mean = self.mean
        kept = 0
        for count, score in zip(self.removed, mean, strict=True):
            if mean[0] - score >= loss:
                break
            kept = count
        return kept


@torch.no_grad()
def pruning_curves(
    heads: Heads,
    everywhere: Sequence[Head],
    answer: Answer,
    batches: Sequence[np.ndarray],
    orders: dict[str, list[list[int]]],
    score: Score,
    *,
    points: int,
    watch: Callable[[int], None] | None = None,
) -> list[Curve]:
    """Score a model with more and more heads removed, in several orders.

    Args:
        heads: Heads of the model.
        everywhere: All heads, which the orders index.
        answer, batches: See `collect`.
        orders: Orders of removal by name, with several draws for random ones.
        score: Function of the answers, in the order of the batches.
        points: Number of points of each curve.
        watch: Called with the number of points just finished.
    """
    counts = steps(len(everywhere), points)
    known: dict[frozenset[int], float] = {}  # all orders share their first and last set

    def scored(removed: Sequence[int]) -> float:
        key = frozenset(removed)
        if key not in known:
            with heads.without([everywhere[i] for i in removed]):
                known[key] = score(torch.cat([answer(batch).float().cpu() for batch in batches]))
        if watch is not None:
            watch(1)
        return known[key]

    return [
        Curve(name, counts, [[scored(order[:count]) for count in counts] for order in draws])
        for name, draws in orders.items()
    ]


def accuracy(labels: np.ndarray) -> Score:
    """Return a score: the share of examples whose largest answer is that of their class."""
    true = torch.from_numpy(labels)
    return lambda answers: float((answers.argmax(1) == true).double().mean())


def r_squared(numbers: np.ndarray) -> Score:
    """Return a score: the coefficient of determination R² of the answers."""
    true = torch.from_numpy(numbers).double()
    spread = (true - true.mean()).square().sum()
    return lambda answers: float(1 - (answers[:, 0].double() - true).square().sum() / spread)


def cosine(full: Tensor) -> Score:
    """Return a score: the mean cosine with the answers of the full model."""
    return lambda answers: float(torch.nn.functional.cosine_similarity(answers.double(), full.double(), dim=1).mean())
