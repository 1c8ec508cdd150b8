"""`lasting`: a context in which tensors are built that outlive the call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def lasting() -> Iterator[None]:
    """Build tensors that later calls use, whatever the mode of this one.

    Later calls may need gradients, which tensors of inference mode do not allow; and the fake tensors of a call inside
    `torch.export` or `FakeTensorMode` have no values.
    """
    with torch.inference_mode(False), _disable_current_modes():
        yield
