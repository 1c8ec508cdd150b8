"""Time of clustered attention on a GPU against SDPA: `python -m benchmarks.clustered_gpu QKV.pt [QKV.pt …]`.

Each file holds queries, keys and values of some layers of a real model, written with the option `--save-qkv` of
`python -m benchmarks.tiled_quality`. Their texts are repeated up to the wanted length. With `--heads 16`, every query head
gets its own key/value head, and heads are repeated up to that number. Everything is checked against float64 before it is
timed. Times are medians of calls from Python, in one run, against the faster of PyTorch's flash and cuDNN kernels;
clustering and selecting are included. With `--training`, forward and backward passes are measured, with `--heads` also of
random inputs, up to one million tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

import hsa
from benchmarks.gpu_attention import BACKENDS, milliseconds
from benchmarks.measure import check, write_table
from hsa.attention.clustered.selection import NEVER

LENGTHS = (8192, 32768, 131072)
THRESHOLDS = (1 / 64, 1 / 128, 1 / 256)
TRAINED = (1 / 128, 1 / 256)
"""Thresholds of forward and backward passes."""
UNMASKED = 32768
"""Number of tokens at which attention without causality is measured too."""
HEADER = (
    *("inputs", "tokens", "causal", "setting", "SDPA ms", "ours ms", "× faster", "cluster", "select", "attend"),
    "keys per tile",
)
CLUSTERING = ("windows", "branching")
"""Options of `hsa.cluster`; the others are those of `hsa.select_groups`."""
REPEATED = " Texts are repeated beyond their recorded length, which makes every key several times as frequent."
Inputs = tuple[Tensor, Tensor, Tensor]


def real(layer: dict[str, Tensor], tokens: int, heads: int | None) -> Inputs:
    """Return q, k and v of a layer, repeated up to a number of tokens and, if given, of heads with keys of their own."""
    q, k, v = (layer[name].cuda() for name in "qkv")
    if heads is not None:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        q, k, v = (torch.cat([x] * -(-heads // x.shape[1]), 1)[:, :heads] for x in (q, k, v))
    return tuple(x.repeat(-(-tokens // len(x)), 1, 1)[:tokens].contiguous() for x in (q, k, v))  # type: ignore[return-value]


def random(tokens: int, heads: int) -> Inputs:
    return tuple(torch.randn(tokens, heads, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))  # type: ignore[return-value]


def fastest_sdpa(inputs: Inputs, causal: bool, backward: bool = False) -> float:
    """Return the milliseconds of the faster of PyTorch's kernels."""
    by_head: Any = tuple(x.transpose(0, 1)[None] for x in inputs)
    run = partial(_sdpa, causal=causal)
    step = with_backward(run, by_head) if backward else partial(run, *by_head)
    times = []
    for backend in BACKENDS.values():
        with sdpa_kernel(backend):
            times.append(milliseconds(step, seconds=0.3))
    return min(times)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def verify(inputs: Inputs, causal: bool, **setting: Any) -> None:
    """Compare kernels with the torch backend in float64, on the first tokens and with the kernels' own selection."""
    q, k, v = (x[:2048] for x in inputs)
    clustering, rule = split(setting)
    keys = hsa.cluster(k, v, [len(k)], **clustering)
    selection = hsa.select_groups(q, k, keys, [len(k)], causal=causal, **rule)
    given = {"selection": selection, "causal": causal, "tile": selection.layout.shape.tile}
    out = hsa.clustered_attention(q, k, v, keys=keys, backend="triton", **given)
    precise = replace(keys, k=keys.k.double(), v=keys.v.double())
    wide = (x.double() for x in (q, k, v))
    wanted = hsa.clustered_attention(*wide, keys=precise, backend="torch", **given)
    check(f"{setting}", out, wanted, 3e-2)


def split(setting: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of clustering, and the others."""
    clustering = {name: x for name, x in setting.items() if name in CLUSTERING}
    return clustering, {name: x for name, x in setting.items() if name not in CLUSTERING}


def measure(name: str, inputs: Inputs, causal: bool, settings: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Return a row per setting."""
    exact, rows = fastest_sdpa(inputs, causal), []
    for setting in settings:
        verify(inputs, causal, **setting)
        times, opened = time_setting(inputs, causal, **setting)
        text = ", ".join(f"{x}={f'1/{round(1 / y)}' if x == 'threshold' else y}" for x, y in setting.items())
        total, *parts = times
        row = [
            name,
            f"{len(inputs[0]):,}",
            "yes" if causal else "no",
            text,
            exact,
            total,
            exact / total,
            *parts,
            opened,
        ]
        print(*(f"{x:.3f}" if isinstance(x, float) else x for x in row), sep=" · ", flush=True)
        rows.append(row)
    return rows


def time_setting(inputs: Inputs, causal: bool, **setting: Any) -> tuple[list[float], int]:
    """Return the milliseconds of one call, of clustering, selecting and attending, and the opened keys per tile."""
    q, k, v = inputs
    clustering, rule = split(setting)
    cluster = partial(hsa.cluster, k, v, [len(k)], **clustering)
    keys = cluster()
    select = partial(hsa.select_groups, q, k, keys, [len(k)], causal=causal, **rule)
    selection = select()
    attend = partial(hsa.clustered_attention, q, k, v, causal=causal)
    steps = (partial(attend, **setting), cluster, select, partial(attend, keys=keys, selection=selection))
    return [milliseconds(step, seconds=0.15) for step in steps], keys_per_tile(selection)


def with_backward(run: Callable[..., Tensor], inputs: Inputs) -> Callable[[], Any]:
    """Return a forward and backward pass."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    d_out = torch.randn_like(leaves[0])
    return lambda: torch.autograd.grad(run(*leaves), leaves, d_out)


def check_gradients(inputs: Inputs, **setting: Any) -> None:
    """Compare gradients with the torch backend in float64, on the first tokens and with the kernels' own selection."""
    q, k, v = (x[:1024] for x in inputs)
    keys = hsa.cluster(k, v, [len(k)])
    selection = hsa.select_groups(q, k, keys, [len(k)], causal=True, **setting)
    d_out, results = torch.randn_like(q), []
    for dtype, backend in ((q.dtype, "triton"), (torch.float64, "torch")):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out = hsa.clustered_attention(*leaves, causal=True, selection=selection, backend=backend)
        results.append(torch.autograd.grad(out, leaves, d_out.to(dtype)))
    for name, x, y in zip("qkv", *results, strict=True):
        check(f"gradient of {name}, {setting}", x, y, 3e-2)


def training_row(name: str, inputs: Inputs, threshold: float, exact: float | None) -> list[Any]:
    """Return the time of a forward and backward pass, and the memory that it takes."""
    step = with_backward(partial(hsa.clustered_attention, causal=True, threshold=threshold), inputs)
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    once = 1e3 * (time.perf_counter() - began)
    extra = torch.cuda.max_memory_allocated() - before
    four = sum(x.nbytes for x in inputs) + inputs[0].nbytes
    ours = once if exact is None else milliseconds(step, seconds=0.3)
    faster = None if exact is None else exact / ours
    setting = f"threshold=1/{round(1 / threshold)}"
    row = [name, f"{len(inputs[0]):,}", setting, exact, ours, faster, extra / 2**30, extra / four]
    print(*(f"{x:.3f}" if isinstance(x, float) else x for x in row), sep=" · ", flush=True)
    return row


def training(name: str, files: Sequence[Path], heads: int | None, lengths: Sequence[int], layers: int) -> None:
    """Measure forward and backward passes; with a number of heads also of random inputs, up to one million tokens."""
    texts: dict[str, Any] = {} if heads is None else {"random": None}
    for file in files:
        data = torch.load(file)
        for number in sorted(data)[:layers]:
            texts[f"{file.stem.removeprefix('qkv_')}, layer {number}"] = data[number]
    rows, exact, is_repeated = [], dict[tuple[str, int], float](), False
    for tokens in lengths:
        for text, layer in texts.items():
            inputs = random(tokens, heads or 0) if layer is None else real(layer, tokens, heads)
            is_repeated |= layer is not None and len(layer["q"]) < tokens
            check_gradients(inputs, threshold=TRAINED[0])
            shape = shape_of(inputs)
            if (shape, tokens) not in exact:
                exact[shape, tokens] = fastest_sdpa(inputs, True, backward=True)
            what = f"{text}, {shape}"
            rows += [training_row(what, inputs, threshold, exact[shape, tokens]) for threshold in TRAINED]
    if heads is not None:
        inputs = random(2**20, heads)
        rows.append(training_row(f"random, {shape_of(inputs)}", inputs, TRAINED[0], None))
    header = ("inputs", "tokens", "setting", "SDPA ms", "ours ms", "× faster", "extra GiB", "of q + k + v + o")
    notes = (
        "Causal, forward + backward, bfloat16, one sequence, calls from Python, clustering and selecting included, against "
        "the faster of PyTorch's flash and cuDNN kernels. Gradients are compared with float64 before they are timed. Extra: "
        "peak memory beyond q, k, v and the gradient of the output."
    )
    title = "Training with clustered attention on a GPU"
    write_table(
        name,
        title,
        [("", header, rows)],
        notes + (REPEATED if is_repeated else ""),
        command=command_of(name, heads, lengths, " --training"),
    )


def shape_of(inputs: Inputs) -> str:
    """Return the numbers of heads of queries and of keys, and their dimension."""
    return f"{inputs[0].shape[1]}/{inputs[1].shape[1]} × {inputs[0].shape[2]}"


def command_of(name: str, heads: int | None, lengths: Sequence[int], options: str = "") -> str:
    """Return the command that measures a table again."""
    options += f" --heads {heads}" if heads else ""
    options += f" --lengths {' '.join(map(str, lengths))}" if tuple(lengths) != LENGTHS else ""
    return f"python -m benchmarks.clustered_gpu QKV.pt --name {name}{options}"


def keys_per_tile(selection: hsa.TileSelection) -> int:
    """Return the mean number of keys of open groups per tile and list."""
    opened = int((selection.first != NEVER).sum()) * selection.layout.shape.group
    return round(opened / (selection.layout.num_tiles * selection.lists))


def main(name: str, files: Sequence[Path], heads: int | None, lengths: Sequence[int], layers: int) -> None:
    rows, is_repeated = [], False
    settings: list[dict[str, Any]] = [{"threshold": t} for t in THRESHOLDS]
    settings.append({"threshold": 1 / 128, "windows": True})
    for file in files:
        data = torch.load(file)
        for number in sorted(data)[:layers]:
            for tokens in lengths:
                inputs = real(data[number], tokens, heads)
                is_repeated |= len(data[number]["q"]) < tokens
                what = f"{file.stem.removeprefix('qkv_')}, layer {number}, {shape_of(inputs)}"
                rows += measure(what, inputs, True, settings)
                if tokens == UNMASKED:
                    rows += measure(what, inputs, False, settings[1::2])
    if heads is not None:
        for tokens in lengths:
            rows += measure(f"random, {heads}/{heads} × 64", random(tokens, heads), True, [{"threshold": 1 / 128}])
    notes = (
        "Forward, bfloat16, one sequence. Cluster, select and attend are timed alone; ours is one call that does all three. "
        "Keys per tile: keys of open groups per tile of 64 queries and head, beside the exact chunk and the pooled rows."
    )
    notes += REPEATED if is_repeated else ""
    command = command_of(name, heads, lengths)
    write_table(name, "Clustered attention on a GPU", [("", HEADER, rows)], notes, command=command)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--name", default="clustered_gpu", help="name of the table in results/")
    parser.add_argument("--heads", type=int, help="number of heads with keys of their own")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--layers", type=int, default=3, help="number of recorded layers to use")
    parser.add_argument("--training", action="store_true", help="measure forward and backward passes")
    given = parser.parse_args()
    if given.training:
        training(given.name, given.files, given.heads, given.lengths, given.layers)
    else:
        main(given.name, given.files, given.heads, given.lengths, given.layers)
