"""`hsa inspect`: print the tree of a file and the cost of attention on it."""

from __future__ import annotations

import json as json_format
import math
import re
import sys
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

import hsa
from hsa.cli.help import HelpPage
from hsa.errors import InvalidInput
from hsa.files import parse_json
from hsa.table_format import TableFormat

if TYPE_CHECKING:
    from rich.table import Table

    from hsa.signals import Leaf, Signal
    from hsa.signals.batch import Batch
    from hsa.signals.readers import Rows

WINDOWS = (16, 8, 8, 16)
"""Branching of the regular tree to compare with."""
_LEVELS_OF_TEXT = ("text", "paragraphs", "sentences", "tokens")
_SAMPLE = "sample.txt"
STDIN = "<stdin>"
"""Stands for a lone hyphen on the command line."""
_STRING_OR_NUMBER = re.compile(r'"(?:[^"\\]|\\.)*"|(NaN|-?Infinity|-?\d[\d.eE+-]*)')  # in JSON

HELP = HelpPage(
    examples={
        "hsa inspect": "a sample text",
        "hsa inspect page.html --rows 20": "the tree of a web page",
        "hsa inspect reviews.csv --row 3": "the tree of the third row of a table",
        "git log | hsa inspect - --json": "from a pipe, for scripts",
    },
    common=(
        *("row", "text", "number", "image", "skip_bad", "delimiter", "encoding"),
        *("format", "tokenizer", "max_tokens", "max_family"),
        *("rows", "json"),
    ),
    topics={
        "Table": ("row", "text", "number", "image", "skip_bad", "delimiter", "encoding"),
        "Tree": ("format", "tokenizer", "language", "max_tokens", "max_family"),
        "Output": ("rows", "json", "width", "heads"),
    },
)


def inspect(
    file: str | None = None,
    /,
    *,
    format: Literal["text", "json", "csv", "tsv", "jsonl"] | None = None,
    row: int | None = None,
    text: tuple[str, ...] = (),
    number: tuple[str, ...] = (),
    image: tuple[str, ...] = (),
    tokenizer: Path | None = None,
    language: str = "en",
    max_tokens: int | None = None,
    max_family: int | None = None,
    skip_bad: bool = False,
    width: int = 768,
    heads: int = 12,
    rows: int = 40,
    json: bool = False,
    table: Annotated[TableFormat, Parameter(name="*")] = TableFormat(),  # noqa: B008
) -> None:
    """Show the tree of a file, and the cost of attention on it.

    Text is split into paragraphs (at blank lines), sentences and tokens; Markdown into sections, HTML into blocks, Python
    source into statements, and images into patches. JSON keeps its lists and objects, without null values and empty lists.
    Of a table (.csv, .tsv, .jsonl, .parquet, …, also .gz), one row is shown as `hsa train` reads it by default: with tokens
    of a tokenizer that is trained on all texts of the table, cut to a length, and with long sequences in windows.

    Args:
        file: A file, or - for stdin. By default a sample text.
        format: Format of the file. By default the suffix decides: .json, .csv, .md, .html, .py, .png, …; other files are
            text.
        row: Row of a table, counted from 1; the first by default. With this option or one of the next three, a .json file is
            a table, too: a list of objects.
        text: Columns of a table that hold text. Without columns, all are shown that hold text, numbers or images.
        number: Columns of a table that hold numbers.
        image: Columns of a table that hold images: paths relative to the file, or the bytes.
        tokenizer: A tokenizer.json to split text into tokens, such as that of a trained model. By default, tokens are words
            and punctuation marks, or those of a tokenizer that is trained on the table.
        language: Language of the text, for the sentence splitter: en, de, fr, …
        max_tokens: Number of leaves after which the tree is cut; 0 for no limit. By default 512 for tables.
        max_family: Number of members from which sequences are split into windows; 0 for no limit. By default 128 for tables.
        skip_bad: Show the next row that can be read, if one cannot.
        width: Width of the attention layer, all heads together.
        heads: Number of attention heads.
        rows: Number of rows of the tree to print.
        json: Print the numbers as JSON, for scripts.
    """
    from hsa.cli.table_row import cut, read_table_row
    from hsa.signals.batch import collate
    from hsa.training.options import DataOptions

    if rows < 1:
        raise InvalidInput("rows", got=rows, expected="a positive integer")
    columns = {"text": text, "number": number, "image": image}
    loaded = _read_table(file, format, row, any(columns.values()), table)
    names: tuple[str, ...] = ()
    signal: Signal | Leaf
    if loaded is not None:
        first = 1 if row is None else row
        source, signal = read_table_row(loaded, first, columns, tokenizer, language, skip_bad=skip_bad)
    elif skip_bad:
        raise InvalidInput("skip_bad", got="a file that is no table", expected="a table", fix="Leave it out")
    else:
        source, signal, names = _read(file, format, tokenizer, language, table)
    usual = (0, 0) if loaded is None else (DataOptions.max_tokens, DataOptions.max_family)
    limits = [d if own is None else own for own, d in zip((max_tokens, max_family), usual, strict=True)]
    signal = cut(signal, *limits, where=source) if any(limits) else signal
    names = () if limits[1] else names  # windows are further levels
    report = _report(source, collate([signal]), width, heads)
    if json:
        print(json_format.dumps(asdict(report), indent=2, ensure_ascii=False))
    else:
        _print(report, signal, names, rows)


@dataclass(frozen=True)
class Level:
    """One depth of the tree, with the sizes of the families whose parent lies at this depth."""

    depth: int
    kinds: tuple[str, ...]  # names of the domains
    nodes: int
    leaves: int
    families: int
    smallest: int | None
    mean: float | None
    largest: int | None


@dataclass(frozen=True)
class Cost:
    """Number of attention operations of one layer."""

    width: int
    heads: int
    flat: int
    tree: int
    windows: int
    windows_branching: tuple[int, ...]
    times_cheaper_tree: float | None  # than flat; None when there is nothing to attend to
    times_cheaper_windows: float


@dataclass(frozen=True)
class Report:
    """Facts about a file that `--json` prints."""

    source: str
    leaves: int
    families: int
    depth: int
    modalities: dict[str, int]  # number of leaves of each
    levels: tuple[Level, ...]
    attention: Cost


def _read_table(
    file: str | None, format: str | None, row: int | None, has_columns: bool, table: TableFormat
) -> Rows | None:
    """Return the rows of a table; None for other files."""
    from hsa.signals.readers.rows import ROW_SUFFIXES, load_rows, parse_rows
    from hsa.signals.readers.text import decode_file

    is_table = row is not None or has_columns
    if file is not None and format in ("csv", "tsv", "jsonl"):
        text = decode_file(_load_bytes(file), table.encoding, _name(file))
        return parse_rows(text, f".{format}", _name(file), table.delimiter)
    if format is None and file is not None and _name(file) != STDIN:
        suffix = Path(file).suffix.lower()
        if is_table or suffix in set(ROW_SUFFIXES) - {".json"}:
            return load_rows(file, delimiter=table.delimiter, encoding=table.encoding)
        return None
    if is_table or format in ("csv", "tsv", "jsonl"):
        raise InvalidInput(
            "row" if row is not None else "columns" if has_columns else "format",
            problem="no table is given",
            expected="a file, or - for stdin with --format csv, tsv or jsonl",
        )
    return None


def _name(file: str) -> str:
    return STDIN if file == "-" else file


def _load_bytes(file: str) -> bytes:
    from hsa.signals.readers.text import load_bytes

    return sys.stdin.buffer.read() if _name(file) == STDIN else load_bytes(file)


def _read(
    file: str | None, format: str | None, tokenizer: Path | None, language: str, table: TableFormat
) -> tuple[str, Signal | Leaf, tuple[str, ...]]:
    """Return the name of the source, the signal, and the names of the levels, if they have any."""
    from hsa.signals.readers.files import SUFFIXES, read_file
    from hsa.signals.readers.nested import from_nested
    from hsa.signals.readers.text import LANGUAGES, decode_file, read_text

    table.refuse("a file that is no table", "delimiter")
    if file is None:
        table.refuse("the sample text")
        if format == "json":
            raise InvalidInput("format", got="json without a file", expected="a file, or - for stdin")
        source, text = "sample text", (files("hsa.cli") / _SAMPLE).read_text(encoding="utf-8")
    else:
        kind = "text" if _name(file) == STDIN else SUFFIXES.get(Path(file).suffix.lower(), "text")
        if format is None and kind not in ("text", "json"):
            table.refuse(file)
            return file, read_file(file, tokenizer, language), ()
        source = _name(file)
        text = decode_file(_load_bytes(file), table.encoding, source)
        format = format or ("json" if kind == "json" else None)
    if format == "json":
        return source, from_nested(_parse(text, source), drop_empty=True, where=Path(source).name), ()
    if language not in LANGUAGES:
        print(
            f"language: sentencex has no rules for {language!r} and uses those of a related language or of English; "
            f"it has rules for {', '.join(sorted(LANGUAGES))}",
            file=sys.stderr,
        )
    return source, read_text(text, tokenizer, language, where=source), _LEVELS_OF_TEXT


def _parse(text: str, source: str) -> Any:
    """Parse a JSON document; unlike Python's parser, refuse infinities and NaN."""
    document = parse_json(text, source)
    for match in _STRING_OR_NUMBER.finditer(text):
        number = match[1]
        if number and not math.isfinite(float(number)):
            line, column = text.count("\n", 0, match.start()) + 1, match.start() - text.rfind("\n", 0, match.start())
            shown = number if len(number) <= 20 else f"a number of {len(number):,} characters"
            raise InvalidInput(f"{source}: line {line}, column {column}", got=shown, expected="a finite number")
    return document


def _report(source: str, batch: Batch, width: int, heads: int) -> Report:
    tree = batch.hierarchy
    n = tree.num_leaves
    flat = hsa.flops_flat(n, width=width, heads=heads)
    on_tree = hsa.flops(tree, width=width, heads=heads).attention
    on_windows = hsa.flops(hsa.Hierarchy.regular([n], WINDOWS), width=width, heads=heads).attention
    return Report(
        source=source,
        leaves=n,
        families=tree.num_families,
        depth=tree.depth,
        modalities={name: len(leaves) for name, leaves in batch.leaves.items()},
        levels=_levels(batch),
        attention=Cost(
            width=width,
            heads=heads,
            flat=flat,
            tree=on_tree,
            windows=on_windows,
            windows_branching=WINDOWS,
            times_cheaper_tree=round(flat / on_tree, 2) if on_tree else None,
            times_cheaper_windows=round(flat / on_windows, 2),
        ),
    )


def _levels(batch: Batch) -> tuple[Level, ...]:
    import numpy as np

    s = batch.hierarchy.structure
    kinds = np.array([type(domain).__name__ for domain in batch.domains])
    depth_of_family = s.depth[s.num_children > 0]
    levels = []
    for depth, (begin, end) in enumerate(zip(s.depth_offsets, s.depth_offsets[1:], strict=False)):
        sizes = s.num_children[begin:end]
        sizes = sizes[sizes > 0]
        levels.append(
            Level(
                depth=depth,
                kinds=tuple(sorted(set(kinds[depth_of_family == depth].tolist()))),
                nodes=int(end - begin),
                leaves=int(end - begin) - len(sizes),
                families=len(sizes),
                smallest=int(sizes.min()) if len(sizes) else None,
                mean=round(float(sizes.mean()), 2) if len(sizes) else None,
                largest=int(sizes.max()) if len(sizes) else None,
            )
        )
    return tuple(levels)


def _print(report: Report, signal: Signal | Leaf, names: tuple[str, ...], rows: int) -> None:
    from rich.console import Console
    from rich.text import Text

    from hsa.signals import Signal

    console = Console()
    tree = signal.show(max_rows=rows, max_members=5) if isinstance(signal, Signal) else repr(signal)
    console.print(Text(report.source, style="bold"))
    console.print(Text(tree), no_wrap=True, overflow="ellipsis")
    console.print()
    console.print(_level_table(report, names, rows))
    console.print()
    console.print(_cost_table(report))


def _level_table(report: Report, names: tuple[str, ...], rows: int) -> Table:
    from rich import box
    from rich.table import Table

    modalities = ", ".join(f"{count:,} of {name}" for name, count in report.modalities.items())
    table = Table(title=f"Levels · leaves: {modalities}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("depth", justify="right")
    table.add_column("what")
    table.add_column("nodes", justify="right")
    table.add_column("leaves", justify="right")
    table.add_column("families", justify="right")
    for size in ("members\nmin", "\nmean", "\nmax"):
        table.add_column(size, justify="right")
    for level in report.levels[:rows]:
        name = names[level.depth] if level.depth < len(names) else ", ".join(level.kinds) or "leaves"
        sizes = [level.smallest, level.mean, level.largest]
        shown = ["–" if size is None else f"{size:,}" if isinstance(size, int) else f"{size:,.1f}" for size in sizes]
        table.add_row(str(level.depth), name, f"{level.nodes:,}", f"{level.leaves:,}", f"{level.families:,}", *shown)
    if len(report.levels) > rows:
        table.add_row("…", f"{len(report.levels) - rows:,} more")
    return table


def _cost_table(report: Report) -> Table:
    from rich import box
    from rich.table import Table

    cost = report.attention
    leaves = f"{report.leaves:,} {'leaf' if report.leaves == 1 else 'leaves'}"
    table = Table(
        title=f"Attention per layer · {leaves}, width {cost.width}, {cost.heads} heads",
        caption="Not counted: projections and pooling, which are linear in the leaves.",
        caption_justify="left",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("")
    table.add_column("operations", justify="right")
    table.add_column("times cheaper", justify="right")
    table.add_row("flat: every leaf sees every leaf", _operations(cost.flat), _times(1.0))
    table.add_row("this tree", _operations(cost.tree), _times(cost.times_cheaper_tree))
    branching = " × ".join(map(str, cost.windows_branching))
    table.add_row(f"windows of {branching}", _operations(cost.windows), _times(cost.times_cheaper_windows))
    return table


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:,.1f} ×"


def _operations(count: int) -> str:
    """Return a count with three digits and a unit.

    >>> _operations(9_329_100), _operations(12)
    ('9.33 M', '12')
    """
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:,.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return str(count)
