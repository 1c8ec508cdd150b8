"""Registries of models and parts by name. Packages beside the core add their own, without the core importing them.

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
    """Import the object named by `"module:attribute"`.

    >>> resolve("math:tau") > 6
    True
    """
    module, _, attribute = where.partition(":")
    return getattr(import_module(module), attribute)


class Registry(Generic[T]):
    """Values by name, with plug-ins.

    The core registers its values where it defines the registry. Plug-in packages register theirs when they are imported;
    the registry imports them the first time that it needs a name it does not have.

    Args:
        what: Kind of thing that is registered; errors start with it.
        plugins: Packages that register further names when they are imported.

    >>> shapes = Registry[type]("shape", plugins=())
    >>> shapes.register("text", str)
    >>> shapes.register("exact", "fractions:Fraction")  # imported by the first `get`
    >>> shapes.get("exact"), shapes.names()
    (<class 'fractions.Fraction'>, ('text', 'exact'))
    >>> shapes.get("exactly")
    Traceback (most recent call last):
    hsa.errors.InvalidInput: shape: expected one of text, exact, got 'exactly'. Did you mean 'exact'?
    """

    def __init__(self, what: str, plugins: tuple[str, ...] = ("hsa.baselines", "hsa.research")):
        self.what = what
        self._plugins = plugins
        self._plugged_in = False
        self._values: dict[str, T | str] = {}
        self._ranks: dict[str, int] = {}

    def register(self, name: str, value: T | str) -> None:
        """Add a value, or the `"module:attribute"` to import it from on the first `get`, under a new name."""
        if self._values.get(name, value) != value:
            raise InvalidInput(self.what, got=f"a second {name!r}", expected="a name that is not registered yet")
        self._values[name] = value
        caller = sys._getframe(1).f_globals.get("__name__", "")
        self._ranks[name] = next((i for i, package in enumerate(self._plugins, 1) if caller.startswith(package)), 0)

    def remove(self, name: str) -> None:
        """Remove a name."""
        self.check(name)
        del self._values[name], self._ranks[name]

    def check(self, name: str) -> None:
        """Raise an error that lists all names if `name` is not registered. Import no value."""
        if name not in self:
            close = get_close_matches(str(name), self.names(), n=1)
            raise InvalidInput(
                self.what,
                got=repr(name),
                expected=f"one of {', '.join(self.names())}",
                fix=f"Did you mean {close[0]!r}?" if close else None,
            )

    def get(self, name: str) -> T:
        """Return the value registered under a name."""
        self.check(name)
        value = self._values[name]
        if isinstance(value, str):
            value = self._values[name] = cast(T, resolve(value))
        return value

    def names(self) -> tuple[str, ...]:
        """Return all names: the core's, then those of each plug-in package in the order of `plugins`."""
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
"""Maps from the outputs of a layer's heads to its one output; see `hsa.nn.head_fusion`."""
FUSIONS.register("concatenation", "hsa.nn.head_fusion:Concatenation")

KINDS: Registry[AttentionKind] = Registry("kind")
"""Kinds of attention that a layer may use; see `hsa.nn.attention_kinds`."""
for _name in ("hierarchical", "multiscale", "clustered", "bottom-up", "flat"):
    KINDS.register(_name, f"hsa.nn.attention_kinds:{_name.upper().replace('-', '_')}")
