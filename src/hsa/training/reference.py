"""References: scores of simple answers that a model should beat, such as the most frequent class."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsa.training.data.prepare import PreparedData
from hsa.training.metrics import Scores, class_scores, number_scores

FREQUENT, MEAN = "most frequent class", "mean of training data"


@dataclass(frozen=True)
class Reference:
    """Test scores of a simple answer, which is not a model of this library and is not saved.

    Attributes:
        name: Name in tables.
        scores: Scores on the test data.
        parameters: Number of parameters; None if nothing is trained.
        training_seconds, test_seconds: Times; None if nothing is trained.
    """

    name: str
    scores: Scores
    parameters: int | None = None
    training_seconds: float | None = None
    test_seconds: float | None = None


@dataclass(frozen=True)
class References:
    """References of a data set.

    Attributes:
        constant: The same answer to every example: the most frequent class, or the mean, of the training data.
        words: Logistic regression on words, for text classification.
        note: Reason why `words` is missing, if a package would bring it.
    """

    constant: Reference
    words: Reference | None = None
    note: str | None = None

    @property
    def all(self) -> list[Reference]:
        """All references, the simplest first."""
        return [self.constant] if self.words is None else [self.constant, self.words]


def constant_answer(prepared: PreparedData) -> Reference:
    """Return the scores of the most frequent class, or of the mean, of the training data as the answer to all tests."""
    true = prepared.test.targets.numpy()
    if not prepared.train.classes:
        mean = prepared.train.targets.numpy().mean()
        return Reference(MEAN, number_scores(np.full(len(true), mean), true))
    answers = np.full(len(true), frequent_class(prepared))
    return Reference(FREQUENT, class_scores(answers, true, len(prepared.train.classes)))


def frequent_class(prepared: PreparedData) -> int:
    """Return the index of the most frequent class of the training data."""
    return int(np.bincount(prepared.train.targets.numpy()).argmax())
