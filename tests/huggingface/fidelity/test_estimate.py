"""Estimates of a conversion: from the times of a batch to those of all stages."""

import pytest

from hsa.huggingface import settings_of
from hsa.huggingface.fidelity import estimate as module
from hsa.huggingface.fidelity.calibrate import CANDIDATES, CAUSAL_CANDIDATES, POINTS
from hsa.huggingface.fidelity.estimate import estimate
from hsa.huggingface.fidelity.judge import Judge
from tests.huggingface.fidelity.small import CHEAP, LONGEST, classifier, examples, language_model, tokenizer


def judge_of(model, count, task="classification"):
    return Judge(examples(count), task, model, tokenizer(), longest=LONGEST)


@pytest.mark.parametrize("task", ["classification", "lm"])
def test_stages_follow_from_the_times_of_a_batch(monkeypatch, task):
    """One token takes 1 ms exactly and 3 ms converted."""
    monkeypatch.setattr(module, "_seconds_per_token", lambda model, settings, *_: 0.003 if settings else 0.001)
    model, candidates = (language_model(), CAUSAL_CANDIDATES) if task == "lm" else (classifier(), CANDIDATES)
    batch, report, search = (judge_of(model, count, task) for count in (3, 30, 6))
    found = estimate(model, {0: CHEAP, 1: CHEAP}, batch, report, search, [10, 60])
    tokens = report.tokens.lengths.sum()
    assert found.report == pytest.approx(0.004 * tokens)
    passes = 0.001 + 2 * len(candidates) * 0.002 + (POINTS + 10) * 0.003
    assert found.search == pytest.approx(passes * search.tokens.lengths.sum())
    assert found.times == pytest.approx(8 * 0.004 * (10 + 60))  # two warm-up passes, five repeats, one for memory
    assert found.texts == len(batch.examples)
    assert found.weights == pytest.approx(sum(p.nbytes for p in model.parameters()) / 2**20)
    long = estimate(model, {0: CHEAP}, batch, report, None, [10_000])
    assert long.search == 0
    assert long.times == pytest.approx(5 * 10 + 5 * 30)  # at least two repeats, of 10 and of 30 seconds


def test_measured_on_both_models(monkeypatch):
    model, asked, ask = classifier(), [], Judge.ask
    monkeypatch.setattr(
        Judge, "ask", lambda self, model: (asked.append((len(self), settings_of(model))), ask(self, model))
    )
    batch, report = judge_of(model, 3), judge_of(model, 5)
    found = estimate(model, {1: CHEAP}, batch, report, None, [])
    assert asked == [(3, {}), (3, {1: CHEAP})]
    assert found.report > 0
    assert found.times == 0
