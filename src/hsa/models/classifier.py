"""An encoder with a head: a class or a number per tree, or a class per leaf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from torch import Tensor, nn

from hsa.errors import InvalidInput
from hsa.nn.embedding import Modality
from hsa.nn.encoder import EncoderConfig, HierarchicalEncoder
from hsa.nn.inputs import Inputs
from hsa.nn.pooling import GlobalPool, GlobalPooling

Task = Literal["classification", "regression", "tokens"]


@dataclass(frozen=True)
class ModelConfig:
    """Everything a model is made from; `to_dict` and `from_dict` go through JSON.

    Args:
        encoder: its sizes.
        modalities, kinds, keys: see `HierarchicalEncoder`.
        task: "classification" (a class per tree), "regression" (a number per tree), "tokens" (a class per leaf).
        outputs: classes; 1 for regression.
        pooling: of the leaves of a tree into one vector.
        head: inner width of the head; the encoder's width by default.
        center, scale: the mean and the spread of the numbers to predict, for regression.
    """

    encoder: EncoderConfig
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
        if self.task == "tokens" and (self.encoder.pool != "none" or self.encoder.operator == "bottom-up"):
            raise InvalidInput(
                "task", given="a class per leaf from an encoder that pools", expected="leaves that are still there"
            )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> ModelConfig:
        given = {
            **known_fields(ModelConfig, data),
            "encoder": encoder_from_dict(data["encoder"]),
            "modalities": {name: Modality(**known_fields(Modality, m)) for name, m in data["modalities"].items()},
        }
        for name in ("kinds", "keys"):
            if name in given:
                given[name] = tuple(given[name])
        return ModelConfig(**given)


def encoder_from_dict(data: Mapping[str, Any]) -> EncoderConfig:
    return EncoderConfig(**{**known_fields(EncoderConfig, data), "windows": tuple(data.get("windows", ()))})


def known_fields(kind: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the data, if a configuration has all of these fields."""
    unknown = set(data) - {f.name for f in fields(kind)}
    if unknown:
        raise InvalidInput(
            kind.__name__,
            given=f"the unknown field {sorted(unknown)[0]!r}",
            expected="a configuration of this version of hsa",
            fix="was it saved by a newer version?",
        )
    return dict(data)


class HierarchicalClassifier(nn.Module):
    """Encoder, global pooling, and an MLP with one hidden layer.

    >>> import torch
    >>> from hsa import Signal, collate
    >>> config = ModelConfig(EncoderConfig(width=16), {"text": Modality(tokens=10)}, outputs=3)
    >>> batch = collate([Signal.of([3, 1, 4], "text"), Signal.of([1, 5], "text")])
    >>> HierarchicalClassifier(config)(batch).shape  # logits per tree
    torch.Size([2, 3])
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        width, inner = config.encoder.width, config.head or config.encoder.width
        self.encoder = HierarchicalEncoder(config.encoder, config.modalities, config.kinds, config.keys)
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


def equal_parameters(config: ModelConfig, **changes: Any) -> ModelConfig:
    """A variant of a model with as many parameters: its feed-forward networks make up for what the change adds or takes.

    For fair baselines: a model without attention lacks query and key projections, and gets wider networks instead.

    >>> config = ModelConfig(EncoderConfig(width=16), {"text": Modality(tokens=10)}, outputs=3)
    >>> deepsets = equal_parameters(config, operator="none")
    >>> abs(count_parameters(HierarchicalClassifier(deepsets)) - count_parameters(HierarchicalClassifier(config))) < 40
    True
    """
    import torch

    with torch.device("meta"):
        wanted = count_parameters(HierarchicalClassifier(config))
        changed = replace(config, encoder=replace(config.encoder, **changes))
        found = count_parameters(HierarchicalClassifier(changed))
    layers, width = changed.encoder.layers, changed.encoder.width
    inner = (changed.encoder.feed_forward or 2 * width) + round((wanted - found) / (layers * (2 * width + 1)))
    return replace(changed, encoder=replace(changed.encoder, feed_forward=max(8, inner)))
