"""Test options, and a Hypothesis profile without deadlines, because the first call of an operator builds its plan.

Without --explore the examples are the same in every run, so that a failure is due to a change; with it, they are random.
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from hsa.analysis import fonts

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are first imported; they then run on the CPU, by name only

fonts._warned = True  # tests draw characters that few machines have
torch.set_num_threads(1)  # tests are small and run in parallel: threads would compete for the cores

EXAMPLES = 40


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption("--explore", action="store_true", help="draw new random examples in property tests")
    parser.addoption("--examples", type=int, default=EXAMPLES, help=f"examples per property test (default: {EXAMPLES})")


def pytest_configure(config):
    options = {"deadline": None, "max_examples": config.getoption("--examples"), "database": None}
    options |= {"suppress_health_check": [HealthCheck.too_slow], "derandomize": not config.getoption("--explore")}
    settings.register_profile("hsa", **options)
    settings.load_profile("hsa")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
