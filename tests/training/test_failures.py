"""Runs without a result."""

import gc
import weakref
from dataclasses import asdict

import numpy as np
import pytest
import torch

from hsa.training import failures as endings
from hsa.training.failures import Diverged, OutOfMemory, catch_oom, reported


class Large:
    """Something that a run holds while it fails."""


def full_cpu():
    return torch.empty(2**60)


def full_numpy():
    return np.empty(2**50)


def raising(kind, message):
    def run():
        raise kind(message)

    return run


FULL = {
    "torch on the CPU": full_cpu,
    "numpy": full_numpy,
    "the allocator of a GPU": raising(torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 20.00 GiB."),
    "the driver of a GPU": raising(RuntimeError, "CUDA error: out of memory"),
    "cuBLAS": raising(RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
}


@pytest.mark.parametrize("name", FULL)
def test_full_memory_is_noticed_and_what_was_held_is_free(name):
    held = []

    @catch_oom
    def run():
        large = Large()
        held.append(weakref.ref(large))
        FULL[name]()

    gc.disable()  # nothing may wait for it
    try:
        with pytest.raises(OutOfMemory, match=r"^memory is full; try fewer --batch-tokens") as caught:
            run()
        assert held[0]() is None
        assert caught.value.__context__ is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("kind", "message"), [(RuntimeError, "shapes do not fit"), (ValueError, "out of memory"), (Diverged, "no number")]
)
def test_other_errors_stay_what_they_are(kind, message):
    with pytest.raises(kind, match=message) as caught:
        catch_oom(raising(kind, message))()
    assert type(caught.value) is kind


def test_processes_that_wait_for_each_other_end_together(monkeypatch):
    monkeypatch.setattr(endings, "_waited_for", lambda: True)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        catch_oom(full_cpu)()


def test_the_function_is_the_same_otherwise():
    assert catch_oom(asdict) is not asdict
    assert catch_oom(lambda a, *, b: (a, b))(3, b=5) == (3, 5)


def test_the_others_go_on_and_nothing_is_kept():
    held, failed = [], {}

    def train(name):
        large = Large()
        held.append(weakref.ref(large))
        if name in ("b", "d"):
            raise Diverged(name)
        return name.upper()

    results = []
    for letter in "abcd":
        with reported(letter, failed.__setitem__):
            results.append(train(letter))
    assert results == ["A", "C"]
    assert {name: str(error) for name, error in failed.items()} == {"b": "b", "d": "d"}
    assert [one() for one in held] == [None] * 4
    with pytest.raises(Diverged, match=r"^b$"), reported("b"):
        train("b")
