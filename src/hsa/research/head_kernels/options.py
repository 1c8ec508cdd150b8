"""Options of `hsa heads`. Imports no torch, so that the command line can show them quickly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hsa.errors import InvalidInput


@dataclass(frozen=True)
class HeadDataOptions:
    """Which examples to run the model on.

    Args:
        text: Column of the text; two make a pair. Columns with the usual names are used by default.
        label: Column of the labels; "label" by default, if there is one. Labels with fractions, or of more than 20 kinds,
            are numbers to predict.
        split: Value of the column "split" of the rows to use; by default validation, else test, if there is such a column.
        limit: Largest number of examples, drawn at random.
        max_tokens: Largest number of tokens of a text, special ones included; longer texts are cut.
    """

    text: tuple[str, ...] = ()
    label: str | None = None
    split: str | None = None
    limit: int = 300
    max_tokens: int = 64

    def __post_init__(self) -> None:
        _check_least(limit=(self.limit, 3), max_tokens=(self.max_tokens, 1))


@dataclass(frozen=True)
class PruningOptions:
    """How heads are removed.

    Args:
        prune_on: Largest number of examples to run the model without heads on, at most half of all. 0: no pruning.
        points: Number of points of each curve: large models lose several heads per point.
        draws: Number of random orders to compare with.
    """

    prune_on: int = 100
    points: int = 9
    draws: int = 3

    def __post_init__(self) -> None:
        _check_least(prune_on=(self.prune_on, 0), points=(self.points, 1), draws=(self.draws, 1))


@dataclass(frozen=True)
class ComparisonOptions:
    """How heads are compared.

    Args:
        compare: Compare heads by their mean outputs per example, or by the similarities q·k of tokens, symmetrised.
        tokens: Approximate number of tokens whose similarities are compared.
        halves: Number of random halves to learn and test weights on.
        seed: Seed of everything that is drawn at random.
    """

    compare: Literal["outputs", "similarity"] = "outputs"
    tokens: int = 400
    halves: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        _check_least(tokens=(self.tokens, 3), halves=(self.halves, 1), seed=(self.seed, 0))


def _check_least(**least: tuple[int, int]) -> None:
    for name, (value, smallest) in least.items():
        if value < smallest:
            raise InvalidInput(name, given=value, expected=f"{smallest} or more")
