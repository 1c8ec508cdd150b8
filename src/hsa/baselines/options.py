"""Options of the document models of others, beside the sizes that all models share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hsa.baselines.hat.layouts import layout_pattern
from hsa.errors import InvalidInput

LevelEncoder = Literal["attention", "gru"]


@dataclass(frozen=True)
class DocumentOptions:
    """Document models of others.

    Args:
        level_encoder: For han: what encodes the members of a family: attention or gru.
        levels: For han: levels with weights of their own, from the leaves up; higher levels share the last one's. By default
            the number of levels that half of the documents have, at most 3.
        layout: For hat: order of the layers inside and across segments: interleaved, early, late, ad-hoc, a published one
            (I1, I2, I3, EC1, EC2, LC1, LC2), or a pattern such as SSC.
        segment: For hat and transformer-xl: tokens per segment.
        segment_level: For hat: 0 for fixed windows; 1 for leaf families, such as sentences; 2 for the level above them.
        memory: For transformer-xl: tokens of earlier segments that are remembered.
        test_memory: For transformer-xl: the same after training; as in training by default.
        warm_start: For hat: a BERT or RoBERTa encoder to start from, a folder or a hub name. Its tokenizer reads the texts,
            its weights learn at a tenth of the learning rate.
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
                raise InvalidInput(name, given=value, expected=f"{least} or more")
        layout_pattern(self.layout, layers=1)  # raises for an unknown layout
        if self.level_encoder not in get_args(LevelEncoder):
            expected = f"one of {', '.join(get_args(LevelEncoder))}"
            raise InvalidInput("level_encoder", given=self.level_encoder, expected=expected)

    def check_models(self, names: Sequence[str]) -> None:
        """Raise where an option is given that none of the models uses."""
        if self.warm_start is not None and "hat" not in names:
            raise InvalidInput(
                "warm_start", given=f"for {', '.join(names)}", expected="hat among the models: it starts from it"
            )


def document_options(extra: Mapping[str, Any]) -> DocumentOptions:
    """Return the group of these options among those of all plug-ins."""
    return extra.get("documents", DocumentOptions())
