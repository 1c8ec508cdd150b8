"""Backends: what each can run, why not, and how exact it is.

An operator has a table of backends, from the fastest to the plainest. `"auto"` takes the first that has no reason against
the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from hsa.attention.call import Call
from hsa.attention.checks import without_autocast
from hsa.errors import InvalidInput, Unsupported

Tolerance = dict[torch.dtype, float]
AnyCall = TypeVar("AnyCall")
OperatorCall = TypeVar("OperatorCall", bound=Call)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Backend(Generic[AnyCall, Result]):
    """One way to run one operator.

    Attributes:
        name: for the operator's `backend` argument.
        run: the operator, as a function of the call.
        why_not: the reasons why it cannot run a call; none if it can.
        tolerance: largest error relative to the largest value, against float64.
    """

    name: str
    run: Callable[[AnyCall], Result]
    why_not: Callable[[AnyCall], list[str]] = field(default=lambda call: [])
    tolerance: Tolerance = field(
        default_factory=lambda: {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
    )


def choose(
    operator: str, backends: tuple[Backend[AnyCall, Result], ...], wanted: str, call: AnyCall
) -> Backend[AnyCall, Result]:
    """Return the backend that runs the call, or raise an error that lists for every backend why it cannot."""
    names = [b.name for b in backends]
    if wanted != "auto" and wanted not in names:
        raise InvalidInput("backend", given=repr(wanted), expected=f"'auto' or one of {names}")
    reasons = {}
    for backend in backends:
        if wanted in ("auto", backend.name):
            reasons[backend.name] = backend.why_not(call)
            if not reasons[backend.name]:
                return backend
    lines = [f"  {name}: {'; '.join(why)}" for name, why in reasons.items()]
    raise Unsupported("\n".join([f"no backend can run this {operator}:", *lines]))


def run(operator: str, backends: tuple[Backend[OperatorCall, Result], ...], call: OperatorCall) -> Result:
    """Run the call by the backend that it asks for; backends choose their own precision."""
    backend = choose(operator, backends, call.backend, call)
    with without_autocast(call.k):
        return backend.run(call)
