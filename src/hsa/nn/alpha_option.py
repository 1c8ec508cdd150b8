"""How configurations and options say what α entmax has; without torch."""

from __future__ import annotations

from typing import Literal

from hsa.errors import InvalidInput

AlphaOption = float | Literal["learned"] | None
"""None: softmax."""


def check_alpha(alpha: AlphaOption, where: str = "entmax") -> None:
    """Raises unless it is a number that `hsa.Entmax` takes, "learned" or None.

    >>> check_alpha(0.5)
    Traceback (most recent call last):
    hsa.errors.InvalidInput: entmax: given 0.5, expected 'learned', or a number from 1 (softmax) to 2 (sparsemax); \
1.5 is a good start
    """
    if alpha is None or alpha == "learned":
        return
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 1 <= alpha <= 2:
        expected = "'learned', or a number from 1 (softmax) to 2 (sparsemax)"
        raise InvalidInput(where, given=repr(alpha), expected=expected, fix="1.5 is a good start")
