"""The error of commands that run out of memory: what a text needs, what is free, and what would fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from hsa.training.failures import OutOfMemory


def explain(
    run: Callable[[int], Any], tokens: int, device: torch.device | str, fix: Callable[[int], str], otherwise: str
) -> OutOfMemory:
    """Return the error for a text that did not fit.

    Args:
        run: Function that processes a text of some length; it is called with smaller ones.
        tokens: Length of the text.
        device: Device whose memory ran out.
        fix: Function that returns advice for the number of tokens that would fit.
        otherwise: Advice if that is not known.
    """
    from hsa.analysis.memory import estimate_need, format_mib
    from hsa.training.failures import OutOfMemory

    need = estimate_need(run, tokens, device)
    if need is None:
        return OutOfMemory(f"out of memory with {tokens:,} tokens. {otherwise}")
    if need.needed <= need.free:  # not linear, or what is free is in pieces
        amount, fits = f"more than the {format_mib(need.free)} that are free", min(need.fits, tokens // 2)
    else:
        amount, fits = (
            f"about {format_mib(need.needed)} beside the model, and {format_mib(need.free)} are free",
            need.fits,
        )
    unit = 1024 if fits >= 4096 else 64
    return OutOfMemory(f"out of memory: {tokens:,} tokens need {amount}. {fix(max(1, fits // unit * unit))}")
