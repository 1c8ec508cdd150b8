"""Time and memory of a model before and after conversion, by length."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hsa.analysis.memory import extra_memory
from hsa.analysis.timing import median_seconds
from hsa.errors import InvalidInput
from hsa.huggingface.conversion import convert_as
from hsa.huggingface.settings import LayerSettings


@dataclass(frozen=True)
class Timed:
    """Time in milliseconds and memory beyond the weights in MiB (None if it cannot be measured) of one forward pass."""

    length: int
    before_ms: float
    after_ms: float
    before_mib: float | None
    after_mib: float | None

    @property
    def times_faster(self) -> float:
        return self.before_ms / self.after_ms


def list_lengths(longest: int) -> list[int]:
    """List the powers of two from 128 up to `longest`, and `longest` itself.

    >>> list_lengths(512), list_lengths(300)
    ([128, 256, 512], [128, 256, 300])
    """
    powers = [2**i for i in range(7, 20) if 2**i < longest]
    return [*powers, longest]


def time_model(
    model: Any,
    settings: dict[int, LayerSettings],
    lengths: Sequence[int],
    *,
    batch: int = 1,
    repeats: int = 5,
    seconds: float = 20.0,
    tokenizer: Any = None,
) -> list[Timed]:
    """Time forward passes on random tokens, exact and converted, at each length. The model is converted afterwards.

    Args:
        model: Transformers model.
        settings: Settings by layer number.
        lengths: Lengths in tokens.
        batch: Number of sequences per pass.
        repeats: Number of timed passes, whose median is returned.
        seconds: Time limit per length.
        tokenizer: Tokenizer of the model, if the settings need it.
    """
    bad = next((length for length in lengths if length < 1), None)
    if bad is not None:
        raise InvalidInput("lengths", got=bad, expected="1 or more")
    device = next(model.parameters()).device
    # Of a language model, time the reading of a prompt: the logits of all its tokens may not fit in memory.
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    generator = torch.Generator().manual_seed(0)
    special = set(getattr(tokenizer, "all_special_ids", ()))
    ordinary = torch.tensor([i for i in range(min(1000, model.config.vocab_size)) if i not in special])
    rows = []
    for length in lengths:
        ids = ordinary[torch.randint(len(ordinary), (batch, length), generator=generator)].to(device)

        @torch.inference_mode()
        def run(ids: torch.Tensor = ids) -> None:
            model(input_ids=ids, **last)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        measured: dict[str, tuple[float, float | None]] = {}
        for name in ("before", "after"):
            convert_as(model, settings if name == "after" else {}, tokenizer=tokenizer)
            run()
            run()
            measured[name] = (1e3 * median_seconds(run, repeats, seconds / 2), extra_memory(run, device))
        (before_ms, before_mib), (after_ms, after_mib) = measured["before"], measured["after"]
        rows.append(Timed(length, before_ms, after_ms, before_mib, after_mib))
    return rows
