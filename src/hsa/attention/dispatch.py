"""Backends: what each can run, why not, and how exact it is.

A backend is a row of the table `BACKENDS`: for each operator a function of the operator's own arguments, a function that
lists the reasons it cannot run them, and its tolerance per dtype. `"auto"` takes the first that has no reason against it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hsa.errors import InvalidInput, Unsupported

Tolerance = dict[torch.dtype, float]


@dataclass(frozen=True)
class Backend:
    """One way to run one operator. `tolerance`: largest error relative to the largest value, against float64."""

    name: str
    run: Callable[..., Any]
    why_not: Callable[[dict[str, Any]], list[str]] = field(default=lambda arguments: [])
    tolerance: Tolerance = field(
        default_factory=lambda: {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
    )


def choose(operator: str, backends: tuple[Backend, ...], wanted: str, arguments: dict[str, Any]) -> Backend:
    """The backend to run, or an error that lists per backend why not."""
    names = [b.name for b in backends]
    if wanted != "auto" and wanted not in names:
        raise InvalidInput("backend", given=repr(wanted), expected=f"'auto' or one of {names}")
    reasons = {}
    for backend in backends:
        if wanted in ("auto", backend.name):
            reasons[backend.name] = backend.why_not(arguments)
            if not reasons[backend.name]:
                return backend
    lines = [f"  {name}: {'; '.join(why)}" for name, why in reasons.items()]
    raise Unsupported("\n".join([f"no backend can run this {operator}:", *lines]))
