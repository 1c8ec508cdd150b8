"""Time and memory of a model before and after conversion, at several lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Of one forward pass of one sequence: milliseconds, and MiB beyond what is held (None where that cannot be told)."""

    length: int
    before_ms: float
    after_ms: float
    before_mib: float | None
    after_mib: float | None

    @property
    def times_faster(self) -> float:
        return self.before_ms / self.after_ms


def lengths_up_to(longest: int) -> list[int]:
    """Powers of two from 128, and the longest itself.

    >>> lengths_up_to(512), lengths_up_to(300)
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
    watch: Callable[[int], None] | None = None,
) -> list[Timed]:
    """Forward passes on random tokens, before and after at each length; the model is left converted."""
    bad = next((length for length in lengths if length < 1), None)
    if bad is not None:
        raise InvalidInput("lengths", given=bad, expected="1 or more")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    most = min(1000, model.config.vocab_size)
    special = set(getattr(tokenizer, "all_special_ids", ()))
    usual = torch.tensor([i for i in range(most) if i not in special])
    rows = []
    for length in lengths:
        ids = usual[torch.randint(len(usual), (batch, length), generator=generator)].to(device)

        @torch.inference_mode()
        def run(ids: torch.Tensor = ids) -> None:
            model(input_ids=ids)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        found: dict[str, tuple[float, float | None]] = {}
        for name in ("before", "after"):
            convert_as(model, settings if name == "after" else {}, tokenizer=tokenizer)
            run()
            run()
            found[name] = (1e3 * median_seconds(run, repeats, seconds / 2), extra_memory(run, device))
        rows.append(Timed(length, found["before"][0], found["after"][0], found["before"][1], found["after"][1]))
        if watch is not None:
            watch(length)
    return rows
