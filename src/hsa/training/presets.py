"""Default options of each task and of the example python. A recipe and the command line override them."""

from __future__ import annotations

from pathlib import Path

from hsa.models.options import ModelOptions
from hsa.training.options import DataOptions, LanguageOptions, TrainingOptions
from hsa.training.recipe import Recipe
from hsa.training.tasks import Task


def classification(data: Path | None, quick: bool) -> Recipe:
    """Return the defaults."""
    return Recipe(data)


def python(data: Path | None, quick: bool) -> Recipe:
    """Return defaults that suit two thousand short programs on two CPU cores."""
    return Recipe(
        data,
        read=DataOptions(example="python", vocabulary=4096, max_tokens=384),
        model=ModelOptions(width=96),
        training=TrainingOptions(epochs=6, learning_rate=3e-3, batch_tokens=8192),
    )


def regression(data: Path | None, quick: bool) -> Recipe:
    """Return the defaults."""
    return Recipe(data, read=DataOptions(task="regression"))


def language_model(data: Path | None, quick: bool) -> Recipe:
    """Return defaults that suit a megabyte of text on two CPU cores."""
    return Recipe(
        data,
        ("multiscale", "flat"),
        DataOptions(task="lm", vocabulary=4096),
        ModelOptions(width=128, layers=2, dropout=0.0),
        TrainingOptions(
            epochs=4,
            learning_rate=3e-3,
            schedule="cosine",
            weight_decay=0.1,
            batch_tokens=2048 if quick else 8192,
        ),
        LanguageOptions(context=256, steps=100 if quick else 0),
    )


def encoder_decoder(data: Path | None, quick: bool) -> Recipe:
    """Return defaults that suit short documents on two CPU cores."""
    return Recipe(
        data,
        ("hierarchical", "flat"),
        DataOptions(task="seq2seq", vocabulary=512 if data is None else 4096),
        ModelOptions(width=64, dropout=0.0),
        TrainingOptions(epochs=6, learning_rate=3e-3, batch_size=32, patience=0),
        LanguageOptions(branching=(4, 4), positions="both"),
    )


_PREPARE = "hsa.training.data.prepare:prepare_recipe"
CLASSIFICATION = Task(classification, "data", prepare=_PREPARE)
REGRESSION = Task(regression, "data", prepare=_PREPARE)
PYTHON = Task(python, "python-standard-library", prepare=_PREPARE)
LM = Task(language_model, "python-standard-library")
SEQ2SEQ = Task(encoder_decoder, "marked-sentences")
