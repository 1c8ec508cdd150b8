"""Validation of the sizes that all encoders share."""

from __future__ import annotations

from typing import Any

from hsa.errors import InvalidInput


def check_sizes(config: Any) -> None:
    """Raise an error if a size in a configuration is out of range or does not fit the others.

    Args:
        config: Object with `width`, `heads` and `dropout`; the other sizes are checked if it has them.

    Raises:
        InvalidInput: A size is invalid; the message names the field.
    """
    head_dim = getattr(config, "head_dim", None)
    for name in ("width", "heads", "layers", "feed_forward", "head_dim"):
        size = getattr(config, name, None)
        if size is not None and size < 1:
            raise InvalidInput(name, got=size, expected="1 or more")
    if head_dim is None and config.width % config.heads:
        raise InvalidInput(
            "heads",
            got=f"{config.heads} heads for a width of {config.width}",
            expected="heads that divide the width",
            fix="Or set head_dim, the number of channels per head" if hasattr(config, "head_dim") else None,
        )
    position_width = getattr(config, "position_width", 0)
    if position_width % 2 or position_width < 0:
        raise InvalidInput(
            "position_width", got=position_width, expected="an even number: half are sines, half cosines"
        )
    position_dim = getattr(config, "position_dim", 0)
    if position_dim < 0:
        raise InvalidInput("position_dim", got=position_dim, expected="0 or more (0 keeps positions out of the logits)")
    if not 0 <= config.dropout < 1:
        raise InvalidInput("dropout", got=config.dropout, expected="0 or more and less than 1")
