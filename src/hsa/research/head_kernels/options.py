"""Options of `hsa heads`. Does not import torch, so that the command line starts fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hsa.errors import InvalidInput


@dataclass(frozen=True)
class HeadDataOptions:
    """Examples to run the model on.

    Args:
        text: Column of the text; two columns for pairs. By default, columns with common names.
        label: Column of the labels; "label" by default, if it exists. Labels with fractions or more than 20 distinct
            values are numbers to predict.
        split: Split to use, a value of the column "split"; by default validation, else test, if the column exists.
        limit: Maximum number of examples, drawn at random.
        max_tokens: Maximum number of tokens of a text, with special tokens; longer texts are truncated.
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
    """Removal of heads.

    Args:
        prune_on: Maximum number of examples to score pruned models on, at most half of all; 0 for no pruning.
        points: Number of points of each curve; large models lose several heads per point.
        draws: Number of random orders to compare with.
    """

    prune_on: int = 100
    points: int = 9
    draws: int = 3

    def __post_init__(self) -> None:
        _check_least(prune_on=(self.prune_on, 0), points=(self.points, 1), draws=(self.draws, 1))


@dataclass(frozen=True)
class ComparisonOptions:
    """Comparison of heads.

    Args:
        compare: Features that heads are compared by: mean outputs per example, or symmetrised similarities q·k of tokens.
        tokens: Approximate number of tokens for the comparison by similarity.
        halves: Number of random splits into halves to learn and test weights on.
        seed: Seed of all random choices.
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
            raise InvalidInput(name, got=value, expected=f"{smallest} or more")
