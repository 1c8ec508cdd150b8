"""Batches made ready in the background while the model works."""

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
"""Threads: making the plan of a forest can take longer than a step of the model."""


def prefetched(make: Callable[[T], U], items: Iterable[T], ahead: int = 2) -> Generator[U]:
    """`make` of every item, in order, by threads that are up to `ahead` of them ahead. Their errors are raised here.

    >>> list(prefetched(lambda n: n * n, range(4)))
    [0, 1, 4, 9]
    """
    left, waiting = iter(items), deque[Future[U]]()
    torch.get_num_threads()  # settles that of this thread, which else begins with what was last set anywhere
    # One thread of PyTorch for each of ours: a team of threads would fight with the model's for the cores.
    pool = ThreadPoolExecutor(WORKERS, "hsa-prefetch", torch.set_num_threads, (1,))
    try:
        while True:
            waiting.extend(pool.submit(make, item) for item in islice(left, 1 + ahead - len(waiting)))
            if not waiting:
                return
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
