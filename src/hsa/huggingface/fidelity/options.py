"""Options of the command line, which loads them without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hsa.errors import InvalidInput


@dataclass(frozen=True)
class FinetuneOptions:
    """Settings of fine-tuning.

    Args:
        epochs: Passes over the training data.
        batch_size: Examples per step.
        learning_rate: Highest learning rate; it rises over the first tenth of the steps and falls to zero.
        weight_decay: Weight decay of all weights but biases and norms.
        max_tokens: Longest input in tokens; longer texts are cut.
        attention_dropout: Dropout of attention weights; the model's own unless given. The GPU kernels need 0.
        seed: Random seed of the order of examples, of new weights and of dropout.
    """

    epochs: int = 3
    batch_size: int = 32
    learning_rate: float = 5e-5
    weight_decay: float = 0.01
    max_tokens: int = 512
    attention_dropout: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "max_tokens"):
            if getattr(self, name) < 1:
                raise InvalidInput(name, given=getattr(self, name), expected="1 or more")
        if not self.learning_rate > 0:
            raise InvalidInput("learning_rate", given=self.learning_rate, expected="more than 0")
        for name in ("weight_decay", "seed"):
            if not getattr(self, name) >= 0:
                raise InvalidInput(name, given=getattr(self, name), expected="0 or more")
        if self.attention_dropout is not None and not 0 <= self.attention_dropout < 1:
            raise InvalidInput("attention_dropout", given=self.attention_dropout, expected="at least 0 and less than 1")


@dataclass(frozen=True)
class HeadDataOptions:
    """Where the examples are.

    Args:
        text: Column of the text; two make a pair. The usual names are found by themselves.
        label: Column of labels; "label", if there is one. Numbers with a fraction, or of many kinds, are numbers to predict.
        split: Only rows whose column "split" says so; validation, else test, where there is such a column.
        limit: At most so many examples, drawn at random.
        max_tokens: Tokens of a text that are read, special ones included.
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
    """How heads are taken away.

    Args:
        prune_on: At most so many examples to run the model without heads on, and no more than half. 0: no pruning.
        points: Of each curve: large models lose several heads per step.
        draws: Random orders, to compare with.
    """

    prune_on: int = 100
    points: int = 9
    draws: int = 3

    def __post_init__(self) -> None:
        _check_least(prune_on=(self.prune_on, 0), points=(self.points, 1), draws=(self.draws, 1))


@dataclass(frozen=True)
class HeadViewOptions:
    """How heads are compared.

    Args:
        kernel: Compare heads by their mean outputs per example, or by the similarities q·k of tokens, symmetrised.
        tokens: About how many tokens to compare similarities of.
        halves: Number of random halves to learn and test weights on.
        seed: Of everything that is drawn at random.
    """

    kernel: Literal["outputs", "similarity"] = "outputs"
    tokens: int = 400
    halves: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        _check_least(tokens=(self.tokens, 3), halves=(self.halves, 1), seed=(self.seed, 0))


def _check_least(**least: tuple[int, int]) -> None:
    for name, (value, smallest) in least.items():
        if value < smallest:
            raise InvalidInput(name, given=value, expected=f"{smallest} or more")
