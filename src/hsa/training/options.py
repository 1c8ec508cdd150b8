"""How a model is trained: the options of `hsa train` and of recipes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from hsa.errors import InvalidInput

Precision = Literal["no", "bf16", "fp16"]
Schedule = Literal["linear", "cosine", "constant"]


@dataclass(frozen=True)
class TrainingOptions:
    """How long, how fast, how careful.

    Args:
        epochs: Passes over the training data, at most.
        learning_rate: The highest one.
        schedule: How the learning rate falls after the warm-up: linear or cosine to zero, or constant.
        warmup: Share of all steps during which the learning rate rises.
        weight_decay: Of AdamW; not for biases, norms and embeddings.
        clip: Gradients are clipped to this norm.
        batch_size: Examples per step, at most.
        batch_tokens: Leaves per step, at most, over all processes; a longer example is a batch of its own.
        patience: Stop after so many epochs without a better validation score; 0 for never.
        seed: Of the weights, the order of the data, dropout and the split.
        mixed_precision: no, bf16 or fp16.
        checkpoint_minutes: Time between checkpoints; there is one after every epoch too.
    """

    epochs: int = 10
    learning_rate: float = 1e-3
    schedule: Schedule = "linear"
    warmup: float = 0.05
    weight_decay: float = 0.01
    clip: float = 1.0
    batch_size: int = 64
    batch_tokens: int = 16_384
    patience: int = 3
    seed: int = 0
    mixed_precision: Precision = "no"
    checkpoint_minutes: float = 5.0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "batch_tokens", "learning_rate", "clip", "checkpoint_minutes"):
            if not getattr(self, name) > 0:
                raise InvalidInput(name, given=getattr(self, name), expected="more than 0")
        for name in ("patience", "weight_decay", "seed"):
            if not getattr(self, name) >= 0:
                raise InvalidInput(name, given=getattr(self, name), expected="0 or more")
        if not 0 <= self.warmup < 1:
            raise InvalidInput("warmup", given=self.warmup, expected="a share: 0 or more and less than 1")
        for name, allowed in (("schedule", Schedule), ("mixed_precision", Precision)):
            if getattr(self, name) not in get_args(allowed):
                raise InvalidInput(name, given=getattr(self, name), expected=f"one of {', '.join(get_args(allowed))}")


def differing(before: Any, now: Any) -> list[str]:
    """The fields in which two options differ, for a message."""
    return [
        f"{f.name} {getattr(before, f.name)} → {getattr(now, f.name)}"
        for f in fields(before)
        if getattr(before, f.name) != getattr(now, f.name)
    ]
