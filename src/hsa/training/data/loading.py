"""Preparation of batches in background threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import torch

T = TypeVar("T")
U = TypeVar("U")

WORKERS = 2
"""Number of threads: planning the attention over a forest can take longer than a step of the model."""


def prefetched(make: Callable[[T], U], items: Iterable[T], ahead: int = 2) -> Generator[U]:
    """Yield `make(item)` for every item, in order, computed by threads up to `ahead` items ahead.

    Errors in the threads are raised here.

    >>> list(prefetched(lambda n: n * n, range(4)))
    [0, 1, 4, 9]
    """
    left, waiting = iter(items), deque[Future[U]]()
    torch.get_num_threads()  # fixes the count of this thread, which would otherwise start with the last one set anywhere
    # One PyTorch thread per worker: more would compete with the model for the cores.
    pool = ThreadPoolExecutor(WORKERS, "hsa-prefetch", torch.set_num_threads, (1,))
    try:
        while True:
            waiting.extend(pool.submit(make, item) for item in islice(left, 1 + ahead - len(waiting)))
            if not waiting:
                return
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
