"""Decomposition of trained heads into shared query and key projections (Cordonnier, Loukas & Jaggi 2020)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hsa.errors import InvalidInput
from hsa.research.decomposition import CP, decompose, relative_error

_CONSTANT = 1e-6  # weight of the part of the logits that is the same for all keys, which softmax drops
_LEAST_SPREAD = 1e-3  # least variance of a direction, relative to the mean, so that directions absent in the data count


@dataclass(frozen=True, eq=False)
class SharedProjections:
    """One query and one key projection for all heads. The logits of head h are scale · Σ_r mixing[h, r] · query_r · key_r.

    Attributes:
        query_weight, key_weight: `[shared_dim, width]` Weights, as in `nn.Linear`.
        query_bias, key_bias: `[shared_dim]` Biases.
        mixing: `[heads, shared_dim]` Weight of each channel in each head.
        error: Relative error ‖T − T̂‖ / ‖T‖ of the bilinear forms of all heads, biases included.
        logit_error: Relative root mean square error of the logits on inputs with the given moment, without the part that
            all keys share; None without a moment.
        parameters_before, parameters_after: Number of parameters of both projections, their biases and the mixing.
    """

    query_weight: Tensor
    query_bias: Tensor
    key_weight: Tensor
    key_bias: Tensor
    mixing: Tensor
    error: float
    logit_error: float | None
    parameters_before: int
    parameters_after: int

    @property
    def shared_dim(self) -> int:
        return self.mixing.shape[1]


def share_projections(
    query_weight: Tensor,
    query_bias: Tensor | None,
    key_weight: Tensor,
    key_bias: Tensor | None,
    heads: int,
    shared_dim: int,
    *,
    moment: Tensor | None = None,
    iterations: int = 100,
) -> SharedProjections:
    """Approximate the query and key projections of a trained layer by projections that its heads share.

        T_h = [W_Q^h b_Q^h]ᵀ [W_K^h b_K^h] ≈ Σ_r mixing[h, r] · query_r ⊗ key_r        [width + 1, width + 1] each

    The layer itself is a sum of this kind, with heads · head_dim components that each belong to one head; `decompose`
    computes one with fewer components. At shared_dim = heads · head_dim the layer is unchanged and the error is 0.

    Args:
        query_weight, key_weight: `[heads · head_dim, width]` Weights of the layer.
        query_bias, key_bias: `[heads · head_dim]` Biases, or None.
        heads: Number of heads.
        shared_dim: Number of shared channels, 1 to heads · head_dim.
        moment: `[width + 1, width + 1]` Mean of x xᵀ over inputs x of the layer with a one appended. If given, the fit is
            to the logits on such inputs instead of to the weights. The part of the logits that is the same for all keys
            has almost no weight, because softmax drops it.
        iterations: Maximum number of iterations of alternating least squares.

    Raises:
        InvalidInput: If shapes do not match each other or the heads, or shared_dim is out of range.

    >>> layer = torch.nn.Linear(6, 8), torch.nn.Linear(6, 8)
    >>> shared = share_projections(*layer[0].parameters(), *layer[1].parameters(), heads=4, shared_dim=5)
    >>> shared.query_weight.shape, shared.mixing.shape, 0 < shared.error < 1
    (torch.Size([5, 6]), torch.Size([4, 5]), True)
    """
    layer = concatenated_heads(query_weight, query_bias, key_weight, key_bias, heads)
    if isinstance(shared_dim, bool) or not isinstance(shared_dim, int) or not 1 <= shared_dim <= layer.rank:
        raise InvalidInput(
            "shared_dim",
            got=shared_dim,
            expected=f"1 to {layer.rank} (heads · head_dim, where the layer is exact)",
        )
    seen = None if moment is None else Inputs(moment, layer)
    if shared_dim == layer.rank:
        shared = layer
    elif seen is None:
        shared = _with_fewer(layer, shared_dim, iterations)
    else:
        shared = seen.without(_with_fewer(seen.within(layer), shared_dim, iterations))
    mixing, queries, keys = (factor.to(query_weight.dtype) for factor in _balanced(shared))
    shared = CP(mixing.double(), queries.double(), keys.double())
    return SharedProjections(
        queries[:, :-1].contiguous(),
        queries[:, -1].contiguous(),
        keys[:, :-1].contiguous(),
        keys[:, -1].contiguous(),
        mixing.T.contiguous(),
        relative_error(layer, shared),
        None if seen is None else relative_error(seen.within(layer), seen.within(shared)),
        sum(x.numel() for x in (query_weight, query_bias, key_weight, key_bias) if x is not None),
        sum(factor.numel() for factor in (mixing, queries, keys)),
    )


def check_shared_dim(shared_dim: int | float, channels: int) -> int:
    """Return a number of shared channels; a float is a share of all channels."""
    number = shared_dim
    if isinstance(shared_dim, float) and 0 < shared_dim <= 1:
        number = max(1, round(shared_dim * channels))
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= channels:
        raise InvalidInput(
            "shared_dim",
            got=repr(shared_dim),
            expected=f"1 to {channels} channels (heads · head_dim), or a share of them as a float above 0 and at most 1.0",
        )
    return number


def _with_fewer(layer: CP, channels: int, iterations: int) -> CP:
    """Approximate the forms of a layer. A small width may need fewer channels; the remaining ones are 0."""
    heads, size = layer.a.shape[1], layer.b.shape[1]
    rank = min(channels, size * min(heads, size))
    cp = decompose(by_strength(layer), rank, iterations=iterations).cp
    return CP(*(F.pad(factor, (0, 0, 0, channels - rank)) for factor in (cp.a, cp.b, cp.c)))


def _balanced(cp: CP) -> tuple[Tensor, Tensor, Tensor]:
    """Scale components so that the largest mixing of each is 1, as in concatenated heads, and |query| = |key|."""
    mixing = cp.a.abs().amax(1, keepdim=True)
    lengths = [factor.norm(dim=1, keepdim=True) for factor in (cp.b, cp.c)]
    length = (mixing * lengths[0] * lengths[1]).sqrt()
    queries, keys = (
        factor * (length / own.clamp_min(1e-300)) for factor, own in zip((cp.b, cp.c), lengths, strict=True)
    )
    return cp.a / mixing.clamp_min(1e-300), queries, keys


def concatenated_heads(
    query_weight: Tensor, query_bias: Tensor | None, key_weight: Tensor, key_bias: Tensor | None, heads: int
) -> CP:
    """Return the exact bilinear forms of all heads in float64, as factors `[heads · head_dim, heads or width + 1]`.

    Raises:
        InvalidInput: If shapes do not match each other or the heads.
    """
    if query_weight.ndim != 2 or query_weight.shape != key_weight.shape:
        shapes = f"{list(query_weight.shape)} and {list(key_weight.shape)}"
        expected = "query_weight and key_weight of shape [heads · head_dim, width]"
        raise InvalidInput("weights", got=shapes, expected=expected)
    channels = len(query_weight)
    if heads < 1 or channels % heads or not channels:
        raise InvalidInput("heads", got=heads, expected=f"a divisor of the {channels} channels of query_weight")
    for name, bias in (("query_bias", query_bias), ("key_bias", key_bias)):
        if bias is not None and bias.shape != (channels,):
            raise InvalidInput(name, got=f"shape {list(bias.shape)}", expected=f"[{channels}], or None")
    queries, keys = _with_bias(query_weight, query_bias), _with_bias(key_weight, key_bias)
    return CP(_one_hot(heads, channels, queries), queries, keys)


def by_strength(layer: CP) -> CP:
    """Return the same forms, that of each head as the sum of its singular components, strongest first."""
    heads = layer.a.shape[1]
    queries, keys = (
        factor.unflatten(0, (heads, -1)).mT for factor in (layer.b, layer.c)
    )  # [heads, width + 1, head_dim]
    (query_basis, query_rest), (key_basis, key_rest) = torch.linalg.qr(queries), torch.linalg.qr(keys)
    left, strength, right = torch.linalg.svd(query_rest @ key_rest.mT)
    root = strength.sqrt()[:, None]
    queries = (query_basis @ left * root).mT.flatten(0, 1)
    keys = (key_basis @ right.mT * root).mT.flatten(0, 1)
    return CP(_one_hot(heads, len(queries), queries), queries, keys)


class Inputs:
    """Coordinates in which the distance between bilinear forms is the root mean square distance between their logits.

        Σ_h E ‖x_iᵀ (T_h − T̂_h) (x_j − E x)‖² = ‖within(T) − within(T̂)‖²         x_i, x_j: independent inputs of the layer

    The part of the logits that is the same for all keys has a small weight too; otherwise it would be undetermined.

    Args:
        moment: `[width + 1, width + 1]` Second moment of the inputs, as for `share_projections`.
        layer: Bilinear forms of the layer.
    """

    def __init__(self, moment: Tensor, layer: CP):
        size = layer.b.shape[1]
        if moment.shape != (size, size) or not bool(moment.isfinite().all()):
            expected = f"finite values of shape [{size}, {size}], the width and one more for the bias"
            finite = "" if bool(moment.isfinite().all()) else " with infinite or NaN values"
            raise InvalidInput("moment", got=f"shape {list(moment.shape)}{finite}", expected=expected)
        if not torch.isclose(moment[-1, -1].double(), torch.ones((), dtype=torch.float64, device=moment.device)):
            fix = "Append a one to every input, and divide by the number of inputs"
            raise InvalidInput("moment[-1, -1]", got=float(moment[-1, -1]), expected="1", fix=fix)
        moment = moment.to(layer.b)
        mean = moment[:-1, -1]
        spread = moment[:-1, :-1] - mean[:, None] * mean
        least = _LEAST_SPREAD * float(spread.diagonal().mean().clamp_min(1e-30))
        spread.diagonal().add_(least)
        self._roots = [_root(spread, mean, constant) for constant in (1.0, _CONSTANT)]

    def within(self, cp: CP) -> CP:
        """Return bilinear forms in these coordinates."""
        return CP(cp.a, cp.b @ self._roots[0], cp.c @ self._roots[1])

    def without(self, cp: CP) -> CP:
        """Return bilinear forms in the original coordinates: the inverse of `within`."""
        b, c = (
            torch.linalg.solve(root, factor, left=False) for root, factor in zip(self._roots, (cp.b, cp.c), strict=True)
        )
        return CP(cp.a, b, c)


def _root(spread: Tensor, mean: Tensor, constant: float) -> Tensor:
    """Return L with L Lᵀ = E x xᵀ for x = (y, 1), with a weight on the constant in the last channel."""
    size = len(mean) + 1
    root = spread.new_zeros(size, size)
    root[:-1, :-1] = torch.linalg.cholesky(spread)
    root[:-1, -1] = constant * mean
    root[-1, -1] = constant
    return root


def _with_bias(weight: Tensor, bias: Tensor | None) -> Tensor:
    weight = weight.detach().double()
    column = weight.new_zeros(len(weight)) if bias is None else bias.detach().double()
    return torch.cat([weight, column[:, None]], 1)


def _one_hot(heads: int, channels: int, like: Tensor) -> Tensor:
    """Return the head of every channel as a one-hot matrix `[channels, heads]`."""
    return torch.eye(heads, dtype=like.dtype, device=like.device).repeat_interleave(channels // heads, 0)
