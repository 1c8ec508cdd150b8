"""Detection of models that have learned nothing: they are no better than a constant answer."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from hsa.training.data.prepare import PreparedData
from hsa.training.experiment import Result
from hsa.training.reference import FREQUENT, Reference, frequent_class
from hsa.training.significance import paired_margin


def why_unlearned(results: Sequence[Result], prepared: PreparedData, constant: Reference) -> str | None:
    """Return why the results of a model, one per seed, show no learning; None if a seed has learned.

    Args:
        results: Results of one model.
        prepared: Data of the run.
        constant: Scores of the constant answer.
    """
    scores = [result.scores.main for result in results]
    mean, base = statistics.fmean(scores), constant.scores.main
    if not prepared.test.classes:
        if max(scores) > 0:
            return None
        return f"nothing learned; R² {mean:.3f} is not above 0, that of a constant answer"
    tables = [np.array(result.confusion) for result in results]
    if all(np.count_nonzero(table.sum(0)) == 1 for table in tables):
        return "nothing learned; the same answer to every test example"
    chances = [_chance(table, frequent_class(prepared)) for table in tables]
    if any(score - base > chance for score, chance in zip(scores, chances, strict=True)):
        return None
    return (
        f"no sign of learning; accuracy {mean:.4f} is not above that of the {FREQUENT}, {base:.4f}, by more than chance "
        f"(95% margin ± {100 * statistics.fmean(chances):.1f} points with {tables[0].sum():,} test answers)"
    )


def _chance(table: np.ndarray, frequent: int) -> float:
    """Return the margin of chance between a model with this confusion matrix and the most frequent class."""
    right = table.diagonal()
    won, lost = right.sum() - right[frequent], table[frequent].sum() - right[frequent]
    return paired_margin(int(won), int(lost), int(table.sum()))


def unlearned_lines(reasons: Mapping[str, str | None], prepared: PreparedData, rates: str) -> list[str]:
    """Return a line per reason with the models that it applies to, and one on what to change; empty without reasons.

    Args:
        reasons: Results of `why_unlearned` by model.
        prepared: Data of the run.
        rates: Advice on the learning rate, such as "another --learning-rate".
    """
    models: dict[str, list[str]] = {}
    for model, reason in reasons.items():
        if reason is not None:
            models.setdefault(reason, []).append(model)
    if not models:
        return []
    label = prepared.input_spec.columns.label
    check = "" if label is None else f"; is {label!r} (--label) the column to predict?"
    advice = f"what may help: more --epochs, {rates}, more data{check}"
    return [*(f"{', '.join(names)}: {reason}" for reason, names in models.items()), advice]
