"""Docstrings start with a verb in the imperative or with a noun, and avoid phrases that have to be read twice."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "benchmarks", "examples")
NOT_FIRST = {
    *("What", "Of", "How", "So", "That", "Those", "These", "It", "Its", "As", "Where", "When", "With", "Which", "Who"),
    *(
        "Whose",
        "Once",
        "Not",
        "Never",
        "For",
        "From",
        "In",
        "On",
        "By",
        "After",
        "Before",
        "To",
        "Into",
        "Under",
        "Over",
    ),
    *(
        "Without",
        "Per",
        "If",
        "Because",
        "But",
        "And",
        "Or",
        "Is",
        "Are",
        "Has",
        "Have",
        "Here",
        "There",
        "Also",
        "Only",
    ),
    *("Adds", "Asks", "Builds", "Calls", "Checks", "Counts", "Draws", "Finds", "Gives", "Holds", "Keeps", "Loads"),
    *("Looks", "Makes", "Prints", "Puts", "Raises", "Reads", "Returns", "Runs", "Says", "Saves", "Sets", "Shows"),
    *("Sorts", "Splits", "Stores", "Takes", "Tells", "Trains", "Turns", "Waits", "Writes"),
}
RIDDLES = re.compile(
    r"\b(so many|so much as|of which|what it is|what is meant|as it is said|unless it is said)\b", re.I
)


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path != Path(__file__))


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of the docstrings of modules, classes and functions, and of the strings that follow fields."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for before, statement in zip([None, *node.body], node.body, strict=False):
                is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
                follows_field = before is None or isinstance(before, (ast.Assign, ast.AnnAssign))
                if is_text and follows_field and isinstance(statement.value.value, str):
                    yield statement.lineno, statement.value.value


def prose(source: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield comments and string literals with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def complaints(path: Path) -> list[str]:
    source = path.read_text()
    tree = ast.parse(source)
    where = path.relative_to(ROOT)
    result = []
    for line, text in docstrings(tree):
        first = re.match(r"[A-Za-z]+", text.strip())
        if first is not None and first[0] in NOT_FIRST:
            result.append(f"{where}:{line}: starts with {first[0]!r}: {text.strip().splitlines()[0][:90]}")
    for line, text in prose(source, tree):
        if riddle := RIDDLES.search(text):
            result.append(f"{where}:{line}: says {riddle[0]!r}")
    return result


@pytest.mark.parametrize("folder", FOLDERS)
def test_plain_english(folder):
    lines = [line for path in sources() if path.is_relative_to(ROOT / folder) for line in complaints(path)]
    assert not lines, "\n".join(lines)
