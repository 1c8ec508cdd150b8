"""Run benchmarks by name and write their tables to benchmarks/results/: `python -m benchmarks.run NAME [NAME …]`."""

from __future__ import annotations

import sys

from benchmarks import (
    converted_encoder,
    cpu_attention,
    data_pipeline,
    decode,
    drop_in,
    entmax,
    gpu_attention,
    structures,
)

BENCHMARKS = {
    "converted_encoder": converted_encoder.run,
    "cpu_attention": cpu_attention.run,
    "data_pipeline": data_pipeline.run,
    "decode_cpu": decode.run_cpu,
    "decode_gpu": decode.run_gpu,
    "drop_in_cpu": drop_in.run_cpu,
    "drop_in_gpu": drop_in.run_gpu,
    "entmax": entmax.run,
    "gpu_attention": gpu_attention.run,
    "structures": structures.run,
}


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown or not names:
        raise SystemExit(f"usage: python -m benchmarks.run NAME …, with names from {', '.join(BENCHMARKS)}")
    for name in names:
        BENCHMARKS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
