"""The study behind `hsa heads`: alignment of heads, weights learned from labels, and pruning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hsa.errors import InvalidInput
from hsa.research.head_kernels.gram import alignment_matrix, effective_number, linear_grams, redundancy
from hsa.research.head_kernels.heads import collect
from hsa.research.head_kernels.learning import Targets, can_halve, compare_sums, flat_mkl, scaled, target_kernel
from hsa.research.head_kernels.options import ComparisonOptions, PruningOptions
from hsa.research.head_kernels.pruning import (
    BY_CHANCE,
    BY_REDUNDANCY,
    BY_WEIGHT,
    at_random,
    lowest_weight_first,
    most_redundant_first,
    pruning_curves,
    steps,
)
from hsa.research.head_kernels.report import HeadReport, LayerHeads
from hsa.research.head_kernels.subjects import Subject

Counter = Callable[[str, int], Callable[[int], None]]
"""Called with the name and size of a task; returns a function to call with the amount of further progress."""
_MOST_BYTES = 4 * 2**30  # largest total size of the Gram matrices


def study_heads(
    subject: Subject, comparison: ComparisonOptions, pruning: PruningOptions, counter: Counter
) -> HeadReport:
    """Compare the heads of a model, learn weights for them, and measure the model with heads removed.

    Args:
        subject: Model and examples.
        comparison, pruning: Options of the study.
        counter: Called for every stage to report progress.

    Raises:
        InvalidInput: If the Gram matrices would be too large, or almost all examples have the same label.
    """
    tokens, halves, seed = comparison.tokens, comparison.halves, comparison.seed
    by_similarity = comparison.compare == "similarity"
    count, targets = len(subject.lengths), subject.targets
    total = sum(subject.heads.counts)
    rows = max(count, tokens * by_similarity)
    if total * rows**2 * 8 > _MOST_BYTES:
        most = int((_MOST_BYTES / 8 / total) ** 0.5)
        where, unit = ("limit", "examples") if rows == count else ("tokens", "tokens")
        raise InvalidInput(where, got=f"{rows:,}", expected=f"at most {most:,} {unit} for a model of {total} heads")
    everything = subject.batches(np.arange(count))
    drawn = tokens if by_similarity else 0
    seen = counter("running the model", count)
    features = collect(subject.heads, subject.answer, everything, tokens=drawn, seed=seed, watch=seen)
    shares: list[float] | None = None
    if by_similarity:
        grams, shares = features.similarity_grams()
    else:
        grams = features.output_grams()
    alignment = alignment_matrix(grams)
    redundant = redundancy(alignment)
    order = np.random.default_rng((seed, 1)).permutation(count)
    tried = np.sort(order[: min(pruning.prune_on, count // 2)])
    weights, sums, flat = None, [], None
    if targets is not None:
        rest = torch.from_numpy(np.setdiff1d(np.arange(count), tried))  # pruning by weight uses other examples
        _check_classes(targets, rest)
        outputs = linear_grams([scaled(head[rest], torch.arange(len(rest))) for head in features.outputs])
        flat = flat_mkl(outputs, target_kernel(targets.part(rest)))
        weights = flat.weights
        if can_halve(targets):
            done = counter("learning weights", halves)
            own = features.weights
            sums = compare_sums(features.outputs, targets, own=own, splits=halves, seed=seed, watch=done)
    name, curves = _prune(subject, features, alignment, flat, tried, seed, pruning, counter)
    layer_of = torch.tensor([layer for layer, _ in features.heads])
    layers = []
    for layer, heads in enumerate(subject.heads.counts):
        inside = (layer_of == layer).nonzero()[:, 0]
        layers.append(
            LayerHeads(
                layer,
                heads,
                effective_number(alignment[inside][:, inside]),
                float(redundant[inside].mean()),
                None if shares is None else float(np.mean([shares[i] for i in inside.tolist()])),
                None if weights is None else float(weights[inside].sum()),
            )
        )
    return HeadReport(
        model=subject.model,
        data=subject.data,
        examples=count,
        mean_length=float(subject.lengths.mean()),
        compare=comparison.compare,
        rows=grams.shape[-1],
        heads=features.heads,
        alignment=alignment.tolist(),
        redundancy=redundant.tolist(),
        effective=effective_number(alignment),
        layers=layers,
        weights=None if weights is None else weights.tolist(),
        sums=sums,
        sum_score="accuracy" if targets is None or targets.classes else "R²",
        score=name,
        pruned_on=len(tried),
        curves=curves,
        seed=seed,
    )


def _prune(
    subject: Subject,
    features: Any,
    alignment: Tensor,
    flat: Any,
    tried: np.ndarray,
    seed: int,
    pruning: PruningOptions,
    counter: Counter,
) -> tuple[str, list[Any]]:
    """Return the name of the score, and a curve per order of removal."""
    if not len(tried):
        return "", []
    total = len(features.heads)
    orders = {BY_REDUNDANCY: [most_redundant_first(alignment)]}
    if flat is not None:
        orders[BY_WEIGHT] = [lowest_weight_first(flat.weights, flat.slack)]
    orders[BY_CHANCE] = [at_random(total, seed + draw) for draw in range(pruning.draws)]
    batches = subject.batches(tried)
    name, score = subject.score(np.concatenate(batches), features.answers)
    points = len(steps(total, pruning.points)) * sum(map(len, orders.values()))
    done = counter("removing heads", points)
    return name, pruning_curves(
        subject.heads, features.heads, subject.answer, batches, orders, score, points=pruning.points, watch=done
    )


def _check_classes(targets: Targets, rows: Tensor) -> None:
    if len(targets.values[rows].unique(dim=0)) < 2:
        raise InvalidInput(
            "label",
            problem="almost all examples have the same class",
            expected="several examples of another class",
            fix="Raise --limit",
        )
