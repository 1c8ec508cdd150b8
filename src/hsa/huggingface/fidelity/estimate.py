"""Estimate of the time and memory that a conversion takes, from one batch of its texts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hsa.analysis.memory import PeakMemory
from hsa.huggingface.conversion import convert_as
from hsa.huggingface.fidelity.calibrate import CANDIDATES, CAUSAL_CANDIDATES, POINTS
from hsa.huggingface.fidelity.judge import Judge
from hsa.huggingface.layers import attention_layers, is_causal, why_not_convert
from hsa.huggingface.settings import LayerSettings


@dataclass(frozen=True)
class Estimate:
    """Seconds of each stage of a conversion, and its memory.

    Attributes:
        texts: Number of texts, or pieces, that were measured.
        search: Seconds of the search; 0 without a budget.
        report: Seconds of the comparison.
        times: Seconds of the measurement of times by length.
        weights: Memory of the weights in MiB.
        memory: Peak memory beside the weights in MiB; None if it cannot be measured.
    """

    texts: int
    search: float
    report: float
    times: float
    weights: float
    memory: float | None


def estimate(
    model: Any,
    settings: Mapping[int, LayerSettings],
    batch: Judge,
    report: Judge,
    search: Judge | None,
    lengths: Sequence[int],
    *,
    tokenizer: Any = None,
) -> Estimate:
    """Measure a batch with the exact and with the converted model, and extrapolate by the number of tokens.

    Args:
        model: Transformers model.
        settings: Settings of converted layers, by layer number.
        batch: Some of the texts of the report.
        report: Texts of the report.
        search: Texts of the search; None without a budget.
        lengths: Lengths at which times will be measured.
        tokenizer: Tokenizer of the model, if the settings need it.
    """
    peak = PeakMemory(next(model.parameters()).device)
    exact, converted = (_seconds_per_token(model, chosen, batch, tokenizer) for chosen in ({}, dict(settings)))
    searching = 0.0
    if search is not None:
        modules = attention_layers(model)
        layers = sum(why_not_convert(module) is None for module in modules)
        candidates = len(CAUSAL_CANDIDATES if any(map(is_causal, modules)) else CANDIDATES)
        alone = exact + max(0.0, converted - exact) / max(1, layers)  # one layer converted
        # Each layer with each candidate, points along the path, biases (five outputs per layer, then two measurements).
        passes = [(1, exact), (layers * candidates, alone), (POINTS + 3 + 5 + 2, max(exact, converted))]
        searching = _tokens(search) * sum(count * seconds for count, seconds in passes)
    return Estimate(
        texts=len(batch.examples),
        search=searching,
        report=_tokens(report) * (exact + converted),
        times=sum(_timing(length * seconds) for length in lengths for seconds in (exact, converted)),
        weights=sum(weight.nbytes for weight in model.parameters()) / 2**20,
        memory=peak.so_far(),
    )


def _seconds_per_token(model: Any, settings: Mapping[int, LayerSettings], batch: Judge, tokenizer: Any) -> float:
    convert_as(model, settings, tokenizer=tokenizer)
    began = time.perf_counter()
    batch.ask(model)  # returns values on the CPU, so a GPU has finished
    return (time.perf_counter() - began) / _tokens(batch)


def _tokens(judge: Judge) -> int:
    return int(judge.tokens.lengths.sum())


def _timing(seconds: float) -> float:
    """Return the time of the measurement at a length, see `time_model`: two warm-up passes, repeats, and memory."""
    return seconds * (2 + min(5.0, max(2.0, 10 / max(seconds, 1e-9))) + 1)
