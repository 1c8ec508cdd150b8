"""The number of tokens that a model remembers from earlier segments."""

from __future__ import annotations

from torch import nn

from hsa.errors import InvalidInput


def set_test_memory(model: nn.Module, tokens: int) -> None:
    """Set the number of tokens that a model remembers in `eval` mode; training keeps its own.

    Args:
        model: Model with layers that have a method `set_test_memory`, such as those of Transformer-XL.
        tokens: Number of tokens before a segment that every layer remembers; 0 reads every segment on its own.

    Raises:
        InvalidInput: For a model without a memory, or fewer than 0 tokens.
    """
    if tokens < 0:
        raise InvalidInput(
            "test_memory", got=tokens, expected="0 or more tokens", fix="0 reads every segment on its own"
        )
    layers = [module for module in model.modules() if hasattr(module, "set_test_memory")]
    if not layers:
        raise InvalidInput(
            "test_memory",
            got=f"{tokens} tokens for a model without a memory",
            expected="a model that reads texts in segments: hsa train --models transformer-xl",
        )
    for module in layers:
        module.set_test_memory(tokens)  # type: ignore[operator]
