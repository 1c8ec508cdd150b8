"""Cross-entropy of a language model, computed in chunks so that the logits of all tokens never exist at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hsa.attention.derivatives import first_order

LOGITS_AT_ONCE = 2**28
"""Number of logits in a chunk: one gigabyte in float32."""


def token_losses(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return −log p(target) of every token, `[tokens]`, in float32 or wider and without gradients."""
    with torch.no_grad():
        narrow = weight.to(hidden.dtype)
        parts = [_forward(*chunk, narrow)[0] for chunk in _chunks(hidden, targets, weight)]
    return torch.cat(parts) if parts else hidden.new_empty(0)


def mean_token_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over tokens of −log softmax(hidden · weightᵀ)[target].

    The forward pass computes the gradients together with the loss, chunk by chunk, so that no logits are kept.

    Args:
        hidden: Final token vectors, `[tokens, width]`.
        weight: Output matrix, `[vocabulary, width]`.
        targets: Token ids to predict, `[tokens]`.

    >>> hidden, weight = torch.randn(5, 3), torch.randn(7, 3)
    >>> targets = torch.tensor([0, 6, 2, 2, 1])
    >>> whole = torch.nn.functional.cross_entropy(hidden @ weight.T, targets)
    >>> torch.allclose(mean_token_loss(hidden, weight, targets), whole)
    True
    """
    if torch.is_autocast_enabled(hidden.device.type):
        half = torch.get_autocast_dtype(hidden.device.type)
        hidden = hidden.to(half)
    return _MeanLoss.apply(hidden, weight, targets)


def _chunks(hidden: Tensor, targets: Tensor, weight: Tensor) -> list[tuple[Tensor, Tensor]]:
    step = max(1, LOGITS_AT_ONCE // len(weight))
    return list(zip(hidden.split(step), targets.split(step), strict=True))


def _forward(hidden: Tensor, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each token and the log-probabilities of the whole vocabulary."""
    logits = hidden @ weight.T
    logs = torch.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    return -logs.gather(-1, targets[:, None]).squeeze(-1), logs


class _MeanLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        needed = any(ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden) if needed else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needed else None
        narrow, begin = weight.to(hidden.dtype), 0
        with torch.autocast(hidden.device.type, enabled=False):
            for part, target in _chunks(hidden, targets, weight):
                losses, logs = _forward(part, target, narrow)
                total += losses.sum()
                if grad_hidden is not None and grad_weight is not None:
                    slope = logs.exp_()
                    slope.scatter_add_(1, target[:, None], slope.new_full((len(target), 1), -1.0))
                    slope = (slope / len(hidden)).to(hidden.dtype)
                    grad_hidden[begin : begin + len(part)] = slope @ narrow
                    grad_weight += (slope.T @ part).to(wide)
                    begin += len(part)
        if grad_hidden is not None and grad_weight is not None:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return total / len(hidden)

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        slope = gradients[0]
        return grad_hidden * slope.to(grad_hidden.dtype), grad_weight * slope.to(grad_weight.dtype), None
