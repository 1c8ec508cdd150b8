"""Gram matrices of heads, their alignment, and the effective number of distinct heads.

A Gram matrix is `[n, n]`, several are `[kernels, n, n]`. All computations are in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hsa.errors import InvalidInput

_TINY = 1e-12  # norms below this share of a kernel's norm are rounding


def centred(gram: Tensor) -> Tensor:
    """Return the Gram matrix of centred features.

        K_c = H K H,   H = I − 1/n

    Args:
        gram: `[..., n, n]` Gram matrix or matrices.

    >>> features = torch.tensor([[1.0], [2.0], [6.0]])
    >>> centred(features @ features.T)
    tensor([[ 4.,  2., -6.],
            [ 2.,  1., -3.],
            [-6., -3.,  9.]], dtype=torch.float64)
    """
    _check_gram("gram", gram)
    gram = gram.double()
    rows, columns = gram.mean(-1, keepdim=True), gram.mean(-2, keepdim=True)
    return gram - rows - columns + rows.mean(-2, keepdim=True)


def centred_alignment(one: Tensor, other: Tensor) -> float:
    """Return the alignment of two kernels: the cosine of their centred Gram matrices.

        A(K, L) = ⟨K_c, L_c⟩ / (‖K_c‖ ‖L_c‖)                  (Frobenius)

    It is 1 for kernels that are equal up to scale and offset, and never negative for positive semi-definite ones. The
    alignment of a constant kernel is 0. See Cortes, Mohri & Rostamizadeh (2012, arXiv:1203.0550); for linear kernels it is
    known as linear CKA (Kornblith et al. 2019, arXiv:1905.00414).

    >>> gram = torch.tensor([[2.0, 1.0, 0.0], [1.0, 2.0, 0.0], [0.0, 0.0, 1.0]])
    >>> round(centred_alignment(gram, 3 * gram + 5), 6)
    1.0
    """
    if one.shape != other.shape:
        expected = f"shape {tuple(one.shape)}, as the first kernel has"
        raise InvalidInput("other", got=f"shape {tuple(other.shape)}", expected=expected)
    return float(alignment_matrix(torch.stack([one, other]))[0, 1])


def alignment_matrix(grams: Tensor) -> Tensor:
    """Return the centred alignments of all pairs of kernels, `[kernels, kernels]`.

    The result is itself a Gram matrix, that of the centred kernels scaled to norm 1, so it has no negative eigenvalues. The
    row and column of a constant kernel are 0, including the diagonal.

    Args:
        grams: `[kernels, n, n]` Gram matrices.
    """
    directions = _directions(grams)
    alignment = (directions @ directions.T).clamp(-1, 1)
    return (alignment + alignment.T) / 2  # rounding is not symmetric, and pruning orders depend on exact ties


def _directions(grams: Tensor) -> Tensor:
    """Return the centred kernels scaled to norm 1, `[kernels, n²]`; 0 for constant ones."""
    if grams.ndim != 3 or not len(grams):
        raise InvalidInput("grams", got=f"shape {tuple(grams.shape)}", expected="shape [kernels, n, n]")
    flat = centred(grams).flatten(1)
    lengths, whole = flat.norm(dim=1, keepdim=True), grams.double().flatten(1).norm(dim=1, keepdim=True)
    alive = lengths > _TINY * whole
    return torch.where(alive, flat / lengths.where(alive, torch.ones_like(lengths)), torch.zeros_like(flat))


def redundancy(alignment: Tensor) -> Tensor:
    """Return the highest alignment of each kernel with another, `[kernels]`; 1 for constant kernels.

    Args:
        alignment: `[kernels, kernels]` Result of `alignment_matrix`.
    """
    _check_gram("alignment", alignment)
    if len(alignment) < 2:
        return torch.zeros(len(alignment), dtype=torch.float64)
    others = alignment.double() - torch.diag(torch.full((len(alignment),), 3.0, dtype=torch.float64))
    return torch.where(alignment.diagonal() > 0, others.max(1).values, torch.ones(len(alignment), dtype=torch.float64))


def effective_number(alignment: Tensor) -> float:
    """Return the effective number of distinct kernels: 1 if all are equal, their number if all alignments are 0.

        exp(−Σ p log p),   p: eigenvalues of the alignment matrix, scaled to sum 1

    This is the Vendi score (Friedman & Dieng 2023, arXiv:2210.02410) of the heads under their alignment.

    Args:
        alignment: `[kernels, kernels]` Result of `alignment_matrix`.

    >>> round(effective_number(torch.eye(5)), 6), round(effective_number(torch.ones(5, 5)), 6)
    (5.0, 1.0)
    """
    _check_gram("alignment", alignment)
    values = torch.linalg.eigvalsh(alignment.double()).clamp(min=0)
    total = values.sum()
    if total == 0:
        return 0.0
    shares = values / total
    return float(torch.exp(-torch.special.xlogy(shares, shares).sum()))


def input_conditional(grams: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of kernels with weights that depend on the input, as in attention over heads.

        K_ij = Σ_m β_im β_jm K^(m)_ij

    With equal rows of β this is the flat sum with weights β². If the kernels are positive semi-definite, so is the sum.

    Args:
        grams: `[kernels, n, n]` Gram matrices.
        weights: `[n, kernels]` Weights β.
    """
    kernels, n = grams.shape[0], grams.shape[-1]
    if weights.shape != (n, kernels):
        expected = f"shape [{n}, {kernels}], a weight per example and kernel"
        raise InvalidInput("weights", got=f"shape {tuple(weights.shape)}", expected=expected)
    beta = weights.to(torch.float64).T
    return (grams.double() * beta[:, :, None] * beta[:, None, :]).sum(0)


def linear_grams(features: Sequence[Tensor]) -> Tensor:
    """Return the inner products of the rows of each feature matrix `[n, channels]`, `[kernels, n, n]`."""
    return torch.stack([rows.double() @ rows.double().T for rows in features])


def similarity_gram(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return the symmetric part of the similarity by which a head compares tokens, and the asymmetric share it drops.

        S_ij = scale · q_i·k_j        K = (S + Sᵀ)/2        share = ‖(S − Sᵀ)/2‖² / ‖S‖²

    The similarity of i to j may differ from that of j to i; a kernel is symmetric. The two parts are orthogonal. About half
    of S is dropped if q and k are unrelated, nothing if q = k. K may have negative eigenvalues; alignments of such kernels
    are still cosines, but may be negative.

    Args:
        q, k: `[tokens, dim]` Queries and keys of one head.
        scale: Factor of the products.
    """
    if q.shape != k.shape or q.ndim != 2:
        expected = f"[tokens, dim], as q of shape {tuple(q.shape)}"
        raise InvalidInput("k", got=f"shape {tuple(k.shape)}", expected=expected)
    similarity = scale * q.double() @ k.double().T
    gram = (similarity + similarity.T) / 2
    whole = float(similarity.square().sum())
    return gram, float((similarity - gram).square().sum()) / whole if whole else 0.0


def _check_gram(where: str, gram: Tensor) -> None:
    if gram.ndim < 2 or gram.shape[-1] != gram.shape[-2] or not gram.shape[-1]:
        raise InvalidInput(where, got=f"shape {tuple(gram.shape)}", expected="a square matrix, at least 1 × 1")
    if not bool(torch.isfinite(gram).all()):
        raise InvalidInput(where, got="infinite or NaN values", expected="finite values")
