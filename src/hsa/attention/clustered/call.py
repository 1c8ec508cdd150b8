"""`ClusteredCall` and `SelectCall`: the checked arguments that the backends of clustered attention receive."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hsa.attention.call import needs_gradient
from hsa.attention.clustered.keys import ClusteredKeys
from hsa.attention.clustered.layout import Layout
from hsa.attention.clustered.selection import TileSelection
from hsa.attention.clustered.threshold import Threshold
from hsa.attention.kernels.repeat import is_plain, layout_of, with_types

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run on the CPU, in Triton's interpreter."""


MOST_REPEATED = 64
"""Maximum number of repeated calls."""
_REPEATED: dict[Any, Callable[..., Any]] = {}


@dataclass(frozen=True, eq=False, kw_only=True)
class SelectCall:
    """Checked arguments of `hsa.select_groups`."""

    q: Tensor
    k: Tensor  # packed, in their own order
    keys: ClusteredKeys
    layout: Layout
    threshold: Threshold | None
    top_k: int | None
    spread: float
    lists: int  # number of lists per tile: query heads, or key/value heads if the heads of a group share them
    opened: Tensor | None  # [sequences, lists, groups] groups that earlier queries of a cut tile have opened
    scale: float
    backend: str


@dataclass(frozen=True, eq=False, kw_only=True)
class ClusteredCall:
    """Checked arguments of `hsa.clustered_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    keys: ClusteredKeys | None  # None to build them from k and v
    layout: Layout
    windows: bool
    selection: TileSelection | None  # None to select
    threshold: Threshold | None
    top_k: int | None
    spread: float
    lists: int
    opened: Tensor | None
    pooled_bias: Tensor | None  # [1 or heads]; None for 0
    dropout_p: float
    scale: float
    backend: str
    repeats_as: Hashable = None  # key of other calls that kernels may repeat this one for

    @property
    def needs_gradient(self) -> bool:
        """Whether any input needs a gradient."""
        tables = () if self.keys is None else (self.keys.k, self.keys.v)
        return needs_gradient(self.q, self.k, self.v, self.pooled_bias, *tables)

    def select(self, keys: ClusteredKeys) -> SelectCall:
        """Return the call that selects groups for this one."""
        return SelectCall(
            q=self.q,
            k=self.k,
            keys=keys,
            layout=self.layout,
            threshold=self.threshold,
            top_k=self.top_k,
            spread=self.spread,
            lists=self.lists,
            opened=self.opened,
            scale=self.scale,
            backend=self.backend,
        )


def keep(key: Hashable, run: Callable[..., Any]) -> None:
    """Keep a function that repeats the calls of a key for other tensors."""
    if len(_REPEATED) >= MOST_REPEATED:
        _REPEATED.pop(next(iter(_REPEATED)))
    _REPEATED[key] = run


def repeat_key(q: Tensor, k: Tensor, v: Tensor, lengths: Any, query_lengths: Any, options: tuple[Any, ...]) -> Hashable:
    """Return the key of calls that can be repeated for each other; None for calls that are not repeated.

    Args:
        options: All other arguments: numbers, words, tuples of numbers or None.
    """
    if not (isinstance(q, Tensor) and q.is_cuda | INTERPRETED and is_plain(q, k, v)) or needs_gradient(q, k, v):
        return None
    sizes = tuple(
        None if x is None else tuple(x) for x in (lengths, query_lengths) if x is None or type(x) in (list, tuple)
    )
    is_simple = len(sizes) == 2 and all(type(n) is int for x in sizes if x is not None for n in x)
    is_simple = is_simple and all(x is None or isinstance(x, (int, float, str)) or _are_floats(x) for x in options)
    return (layout_of(q, k, v), sizes, with_types(*options)) if is_simple else None


def _are_floats(x: Any) -> bool:
    return type(x) is tuple and all(type(number) is float for number in x)


def repeated(key: Hashable, *tensors: Tensor) -> Any:
    """Repeat a recorded call for other tensors; return None if there is no such call.

    Nothing is checked: an earlier call with tensors of this layout has passed all checks.
    """
    run = _REPEATED.get(key)
    if run is None:
        return None
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return run(*tensors)
    return run(*tensors)
