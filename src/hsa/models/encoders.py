"""The encoders a classifier can have: one per kind of configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hsa.baselines.han.model import HanConfig, HanEncoder
from hsa.baselines.hat.model import HatConfig, HatEncoder
from hsa.baselines.transformer_xl.encoder import TransformerXLConfig, TransformerXLEncoder
from hsa.errors import InvalidInput
from hsa.models.known_fields import known_fields
from hsa.nn.embedding import Modality
from hsa.nn.encoder import EncoderConfig, HierarchicalEncoder

AnyEncoderConfig = EncoderConfig | HanConfig | HatConfig | TransformerXLConfig

_OURS = "hierarchical"
_ENCODERS: dict[str, tuple[type[Any], type[nn.Module]]] = {
    _OURS: (EncoderConfig, HierarchicalEncoder),
    "han": (HanConfig, HanEncoder),
    "hat": (HatConfig, HatEncoder),
    "transformer-xl": (TransformerXLConfig, TransformerXLEncoder),
}
"""By architecture, which a configuration names in its field of that name; ours has none."""


def build_encoder(
    config: AnyEncoderConfig, modalities: Mapping[str, Modality], kinds: Sequence[str], keys: Sequence[str]
) -> Any:
    """The encoder of a configuration: a module that maps `Inputs` to vectors and the forest whose leaves they are.

    All have `embedding`, and `prepare(inputs)`, which builds what depends on the forest alone.
    """
    _, module = _ENCODERS[getattr(config, "architecture", _OURS)]
    return module(config, modalities, kinds, keys)


def encoder_from_dict(data: Mapping[str, Any]) -> AnyEncoderConfig:
    """The configuration that `asdict` made this of."""
    given = dict(data)
    architecture = given.pop("architecture", _OURS)
    if architecture not in _ENCODERS:
        raise InvalidInput(
            "architecture",
            given=repr(architecture),
            expected=f"one of {', '.join(_ENCODERS)}",
            fix="was it saved by a newer version?",
        )
    kind, _ = _ENCODERS[architecture]
    if "windows" in given:
        given["windows"] = tuple(given["windows"])
    return kind(**known_fields(kind, given))
