"""Options of the task match3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hsa.errors import InvalidInput


@dataclass(frozen=True)
class Match3Options:
    """Generated numbers of the task match3.

    Args:
        modulus: Modulus of the numbers. With about 0.65 · length², half of the answers are yes.
        length: Length of the sequences.
        shortest: Length of the shortest training sequences; matches are easier to learn from short ones.
        sequences: Number of training sequences; validation and test have a tenth of it each.
    """

    modulus: int = 41
    length: int = 8
    shortest: int = 3
    sequences: int = 50_000

    def __post_init__(self) -> None:
        for name, least in (("modulus", 2), ("length", 1), ("shortest", 1), ("sequences", 10)):
            if getattr(self, name) < least:
                raise InvalidInput(name, got=getattr(self, name), expected=f"{least} or more")
        if self.shortest > self.length:
            raise InvalidInput("shortest", got=self.shortest, expected=f"at most {self.length}, the length")

    def check_models(self, names: Sequence[str]) -> None:
        """Accept any model."""
