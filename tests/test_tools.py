"""tools/fuzz covers every file of property tests, and counts the cases that it draws."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FUZZ = runpy.run_path(str(ROOT / "tools" / "fuzz"), run_name="fuzz")


def test_every_property_test_is_in_an_area():
    covered = {ROOT / path for paths in FUZZ["AREAS"].values() for path in paths}
    assert all(path.exists() for path in covered)
    for path in (ROOT / "tests").rglob("test_*.py"):
        if path != Path(__file__) and "@given" in path.read_text():
            assert covered & {path, *path.parents}, path


def test_cases_are_counted_and_failures_shown(tmp_path):
    command = [sys.executable, ROOT / "tools" / "fuzz", "0.001", "--area", "drop-ins", "--examples", "2", "--seed", "7"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    assert re.search(r"drop-ins +\d+ cases +\d+ s  seed 7  ok\n\n\d+ cases: drop-ins \d+\nno failures\n", result.stdout)
    assert int(re.search(r"drop-ins +(\d+) cases", result.stdout)[1]) > 4
