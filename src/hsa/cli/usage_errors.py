"""Errors in the words of the command line, such as an unknown option, in one line each."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING

from hsa.cli.help import FULL, SHORT, HelpPage, option_name

if TYPE_CHECKING:
    from cyclopts import CycloptsError, UnknownOptionError

_CLOSE = 0.7
"""Similarity from which a name is suggested."""


def explain(error: CycloptsError, page: HelpPage | None, commands: Iterable[str]) -> str:
    """Return one line that states the error and points to the help that lists what is allowed.

    Args:
        page: Help page of the command; None if the command is unknown.
        commands: Names of all commands.
    """
    from cyclopts import MissingArgumentError, UnknownOptionError, UnusedCliTokensError

    if page is None or not error.command_chain:
        word = (getattr(error, "unused_tokens", None) or [""])[0]
        return f"unknown command {word!r}{_suggest(word, commands)} hsa {SHORT[0]} lists the commands"
    name = error.command_chain[0]
    if isinstance(error, UnknownOptionError):
        return _unknown_option(error, name, page)
    usage = f"hsa {name} {SHORT[0]} shows the usage"
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        return f"{error.argument.names[0]}: no value given; {usage}"
    if isinstance(error, UnusedCliTokensError):
        return f"unexpected argument {(error.unused_tokens or [''])[0]!r}; {usage}"
    return f"{error} {usage}"


def _unknown_option(error: UnknownOptionError, name: str, page: HelpPage) -> str:
    option = error.token.keyword or error.token.value
    options = {argument.names[0]: option_name(argument) for argument in error.argument_collection if argument.show}
    close = get_close_matches(option, [o for o in options if o.startswith("--")], n=1, cutoff=_CLOSE)
    in_short_help = not page.common or (close and options[close[0]] in page.common)
    flag = SHORT[0] if in_short_help else FULL
    return f"unknown option {option}{_suggest(option, close)} hsa {name} {flag} lists the options"


def _suggest(word: str, names: Iterable[str]) -> str:
    close = get_close_matches(word, list(names), n=1, cutoff=_CLOSE)
    return f"; did you mean {close[0]}?" if close else ";"
