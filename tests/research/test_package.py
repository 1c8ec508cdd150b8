"""Exports of `hsa.research` and `hsa.baselines`: every name exists, and nothing heavy loads before it is used."""

import subprocess
import sys
from importlib import import_module

import pytest


@pytest.mark.parametrize("package", ["hsa.research", "hsa.baselines"])
def test_exports(package):
    module = import_module(package)
    for name in module.__all__:
        assert getattr(module, name).__name__ == name
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        _ = module.nothing


def test_importing_does_not_import_torch():
    code = "import hsa.research, hsa.baselines, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
