"""What skipping gives: entmax without a gradient, with and without looking at families that get no weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

import hsa
from benchmarks.cpu_attention import BRANCHING, DIM, HEADS
from benchmarks.gpu_attention import milliseconds
from benchmarks.measure import check, medians, write_table
from hsa.attention import normalizers
from hsa.attention.hierarchical.entmax import sweeps as sparse

BLOCK = 128
"""Leaves that look at another block of as many."""
LENGTHS = {"cpu": (1024, 4096, 16384), "cuda": (16384, 131072, 1048576)}
STRENGTHS = (0.0, 2.0, 4.0)
NORMALIZERS: dict[str, Any] = {
    "α = 1.5": 1.5,
    "α = 2": 2.0,
    "α per level and head": torch.linspace(1.4, 1.6, 3 * HEADS).view(3, HEADS),
}


@contextmanager
def all_visited() -> Iterator[None]:
    """Inside it, nothing is skipped."""
    normalizers.SKIPS = False
    try:
        yield
    finally:
        normalizers.SKIPS = True


def blocks(length: int, strength: float, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v: every block has keys like the queries of one other block, the more so the stronger."""
    q, k, v = torch.randn(3, length, HEADS, DIM).unbind(0)
    code = torch.randn(-(-length // BLOCK), HEADS, DIM)
    other = code[torch.randperm(len(code))]
    q, k = (x + strength * y.repeat_interleave(BLOCK, 0)[:length] for x, y in ((q, code), (k, other)))
    return q.to(device), k.to(device), v.to(device)


def run() -> None:
    torch.manual_seed(0)
    rows: list[list[Any]] = []
    for device, lengths in LENGTHS.items():
        if device == "cuda" and not torch.cuda.is_available():
            continue
        for length in lengths:
            tree = hsa.Hierarchy.regular([length], BRANCHING).to(device)
            for strength in STRENGTHS:
                q, k, v = blocks(length, strength, device)
                for name, alpha in NORMALIZERS.items():
                    rows.append([device, f"{length:,}", name, *_measure(q, k, v, tree, alpha)])
    write_table(
        "entmax_skipping",
        f"Skipping what gets no weight: hierarchical entmax without a gradient, {HEADS} heads × {DIM}, float32, batch 1",
        [("", ["device", "tokens", "entmax", "visited", "ms softmax", "ms all", "ms", "times faster"], rows)],
        f"A regular tree, branching {BRANCHING}; blocks of {BLOCK} leaves have keys like the queries of another block, not\n"
        "at all, to some degree and more so. Visited: share of families, times heads, that get a weight from above. “all”:\n"
        "nothing is skipped. On the CPU the torch backend, medians, all in turns; on a GPU fused kernels, medians of CUDA\n"
        "graph replays. The results of both are compared before timing.",
    )


def _measure(q: Tensor, k: Tensor, v: Tensor, tree: hsa.Hierarchy, alpha: float | Tensor) -> list[Any]:
    alpha = alpha.to(q.device) if isinstance(alpha, Tensor) else alpha
    entmax = hsa.Entmax(alpha, least=1.4)
    attend = partial(hsa.hierarchical_attention, q, k, v, tree, backend="triton" if q.is_cuda else "torch")

    @torch.no_grad()
    def skipping(normalizer: Any = entmax) -> Tensor:
        return attend(normalizer=normalizer)

    def all_() -> Tensor:
        with all_visited():
            return skipping()

    check("skipping", skipping(), all_(), 1e-4)
    candidates: dict[str, Callable[[], Any]] = {"softmax": lambda: skipping("softmax"), "all": all_, "own": skipping}
    if q.is_cuda:
        times = {name: milliseconds(step, graph=True) for name, step in candidates.items()}
    else:
        times = medians(candidates, repeats=11)
    visited = sparse.visited(q, k, tree, normalizer=entmax).fraction
    return [f"{100 * visited:.0f} %", *times.values(), times["all"] / times["own"]]
