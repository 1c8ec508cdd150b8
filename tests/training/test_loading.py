import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa.training.loading import prefetched


def workers():
    return [thread for thread in threading.enumerate() if thread.name == "hsa-prefetch"]


@settings(max_examples=20)
@given(st.lists(st.integers() | st.none()), st.integers(1, 5))
def test_the_same_items_in_the_same_order(items, ahead):
    assert list(prefetched(items, ahead)) == items
    assert not workers()


def failing(number, error):
    yield from range(number)
    raise error


@pytest.mark.parametrize("number", [0, 1, 7])
@pytest.mark.parametrize("error", [ValueError("of the data"), KeyboardInterrupt()])
def test_errors_are_raised_after_the_items_before_them(number, error):
    loaded = prefetched(failing(number, error))
    assert [next(loaded) for _ in range(number)] == list(range(number))
    with pytest.raises(type(error)) as caught:
        next(loaded)
    assert caught.value is error
    assert not workers()


def endless(made):
    while True:
        made.append(None)
        yield len(made)


@pytest.mark.parametrize("taken", [1, 5])
def test_stopping_early_ends_the_thread(taken):
    made = []
    loaded = prefetched(endless(made), ahead=3)
    for _ in range(taken):
        next(loaded)
    assert len(workers()) == 1
    loaded.close()
    assert not workers()


def test_leaving_a_loop_ends_the_thread():
    for item in prefetched(endless([])):
        if item == 3:
            break
    assert not workers()


def test_an_error_of_the_one_who_reads_ends_the_thread():
    def read():
        for _ in prefetched(endless([])):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read()
    assert not workers()


def test_it_runs_so_far_ahead_and_no_farther():
    made, ahead = [], 3
    loaded = prefetched(endless(made), ahead)
    next(loaded)
    deadline = time.monotonic() + 10
    while len(made) < ahead + 2 and time.monotonic() < deadline:  # one taken, `ahead` in line, one in hand
        time.sleep(0.001)
    time.sleep(0.05)
    assert len(made) == ahead + 2
    loaded.close()


def test_nothing_runs_before_the_first_item_is_asked_for():
    made = []
    prefetched(endless(made))
    assert not made
    assert not workers()


def test_several_at_once():
    pairs = list(zip(prefetched(range(50)), prefetched(iter("ab" * 25)), strict=True))
    assert [number for number, _ in pairs] == list(range(50))
    assert not workers()


def test_the_reader_keeps_its_threads_of_computation():
    """The worker computes with one; that must not become what a reader starts with."""
    before, seen = torch.get_num_threads(), []

    def read():  # a new thread stands for a process that has computed nothing yet
        loaded = prefetched(range(3))
        next(loaded)
        seen.append(torch.get_num_threads())
        loaded.close()

    torch.set_num_threads(2)
    try:
        reader = threading.Thread(target=read)
        reader.start()
        reader.join()
        assert seen == [2]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
