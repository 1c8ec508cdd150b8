"""Time and memory of both operators on a GPU, compared with SDPA (flash, cuDNN), FlexAttention and the paper's scheme.

Everything is checked against float64 before it is timed. Times are medians of CUDA graph replays ("graph") or of calls from
Python ("calls"). SDPA and FlexAttention are timed by calls; they run long enough to hide the overhead.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import hsa
from benchmarks.cpu_attention import hierarchical, text_like
from benchmarks.measure import RESULTS, Section, check, write_table
from benchmarks.sparse_scheme import sparse_scheme
from hsa.attention.hierarchical.triton.plan import tiles
from hsa.attention.rounds import rooted

HEADS, DIM, DTYPE = 16, 64, torch.bfloat16
BRANCHING = (16, 8, 8, 16)
SHAPES = ((64, 512), (16, 2048), (4, 8192), (1, 32768), (1, 131072))
LENGTHS = (2048, 8192, 32768, 131072)
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}

Step = Callable[[], Any]


def milliseconds(step: Step, graph: bool = False, seconds: float = 0.5) -> float:
    """Return the median milliseconds of 3 to 50 runs."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            step()
        step = captured.replay
        step()
    times: list[float] = []
    while len(times) < 3 or (len(times) < 50 and sum(times) < 1e3 * seconds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def random(tree: hsa.Hierarchy, heads: int = HEADS, number: int = 4, dtype: torch.dtype = DTYPE) -> list[Tensor]:
    return [torch.randn(tree.num_leaves, heads, DIM, device="cuda", dtype=dtype) for _ in range(number)]


def with_backward(run: Callable[..., Tensor], d_out: Tensor, *inputs: Tensor) -> Step:
    leaves = [x.detach().requires_grad_() for x in inputs]

    def step() -> None:
        for x in leaves:
            x.grad = None
        run(*leaves).backward(d_out)

    return step


def bandwidth() -> float:
    """Return the bytes per millisecond that a large copy reads and writes."""
    x = torch.randn(2**27, device="cuda", dtype=DTYPE)
    y = torch.empty_like(x)
    return 2 * x.numel() * x.element_size() / milliseconds(partial(torch.mul, x, 2, out=y))


def fastest_sdpa(batch: int, length: int, causal: bool = False, backward: bool = False) -> dict[str, float]:
    """Return the milliseconds of each backend of SDPA."""
    q, k, v, d_out = (torch.randn(batch, HEADS, length, DIM, device="cuda", dtype=DTYPE) for _ in range(4))
    attend = partial(F.scaled_dot_product_attention, is_causal=causal)
    step = with_backward(attend, d_out, q, k, v) if backward else partial(attend, q, k, v)
    times = {}
    for name, backend in BACKENDS.items():
        with sdpa_kernel(backend):
            times[name] = milliseconds(step)
    return times


# Times of multiscale attention include the selection and, for clustered keys, the clustering.


def windows(q: Tensor, k: Tensor, v: Tensor, tree: hsa.Hierarchy, beam: int | str = 8) -> Tensor:
    selection = hsa.select(q, k, tree, near=1, top_k=2, beam=beam)
    return hsa.multiscale_attention(q, k, v, tree, selection=selection)


def clustered(q: Tensor, k: Tensor, v: Tensor, tree: hsa.Hierarchy) -> Tensor:
    clusters = hsa.cluster_keys(k, tree)
    groups = hsa.Queries.windows(tree, 16)
    selection = hsa.select(q, k, tree, queries=groups, top_k=16, beam=16, clusters=clusters)
    return hsa.multiscale_attention(q, k, v, tree, selection=selection, clusters=clusters)


def binary(length: int, leaves: int) -> hsa.Hierarchy:
    return hsa.Hierarchy.regular([length], (leaves, 2), repeat_last=True).to("cuda")


def windows_of_16(length: int) -> hsa.Hierarchy:
    return hsa.Hierarchy.regular([length], (16, 4), repeat_last=True).to("cuda")


def check_correctness() -> None:
    """Compare every operator that is timed, forward and gradients, with the torch backend in float64."""
    for tree in (hsa.Hierarchy.regular([4096], BRANCHING).to("cuda"), text_like(3000).to("cuda")):
        q, k, v, d_out = random(tree, heads=2)
        _compare("hierarchical", hierarchical, q, k, v, d_out, tree, {})
        _compare("the paper's scheme", sparse_scheme, q, k, v, None, tree, {}, hierarchical)
        selection = hsa.select(q, k, tree, near=1, top_k=2)
        _compare("windows", hsa.multiscale_attention, q, k, v, d_out, tree, {"selection": selection})
    tree = binary(2048, 8)
    q, k, v, d_out = random(tree, heads=2)
    for causal in (False, True):
        clusters = None if causal else hsa.cluster_keys(k, tree)
        selection = hsa.select(q, k, tree, top_k=4, beam=16, clusters=clusters, causal=causal)
        options = {"selection": selection, "clusters": clusters, "causal": causal}
        _compare("causal" if causal else "clustered", hsa.multiscale_attention, q, k, v, d_out, tree, options)


def _compare(
    name: str,
    run: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor | None,
    tree: hsa.Hierarchy,
    options: dict[str, Any],
    reference: Callable[..., Tensor] | None = None,
) -> None:
    results = []
    ours = {} if run is sparse_scheme else {"backend": "triton"}
    for attend, dtype, how in ((run, DTYPE, ours), (reference or run, torch.float64, {"backend": "torch"})):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, tree, **options, **how)
        grads = () if d_out is None else torch.autograd.grad(out, leaves, d_out.to(dtype))
        results.append((out, *grads))
    for what, x, y in zip(("out", "dq", "dk", "dv"), *results, strict=False):
        check(f"{name}, {what}", x, y, 3e-2)


def hierarchical_rows(bytes_per_ms: float) -> list[list[Any]]:
    rows = []
    trees: list[tuple[str, int, int, hsa.Hierarchy]] = [
        (f"{batch} × {length:,}", batch, length, hsa.Hierarchy.regular([length] * batch, BRANCHING))
        for batch, length in SHAPES
    ]
    texts = hsa.Hierarchy.collate([text_like(512, seed) for seed in range(64)])
    trees += [("64 × 512, text-like", 64, 512, texts), ("1 × 32,768, text-like", 1, 32768, text_like(32768))]
    sdpa: dict[tuple[int, int, bool], dict[str, float]] = {}
    for name, batch, length, tree in trees:
        tree = tree.to("cuda")
        q, k, v, d_out = random(tree)
        for backward in (False, True):
            attend = partial(hierarchical, hierarchy=tree)
            step = with_backward(attend, d_out, q, k, v) if backward else partial(attend, q, k, v)
            floor = (11 if backward else 4) * q.numel() * q.element_size() / bytes_per_ms
            graph, calls = milliseconds(step, graph=True), milliseconds(step)
            in_torch = partial(attend, backend="torch")
            plain = milliseconds(
                with_backward(in_torch, d_out, q, k, v) if backward else partial(in_torch, q, k, v), seconds=0.2
            )
            key = batch, length, backward
            if key not in sdpa:
                sdpa[key] = fastest_sdpa(batch, length, backward=backward)
            best = min(sdpa[key].values())
            rows.append(
                [
                    "forward + backward" if backward else "forward", name, floor, graph, f"{floor / graph:.0%}", calls,
                    plain, *sdpa[key].values(), best / graph,
                ]
            )  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def flex_windows(q: Tensor, k: Tensor, v: Tensor, tree: hsa.Hierarchy, selection: hsa.Selection, block: int) -> Step:
    """Return a step of FlexAttention over concat(k, pooled k): selected windows exactly, the others pooled, one level."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    length, size = tree.num_leaves, 16
    number = length // size
    pooled = [x.unflatten(0, (number, size)).mean(1, dtype=torch.float32).to(x.dtype) for x in (k, v)]
    queries = q.transpose(0, 1)[None].contiguous()
    keys, values = (torch.cat([x, p]).transpose(0, 1)[None].contiguous() for x, p in zip((k, v), pooled, strict=True))
    window_of_node = torch.full((tree.num_nodes,), -1, device="cuda")
    first = tree.num_nodes - length - number  # the windows are the nodes before the leaves
    window_of_node[first : first + number] = torch.arange(number, device="cuda")
    selected_windows = window_of_node[selection.families.clamp(min=0)].where(
        selection.families >= 0, -1
    )  # [groups, heads, 5]
    width = selected_windows.shape[-1]

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        window = torch.where(j < length, j // size, j - length)
        is_selected = selected_windows[i // size, h, 0] == window
        for slot in range(1, width):
            is_selected = is_selected | (selected_windows[i // size, h, slot] == window)
        return is_selected == (j < length)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + torch.where(j < length, 0.0, math.log(size))

    # A block of queries needs the blocks of keys that have a selected window, and all pooled keys.
    rows, columns = length // block, (length + number) // block
    needed = torch.zeros(HEADS, rows, columns, dtype=torch.bool, device="cuda")
    needed[:, :, length // block :] = True
    group = torch.arange(number, device="cuda")[:, None, None].expand_as(selected_windows) * size // block
    head = torch.arange(HEADS, device="cuda")[None, :, None].expand_as(selected_windows)
    valid = selected_windows >= 0
    needed[head[valid], group[valid], selected_windows[valid] * size // block] = True
    counts = needed.sum(-1, dtype=torch.int32)[None]
    order = needed.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)[None]
    mask = BlockMask.from_kv_blocks(counts, order, BLOCK_SIZE=(block, block), mask_mod=mask_mod)
    compiled = torch.compile(flex_attention, dynamic=False)
    return partial(compiled, queries, keys, values, score_mod=score_mod, block_mask=mask)


def multiscale_rows() -> list[list[Any]]:
    """Time forward passes. For causal attention over clustered keys, see `clustered_gpu`."""
    cases: list[tuple[str, Callable[..., Tensor]]] = [
        ("multiscale, windows of 16, near 1, top_k 2 (beam 8)", windows),
        ("clustered, groups of 8, top_k 16, tile 16 (beam 16)", clustered),
    ]
    rows = []
    for length in LENGTHS:
        sdpa = min(fastest_sdpa(1, length, False).values())
        for name, run in cases:
            tree = windows_of_16(length) if run is windows else binary(length, 8)
            q, k, v, _ = random(tree)
            with torch.no_grad():
                graph = milliseconds(partial(run, q, k, v, tree), graph=True)
                calls = milliseconds(partial(run, q, k, v, tree), seconds=0.2)
                rows.append([name, f"{length:,}", graph, calls, *_parts(run, q, k, v, tree), sdpa, sdpa / graph])
            print(rows[-1], flush=True)
    return rows


def _parts(run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, tree: hsa.Hierarchy) -> list[float | None]:
    """Return the milliseconds of clustering, selection and attention."""
    clusters = None if run is windows else hsa.cluster_keys(k, tree)
    if run is windows:
        select = partial(hsa.select, q, k, tree, near=1, top_k=2, beam=8)
    else:
        groups = hsa.Queries.windows(tree, 16)
        select = partial(hsa.select, q, k, tree, queries=groups, top_k=16, beam=16, clusters=clusters)
    selection = select()
    attend = partial(hsa.multiscale_attention, q, k, v, tree, selection=selection, clusters=clusters)
    cluster = partial(hsa.cluster_keys, k, tree)
    clustering = None if clusters is None else milliseconds(cluster, graph=True)
    return [clustering, milliseconds(select, graph=True), milliseconds(attend, graph=True)]


def flex_rows() -> list[list[Any]]:
    """Time attention alone over one pooled level of windows, which FlexAttention can express, with the same selection."""
    tree = hsa.Hierarchy.regular([32768], (16,)).to("cuda")
    q, k, v, _ = random(tree)
    with torch.no_grad():
        selection = hsa.select(q, k, tree, near=1, top_k=2)
        expected = hsa.multiscale_attention(q, k, v, tree, selection=selection, backend="triton")
        ours = milliseconds(partial(hsa.multiscale_attention, q, k, v, tree, selection=selection), graph=True)
        times = {}
        for block in (128, 256):
            step = flex_windows(q, k, v, tree, selection, block)
            check(f"FlexAttention, blocks of {block}", step()[0].transpose(0, 1), expected, 3e-2)
            times[block] = milliseconds(step)
    return [["one pooled level of windows of 16, attention alone", ours, *times.values(), min(times.values()) / ours]]


def scheme_row() -> list[Any]:
    tree = hsa.Hierarchy.regular([32768], BRANCHING).to("cuda")
    q, k, v, _ = random(tree)
    with torch.no_grad():
        ours = milliseconds(partial(hierarchical, q, k, v, tree), graph=True)
        scheme = milliseconds(partial(sparse_scheme, q, k, v, tree))
    return ["1 × 32,768", ours, scheme, scheme / ours]


def memory_row() -> list[Any]:
    """Return the peak memory beyond q, k, v and the gradient of the output, in GiB and relative to q + k + v + o."""
    length = 2**20
    tree = hsa.Hierarchy.regular([length], BRANCHING).to("cuda")
    q, k, v, d_out = random(tree)
    before = torch.cuda.memory_allocated()
    step = with_backward(partial(hierarchical, hierarchy=tree), d_out, q, k, v)
    torch.cuda.reset_peak_memory_stats()
    taken = milliseconds(step)
    extra = torch.cuda.max_memory_allocated() - before
    four = 4 * q.numel() * q.element_size()
    return [f"1 × {length:,}", taken, extra / 2**30, extra / four]


def plan_row() -> list[Any]:
    """Measure the time to build the plan of 64 new ragged trees of 512 leaves on the GPU."""
    times = []
    for seed in range(0, 640, 64):
        tree = hsa.Hierarchy.collate([text_like(512, s) for s in range(seed, seed + 64)]).to("cuda")
        torch.cuda.synchronize()
        began = time.perf_counter()
        tiles(rooted(tree)[0])
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return ["64 × 512, text-like", statistics.median(times)]


def plot(rows: list[list[Any]], multi: list[list[Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    regular = [row for row in rows if "text" not in row[1]]
    for kind, axis_style in (("forward", "-"), ("forward + backward", "--")):
        some = [row for row in regular if row[0] == kind]
        x = [row[1] for row in some]
        left.plot(x, [min(row[7], row[8]) for row in some], axis_style, marker="o", color="C3", label=f"SDPA, {kind}")
        left.plot(x, [row[3] for row in some], axis_style, marker="o", color="C0", label=f"hierarchical, {kind}")
        left.plot(x, [row[2] for row in some], axis_style, color="0.6", lw=1, label=f"memory floor, {kind}")
    left.set(
        yscale="log", ylabel="ms", xlabel="batch × tokens", title="Hierarchical attention, branching (16, 8, 8, 16)"
    )
    left.tick_params(axis="x", rotation=20)
    left.legend(fontsize=7)
    names = list(dict.fromkeys(row[0] for row in multi))
    for number, name in enumerate(names):
        some = [row for row in multi if row[0] == name]
        x = [int(row[1].replace(",", "")) for row in some]
        right.plot(x, [row[2] for row in some], marker="o", color=f"C{number}", label=name.split(" (")[0])
        if number == 0:
            right.plot(x, [row[-2] for row in some], marker="s", color="C3", label="SDPA")
    right.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms", title="Multiscale attention, all included")
    right.legend(fontsize=7)
    figure.savefig(RESULTS / "gpu_attention.png", dpi=120)


def run() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("gpu_attention needs a CUDA device")
    check_correctness()
    print("correct", flush=True)
    bytes_per_ms = bandwidth()
    rows = hierarchical_rows(bytes_per_ms)
    multi = multiscale_rows()
    sdpa = [f"SDPA {name} ms" for name in BACKENDS]
    columns = ["pass", "batch × tokens", "floor ms", "graph ms", "of the floor", "calls ms", "torch backend ms", *sdpa]
    parts = ["clustering", "selection", "attention"]
    sections: list[Section] = [
        ("Hierarchical attention", [*columns, "× faster SDPA"], rows),
        (
            "Multiscale attention, forward",
            ["configuration", "tokens", "graph ms", "calls ms", *parts, "faster SDPA ms", "× SDPA"],
            multi,
        ),
        (
            "Against FlexAttention at 1 × 32,768",
            ["what", "ours ms", "blocks of 128 ms", "blocks of 256 ms", "× FlexAttention"],
            flex_rows(),
        ),
        (
            "Against the paper's scheme (appendix E.4): pairs of siblings by float32 gathers and sums, forward",
            ["batch × tokens", "ours ms", "scheme ms", "×"],
            [scheme_row()],
        ),
        ("Memory, forward + backward", ["batch × tokens", "ms", "peak extra GiB", "of q + k + v + o"], [memory_row()]),
        ("Building the plan of a batch", ["batch × tokens", "ms"], [plan_row()]),
    ]
    plot(rows, multi)
    write_table(
        "gpu_attention",
        f"Attention on a GPU: {HEADS} heads × {DIM}, bfloat16",
        sections,
        "The floor is the time to read q, k, v and write the output once (with gradients: 11 such tensors) at the "
        f"bandwidth of a large copy in the same run, {bytes_per_ms / 1e9:.2f} TB/s. `graph`: CUDA graph replays; "
        "`calls`: calls from Python. Text-like trees have sentences of 5–40 tokens and paragraphs of 3–8 sentences. "
        "Hierarchical attention runs without self, as in the paper. Multiscale times include selection and "
        "clustering. Inputs are random.\n\n![times against length](gpu_attention.png)\n\nCausal attention over clustered "
        "keys: [clustered_gpu.md](clustered_gpu.md), with gradients [clustered_training_gpu.md](clustered_training_gpu.md).",
    )
