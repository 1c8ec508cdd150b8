"""A tiny prepared data set, and results of comparisons on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hsa.models.options import ModelOptions
from hsa.nn.embedding import Modality
from hsa.training.compare import Run
from hsa.training.data.prepare import InputSpec, PreparedData
from hsa.training.data.sources import Columns
from hsa.training.experiment import Result
from hsa.training.loop import EpochRecord
from hsa.training.metrics import Scores
from hsa.training.options import TrainingOptions
from hsa.training.recipe import Recipe
from hsa.training.reference import Reference, References, constant_answer
from tests.tasks import TOKENS, data

RECIPE = Recipe(
    model=ModelOptions(width=12, heads=2, position_width=8, dropout=0.0),
    training=TrainingOptions(epochs=2, batch_size=9, patience=0),
)


def prepared(task: Any = "classification", **more: Any) -> PreparedData:
    return PreparedData(
        train=data(31, task, **more),
        validation=data(13, task, seed=1, **more),
        test=data(17, task, seed=2, **more),
        input_spec=InputSpec("rows", Columns(("text",), (), (), "label", False, "en"), 0, 0),
        modalities={"text": Modality(tokens=TOKENS)},
        kinds=("sequence",),
        keys=(),
        task=task,
        name="tiny",
    )


def result(model: str, score: float, validation: float = 0.5, *, regression: bool = False, **more: Any) -> Result:
    """Return a plausible result of a run, with a confusion matrix of many examples: the score is beyond chance."""
    scores = Scores(r2=score, mean_absolute_error=2.0) if regression else Scores(accuracy=score, f1=score / 2)
    record = EpochRecord(1, 0.7, 0.6, validation, 0.0, 3.0)
    right = round(5000 * score)
    confusion = () if regression else ((right, 5000 - right), (5000 - right, right))
    default = Result(model, 1000, scores, 5e6, 3.0, 0.17, 1, (record,), confusion, 7.0)
    return replace(default, **more)


def references(task: Any = "classification", words: float | None = None) -> References:
    """Return the references of the tiny data set, with the accuracy of logistic regression on words if given."""
    scores = Scores(accuracy=words, f1=words)
    trained = None if words is None else Reference("TF-IDF + logistic regression", scores, 70, 0.5, 0.017)
    return References(constant_answer(prepared(task)), trained)


def run(model: str, rate: float, seed: int, ended: Any) -> Run:
    """Return a run with its result or with its failure."""
    if isinstance(ended, Result):
        return Run(model, rate, seed).finished(ended)
    return Run(model, rate, seed, ended)
