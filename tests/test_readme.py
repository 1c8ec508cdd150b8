"""The README's commands and examples are true."""

import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from itertools import takewhile
from pathlib import Path

import pytest
import torch

import hsa
from hsa.cli.main import build_app
from hsa.huggingface.fidelity.sweep_recipe import load_sweep
from hsa.training.recipe import load_recipe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
RECIPES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "recipes").glob("*.yaml"))
LINKING = [
    *PAGES,
    "CONTRIBUTING.md",
    "SECURITY.md",
    "src/hsa/attention/README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "benchmarks" / "results").glob("*.md")),
]


def marked(name):
    return re.search(rf"<!-- {name} -->\n```bash\n(.+?)\n```", README, re.DOTALL).group(1)


def blocks(page):
    return re.findall(r"```python\n(.+?)```", (ROOT / page).read_text(), re.DOTALL)


def shown_commands(page):
    """The commands of a page, in blocks and in its text, without comments and redirections."""
    text = (ROOT / page).read_text()
    lines = re.findall(r"^(?:    |\$ |# )*hsa (\w.*)$", text, re.MULTILINE) + re.findall(r"`hsa (\w[^`]* [^`]+)`", text)
    for line in lines:
        tokens = list(takewhile(lambda token: token not in ("|", ">"), shlex.split(line, comments=True)))
        if not {"…", "--help", "--help-all"} & set(tokens):
            yield tokens


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_examples_run(page):
    """The blocks of a page run one after another, as a reader would type them; tensors that they assign are finite."""
    names = {}
    for block in blocks(page):
        exec(compile(block, page, "exec"), names)
    for name, value in names.items():
        if isinstance(value, torch.Tensor):
            assert value.isfinite().all(), name


@pytest.mark.parametrize("page", [page for page in [*LINKING, *RECIPES] if any(shown_commands(page))])
def test_shown_commands_parse(page):
    """Every command of a page exists and takes the options that it is shown with."""
    app = build_app()
    for tokens in shown_commands(page):
        command, *_ = app.parse_args(tokens, exit_on_error=False, print_error=False)
        assert command.__name__ == tokens[0], tokens


def test_commands_install_with_the_pinned_versions():
    for name in ("main-command", "test-command"):
        assert marked(name).startswith("pip install -c constraints.txt -e ")
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()


def test_the_main_job_runs_offline(tmp_path):
    """Run what the first command runs after installing, on less data."""
    job = [*marked("main-command").split("&& hsa ")[1].split(), "--quick", "--out", str(tmp_path / "run")]
    code = f"import sys; from hsa.cli.main import run; run({job!r})"
    offline = {"HF_HUB_OFFLINE": "1", "no_proxy": "*", "http_proxy": "http://127.0.0.1:9"}
    environment = {**os.environ, **offline, "HSA_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "bottom-up against flat" in result.stdout
    assert {"bottom-up", "hierarchical", "flat", "report.md", "lengths.png"} <= {
        p.name for p in (tmp_path / "run").iterdir()
    }


STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
"""
STAND_IN_PYTHON = """#!/bin/sh
mkdir -p "$3/bin"
for name in pip hsa ruff mypy lint-imports pytest; do cp "$STAND_INS/pip" "$3/bin/$name"; done
"""


def test_ci_runs_the_commands_of_the_readme_before_it_installs_more(tmp_path):
    """Run .ci/run with stand-ins that write down how they are called."""
    for name, text in {"python3": STAND_IN_PYTHON, "pip": STAND_IN}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "STAND_INS": str(tmp_path),
        "CALLS": str(calls),
        "TMPDIR": str(tmp_path),
    }
    subprocess.run(["bash", str(ROOT / ".ci" / "run")], env=environment, check=True, capture_output=True)
    called = calls.read_text().splitlines()
    main, test = (marked(name).replace("'", "").split(" && ") for name in ("main-command", "test-command"))
    checks = [line.split(" ")[0] for line in called[3:-2]]
    assert called[:3] == [*main, test[0]]
    assert (test[1], checks) == ("tools/check", ["ruff", "ruff", "mypy", "lint-imports", "pytest"])
    assert called[-2] == "pip install -q -r .ci/triton.txt"
    assert re.fullmatch(r"pytest -n auto( src/\S+/triton/\S+)+( tests/\S+/test_triton_\S+)+", called[-1])


def test_files_that_need_triton_are_named_for_it():
    """.ci/run finds the tests of kernels by the names of their files."""
    needs = re.compile(r'importorskip\("triton"|tests\.interpreter import')
    for path in (ROOT / "tests").rglob("test_*.py"):
        if path != Path(__file__):
            assert bool(needs.search(path.read_text())) == path.name.startswith("test_triton_"), path


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_load(recipe):
    """Every recipe is read by its command, and attends as in the paper where it trains the paper's operator."""
    if recipe.startswith("recipes/convert_"):
        sweep = load_sweep(ROOT / recipe)
        assert sweep.tasks
        assert sweep.variants
    else:
        loaded = load_recipe(ROOT / recipe)
        assert loaded.models
        assert "hierarchical" not in loaded.models or not loaded.model.include_self


def headings(path):
    """The anchors of a page, as GitHub makes them of its headings."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", LINKING)
def test_links_exist(page):
    """Files and headings that a page links to, and the pictures that it shows."""
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", (ROOT / page).read_text().replace("\n", " ")):
        if not target.startswith("http"):
            path = (ROOT / page).parent / target if target else ROOT / page
            assert path.exists(), (page, target)
            assert not anchor or anchor in headings(path), (page, anchor)


def test_modules_named_in_pages_exist():
    """Dotted names such as `hsa.nn.encoder.HierarchicalEncoder` and paths of benchmarks."""
    for page in LINKING:
        text = (ROOT / page).read_text()
        for name in set(re.findall(r"`(hsa(?:\.\w+)+)", text)):
            assert exists(name), (page, name)
        for name in set(re.findall(r"python -m (benchmarks\.\w+)", text)):
            assert (ROOT / name.replace(".", "/")).with_suffix(".py").is_file(), (page, name)
        for name in set(re.findall(r"recipes/\w+\.yaml", text)):
            assert (ROOT / name).is_file(), (page, name)


def exists(name):
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        try:
            value = import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        try:
            for part in parts[i:]:
                value = getattr(value, part)
        except AttributeError:
            return False
        return True
    return False


def test_architecture_names_files_that_exist():
    for line in (ROOT / "docs" / "architecture.md").read_text().splitlines():
        found = re.match(r"^ {6,12}(?:\w+/)?(\w+\.py)\b", line)
        if found:
            assert list((ROOT / "src").rglob(found.group(1))) or (ROOT / "tests" / found.group(1)).exists(), line


def test_public_names_load():
    for name in hsa.__all__:
        assert getattr(hsa, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        hsa.nonsense  # noqa: B018


def test_importing_hsa_is_light():
    code = (
        "import sys, hsa; "
        "heavy = {'torch', 'transformers', 'triton', 'matplotlib', 'accelerate', 'rich', 'cyclopts', 'sentencex'}; "
        "sys.exit(','.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
