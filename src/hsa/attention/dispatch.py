"""Backends of operators: which calls each can run, why not the others, and how exact it is.

An operator has a tuple of backends, the fastest first. `"auto"` selects the first that can run the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hsa.attention.call import Call, needs_gradient
from hsa.attention.checks import without_autocast
from hsa.errors import InvalidInput, Unsupported

Tolerance = dict[torch.dtype, float]
AnyCall = TypeVar("AnyCall")
OperatorCall = TypeVar("OperatorCall", bound=Call)
Result = TypeVar("Result")
TOLERANCE: Tolerance = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def _no_reasons(call: object) -> list[str]:
    """Return no reasons. A function with a name, because caches hold backends and are pickled."""
    return []


@dataclass(frozen=True)
class Backend(Generic[AnyCall, Result]):
    """An implementation of an operator.

    Attributes:
        name: Name, as passed to the operator's `backend` argument.
        run: Function that runs a call.
        why_not: Function that returns the reasons why the backend cannot run a call; empty if it can.
        tolerance: Largest error against float64, relative to the largest value.
    """

    name: str
    run: Callable[[AnyCall], Result]
    why_not: Callable[[AnyCall], list[str]] = _no_reasons
    tolerance: Tolerance = field(default_factory=lambda: dict(TOLERANCE))


def choose(
    operator: str, backends: tuple[Backend[AnyCall, Result], ...], wanted: str, call: AnyCall
) -> Backend[AnyCall, Result]:
    """Return the backend for the call, or raise an error that lists the reasons against each backend."""
    names = [b.name for b in backends]
    if wanted != "auto" and wanted not in names:
        raise InvalidInput("backend", got=repr(wanted), expected=f"'auto' or one of {names}")
    reasons = {}
    for backend in backends:
        if wanted in ("auto", backend.name):
            reasons[backend.name] = backend.why_not(call)
            if not reasons[backend.name]:
                return backend
    lines = [f"  {name}: {'; '.join(why)}" for name, why in reasons.items()]
    raise Unsupported("\n".join([f"no backend can run this {operator}:", *lines]))


def run(operator: str, backends: tuple[Backend[OperatorCall, Result], ...], call: OperatorCall) -> Result:
    """Run the call on its backend, without autocast: backends choose their own precision."""
    backend = choose(operator, backends, call.backend, call)
    with without_autocast(call.k):
        result = backend.run(call)
    return connected(result, call) if isinstance(result, Tensor) and not result.numel() else result


def connected(result: Any, call: object) -> Any:
    """Return an empty result that needs a gradient if an input of the call does."""
    inputs = [x for x in vars(call).values() if needs_gradient(x)]
    return result if result.requires_grad else sum((x.flatten()[:0].sum().to(result.dtype) for x in inputs), result)
