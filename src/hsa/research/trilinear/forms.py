"""Forms of the tensor T of three-way attention. A diagonal and a CP only change q, k1 and k2:

    diagonal   Σ_a t_a q_a k1_a k2_a                             q ← q∘t
    CP         Σ_r (Σ_a a_ra q_a)(Σ_b b_rb k1_b)(Σ_c c_rc k2_c)  q ← A q, k1 ← B k1, k2 ← C k2

What remains is the *core*, Σ_r q_r k1_r k2_r, the only form that kernels need. A full tensor remains a separate factor.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from hsa.errors import InvalidInput
from hsa.research.decomposition import CP

Form: TypeAlias = "Tensor | CP | None"


def is_full(tensor: Form) -> bool:
    return isinstance(tensor, Tensor) and tensor.ndim > 2


def core_dim(q: Tensor, tensor: Form) -> int:
    """Return the width of the core's queries and keys."""
    return tensor.rank if isinstance(tensor, CP) else q.shape[-1]


def to_core(q: Tensor, k1: Tensor, k2: Tensor, tensor: Form) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return q, k1 and k2 in core form, and None; or q, k1, k2 and the full tensor `[heads, dim, dim, dim]`.

    >>> q, k1, k2 = torch.randn(3, 5, 2, 4, dtype=torch.float64).unbind(0)
    >>> cp = CP(*torch.randn(3, 7, 4, dtype=torch.float64).unbind(0))
    >>> core = torch.einsum("nhr,nhr,nhr->nh", *to_core(q, k1, k2, cp)[:3])
    >>> torch.allclose(core, torch.einsum("abc,nha,nhb,nhc->nh", cp.tensor(), q, k1, k2))
    True
    """
    if tensor is None:
        return q, k1, k2, None
    if isinstance(tensor, CP):
        q, k1, k2 = (_project(x, factor) for x, factor in zip((q, k1, k2), (tensor.a, tensor.b, tensor.c), strict=True))
        return q, k1, k2, None
    if is_full(tensor):
        return q, k1, k2, tensor.expand(q.shape[1], *tensor.shape[-3:])
    return q * tensor, k1, k2, None


def _project(x: Tensor, factor: Tensor) -> Tensor:
    return torch.einsum("nhd,hrd->nhr", x, factor.expand(x.shape[1], *factor.shape[-2:]))


def check_form(tensor: Any, q: Tensor) -> None:
    """Raise an error unless the tensor matches q `[queries, heads, dim]` and a CP has at most dim² terms."""
    heads, dim = q.shape[1:]
    if tensor is None:
        return
    if isinstance(tensor, CP):
        _check_factors(tensor, q)
        return
    shapes = [(dim,), (heads, dim), (dim, dim, dim), (heads, dim, dim, dim)]
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) not in shapes:
        raise InvalidInput(
            "tensor",
            got=f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__,
            expected=f"None, a diagonal {shapes[0]} or {shapes[1]}, a full tensor {shapes[2]} or {shapes[3]}, or a CP",
            fix=f"Match the {heads} heads of {dim} channels of q; pass a tensor of low rank as an hsa.research.CP",
        )
    _check_like("tensor", tensor, q)


def _check_factors(cp: CP, q: Tensor) -> None:
    heads, dim = q.shape[1:]
    for name, factor in (("a", cp.a), ("b", cp.b), ("c", cp.c)):
        where = f"tensor.{name}"
        if not isinstance(factor, Tensor):
            raise InvalidInput(where, got=type(factor).__name__, expected=f"a tensor [rank, {dim}]")
        rank = cp.a.shape[-2] if cp.a.ndim > 1 else 0
        if tuple(factor.shape) not in ((rank, dim), (heads, rank, dim)) or rank == 0:
            raise InvalidInput(
                where,
                got=f"shape {tuple(factor.shape)}",
                expected=f"[rank, {dim}] or [{heads} heads, rank, {dim}], with the same rank of 1 or more for a, b and c",
            )
        _check_like(where, factor, q)
    if cp.rank > dim**2:
        raise InvalidInput(
            "tensor",
            got=f"a CP of rank {cp.rank}",
            expected=f"a rank of at most {dim**2}, which suffices for any {dim} × {dim} × {dim} tensor",
            fix="Pass a lower rank, or the full tensor",
        )


def _check_like(where: str, x: Tensor, q: Tensor) -> None:
    if x.dtype != q.dtype:
        raise InvalidInput(where, got=x.dtype, expected=f"dtype {q.dtype}, as q has")
    if x.device != q.device:
        raise InvalidInput(where, got=x.device, expected=f"device {q.device}, as q has")
