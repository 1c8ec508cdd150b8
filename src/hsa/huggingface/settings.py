"""How a layer of a pre-trained model attends after conversion, and how that is kept in the model's config."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from hsa.attention.checks import check_count
from hsa.errors import InvalidInput, inside

VERSION = 1
"""Of what is written into a config. A reader refuses newer ones."""
OPERATORS = ("multiscale", "hierarchical")
HIERARCHIES = ("keys", "windows", "sentences")
GIVEN = "given"
"""In a config: the hierarchies came from a function, which no config can hold."""
CHUNK = 256
"""Tokens per chunk in which causal layers find trees, or the next number that their branching allows."""


@dataclass(frozen=True)
class LayerSettings:
    """One converted layer; see `convert` for what each means."""

    operator: str = "multiscale"
    hierarchy: str | Callable[..., Any] = "keys"
    branching: tuple[int, ...] = (8, 2)
    near: int = 0
    top_k: int = 8
    beam: int | str | None = None
    pooled_bias: float | tuple[float, ...] = 0.0
    sinks: str | int | None = 1
    share: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        _one_of("operator", self.operator, OPERATORS)
        if not callable(self.hierarchy):
            _one_of("hierarchy", self.hierarchy, (*HIERARCHIES, GIVEN))
        set_field(self, "branching", _factors(self.branching))
        for name in ("near", "top_k"):
            set_field(self, name, check_count(name, getattr(self, name), "0 or a positive number of leaf families"))
        for name in ("share", "chunk"):
            if getattr(self, name) is not None:
                set_field(self, name, check_count(name, getattr(self, name), "a positive number of tokens, or None", 1))
        if self.beam is not None and self.beam != "exact":
            set_field(self, "beam", check_count("beam", self.beam, "'exact', None, or a width of at least top_k", 1))
        set_field(self, "pooled_bias", _biases(self.pooled_bias))
        if self.sinks is not None and self.sinks != "special":
            set_field(self, "sinks", check_count("sinks", self.sinks, "'special', a number of first tokens, or None"))
        self._check_combination()

    def _check_combination(self) -> None:
        if self.operator == "hierarchical":
            chosen = {"near": self.near, "pooled_bias": self.pooled_bias, "share": self.share, "beam": self.beam}
            for name, value in chosen.items():
                if value:
                    raise InvalidInput(name, given=repr(value), expected="nothing, with operator='hierarchical'")
            if self.hierarchy == "keys":
                raise InvalidInput(
                    "hierarchy",
                    given="'keys' with operator='hierarchical'",
                    expected="'windows' or 'sentences'",
                    fix="its queries and keys share one tree; trees found from keys need operator='multiscale'",
                )
        if self.hierarchy == "keys" and self.near:
            raise InvalidInput("near", given=self.near, expected="0 with hierarchy='keys'", fix="open more with top_k")
        if self.chunk is not None and self.hierarchy != "keys":
            raise InvalidInput("chunk", given=self.chunk, expected="None without hierarchy='keys'")
        if self.chunk is not None and self.chunk != (whole := leaves_of_a_node(self.branching, self.chunk)):
            raise InvalidInput(
                "chunk",
                given=f"{self.chunk} with branching {self.branching}",
                expected="the leaves of a whole node: a product of the first factors of branching, the last repeated",
                fix=f"for example chunk={whole}",
            )

    @property
    def chunk_size(self) -> int:
        """For causal use."""
        return self.chunk or leaves_of_a_node(self.branching, CHUNK)

    @property
    def needs_ids(self) -> bool:
        return self.sinks == "special" or self.hierarchy == "sentences" or callable(self.hierarchy)

    def check_direction(self, layer: int, *, may_look_ahead: bool) -> None:
        """Causal layers take only what lets nothing later through."""
        if may_look_ahead:
            return
        if self.operator == "hierarchical":
            raise InvalidInput(
                "operator",
                given=f"'hierarchical' in layer {layer}, which is causal",
                expected="'multiscale'",
                fix="its rows are tied, so earlier tokens would see later ones",
            )
        if self.hierarchy == "sentences":
            raise InvalidInput(
                "hierarchy",
                given=f"'sentences' in layer {layer}, which is causal",
                expected="'keys' or 'windows'",
                fix="where a sentence ends depends on what follows, so earlier tokens would see later ones",
            )

    def to_json(self) -> dict[str, Any]:
        """For a config, which holds no functions and no infinities."""
        values = asdict(replace(self, hierarchy=GIVEN) if callable(self.hierarchy) else self)
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


_NEWER = "it may have been written by a newer hsa: pip install -U hsa"


@dataclass(frozen=True)
class Settings:
    """What a config says: the converted layers by number, and the ids that count as special."""

    layers: Mapping[int, LayerSettings]
    special_ids: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        layers = {str(number): layer.to_json() for number, layer in sorted(self.layers.items())}
        return {"version": VERSION, "special_ids": list(self.special_ids), "layers": layers}

    @classmethod
    def of(cls, config: Any) -> Settings | None:
        """What the config of a model says; None: nothing.

        Raises:
            InvalidInput: written by a newer version, or by hand and wrong.
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
                expected=f"at most {VERSION}, which this hsa writes",
                fix="pip install -U hsa",
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
        """They are numbers of a model with so many layers."""
        for number in self.layers:
            if count is not None and not number < count:
                raise InvalidInput(
                    "config.hsa['layers']", given=number, expected=f"0 to {count - 1}, as the model has layers"
                )


def leaves_of_a_node(branching: Sequence[int], least: int) -> int:
    """The leaves of the smallest nodes that have at least so many; the last factor repeats.

    >>> leaves_of_a_node((8, 2), 256), leaves_of_a_node((8, 3), 100)
    (256, 216)
    """
    leaves, factors = branching[0], list(branching[1:]) or [branching[0]]
    while leaves < least:
        leaves *= factors.pop(0) if len(factors) > 1 else factors[0]
    return leaves


def _one_of(name: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        expected = ", ".join(map(repr, (a for a in allowed if a != GIVEN)))
        extra = " or a function" if name == "hierarchy" else ""
        raise InvalidInput(name, given=repr(value), expected=f"one of {expected}{extra}")


def _factors(branching: Any) -> tuple[int, ...]:
    if not isinstance(branching, Sequence) or isinstance(branching, str) or not branching:
        raise InvalidInput("branching", given=repr(branching), expected="factors from the leaves up, such as (8, 2)")
    return tuple(check_count(f"branching[{i}]", b, "2 or more", 2) for i, b in enumerate(branching))


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
