"""The public face: packages export what users need, documented, and documentation imports nothing deeper."""

import ast
import doctest
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = [
    "hsa",
    *sorted(f"hsa.{p.parent.name}" for p in (ROOT / "src/hsa").glob("*/__init__.py") if "lazy(" in p.read_text()),
]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "src/hsa/attention/README.md",
    *sorted((ROOT / "examples").glob("*.py")),
]
EXPORTS = [(room, name) for room in ROOMS for name in import_module(room).__all__ if f"{room}.{name}" not in ROOMS]


def typed_imports(room):
    """Return the names that a package imports for type checkers, with their modules."""
    tree = ast.parse(Path(import_module(room).__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    return {alias.name: node.module for node in block.body for alias in node.names if node.module != "hsa"}


def test_rooms():
    assert {"hsa", "hsa.nn", "hsa.models", "hsa.signals", "hsa.huggingface", "hsa.research"} <= set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_type_checkers_see_what_is_exported(room):
    homes = import_module(room)._HOMES
    assert typed_imports(room) == {name: module for module, names in homes.items() for name in names.split()}


@pytest.mark.parametrize("room", ROOMS)
def test_no_export_hides_a_module(room):
    folder = Path(import_module(room).__file__).parent
    modules = {path.stem for path in folder.iterdir()}
    rooms = {name.removeprefix("hsa.") for name in ROOMS}
    assert not modules & set(import_module(room).__all__) - (rooms if room == "hsa" else set())


def test_a_room_lists_its_names_and_no_others():
    import hsa

    assert "scaled_dot_product_attention" in dir(hsa)
    with pytest.raises(AttributeError, match="module 'hsa' has no attribute 'scaled_attention'"):
        hsa.scaled_attention  # noqa: B018


@pytest.mark.parametrize(("room", "name"), EXPORTS, ids=[f"{room}.{name}" for room, name in EXPORTS])
def test_exports_are_documented(room, name):
    """A docstring starts with one sentence; functions and classes, other than errors, show an example."""
    value = getattr(import_module(room), name)
    text = inspect.getdoc(value)
    if not (inspect.isclass(value) or inspect.isfunction(value) or callable(value)):
        return
    assert text, f"{room}.{name} has no docstring"
    first = text.split("\n\n")[0]
    assert re.match(r"[A-Z`]", first), first
    assert first.rstrip().endswith((".", ":")), first
    is_error = inspect.isclass(value) and issubclass(value, Exception)
    if not is_error and room in ("hsa", "hsa.nn", "hsa.models", "hsa.signals", "hsa.huggingface"):
        assert doctest.DocTestParser().get_examples(text), f"{room}.{name} shows no example"


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_documentation_imports_nothing_deeper(page):
    """A page imports from `hsa` and its rooms, and only what these export."""
    text = page.read_text()
    blocks = [text] if page.suffix == ".py" else re.findall(r"```python\n(.+?)```", text, re.DOTALL)
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "hsa":
                assert node.module in ROOMS, f"{page}: from {node.module} import …"
                unknown = {alias.name for alias in node.names} - set(import_module(node.module).__all__)
                rooms = {room.removeprefix("hsa.") for room in ROOMS} if node.module == "hsa" else set()
                assert unknown <= rooms, f"{page}: from {node.module} import {unknown}"
            if isinstance(node, ast.Import):
                assert all(a.name in ROOMS or a.name.split(".")[0] != "hsa" for a in node.names), page
    deeper = set(re.findall(r"`(hsa\.[a-z_]+\.[a-z_]+\.[A-Za-z_.]+)", "" if page.suffix == ".py" else text))
    assert not {name for name in deeper if not (ROOT / "src" / name.replace(".", "/")).exists()}, deeper


def test_importing_hsa_does_not_import_torch():
    code = "import sys, hsa, hsa.nn, hsa.models, hsa.huggingface; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
