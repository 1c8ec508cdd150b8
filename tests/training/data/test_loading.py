import threading
import time
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa.training.data.loading import WORKERS, prefetched


def workers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("hsa-prefetch")]


@settings(max_examples=20)
@given(st.lists(st.integers() | st.none()), st.integers(1, 5))
def test_items_keep_their_order(items, ahead):
    assert list(prefetched(lambda item: [item], items, ahead)) == [[item] for item in items]
    assert not workers()


def failing(number, error):
    def make(item):
        if item == number:
            raise error
        return item

    return make


@pytest.mark.parametrize("number", [0, 1, 7])
@pytest.mark.parametrize("error", [ValueError("of the data"), KeyboardInterrupt()])
def test_errors_are_raised_after_the_items_before_them(number, error):
    loaded = prefetched(failing(number, error), count())
    assert [next(loaded) for _ in range(number)] == list(range(number))
    with pytest.raises(type(error)) as caught:
        next(loaded)
    assert caught.value is error
    assert not workers()


def recorded(made):
    def make(item):
        made.append(item)
        return item

    return make


@pytest.mark.parametrize("taken", [1, 5])
def test_stopping_early_ends_the_thread(taken):
    made = []
    loaded = prefetched(recorded(made), count(), ahead=3)
    for _ in range(taken):
        next(loaded)
    assert 1 <= len(workers()) <= WORKERS
    loaded.close()
    assert not workers()


def test_leaving_a_loop_ends_the_thread():
    for item in prefetched(recorded([]), count()):
        if item == 3:
            break
    assert not workers()


def test_an_error_in_the_consumer_ends_the_thread():
    def read():
        for _ in prefetched(recorded([]), count()):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read()
    assert not workers()


def test_number_of_items_ahead():
    made, ahead = [], 3
    loaded = prefetched(recorded(made), count(), ahead)
    next(loaded)
    deadline = time.monotonic() + 10
    while len(made) < ahead + 1 and time.monotonic() < deadline:  # one taken, `ahead` in line
        time.sleep(0.001)
    time.sleep(0.05)
    assert len(made) == ahead + 1
    loaded.close()


def test_nothing_runs_before_the_first_item_is_requested():
    made = []
    prefetched(recorded(made), count())
    assert not made
    assert not workers()


def test_several_at_the_same_time():
    pairs = list(zip(prefetched(int, range(50)), prefetched(str, iter("ab" * 25)), strict=True))
    assert [number for number, _ in pairs] == list(range(50))
    assert not workers()


def test_the_consumer_keeps_its_number_of_threads():
    """The workers use one PyTorch thread each; the consumer must not start with that number."""
    before, seen = torch.get_num_threads(), []

    def read():  # a new thread behaves as a process that has computed nothing yet
        loaded = prefetched(int, range(3))
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
