"""Kernels compile for all supported GPUs and fit their shared memory; the test needs no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[2] / "compile_kernels.py"


@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("which", "at_least"), [("few", 29), pytest.param("all", 100, marks=pytest.mark.slow)])
def test_kernels_compile(tmp_path, capability, which, at_least):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, SCRIPT, str(capability), which]
    run = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) >= at_least
