"""Reasons why the kernels cannot run clustered attention. Does not import Triton."""

from __future__ import annotations

from torch import Tensor

from hsa.attention.clustered.call import ClusteredCall, SelectCall
from hsa.attention.clustered.layout import Shape
from hsa.attention.kernels import available
from hsa.attention.kernels.available import padded

MOST_NUMBERS = 2**31
"""Limit of the numbers of the keys or values of a sequence, per head: kernels count them in 32 bits."""
MOST_GROUPS = 2**23
"""Maximum number of groups of a sequence: an entry of a list has 31 bits for a group and a query."""
MOST_BYTES = 512
"""Maximum bytes of a key and a value of one head for gradients: what is derived from them must fit the shared memory."""
MOST_KEPT = 128
"""Maximum of `top_k`: a program keeps that many estimates per query."""


def why_not_triton(call: ClusteredCall) -> list[str]:
    """Return the reasons why the kernels cannot run `hsa.clustered_attention`; an empty list if they can."""
    reasons = _why_not(call.q, call.v, call)
    if reasons:
        return reasons
    if call.dropout_p > 0:
        reasons.append("it has no dropout")
    row_bytes = (padded(call.q.shape[2]) + padded(call.v.shape[2])) * call.q.element_size()
    if call.needs_gradient and row_bytes > MOST_BYTES:
        reasons.append(f"its gradients need keys and values of at most {MOST_BYTES} bytes together, not {row_bytes}")
    return reasons


def why_not_triton_select(call: SelectCall) -> list[str]:
    """Return the reasons why the kernels cannot run `hsa.select_groups`; an empty list if they can."""
    return _why_not(call.q, call.q, call)


def _why_not(q: Tensor, v: Tensor, call: ClusteredCall | SelectCall) -> list[str]:
    shape, reasons = call.layout.shape, available.why_not(q, v, call.backend)
    reasons += why_not_widths(q, v)
    if call.scale <= 0:
        reasons.append(f"the scale must be positive, not {call.scale}")
    chunks = int(call.layout.tile_chunks.max(initial=0))
    if chunks * shape.groups > MOST_GROUPS:
        reasons.append(f"a sequence has {chunks * shape.groups:,} groups, more than {MOST_GROUPS:,}")
    if chunks * shape.page * max(q.shape[2], v.shape[2]) >= MOST_NUMBERS:
        reasons.append(f"a sequence has {chunks * shape.chunk:,} keys, too many for heads this wide")
    if (call.top_k or 0) > MOST_KEPT:
        reasons.append(f"top_k={call.top_k} is more than {MOST_KEPT}")
    return reasons + why_not_tile(shape) + why_not_shape(shape)


def why_not_tile(shape: Shape) -> list[str]:
    """Return the reasons why the kernels do not support these tiles."""
    return [] if shape.tile >= 16 else [f"tiles must have at least 16 queries, not {shape.tile}"]


def why_not_cluster(k: Tensor, v: Tensor, shape: Shape, backend: str = "auto") -> list[str]:
    """Return the reasons why the kernel cannot run `hsa.cluster`; an empty list if it can."""
    return available.why_not(k, v, backend) + why_not_widths(k, v) + why_not_shape(shape)


def why_not_widths(k: Tensor, v: Tensor) -> list[str]:
    """Return the reasons why the kernels do not support these head dims."""
    dim, value_dim = k.shape[-1], v.shape[-1]
    reasons = [] if dim == available.padded(dim) else [f"head dims must be powers of two from 16 on, not {dim}"]
    return reasons if value_dim % 16 == 0 else [*reasons, f"value dims must be multiples of 16, not {value_dim}"]


def why_not_shape(shape: Shape) -> list[str]:
    """Return the reasons why the kernels do not support these trees."""
    if shape.branching[:2] == (8, 8) and shape.branching[2] <= 8:
        return []
    return [f"branching must be (8, 8, 1 to 8), not {shape.branching}"]
