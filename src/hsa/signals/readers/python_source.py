"""Read Python source: classes → functions → statements → tokens."""

from __future__ import annotations

import ast
import io
import tokenize
import warnings
from collections.abc import Iterator
from os import PathLike
from typing import Any, Literal

from hsa.errors import InvalidInput
from hsa.signals.readers.outline import build_signal
from hsa.signals.readers.text import check_text, decode_text, load_bytes, normalize_newlines
from hsa.signals.signal import Signal

_LAYOUT = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
)


def read_python(source: str, tokenizer: Any = None, *, where: str = "python") -> Signal:
    """Read a module as a `Sequence` of statements, in which classes, functions and other blocks nest.

    A simple statement is a family of tokens. A class, a function, a loop or another block is a `Sequence`: first its
    header (for a function the decorators and the `def` line), then its statements, then a `Sequence` of the same form
    for each further branch (`elif`, `else`, `except`, `finally`, `case`).

    Args:
        source: Source of the module.
        tokenizer: As in `read_text`, for the source of each statement or header. By default the leaves are the names,
            operators, numbers and strings of the language. Comments between statements are left out.
        where: Name of the module in error messages.

    Raises:
        InvalidInput: For invalid Python (with the line), no statements, or nesting too deep for Python's parser.

    >>> print(read_python("def double(x):\\n    return 2 * x\\n").show())
    Sequence(1) · 10 leaves · text
    └─ [0] Sequence(2) · 10 leaves · text
       ├─ [0] Sequence(6) · 6 leaves · text · 'def' 'double' '(' 'x' ')' ':'
       └─ [1] Sequence(4) · 4 leaves · text · 'return' '2' '*' 'x'
    """
    source = normalize_newlines(check_text(source, where))
    module = _parse(source, where)
    units = _Units(source, whole=tokenizer is not None, where=where)
    outline = [_statement(statement, units) for statement in module.body]
    return build_signal(outline, tokenizer, where=where, problem="no statements", expected="at least one")


def definitions(source: str, *, where: str = "python") -> Iterator[tuple[str, Literal["class", "function"], str]]:
    """Yield the name, kind and source of every class and function at the top level of a module, decorators included.

    Raises:
        InvalidInput: For invalid Python, with the line.

    >>> list(definitions("import os\\n\\n@cache\\ndef f(): ...\\n\\nclass A:\\n    def g(self): ...\\n"))
    [('f', 'function', '@cache\\ndef f(): ...'), ('A', 'class', 'class A:\\n    def g(self): ...')]
    """
    source = normalize_newlines(check_text(source, where))
    lines = source.split("\n")
    for node in _parse(source, where).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
            while node.decorator_list and not lines[first - 1].startswith("@"):  # @(\n decorator)
                first -= 1
            # Up to the end of the line: only a comment or a semicolon can follow the definition.
            text = "\n".join(lines[first - 1 : node.end_lineno])
            yield node.name, "class" if isinstance(node, ast.ClassDef) else "function", text


def load_python(path: str | PathLike[str]) -> str:
    """Load the source in a file, in the encoding that its first lines declare, UTF-8 by default.

    Raises:
        InvalidInput: For a file that cannot be read or is not in its encoding; the message names it.
    """
    data = load_bytes(path)
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except SyntaxError as error:
        raise InvalidInput(str(path), problem=f"invalid Python ({error.msg})", expected="Python source") from None
    return decode_text(data, encoding=encoding, where=str(path))


def _parse(source: str, where: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the source is not run
            return ast.parse(source)
    except SyntaxError as error:
        raise InvalidInput(
            f"{where}:{error.lineno}", problem=f"invalid Python ({error.msg})", expected="Python source"
        ) from None
    except (RecursionError, MemoryError):
        raise InvalidInput(where, got="source nested too deeply to parse", expected="fewer levels") from None
    except ValueError as error:  # NUL characters, halves of surrogate pairs
        raise InvalidInput(where, problem=f"invalid Python ({error})", expected="Python source") from None


class _Units:
    """Tokens of a module, taken one statement or header at a time."""

    def __init__(self, source: str, *, whole: bool, where: str):
        self._lines = source.split("\n")
        self._whole = whole  # a unit is its source text, for a tokenizer, rather than a signal of tokens
        try:
            tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
        except (tokenize.TokenError, SyntaxError) as error:
            raise InvalidInput(where, problem=f"invalid Python ({error})", expected="Python source") from None
        self._tokens = [token for token in tokens if token.type not in _LAYOUT]
        self._next = 0

    def take(self, until: ast.stmt | None = None, lines: int = 1) -> str | Signal:
        """Return the tokens up to a semicolon, to a statement in the same line, or to the end of these lines."""
        stop = None if until is None else (until.lineno, self._column(until))
        taken: list[tokenize.TokenInfo] = []
        while lines and (token := self._tokens[self._next]).start != stop:
            self._next += 1
            if token.type == tokenize.NEWLINE:
                lines -= 1
            else:
                taken.append(token)
                if token.string == ";":
                    self._next += self._tokens[self._next].type == tokenize.NEWLINE
                    break
        return self._text(taken[0], taken[-1]) if self._whole else Signal.of([token.string for token in taken], "text")

    def _text(self, first: tokenize.TokenInfo, last: tokenize.TokenInfo) -> str:
        (top, left), (bottom, right) = first.start, last.end
        if top == bottom:
            return self._lines[top - 1][left:right]
        return "\n".join([self._lines[top - 1][left:], *self._lines[top : bottom - 1], self._lines[bottom - 1][:right]])

    def _column(self, node: ast.stmt) -> int:
        """Convert a column: `ast` counts bytes, `tokenize` characters."""
        line = self._lines[node.lineno - 1]
        return node.col_offset if line.isascii() else len(line.encode()[: node.col_offset].decode())


def _statement(node: ast.stmt, units: _Units) -> Any:
    """Return the outline of a statement. Only blocks recurse; Python nests them at most a hundred deep."""
    if isinstance(node, ast.Match):
        return [units.take(), *(_branch(case.body, units) for case in node.cases)]
    bodies = list(_bodies(node))
    if not bodies:
        return units.take()
    decorators = len(getattr(node, "decorator_list", []))
    return [*_branch(bodies[0], units, decorators), *(_branch(body, units) for body in bodies[1:])]


def _branch(body: list[ast.stmt], units: _Units, decorators: int = 0) -> list[Any]:
    header = units.take(until=body[0], lines=1 + decorators)
    return [header, *(_statement(statement, units) for statement in body)]


def _bodies(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Yield the statements under each header of a statement, in source order; nothing for a simple statement."""
    while isinstance(node, ast.If) and _is_elif(node):  # a loop, because each `elif` is nested in the one before
        yield node.body
        node = node.orelse[0]
    handlers = [handler.body for handler in getattr(node, "handlers", [])]
    body, orelse, finalbody = (getattr(node, field, []) for field in ("body", "orelse", "finalbody"))
    yield from filter(None, [body, *handlers, orelse, finalbody])


def _is_elif(node: ast.If) -> bool:
    """Return whether the next branch is an `elif`, which begins in the column of the `if`, unlike an `if` inside `else`."""
    return len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If) and node.orelse[0].col_offset == node.col_offset
