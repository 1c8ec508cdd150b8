"""Inputs for tests of three-way attention."""

from __future__ import annotations

import torch
from torch import Tensor

from hsa import Hierarchy
from hsa.research.decomposition import CP

HEADS, DIM, VALUE_DIM, RANK = 2, 3, 5, 7
FORMS = ("none", "diagonal", "diagonal per head", "full", "full per head", "CP", "CP per head")


def rows(
    *forests: Hierarchy, seed: int = 0, dtype: torch.dtype = torch.float64, requires_grad: bool = False
) -> list[Tensor]:
    """Return q, k1, k2, v1 and v2 for one forest, or for three."""
    queries, first, second = forests if len(forests) == 3 else forests * 3
    generator = torch.Generator().manual_seed(seed)
    shapes = [(queries, DIM), (first, DIM), (second, DIM), (first, VALUE_DIM), (second, VALUE_DIM)]
    made = (torch.randn(f.num_leaves, HEADS, d, generator=generator, dtype=torch.float64) for f, d in shapes)
    return [x.to(dtype).requires_grad_(requires_grad) for x in made]


def form(
    name: str, seed: int = 0, dtype: torch.dtype = torch.float64, requires_grad: bool = False
) -> tuple[Tensor | CP | None, list[Tensor]]:
    """Return the tensor T in a form, and its parameters."""
    generator = torch.Generator().manual_seed(seed + 1)
    per_head = (HEADS,) if name.endswith("per head") else ()

    def parameter(*shape: int) -> Tensor:
        x = torch.randn(*per_head, *shape, generator=generator, dtype=torch.float64) / shape[0] ** 0.5
        return x.to(dtype).requires_grad_(requires_grad)

    if name == "none":
        return None, []
    if name.startswith("CP"):
        factors = [parameter(RANK, DIM) for _ in range(3)]
        return CP(*factors), factors
    tensor = parameter(DIM) if name.startswith("diagonal") else parameter(DIM, DIM, DIM)
    return tensor, [tensor]


def full(tensor: Tensor | CP | None) -> Tensor:
    """Return T as a full tensor, `[heads, dim, dim, dim]`."""
    if tensor is None:
        tensor = torch.ones(DIM, dtype=torch.float64)
    if isinstance(tensor, CP):
        tensor = tensor.tensor()
    if tensor.ndim <= 2:
        eye = torch.eye(DIM, dtype=tensor.dtype)
        tensor = torch.einsum("...a,ab,ac->...abc", tensor, eye, eye)
    return tensor.expand(HEADS, DIM, DIM, DIM)


def assert_same(ours, expected, tolerance: float = 1e-10) -> None:
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
