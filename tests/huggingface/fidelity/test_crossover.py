"""Length from which on converted attention is faster: found from times, measured once, named in words."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from hsa.huggingface import layer_plan
from hsa.huggingface.fidelity import crossover
from hsa.huggingface.fidelity.crossover import Crossover, measure_crossover
from hsa.huggingface.settings import LayerSettings
from tests.huggingface.fidelity.small import CLUSTERED, classifier, language_model


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HSA_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def times(monkeypatch):
    """Let exact attention take n² ns and converted attention 10 n µs; record the lengths measured."""
    measured = []

    def seconds(run, device):
        exact = run.func is F.scaled_dot_product_attention
        length = (run.args[0] if exact else run.args[1].query).shape[2]
        measured.append(length)
        return 1e-9 * length**2 if exact else 1e-5 * length

    monkeypatch.setattr(crossover, "_seconds", seconds)
    return measured


@pytest.mark.parametrize("model", [classifier, language_model])
def test_the_first_length_that_is_faster(times, model):
    found = measure_crossover(model(), LayerSettings(threshold=0.5) if model is language_model else CLUSTERED)
    assert found.length == 16384
    assert (found.heads, found.head_dim) == (4, 8)
    assert max(times) == 16384  # longer ones are not measured
    assert str(found).startswith("converted attention is faster than exact attention from about 16,384 tokens on (")


def test_lengths_stop_at_the_time_limit(times, monkeypatch):
    monkeypatch.setattr(crossover, "SECONDS", 0.06)  # 4,096 tokens would take 0.08
    found = measure_crossover(classifier(), CLUSTERED)
    assert (found.length, max(times), found.extrapolated) == (None, 2048, 16384)
    assert "up to 2,048 tokens, by extrapolation from about 16,384 on (" in str(found)


@pytest.mark.parametrize(
    "rows", [[(512, 0.1, 0.2)], [(512, 0.1, 0.2), (1024, 0.2, 0.4)], [(512, 0.1, 99.0), (1024, 0.4, 300.0)]]
)
def test_nothing_to_extrapolate(rows):
    found = Crossover(4, 8, rows)
    assert found.extrapolated is None
    assert "extrapolation" not in str(found)


def test_times_are_cached(times, tmp_path, monkeypatch):
    first = measure_crossover(classifier(), CLUSTERED)
    times.clear()
    assert measure_crossover(classifier(seed=3), CLUSTERED) == first
    assert not times
    measure_crossover(classifier(), replace(CLUSTERED, top_k=3))
    assert times
    times.clear()
    measure_crossover(classifier(num_attention_heads=2), CLUSTERED)
    assert times
    times.clear()
    (tmp_path / "cache" / "crossover.json").write_text("{")
    assert measure_crossover(classifier(), CLUSTERED) == first
    assert times


def test_a_cache_that_cannot_be_written(times, monkeypatch):
    monkeypatch.setenv("HSA_CACHE", "/proc/none")
    assert measure_crossover(classifier(), CLUSTERED).length == 16384


@pytest.mark.parametrize("fits", [2048, 0])
def test_lengths_that_do_not_fit_into_memory(times, monkeypatch, fits):
    seconds = crossover._seconds

    def limited(run, device):
        if run.func is not F.scaled_dot_product_attention and run.args[1].query.shape[2] > fits:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return seconds(run, device)

    monkeypatch.setattr(crossover, "_seconds", limited)
    found = measure_crossover(classifier(), CLUSTERED)
    assert found is None if not fits else found.rows[-1][0] == fits


def test_trees_of_the_text_are_not_measured(times):
    assert measure_crossover(classifier(), replace(CLUSTERED, sinks="special")) is None
    assert not times


@pytest.mark.parametrize("model", [partial(classifier), partial(language_model, num_key_value_heads=2)])
def test_real_times(monkeypatch, model):
    monkeypatch.setattr(crossover, "LENGTHS", (8, 600))
    monkeypatch.setattr(crossover, "SECONDS", 100.0)
    monkeypatch.setattr(layer_plan, "exact_is_cheaper", lambda settings, length, causal: length < 100)
    settings = LayerSettings(threshold=0.1, exact_until=0) if model.func is language_model else CLUSTERED
    (short, exact, same), (long, before, after) = measure_crossover(model(), settings).rows
    assert (short, long) == (8, 600)
    assert exact == same > 0  # short texts attend exactly
    assert min(before, after) > 0
    assert before != after
