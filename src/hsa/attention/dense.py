"""The leaf × leaf attention matrix of an operator, for tests and plots. Quadratic in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hsa.tree.hierarchy import Hierarchy


def dense_weights(
    operator: Callable[..., Tensor], q: Tensor, k: Tensor, hierarchy: Hierarchy | Sequence[int], **options: Any
) -> Tensor:
    """Return the attention matrix of an operator, `[heads, leaves, leaves]` with a row per query.

    Operators are linear in v, so the matrix is the output for v = identity. This works for any operator and backend, and
    takes memory quadratic in the number of leaves.

    Args:
        operator: `hsa.hierarchical_attention`, `hsa.multiscale_attention` or `hsa.clustered_attention`.
        q: Queries, `[leaves, heads, dim]`.
        k: Keys, `[leaves, kv_heads, dim]`.
        hierarchy: Tree or forest; for `hsa.clustered_attention`, the lengths of the sequences.
        options: Further keyword arguments of the operator.

    >>> from hsa import hierarchical_attention
    >>> q, k = torch.randn(2, 5, 2, 4, dtype=torch.float64).unbind(0)
    >>> weights = dense_weights(hierarchical_attention, q, k, Hierarchy.from_nested([[3, 2]]))
    >>> torch.allclose(weights.sum(-1), torch.ones(2, 5, dtype=torch.float64))
    True
    >>> weights[0, 0, 3].item() == weights[0, 2, 4].item()  # one value for each pair of siblings
    True
    """
    identity = torch.eye(len(k), dtype=k.dtype, device=k.device)[:, None].expand(-1, k.shape[1], -1)
    return operator(q, k, identity, hierarchy, **options).transpose(0, 1)
