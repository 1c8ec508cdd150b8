"""Measurement of the time of a call."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def median_seconds(
    run: Callable[[], Any], repeats: int, most: float = math.inf, device: torch.device | str = "cpu"
) -> float:
    """Return the median time of `repeats` calls, or of at least two if they take longer than `most` seconds in total."""
    gpu = torch.device(device).type == "cuda"
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < repeats and (len(times) < 2 or time.perf_counter() - began < most):
        start = time.perf_counter()
        run()
        if gpu:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)
