"""CP decomposition of three-way tensors: a sum of outer products, exact or of a lower rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from hsa.errors import InvalidInput

Value = TypeVar("Value")
_PULL = 1e-9  # λ of `decompose`, for equations with a diagonal of 1
_NOISE = 1e-14  # rounding of squared errors in float64, relative to the squared norm of the tensor
_FIRST_STEP, _STEP_FACTOR, _LONGEST_STEP = 0.5, 1.05, 1.0  # extrapolation, in units of the last change


@dataclass(frozen=True, eq=False)
class CP:
    """Three-way tensor as a sum of outer products: T_abc = Σ_r a_ra · b_rb · c_rc.

    Args:
        a, b, c: `[…, rank, dim]` Factors. Leading dimensions hold several tensors.

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
        """Return the dense tensor."""
        return torch.einsum("...ra,...rb,...rc->...abc", self.a, self.b, self.c)


@dataclass(frozen=True, eq=False)
class Decomposition:
    """Result of `decompose`."""

    cp: CP
    """Factors of the approximation T̂."""
    error: float
    """Relative error ‖T − T̂‖ / ‖T‖."""
    iterations: int
    """Number of iterations run."""


def exact_cp(tensor: Tensor) -> CP:
    """Return a CP equal to the tensor, with an outer product for every fibre along its largest dimension.

        T = Σ_ij e_i ⊗ e_j ⊗ T_ij:          rank I·J for dimensions I, J ≤ K; no tensor of this shape needs more

    Args:
        tensor: `[…, a, b, c]` Tensor or tensors.

    Raises:
        InvalidInput: If there are fewer than three dimensions, or one is empty.

    >>> cube = torch.randn(3, 3, 3)
    >>> exact_cp(cube).rank, torch.equal(exact_cp(cube).tensor(), cube)
    (9, True)
    """
    dims = _dims_of(tensor)
    longest = max(range(3), key=dims.__getitem__)
    first, second = (mode for mode in range(3) if mode != longest)
    lead = tensor.shape[:-3]
    rank = dims[first] * dims[second]
    factors = [tensor] * 3
    factors[longest] = tensor.movedim(longest - 3, -1).reshape(*lead, rank, dims[longest])
    one, other = (torch.eye(dims[mode], dtype=tensor.dtype, device=tensor.device) for mode in (first, second))
    factors[first] = one.repeat_interleave(dims[second], 0).expand(*lead, -1, -1)
    factors[second] = other.repeat(dims[first], 1).expand(*lead, -1, -1)
    return CP(*factors)


def decompose(
    tensor: Tensor | CP,
    rank: int,
    *,
    start: CP | None = None,
    iterations: int = 200,
    tolerance: float = 1e-5,
    seed: int = 0,
) -> Decomposition:
    """Approximate a tensor by a CP of lower rank with alternating least squares. The error never rises.

        minimise ‖T − Σ_r a_r ⊗ b_r ⊗ c_r‖²     in a, b and c in turn:  (G + λI) a ← M + λ a_before,  λ → 0
        G = (b bᵀ) ∘ (c cᵀ),  M_r = Σ_bc T_·bc b_rb c_rc

    The small λ pulls towards the previous factor. It keeps the equations solvable when components become collinear, and
    does not move any minimum. Every iteration first extrapolates all factors along their last change, and repeats itself
    without extrapolation if that raises the error (Mitchell, Ye & De Sterck 2020, arXiv:1810.05846). All computations are
    in float64.

    Args:
        tensor: `[a, b, c]` Dense tensor, or a CP of higher rank, which is never made dense.
        rank: Rank of the result, at most the product of the two smaller dimensions, where an exact CP exists.
        start: Initial factors. By default random ones for a dense tensor; for a CP, those of its components that together
            explain most of it, chosen greedily.
        iterations: Maximum number of iterations; 0 returns the initial factors.
        tolerance: Smallest relative decrease of the error per iteration; below it, the iteration stops.
        seed: Seed of the random initial factors.

    Raises:
        InvalidInput: If the rank is out of range, shapes do not match, or values are not finite.

    >>> planted = CP(torch.randn(2, 5), torch.randn(2, 7), torch.randn(2, 3))
    >>> decompose(planted.tensor(), 2).error < 1e-3
    True
    """
    source, order, dtype = _source(tensor)
    bound = source.dims[0] * source.dims[1]
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= bound:
        shape = " × ".join(map(str, _unsorted(source.dims, order)))
        raise InvalidInput(
            "rank", got=rank, expected=f"1 to {bound}, the rank of an exact CP of any tensor of shape {shape}"
        )
    factors = source.start(rank, seed) if start is None else _factors_of("start", start, rank, source.dims, order)
    turns = 0
    if source.squared_norm == 0:
        factors = [torch.zeros_like(factor) for factor in factors]
    elif iterations > 0:
        factors, turns = _alternate(source, factors, iterations, tolerance)
    factors = [factor.to(dtype) for factor in factors]
    error = _error(source, [factor.double() for factor in factors])
    return Decomposition(CP(*_unsorted(factors, order)), error, turns)


def relative_error(tensor: Tensor | CP, cp: CP) -> float:
    """Return ‖T − T̂‖ / ‖T‖ for a dense tensor `[a, b, c]` or a CP (never made dense); ‖T̂‖ if the tensor is 0.

    Raises:
        InvalidInput: If shapes do not match, or values are not finite.

    >>> relative_error(torch.ones(2, 3, 5), CP(torch.ones(1, 2), torch.ones(1, 3), torch.zeros(1, 5)))
    1.0
    """
    source, order, _ = _source(tensor)
    return _error(source, _factors_of("cp", cp, cp.rank, source.dims, order))


class _Source(Protocol):
    """Tensor with ascending dimensions, with the products that alternating least squares needs."""

    dims: list[int]
    squared_norm: float

    def start(self, rank: int, seed: int) -> list[Tensor]:
        """Return initial factors, exact ones if the rank allows it."""

    def set_factor(self, mode: int, factor: Tensor) -> None:
        """Set the current factor of a mode, `[rank, dim]`."""

    def products(self, mode: int) -> Tensor:
        """Return the tensor times the current factors of the two other modes, component by component: `[rank, dim]`."""

    def slice(self, i: int) -> Tensor:
        """Return slice i of the smallest dimension, `[dim 1, dim 2]`."""


class _Dense:
    """Dense tensor. An iteration computes two large products: with the factor of the longest mode, and along it."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor
        self.dims = list(tensor.shape)
        self.squared_norm = float(tensor.square().sum())
        self.factors = [tensor] * 3
        self.along = tensor  # [dim 0, dim 1, rank] product with the factor of the longest mode

    def start(self, rank: int, seed: int) -> list[Tensor]:
        if rank == self.dims[0] * self.dims[1]:
            return _exact(self.tensor)
        generator = torch.Generator().manual_seed(seed)
        factors = [torch.randn(rank, dim, dtype=torch.float64, generator=generator) for dim in self.dims]
        return [factor.to(self.tensor.device) for factor in factors]

    def set_factor(self, mode: int, factor: Tensor) -> None:
        self.factors[mode] = factor
        if mode == 2:
            self.along = self.tensor @ factor.T

    def products(self, mode: int) -> Tensor:
        a, b, _ = self.factors
        if mode == 0:
            return (self.along * b.T).sum(1).T
        if mode == 1:
            return (self.along * a.T[:, None]).sum(0).T
        return (a[:, :, None] * b[:, None, :]).flatten(1) @ self.tensor.flatten(0, 1)

    def slice(self, i: int) -> Tensor:
        return self.tensor[i]


class _Factored:
    """Tensor in CP form. Its products reduce to those of small Gram matrices."""

    def __init__(self, factors: list[Tensor]):
        self.own = factors
        self.dims = [factor.shape[1] for factor in factors]
        self.squared_norm = _squared_norm(factors)
        self.grams = list(factors)  # [own rank, rank] each

    def start(self, rank: int, seed: int) -> list[Tensor]:
        missing = rank - len(self.own[0])
        if missing >= 0:
            return [torch.nn.functional.pad(factor, (0, 0, 0, missing)) for factor in self.own]
        if rank == self.dims[0] * self.dims[1]:
            return _exact(CP(*self.own).tensor())
        return _strongest(self.own, rank)

    def set_factor(self, mode: int, factor: Tensor) -> None:
        self.grams[mode] = self.own[mode] @ factor.T

    def products(self, mode: int) -> Tensor:
        first, second = (gram for other, gram in enumerate(self.grams) if other != mode)
        return (first * second).T @ self.own[mode]

    def slice(self, i: int) -> Tensor:
        return _slice(self.own, i)


def _exact(tensor: Tensor) -> list[Tensor]:
    exact = exact_cp(tensor)
    return [exact.a, exact.b, exact.c]


def _strongest(own: list[Tensor], rank: int) -> list[Tensor]:
    """Return the components b_r ⊗ c_r that explain most of all slices, chosen greedily, with a_r fitted to them.

    This is orthogonal matching pursuit on the Gram matrix of the components: `left` is the residual of that matrix,
    `related` the products of the residuals with the slices. A component shared by several slices counts for all of them.
    """
    a, b, c = own
    gram = (b @ b.T) * (c @ c.T)
    left, related = gram.clone(), gram @ a
    least = _NOISE * gram.diagonal()
    picked = torch.zeros(len(a), dtype=torch.bool, device=a.device)
    for _ in range(rank):
        size = left.diagonal()
        adds = size > least  # whether the component is independent of those picked
        gain = torch.where(adds, related.square().sum(1) / size.clamp_min(1e-300), 0.0).masked_fill(picked, -1.0)
        pick = int(gain.argmax())
        picked[pick] = True
        if adds[pick]:
            root = size[pick].sqrt()
            along, amount = left[:, pick] / root, related[pick] / root
            left = left - along[:, None] * along
            related = related - along[:, None] * amount
    b, c = b[picked], c[picked]
    return [_solve(gram[picked][:, picked], (gram @ a)[picked], a[picked]), b, c]


def _alternate(source: _Source, start: list[Tensor], most: int, tolerance: float) -> tuple[list[Tensor], int]:
    """Return factors (rows of b and c have norm 1, those of a the norm of the component), and the iterations run."""
    best = _moved_onto(0, start)
    for mode in range(3):
        source.set_factor(mode, best[mode])
    best_error = _squared_error(source, best)
    before, step = best, 0.0
    for turn in range(most):
        if best_error <= _NOISE:
            return best, turn
        ahead = [factor + step * (factor - old) for factor, old in zip(best, before, strict=True)]
        factors, error = _turn(source, ahead)
        if step and not error <= best_error:
            factors, error = _turn(source, best)
            step = 0.0
        if not error < best_error:  # only rounding is left
            return best, turn
        gain = 1 - math.sqrt(max(error, 0.0) / best_error)
        before, best, best_error = best, factors, error
        step = min(step * _STEP_FACTOR, _LONGEST_STEP) if step else _FIRST_STEP
        if gain < tolerance:
            return best, turn + 1
    return best, most


def _turn(source: _Source, factors: list[Tensor]) -> tuple[list[Tensor], float]:
    """Solve for each factor once; return them and the squared error, relative to the squared norm."""
    changed: tuple[int, ...] = (0, 1)
    for mode in (2, 1, 0):
        factors = _moved_onto(mode, factors)
        for other in changed:
            source.set_factor(other, factors[other])
        first, second = (factor @ factor.T for other, factor in enumerate(factors) if other != mode)
        factors[mode] = _solve(first * second, source.products(mode), factors[mode])
        changed = (mode,)
    return factors, _squared_error(source, factors)


def _solve(gram: Tensor, products: Tensor, before: Tensor) -> Tensor:
    """Return X of (gram + pull) X = products + pull · before."""
    pull = max(_PULL * float(gram.diagonal().amax()), 1e-300)
    lower, failed = torch.linalg.cholesky_ex(gram + pull * torch.eye(len(gram), dtype=gram.dtype, device=gram.device))
    return before if failed else torch.cholesky_solve(products + pull * before, lower)


def _moved_onto(mode: int, factors: list[Tensor]) -> list[Tensor]:
    """Return the same components, with their norms in one mode and unit vectors in the others."""
    lengths = [factor.norm(dim=1, keepdim=True) for factor in factors]
    units = [factor / length.clamp_min(1e-300) for factor, length in zip(factors, lengths, strict=True)]
    units[mode] = factors[mode] * lengths[mode - 1] * lengths[mode - 2]
    return units


def _squared_error(source: _Source, factors: list[Tensor]) -> float:
    """Return (‖T‖² − 2⟨T, T̂⟩ + ‖T̂‖²) / ‖T‖²: fast, and accurate to about 1e-15."""
    common = float((source.products(0) * factors[0]).sum())
    return (source.squared_norm - 2 * common + _squared_norm(factors)) / source.squared_norm


def _error(source: _Source, factors: list[Tensor]) -> float:
    """Return ‖T − T̂‖ / ‖T‖, computed slice by slice, which is accurate for small errors too."""
    squares = [float((source.slice(i) - _slice(factors, i)).square().sum()) for i in range(source.dims[0])]
    return math.sqrt(sum(squares) / source.squared_norm) if source.squared_norm > 0 else math.sqrt(sum(squares))


def _squared_norm(factors: list[Tensor]) -> float:
    a, b, c = (factor @ factor.T for factor in factors)
    return float((a * b * c).sum())


def _slice(factors: list[Tensor], i: int) -> Tensor:
    a, b, c = factors
    return (b * a[:, i, None]).T @ c


def _source(tensor: Tensor | CP) -> tuple[_Source, list[int], torch.dtype]:
    """Return the tensor in float64 with its modes sorted by dimension, their order, and the original dtype."""
    if isinstance(tensor, CP):
        factors = [tensor.a, tensor.b, tensor.c]
        if (
            len({factor.shape[:-1] for factor in factors}) > 1
            or tensor.a.ndim != 2
            or not all(map(Tensor.numel, factors))
        ):
            shapes = ", ".join(str(list(factor.shape)) for factor in factors)
            raise InvalidInput("tensor", got=shapes, expected="three factors of shape [rank, dim] and equal rank")
        _check_finite("tensor", *factors)
        order = sorted(range(3), key=lambda mode: factors[mode].shape[1])
        return _Factored([factors[mode].detach().double() for mode in order]), order, tensor.a.dtype
    dims = _dims_of(tensor)
    if tensor.ndim != 3:
        raise InvalidInput(
            "tensor", got=f"shape {list(tensor.shape)}", expected="[a, b, c]", fix="Decompose tensors one by one"
        )
    _check_finite("tensor", tensor)
    order = sorted(range(3), key=dims.__getitem__)
    return _Dense(tensor.detach().double().permute(order).contiguous()), order, tensor.dtype


def _factors_of(where: str, cp: CP, rank: int, dims: list[int], order: list[int]) -> list[Tensor]:
    """Return the factors of a CP in float64, sorted by dimension; check their shapes."""
    factors = [(cp.a, cp.b, cp.c)[mode] for mode in order]
    if any(factor.shape != (rank, dim) for factor, dim in zip(factors, dims, strict=True)):
        shapes = ", ".join(str(list(factor.shape)) for factor in (cp.a, cp.b, cp.c))
        expected = ", ".join(str([rank, dim]) for dim in _unsorted(dims, order))
        raise InvalidInput(where, got=shapes, expected=f"factors [rank, dim] of shapes {expected}")
    _check_finite(where, *factors)
    return [factor.detach().double() for factor in factors]


def _unsorted(values: Sequence[Value], order: list[int]) -> list[Value]:
    return [values[order.index(mode)] for mode in range(3)]


def _dims_of(tensor: Tensor) -> list[int]:
    if tensor.ndim < 3 or not all(tensor.shape[-3:]):
        raise InvalidInput("tensor", got=f"shape {list(tensor.shape)}", expected="a non-empty tensor […, a, b, c]")
    return list(tensor.shape[-3:])


def _check_finite(where: str, *tensors: Tensor) -> None:
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        raise InvalidInput(where, got="infinite or NaN values", expected="finite values")
