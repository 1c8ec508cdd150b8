"""Chunks: how many tokens causal attention clusters together. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from hsa.errors import InvalidInput

CHUNK = 256
"""Minimum number of tokens per chunk by default."""


def default_chunk(branching: Sequence[int]) -> int:
    """Return the default number of tokens per chunk.

    >>> default_chunk((8, 2)), default_chunk((8, 3))
    (256, 648)
    """
    return leaves_of_a_node(branching, CHUNK)


def check_chunk(chunk: int, branching: Sequence[int]) -> None:
    """Check that chunks are whole nodes of the tree, so that no node straddles a complete and an incomplete chunk."""
    whole = leaves_of_a_node(branching, chunk)
    if chunk != whole:
        raise InvalidInput(
            "chunk",
            expected=f"a product of the first factors of branching {tuple(branching)}, the last one repeated",
            got=chunk,
            fix=f"Pass chunk={whole}, for example",
        )


def leaves_of_a_node(branching: Sequence[int], least: int) -> int:
    """Return the number of leaves of the smallest kind of node with at least `least` leaves; the last factor repeats."""
    leaves, factors = branching[0], list(branching[1:]) or [branching[0]]
    while leaves < least:
        leaves *= factors.pop(0) if len(factors) > 1 else factors[0]
    return leaves
