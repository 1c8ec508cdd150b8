"""An encoder with a head: a class or a number per tree, or a class per leaf."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from hsa.errors import InvalidInput
from hsa.models.known_fields import known_fields
from hsa.models.registry import EncoderConfigLike, config_from_dict, create
from hsa.nn.embedding import Modality
from hsa.nn.inputs import Inputs
from hsa.nn.pooling import GlobalPool, GlobalPooling

Task = Literal["classification", "regression", "tokens"]


@dataclass(frozen=True)
class ModelConfig:
    """Everything a model is made from; `to_dict` and `from_dict` go through JSON.

    Args:
        encoder: its sizes; their class says which encoder it is.
        modalities, kinds, keys: see `HierarchicalEncoder`.
        task: "classification" (a class per tree), "regression" (a number per tree), "tokens" (a class per leaf).
        outputs: classes; 1 for regression.
        pooling: of the leaves of a tree into one vector.
        head: inner width of the head; the encoder's width by default.
        center, scale: the mean and the spread of the numbers to predict, for regression.
    """

    encoder: EncoderConfigLike
    modalities: Mapping[str, Modality]
    outputs: int
    kinds: tuple[str, ...] = ("sequence",)
    keys: tuple[str, ...] = ()
    task: Task = "classification"
    pooling: GlobalPooling = "mean"
    head: int | None = None
    center: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.task not in get_args(Task):
            raise InvalidInput("task", given=repr(self.task), expected=f"one of {', '.join(get_args(Task))}")
        if self.task == "tokens" and not self.encoder.keeps_leaves:
            raise InvalidInput(
                "task", given="a class per leaf from an encoder that pools", expected="leaves that are still there"
            )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> ModelConfig:
        given = {
            **known_fields(ModelConfig, data),
            "encoder": config_from_dict(data["encoder"]),
            "modalities": {name: Modality(**known_fields(Modality, m)) for name, m in data["modalities"].items()},
        }
        for name in ("kinds", "keys"):
            if name in given:
                given[name] = tuple(given[name])
        return ModelConfig(**given)


class Classifier(nn.Module):
    """Encoder, global pooling, and an MLP with one hidden layer.

    >>> from hsa import Signal, collate
    >>> from hsa.nn.encoder_config import EncoderConfig
    >>> config = ModelConfig(EncoderConfig(width=16), {"text": Modality(tokens=10)}, outputs=3)
    >>> batch = collate([Signal.of([3, 1, 4], "text"), Signal.of([1, 5], "text")])
    >>> Classifier(config)(batch).shape  # logits per tree
    torch.Size([2, 3])
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        width, inner = config.encoder.width, config.head or config.encoder.width
        self.encoder = create(config.encoder, config.modalities, config.kinds, config.keys)
        self.norm = nn.LayerNorm(width)
        self.pool = None if config.task == "tokens" else GlobalPool(config.pooling, width)
        self.head = nn.Sequential(
            nn.Linear(width, inner), nn.GELU(), nn.Dropout(config.encoder.dropout), nn.Linear(inner, config.outputs)
        )

    def forward(self, inputs: Inputs) -> Tensor:
        """Logits `[trees, classes]`, numbers `[trees]`, or logits `[leaves, classes]`."""
        x, hierarchy = self.encoder(inputs)
        x = self.norm(x)
        if self.pool is not None:
            x = self.pool(x, hierarchy)
        out = self.head(x)
        return out[:, 0] * self.config.scale + self.config.center if self.config.task == "regression" else out


def count_parameters(module: nn.Module) -> int:
    """Those that are trained."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def equal_parameters(config: ModelConfig, encoder: EncoderConfigLike) -> ModelConfig:
    """The model with another encoder and as many parameters: its feed-forward networks make up for the difference.

    For fair baselines: a model without attention lacks query and key projections, and gets wider networks instead.

    >>> from hsa.nn.encoder_config import EncoderConfig
    >>> config = ModelConfig(EncoderConfig(width=16), {"text": Modality(tokens=10)}, outputs=3)
    >>> deepsets = equal_parameters(config, replace(config.encoder, kind="none"))
    >>> abs(count_parameters(Classifier(deepsets)) - count_parameters(Classifier(config))) < 40
    True
    """

    def sized(inner: int) -> ModelConfig:
        return replace(config, encoder=replace(encoder, feed_forward=inner))

    def count(sizes: ModelConfig) -> int:
        with torch.device("meta"):
            return count_parameters(Classifier(sizes))

    return sized(closest_size(lambda inner: count(sized(inner)), count(config)))


def closest_size(count: Callable[[int], int], wanted: int, least: int = 8) -> int:
    """The size, `least` or more, at which what grows with it comes closest to what is wanted.

    >>> closest_size(lambda size: 3 * size, 40)
    13
    """
    above = least
    while count(above) < wanted:
        above *= 2
    below = max(least, above // 2)
    while above - below > 1:
        middle = (above + below) // 2
        below, above = (middle, above) if count(middle) < wanted else (below, middle)
    return min(below, above, key=lambda size: abs(count(size) - wanted))
