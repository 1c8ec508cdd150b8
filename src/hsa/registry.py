"""Registries: how models and parts that live beside the core are found by name, without the core importing them.

This module imports neither torch nor the plug-ins, so that options and help can list names cheaply.
"""

from __future__ import annotations

import sys
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from hsa.errors import InvalidInput

if TYPE_CHECKING:
    from hsa.nn.attention_kinds import AttentionKind
    from hsa.nn.head_fusion import HeadFusion

T = TypeVar("T")


def resolve(where: str) -> Any:
    """Import what `"module:attribute"` names.

    >>> resolve("math:tau") > 6
    True
    """
    module, _, attribute = where.partition(":")
    return getattr(import_module(module), attribute)


class Registry(Generic[T]):
    """Named plug-ins: `register(name, value)`, `get(name)` with a "did you mean" error, `names()`, `remove(name)`.

    The core registers its own values where it defines the registry. Packages beside the core register theirs when they are
    imported, which a registry does itself, the first time that it needs a name it does not have.

    Args:
        what: Kind of thing the names stand for; errors start with it.
        plugins: Packages that register further names when they are imported.

    >>> shapes = Registry[type]("shape", plugins=())
    >>> shapes.register("text", str)
    >>> shapes.register("exact", "fractions:Fraction")  # imported when it is first asked for
    >>> shapes.get("exact"), shapes.names()
    (<class 'fractions.Fraction'>, ('text', 'exact'))
    >>> shapes.get("exactly")
    Traceback (most recent call last):
    hsa.errors.InvalidInput: shape: given 'exactly', expected one of text, exact; did you mean 'exact'?
    """

    def __init__(self, what: str, plugins: tuple[str, ...] = ("hsa.baselines", "hsa.research")):
        self.what = what
        self._plugins = plugins
        self._plugged_in = False
        self._values: dict[str, T | str] = {}
        self._ranks: dict[str, int] = {}

    def register(self, name: str, value: T | str) -> None:
        """Add a value under a new name: the value itself, or `"module:attribute"`, imported by the first `get`."""
        if self._values.get(name, value) != value:
            raise InvalidInput(self.what, given=f"a second {name!r}", expected="a name that is not registered yet")
        self._values[name] = value
        caller = sys._getframe(1).f_globals.get("__name__", "")
        self._ranks[name] = next((i for i, package in enumerate(self._plugins, 1) if caller.startswith(package)), 0)

    def remove(self, name: str) -> None:
        """Forget a name, such as one that a test registered."""
        self.check(name)
        del self._values[name], self._ranks[name]

    def check(self, name: str) -> None:
        """Raise an error that lists the names unless this is one of them; imports no value."""
        if name not in self:
            close = get_close_matches(str(name), self.names(), n=1)
            raise InvalidInput(
                self.what,
                given=repr(name),
                expected=f"one of {', '.join(self.names())}",
                fix=f"did you mean {close[0]!r}?" if close else None,
            )

    def get(self, name: str) -> T:
        """Return the value of a name."""
        self.check(name)
        value = self._values[name]
        if isinstance(value, str):
            value = self._values[name] = cast(T, resolve(value))
        return value

    def names(self) -> tuple[str, ...]:
        """List all names: the core's, then those of each plug-in package, whichever was imported first."""
        self._plug_in()
        return tuple(sorted(self._values, key=self._ranks.__getitem__))

    def __contains__(self, name: object) -> bool:
        if name not in self._values:
            self._plug_in()
        return name in self._values

    def _plug_in(self) -> None:
        if not self._plugged_in:
            for package in self._plugins:
                import_module(package)
            self._plugged_in = True


FUSIONS: Registry[type[HeadFusion]] = Registry("fusion")
"""How the heads of a layer become one; see `hsa.nn.head_fusion`."""
FUSIONS.register("concatenation", "hsa.nn.head_fusion:Concatenation")

KINDS: Registry[AttentionKind] = Registry("kind")
"""Kinds of attention of the layers of an encoder; see `hsa.nn.attention_kinds`."""
for _name in ("hierarchical", "multiscale", "clustered", "bottom-up", "flat"):
    KINDS.register(_name, f"hsa.nn.attention_kinds:{_name.upper().replace('-', '_')}")
