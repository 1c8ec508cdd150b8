"""Skips the doctests of kernels where Triton is not installed. Any other module that cannot be imported is an error."""

from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).parent


def pytest_ignore_collect(collection_path):
    """Leave out the folders of kernels, which need Triton, and the helpers of tests; None lets other plugins decide."""
    if collection_path.is_dir():
        return None
    is_kernel = _ROOT / "src" in collection_path.parents and collection_path.parent.name == "triton"
    is_helper = _ROOT / "tests" in collection_path.parents and not collection_path.name.startswith("test_")
    return True if is_helper or (is_kernel and find_spec("triton") is None) else None
