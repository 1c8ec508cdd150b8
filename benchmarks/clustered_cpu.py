"""Time of clustered attention on a CPU against SDPA: `python -m benchmarks.clustered_cpu QKV.pt [QKV.pt …]`.

Each file holds queries, keys and values of some layers of a real model, written with the option `--save-qkv` of
`python -m benchmarks.tiled_quality`. Sequences longer than one recording join those of the next files. Results are checked
against the reference on the first tokens. Times are medians in turns, forward, float32, with clustering and selecting.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import hsa
from benchmarks.clustered_gpu import THRESHOLDS, keys_per_tile
from benchmarks.measure import check, medians, write_table

LENGTHS = (8192, 16384)
CHECKED = 600
"""Number of tokens on which results are checked: the reference is slow."""


def joined(files: Sequence[Path], layer: int, tokens: int) -> list[Tensor]:
    """Return q, k and v of a layer, `[tokens, heads, dim]`, from as many files as needed."""
    parts = [torch.load(file)[layer] for file in files]
    inputs = [torch.cat([part[name] for part in parts])[:tokens].float().contiguous() for name in "qkv"]
    if len(inputs[0]) < tokens:
        raise SystemExit(f"expected recordings of {tokens:,} tokens in all, got {len(inputs[0]):,}")
    return inputs


def verify(inputs: Sequence[Tensor]) -> None:
    q, k, v = (x[:CHECKED, :1] for x in inputs)
    out, wanted = (
        hsa.clustered_attention(q, k, v, causal=True, threshold=1 / 64, backend=backend)
        for backend in ("auto", "reference")
    )
    check("clustered attention", out, wanted, 1e-4)


def listed_keys(inputs: Sequence[Tensor], threshold: float) -> int:
    q, k, v = inputs
    keys = hsa.cluster(k, v, [len(k)])
    return keys_per_tile(hsa.select_groups(q, k, keys, [len(k)], causal=True, threshold=threshold))


@torch.inference_mode()
def main(files: Sequence[Path], lengths: Sequence[int]) -> None:
    rows: list[list[Any]] = []
    for layer in sorted(torch.load(files[0])):
        for tokens in lengths:
            inputs = joined(files, layer, tokens)
            verify(inputs)
            q, k, v = (x.transpose(0, 1)[None] for x in inputs)
            exact = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
            attend = partial(hsa.clustered_attention, *inputs, causal=True)
            steps: dict[str, Callable[[], Any]] = {
                f"1/{round(1 / t)}": partial(attend, threshold=t) for t in THRESHOLDS
            }
            times = medians({"exact": exact, **steps}, repeats=5, seconds=30)
            for threshold in THRESHOLDS:
                ours = times[f"1/{round(1 / threshold)}"]
                opened = listed_keys(inputs, threshold)
                shape = f"{inputs[0].shape[1]}/{inputs[1].shape[1]} × {inputs[0].shape[2]}"
                row = [f"layer {layer}, {shape}", f"{tokens:,}", f"1/{round(1 / threshold)}", times["exact"], ours]
                rows.append([*row, times["exact"] / ours, opened])
                print(*(f"{x:.3f}" if isinstance(x, float) else x for x in rows[-1]), sep=" · ", flush=True)
    header = ("inputs", "tokens", "threshold", "SDPA ms", "ours ms", "× faster", "keys per tile")
    notes = (
        "Causal, forward, float32, one sequence; clustering and selecting are included. Keys per tile: keys of open groups "
        "per tile of 64 queries and head, beside the exact chunk and the pooled rows. Long inputs join several texts."
    )
    command = "python -m benchmarks.clustered_cpu QKV.pt …"
    write_table("clustered_cpu", "Clustered attention on a CPU", [("", header, rows)], notes, command=command)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    given = parser.parse_args()
    main(given.files, given.lengths)
