"""Time and memory by length, without checks of their values."""

import pytest

from hsa.analysis.memory import extra_memory
from hsa.analysis.timing import median_seconds
from hsa.errors import InvalidInput
from hsa.huggingface import settings_of
from hsa.huggingface.fidelity import timing
from hsa.huggingface.fidelity.timing import Timed, list_lengths, time_model
from tests.huggingface.fidelity.small import CHEAP, classifier, language_model, tokenizer


@pytest.mark.parametrize("longest", [1, 127, 128, 129, 512, 4096, 5000])
def test_lengths(longest):
    result = list_lengths(longest)
    assert result[-1] == longest
    assert result == sorted(set(result))
    assert all(n & (n - 1) == 0 and n >= 128 for n in result[:-1])
    assert len(result) == 1 or longest <= 2 * result[-2]


@pytest.mark.parametrize("memory", [True, False])
def test_a_row_for_each_length(monkeypatch, memory):
    model, known, passes = classifier(), tokenizer(), []
    if not memory:
        monkeypatch.setattr(timing, "extra_memory", lambda run, device: None)

    def note(module, arguments, options):
        passes.append((options["input_ids"].shape, sorted(settings_of(model)), options["input_ids"]))

    model.register_forward_pre_hook(note, with_kwargs=True)
    rows = time_model(model, {1: CHEAP}, [7, 23], batch=3, repeats=2, seconds=0.0, tokenizer=known)
    assert [row.length for row in rows] == [7, 23]
    assert settings_of(model) == {1: CHEAP}  # left converted
    assert {shape for shape, _, _ in passes} == {(3, 7), (3, 23)}
    for length in (7, 23):
        converted = [layers for shape, layers, _ in passes if shape[1] == length]
        assert converted == sorted(converted)  # before, then after, as often
        assert converted.count([]) == converted.count([1]) >= 4
    for _, _, ids in passes:
        assert not set(ids.flatten().tolist()) & set(known.all_special_ids)
    for row in rows:
        assert row.times_faster == row.before_ms / row.after_ms > 0
        assert (row.before_mib is None) == (row.after_mib is None) == (not memory)


def test_timing_stops_at_the_limit_after_at_least_two_passes():
    calls = []
    median_seconds(lambda: calls.append(1), repeats=50, most=0.0)
    assert len(calls) == 2
    median_seconds(lambda: calls.append(1), repeats=5, most=60.0)
    assert len(calls) == 7


def test_lengths_that_do_not_fit():
    with pytest.raises(InvalidInput, match=r"lengths: expected 1 or more, got 0"):
        time_model(classifier(), {}, [7, 0])


def test_memory_of_a_call():
    import torch

    kept = []
    result = extra_memory(lambda: kept.append(torch.ones(2**23)))  # 32 MiB
    if result is None:
        pytest.skip("this system cannot say")
    assert 30 < result < 100
    assert extra_memory(lambda: None) < 30
    assert Timed(1, 6.0, 3.0, None, None).times_faster == 2


def test_only_the_last_logits_of_a_language_model_are_computed():
    """Logits of a long text would not fit in memory."""
    model, shapes = language_model(), []
    model.lm_head.register_forward_hook(lambda module, arguments, output: shapes.append(output.shape))
    time_model(model, {1: CHEAP}, [7, 23], batch=3, repeats=2, seconds=0.0)
    assert set(shapes) == {(3, 1, 59)}
