"""Logistic regression on words (TF-IDF), the classical baseline of text classification."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import numpy as np

from hsa.errors import MissingExtra
from hsa.training.data.prepare import PreparedData, read_texts
from hsa.training.metrics import class_scores
from hsa.training.options import DataOptions
from hsa.training.reference import Reference

WORDS = "TF-IDF + logistic regression"
_TOKENS = r"[\u3040-\u30ff\u3400-\u9fff]|\w+|[^\w\s]"
"""Words and signs; Chinese and Japanese, which put no space between words, character by character."""
_INVERSE_PENALTY = 10.0
_FEATURES = 100_000
"""Maximum number of words and pairs of words."""
_PARAMETERS = 5_000_000
"""Maximum number of parameters: with many classes, fewer words, because the optimiser keeps twenty copies."""
_PAIRS_UP_TO = 100_000_000
"""Number of characters up to which pairs of words count: they take gigabytes in longer texts."""


def has_texts(prepared: PreparedData) -> bool:
    """Return whether the examples are texts, alone or beside other values, to be classified."""
    return (
        prepared.task == "classification" and prepared.input_spec.kind != "generated" and "text" in prepared.modalities
    )


def train_on_words(data: Path | None, options: DataOptions, prepared: PreparedData, *, small: bool) -> Reference:
    """Train and test logistic regression on the texts of the examples that the models are trained and tested on.

    Features are words and pairs of words, weighted by 1 + log of their count and by their inverse document frequency.

    Args:
        data, options, small: Source of the data, as in `prepare`.
        prepared: Data of the run, for its split.

    Raises:
        MissingExtra: If scikit-learn is not installed.
    """
    try:
        from sklearn.exceptions import ConvergenceWarning  # type: ignore[import-untyped]
        from sklearn.feature_extraction.text import TfidfVectorizer  # type: ignore[import-untyped]
        from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
    except ImportError:
        raise MissingExtra("scikit-learn", "tfidf", f"the row {WORDS}") from None

    texts = read_texts(data, options, small)
    train, test = ([texts[name] for name in part.names] for part in (prepared.train, prepared.test))
    true, classes = prepared.test.targets.numpy(), len(prepared.test.classes)
    began = time.monotonic()
    vectorizer = TfidfVectorizer(
        token_pattern=_TOKENS,
        sublinear_tf=True,
        ngram_range=(1, 2 if sum(map(len, train)) <= _PAIRS_UP_TO else 1),
        max_features=min(_FEATURES, _PARAMETERS // classes),
        dtype=np.float32,
    )
    model = LogisticRegression(C=_INVERSE_PENALTY, max_iter=1000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(vectorizer.fit_transform(train), prepared.train.targets.numpy())
    trained = time.monotonic()
    predicted = model.predict(vectorizer.transform(test))
    tested = time.monotonic()
    return Reference(
        WORDS,
        class_scores(predicted, true, classes),
        parameters=model.coef_.size + model.intercept_.size,
        training_seconds=trained - began,
        test_seconds=tested - trained,
    )
