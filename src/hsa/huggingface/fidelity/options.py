"""Options of fine-tuning, in a module that the command line imports without torch."""

from __future__ import annotations

from dataclasses import dataclass

from hsa.errors import InvalidInput


@dataclass(frozen=True)
class FinetuneOptions:
    """Options of fine-tuning.

    Args:
        epochs: Number of passes over the training data.
        batch_size: Number of examples per step.
        learning_rate: Peak learning rate; it rises over the first tenth of the steps and falls to zero.
        weight_decay: Weight decay of all weights but biases and norms.
        max_tokens: Maximum number of tokens per text; longer texts are cut.
        attention_dropout: Dropout of attention weights. Default: the model's own. The GPU kernels need 0.
        seed: Random seed for the order of examples, new weights and dropout.
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
                raise InvalidInput(name, got=getattr(self, name), expected="1 or more")
        if not self.learning_rate > 0:
            raise InvalidInput("learning_rate", got=self.learning_rate, expected="more than 0")
        for name in ("weight_decay", "seed"):
            if not getattr(self, name) >= 0:
                raise InvalidInput(name, got=getattr(self, name), expected="0 or more")
        if self.attention_dropout is not None and not 0 <= self.attention_dropout < 1:
            raise InvalidInput("attention_dropout", got=self.attention_dropout, expected="at least 0 and less than 1")
