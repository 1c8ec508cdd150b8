"""CP decomposition of three-way tensors: a sum of outer products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class CP:
    """T_abc = Σ_r a_ra · b_rb · c_rc, factors `[rank, dim]` each; with leading dimensions, a tensor for each.

    >>> CP(torch.ones(1, 2), torch.ones(1, 3), torch.ones(1, 5)).tensor().shape
    torch.Size([2, 3, 5])
    """

    a: Tensor
    b: Tensor
    c: Tensor

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    def tensor(self) -> Tensor:
        """The sum written out."""
        return torch.einsum("...ra,...rb,...rc->...abc", self.a, self.b, self.c)
