"""Time of entmax in both operators on the CPU, compared with softmax in the same run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import hsa
from benchmarks.cpu_attention import BRANCHING, DIM, HEADS, backward, hierarchical, text_like, without_grad
from benchmarks.measure import check, medians, write_table

NORMALIZERS: dict[str, Any] = {
    "softmax": "softmax",
    "entmax 2": hsa.Entmax(2.0),
    "entmax 1.5": hsa.Entmax(1.5),
    "entmax 1.3": hsa.Entmax(1.3),
    "entmax, α per head": hsa.Entmax(torch.linspace(1.2, 1.8, HEADS)),
    "entmax, α per level and head": hsa.Entmax(torch.linspace(1.2, 1.8, 4 * HEADS).view(4, HEADS)),
}
Operator = Callable[..., Tensor]


def check_correctness() -> None:
    """Compare every operator that is timed with its reference in float64, on small inputs."""
    for tree in (hsa.Hierarchy.regular([40], BRANCHING), text_like(40)):
        q, k, v = torch.randn(3, 40, HEADS, 4, dtype=torch.float64).unbind(0)
        operators: dict[str, Operator] = {"hierarchical": hierarchical, "multiscale": hsa.multiscale_attention}
        for kind, operator in operators.items():
            for name, normalizer in NORMALIZERS.items():
                reference = operator(q, k, v, tree, normalizer=normalizer, backend="reference")
                for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
                    options = {"normalizer": normalizer, "backend": "torch"}
                    out = operator(q.to(dtype), k.to(dtype), v.to(dtype), tree, **options)
                    check(f"{kind}, {name}", out, reference, tolerance)


def multiscale(
    q: Tensor, k: Tensor, v: Tensor, tree: hsa.Hierarchy, selection: hsa.Selection, normalizer: Any
) -> Tensor:
    return hsa.multiscale_attention(q, k, v, tree, selection=selection, normalizer=normalizer)


def run(lengths: tuple[int, ...] = (1024, 4096, 16384)) -> None:
    check_correctness()
    rows: list[list[Any]] = []
    for length in lengths:
        q, k, v = (torch.randn(length, HEADS, DIM) for _ in range(3))
        regular, ragged = hsa.Hierarchy.regular([length], BRANCHING), text_like(length)
        selection = hsa.select(q, k, regular, near=1, top_k=4)
        operators: dict[str, Operator] = {
            "hierarchical, regular": partial(hierarchical, hierarchy=regular),
            "hierarchical, text-like": partial(hierarchical, hierarchy=ragged),
            "multiscale, own family": partial(hsa.multiscale_attention, hierarchy=regular),
            "multiscale, near 1, top_k 4": partial(multiscale, tree=regular, selection=selection),
        }
        for name, operator in operators.items():
            passes: dict[str, dict[str, Callable[[], Any]]] = {
                "forward": {
                    label: without_grad(partial(operator, q, k, v, normalizer=normalizer))
                    for label, normalizer in NORMALIZERS.items()
                }
            }
            if length <= 4096:
                passes["forward + backward"] = {
                    label: backward(partial(operator, normalizer=normalizer), q, k, v)
                    for label, normalizer in NORMALIZERS.items()
                }
            for kind, candidates in passes.items():
                times = medians(candidates, repeats=7 if length < 10_000 else 5)
                rows += [[kind, f"{length:,}", name, label, t, t / times["softmax"]] for label, t in times.items()]
    write_table(
        "entmax",
        f"Entmax in place of softmax on the CPU: {HEADS} heads × {DIM}, float32, batch 1",
        [("", ["pass", "tokens", "operator", "normalizer", "ms", "× softmax"], rows)],
        f"Trees: `regular` has branching {BRANCHING}; `text-like` has sentences of 5–40 tokens and paragraphs of 3–8 "
        "sentences. The selection is not timed. Hierarchical attention runs without self, as in the paper. All "
        "operators were checked against the float64 reference before timing. Times are medians, measured in turns.",
    )
