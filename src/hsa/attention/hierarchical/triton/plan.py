"""The plan of the kernels' sweeps: runs of families, level by level.

A run is one family, or several small ones that share its rows. Runs are padded to one of a few sizes; the runs of one size
and level are a *job*, which is one launch. The levels near the roots, where a tree has few rows, are bundled: one program
processes all of these levels of a bundle of whole trees.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hsa.attention.kernels.levels import Levels, families, levels
from hsa.tree.hierarchy import Hierarchy

SIZES = (16, 32, 64, 128)
FAMILIES_PER_RUN = 16
COST = {16: 1.0, 32: 1.0, 64: 1.1, 128: 1.6}
"""Time per row of runs of each size, relative to full runs of 16 rows."""
SHARED_COST = 2.2
"""Factor of the time of runs that several families share, which take longer to pool."""
SHARED_COST_IN_TOP = 1.3
"""The same for the levels near the roots, where latencies count, not the number of programs."""
SMALLEST_JOB = 1 / 16
"""Share of a level's rows below which runs are padded to the next size instead of getting their own launch."""
TOP_ROWS = 64
"""Rows of a tree up to which one program processes all further levels faster than a launch per level would."""
BUNDLE = 32
"""Rows per bundle of trees."""


@dataclass(frozen=True)
class Job:
    """Launch for the runs of one size: runs `first` to `first + count − 1`."""

    size: int
    single: bool  # whether every run is one family
    full: bool  # whether every run has `size` rows and run i begins at row i · size
    first: int
    count: int


@dataclass(frozen=True)
class Level:
    """Rows and jobs of one level."""

    begin: int  # first row; rows above the leaves are numbered from 0
    end: int
    jobs: tuple[Job, ...]


@dataclass(frozen=True)
class Layout:
    """Part of the plan that the host reads."""

    leaves: int
    above: int  # rows above the leaves
    root: int  # first row of the last level
    runs: int
    top_size: int
    top_single: bool
    top_levels: int
    bundles: int
    levels: tuple[Level, ...]  # below the top, leaves first

    def integers(self) -> list[int]:
        """Return the layout as a list of integers, which can be an argument of a custom operator; `Layout.read` reads it."""
        flat = [self.leaves, self.above, self.root, self.runs]
        flat += [self.top_size, self.top_single, self.top_levels, self.bundles]
        for level in self.levels:
            flat += [level.begin, level.end, len(level.jobs)]
            for job in level.jobs:
                flat += [job.size, job.single, job.full, job.first, job.count]
        return flat

    @staticmethod
    def read(flat: list[int]) -> Layout:
        at, levels = 8, []
        while at < len(flat):
            begin, end, jobs = flat[at : at + 3]
            at += 3
            read = []
            for _ in range(jobs):
                size, single, full, first, count = flat[at : at + 5]
                read.append(Job(size, bool(single), bool(full), first, count))
                at += 5
            levels.append(Level(begin, end, tuple(read)))
        leaves, above, root, runs, size, single, top_levels, bundles = flat[:8]
        return Layout(leaves, above, root, runs, size, bool(single), top_levels, bundles, tuple(levels))


@dataclass(frozen=True, eq=False)
class Tiles:
    """Plan of a forest."""

    table: Tensor
    """Concatenated int32 arrays: parent of every row; number of leaves below it; first row of every run; row after its last;
    first run of every bundle, `[top levels, bundles + 1]`."""
    node: Tensor  # [rows] node that each row stands for
    layout: list[int]


def tiles(hierarchy: Hierarchy, largest: int = SIZES[-1]) -> Tiles:
    """Return the plan of a rooted forest, built once. `why_not_tiles` must be empty for the forest.

    Args:
        largest: Largest size of runs.
    """
    return hierarchy.cached(("tiles", largest), lambda: _build(hierarchy, largest))


def _build(hierarchy: Hierarchy, largest: int) -> Tiles:
    plan = levels(hierarchy)
    assert plan is not None
    num_leaves, top_level = plan.num_leaves, _first_level_of_top(plan, hierarchy.num_trees)
    begins: list[np.ndarray] = []
    ends: list[np.ndarray] = []
    level_plans, number = [], 0
    for level in range(top_level):
        row = plan.bounds[level] - (num_leaves if level else 0)
        jobs = []
        for size, single, begin, end in _jobs(families(plan, level), largest):
            full = level == 0 and bool((begin == np.arange(len(begin)) * size).all() and (end - begin == size).all())
            jobs.append(Job(size, single, full, number, len(begin)))
            begins.append(row + begin)
            ends.append(row + end)
            number += len(begin)
        level_plans.append(Level(row, row + plan.bounds[level + 1] - plan.bounds[level], tuple(jobs)))
    top_size, top_single, bundles = _top(plan, top_level, number, begins, ends)
    begin, end = np.concatenate(begins), np.concatenate(ends)
    layout = Layout(
        leaves=num_leaves,
        above=plan.num_rows - num_leaves,
        root=plan.bounds[-2] - num_leaves,
        runs=len(begin),
        top_size=top_size,
        top_single=top_single,
        top_levels=len(bundles),
        bundles=bundles.shape[1] - 1,
        levels=tuple(level_plans),
    )
    parent = np.where(plan.parent < 0, -1, plan.parent - num_leaves)
    table = np.concatenate([parent, plan.leaf_count, begin, end, bundles.ravel()]).astype(np.int32)
    device = plan.device
    return Tiles(torch.from_numpy(table).to(device), torch.from_numpy(plan.node).to(device), layout.integers())


def _first_level_of_top(plan: Levels, num_trees: int) -> int:
    """Return the first level above the leaves at which every tree has at most `TOP_ROWS` rows."""
    for level in range(1, plan.num_levels):
        if _rows_per_tree(plan, level, num_trees).max() <= TOP_ROWS:
            return level
    return plan.num_levels


def _rows_per_tree(plan: Levels, level: int, num_trees: int) -> np.ndarray:
    """Return the number of rows of a level in every tree, `[trees]`."""
    roots = plan.first_leaf[plan.bounds[-2] :]
    first = plan.first_leaf[plan.bounds[level] : plan.bounds[level + 1]]
    return np.diff(np.searchsorted(first, np.append(roots, plan.num_leaves)))


def _top(
    plan: Levels, top_level: int, number: int, begins: list[np.ndarray], ends: list[np.ndarray]
) -> tuple[int, bool, np.ndarray]:
    """Return the size of the runs of the top levels, whether all are single families, and the first run of each bundle.

    Bundles are whole trees; their first runs are `[levels, bundles + 1]`. The runs are appended to `begins` and `ends`.
    """
    roots = plan.first_leaf[plan.bounds[-2] :]
    if top_level == plan.num_levels:  # no level left: one row per tree
        return SIZES[0], True, np.empty((0, 1), np.int64)
    per_tree = _rows_per_tree(plan, top_level, len(roots))
    trees = _pack(np.concatenate([[0], np.cumsum(per_tree)]), BUNDLE, len(roots))
    leaf_bounds = np.append(roots, plan.num_leaves)[trees]
    in_top = [families(plan, level) for level in range(top_level, plan.num_levels)]
    size = next(size for size in SIZES if size >= max(int(np.diff(bounds).max()) for bounds in in_top))
    sizes = np.diff(in_top[0])
    runs = len(_pack(in_top[0], size, FAMILIES_PER_RUN)) - 1
    most = 1 if runs * SHARED_COST_IN_TOP > len(sizes) else FAMILIES_PER_RUN
    bundles = []
    for level, bounds in zip(range(top_level, plan.num_levels), in_top, strict=True):
        of_parent = plan.first_leaf[plan.bounds[level + 1] : plan.bounds[level + 2]]
        last = np.searchsorted(of_parent, leaf_bounds)  # families of each bundle
        packed = _pack(bounds, size, most, last)
        row = plan.bounds[level] - plan.num_leaves
        begins.append(row + bounds[packed[:-1]])
        ends.append(row + bounds[packed[1:]])
        bundles.append(number + np.searchsorted(packed, last))
        number += len(packed) - 1
    return size, most == 1, np.array(bundles)


def _jobs(bounds: np.ndarray, largest: int) -> list[tuple[int, bool, np.ndarray, np.ndarray]]:
    """Return for each size of runs: the size, whether all runs are single families, their first rows and their ends.

    Args:
        bounds: Bounds of the families.
        largest: Largest size of runs.
    """
    return min((_runs(bounds, size) for size in (0, *SIZES) if size <= largest), key=_cost)


def _runs(bounds: np.ndarray, size: int) -> list[tuple[int, bool, np.ndarray, np.ndarray]]:
    """Return the jobs if families share runs of up to `size` rows."""
    packed = _pack(bounds, size, FAMILIES_PER_RUN)
    begin, end, number = bounds[packed[:-1]], bounds[packed[1:]], np.diff(packed)
    sizes = np.array(SIZES)[np.searchsorted(SIZES, end - begin)]
    rows = end - begin
    for small, large in pairwise(np.unique(sizes)):
        if rows[sizes == small].sum() < SMALLEST_JOB * rows.sum():
            sizes[sizes == small] = large
    return [
        (int(size), bool((number[sizes == size] == 1).all()), begin[sizes == size], end[sizes == size])
        for size in np.unique(sizes)
    ]


def _cost(jobs: list[tuple[int, bool, np.ndarray, np.ndarray]]) -> float:
    return sum(len(begin) * size * COST[size] * (1.0 if single else SHARED_COST) for size, single, begin, _ in jobs)


def _pack(bounds: np.ndarray, size: int, most: int, ends: np.ndarray | None = None) -> np.ndarray:
    """Pack consecutive families into few runs of up to `size` rows and `most` families; return the first family of each run.

    A larger family is a run by itself. No run crosses one of the `ends`. The last entry is the number of families.

    >>> _pack(np.array([0, 5, 9, 20, 30]), 16, 16).tolist()  # families 0 and 1, then 2, then 3
    [0, 2, 3, 4]
    """
    number = len(bounds) - 1
    reach = np.searchsorted(bounds, bounds[:-1] + size, side="right") - 1
    reach = np.clip(reach, np.arange(number) + 1, np.arange(number) + most)
    if ends is not None:
        reach = np.minimum(reach, ends[np.searchsorted(ends, np.arange(number), side="right")])
    step = int(reach[0]) if number else 1
    if ends is None and (reach == np.minimum(np.arange(number) + step, number)).all():  # equal numbers of families
        return np.append(np.arange(0, number, step), number)
    jump, runs, family = reach.tolist(), [], 0
    while family < number:
        runs.append(family)
        family = jump[family]
    return np.array([*runs, number])
