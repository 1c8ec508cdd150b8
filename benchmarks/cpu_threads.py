"""Time of a converted encoder on a CPU by number of threads and by how idle threads wait, alone and beside a busy process.

OpenMP reads its settings when torch is loaded, so every row is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

LENGTH, REPEATS = 1024, 3
THREADS = (1, 2)
WAITING = {
    "runtime's default": {},
    "1,000 spins (hsa)": {"GOMP_SPINCOUNT": "1000"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
}
"""Settings of the environment, by name."""
HEADER = (
    "idle threads",
    "threads",
    "exact ms",
    "converted ms",
    "exact ms, busy",
    "converted ms, busy",
    "× slower, busy",
)


def measure(length: int, repeats: int) -> None:
    """Print the milliseconds of a forward pass of the exact and the converted encoder, as JSON."""
    import torch

    from benchmarks.converted_encoder import encoder
    from benchmarks.measure import medians
    from hsa.huggingface import convert

    with torch.inference_mode():
        model = encoder("cpu", torch.float32, layers=2, longest=length)
        step = partial(model, input_ids=torch.randint(4, 1024, (1, length)))
        exact = medians({"exact": step}, repeats, seconds=20)
        convert(model)
        print(json.dumps({**exact, **medians({"converted": step}, repeats, seconds=20)}))


def measured(threads: int, settings: dict[str, str], length: int, repeats: int) -> dict[str, float]:
    """Return what `measure` prints in a process with these settings."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    command = [sys.executable, "-m", "benchmarks.cpu_threads", "--measure"]
    command += ["--length", str(length), "--repeats", str(repeats)]
    environment = {**others, "OMP_NUM_THREADS": str(threads), **settings}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    milliseconds: dict[str, float] = json.loads(done.stdout)
    return milliseconds


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep some other processes busy."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def main(length: int, repeats: int, threads: Sequence[int]) -> None:
    from benchmarks.measure import write_table

    rows: list[list[Any]] = []
    for name, settings in WAITING.items():
        for count in threads:
            alone = measured(count, settings, length, repeats)
            with busy(1):
                beside = measured(count, settings, length, repeats)
            times = [alone["exact"], alone["converted"], beside["exact"], beside["converted"]]
            rows.append([name, count, *times, beside["converted"] / alone["converted"]])
            print(*(f"{x:.1f}" if isinstance(x, float) else x for x in rows[-1]), sep=" · ", flush=True)
    notes = (
        f"EuroBERT's architecture with two layers of 12 heads × 64, float32, random weights, one sequence of {length:,} "
        f"tokens, forward; {os.cpu_count()} cores. Converted: default settings. Busy: another process computes on one core "
        "all the time; × slower divides the time of the converted encoder beside it by the time alone. 1,000 spins: "
        "`GOMP_SPINCOUNT=1000`, which the command line sets; passive: `OMP_WAIT_POLICY=PASSIVE`."
    )
    command = "python -m benchmarks.cpu_threads"
    write_table("cpu_threads", "Threads on a busy CPU", [("", HEADER, rows)], notes, command=command)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--threads", type=int, nargs="+", default=THREADS)
    parser.add_argument("--measure", action="store_true", help="print the times in this process")
    given = parser.parse_args()
    if given.measure:
        measure(given.length, given.repeats)
    else:
        main(given.length, given.repeats, given.threads)
