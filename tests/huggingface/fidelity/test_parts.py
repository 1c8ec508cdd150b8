"""Finished parts of a comparison: they are measured once, as long as nothing changes that they depend on."""

import numpy as np
import pytest
import torch

from hsa.errors import InvalidInput
from hsa.huggingface.conversion import convert_as
from hsa.huggingface.fidelity import parts as parts_module
from hsa.huggingface.fidelity.judge import Judge
from hsa.huggingface.fidelity.parts import PARTS_FILE, Parts
from tests.huggingface.fidelity.small import CHEAP, LONGEST, NEAR, classifier, examples, language_model, tokenizer


def judge_of(model, task, **more):
    return Judge(examples(4, **more), task, model, tokenizer(), longest=LONGEST)


def refuse():
    raise AssertionError("measured again")


@pytest.mark.parametrize("task", ["classification", "embedding", "lm"])
def test_answers_are_kept(tmp_path, task):
    model = language_model() if task == "lm" else classifier()
    model = model.bert if task == "embedding" else model
    judge, settings = judge_of(model, task), {0: CHEAP}
    parts = Parts(tmp_path, judge, model, settings)
    assert len(parts) == 0
    asked = parts.answers("converted", lambda: judge.ask(convert_as(model, settings)))
    again = Parts(tmp_path, judge, model, settings)
    assert len(again) == 1
    kept = again.answers("converted", refuse)
    assert np.array_equal(kept.values, asked.values)
    assert (kept.task, kept.counted) == (task, asked.counted)
    assert kept.counted.ratio > 1
    assert judge.scores(kept) == judge.scores(asked)


def test_times_are_kept(tmp_path, monkeypatch):
    model = classifier()
    judge = judge_of(model, "classification")
    watched = []
    timed = Parts(tmp_path, judge, model, {0: CHEAP}).times(
        model, {0: CHEAP}, [7, 11], tokenizer(), lambda *call: watched.append(call)
    )
    assert watched == [(0, 2), (1, 2), (2, 2)]
    assert [row.length for row in timed] == [7, 11]
    monkeypatch.setattr(parts_module, "time_model", lambda *call, **more: refuse())
    again = Parts(tmp_path, judge, model, {0: CHEAP})
    assert again.times(model, {0: CHEAP}, [11, 7], tokenizer(), lambda *call: None) == timed[::-1]
    with pytest.raises(AssertionError, match="measured again"):
        again.times(model, {0: CHEAP}, [12], tokenizer(), lambda *call: None)


def test_parts_of_another_comparison_are_discarded(tmp_path):
    model = classifier()
    judge = judge_of(model, "classification")
    parts = Parts(tmp_path, judge, model, {0: CHEAP})
    parts.answers("original", lambda: judge.ask(model))
    assert len(Parts(tmp_path, judge, model, {0: CHEAP})) == 1
    assert len(Parts(tmp_path, judge, model, {1: CHEAP})) == 0
    assert len(Parts(tmp_path, judge, model, {0: NEAR})) == 0
    assert len(Parts(tmp_path, judge_of(model, "classification", seed=1), model, {0: CHEAP})) == 0
    assert len(Parts(tmp_path, judge, classifier(seed=5), {0: CHEAP})) == 0
    assert len(Parts(tmp_path, judge, model.to(torch.float64), {0: CHEAP})) == 0


def test_damaged_parts(tmp_path):
    model = classifier()
    judge = judge_of(model, "classification")
    Parts(tmp_path, judge, model, {}).answers("original", lambda: judge.ask(model))
    path = tmp_path / PARTS_FILE
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InvalidInput, match=f"{PARTS_FILE}.*Delete it to start again"):
        Parts(tmp_path, judge, model, {})
