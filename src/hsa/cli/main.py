"""The program `hsa`. Each command is a function in a file of its own, which also holds its help page.

These files import torch, and modules that import it, inside functions: help and version must not wait for it.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hsa.cli.help import FULL, SHORT, HelpPage, print_help, show_default
from hsa.cli.threads import limit_spinning
from hsa.errors import HsaError, HsaWarning

if TYPE_CHECKING:
    from cyclopts import App

COMMANDS = (
    *("train", "compare", "evaluate", "predict", "generate"),
    *("convert", "finetune", "reproduce"),
    *("heads", "inspect", "info"),
)
"""Names of the commands, in the order of the help. The function NAME is in the module `hsa.cli.NAME`."""

_show_others = warnings.showwarning
_PROBLEM = 2  # exit code of everything the user can put right


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: with 0 after success, with 2 and one line on stderr after an error of the user."""
    limit_spinning()
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    command = tokens[0] if tokens and tokens[0] in COMMANDS else None
    try:
        from cyclopts import CycloptsError

        from hsa.cli.inspect import STDIN
        from hsa.cli.runs import NAMED
        from hsa.cli.usage_errors import explain

        app = build_app(COMMANDS if command is None else (command,))
    except ModuleNotFoundError as error:
        _complain(f"the command line needs the package {error.name!r}; install it with: pip install 'hsa[all]'")
        sys.exit(_PROBLEM)
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    try:
        NAMED.set(named_options(tokens))
        flags = {*SHORT, FULL} & set(tokens)
        if flags and command is not None:
            print_help(app, help_page(command), tokens, full=FULL in flags)
        else:
            # cyclopts would parse a lone hyphen, which stands for stdin, as an option.
            replaced = {"-": STDIN, FULL: SHORT[0]}
            app([replaced.get(token, token) for token in tokens], exit_on_error=False, print_error=False)
        sys.stdout.flush()  # so that a closed pipe raises here, not after the last line of Python
    except CycloptsError as error:
        _complain(explain(error, None if command is None else help_page(command), COMMANDS))
        sys.exit(_PROBLEM)
    except HsaError as error:
        _complain(str(error))
        sys.exit(_PROBLEM)
    except ModuleNotFoundError as error:
        _complain(f"this command needs the package {error.name!r}; install it with: pip install 'hsa[all]'")
        sys.exit(_PROBLEM)
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has read enough
        _drop_output()
    except SystemExit as stop:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            _drop_output()
        if not isinstance(stop.__context__, BrokenPipeError):  # rich exits with 1 on a closed pipe
            raise
    sys.exit(0)


def _drop_output() -> None:
    """Send the rest of the output nowhere: Python flushes its buffer at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def named_options(tokens: Sequence[str]) -> frozenset[str]:
    """Return the names of the options among the words of a command line, as Python keywords.

    >>> sorted(named_options(["train", "--max-tokens=64", "--no-include-self", "--cpu"]))
    ['cpu', 'include_self', 'max_tokens']
    """
    options = (token[2:].partition("=")[0] for token in tokens if token.startswith("--"))
    return frozenset(option.removeprefix("no-").replace("-", "_") for option in options)


def build_app(commands: Iterable[str] = COMMANDS) -> App:
    """Return the application with some commands: one is enough to run it, and loads faster than all."""
    from cyclopts import App, Parameter

    app = App(
        name="hsa",
        help="Attention over trees: train and compare models of structured data, convert pre-trained transformers.\n\n"
        "Start with `hsa train --quick`, which needs no data: it trains a model with hierarchical attention and "
        "compares it with flat attention and with no attention. `hsa COMMAND --help` shows the options of a command.",
        version=_version,
        help_flags=SHORT,
        default_parameter=Parameter(
            negative_iterable="", negative_none="", consume_multiple=1, show_default=show_default
        ),
    )
    for number, name in enumerate(commands):
        app.command(getattr(import_module(f"hsa.cli.{name}"), name), sort_key=number)
    return app


def help_page(command: str) -> HelpPage:
    """Return the help page of a command, the constant `HELP` of its module."""
    page: HelpPage = import_module(f"hsa.cli.{command}").HELP
    return page


def _version() -> str:
    from importlib.metadata import version

    return version("hsa")


def _show_warning(message: Warning | str, category: type[Warning], *details: Any) -> None:
    """Show a warning of this library as one line; others as Python does."""
    if issubclass(category, HsaWarning):
        print(message, file=sys.stderr)
    else:
        _show_others(message, category, *details)


def _complain(message: str) -> None:
    red, plain = ("\x1b[31m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    print(f"{red}{' '.join(message.splitlines())}{plain}", file=sys.stderr)


if __name__ == "__main__":
    run()
