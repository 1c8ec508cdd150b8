"""Length from which a converted layer is faster than exact attention on this machine, measured once and then cached."""

from __future__ import annotations

import json
import math
import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from hsa.analysis.timing import median_seconds
from hsa.errors import InvalidInput
from hsa.files import cache_folder, read_json, write_json
from hsa.huggingface.attend import attend
from hsa.huggingface.layer_plan import Call, LayerPlan
from hsa.huggingface.layers import attention_layers, is_causal, why_not_convert
from hsa.huggingface.sequences import Sequences
from hsa.huggingface.settings import LayerSettings

LENGTHS = tuple(2**i for i in range(9, 18))
SECONDS = 6.0
"""Longest time of a call of each kind; lengths at which they would take longer are left out."""
_FILE = "crossover.json"


@dataclass(frozen=True)
class Crossover:
    """Times of one layer of attention at several lengths, on random inputs."""

    heads: int
    head_dim: int
    rows: list[tuple[int, float, float]]  # length, seconds of exact and of converted attention; the last may be faster

    @property
    def length(self) -> int | None:
        """Measured length from which on converted attention is faster; None if there is none."""
        length, exact, converted = self.rows[-1]
        return length if converted < exact else None

    @property
    def extrapolated(self) -> int | None:
        """Length where it would be faster if times grow on as between the last two lengths; None if it is far away."""
        if len(self.rows) < 2:
            return None
        (_, exact_before, before), (length, exact, converted) = self.rows[-2:]
        gain = (exact / exact_before) / (converted / before)  # by which the ratio improves when the length doubles
        doublings = math.log(converted / exact) / math.log(gain) if gain > 1.1 else math.inf
        return length * 2 ** math.ceil(doublings) if doublings <= 6 else None

    def __str__(self) -> str:
        where = f"measured here on random inputs, {self.heads} heads × {self.head_dim}"
        if self.length is None:
            later = "" if self.extrapolated is None else f", by extrapolation from about {self.extrapolated:,} on"
            most = f"up to {self.rows[-1][0]:,} tokens"
            return f"converted attention is not faster than exact attention {most}{later} ({where})"
        return f"converted attention is faster than exact attention from about {self.length:,} tokens on ({where})"


def measure_crossover(model: Any, settings: LayerSettings) -> Crossover | None:
    """Return the times of a layer of a model, converted with these settings.

    None if its trees depend on the text, or there is no memory for any length.

    Takes some seconds, once for each device, version of torch and of hsa, head sizes and settings.
    """
    module = next((module for module in attention_layers(model) if why_not_convert(module) is None), None)
    if module is None or settings.needs_ids:
        return None
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    device, dtype, causal = next(model.parameters()).device, model.dtype, is_causal(module)
    parts = [_name(device), torch.__version__, version("hsa"), dtype, heads, kv_heads, dim, causal, settings.to_json()]
    key, path = json.dumps(parts, default=str), cache_folder() / _FILE
    known = _cached(path)
    if key not in known:
        shapes = [(1, count, dim) for count in (heads, kv_heads, kv_heads)]
        known[key] = _measure(module, settings, shapes, device, dtype, causal)
        if known[key]:
            with suppress(InvalidInput):  # a cache that cannot be written costs the next call some seconds
                write_json(path, known)
    rows = [(length, exact, converted) for length, exact, converted in known[key]]
    return Crossover(heads, dim, rows) if rows else None


def _cached(path: Path) -> dict[str, Any]:
    with suppress(InvalidInput):
        known = read_json(path, "measured times")
        if isinstance(known, dict):
            return known
    return {}


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.node()}, {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


@torch.inference_mode()
def _measure(
    module: Any,
    settings: LayerSettings,
    shapes: list[tuple[int, int, int]],
    device: torch.device,
    dtype: torch.dtype,
    causal: bool,
) -> list[tuple[int, float, float]]:
    plan, generator = LayerPlan(0, settings), torch.Generator().manual_seed(0)
    rows: list[tuple[int, float, float]] = []
    for length in LENGTHS:
        q, k, v = (
            torch.randn(batch, count, length, dim, generator=generator).to(device, dtype)
            for batch, count, dim in shapes
        )
        sequences = Sequences(torch.ones(1, length, dtype=torch.bool, device=device), causal=causal, full=True)
        call = Call(module, q, k, v)
        exact = partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal, enable_gqa=True)
        try:
            before = after = _seconds(exact, device)
            if plan.path(call, sequences) != "exact":
                after = _seconds(partial(attend, plan, call, sequences), device)
        except torch.OutOfMemoryError:  # beside the model; shorter lengths still count
            break
        rows.append((length, before, after))
        if after < before or 4 * before + 3 * after > SECONDS:  # the expected time of twice the length
            break
    return rows


def _seconds(run: Any, device: torch.device) -> float:
    first = median_seconds(run, repeats=1, device=device)  # on a GPU, kernels are compiled in the first call
    slow = first > 0.5 and device.type == "cpu"
    return first if slow else median_seconds(run, repeats=5, most=0.2, device=device)
