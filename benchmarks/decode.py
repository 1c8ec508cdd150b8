"""Time of one decoding step with tree caches and with exact attention, and the cost of filling a cache from a prompt.

Each step stores the new key and value, and attends. On a GPU both sides are replayed CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.measure import check, medians, write_table
from hsa import multiscale_attention, select
from hsa.attention.cache.clustered import ClusteredCache
from hsa.attention.cache.interface import Cache
from hsa.attention.cache.multiscale import MultiscaleCache
from hsa.tree.causal_tree import causal_tree

HEADS, DIM = 16, 64
BRANCHING, NEAR = (16, 16), 1
LENGTHS = (4096, 32768, 131072)
STEPS = 64
"""Steps in one measurement, in which four leaf families are completed."""
MORE = 1024
"""Number of tokens that a clustered cache has memory for, after the prompt."""


def cache_of(length: int, batch: int, device: str, dtype: torch.dtype, kind: str = "multiscale") -> Cache:
    """Return a filled cache; the sequences of a batch are copies, which cost the same as different ones."""
    sizes: Any = {"layers": 1, "batch": 1, "kv_heads": HEADS, "head_dim": DIM, "dtype": dtype, "device": device}
    cache: Cache = (
        MultiscaleCache(branching=BRANCHING, near=NEAR, **sizes)
        if kind == "multiscale"
        else ClusteredCache(max_length=length + MORE, **sizes)
    )
    k, v = torch.randn(2, length, HEADS, DIM, device=device, dtype=dtype).unbind(0)
    cache.begin([length])
    cache.fill(0, k, v)
    cache.reorder([0] * batch)
    return cache


def check_correctness(device: str, dtype: torch.dtype) -> None:
    """Check that a prompt followed by steps agrees with the full pass."""
    prompt, steps = 2000, 100
    q, k, v = torch.randn(3, prompt + steps, HEADS, DIM, device=device, dtype=dtype).unbind(0)
    tree = causal_tree([prompt + steps], BRANCHING).to(device)
    selection = select(q, k, tree, near=NEAR, causal=True)
    wanted = multiscale_attention(q, k, v, tree, selection=selection, causal=True)[prompt:]
    cache = MultiscaleCache(1, 1, HEADS, DIM, branching=BRANCHING, near=NEAR, dtype=dtype, device=device)
    cache.begin([prompt])
    cache.fill(0, k[:prompt], v[:prompt])
    out = []
    for i in range(prompt, prompt + steps):
        cache.append()
        out.append(cache.attend(0, q[i : i + 1], k[i : i + 1], v[i : i + 1]))
    check("multiscale cache", torch.cat(out), wanted, 1e-5 if dtype == torch.float32 else 2e-2)


def flat_steps(
    length: int, batch: int, device: str, dtype: torch.dtype, heads: int = HEADS, kv_heads: int = HEADS, dim: int = DIM
) -> dict[str, Callable[[], Any]]:
    """Return a step of exact attention over a flat cache for every kernel."""
    keys, values = (torch.randn(batch, kv_heads, length, dim, device=device, dtype=dtype) for _ in range(2))
    q = torch.randn(batch, heads, 1, dim, device=device, dtype=dtype)
    k, v = torch.randn(2, batch, kv_heads, 1, dim, device=device, dtype=dtype).unbind(0)
    last = torch.tensor([length - 1], device=device)
    rows = q.view(batch, kv_heads, -1, dim)  # the queries of a key/value head, which see the same keys

    def sdpa(backend: SDPBackend | None) -> Callable[[], Tensor]:
        def step() -> Tensor:
            keys.index_copy_(2, last, k)
            values.index_copy_(2, last, v)
            with nullcontext() if backend is None else sdpa_kernel(backend):
                return F.scaled_dot_product_attention(rows, keys, values)

        return step

    def products() -> Tensor:
        keys.index_copy_(2, last, k)
        values.index_copy_(2, last, v)
        return (rows @ keys.transpose(-1, -2) * dim**-0.5).softmax(-1) @ values

    if device == "cpu":
        return {"SDPA": sdpa(None)}
    named = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    return {**{name: sdpa(backend) for name, backend in named.items()}, "matrix products": products}


def cache_step(cache: Cache, batch: int, device: str, dtype: torch.dtype) -> Callable[[], Tensor]:
    q, k, v = torch.randn(3, batch, HEADS, DIM, device=device, dtype=dtype).unbind(0)

    def step() -> Tensor:
        cache.append()
        return cache.attend(0, q, k, v)

    return step


def graph_of(step: Callable[[], Any]) -> Callable[[], None]:
    """Return a function that replays a CUDA graph of one step STEPS times."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()

    def replay() -> None:
        for _ in range(STEPS):
            graph.replay()
        torch.cuda.synchronize()

    return replay


def _flat_times(length: int, batch: int, dtype: torch.dtype) -> tuple[str, float]:
    times = {}
    for name, step in flat_steps(length, batch, "cuda", dtype).items():
        try:
            times[name] = medians({name: graph_of(step)}, repeats=3)[name] / STEPS
        except RuntimeError:  # a kernel that does not take this shape
            torch.cuda.synchronize()
        torch.cuda.empty_cache()
    best = min(times, key=times.__getitem__)
    return best, times[best]


def run_cpu() -> None:
    _run("cpu", torch.float32)


def run_gpu() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    _run("cuda", torch.bfloat16)


@torch.inference_mode()
def _run(device: str, dtype: torch.dtype) -> None:
    on_gpu = device == "cuda"
    check_correctness(device, dtype)
    rows = []
    for batch in (1, 32) if on_gpu else (1,):
        for length in LENGTHS:
            if on_gpu:
                best, flat = _flat_times(length, batch, dtype)
            kinds = {
                "multiscale": f"multiscale {BRANCHING}, near {NEAR}",
                "clustered": "clustered, threshold 1/256",
            }
            for kind, name in kinds.items():
                cache = cache_of(length, batch, device, dtype, kind)
                step = cache_step(cache, batch, device, dtype)
                if on_gpu:
                    ours = medians({"ours": graph_of(step)}, repeats=5)["ours"] / STEPS
                else:
                    both = medians({**flat_steps(length, batch, device, dtype), "ours": step}, repeats=40)
                    best, flat, ours = "SDPA", both["SDPA"], both["ours"]
                size = cache.memory()
                smaller = size.flat_bytes / size.bytes
                rows.append([batch, f"{length:,}", name, best, flat * 1e3, ours * 1e3, flat / ours, smaller])
                torch.cuda.empty_cache()
    header = ["batch", "tokens", "cache", "best exact kernel", "exact µs", "µs", "× faster", "× less memory"]
    sections = [("One step", header, rows), ("Prompt", *_prompt(device, dtype))]
    write_table(
        "decode_gpu" if on_gpu else "decode_cpu",
        "Decoding with a cache",
        sections,
        f"{HEADS} heads × {DIM}, {str(dtype).removeprefix('torch.')}, one layer. Each step stores a new key and value. "
        + (
            f"Times are medians of {STEPS} replays of a CUDA graph of one step, on both sides. Exact: the fastest of SDPA's "
            "flash and cuDNN kernels and plain matrix products. Keys are random, so clustered caches open almost no groups; "
            "for keys of models see [clustered_decode.md](clustered_decode.md)."
            if on_gpu
            else "Times are medians of single steps, measured in turns."
        ),
    )


def _prompt(device: str, dtype: torch.dtype) -> tuple[list[str], list[list[Any]]]:
    """Measure the cost of `fill` relative to the full pass over a prompt."""
    rows = []
    for length in LENGTHS if device == "cuda" else LENGTHS[:2]:
        with torch.inference_mode(False), torch.no_grad():  # as generation runs
            rows.append(_prompt_row(length, device, dtype))
    return ["tokens", "exact attention ms", "multiscale attention ms", "with filling the cache ms", "adds"], rows


def _prompt_row(length: int, device: str, dtype: torch.dtype) -> list[Any]:
    q, k, v = torch.randn(3, length, HEADS, DIM, device=device, dtype=dtype).unbind(0)
    cache = MultiscaleCache(1, 1, HEADS, DIM, branching=BRANCHING, near=NEAR, dtype=dtype, device=device)
    tree = cache.begin([length])
    selection = select(q, k, tree, near=NEAR, causal=True)
    kept = cache._kept

    def attend() -> None:
        fresh_k, fresh_v = k.view_as(k), v.view_as(v)  # new tensors, whose pooled keys are not cached
        multiscale_attention(q, fresh_k, fresh_v, tree, selection=selection, causal=True)
        _wait(device)

    def attend_and_fill() -> None:
        cache._pending, cache._kept = {0}, kept
        fresh_k, fresh_v = k.view_as(k), v.view_as(v)
        multiscale_attention(q, fresh_k, fresh_v, tree, selection=selection, causal=True)
        cache.fill(0, fresh_k, fresh_v)
        _wait(device)

    def exact() -> None:
        by_head = [x.transpose(0, 1)[None] for x in (q, k, v)]
        F.scaled_dot_product_attention(by_head[0], by_head[1], by_head[2], is_causal=True)
        _wait(device)

    times = medians({"attend": attend, "both": attend_and_fill}, repeats=31)
    sdpa = medians({"exact": exact}, repeats=3)["exact"]
    adds = times["both"] / times["attend"] - 1
    return [f"{length:,}", sdpa, times["attend"], times["both"], f"{100 * adds:.1f}%"]


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
