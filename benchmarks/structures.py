"""Time and memory to build hierarchies of a million leaves."""

from __future__ import annotations

import torch

import hsa
from benchmarks.cpu_attention import text_like
from benchmarks.measure import medians, write_table
from hsa.analysis.memory import extra_memory


def run() -> None:
    million = torch.arange(0, 1_000_001, 10)
    parents = hsa.Hierarchy.regular([1_000_000], (16, 8, 8, 16)).parent
    cases = {
        "regular([1_000_000], (16, 8, 8, 16))": lambda: hsa.Hierarchy.regular([1_000_000], (16, 8, 8, 16)),
        "flat([1_000_000])": lambda: hsa.Hierarchy.flat([1_000_000]),
        "from_offsets, 100,000 families": lambda: hsa.Hierarchy.from_offsets(million, [0, 100_000]),
        "from_parents, the regular tree": lambda: hsa.Hierarchy.from_parents(parents),
        "from_nested, text-like, 100,000 leaves": lambda: text_like(100_000),
    }
    times = medians(cases, repeats=5)
    rows = [[name, times[name] / 1e3, extra_memory(build)] for name, build in cases.items()]
    write_table(
        "structures",
        "Building hierarchies of a million leaves",
        [("", ["constructor", "seconds", "peak extra MiB"], [[name, f"{s:.2f}", memory] for name, s, memory in rows])],
        "Medians of five runs.",
    )
