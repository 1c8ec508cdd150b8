"""Settings of converted layers: their defaults, their checks, and how a model's config stores them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias, get_args

from hsa.errors import InvalidInput, inside

Kind: TypeAlias = Literal["clustered", "multiscale", "hierarchical"]
Tree: TypeAlias = Literal["windows", "sentences"]
VERSION = 2
"""Version of the format of `config.hsa`; others are refused."""
FUNCTION = "function"
"""Value of `tree` in a config whose trees came from a function, which no config can hold."""
CHUNK = 256
"""Tokens per chunk in which causal layers cluster keys, or the next number that their branching allows."""


@dataclass(frozen=True)
class LayerSettings:
    """Settings of one converted layer, with the defaults of `convert`, which explains each."""

    kind: Kind = "clustered"
    tree: str | Callable[..., Any] | None = None  # "windows", unless keys are clustered
    branching: tuple[int, ...] = (8, 2)
    near: int = 0
    top_k: int = 8
    beam: int | str | None = None
    pooled_bias: float | tuple[float, ...] = 0.0
    sinks: int | str | None = 1
    tile: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        _check_word("kind", self.kind, get_args(Kind))
        if self.tree is None and self.kind != "clustered":
            set_field(self, "tree", "windows")
        if self.tree is not None and not callable(self.tree) and self.tree != FUNCTION:
            _check_word("tree", self.tree, get_args(Tree), " or a function")
        set_field(self, "branching", _factors(self.branching))
        for name in ("near", "top_k"):
            set_field(self, name, _check_count(name, getattr(self, name), "0 or a positive number of leaf families"))
        for name in ("tile", "chunk"):
            if getattr(self, name) is not None:
                set_field(
                    self, name, _check_count(name, getattr(self, name), "a positive number of tokens, or None", 1)
                )
        if self.beam is not None and self.beam != "exact":
            set_field(self, "beam", _check_count("beam", self.beam, "'exact', None, or a width of at least top_k", 1))
        set_field(self, "pooled_bias", _biases(self.pooled_bias))
        if self.sinks is not None and self.sinks != "special":
            set_field(self, "sinks", _check_count("sinks", self.sinks, "'special', a number of first tokens, or None"))
        self._check_combination()

    def _check_combination(self) -> None:
        if self.kind == "hierarchical":
            unused = {"near": self.near, "pooled_bias": self.pooled_bias, "tile": self.tile, "beam": self.beam}
            for name, value in unused.items():
                if value:
                    raise InvalidInput(name, given=repr(value), expected="nothing, with kind='hierarchical'")
        if self.kind == "clustered":
            if self.tree is not None:
                raise InvalidInput(
                    "tree",
                    given=f"{self.tree!r} with kind='clustered'",
                    expected="None: the trees are made from the keys",
                    fix="pass kind='multiscale' or kind='hierarchical' as well",
                )
            if self.near:
                raise InvalidInput(
                    "near", given=self.near, expected="0 with kind='clustered'", fix="select more groups with top_k"
                )
        if self.chunk is None:
            return
        if self.kind != "clustered":
            raise InvalidInput("chunk", given=self.chunk, expected="None, unless kind='clustered'")
        if self.chunk != (whole := leaves_of_a_node(self.branching, self.chunk)):
            raise InvalidInput(
                "chunk",
                given=f"{self.chunk} with branching {self.branching}",
                expected="the leaves of a whole node: a product of the first factors of branching, the last repeated",
                fix=f"for example chunk={whole}",
            )

    @property
    def chunk_size(self) -> int:
        """Tokens that are clustered together in causal layers."""
        return self.chunk or leaves_of_a_node(self.branching, CHUNK)

    def tile_size(self, causal: bool) -> int | None:
        """Queries that share a selection; None: those of a leaf family. Tokens generated one by one can share nothing."""
        shared = None if causal else self.tile
        alone = self.kind == "clustered" or (causal and self.top_k > 0)
        return 1 if shared is None and alone else shared

    @property
    def repeats_last(self) -> bool:
        """Whether the last factor of `branching` repeats up to the root; the paper's trees join what is left under it."""
        return self.kind != "hierarchical"

    @property
    def needs_ids(self) -> bool:
        """Whether trees or sinks depend on token ids."""
        return self.sinks == "special" or self.tree == "sentences" or callable(self.tree)

    def check_causal(self, layer: int) -> None:
        """Refuse settings that would let a causal layer see later tokens."""
        if self.kind == "hierarchical":
            name, instead = "kind", "'clustered' or 'multiscale'"
            why = "its rows are tied, so earlier tokens would see later ones"
        elif self.tree == "sentences":
            name, instead = "tree", "'windows', or kind='clustered'"
            why = "where a sentence ends depends on what follows, so earlier tokens would see later ones"
        else:
            return
        given = f"{getattr(self, name)!r} in layer {layer}, which is causal"
        raise InvalidInput(name, given=given, expected=instead, fix=why)

    def to_json(self) -> dict[str, Any]:
        """Convert to values that a config can hold: no functions, no infinities."""
        values = asdict(replace(self, tree=FUNCTION) if callable(self.tree) else self)
        bias = values["pooled_bias"]
        written = [_number_to_json(b) for b in bias] if isinstance(bias, tuple) else _number_to_json(bias)
        return {**values, "branching": list(self.branching), "pooled_bias": written}

    @classmethod
    def from_json(cls, where: str, values: Any) -> LayerSettings:
        known = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or not set(values) <= known:
            unknown = sorted(set(values) - known) if isinstance(values, Mapping) else type(values).__name__
            raise InvalidInput(where, given=unknown, expected=f"some of {sorted(known)}", fix=_NEWER)
        values = dict(values)
        if "pooled_bias" in values:
            values["pooled_bias"] = _bias_from_json(f"{where}.pooled_bias", values["pooled_bias"])
        with inside(where):
            return cls(**values)


class _Default:
    """Default value of an argument that was not given. Prints as the default that applies."""

    def __init__(self, value: Any):
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


DEFAULT: Any = SimpleNamespace(**{field.name: _Default(field.default) for field in fields(LayerSettings)})
"""Defaults for the signature of a function that must know which settings it was given."""


def select_given(**settings: Any) -> dict[str, Any]:
    """Drop the settings that were left at `DEFAULT`.

    >>> select_given(top_k=DEFAULT.top_k, near=1), DEFAULT.top_k
    ({'near': 1}, 8)
    """
    return {name: value for name, value in settings.items() if not isinstance(value, _Default)}


_NEWER = "it may have been written by a newer hsa: pip install -U hsa"


@dataclass(frozen=True)
class ModelSettings:
    """Contents of `config.hsa`: the converted layers by number, and the ids of special tokens."""

    layers: Mapping[int, LayerSettings]
    special_ids: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        layers = {str(number): layer.to_json() for number, layer in sorted(self.layers.items())}
        return {"version": VERSION, "special_ids": list(self.special_ids), "layers": layers}

    @classmethod
    def of(cls, config: Any) -> ModelSettings | None:
        """Read the config of a model. None if it was never converted.

        Raises:
            InvalidInput: written by another version, or by hand and wrong.
        """
        written = getattr(config, "hsa", None)
        if written is None:
            return None
        where = "config.hsa"
        if not isinstance(written, Mapping) or type(written.get("version")) is not int:
            raise InvalidInput(where, given=_short(written), expected="what hsa.huggingface.convert writes")
        if written["version"] > VERSION:
            raise InvalidInput(
                f"{where}['version']",
                given=written["version"],
                expected=f"{VERSION}, the version that this hsa writes",
                fix="pip install -U hsa",
            )
        if written["version"] < VERSION:
            raise InvalidInput(
                f"{where}['version']",
                given=f"{written['version']}: this model was converted by hsa 0.1",
                expected=f"{VERSION}",
                fix="convert the model again; hsa.huggingface.revert(model) removes the old conversion",
            )
        layers, special = written.get("layers", {}), written.get("special_ids", [])
        if not isinstance(layers, Mapping) or not all(str(n).isdecimal() for n in layers):
            raise InvalidInput(
                f"{where}['layers']", given=_short(layers), expected="settings by layer number", fix=_NEWER
            )
        if not isinstance(special, Sequence) or not all(type(i) is int for i in special):
            raise InvalidInput(f"{where}['special_ids']", given=_short(special), expected="token ids", fix=_NEWER)
        return cls(
            {int(n): LayerSettings.from_json(f"{where}['layers'][{n!r}]", layer) for n, layer in layers.items()},
            tuple(special),
        )

    def check_numbers(self, count: int | None) -> None:
        """Check that a model of `count` layers has all of these."""
        for number in self.layers:
            if count is not None and not number < count:
                raise InvalidInput(
                    "config.hsa['layers']", given=number, expected=f"0 to {count - 1}, as the model has layers"
                )


def leaves_of_a_node(branching: Sequence[int], least: int) -> int:
    """Return the number of leaves of the smallest nodes that have at least `least`; the last factor repeats.

    >>> leaves_of_a_node((8, 2), 256), leaves_of_a_node((8, 3), 100)
    (256, 216)
    """
    leaves, factors = branching[0], list(branching[1:]) or [branching[0]]
    while leaves < least:
        leaves *= factors.pop(0) if len(factors) > 1 else factors[0]
    return leaves


def _check_count(name: str, value: Any, expected: str, minimum: int = 0) -> int:
    from hsa.attention.checks import check_count  # loads torch, which the help of the command line does without

    return check_count(name, value, expected, minimum)


def _check_word(name: str, value: Any, allowed: Sequence[str], more: str = "") -> None:
    if value not in allowed:
        raise InvalidInput(name, given=repr(value), expected=f"one of {', '.join(map(repr, allowed))}{more}")


def _factors(branching: Any) -> tuple[int, ...]:
    if not isinstance(branching, Sequence) or isinstance(branching, str) or not branching:
        raise InvalidInput("branching", given=repr(branching), expected="factors from the leaves up, such as (8, 2)")
    return tuple(_check_count(f"branching[{i}]", b, "2 or more", 2) for i, b in enumerate(branching))


def _biases(bias: Any) -> float | tuple[float, ...]:
    numbers = bias.tolist() if hasattr(bias, "tolist") else bias
    several = isinstance(numbers, Sequence) and not isinstance(numbers, str)
    for number in numbers if several else [numbers]:
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not number < math.inf:
            raise InvalidInput("pooled_bias", given=repr(number), expected="a number below +∞, or one per head")
    return tuple(map(float, numbers)) if several else float(numbers)


def _bias_from_json(where: str, written: Any) -> Any:
    try:
        return tuple(map(float, written)) if isinstance(written, list) else float(written)
    except (TypeError, ValueError):
        raise InvalidInput(where, given=_short(written), expected="a number, or one per head") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _number_to_json(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)
