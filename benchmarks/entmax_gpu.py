"""Errors and times of the entmax kernels of hierarchical attention on a GPU: `python -m benchmarks.entmax_gpu [check]`.

One run measures softmax, α = 1.5, α = 2 and an α per level with its gradient, forward and with gradients, on families of 16
to 128 members and on text-like trees. The spread of the logits decides how many steps the search for the threshold takes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

import hsa
from benchmarks.cpu_attention import hierarchical, text_like
from benchmarks.gpu_attention import BRANCHING, DIM, DTYPE, HEADS, milliseconds, with_backward
from benchmarks.measure import write_table

KINDS: dict[str, Any] = {
    "softmax": "softmax",
    "α = 1.5": hsa.Entmax(1.5),
    "α = 2": hsa.Entmax(2.0),
    "α by level": hsa.Entmax(torch.tensor([[1.3], [1.7], [1.5]]), least=1.3),
}
SPREADS = (0.1, 1.0, 4.0)
TREES = {
    "16": partial(hsa.Hierarchy.regular, [4096], BRANCHING),
    "32": partial(hsa.Hierarchy.regular, [700], (32, 4)),
    "64": partial(hsa.Hierarchy.regular, [700], (64, 4)),
    "128": partial(hsa.Hierarchy.regular, [900], (128,)),
    "text-like": partial(text_like, 2000),
}
"""Trees for the correctness check."""
MOST = 2.0
"""Aim: entmax with a fixed α takes at most this many times as long as softmax."""


def forests() -> dict[str, hsa.Hierarchy]:
    texts = hsa.Hierarchy.collate([text_like(512, seed) for seed in range(64)])
    return {
        "64 × 512, families of 16": hsa.Hierarchy.regular([512] * 64, BRANCHING),
        "1 × 131,072, families of 16": hsa.Hierarchy.regular([131072], BRANCHING),
        "1 × 32,768, families of 32": hsa.Hierarchy.regular([32768], (32,), repeat_last=True),
        "1 × 32,768, families of 64": hsa.Hierarchy.regular([32768], (64,), repeat_last=True),
        "1 × 32,768, families of 128": hsa.Hierarchy.regular([32768], (128,), repeat_last=True),
        "64 × 512, text-like": texts,
    }


def inputs(
    tree: hsa.Hierarchy, spread: float, heads: int = HEADS, dim: int = DIM, dtype: torch.dtype = DTYPE
) -> list[Tensor]:
    """Return random q, k, v and the gradient of the output; logits have the standard deviation `spread`."""
    q, k, v, d_out = (torch.randn(tree.num_leaves, heads, dim, device="cuda") for _ in range(4))
    return [x.to(dtype) for x in (q * spread, k, v, d_out)]


def check_correctness() -> list[list[Any]]:
    """Compare forward and gradients with the torch backend in float64: all family sizes, dtypes and spreads.

    Most of the time goes into compiling kernels, so several processes share the work; timing then finds them compiled.
    """
    with ProcessPoolExecutor(16, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(check_one, name, kind) for name in TREES for kind in KINDS]
        return [row for checked in waiting for row in checked.result()]


def check_one(name: str, kind: str) -> list[list[Any]]:
    """Check one tree with one normaliser; return a row per dtype and spread.

    The number of leaves below a row multiplies the rounding of its logits, and gradients of α = 2 jump where an entry leaves
    the support. Errors are therefore those of norms, and may reach three times those of the torch backend in the same dtype.
    """
    torch.manual_seed(0)
    tree, rows = TREES[name]().to("cuda"), []
    for dtype, tolerances in ((torch.float32, (1e-4, 1e-2)), (DTYPE, (3e-2, 5e-2))):
        for spread in SPREADS:
            dim = 32 if dtype == torch.float32 else DIM  # float32 tiles of 128 rows are narrower
            made = inputs(tree, spread, heads=2, dim=dim, dtype=dtype)
            ours, exact, theirs = (
                _run(tree, made, KINDS[kind], kind_of, backend)
                for kind_of, backend in ((dtype, "triton"), (torch.float64, "torch"), (dtype, "torch"))
            )
            errors = [_error(x, y) for x, y in zip(ours, exact, strict=True)]
            other = [_error(x, y) for x, y in zip(theirs, exact, strict=True)]
            rows.append([name, kind, str(dtype)[6:], spread, errors[0], max(errors[1:]), other[0], max(other[1:])])
            print(rows[-1], flush=True)
            for error, of_torch, what in zip(errors, other, ("out", "dq", "dk", "dv", "dα"), strict=False):
                if not error < max(tolerances[what != "out"], 3 * of_torch):
                    raise SystemExit(f"{rows[-1]}: {what} has error {error:.1e}, torch {of_torch:.1e}")
    return rows


def _run(
    tree: hsa.Hierarchy, made: Sequence[Tensor], normalizer: Any, dtype: torch.dtype, backend: str
) -> list[Tensor]:
    q, k, v = leaves = [x.detach().to(dtype).requires_grad_() for x in made[:3]]
    normalizer, of_alpha = on_gpu(normalizer, torch.promote_types(dtype, torch.float32))
    out = hierarchical(q, k, v, tree, normalizer=normalizer, backend=backend)
    return [out.detach(), *torch.autograd.grad(out, [*leaves, *of_alpha], made[3].to(dtype))]


def on_gpu(normalizer: Any, dtype: torch.dtype = torch.float32) -> tuple[Any, list[Tensor]]:
    """Return the normaliser with its tensor of α, if it has one, on the GPU and with gradients; and that tensor."""
    if not isinstance(normalizer, hsa.Entmax) or not isinstance(normalizer.alpha, Tensor):
        return normalizer, []
    alpha = normalizer.alpha.to("cuda", dtype).requires_grad_()
    return replace(normalizer, alpha=alpha), [alpha]


def _error(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y).norm() / y.norm())


def time_all() -> list[list[Any]]:
    rows = []
    for name, tree in forests().items():
        tree = tree.to("cuda")
        for spread in SPREADS:
            q, k, v, d_out = inputs(tree, spread)
            for backward in (False, True):
                times = []
                for kind in KINDS.values():
                    normalizer, _ = on_gpu(kind)
                    attend = partial(hierarchical, hierarchy=tree, normalizer=normalizer, backend="triton")
                    step = with_backward(attend, d_out, q, k, v) if backward else partial(attend, q, k, v)
                    times.append(milliseconds(step, graph=True, seconds=0.2))
                ratios = [time / times[0] for time in times[1:]]
                rows.append(["forward + backward" if backward else "forward", name, spread, *times, *ratios])
                print(rows[-1], flush=True)
    return rows


def main(arguments: list[str]) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    errors = check_correctness()
    if "check" in arguments:
        return
    rows = time_all()
    worst = max(max(row[-3:-1]) for row in rows)
    print(f"at most {worst:.2f} times softmax; the aim is {MOST}")
    of_errors = ["families", "", "dtype", "spread", "out", "gradients", "torch: out", "torch: gradients"]
    of_times = [
        "",
        "batch × tokens",
        "spread",
        *(f"{kind} ms" for kind in KINDS),
        "α = 1.5 ÷ softmax",
        "α = 2 ÷ softmax",
        "α by level ÷ softmax",
    ]
    as_text = [[f"{x:.1e}" if isinstance(x, float) and i > 3 else x for i, x in enumerate(row)] for row in errors]
    write_table(
        "entmax_gpu",
        f"Entmax kernels of hierarchical attention on a GPU: {HEADS} heads of {DIM}, bfloat16",
        [("Times", of_times, rows), ("Errors", of_errors, as_text)],
        "Times are medians of CUDA graph replays; those of a row were measured one after another. Spread: standard "
        "deviation of the leaves' logits, which are random. Attention runs without self, as in the paper. Errors: "
        "norm of the difference over the norm, against the torch backend in float64, beside those of the torch "
        "backend in the same dtype.",
        command="python -m benchmarks.entmax_gpu",
    )


if __name__ == "__main__":
    main(sys.argv[1:])
