"""Time of three-way attention on a GPU: `python -m benchmarks.trilinear_gpu [tune] [time] [--write]`.

Output and gradients are always compared with float64 first. `time` compares the kernels with the streaming backend; `tune`
times every kernel with every candidate tile, for the tables in `hsa.research.trilinear.triton.tiles`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import hsa
from benchmarks.gpu_attention import Step, milliseconds, with_backward
from benchmarks.measure import check, write_table
from hsa.research.trilinear.call import Rows
from hsa.research.trilinear.operator import trilinear_attention
from hsa.research.trilinear.triton import tiles as trilinear_tiles
from hsa.research.trilinear.triton.backward import gradient_of_queries, gradients_of_first
from hsa.research.trilinear.triton.forward import forward
from hsa.research.trilinear.triton.tiles import KernelCall, Tile

HEADS, DTYPE = 16, torch.bfloat16
PEAK = 989e12
"""Dense bfloat16 operations per second of an H100 or H200 SXM, from NVIDIA's data sheet."""
BACKWARD = 5.5
"""Products of the gradients relative to those of the forward pass: 3 for the queries and 4 for each other set, over 2."""
TOLERANCE = {torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}


class Case(NamedTuple):
    batch: int
    length: int
    dim: int = 64
    causal: bool = False
    window: int | None = None

    def __str__(self) -> str:
        limits = (", causal" if self.causal else "") + ("" if self.window is None else f", window {self.window}")
        return f"{self.batch} × {self.length:,}, dim {self.dim}{limits}"

    @property
    def limits(self) -> tuple[int | None, int | None]:
        reach = None if self.window is None else self.window - 1
        return reach, 0 if self.causal else reach

    @property
    def operations(self) -> float:
        """Operations of the forward pass: 4 · dim for every head, query and visible pair."""
        left, right = self.limits
        i = np.arange(self.length, dtype=np.float64)
        before = i if left is None else np.minimum(i, left)
        after = self.length - 1 - i if right is None else np.minimum(self.length - 1 - i, right)
        return 4 * self.dim * HEADS * self.batch * float(((1 + before + after) ** 2).sum())

    def forest(self) -> hsa.Hierarchy:
        return hsa.Hierarchy.flat([self.length] * self.batch).to("cuda")

    def inputs(self) -> list[Tensor]:
        rows = self.batch * self.length
        return [torch.randn(rows, HEADS, self.dim, device="cuda", dtype=DTYPE) for _ in range(6)]


CASES = (
    Case(16, 256),
    Case(8, 512),
    Case(2, 1024),
    Case(1, 2048),
    Case(2, 1024, dim=32),
    Case(1, 1024, dim=128),
    Case(2, 1024, causal=True),
    Case(1, 4096, window=256),
    Case(1, 8192, window=256),
    Case(1, 8192, causal=True, window=256),
)
TUNED = (
    Case(2, 1024),
    Case(2, 1024, dim=32),
    Case(1, 4096, window=256),
    Case(1, 4096, dim=32, window=256),
    Case(1, 1024, dim=128),
)
CANDIDATES: dict[tuple[str, int], list[Tile]] = {
    ("forward", 32): [
        Tile(64, 128, 4), Tile(64, 128, 4, 1, 168), Tile(64, 64, 4), Tile(64, 64, 4, 1, 128), Tile(64, 64, 4, 1, 96),
        Tile(128, 128, 8), Tile(128, 64, 8, 1, 128), Tile(64, 32, 4, 1, 96),
    ],
    ("forward", 64): [
        Tile(64, 128, 4), Tile(64, 128, 4, 1, 168), Tile(64, 64, 4), Tile(64, 64, 4, 1, 168), Tile(64, 64, 4, 1, 128),
        Tile(128, 128, 8), Tile(128, 64, 8, 1, 128), Tile(64, 128, 4, 3), Tile(64, 32, 4, 1, 128),
    ],
    ("forward", 128): [Tile(64, 64, 4), Tile(128, 64, 8), Tile(64, 32, 4), Tile(64, 128, 8), Tile(32, 64, 4)],
    ("queries", 32): [
        Tile(64, 64, 4), Tile(64, 64, 4, 1, 168), Tile(64, 64, 4, 1, 128), Tile(64, 128, 4), Tile(128, 64, 8),
        Tile(64, 32, 4, 1, 128),
    ],
    ("queries", 64): [
        Tile(64, 64, 4), Tile(64, 64, 4, 1, 168), Tile(64, 32, 4, 1, 168), Tile(128, 64, 8), Tile(64, 128, 8),
        Tile(64, 32, 4, 1, 128),
    ],
    ("queries", 128): [Tile(64, 32, 4), Tile(64, 64, 4), Tile(64, 64, 8), Tile(32, 64, 4), Tile(64, 32, 8)],
    ("keys", 32): [
        Tile(64, 64, 4), Tile(64, 64, 4, 1, 168), Tile(64, 64, 4, 1, 128), Tile(128, 64, 8), Tile(64, 32, 4, 1, 128),
        Tile(64, 128, 4),
    ],
    ("keys", 64): [
        Tile(64, 64, 4), Tile(64, 32, 4), Tile(64, 32, 4, 1, 168), Tile(64, 64, 8), Tile(128, 64, 8), Tile(128, 32, 8),
    ],
    ("keys", 128): [Tile(32, 32, 4), Tile(64, 32, 8), Tile(32, 64, 4), Tile(64, 64, 8), Tile(64, 32, 4)],
}  # fmt: skip
SHARE = {"forward": 1.0, "queries": 1.5, "keys": 2.0}
"""Products of each kernel relative to those of the forward pass."""


CHECKED = {
    "bfloat16": (32, 64, 128, 19),
    "float16": (32, 64),
    "float32": (64, 19),
}


def check_correctness(dtype: str, dim: int) -> None:
    """Compare output and gradients with the streaming backend in float64: limits, ragged batches, other sets."""
    variants: list[dict[str, Any]] = [{}, {"causal": True}, {"window": 37}, {"causal": True, "window": 70}]
    variants.append({"first": [133, 5, 70, 2], "second": [1, 200, 31, 64]})
    worst = [_error([211, 1, 64, 130], dim, getattr(torch, dtype), variant) for variant in variants]
    print(f"{dtype}, dim {dim}: largest errors, forward and gradients {max(x[0] for x in worst):.1e}, ", end="")
    print(f"{max(x[1] for x in worst):.1e} of the largest value")


def _error(lengths: list[int], dim: int, dtype: torch.dtype, variant: dict[str, Any]) -> tuple[float, float]:
    options: dict[str, Any] = {
        name: hsa.Hierarchy.flat(x).to("cuda") if isinstance(x, list) else x for name, x in variant.items()
    }
    forest = hsa.Hierarchy.flat(lengths).to("cuda")
    sets = [options.get(name, forest).num_leaves for name in ("first", "second", "first", "second")]
    made = [torch.randn(rows, 2, dim, device="cuda", dtype=dtype) for rows in (forest.num_leaves, *sets)]
    d_out = torch.randn(forest.num_leaves, 2, dim, device="cuda", dtype=dtype)
    attend: Callable[..., Tensor] = partial(trilinear_attention, **options)
    results = []
    for backend, exact in (("triton", dtype), ("streaming", torch.float64)):
        leaves = [x.detach().to(exact).requires_grad_() for x in made]
        out = attend(*leaves, forest, backend=backend)
        results.append((out, *torch.autograd.grad(out, leaves, d_out.to(exact))))
    errors = []
    for name, x, y in zip(("out", "d_q", "d_k1", "d_k2", "d_v1", "d_v2"), *results, strict=True):
        x, y = x.detach(), y.detach()
        check(f"{dtype}, dim {dim}, {variant}, {name}", x, y, TOLERANCE[dtype])
        errors.append(float((x - y).abs().max() / y.abs().max()))
    return errors[0], max(errors[1:])


def tune(seconds: float = 100.0) -> None:
    """Print the milliseconds of every kernel with every candidate tile, and the best."""
    began = time.perf_counter()
    for case in TUNED:
        if time.perf_counter() - began > seconds:
            print(f"out of time before {case}")
            return
        for kernel, run in _kernels(case).items():
            times: dict[Tile, float] = {}
            for tile in CANDIDATES[kernel, case.dim]:
                chosen = trilinear_tiles.HALF[kernel, case.dim]
                trilinear_tiles.HALF[kernel, case.dim] = tile
                try:
                    times[tile] = milliseconds(run, seconds=0.1)
                except Exception as error:  # too much shared memory, or the compiler gives up
                    print(f"  {kernel} {tuple(tile)}: {type(error).__name__}")
                    torch.cuda.synchronize()
                finally:
                    trilinear_tiles.HALF[kernel, case.dim] = chosen
            best = min(times, key=times.__getitem__)
            rate = SHARE[kernel] * case.operations / times[best] / 1e9
            print(f"{case}: {kernel} best {_named(best)} {times[best]:.3f} ms, {rate:.0f} TFLOP/s; ", end="")
            print(", ".join(f"{_named(tile)} {taken:.3f}" for tile, taken in times.items()), flush=True)


def compile_candidates(case: int, kernel: str) -> None:
    """Run each candidate once, on few rows, so that Triton has it on disk."""
    tuned = TUNED[case]
    run = _kernels(tuned._replace(batch=1, length=64))[kernel]
    for tile in CANDIDATES[kernel, tuned.dim]:
        trilinear_tiles.HALF[kernel, tuned.dim] = tile
        with suppress(Exception):  # `tune` reports it
            run()


def _named(tile: Tile) -> str:
    return f"{tile.rows}×{tile.columns}/{tile.num_warps}/{tile.num_stages}/{tile.registers or '–'}"


def _kernels(case: Case) -> dict[str, Step]:
    *rows, d_out = case.inputs()
    offsets = case.forest().tensor("leaf_offsets")
    call = KernelCall(Rows(*rows), (offsets, offsets, offsets), *case.limits, case.dim**-0.5)
    attend = partial(forward, *call.rows, *call.offsets, call.left, call.right, call.scale)
    out, mass = attend()
    queries = partial(gradient_of_queries, call, d_out, out, mass)
    _, shared = queries()
    keys = partial(gradients_of_first, call, d_out, shared, mass)
    return {"forward": attend, "queries": queries, "keys": keys}


def patient(step: Step) -> float:
    """Return the milliseconds of a step; of a single run if that takes more than a second."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    once = begin.elapsed_time(end)
    return once if once > 1000 else milliseconds(step, seconds=0.2)


def rows() -> list[list[Any]]:
    table = []
    for case in CASES:
        *made, d_out = case.inputs()
        attend: Callable[..., Tensor] = partial(
            trilinear_attention, hierarchy=case.forest(), causal=case.causal, window=case.window
        )
        for backward in (False, True):
            times = {}
            for backend in ("triton", "streaming"):
                run = partial(attend, backend=backend)
                step = with_backward(run, d_out, *made) if backward else partial(run, *made)
                if backend == "triton":
                    times[backend] = milliseconds(step, graph=not backward)
                else:
                    times[backend] = patient(step)
            operations = case.operations * (1 + BACKWARD if backward else 1)
            rate = operations / times["triton"] * 1e3
            what = "forward + backward" if backward else "forward"
            ratio = times["streaming"] / times["triton"]
            table.append(
                [what, str(case), times["triton"], times["streaming"], ratio, rate / 1e12, f"{rate / PEAK:.0%}"]
            )
            print(table[-1], flush=True)
        torch.cuda.empty_cache()
    return table


def time_all(write: bool = True) -> None:
    header = ["", "batch × tokens", "kernels ms", "streaming ms", "× faster", "TFLOP/s", "of peak"]
    table = rows()
    if write:
        write_table(
            "trilinear_gpu",
            f"Three-way attention on a GPU: {HEADS} heads, bfloat16",
            [("", header, table)],
            f"Operations are 4 · dim for every head, query and visible pair (logits and averages), and {BACKWARD} "
            "times as many for the gradients: 3 products for the queries and 4 for each other set, against 2. Peak "
            f"is {PEAK / 1e12:.0f} TFLOP/s, dense, from NVIDIA's data sheet of the H100 and H200 SXM. Forward times "
            "are those of CUDA graph replays; times with gradients and of the streaming backend are those of calls "
            "from Python. Inputs are random. Outputs and gradients of both backends were compared with float64 first.",
            command="python -m benchmarks.trilinear_gpu time --write",
        )


def side_by_side(jobs: list[list[str]]) -> None:
    """Run this program with each list of arguments, in parallel, because most of the time is compilation."""
    command = [sys.executable, "-m", "benchmarks.trilinear_gpu"]
    running = [subprocess.Popen([*command, *job], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for job in jobs]
    failed = False
    for job, process in zip(jobs, running, strict=True):
        output, _ = process.communicate()
        if process.returncode or job[0] == "check":
            print(output.decode().strip()[-600:], flush=True)
        failed |= process.returncode != 0 and job[0] == "check"
    if failed:
        raise SystemExit("the kernels are wrong")


def main(arguments: list[str]) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    if arguments[:1] == ["check"]:
        check_correctness(arguments[1], int(arguments[2]))
        return
    if arguments[:1] == ["compile"]:
        compile_candidates(int(arguments[1]), arguments[2])
        return
    began = time.perf_counter()
    jobs = [["check", dtype, str(dim)] for dtype, dims in CHECKED.items() for dim in dims]
    if "tune" in arguments:
        jobs += [["compile", str(case), kernel] for case in range(len(TUNED)) for kernel in SHARE]
    side_by_side(jobs)
    print(f"checked after {time.perf_counter() - began:.0f} s", flush=True)
    if "tune" in arguments:
        tune()
        print(f"tuned after {time.perf_counter() - began:.0f} s", flush=True)
    if "time" in arguments:
        time_all("--write" in arguments)
        print(f"done after {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
