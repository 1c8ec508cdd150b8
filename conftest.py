"""Skips the doctests of kernels where Triton is not installed. Any other module that cannot be imported is an error."""

from importlib.util import find_spec
from pathlib import Path

_SOURCES = Path(__file__).parent / "src"


def pytest_ignore_collect(collection_path):
    """Leave out the folders of kernels, which need Triton; None lets other plugins decide."""
    is_kernel = _SOURCES in collection_path.parents and collection_path.parent.name == "triton"
    return True if is_kernel and find_spec("triton") is None else None
