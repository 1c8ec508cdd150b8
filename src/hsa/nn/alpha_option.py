"""Option for the α of entmax, shared by configurations and the command line. Importing this does not import torch."""

from __future__ import annotations

from typing import Literal

from hsa.errors import InvalidInput

AlphaOption = float | Literal["learned"] | None
"""A number from 1 (softmax) to 2 (sparsemax), "learned", or None for softmax."""


def check_alpha(alpha: AlphaOption, where: str = "entmax") -> None:
    """Raise an error unless `alpha` is a number that `hsa.Entmax` takes, "learned" or None.

    >>> check_alpha(0.5)
    Traceback (most recent call last):
    hsa.errors.InvalidInput: entmax: expected 'learned', or a number from 1 (softmax) to 2 (sparsemax), got 0.5. \
1.5 is a good start
    """
    if alpha is None or alpha == "learned":
        return
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 1 <= alpha <= 2:
        expected = "'learned', or a number from 1 (softmax) to 2 (sparsemax)"
        raise InvalidInput(where, got=repr(alpha), expected=expected, fix="1.5 is a good start")
