"""The command `hsa`: every command is a function in a file of its own; its signature and docstring are its help.

These files import torch, and all that imports it, inside functions, so that help and version do without it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hsa.errors import HsaError

if TYPE_CHECKING:
    from cyclopts import App

_PROBLEM = 2  # exit code of everything the user can put right


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 when all went well, 2 with one line on stderr when not."""
    try:
        from cyclopts import CycloptsError

        from hsa.cli.inspect import STDIN
        from hsa.cli.runs import NAMED

        app = build_app()
    except ModuleNotFoundError as error:
        _complain(f"the command line needs the package {error.name!r}; install it with: pip install 'hsa[all]'")
        sys.exit(_PROBLEM)
    try:
        # cyclopts takes a lone hyphen, which people write for stdin, for an option.
        tokens = [STDIN if token == "-" else token for token in (sys.argv[1:] if arguments is None else arguments)]
        NAMED.set(frozenset(t[2:].partition("=")[0].replace("-", "_") for t in tokens if t.startswith("--")))
        app(tokens, exit_on_error=False)
        sys.stdout.flush()  # a closed pipe shows here, not after the last line of Python
    except CycloptsError:  # cyclopts has said what is wrong
        sys.exit(_PROBLEM)
    except HsaError as error:
        _complain(str(error))
        sys.exit(_PROBLEM)
    except ModuleNotFoundError as error:
        _complain(f"this command needs the package {error.name!r}; install it with: pip install 'hsa[all]'")
        sys.exit(_PROBLEM)
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed
    except SystemExit as stop:
        if not isinstance(stop.__context__, BrokenPipeError):  # rich exits with 1 on a closed pipe
            raise
    sys.exit(0)


def build_app() -> App:
    """All commands."""
    from cyclopts import App, Parameter

    from hsa.cli.compare import TASKS as COMPARED_TASKS
    from hsa.cli.compare import compare
    from hsa.cli.convert import convert
    from hsa.cli.defaults import defaults_by_task
    from hsa.cli.evaluate import evaluate
    from hsa.cli.finetune import finetune
    from hsa.cli.generate import generate
    from hsa.cli.heads import heads
    from hsa.cli.info import info
    from hsa.cli.inspect import inspect
    from hsa.cli.predict import predict
    from hsa.cli.reproduce import reproduce
    from hsa.cli.train import train

    app = App(
        name="hsa",
        help="Hierarchical self-attention: attention on the tree that your data already has.\n\n"
        "Start with `hsa train`, which needs no data of yours: it compares hierarchical attention with flat and with none.\n"
        "`hsa compare` puts more models beside them at an equal budget: what is worth its cost?\n"
        "`hsa train --task lm` and `hsa generate` train a language model and write with it.\n"
        "`hsa convert` puts it into a pre-trained model and says what that keeps and saves.\n"
        "`hsa heads` shows how alike the heads of a model are, and which can be removed.\n"
        "`hsa inspect` shows the tree of a text and what attention on it costs.",
        version=_version,
        default_parameter=Parameter(negative=(), consume_multiple=True),
    )
    app.command(train, help_epilogue=defaults_by_task())
    app.command(compare, help_epilogue=defaults_by_task(COMPARED_TASKS, models=False))
    app.command(evaluate)
    app.command(predict)
    app.command(generate)
    app.command(convert)
    app.command(finetune)
    app.command(reproduce)
    app.command(heads)
    app.command(inspect)
    app.command(info)
    return app


def _version() -> str:
    from importlib.metadata import version

    return version("hsa")


def _complain(message: str) -> None:
    red, plain = ("\x1b[31m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    print(f"{red}{' '.join(message.splitlines())}{plain}", file=sys.stderr)


if __name__ == "__main__":
    run()
