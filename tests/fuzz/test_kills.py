"""Kills at random moments: the run that finishes has the weights of an uninterrupted one."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.training.test_stopping import KILLED, LOOPS, ROOT, Stop, weights


@pytest.fixture(autouse=True)
def _rows(tmp_path, monkeypatch):
    monkeypatch.setenv("HSA_TEST_ROWS", str(tmp_path / "rows.csv"))


@pytest.mark.slow
@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    kind=st.sampled_from(sorted(LOOPS)),
    kills=st.lists(st.tuples(st.integers(0, 8), st.floats(0, 0.2)), min_size=1, max_size=4),
)
def test_killed_runs_end_like_others(kind, kills):
    """Kill the process a moment after some step, several times, then let it finish."""
    whole = weights(LOOPS[kind](None, Stop()))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        for steps, seconds in [*kills, (None, 0)]:
            process = subprocess.Popen(
                [sys.executable, "-c", KILLED, kind, str(folder)], env=environment, stdout=subprocess.PIPE, text=True
            )
            if steps is not None:
                for _, _ in zip(range(steps), process.stdout, strict=False):
                    pass
                time.sleep(seconds)
                process.kill()
            process.communicate(timeout=300)
        assert process.returncode == 0
        assert not list(folder.glob(".*"))
        saved = torch.load(folder / "weights")
    assert all(torch.equal(tensor, whole[name]) for name, tensor in saved.items())
