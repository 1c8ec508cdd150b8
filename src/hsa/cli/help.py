"""Help on two levels: `--help` prints a command's common options on one screen, `--help-all` every option by topic."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import fill
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.argument import Argument
    from cyclopts.help import HelpEntry
    from rich.console import Console

SHORT = ("--help", "-h")
FULL = "--help-all"
ARGUMENTS = "Arguments"  # as cyclopts names the group of positional arguments
OWN = "Run"
"""Heading of the options that a command declares itself, not in a dataclass."""


@dataclass(frozen=True)
class HelpPage:
    """Help of one command, beyond its docstring and its options.

    Args:
        examples: Command lines and what they do.
        common: Options that `--help` shows, in this order. Without any, `--help` shows every option.
        topics: Headings of `--help-all` in their order, each with the options that come first there, even if the command's
            signature puts them under another heading.
        defaults: Function of the words of the command line that returns a sentence on when the printed defaults apply, and
            the defaults that differ from those in the signature, by name.
        epilogue: Function that returns the last paragraphs of `--help-all`.
    """

    examples: Mapping[str, str]
    common: tuple[str, ...] = ()
    topics: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    defaults: Callable[[Sequence[str]], tuple[str, Mapping[str, Any]]] | None = None
    epilogue: Callable[[], str] | None = None


def show_default(value: Any) -> str | None:
    """Return a default value as it is typed on the command line; None where there is nothing to show.

    >>> show_default(("flat", "han")), show_default(5e-5), show_default(True), show_default(()), show_default(False)
    ('flat han', '5e-05', 'True', None, None)
    """
    if value is None or value is False or value == ():
        return None
    if isinstance(value, (tuple, list)):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def print_help(app: App, page: HelpPage, tokens: Sequence[str], *, full: bool) -> None:
    """Print the help of a command: every option if `full`, else the common ones.

    Args:
        tokens: Words of the command line, beginning with the name of the command.
    """
    from rich.text import Text

    name, full = tokens[0], full or not page.common
    command = app[name]
    console = command.console
    collection = command.assemble_argument_collection(default_parameter=app.default_parameter, parse_docstring=True)
    arguments = [argument for argument in collection if argument.show]
    note, defaults = ("", {}) if page.defaults is None else page.defaults(tokens)
    entries = {option_name(argument): _entry(argument, defaults, brief=not full) for argument in arguments}
    summary, *details = _paragraphs(command.help)
    console.print(Text(_usage(name, entries.values()), style="bold"))
    for paragraph in [summary, *(details if full else [])]:
        console.print(Text(f"\n{paragraph}"))
    _print_examples(console, page.examples)
    if full:
        for title, names in _by_topic(arguments, page.topics).items():
            _print_panel(console, title, [entries[name] for name in names])
        if page.epilogue is not None:
            lines = ["", note, "", *page.epilogue().splitlines()]
            for line in lines:
                console.print(Text(fill(line, console.width, subsequent_indent="  ", break_on_hyphens=False)))
        return
    positional = [entry for entry in entries.values() if entry.positional_label]
    _print_panel(console, "Common options", positional + [entries[name] for name in page.common])
    pointer = f"hsa {name} {FULL} shows all {len(entries) - len(positional)} options."
    console.print(Text("\n".join(filter(None, [note, pointer]))))


def option_name(argument: Argument) -> str:
    """Return the name of an option as a keyword of Python: `max_tokens` of `--max-tokens`."""
    return argument.names[0].removeprefix("--").replace("-", "_")


def _paragraphs(docstring: str) -> list[str]:
    """Return the paragraphs of a docstring before its arguments, each on one line."""
    text = inspect.cleandoc(docstring).partition("\nArgs:\n")[0]
    return [" ".join(paragraph.split()).replace("`", "") for paragraph in text.split("\n\n") if paragraph.strip()]


def _usage(name: str, entries: Collection[HelpEntry]) -> str:
    required = [f"{entry.names[0]} {entry.metavar}" for entry in entries if entry.names and entry.required]
    positional = [
        entry.positional_label if entry.required else f"[{entry.positional_label}]"
        for entry in entries
        if entry.positional_label
    ]
    options = ["[OPTIONS]"] if any(entry.names and not entry.required for entry in entries) else []
    return " ".join(["Usage: hsa", name, *required, *options, *positional])


def _print_examples(console: Console, examples: Mapping[str, str]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(no_wrap=True)  # to be copied
    table.add_column()
    for line, purpose in examples.items():
        table.add_row("", Text(line), Text(f"# {purpose}"))
    console.print(Text("\nExamples:" if len(examples) > 1 else "\nExample:"))
    console.print(table)
    console.print()


def _by_topic(arguments: Iterable[Argument], topics: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
    groups = {option_name(argument): _group(argument) for argument in arguments}
    members = {title: [n for n in topics.get(title, ()) if n in groups] for title in (ARGUMENTS, *topics)}
    listed = {name for names in members.values() for name in names}
    own = OWN if topics else "Options"
    for name, group in groups.items():
        if name not in listed:
            members.setdefault(own if group == "Parameters" else group, []).append(name)
    return {title: names for title, names in members.items() if names}


def _group(argument: Argument) -> str:
    groups = argument.parameter.group
    assert isinstance(groups, tuple)
    return str(groups[0].name)


def _entry(argument: Argument, defaults: Mapping[str, Any], *, brief: bool) -> HelpEntry:
    from cyclopts import ArgumentCollection, Group
    from cyclopts.help import HelpEntry, InlineText, create_parameter_help_panel

    (entry,) = create_parameter_help_panel(Group(), ArgumentCollection([argument]), "plaintext").entries
    name, options, choices = option_name(argument), entry.positive_names, entry.choices
    text = " ".join((argument.parameter.help or "").split()).replace("`", "")
    if brief:
        text = text.partition(". ")[0].rstrip(".") + "."
    if choices and all(re.search(rf"(?<![\w.]){choice}\b", text) for choice in choices):
        choices = None  # the text explains them
    # Where the default is False, --no-NAME is needed only to override a recipe: it is not shown.
    if argument.field_info.default is True:
        options = tuple(rf"--\[no-]{option[2:]}" for option in options)
    return HelpEntry(
        positive_names=options,
        metavar=entry.metavar,
        positional_label=entry.positional_label,
        description=InlineText.from_format(text, "plaintext"),
        required=entry.required,
        type=entry.type,
        choices=choices,
        default=show_default(defaults[name]) if name in defaults else entry.default,
    )


def _print_panel(console: Console, title: str, entries: list[HelpEntry]) -> None:
    from cyclopts.help import DefaultFormatter, HelpPanel

    DefaultFormatter()(console, console.options, HelpPanel(format="parameter", title=title, entries=entries))
