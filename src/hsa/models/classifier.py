"""`Classifier`: an encoder with a head that predicts a class or a number per tree, or a class per leaf."""

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
    """Configuration of a `Classifier`.

    Args:
        encoder: Configuration of the encoder, such as an `EncoderConfig`.
        modalities: Contents of the leaves, by name.
        outputs: Number of classes; 1 for regression.
        kinds: Kinds of domains that have positions: "sequence", "grid", "graph", "table".
        keys: Keys of tables.
        task: "classification" (a class per tree), "regression" (a number per tree) or "tokens" (a class per leaf).
        pooling: Pooling of the leaves of a tree into one vector: "mean", "max", "attention", "first" or "last".
        head: Inner width of the head; the encoder's width by default.
        center, scale: Mean and standard deviation of the numbers to predict, for regression.

    >>> from hsa.nn import EncoderConfig, Modality
    >>> config = ModelConfig(EncoderConfig(width=16), {"text": Modality(tokens=10)}, outputs=3)
    >>> ModelConfig.from_dict(config.to_dict()) == config
    True
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
            raise InvalidInput("task", got=repr(self.task), expected=f"one of {', '.join(get_args(Task))}")
        if self.task == "tokens" and not self.encoder.keeps_leaves:
            raise InvalidInput(
                "task", got="'tokens' for an encoder that pools leaves", expected="an encoder that keeps leaves"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON values; `from_dict` rebuilds it."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> ModelConfig:
        """Rebuild a configuration from the result of `to_dict`."""
        values = {
            **known_fields(ModelConfig, data),
            "encoder": config_from_dict(data["encoder"]),
            "modalities": {name: Modality(**known_fields(Modality, m)) for name, m in data["modalities"].items()},
        }
        for name in ("kinds", "keys"):
            if name in values:
                values[name] = tuple(values[name])
        return ModelConfig(**values)


class Classifier(nn.Module):
    """An encoder, global pooling, and a head with one hidden layer.

    Args:
        config: Configuration.

    >>> from hsa.nn import EncoderConfig, Modality
    >>> from hsa.signals import Signal, collate
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
        """Return logits `[trees, classes]`, numbers `[trees]`, or logits `[leaves, classes]`."""
        out = self.head(self.embed(inputs))
        return out[:, 0] * self.config.scale + self.config.center if self.config.task == "regression" else out

    def embed(self, inputs: Inputs) -> Tensor:
        """Return the vectors that the head reads, `[trees, width]`, or `[leaves, width]` for the task "tokens"."""
        x, hierarchy = self.encoder(inputs)
        x = self.norm(x)
        return x if self.pool is None else self.pool(x, hierarchy)


def count_parameters(module: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def equal_parameters(config: ModelConfig, encoder: EncoderConfigLike) -> ModelConfig:
    """Return the configuration with another encoder, whose feed-forward width is set to keep the number of parameters.

    This makes baselines fair: a model without attention lacks query and key projections, and gets wider networks instead.

    Args:
        config: Configuration of the model to match.
        encoder: Configuration of the other encoder; its `feed_forward` is replaced.

    >>> from hsa.nn import EncoderConfig, Modality
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
    """Return the size, `least` or more, whose count is closest to `wanted`.

    Args:
        count: Function of the size that grows with it.
        wanted: Count to match.
        least: Smallest size.

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
