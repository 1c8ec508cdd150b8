"""Tiny tasks that a model can learn, and trainers for them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hsa.models.classifier import Classifier, ModelConfig
from hsa.nn.embedding import Modality
from hsa.nn.encoder_config import EncoderConfig
from hsa.signals import Leaf, Sequence, Signal, Table
from hsa.training.data.data_set import DataSet, Example, build
from hsa.training.loop import EpochRecord, Trainer
from hsa.training.options import TrainingOptions

TOKENS = 13
CLASSES = ("no", "yes")
QUICK = TrainingOptions(epochs=3, learning_rate=1e-2, batch_size=7, patience=0)


def examples(count: int, task: str = "classification", seed: int = 0, sentences: int = 3) -> list[Example]:
    """Return examples of sentences of tokens, for one of three tasks.

    Classification: is there a 0 or a 1? Regression: how large is the share of 0? Tokens: which tokens are odd?
    """
    generator = random.Random(seed)
    made = []
    for i in range(count):
        tokens = [
            [generator.randrange(2, TOKENS) for _ in range(generator.randint(1, 4))]
            for _ in range(generator.randint(1, sentences))
        ]
        positions = [(s, t) for s, sentence in enumerate(tokens) for t in range(len(sentence))]
        if task == "regression":
            marks = generator.sample(positions, generator.randint(0, len(positions)))
            target: Any = 5 + 3 * len(marks) / len(positions)
        else:
            marks = [generator.choice(positions)]
            target = CLASSES[i % 2]
        for s, t in marks:
            tokens[s][t] = 0 if task == "regression" else i % 2
        if task == "tokens":
            target = tuple(CLASSES[token % 2] for sentence in tokens for token in sentence)
        signal = Signal(Sequence(len(tokens)), [Signal.of(sentence, "text") for sentence in tokens])
        made.append(Example(signal, target, f"example {i}"))
    return made


def data(count: int, task: Any = "classification", seed: int = 0, **more: Any) -> DataSet:
    return build(examples(count, task, seed, **more), task, None if task == "regression" else CLASSES)


def classifier(kind: Any = "hierarchical", task: Any = "classification", seed: int = 0, **changes: Any) -> Classifier:
    """Return a small classifier with weights that depend on the seed only."""
    encoder: dict[str, Any] = {"width": 12, "heads": 2, "layers": 1, "dropout": 0.0, "position_width": 8, "near": 1}
    torch.manual_seed(seed)
    numbers = {"center": 6.5, "scale": 0.9} if task == "regression" else {}
    return Classifier(
        ModelConfig(
            EncoderConfig(kind=kind, **{**encoder, **changes}),
            {"text": Modality(tokens=TOKENS)},
            outputs=1 if task == "regression" else 2,
            task=task,
            **numbers,
        )
    )


def mixed(count: int = 12) -> tuple[Classifier, DataSet]:
    """Return a classifier and rows with a title. Only the first three have a price: most batches contain no number."""
    made = []
    for i in range(count):
        members: dict[str, Any] = {"title": Signal.of([i % 5, i % 3], "text")}
        if i < 3:
            members["price"] = Leaf(float(i), "number")
        made.append(Example(Signal(Table(tuple(members)), list(members.values())), CLASSES[i % 2], str(i)))
    config = replace(
        classifier().config,
        modalities={"text": Modality(tokens=TOKENS), "number": Modality(numbers=1)},
        kinds=("sequence", "table"),
        keys=("title", "price"),
    )
    torch.manual_seed(0)
    return Classifier(config), build(made, "classification", CLASSES)


def trainer(
    options: TrainingOptions = QUICK,
    *,
    task: Any = "classification",
    model: Classifier | None = None,
    train: DataSet | None = None,
    folder: Path | None = None,
    **more: Any,
) -> Trainer:
    """Return a trainer for a tiny task, by default with the fastest model, 40 training and 20 validation examples."""
    return Trainer(
        model or classifier("none", task),
        train or data(40, task),
        more.pop("validation", None) or data(20, task, seed=1),
        options,
        folder=folder,
        **more,
    )


@dataclass
class Log:
    """A watcher that records its calls."""

    steps: list[tuple[int, int, float | None, float]] = field(default_factory=list)
    epochs: list[EpochRecord] = field(default_factory=list)
    finished: int = 0

    def step(self, done: int, total: int, loss: float | None, learning_rate: float) -> None:
        self.steps.append((done, total, loss, learning_rate))

    def epoch(self, record: EpochRecord) -> None:
        self.epochs.append(record)

    def done(self) -> None:
        self.finished += 1
