"""Which heads a model can do without: orders in which to take them away, and what is left of its answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hsa.errors import InvalidInput
from hsa.research.head_kernels.heads import Answer, Head, Heads

Score = Callable[[Tensor], float]
"""How good answers `[examples, channels]` are."""


def most_redundant_first(alignment: Tensor) -> list[int]:
    """Kernels by redundancy, which is looked at anew after each that is taken away.

    Of the two that are most alike, the one goes that is more like all others that are left; constant ones go before all.

    Args:
        alignment: `[kernels, kernels]`.
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
    """Kernels by their weight; where that is equal, as 0 often is, first those that the objective would lose most by."""
    return np.lexsort((slack.numpy(), weights.numpy())).tolist()


def at_random(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).permutation(count).tolist()


def steps(heads: int, points: int) -> list[int]:
    """How many heads are gone at each point of a curve, from none to all; in small steps first, where little is lost.

    >>> steps(72, 9), steps(3, 8)
    ([0, 1, 4, 8, 14, 22, 32, 44, 57, 72], [0, 1, 2, 3])
    """
    if points < 1:
        raise InvalidInput("points", given=points, expected="1 or more")
    if points >= heads:
        return list(range(heads + 1))
    return sorted({round(heads * (i / points) ** 2) for i in range(points + 1)})


@dataclass(frozen=True)
class Curve:
    """What is left of a model's score, for each number of heads that are gone."""

    name: str
    removed: list[int]
    scores: list[list[float]]  # a list per draw; one but for random orders

    @property
    def mean(self) -> list[float]:
        return np.mean(self.scores, 0).tolist()

    def can_go(self, loss: float) -> int:
        """How many heads can go before the mean score falls by `loss` or more."""
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
    """Take heads away one after another, run the model, and score what it says.

    Args:
        everywhere: the heads that the numbers in the orders mean.
        answer, batches: as for `collect`; `score` gets the answers in the order of the batches.
        orders: by name; several for the draws of a random one.
        points: of each curve, so that large models lose several heads per step.
        watch: told how many more points are done.
    """
    counts = steps(len(everywhere), points)
    known: dict[frozenset[int], float] = {}  # all orders begin and end alike

    def scored(gone: Sequence[int]) -> float:
        key = frozenset(gone)
        if key not in known:
            with heads.without([everywhere[i] for i in gone]):
                known[key] = score(torch.cat([answer(batch).float().cpu() for batch in batches]))
        if watch is not None:
            watch(1)
        return known[key]

    return [
        Curve(name, counts, [[scored(order[:count]) for count in counts] for order in draws])
        for name, draws in orders.items()
    ]


def accuracy(labels: np.ndarray) -> Score:
    """The share of examples whose largest answer is that of their class."""
    true = torch.from_numpy(labels)
    return lambda answers: float((answers.argmax(1) == true).double().mean())


def r_squared(numbers: np.ndarray) -> Score:
    true = torch.from_numpy(numbers).double()
    spread = (true - true.mean()).square().sum()
    return lambda answers: float(1 - (answers[:, 0].double() - true).square().sum() / spread)


def cosine(full: Tensor) -> Score:
    """The mean cosine with the answers of the whole model."""
    return lambda answers: float(torch.nn.functional.cosine_similarity(answers.double(), full.double(), dim=1).mean())
