"""Registries: names, values, plug-in packages and lazy imports."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from hsa.errors import InvalidInput
from hsa.registry import FUSIONS, Registry


@pytest.fixture
def packages(monkeypatch):
    """Return a registry, two packages that register names in it when they are imported, and the list of imports so far."""
    registry: Registry[object] = Registry("shape", ("near_shapes", "far_shapes"))
    imported: list[str] = []

    def find(name: str) -> types.ModuleType:
        if name not in sys.modules:
            imported.append(name)
            module = types.ModuleType(name)
            module.Square = type("Square", (), {"__module__": name})
            monkeypatch.setitem(sys.modules, name, module)
            module.registry = registry
            exec(f"registry.register('{name[:-7]}-square', '{name}:Square')", vars(module))
            exec(f"registry.register('{name[:-7]}-circle', 0)", vars(module))
        return sys.modules[name]

    monkeypatch.setattr("hsa.registry.import_module", find)
    return registry, imported, find


def test_values_and_their_names():
    registry: Registry[object] = Registry("shape", plugins=())
    registry.register("b", 3)
    registry.register("a", "fractions:Fraction")
    assert registry.names() == ("b", "a")  # in the order of registration
    assert registry.get("b") == 3
    assert registry.get("a").__name__ == "Fraction"
    assert "a" in registry
    assert "c" not in registry


def test_packages_are_imported_when_a_name_is_missing(packages):
    registry, imported, _ = packages
    registry.register("line", 1)
    assert registry.get("line") == 1
    assert "line" in registry
    assert imported == []
    assert registry.get("far-square").__module__ == "far_shapes"
    assert imported == ["near_shapes", "far_shapes"]


@pytest.mark.parametrize("first", [(), ("far_shapes",)])
def test_the_order_of_names_does_not_depend_on_the_order_of_imports(packages, first):
    registry, _, find = packages
    registry.register("line", 1)
    for name in first:
        find(name)
    assert registry.names() == ("line", "near-square", "near-circle", "far-square", "far-circle")
    assert registry.get("near-square").__name__ == "Square"
    assert registry.names() == ("line", "near-square", "near-circle", "far-square", "far-circle")


def test_a_name_has_one_value(packages):
    registry, _, _ = packages
    registry.register("line", "lines:Line")
    registry.register("line", "lines:Line")
    with pytest.raises(InvalidInput, match=r"^shape: expected a name that is not registered yet, got a second 'line'$"):
        registry.register("line", "lines:Another")


@pytest.mark.parametrize("method", ["check", "get"])
def test_unknown_names(packages, method):
    registry, _, _ = packages
    registry.register("line", 1)
    names = "line, near-square, near-circle, far-square, far-circle"
    with pytest.raises(InvalidInput, match=rf"^shape: expected one of {names}, got 'lime'\. Did you mean 'line'\?$"):
        getattr(registry, method)("lime")
    with pytest.raises(InvalidInput, match=rf"^shape: expected one of {names}, got 'xyz'$"):
        getattr(registry, method)("xyz")


def test_checking_imports_no_value(packages):
    registry, _, _ = packages
    registry.register("line", "no_such_module:Line")
    registry.check("line")


def test_the_fusions():
    assert FUSIONS.names() == ("concatenation", "talking", "collaborative", "over-heads")


def test_names_need_no_torch():
    code = "import sys; from hsa.registry import FUSIONS; FUSIONS.check('talking'); print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"
