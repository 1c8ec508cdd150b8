"""Multiple kernel learning: sums of kernels with learned weights, global or conditional on the input.

Weights maximise the alignment of the sum with a target kernel (`target_kernel`). `compare_sums` tests them on held-out
examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hsa.errors import InvalidInput
from hsa.research.head_kernels.gram import centred, centred_alignment, input_conditional, linear_grams

_GATING = 8  # number of principal components that conditional weights depend on
_RIDGES = 10.0 ** torch.arange(-4, 3, dtype=torch.float64)  # in units of the mean eigenvalue


@dataclass(frozen=True, eq=False)
class Targets:
    """Targets of the examples: numbers, `[n, 1]`, or one-hot classes, `[n, classes]`."""

    values: Tensor
    classes: bool

    @staticmethod
    def of_classes(labels: Sequence[object] | np.ndarray) -> Targets:
        """Build targets from class labels; raise InvalidInput unless there are two distinct ones."""
        names, numbers = np.unique(np.array([str(label) for label in labels]), return_inverse=True)
        if not len(names):
            raise InvalidInput("label", problem="no labels", expected="at least 2 classes")
        if len(names) < 2:
            raise InvalidInput("label", got=f"nothing but {str(names[0])!r}", expected="at least 2 classes")
        return Targets(torch.nn.functional.one_hot(torch.from_numpy(numbers)).double(), True)

    @staticmethod
    def of_numbers(numbers: Sequence[float] | np.ndarray) -> Targets:
        """Build targets from numbers; raise InvalidInput unless they are finite and not all equal."""
        values = torch.from_numpy(np.asarray(numbers, np.float64))
        expected = "finite numbers that are not all equal"
        if not bool(torch.isfinite(values).all()):
            raise InvalidInput("label", got="infinite or NaN values", expected=expected)
        if len(values.unique()) < 2:
            raise InvalidInput("label", got="equal numbers" if len(values) else "no numbers", expected=expected)
        return Targets(values[:, None], False)

    def part(self, rows: Tensor) -> Targets:
        """Return the targets of some examples."""
        return Targets(self.values[rows], self.classes)

    def __len__(self) -> int:
        return len(self.values)


def target_kernel(targets: Targets) -> Tensor:
    """Return the ideal kernel, `[n, n]`: 1 for examples of the same class and 0 otherwise, or products of centred numbers.

    >>> target_kernel(Targets.of_classes("aba")).tolist()
    [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0]]
    """
    values = targets.values if targets.classes else targets.values - targets.values.mean()
    return values @ values.T


@dataclass(frozen=True, eq=False)
class FlatMKL:
    """Global weights of kernels.

    Attributes:
        weights: `[kernels]` Non-negative weights with sum 1.
        slack: `[kernels]` Gradient of the objective: 0 where the weight is positive, else 0 or less.
        alignment: Alignment of the weighted sum with the target.
    """

    weights: Tensor
    slack: Tensor
    alignment: float


def flat_mkl(grams: Tensor, target: Tensor) -> FlatMKL:
    """Return the weights μ ≥ 0, Σ μ = 1, with which Σ_m μ_m K^(m) aligns best with a target kernel.

        maximise A(Σ_m μ_m K^(m), T)   ⟺   minimise vᵀ M v − 2 aᵀ v,  v ≥ 0,   μ = v / Σ v
        M_kl = ⟨K_c^(k), K_c^(l)⟩,  a_k = ⟨K_c^(k), T_c⟩

    This is "alignf" of Cortes, Mohri & Rostamizadeh (2012, proposition 9). The quadratic programme is solved exactly by the
    active set method of Lawson & Hanson (1974). Of several equal kernels, one may get all the weight. If no alignment is
    positive, the best kernel gets all the weight; if all kernels are constant, weights are equal.

    Args:
        grams: `[kernels, n, n]` Gram matrices.
        target: `[n, n]` Target kernel.

    >>> one, other = torch.diag(torch.tensor([1.0, 0, 0])), torch.diag(torch.tensor([0.0, 1, 0]))
    >>> flat_mkl(torch.stack([one, other]), one + 3 * other).weights
    tensor([0.2500, 0.7500], dtype=torch.float64)
    """
    flat, wanted = centred(grams).flatten(1), centred(target).flatten()
    sizes = flat.norm(dim=1)
    alive = sizes > 1e-12 * grams.double().flatten(1).norm(dim=1)
    length = float(wanted.norm())
    if length == 0:
        raise InvalidInput("target", got="a constant kernel", expected="a kernel that distinguishes examples")
    if not bool(alive.any()):
        equal = torch.full((len(grams),), 1 / len(grams), dtype=torch.float64)
        return FlatMKL(equal, torch.zeros_like(equal), 0.0)
    # Scaling kernels to norm 1 does not change the solution, and one tolerance fits all of them.
    unit = torch.where(alive[:, None], flat / sizes.where(alive, torch.ones_like(sizes))[:, None], 0.0)
    products, towards = unit @ unit.T, unit @ (wanted / length)
    solution = _non_negative(products, towards)
    if float(solution.sum()) == 0:
        # All alignments are negative: a negative linear function divided by a norm is largest at a corner of the simplex.
        solution[int(towards.where(alive, torch.full_like(towards, -2.0)).argmax())] = 1.0
    slack = towards - products @ solution
    weights = torch.where(alive, solution / sizes.where(alive, torch.ones_like(sizes)), 0.0)
    weights = weights / weights.sum()
    return FlatMKL(weights, slack, centred_alignment((weights[:, None, None] * grams).sum(0), target))


def _non_negative(products: Tensor, towards: Tensor) -> Tensor:
    """Return v ≥ 0 that minimises vᵀ products v − 2 towardsᵀ v; the diagonal of `products` is 1, or 0 for unused kernels."""
    tolerance = 1e-12
    v = torch.zeros_like(towards)
    free = torch.zeros(len(v), dtype=torch.bool)
    for _ in range(10 * len(v) + 10):
        rise = (towards - products @ v).masked_fill(free, -torch.inf)
        best = int(rise.argmax())
        if rise[best] <= tolerance:
            return v
        free[best] = True
        while True:
            active = free.nonzero()[:, 0]
            normal = products[active][:, active]
            solved = torch.linalg.lstsq(normal, towards[active, None], driver="gelsd").solution[:, 0]
            if bool((solved > 0).all()):
                v = torch.zeros_like(v)
                v[active] = solved
                break
            # Move towards the solution until a weight reaches 0, and fix that weight at 0.
            here, down = v[active], solved <= 0
            step = (here[down] / (here[down] - solved[down]).clamp(min=1e-300)).min()
            v[active] = (here + step * (solved - here)).clamp(min=0)
            free[active[(v[active] <= tolerance) & down]] = False
            v[~free] = 0
            if not bool(free.any()):
                break
    return v


@dataclass(frozen=True, eq=False)
class Gating:
    """Weights of kernels that depend on the example: β_i = softmax(W z_i + b).

    Attributes:
        linear: `[kernels, channels]` Matrix W.
        bias: `[kernels]` Bias b.
        steps: Number of optimisation steps.
    """

    linear: Tensor
    bias: Tensor
    steps: int

    def weights(self, z: Tensor) -> Tensor:
        """Return the weights `[n, kernels]` of examples with features `[n, channels]`."""
        return (z @ self.linear.T + self.bias).softmax(-1)


def fit_gating(grams: Tensor, target: Tensor, z: Tensor, start: Tensor, *, steps: int = 100, seed: int = 0) -> Gating:
    """Fit input-dependent weights β to a target kernel (localised multiple kernel learning).

        maximise A(Σ_m β_im β_jm K^(m)_ij, T),   β_i = softmax(W z_i + b)

    The gating is that of Gönen & Alpaydın (2008, "Localized multiple kernel learning", ICML). It starts from global weights
    and follows gradients of the alignment on two thirds of the examples; the step that is best on the rest is kept.

    Args:
        grams: `[kernels, n, n]` Gram matrices.
        target: `[n, n]` Target kernel.
        z: `[n, channels]` Features that weights depend on.
        start: `[kernels]` Global weights with sum 1.
        steps: Maximum number of steps.
        seed: Seed of the split.

    Raises:
        InvalidInput: If there are fewer than 9 examples.
    """
    n = len(z)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(n))
    fit, held = order[: n - n // 3], order[n - n // 3 :]
    if len(held) < 3:
        raise InvalidInput("z", got=n, expected="at least 9 examples, to hold out a third")
    parts = [
        (grams[:, rows][:, :, rows].double(), target[rows][:, rows].double(), z[rows].double()) for rows in (fit, held)
    ]
    # The kernel of a pair has β twice, hence the root; weights of exactly 0 could never grow, hence the offset.
    bias = (0.5 * (start.double() + 0.01 / len(start)).log()).requires_grad_()
    linear = torch.zeros(len(start), z.shape[1], dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.AdamW([linear, bias], lr=0.05, weight_decay=0.01)

    def alignment(part: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        kernels, wanted, features = part
        beta = (features @ linear.T + bias).softmax(-1).T
        gram = centred((kernels * beta[:, :, None] * beta[:, None, :]).sum(0))
        goal = centred(wanted)
        return (gram * goal).sum() / (gram.norm() * goal.norm()).clamp(min=1e-300)

    best, kept = -np.inf, Gating(linear.detach().clone(), bias.detach().clone(), 0)
    for step in range(steps + 1):
        with torch.no_grad():
            reached = float(alignment(parts[1]))
        if reached > best + 1e-9:
            best, kept = reached, Gating(linear.detach().clone(), bias.detach().clone(), step)
        if step == steps or step > kept.steps + 20:
            break
        optimiser.zero_grad()
        (-alignment(parts[0])).backward()
        optimiser.step()
    return kept


@dataclass(frozen=True)
class Sum:
    """Quality of a weighted sum of kernels, a number per split."""

    name: str
    learned: list[float]  # alignment on the examples that weights were learned from
    held: list[float]  # alignment on held-out examples
    score: list[float]  # accuracy or R² of ridge regression on held-out examples


UNIFORM, SINGLE, FLAT, CONDITIONAL, OWN = (
    "equal weights",
    "best single head",
    "flat MKL",
    "input-conditional",
    "the model's own weighting",
)


def compare_sums(
    features: Sequence[Tensor],
    targets: Targets,
    *,
    own: Tensor | None = None,
    splits: int = 3,
    seed: int = 0,
    watch: Callable[[int], None] | None = None,
) -> list[Sum]:
    """Compare weightings of the linear kernels of heads: learn weights on one half of the examples, test on the other.

    Features of every head are shifted and scaled to mean 0 and mean square 1 on the first half. Conditional weights depend
    on the first principal components of all features.

    Args:
        features: `[n, channels]` Features of each head.
        targets: Targets of the n examples.
        own: `[n, heads]` Weights that the model itself gives its heads on each example, or None.
        splits: Number of random splits, with all classes in both halves.
        seed: Seed of the splits.
        watch: Called with 1 after each split.

    Raises:
        InvalidInput: If there are too few examples, or too few of a class, to split.
    """
    sums: dict[str, Sum] = {}
    for split in range(splits):
        learn, hold = halves(targets, seed + split)
        rows = [scaled(head, learn) for head in features]
        grams, wanted = linear_grams(rows), target_kernel(targets)
        known = grams[:, learn][:, :, learn], wanted[learn][:, learn]
        flat = flat_mkl(*known)
        alone = torch.stack([torch.tensor(centred_alignment(gram, known[1])) for gram in known[0]])
        z = _components(torch.cat(rows, 1), learn)
        gating = fit_gating(*known, z[learn], flat.weights, seed=seed + split)
        weightings = {
            UNIFORM: torch.full((len(grams),), 1 / len(grams), dtype=torch.float64).sqrt().expand(len(targets), -1),
            SINGLE: torch.nn.functional.one_hot(alone.argmax(), len(grams)).double().expand(len(targets), -1),
            FLAT: flat.weights.sqrt().expand(len(targets), -1),
            CONDITIONAL: gating.weights(z),
        }
        if own is not None:
            weightings[OWN] = own.double()
        for name, beta in weightings.items():
            gram = input_conditional(grams, beta)
            entry = sums.setdefault(name, Sum(name, [], [], []))
            entry.learned.append(centred_alignment(gram[learn][:, learn], known[1]))
            entry.held.append(centred_alignment(gram[hold][:, hold], wanted[hold][:, hold]))
            entry.score.append(ridge_score(gram, targets, learn, hold))
        if watch is not None:
            watch(1)
    return list(sums.values())


def halves(targets: Targets, seed: int) -> tuple[Tensor, Tensor]:
    """Return the rows of two random halves, with every class split evenly.

    Raises:
        InvalidInput: If there are fewer than 18 examples, or fewer than two classes have 2 examples.
    """
    if not can_halve(targets):
        got = f"{len(targets)} examples" if len(targets) < 18 else "almost all examples of one class"
        expected = "at least 18 examples, and at least 2 of each of two classes"
        raise InvalidInput("label", got=got, expected=expected)
    generator = np.random.default_rng(seed)
    groups = _groups(targets)
    both: tuple[list[Tensor], list[Tensor]] = ([], [])
    for i, group in enumerate(groups.unique()):
        members = (groups == group).nonzero()[:, 0]
        members = members[torch.from_numpy(generator.permutation(len(members)))]
        middle = (len(members) + i % 2) // 2
        both[0].append(members[:middle])
        both[1].append(members[middle:])
    learn, hold = (torch.cat(part).sort().values for part in both)
    return learn, hold


def can_halve(targets: Targets) -> bool:
    """Return whether there are enough examples to split: 18, with 2 of each of two classes."""
    sizes = torch.bincount(_groups(targets))
    return len(targets) >= 18 and (not targets.classes or int((sizes >= 2).sum()) >= 2)


def _groups(targets: Targets) -> Tensor:
    return targets.values.argmax(1) if targets.classes else torch.zeros(len(targets), dtype=torch.int64)


def ridge_score(gram: Tensor, targets: Targets, learn: Tensor, hold: Tensor) -> float:
    """Fit kernel ridge regression to some rows and return its score on others: accuracy for classes, R² for numbers.

    The ridge is chosen by the leave-one-out error on the first rows.

    Args:
        gram: `[n, n]` Positive semi-definite kernel of all rows.
        targets: Targets of all rows.
        learn, hold: Rows to fit and to test.
    """
    inside, across = gram[learn][:, learn], gram[hold][:, learn]
    across = across - across.mean(1, keepdim=True) - inside.mean(0) + inside.mean()  # centred by the fitted rows
    y = targets.values[learn]
    mean = y.mean(0)
    values, vectors = torch.linalg.eigh(centred(inside))
    values = values.clamp(min=0)
    size = float(values.mean())
    predicted = mean.expand(len(hold), -1)
    if size > 0:
        ridges = (_RIDGES * size).tolist()
        best = min(ridges, key=lambda ridge: float(leave_one_out(values, vectors, y, ridge).square().sum()))
        predicted = mean + across @ (vectors @ (vectors.T @ (y - mean) / (values + best)[:, None]))
    true = targets.values[hold]
    if targets.classes:
        return float((predicted.argmax(1) == true.argmax(1)).double().mean())
    return float(1 - (predicted - true).square().sum() / (true - true.mean(0)).square().sum())


def leave_one_out(values: Tensor, vectors: Tensor, y: Tensor, ridge: float) -> Tensor:
    """Return the error on each row of ridge regression with an intercept, fitted to all other rows, `[n, outputs]`.

        (y_i − f(x_i)) / (1 − H_ii),   H = 1/n + K_c (K_c + λI)⁻¹

    Args:
        values, vectors: Eigenvalues and eigenvectors of the centred kernel K_c.
        y: `[n, outputs]` Targets.
        ridge: Ridge λ.
    """
    left = ridge / (values + ridge)
    residual = vectors @ (left[:, None] * (vectors.T @ (y - y.mean(0))))
    # The intercept fits the constant direction, whose eigenvalue is 0, exactly.
    return residual / (vectors.square() @ left - 1 / len(y)).clamp(min=1e-12)[:, None]


def scaled(features: Tensor, known: Tensor) -> Tensor:
    """Scale features to mean 0 and mean square 1 on the known rows, so that weights of heads are comparable.

    Constant features become 0.
    """
    features = features.double()
    shifted = features - features[known].mean(0)
    size = shifted[known].square().sum(1).mean().sqrt()
    return shifted / size if size > 1e-9 * (1 + features.abs().max()) else torch.zeros_like(shifted)


def _components(features: Tensor, known: Tensor) -> Tensor:
    """Project all rows on the first principal components of the known rows, `[n, components]`, with mean square 1."""
    _, sizes, directions = torch.linalg.svd(features[known], full_matrices=False)
    count = min(_GATING, int((sizes > 1e-9 * sizes[0]).sum())) if len(sizes) else 0
    z = features @ directions[:count].T
    return z / z[known].square().mean(0).sqrt().clamp(min=1e-12)
