"""Tests of failed runs."""

import gc
import weakref
from dataclasses import asdict

import numpy as np
import pytest
import torch

from hsa.training import failures
from hsa.training.failures import Diverged, OutOfMemory, catch_oom, reported


class Large:
    """Object that a run holds while it fails."""


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
def test_out_of_memory_is_caught_and_memory_is_freed(name):
    held = []

    @catch_oom
    def run():
        large = Large()
        held.append(weakref.ref(large))
        FULL[name]()

    gc.disable()  # memory must be freed without it
    try:
        with pytest.raises(OutOfMemory, match=r"^out of memory; try a smaller --batch-tokens") as caught:
            run()
        assert held[0]() is None
        assert caught.value.__context__ is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("kind", "message"), [(RuntimeError, "shapes do not fit"), (ValueError, "out of memory"), (Diverged, "no number")]
)
def test_other_errors_are_not_converted(kind, message):
    with pytest.raises(kind, match=message) as caught:
        catch_oom(raising(kind, message))()
    assert type(caught.value) is kind


def test_with_several_processes_the_original_error_is_raised(monkeypatch):
    monkeypatch.setattr(failures, "_has_other_processes", lambda: True)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        catch_oom(full_cpu)()


def test_the_wrapper_keeps_name_and_result():
    assert catch_oom(asdict) is not asdict
    assert catch_oom(lambda a, *, b: (a, b))(3, b=5) == (3, 5)


def test_a_failure_is_reported_without_traceback():
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
