"""Settings of converted layers: their defaults, their checks, and their form in a model's config."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias, get_args

from hsa.errors import InvalidInput, inside

Kind: TypeAlias = Literal["clustered", "multiscale", "hierarchical"]
Tree: TypeAlias = Literal["windows", "sentences"]
VERSION = 3
"""Version of the format of `config.hsa`. Other versions are refused."""
EXACT_UNTIL = 2048
"""Default of `exact_until`: about the length up to which exact attention is faster."""
FUNCTION = "function"
"""Value of `tree` in the config of a model whose trees come from a function, which a config cannot hold."""


@dataclass(frozen=True)
class LayerSettings:
    """Settings of one converted layer. Fields and defaults are those of `convert`, which describes each.

    Defaults of `branching`, `top_k`, `tile` and `exact_until` depend on the layer; `resolved` fills them in.

    >>> LayerSettings(top_k=4).kind
    'clustered'
    """

    kind: Kind = "clustered"
    tree: str | Callable[..., Any] | None = None  # None means "windows", unless kind is "clustered"
    branching: tuple[int, ...] | None = None
    near: int = 0
    threshold: float | tuple[float, ...] | None = None  # a tuple has one number per query head
    top_k: int | None = None
    pooled_bias: float | tuple[float, ...] = 0.0
    sinks: int | str | None = 1
    tile: int | None = None
    exact_until: int | None = None

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        _check_word("kind", self.kind, get_args(Kind))
        if self.tree is None and self.kind != "clustered":
            set_field(self, "tree", "windows")
        if self.tree is not None and not callable(self.tree) and self.tree != FUNCTION:
            _check_word("tree", self.tree, get_args(Tree), " or a function")
        if self.branching is not None:
            set_field(self, "branching", _factors(self.branching))
        set_field(self, "near", _check_count("near", self.near, "0 or a positive number of leaf families"))
        if self.threshold is not None:
            set_field(self, "threshold", _check_threshold(self.threshold))
        for name, expected, minimum in (
            ("top_k", "a number of groups, 0 or more, or None", 0),
            ("tile", "a positive number of tokens, or None", 1),
            ("exact_until", "a number of tokens, 0 or more, or None", 0),
        ):
            if getattr(self, name) is not None:
                set_field(self, name, _check_count(name, getattr(self, name), expected, minimum))
        set_field(self, "pooled_bias", _biases(self.pooled_bias))
        if self.sinks is not None and self.sinks != "special":
            set_field(self, "sinks", _check_count("sinks", self.sinks, "'special', a number of first tokens, or None"))
        self._check_combination()

    def _check_combination(self) -> None:
        if self.threshold is not None and self.top_k is not None:
            raise InvalidInput("top_k", expected="None with a threshold", got=self.top_k, fix="Pass one of the two")
        if self.kind == "hierarchical":
            for name in ("near", "threshold", "pooled_bias", "tile"):
                value, default = getattr(self, name), getattr(LayerSettings, name)
                if value:
                    raise InvalidInput(
                        name, expected=f"{default!r}, the default, with kind='hierarchical'", got=repr(value)
                    )
        if self.kind == "clustered":
            if self.tree is not None:
                raise InvalidInput(
                    "tree",
                    expected="None with kind='clustered', which builds trees from the keys",
                    got=repr(self.tree),
                    fix="Pass kind='multiscale' or kind='hierarchical' as well",
                )
            if self.near:
                raise InvalidInput(
                    "near", expected="0 with kind='clustered'", got=self.near, fix="Select more groups with top_k"
                )

    def uses_tiles(self, causal: bool) -> bool:
        """Return whether the layer runs `clustered_attention`: with a threshold, and causal layers that select groups."""
        if self.kind == "clustered":
            return causal or self.threshold is not None
        selects = self.threshold is not None or (causal and bool(self.top_k))
        return self.kind == "multiscale" and self.tree == "windows" and selects

    def exact_length(self, causal: bool) -> int:
        """Return the number of tokens up to which a layer that runs `clustered_attention` attends exactly."""
        resolved = self.resolved(causal)
        assert resolved.branching is not None
        return max(math.prod(resolved.branching), resolved.exact_until or 0)

    def resolved(self, causal: bool) -> LayerSettings:
        """Return the settings with the defaults that apply to a causal or another layer, checked."""
        return _resolve(self, causal)

    @property
    def repeats_last(self) -> bool:
        """Whether the last factor of `branching` repeats up to the root, as in all trees but the paper's."""
        return self.kind != "hierarchical"

    @property
    def needs_ids(self) -> bool:
        """Whether trees or sinks depend on token ids."""
        return self.sinks == "special" or self.tree == "sentences" or callable(self.tree)

    def check(self, layer: int, *, causal: bool) -> None:
        """Refuse settings that do not fit a causal or another layer, or would let a causal layer see later tokens."""
        name, expected, why = "", "", None
        if causal and self.kind == "hierarchical":
            name, expected = "kind", "'clustered' or 'multiscale'"
            why = "Its rows are tied, so earlier tokens would see later ones"
        elif causal and self.tree == "sentences":
            name, expected = "tree", "'windows', or kind='clustered',"
            why = "The end of a sentence depends on the text after it, so earlier tokens would see later ones"
        elif self.uses_tiles(causal) and self.sinks not in (None, 1):
            name, expected = "sinks", "1, the default,"
            why = "The group of the first token is always exact"
        elif self.uses_tiles(causal) and self.near:
            name, expected = "near", "0 with threshold or top_k"
            why = (
                "The chunk of each query is always exact" if causal else "Groups near a query are selected like others"
            )
        elif self.threshold is not None and not self.uses_tiles(causal):
            name, expected = "threshold", "None, with top_k in its place,"
            why = "Only clustered keys and windows of keys have a threshold"
        elif self.exact_until is not None and not self.uses_tiles(causal):
            name, expected = "exact_until", "None"
            why = "Only layers that select groups for tiles, as with a threshold, read the first tokens exactly"
        if name:
            word = "causal" if causal else "not causal"
            got = repr(getattr(self, name))
            raise InvalidInput(name, expected=f"{expected} in layer {layer}, which is {word}", got=got, fix=why)
        self.resolved(causal)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values, with names in place of functions and infinities."""
        values = asdict(replace(self, tree=FUNCTION) if callable(self.tree) else self)
        bias = values["pooled_bias"]
        saved = [_number_to_json(b) for b in bias] if isinstance(bias, tuple) else _number_to_json(bias)
        branching = None if self.branching is None else list(self.branching)
        threshold = list(self.threshold) if isinstance(self.threshold, tuple) else self.threshold
        return {**values, "branching": branching, "threshold": threshold, "pooled_bias": saved}

    @classmethod
    def from_json(cls, where: str, values: Any) -> LayerSettings:
        """Return the settings that `to_json` wrote; `where` names them in errors."""
        known = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or not set(values) <= known:
            unknown = sorted(set(values) - known) if isinstance(values, Mapping) else _short(values)
            raise InvalidInput(where, expected=f"some of {sorted(known)}", got=unknown, fix=_NEWER)
        values = dict(values)
        if "pooled_bias" in values:
            values["pooled_bias"] = _bias_from_json(f"{where}.pooled_bias", values["pooled_bias"])
        with inside(where):
            return cls(**values)


@lru_cache(maxsize=256)
def _resolve(settings: LayerSettings, causal: bool) -> LayerSettings:
    if settings.uses_tiles(causal):
        from hsa.attention.clustered.layout import BRANCHING, TILE, Shape
        from hsa.attention.clustered.threshold import THRESHOLD

        exact_until = EXACT_UNTIL if settings.exact_until is None else settings.exact_until
        shape = Shape.of(settings.branching or BRANCHING, settings.tile or TILE, exact_until, causal=causal)
        threshold = THRESHOLD if settings.top_k is None and settings.threshold is None else settings.threshold
        return replace(
            settings, branching=shape.branching, tile=shape.tile, exact_until=exact_until, threshold=threshold
        )
    top_k = settings.top_k
    if top_k is None:
        top_k = 0 if causal and settings.tree == "windows" else 8
    tile = None if causal else settings.tile
    if tile is None and (settings.kind == "clustered" or (causal and top_k > 0)):
        tile = 1  # a shared selection would be less faithful, and would show later tokens to causal queries
    return replace(settings, branching=settings.branching or (8, 2), top_k=top_k, tile=tile)


class _Default:
    """Default of an argument that was not passed, distinct from the same value passed. It prints as that value."""

    def __init__(self, value: Any):
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


DEFAULT: Any = SimpleNamespace(**{field.name: _Default(field.default) for field in fields(LayerSettings)})
"""Defaults for the signature of a function that must tell which settings were passed."""


def select_given(**settings: Any) -> dict[str, Any]:
    """Drop the settings that were left at `DEFAULT`.

    >>> select_given(top_k=DEFAULT.top_k, near=1), DEFAULT.sinks
    ({'near': 1}, 1)
    """
    return {name: value for name, value in settings.items() if not isinstance(value, _Default)}


_NEWER = "A newer hsa may have written it; run: pip install -U hsa"


@dataclass(frozen=True)
class ModelSettings:
    """Contents of `config.hsa`: settings by layer number, and the ids of special tokens."""

    layers: Mapping[int, LayerSettings]
    special_ids: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        layers = {str(number): layer.to_json() for number, layer in sorted(self.layers.items())}
        return {"version": VERSION, "special_ids": list(self.special_ids), "layers": layers}

    @classmethod
    def of(cls, config: Any) -> ModelSettings | None:
        """Return the settings in the config of a model, or None if there are none.

        Raises:
            InvalidInput: Another version wrote them, or they were edited by hand and do not fit.
        """
        saved = getattr(config, "hsa", None)
        if saved is None:
            return None
        where = "config.hsa"
        if not isinstance(saved, Mapping) or type(saved.get("version")) is not int:
            raise InvalidInput(where, expected="settings that hsa.huggingface.convert wrote", got=_short(saved))
        if saved["version"] > VERSION:
            raise InvalidInput(
                f"{where}['version']",
                expected=f"{VERSION}, the version that this hsa writes",
                got=saved["version"],
                fix="Run: pip install -U hsa",
            )
        if saved["version"] < VERSION:
            raise InvalidInput(
                f"{where}['version']",
                expected=f"{VERSION}",
                got=f"{saved['version']}, from a model that hsa 0.{saved['version']} converted",
                fix="Remove the old conversion with hsa.huggingface.revert(model), then convert the model again",
            )
        layers, special = saved.get("layers", {}), saved.get("special_ids", [])
        if not isinstance(layers, Mapping) or not all(str(n).isdecimal() for n in layers):
            raise InvalidInput(
                f"{where}['layers']", expected="settings by layer number", got=_short(layers), fix=_NEWER
            )
        if not isinstance(special, Sequence) or not all(type(i) is int for i in special):
            raise InvalidInput(f"{where}['special_ids']", expected="token ids", got=_short(special), fix=_NEWER)
        return cls(
            {int(n): LayerSettings.from_json(f"{where}['layers'][{n!r}]", layer) for n, layer in layers.items()},
            tuple(special),
        )

    def check_numbers(self, count: int | None) -> None:
        """Check that a model of `count` layers has all layers of these settings."""
        for number in self.layers:
            if count is not None and not number < count:
                raise InvalidInput(
                    "config.hsa['layers']",
                    expected=f"numbers from 0 to {count - 1}, as the model has {count} layers",
                    got=number,
                )


def _check_count(name: str, value: Any, expected: str, minimum: int = 0) -> int:
    from hsa.attention.checks import check_count  # loads torch, which the command line's help must not

    return check_count(name, value, expected, minimum)


def _check_threshold(threshold: Any) -> float | tuple[float, ...]:
    from hsa.attention.clustered.threshold import check_threshold

    return check_threshold(threshold)


def _check_word(name: str, value: Any, allowed: Sequence[str], more: str = "") -> None:
    if value not in allowed:
        raise InvalidInput(name, expected=f"one of {', '.join(map(repr, allowed))}{more}", got=repr(value))


def _factors(branching: Any) -> tuple[int, ...]:
    if not isinstance(branching, Sequence) or isinstance(branching, str) or not branching:
        raise InvalidInput("branching", expected="factors from the leaves up, such as (8, 2)", got=repr(branching))
    return tuple(_check_count(f"branching[{i}]", b, "2 or more", 2) for i, b in enumerate(branching))


def _biases(bias: Any) -> float | tuple[float, ...]:
    numbers = bias.tolist() if hasattr(bias, "tolist") else bias
    several = isinstance(numbers, Sequence) and not isinstance(numbers, str)
    for number in numbers if several else [numbers]:
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not number < math.inf:
            raise InvalidInput("pooled_bias", expected="a number below +∞, or one per head", got=repr(number))
    return tuple(map(float, numbers)) if several else float(numbers)


def _bias_from_json(where: str, saved: Any) -> Any:
    try:
        return tuple(map(float, saved)) if isinstance(saved, list) else float(saved)
    except (TypeError, ValueError):
        raise InvalidInput(where, expected="a number, or one per head", got=_short(saved)) from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _number_to_json(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)
