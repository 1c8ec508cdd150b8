"""Options that only the baselines have; the sizes that all models share are elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hsa.baselines.hat.layouts import layout_pattern
from hsa.errors import InvalidInput

LevelEncoder = Literal["attention", "gru"]


@dataclass(frozen=True)
class DocumentOptions:
    """Baseline models.

    Args:
        level_encoder: Encoder of the members of a family (han): attention or gru.
        levels: Number of levels with their own weights, from the leaves up; higher levels share those of the last (han). By
            default the number that at least half of the documents have, at most 3.
        layout: Order of the layers inside and across segments (hat): interleaved, early, late, ad-hoc, a published layout
            (I1, I2, I3, EC1, EC2, LC1, LC2), or a pattern such as SSC.
        segment: Number of tokens per segment (hat, transformer-xl).
        segment_level: Unit of a segment (hat): 0 for fixed windows, 1 for leaf families (sentences), 2 for the level above.
        memory: Number of tokens remembered from earlier segments (transformer-xl).
        test_memory: Number of tokens remembered after training (transformer-xl); the same as in training by default.
        warm_start: BERT or RoBERTa encoder to start from (hat), a folder or a hub name. Its tokenizer replaces the default
            one; its weights train at a tenth of the learning rate.
    """

    level_encoder: LevelEncoder = "attention"
    levels: int | None = None
    layout: str = "interleaved"
    segment: int = 128
    segment_level: int = 0
    memory: int = 128
    test_memory: int | None = None
    warm_start: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("levels", 1), ("segment", 1), ("segment_level", 0), ("memory", 0), ("test_memory", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidInput(name, got=value, expected=f"{least} or more")
        layout_pattern(self.layout, layers=1)  # raises for an unknown layout
        if self.level_encoder not in get_args(LevelEncoder):
            expected = f"one of {', '.join(get_args(LevelEncoder))}"
            raise InvalidInput("level_encoder", got=repr(self.level_encoder), expected=expected)

    def check_models(self, names: Sequence[str]) -> None:
        """Raise an error if no model uses an option that was set."""
        if self.warm_start is not None and "hat" not in names:
            raise InvalidInput("warm_start", got=f"only {', '.join(names)}", expected="hat among the models")


def document_options(extra: Mapping[str, Any]) -> DocumentOptions:
    """Return these options from the groups of all plug-ins; the defaults if the group is missing."""
    return extra.get("documents", DocumentOptions())
