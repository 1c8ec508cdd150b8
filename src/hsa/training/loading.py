"""Batches made ready in the background while the model works."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable
from typing import TypeVar

import torch

T = TypeVar("T")


def prefetched(items: Iterable[T], ahead: int = 2) -> Generator[T]:
    """The same items, made by a thread that runs up to `ahead` of them ahead. Its errors are raised here.

    >>> list(prefetched(n * n for n in range(4)))
    [0, 1, 4, 9]
    """
    line: queue.Queue[tuple[bool, T | BaseException | None]] = queue.Queue(maxsize=ahead)
    stopped = threading.Event()

    def put(entry: tuple[bool, T | BaseException | None]) -> None:
        while not stopped.is_set():
            try:
                line.put(entry, timeout=0.1)
                return
            except queue.Full:
                continue

    def work() -> None:
        torch.set_num_threads(1)  # of this thread: its own team of threads would fight with the model's for the cores
        try:
            for item in items:
                put((True, item))
                if stopped.is_set():
                    return
            put((False, None))
        except BaseException as error:
            put((False, error))

    torch.get_num_threads()  # settles that of this thread, which else begins with what was last set anywhere
    thread = threading.Thread(target=work, daemon=True, name="hsa-prefetch")
    thread.start()
    try:
        while True:
            more, item = line.get()
            if more:
                yield item  # type: ignore[misc]
            elif isinstance(item, BaseException):
                raise item
            else:
                return
    finally:
        stopped.set()
        thread.join()
