"""Time of one decoding step with a `ClusteredCache` on a GPU: `python -m benchmarks.clustered_decode QKV.pt [QKV.pt …]`.

Each file holds queries, keys and values of some layers of a real model, written with the option `--save-qkv` of
`python -m benchmarks.tiled_quality`. Their texts are repeated up to the wanted length. With `--heads 16`, every query head
gets its own key/value head, heads are repeated up to that number, and random inputs are measured too. A step stores a new
key and value, and attends. Both sides are replayed CUDA graphs, called with the queries of a whole tile, one after another.
Before that, steps are compared with a pass over the whole text.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hsa
from benchmarks.clustered_gpu import REPEATED, Inputs, random, real, shape_of
from benchmarks.decode import MORE, flat_steps
from benchmarks.measure import write_table
from hsa.attention.cache.clustered import ClusteredCache
from hsa.attention.clustered.selection import NEVER

SIZES = ((1, 32768), (1, 131072), (32, 32768), (32, 131072))
STEPS = 128
"""Number of steps: two tiles. The last ones are timed."""
TIMED = 64
DIFFERENT = 2e-3
"""Share of outputs that may differ: a group whose estimate is almost equal to its bound may be open on one side alone."""
HEADER = ("inputs", "batch", "tokens", "threshold", "exact µs", "µs", "× faster", "× memory", "open groups")


def cache_of(inputs: Inputs, length: int, batch: int, threshold: float) -> ClusteredCache:
    """Return a cache with copies of one text."""
    _, k, v = inputs
    storage: Any = {"dtype": k.dtype, "device": "cuda", "max_length": length + MORE}
    cache = ClusteredCache(1, 1, k.shape[1], k.shape[2], threshold=threshold, **storage)
    cache.begin([length])
    cache.fill(0, k[:length], v[:length])
    cache.reorder([0] * batch)
    return cache


def verify(inputs: Inputs, threshold: float, length: int = 4096) -> None:
    """Compare steps with a pass over the whole text."""
    inputs = tuple(x[: length + STEPS] for x in inputs)  # type: ignore[assignment]
    wanted = hsa.clustered_attention(*inputs, causal=True, threshold=threshold)[length:]
    cache, out = cache_of(inputs, length, 1, threshold), []
    for i in range(length, length + STEPS):
        cache.append()
        out.append(cache.attend(0, *(x[i : i + 1] for x in inputs)))
    share = float(((torch.cat(out) - wanted).abs() > 0.05 * wanted.abs().max()).float().mean())
    if share > DIFFERENT:
        raise SystemExit(f"decoding is wrong: {share:.2%} of the outputs differ from those of a full pass")


def microseconds(step: Callable[[], Any], static: Sequence[Tensor], rows: Sequence[Tensor]) -> float:
    """Return the median of the last replays of a step, with new rows in its static tensors each time."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    times = []
    for i in range(STEPS):
        for x, y in zip(static, rows, strict=True):
            x.copy_(y[i])
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return 1e3 * statistics.median(begin.elapsed_time(end) for begin, end in times[-TIMED:])


def exact(inputs: Inputs, length: int, batch: int) -> float:
    """Return the microseconds of the fastest exact step, for heads like those of the inputs."""
    times, (_, heads, dim), kv_heads = [], inputs[0].shape, inputs[1].shape[1]
    for step in flat_steps(length, batch, "cuda", torch.bfloat16, heads, kv_heads, dim).values():
        try:
            times.append(microseconds(step, (), ()))
        except RuntimeError:  # a kernel that does not take this shape
            torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return min(times)


def measure(name: str, inputs: Inputs, length: int, batch: int, threshold: float, flat: float) -> list[Any]:
    cache = cache_of(inputs, length, batch, threshold)
    rows = [x[length - STEPS : length, None].expand(-1, batch, -1, -1) for x in inputs]
    static = [x[0].contiguous() for x in rows]

    def step() -> Tensor:
        cache.append()
        return cache.attend(0, static[0], static[1], static[2])

    ours = microseconds(step, static, rows)
    first, size = cache._stored[0]["first"], cache.memory()
    opened = int((first != NEVER).sum()) / (len(first) * batch)
    times = [flat, ours, flat / ours, size.bytes / size.flat_bytes, round(opened)]
    row = [name, batch, f"{length:,}", f"1/{round(1 / threshold)}", *times]
    print(*(f"{x:.3f}" if isinstance(x, float) else x for x in row), sep=" · ", flush=True)
    return row


@torch.inference_mode()
def main(name: str, files: Sequence[Path], thresholds: Sequence[float], heads: int | None, lengths: set[int]) -> None:
    texts: dict[str, Callable[[int], Inputs]] = {}
    shortest = max(lengths)
    for file in files:
        for number, layer in torch.load(file).items():
            what = f"{file.stem.removeprefix('qkv_')}, layer {number}"
            texts[what] = lambda tokens, layer=layer: real(layer, tokens, heads)  # type: ignore[misc]
            shortest = min(shortest, len(layer["q"]))
    if heads is not None:
        texts["random"] = lambda tokens: random(tokens, heads)
    for what, text in texts.items():
        verify(text(8192), thresholds[0])
        print(what, "correct", flush=True)
    rows, flat = [], dict[tuple[str, int, int], float]()
    for batch, length in SIZES:
        for what, text in texts.items() if length in lengths else ():
            inputs = text(length)
            key = shape_of(inputs), length, batch
            if key not in flat:
                flat[key] = exact(inputs, length, batch)
            for threshold in thresholds:
                rows.append(measure(f"{what}, {key[0]}", inputs, length, batch, threshold, flat[key]))
                torch.cuda.empty_cache()
    notes = (
        "Bfloat16, one layer. Each step stores a new key and value. Medians "
        f"of {TIMED} replays of a CUDA graph of one step, on both sides, with the queries of successive tokens; a tile "
        "opens more groups from token to token. Exact: the fastest of SDPA's flash and cuDNN kernels and plain matrix "
        "products, with the query heads of a key/value head as rows of one product. Memory: that of the cache, with room "
        f"for {MORE:,} more tokens, relative to a flat cache. The sequences of a batch are copies, which share no memory. "
        "Open groups: per head, at the end of the last tile."
    )
    notes += REPEATED if shortest < max(lengths) else ""
    command = f"python -m benchmarks.clustered_decode QKV.pt --name {name}" + (f" --heads {heads}" if heads else "")
    command += f" --thresholds {' '.join(f'{x:g}' for x in thresholds)} --lengths {' '.join(map(str, sorted(lengths)))}"
    write_table(name, "Decoding with clustered keys on a GPU", [("", HEADER, rows)], notes, command=command)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--name", default="clustered_decode", help="name of the table in results/")
    parser.add_argument("--heads", type=int, help="number of heads with keys of their own")
    parser.add_argument("--thresholds", type=float, nargs="+", default=[1 / 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=sorted({length for _, length in SIZES}))
    given = parser.parse_args()
    main(given.name, given.files, given.thresholds, given.heads, set(given.lengths))
