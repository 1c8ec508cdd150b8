"""What the sizes of every encoder have to be."""

from __future__ import annotations

from typing import Any

from hsa.errors import InvalidInput


def check_sizes(config: Any) -> None:
    """Raises for a width, heads, layers, … that no encoder can have.

    Args:
        config: with a `width`, `heads`, `dropout`, and whichever it has of the others below.

    Raises:
        InvalidInput: naming the field.
    """
    head_dim = getattr(config, "head_dim", None)
    for name in ("width", "heads", "layers", "feed_forward", "head_dim"):
        size = getattr(config, name, None)
        if size is not None and size < 1:
            raise InvalidInput(name, given=size, expected="1 or more")
    if head_dim is None and config.width % config.heads:
        raise InvalidInput(
            "heads",
            given=f"{config.heads} heads of a width of {config.width}",
            expected="heads that divide the width",
            fix="or say how many channels a head has: head_dim" if hasattr(config, "head_dim") else None,
        )
    position_width = getattr(config, "position_width", 0)
    if position_width % 2 or position_width < 0:
        raise InvalidInput("position_width", given=position_width, expected="an even number: sines and cosines")
    position_dim = getattr(config, "position_dim", 0)
    if position_dim < 0:
        raise InvalidInput("position_dim", given=position_dim, expected="0 or more; 0 for no positions in the logits")
    if not 0 <= config.dropout < 1:
        raise InvalidInput("dropout", given=config.dropout, expected="0 or more and less than 1")
