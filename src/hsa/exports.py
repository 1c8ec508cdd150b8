"""Names that packages export and load on first use, so that importing hsa stays fast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(
    package: str, homes: Mapping[str, str], packages: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: Name of the package.
        homes: Modules, and the names that the package exports from each, separated by spaces.
        packages: Packages inside it that it exports as well.

    >>> get, list_names, names = lazy("hsa", {"hsa.errors": "HsaError InvalidInput"})
    >>> get("HsaError").__module__, names
    ('hsa.errors', ['HsaError', 'InvalidInput'])
    """
    home_of = {name: module for module, names in homes.items() for name in names.split()}
    inside = packages.split()

    def load(name: str) -> Any:
        if name in inside:
            return import_module(f"{package}.{name}")
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of, *inside})

    return load, list_names, sorted([*home_of, *inside])
