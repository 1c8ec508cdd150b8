"""Estimates of memory: linear beyond what was measured, and None where nothing can be measured."""

import pytest
import torch

from hsa.analysis import memory
from hsa.analysis.memory import MemoryNeed, estimate_need, free_memory


@pytest.fixture
def measured(monkeypatch):
    """Let a run of n tokens take 100 + 2 n MiB, with 1,000 MiB free."""
    runs = []

    def extra_memory(run, device):
        run()
        return 100 + 2 * runs[-1]

    monkeypatch.setattr(memory, "extra_memory", extra_memory)
    monkeypatch.setattr(memory, "free_memory", lambda device: 1000)
    return runs


def test_memory_is_taken_to_grow_linearly(measured):
    assert estimate_need(measured.append, 800) == MemoryNeed(needed=1700, free=1000, fits=450)
    assert measured == [100, 100, 200]
    assert estimate_need(measured.append, 400) == MemoryNeed(needed=900, free=1000, fits=400)


def test_memory_that_does_not_grow(measured, monkeypatch):
    monkeypatch.setattr(memory, "extra_memory", lambda run, device: 50.0)
    assert estimate_need(measured.append, 800) == MemoryNeed(needed=50, free=1000, fits=200)  # the longest that ran


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError])
def test_runs_that_fail_too(measured, kind):
    def full(tokens):
        raise kind("out of memory")

    assert estimate_need(full, 800) is None


def test_texts_too_short_to_measure_a_part_of(measured):
    assert estimate_need(measured.append, 7) is None


def test_memory_that_cannot_be_measured(measured, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: None)
    assert estimate_need(measured.append, 800) is None


def test_free_memory_of_this_machine():
    free = free_memory()
    if free is None:
        pytest.skip("this system cannot say")
    assert 1 < free < 2**30


def test_a_real_estimate():
    kept = torch.ones(1)

    def run(tokens):
        return kept.expand(tokens, 2**18).clone()  # 1 MiB per token

    need = estimate_need(run, 160)
    if need is None:
        pytest.skip("this system cannot say")
    assert 130 < need.needed < 240
