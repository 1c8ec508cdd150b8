"""Sparsity of entmax attention by level of the tree: α, weights that are exactly 0, and families that are visited."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hsa.analysis.plots import COLORS, pyplot, save_figure
from hsa.attention.hierarchical.entmax.zeros import zeros as hierarchical_zeros
from hsa.attention.multiscale.zeros import zeros as multiscale_zeros
from hsa.attention.normalizers import Entmax
from hsa.errors import InvalidInput
from hsa.models.classifier import Classifier, ModelConfig
from hsa.nn.attention import Attention, Hierarchical, Multiscale
from hsa.nn.inputs import Inputs
from hsa.nn.learned_alpha import normalizer_of
from hsa.tree.hierarchy import Hierarchy

HEADER = ("layer", "level", "α (range over heads)", "zeros", "visited")


@dataclass(frozen=True)
class LevelSparsity:
    """Sparsity of one layer in the families of one height.

    Attributes:
        layer: Number of the layer, from 1.
        level: Height of the families, from 1 (families of leaves only).
        alpha: α of every head.
        zeros: Share of the weights in these families that are exactly 0.
        visited: Share of these families, per head, that receive weight from above; None for multiscale attention, which
            does not descend the tree.
        families: Number of families.
    """

    layer: int
    level: int
    alpha: tuple[float, ...]
    zeros: float
    visited: float | None
    families: int


def has_entmax(config: ModelConfig) -> bool:
    """Return whether a model uses entmax instead of softmax."""
    entmax = getattr(config.encoder, "entmax", None)
    return entmax is not None and entmax != 1


@torch.no_grad()
def measure_sparsity(model: Classifier, batches: Iterable[Inputs]) -> tuple[LevelSparsity, ...]:
    """Measure the sparsity of every layer and level over all batches.

    Raises:
        InvalidInput: The model has no entmax attention.
    """
    watched = [(layer.attention, _Counts()) for layer in model.encoder.layers if _normalizer(layer.attention)]
    if not watched:
        raise InvalidInput("model", got="one with softmax, whose weights are never 0", expected="a model with entmax")
    hooks = [attention.register_forward_pre_hook(counts.update) for attention, counts in watched]
    was_training = model.training
    try:
        model.eval()
        for batch in batches:
            model(batch)
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)
    return tuple(
        level for layer, (attention, counts) in enumerate(watched, 1) for level in counts.levels(layer, attention)
    )


@dataclass
class _Counts:
    """Totals of one layer, by height − 1."""

    zeros: list[int] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    visited: list[int] = field(default_factory=list)
    families: list[int] = field(default_factory=list)
    heads: int = 1

    def update(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Add the counts of one call of the layer."""
        q, k, _, hierarchy, positions, *_ = inputs
        normalizer = _normalizer(module)
        assert normalizer is not None
        self.heads = q.shape[1]
        own = {"normalizer": normalizer, "positions": positions}
        if isinstance(module, Multiscale):
            selection = module.selection(q, k, hierarchy, positions)
            counted = multiscale_zeros(q, k, hierarchy, selection=selection, pooled_bias=module.pooled_bias, **own)
        else:
            assert isinstance(module, Hierarchical)
            own["include_self"] = module.include_self
            counted = hierarchical_zeros(q, k, hierarchy, **own)
            _add(self.visited, counted.visited)
        _add(self.zeros, counted.zeros)
        _add(self.entries, counted.entries)
        _add(self.families, _families(hierarchy))

    def levels(self, layer: int, attention: Attention) -> list[LevelSparsity]:
        """Return the shares of all levels."""
        normalizer = _normalizer(attention)
        assert normalizer is not None
        levels = []
        for i, families in enumerate(self.families):
            alpha = normalizer.at_height(i + 1, torch.float64).expand(self.heads)
            visited = self.visited[i] / (families * self.heads) if self.visited and families else None
            zeros = self.zeros[i] / self.entries[i] if self.entries[i] else 0.0
            levels.append(LevelSparsity(layer, i + 1, tuple(alpha.tolist()), zeros, visited, families))
        return levels


def _families(hierarchy: Hierarchy) -> list[int]:
    height = hierarchy.structure.height
    return [int((height == h).sum()) for h in range(1, int(height.max(initial=0)) + 1)]


def _add(total: list[int], more: Sequence[int]) -> None:
    total.extend([0] * (len(more) - len(total)))
    for i, number in enumerate(more):
        total[i] += number


def _normalizer(module: nn.Module) -> Entmax | None:
    if not isinstance(module, (Hierarchical, Multiscale)):
        return None
    normalizer = normalizer_of(module.alpha)
    return normalizer if isinstance(normalizer, Entmax) and not normalizer.is_softmax else None


def visited_fraction(levels: Sequence[LevelSparsity]) -> float | None:
    """Return the share of all families of these levels that are visited; None for multiscale attention."""
    known = [level for level in levels if level.visited is not None]
    total = sum(level.families for level in known)
    return sum(level.families * level.visited for level in known if level.visited) / total if total else None


def rows(levels: Sequence[LevelSparsity]) -> list[list[str]]:
    """Return the rows of a table with `HEADER`: one per level, and one for all levels of a layer."""
    table = []
    for layer in dict.fromkeys(level.layer for level in levels):
        own = [level for level in levels if level.layer == layer]
        for level in own:
            mean, low, high = statistics.fmean(level.alpha), min(level.alpha), max(level.alpha)
            spread = "" if math.isclose(low, high) else f" ({low:.3f}–{high:.3f})"
            table.append(
                [str(layer), _level(level), f"{mean:.3f}{spread}", _percent(level.zeros), _percent(level.visited)]
            )
        table.append([str(layer), "all", "", "", _percent(visited_fraction(own))])
    return table


def _level(level: LevelSparsity) -> str:
    """Format the level and its number of families.

    >>> _level(LevelSparsity(1, 2, (1.5,), 0.0, 1.0, 7))
    '2 (7 families)'
    """
    return f"{level.level} ({level.families:,} {'family' if level.families == 1 else 'families'})"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def plot_sparsity(path: Path, measured: Mapping[str, Sequence[LevelSparsity]]) -> None:
    """Plot α by level, with a line per layer and a dot per head, beside the shares of zeros and of visited families.

    Args:
        path: File to write.
        measured: Levels by model.
    """
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
    lines = [(model, layer) for model, levels in measured.items() for layer in dict.fromkeys(x.layer for x in levels)]
    for color, (model, layer) in zip(COLORS * 9, lines, strict=False):
        own = [level for level in measured[model] if level.layer == layer]
        heights = [level.level for level in own]
        name = f"layer {layer}" if len(measured) == 1 else f"{model}, layer {layer}"
        left.plot(heights, [statistics.fmean(level.alpha) for level in own], color=color, lw=1.8, label=name)
        for level in own:
            left.scatter([level.level] * len(level.alpha), level.alpha, color=color, s=9, alpha=0.6, linewidths=0)
        right.plot(heights, [level.zeros for level in own], color=color, marker="o", ms=4, lw=1.8, label=name)
        if all(level.visited is not None for level in own):
            right.plot(heights, [level.visited for level in own], color=color, ls=":", lw=1.4)
    left.axhline(1, color="#999999", lw=0.8, ls="--")
    left.axhline(2, color="#999999", lw=0.8, ls="--")
    left.set(ylim=(0.95, 2.05), ylabel="α", title="α: from softmax (1) to sparsemax (2)")
    right.set(ylim=(-0.03, 1.03), ylabel="share", title="Zeros (dotted: families visited)")
    for axes in (left, right):
        axes.set_xlabel("level (1: families of leaves)")
        axes.set_xticks(range(1, 1 + max(level.level for levels in measured.values() for level in levels)))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    if len(lines) > 1:
        figure.legend(*left.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    save_figure(figure, path)
