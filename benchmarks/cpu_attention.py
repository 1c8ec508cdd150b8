"""Time and memory of both operators on the CPU, compared with SDPA in the same run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import hsa
from benchmarks.measure import check, medians, write_table
from hsa.analysis.memory import extra_memory

HEADS, DIM = 8, 64
BRANCHING = (16, 8, 8, 16)
hierarchical = partial(hsa.hierarchical_attention, include_self=False)
"""Hierarchical attention without self, as in the paper's experiments."""


def text_like(leaves: int, seed: int = 0) -> hsa.Hierarchy:
    """Build a tree with the sizes of real text.

    Sentences have 5–40 tokens, paragraphs 3–8 sentences, sections 8 paragraphs, chapters 16 sections.
    """
    random = np.random.default_rng(seed)
    sentences: list[int] = []
    while sum(sentences) < leaves:
        sentences.append(min(int(random.integers(5, 41)), leaves - sum(sentences)))
    paragraphs: list[list[int]] = []
    while sentences:
        size = int(random.integers(3, 9))
        paragraphs.append(sentences[:size])
        sentences = sentences[size:]
    sections: list[Any] = [paragraphs[i : i + 8] for i in range(0, len(paragraphs), 8)]
    return hsa.Hierarchy.from_nested([[sections[i : i + 16] for i in range(0, len(sections), 16)]])


def check_correctness() -> None:
    """Compare every operator that is timed with its reference in float64, on small inputs."""
    for tree in (hsa.Hierarchy.regular([300], BRANCHING), text_like(300)):
        q, k, v = torch.randn(3, 300, 2, 16, dtype=torch.float64).unbind(0)
        selection = hsa.select(q, k, tree, near=1, top_k=4)
        clusters = hsa.cluster_keys(k, tree)
        of_clusters = hsa.select(q, k, tree, top_k=4, clusters=clusters)
        cases: list[tuple[str, Callable[..., Tensor], dict[str, Any]]] = [
            ("hierarchical", hierarchical, {}),
            ("multiscale", hsa.multiscale_attention, {"selection": selection}),
            ("clustered", hsa.multiscale_attention, {"selection": of_clusters, "clusters": clusters}),
        ]
        for name, operator, options in cases:
            reference = operator(q, k, v, tree, backend="reference", **options)
            for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
                out = operator(q.to(dtype), k.to(dtype), v.to(dtype), tree, backend="torch", **options)
                check(name, out, reference, tolerance)


def backward(run: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], None]:
    def step() -> None:
        leaves = [x.detach().requires_grad_() for x in inputs]
        run(*leaves).sum().backward()

    return step


def without_grad(run: Callable[[], Any]) -> Callable[[], Any]:
    def step() -> Any:
        with torch.no_grad():
            return run()

    return step


def multiscale(q: Tensor, k: Tensor, v: Tensor, tree: hsa.Hierarchy) -> Tensor:
    selection = hsa.select(q, k, tree, near=1, top_k=4)
    return hsa.multiscale_attention(q, k, v, tree, selection=selection)


def clustered(q: Tensor, k: Tensor, v: Tensor, tree: hsa.Hierarchy) -> Tensor:
    clusters = hsa.cluster_keys(k, tree)
    selection = hsa.select(q, k, tree, queries=hsa.Queries.windows(tree, 16), top_k=16, clusters=clusters)
    return hsa.multiscale_attention(q, k, v, tree, selection=selection, clusters=clusters)


def run() -> None:
    check_correctness()
    rows = []
    for length in (1024, 4096, 16384):
        q, k, v = (torch.randn(length, HEADS, DIM) for _ in range(3))
        flat = [x.transpose(0, 1)[None].contiguous() for x in (q, k, v)]
        regular, ragged = hsa.Hierarchy.regular([length], BRANCHING), text_like(length)
        binary = hsa.Hierarchy.regular([length], (8, 2), repeat_last=True)

        forward: dict[str, Callable[[], Any]] = {
            "SDPA": partial(F.scaled_dot_product_attention, flat[0], flat[1], flat[2]),
            "hierarchical, regular": partial(hierarchical, q, k, v, regular),
            "hierarchical, text-like": partial(hierarchical, q, k, v, ragged),
            "multiscale, near 1, top_k 4": partial(multiscale, q, k, v, regular),
            "multiscale, own family": partial(hsa.multiscale_attention, q, k, v, regular),
            "clustered, groups of 8, top_k 16, tile 16": partial(clustered, q, k, v, binary),
        }
        forward = {name: without_grad(step) for name, step in forward.items()}
        rows += _rows("forward", length, forward, repeats=9 if length < 10_000 else 5)
        if length <= 4096:
            steps: dict[str, Callable[[], Any]] = {
                "SDPA": backward(F.scaled_dot_product_attention, *flat),
                "hierarchical, regular": backward(partial(hierarchical, hierarchy=regular), q, k, v),
                "hierarchical, text-like": backward(partial(hierarchical, hierarchy=ragged), q, k, v),
            }
            rows += _rows("forward + backward", length, steps, repeats=9)
    write_table(
        "cpu_attention",
        f"Attention on the CPU: {HEADS} heads × {DIM}, float32, batch 1",
        [("", ["pass", "tokens", "operator", "ms", "× SDPA", "peak extra MiB"], rows)],
        f"Trees: `regular` has branching {BRANCHING}; `text-like` has sentences of 5–40 tokens and paragraphs of 3–8 "
        "sentences. Its families are larger than 16 on average, so it has 1.7 times the attention entries per token. "
        "Multiscale times include the selection (exact search), clustered times also the clustering. Hierarchical "
        "attention runs without self, as in the paper. All operators were checked against the float64 reference "
        "before timing. Times are medians, measured in turns.",
    )


def _rows(kind: str, length: int, candidates: dict[str, Callable[[], Any]], repeats: int) -> list[list[Any]]:
    times = medians(candidates, repeats)
    memory = {name: extra_memory(step) for name, step in candidates.items()}
    return [[kind, f"{length:,}", name, t, times["SDPA"] / t, memory[name]] for name, t in times.items()]
