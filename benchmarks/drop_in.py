"""`hsa.scaled_dot_product_attention` against PyTorch's, called from Python as a user calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

import hsa
from benchmarks.gpu_attention import BACKENDS, milliseconds
from benchmarks.measure import check, medians, write_table

GPU_SHAPES = ((16, 2048), (4, 8192), (2, 16384), (1, 32768), (1, 131072))
CPU_SHAPES = ((4, 1024), (1, 4096), (1, 16384))
KINDS: tuple[Any, ...] = ("clustered", "multiscale", "hierarchical")
EVERYTHING: dict[Any, dict[str, Any]] = {
    "clustered": {"top_k": 999},
    "multiscale": {"top_k": 999},
    "hierarchical": {"branching": (999,)},
}
HEADER = ("pass", "batch × tokens", "attention", "PyTorch ms", *(f"{kind} ms" for kind in KINDS), "times faster")


def run_gpu() -> None:
    """Time 16 heads of 64 channels in bfloat16; PyTorch's time is the faster of its flash and cuDNN backends."""

    def best(q: Tensor, k: Tensor, v: Tensor, causal: bool, step: Callable[..., Any]) -> float:
        times = []
        for backend in BACKENDS.values():
            with sdpa_kernel([backend]):
                times.append(milliseconds(step(partial(F.scaled_dot_product_attention, is_causal=causal), q, k, v)))
        return min(times)

    rows = []
    for batch, length in GPU_SHAPES:
        q, k, v = torch.randn(3, batch, 16, length, 64, device="cuda", dtype=torch.bfloat16).unbind(0)
        _check(q, k, v)
        for backward in (False, True):
            step = _with_backward if backward else _forward
            for causal in (False, True):
                exact = best(q, k, v, causal, step)
                ours = [milliseconds(step(run, q, k, v)) if run is not None else None for run in _operators(causal)]
                rows.append(_row(batch, length, backward, causal, exact, ours))
                print(rows[-1], flush=True)
    notes = (
        "16 heads of 64 channels, bfloat16, default options. Times of calls from Python, including clustering and "
        "selection, but not the building of the tree, which is cached between calls. PyTorch: the faster of its flash and "
        'cuDNN backends. "times faster": PyTorch\'s time divided by that of each kind, in the order of the columns. Before '
        "timing, each kind is compared with PyTorch's attention on the first 300 tokens, with every key selected."
    )
    write_table("drop_in_gpu", "A drop-in for scaled_dot_product_attention: GPU", [("", HEADER, rows)], notes)


def run_cpu() -> None:
    """Time 8 heads of 64 channels in float32."""
    rows = []
    for batch, length in CPU_SHAPES:
        q, k, v = torch.randn(3, batch, 8, length, 64).unbind(0)
        _check(q, k, v)
        for causal in (False, True):
            runs = [partial(F.scaled_dot_product_attention, is_causal=causal), *_operators(causal)]
            times = medians({str(i): _forward(run, q, k, v) for i, run in enumerate(runs) if run is not None})
            exact, *ours = (times.get(str(i)) for i in range(len(runs)))
            assert exact is not None
            rows.append(_row(batch, length, False, causal, exact, ours))
            print(rows[-1], flush=True)
    notes = "8 heads of 64 channels, float32, default options, forward; otherwise as on the GPU."
    write_table("drop_in_cpu", "A drop-in for scaled_dot_product_attention: CPU", [("", HEADER, rows)], notes)


def _operators(causal: bool) -> Iterator[Callable[..., Tensor] | None]:
    for kind in KINDS:
        run = partial(hsa.scaled_dot_product_attention, is_causal=causal, kind=kind)
        yield None if causal and kind == "hierarchical" else run


def _forward(run: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Any]:
    def step() -> Tensor:
        with torch.no_grad():
            return run(*inputs)

    return step


def _with_backward(run: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Any]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    d_out = torch.randn_like(inputs[0])
    return lambda: torch.autograd.grad(run(*leaves), leaves, d_out)


def _check(*inputs: Tensor) -> None:
    q, k, v = (x[:1, :, :300] for x in inputs)
    for kind, options in EVERYTHING.items():
        for causal in (False, True) if kind != "hierarchical" else (False,):
            out = hsa.scaled_dot_product_attention(q, k, v, is_causal=causal, kind=kind, **options)
            exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
            check(f"{kind}, causal={causal}", out, exact, 2e-2 if q.dtype == torch.bfloat16 else 1e-4)


def _row(batch: int, length: int, backward: bool, causal: bool, exact: float, ours: list[float | None]) -> list[Any]:
    faster = " / ".join("–" if time is None else _ratio(exact / time) for time in ours)
    what = "forward + backward" if backward else "forward"
    return [what, f"{batch} × {length:,}", "causal" if causal else "full", exact, *ours, faster]


def _ratio(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
