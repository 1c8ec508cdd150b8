"""Backend "triton" of hierarchical attention: the sweeps as two custom operators, forward and backward.

If N·d is the size of q, memory traffic is about 6·N·d forward (q, k and v are read, y is written and read, the output is
written) and 9·N·d backward. Gradients are deterministic: every sum is computed by one program in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from hsa.attention.call import needs_gradient
from hsa.attention.derivatives import first_order
from hsa.attention.hierarchical.call import HierarchicalCall
from hsa.attention.hierarchical.entmax.inside import inside_weights
from hsa.attention.hierarchical.entmax.triton.family import ANY
from hsa.attention.hierarchical.triton import sweeps
from hsa.attention.hierarchical.triton.plan import Job, Layout, Level, tiles
from hsa.attention.hierarchical.why_not import largest_run
from hsa.attention.kernels.available import padded
from hsa.attention.kernels.levels import levels
from hsa.attention.kernels.triton.launch import Launcher, Operator, compiled_for, last_stride_1
from hsa.attention.kernels.triton.overlap import overlap, turns
from hsa.attention.kernels.triton.recording import Recording, Replay, constant, empty
from hsa.attention.normalizers import Entmax
from hsa.attention.rounds import rooted
from hsa.tree.hierarchy import Hierarchy

GROUPS = {16: 2, 32: 2, 64: 1, 128: 1}
"""Number of runs per program, by their size: a warp processes a small run, all warps share a large one."""
NARROW = 128
"""Bytes per row of q, k or v for which these numbers are meant."""
WARPS = {16: 2, 32: 2, 64: 4, 128: 8}
REGISTERS = {"up": (64,), "d_up": (32, 64), "top": (16, 32, 64), "d_top": (16, 32, 64)}
"""Sizes of runs for which a kernel gets at most `MOST_REGISTERS`, so that more programs share a multiprocessor."""
MOST_REGISTERS = 128
ROWS = 32
"""Rows per program of the down sweep."""
POWERS = {1.5: 2, 2.0: 1}
"""1 / (α − 1) for the α that have specialised kernels; other α are slower."""

_up, _down, _top = Launcher(sweeps.up), Launcher(sweeps.down), Launcher(sweeps.top)
_d_up, _d_down, _d_top = Launcher(sweeps.d_up), Launcher(sweeps.d_down), Launcher(sweeps.d_top)


def attend(call: HierarchicalCall) -> Tensor:
    """Run `hsa.hierarchical_attention`."""
    forest, positions = rooted(call.hierarchy, call.positions)
    plan = tiles(forest, largest_run(call.q, call.v, positions))
    if positions is not None:
        positions = positions.index_select(0, plan.node)
    power, powers = (0, None) if call.entmax is None else _powers(call.entmax, forest, call.q)
    keep = needs_gradient(call.q, call.k, call.v, positions, powers)
    rows = [last_stride_1(x) for x in (call.q, call.k, call.v)]
    options = call.include_self, call.causal, call.scale, keep
    weighted = call.entmax is None or call.entmax.counts == "weighted"
    inside = None if call.entmax is None else inside_weights(forest, weighted, call.include_self, call.causal)
    arguments = (positions, powers, plan.table, plan.layout, *options, inside, power, weighted)
    if not call.is_repeatable or any(x is not y for x, y in zip(rows, (call.q, call.k, call.v), strict=True)):
        return forward(*rows, *arguments)[0]
    with Recording(*rows) as recording:
        results = forward(*rows, *arguments)
    if recording.launches:
        run = (
            RepeatWithGradients(recording.replay(results), arguments) if keep else Repeat(recording.replay(results[:1]))
        )
        call.keep(run, keep)
    return results[0]


class Repeat:
    """A call whose launches were recorded, for other tensors of the same layout."""

    def __init__(self, replay: Replay):
        self.replay = replay

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.replay(q, k, v)[0]


class RepeatWithGradients:
    """A call that needs gradients. Their launches are recorded when they are first computed.

    Args:
        replay: Replay of the forward pass, which also returns what gradients need.
        arguments: Arguments of `_forward` after q, k and v.
    """

    def __init__(self, replay: Replay, arguments: tuple[Any, ...]):
        self.replay, self.arguments = replay, arguments
        self.gradients: dict[Any, Replay] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Repeated.apply(q, k, v, self)


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, run: RepeatWithGradients) -> Tensor:
        out, *kept = run.replay(q, k, v)
        ctx.run = run
        ctx.save_for_backward(q, k, v, *kept)
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, d_out: Tensor | None) -> tuple[Tensor | None, ...]:
        if d_out is None:
            return (None,) * 4
        d_out, run = last_stride_1(d_out), ctx.run
        saved = ctx.saved_tensors
        key = d_out.stride(), d_out.data_ptr() % 16 == 0
        if key not in run.gradients:
            q, k, v, *kept = saved
            positions, powers, table, layout, include_self, causal, scale, _, *entmax = run.arguments
            with Recording(d_out, *saved) as recording:
                results = _backward(
                    d_out, q, k, v, positions, powers, table, layout, include_self, causal, scale, kept, *entmax
                )
            run.gradients[key] = recording.replay(results[:3])
            return *results[:3], None
        return *run.gradients[key](d_out, *saved), None


def _powers(entmax: Entmax, forest: Hierarchy, q: Tensor) -> tuple[int, Tensor | None]:
    """Return 1 / (α − 1) as a compile-time constant and None, or `ANY` and the values `[levels, heads]`."""
    plan, heads, alpha = levels(forest), q.shape[1], entmax.alpha
    assert plan is not None
    if isinstance(alpha, Tensor):
        by_height = entmax.by_height(plan.num_levels, q.new_empty(0, dtype=torch.float32))
        return ANY.value, (1 / (by_height - 1)).expand(-1, heads).contiguous()
    if alpha in POWERS:
        return POWERS[float(alpha)], None
    return ANY.value, q.new_full((plan.num_levels, heads), 1 / (alpha - 1), dtype=torch.float32)


class _Launch:
    """Arguments and compile-time constants that all launches of one call share."""

    def __init__(
        self,
        q: Tensor,
        v: Tensor,
        positions: Tensor | None,
        powers: Tensor | None,
        table: Tensor,
        layout: list[int],
        inside: Tensor | None,
        power: int,
        weighted: bool,
    ):
        self.layout = o = Layout.read(layout)
        rows = [o.leaves, o.above]
        sections = constant(table).split([*rows, *rows, o.runs, o.runs, o.top_levels * (o.bundles + 1)])
        self.parent, self.up_parent, self.count, self.up_count, self.begin, self.end, self.bundles = sections
        self.heads, dim, value_dim = q.shape[1], q.shape[2], v.shape[2]
        position_dim = 0 if positions is None else positions.shape[2]
        self.positions = q if positions is None else positions  # not read without positions
        self.up_positions = q if positions is None else positions[o.leaves :]
        self.position_strides = (
            (0, 0) if positions is None else (positions.stride(0), positions.stride(1) * (positions.shape[1] > 1))
        )
        # The fast products are exact enough for half precision; float32 needs products in full precision.
        precision = "ieee" if q.dtype == torch.float32 else "tf32"
        self.inside = table if inside is None else inside  # not read without entmax
        self.any_powers = powers
        self.values = {"DV": value_dim, "BLOCK_DV": padded(value_dim), "POWER": power}
        self.widths = {
            "D": dim, "P": position_dim, "BLOCK_D": padded(dim), "BLOCK_P": padded(position_dim), "PRECISION": precision,
            "WEIGHTED": weighted, **self.values,
        }  # fmt: skip
        self.overlap = overlap(q.device)
        self.row_bytes = q.element_size() * max(padded(dim), padded(value_dim), padded(position_dim))

    def runs(self, kernel: str, size: int) -> dict[str, int]:
        """Return the constants and launch options of a kernel for runs of some size."""
        is_limited = self.row_bytes <= NARROW and size in REGISTERS.get(kernel, ())
        limit = {"maxnreg": MOST_REGISTERS} if is_limited else {}
        return {"GROUPS": self.groups(size), "SIZE": size, "num_warps": WARPS[size], **limit, **self.overlap}

    def groups(self, size: int) -> int:
        """Return the runs per program; fewer for wide rows: tiles of q, k and v must fit the shared memory."""
        return max(1, GROUPS[size] * NARROW // max(NARROW, self.row_bytes))

    def grid(self, job: Job) -> int:
        return triton.cdiv(job.count, self.groups(job.size)) * self.heads

    def job(self, job: Job) -> tuple[Tensor, Tensor]:
        """Return the first rows and the ends of the job's runs."""
        return self.begin[job.first :], self.end[job.first :]

    def powers(self, level: int) -> Tensor:
        """Return 1 / (α − 1) of the levels from this one up."""
        return self.count if self.any_powers is None else self.any_powers[level:]  # not read if α is a constant

    def jobs(self, kernel: str, level: Level) -> list[tuple[Job, dict[str, int]]]:
        """Return the jobs of a level, large runs first, with their constants. They need nothing of each other."""
        jobs = level.jobs[::-1]
        return [
            (job, {"SINGLE": job.single, "FULL": job.full, "TURN": turn, **self.runs(kernel, job.size)})
            for job, turn in zip(jobs, turns(len(jobs)), strict=True)
        ]


def _split(pooled: Tensor, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split one buffer into queries, keys and values [rows, heads, dim] of the rows above the leaves."""
    heads, dim, value_dim = q.shape[1], q.shape[2], v.shape[2]
    rows = pooled.numel() // (heads * (2 * dim + value_dim))
    both, values = pooled.split([2 * rows * heads * dim, rows * heads * value_dim])
    queries, keys = both.view(2, rows, heads, dim).unbind(0)
    return queries, keys, values.view(rows, heads, value_dim)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor | None,
    powers: Tensor | None,
    table: Tensor,
    layout: list[int],
    include_self: bool,
    causal: bool,
    scale: float,
    keep: bool,
    inside: Tensor | None = None,
    power: int = 0,
    weighted: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the output and the tensors that the gradient needs.

    These are y of the leaves (empty unless `keep`), y of the rows between leaves and roots, pooled q, k and v and the inner
    masses of all rows above the leaves, and the outer masses and weights of the rows between leaves and roots.

    Args:
        powers: 1 / (α − 1) of entmax, `[levels, heads]`, if `power` is `ANY`.
        keep: Whether a gradient is needed.
        inside: Weight of the inside of each row above the leaves, for entmax; 0 if there is none.
        power: 1 / (α − 1) as a compile-time constant; 0 for softmax.
        weighted: Whether leaf counts are weights of entmax; otherwise their logarithms are added to the logits.
    """
    results = _empty_results(q, k, v, positions, powers, table, layout, include_self, causal, scale, keep)
    out, y, up_y, pooled, inner, shares = results
    if len(q) == 0:
        return out, y, up_y, pooled, inner, shares
    up_q, up_k, up_v = _split(pooled, q, v)
    o = _Launch(q, v, positions, powers, table, layout, inside, power, weighted)
    outer, weight = shares.unbind(0)
    up_out = empty(up_y, *up_y.shape, dtype=torch.float32)
    leaf_y = y if keep else out  # overwritten by the output unless the gradient needs it
    flags = {"INCLUDE_SELF": include_self, "CAUSAL": causal, **o.widths}
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    up_strides = (*up_q.stride()[:2], *up_k.stride()[:2], *up_v.stride()[:2])
    plane = up_q.numel()
    leaves, *above = o.layout.levels
    rows = q, k, v, o.positions, o.up_positions, up_q, up_k, up_v
    key = compiled_for(*rows, *strides, *up_strides, *o.position_strides, plane, o.heads)
    for job, constants in o.jobs("up", leaves):
        _up(
            key,
            o.grid(job),
            (q, k, v, *strides, o.positions, *o.position_strides, leaf_y, outer, inner, up_q, plane, o.parent,
             o.count, o.up_count, o.inside, o.powers(0), *o.job(job), job.count, o.heads, scale),
            {"LEAVES": True, **flags, **constants},
        )  # fmt: skip
    for height, level in enumerate(above, 1):
        for job, constants in o.jobs("up", level):
            _up(
                key,
                o.grid(job),
                (up_q, up_k, up_v, *up_strides, o.up_positions, *o.position_strides, up_y, outer, inner,
                 up_q, plane, o.up_parent, o.up_count, o.up_count, o.inside, o.powers(height), *o.job(job), job.count,
                 o.heads, scale),
                {"LEAVES": False, **flags, **constants},
            )  # fmt: skip
    if o.layout.top_levels:
        _top(
            key,
            o.layout.bundles * o.heads,
            (up_q, up_k, up_v, o.up_positions, *o.position_strides, up_y, outer, inner, weight, up_out, plane,
             o.up_parent, o.up_count, o.inside, o.powers(len(o.layout.levels)), o.begin, o.end, o.bundles,
             o.layout.bundles, o.layout.top_levels, o.layout.root, o.heads, scale),
            {"ROWS": ROWS, "SINGLE": o.layout.top_single, **flags, **o.runs("top", o.layout.top_size)},
        )  # fmt: skip
    for level in reversed(above):
        _down(
            key,
            triton.cdiv(level.end - level.begin, ROWS) * o.heads,
            (up_y, outer, inner, weight, up_out, up_out, o.up_parent, level.begin, level.end,
             o.layout.root, o.heads),
            {"LEAVES": False, "ROWS": ROWS, **o.values, **o.overlap},
        )  # fmt: skip
    _down(
        key,
        triton.cdiv(leaves.end, ROWS) * o.heads,
        (leaf_y, outer, inner, weight, out, up_out, o.parent, 0, leaves.end, o.layout.root, o.heads),
        {"LEAVES": True, "ROWS": ROWS, **o.values, **o.overlap},
    )  # fmt: skip
    return out, y, up_y, pooled, inner, shares


def _empty_results(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor | None,
    powers: Tensor | None,
    table: Tensor,
    layout: list[int],
    include_self: bool,
    causal: bool,
    scale: float,
    keep: bool,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    leaves, above, root, heads = *layout[:3], q.shape[1]
    return (
        empty(v, leaves, heads, v.shape[2]),
        empty(v, leaves if keep else 0, heads, v.shape[2]),
        empty(v, root, heads, v.shape[2]),
        empty(q, above * heads * (2 * q.shape[2] + v.shape[2])),
        empty(q, above, heads, dtype=torch.float32),
        empty(q, 2, root, heads, dtype=torch.float32),
    )


def _backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor | None,
    powers: Tensor | None,
    table: Tensor,
    layout: list[int],
    include_self: bool,
    causal: bool,
    scale: float,
    kept: list[Tensor],
    inside: Tensor | None = None,
    power: int = 0,
    weighted: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, of the positions of every row and head, and of `powers` (empty if there are none)."""
    d_q, d_k, d_v, d_positions, d_powers = _empty_gradients(d_out, q, k, v, positions, powers)
    if len(q) == 0:
        return d_q, d_k, d_v, d_positions, d_powers.zero_()
    parts: list[list[Tensor]] = [[] for _ in d_powers]  # terms of the gradient of every level's powers

    def part(level: int, programs: int) -> Tensor:
        """Return a buffer for the programs' terms, `[programs, heads]`."""
        if powers is None:
            return d_powers  # not written
        parts[level].append(powers.new_empty(programs // o.heads, o.heads))
        return parts[level][-1]

    y, up_y, pooled, inner, shares = kept
    up_q, up_k, up_v = _split(pooled, q, v)
    up_d_q, up_d_k, up_d_v = _split(empty(pooled, *pooled.shape), q, v)
    outer, weight = shares.unbind(0)
    o = _Launch(q, v, positions, powers, table, layout, inside, power, weighted)
    d_weight, d_inner = empty(inner, 2, *inner.shape).unbind(0)
    up_d_out = empty(q, len(inner), *up_y.shape[1:], dtype=torch.float32)
    up_d_positions = d_positions if positions is None else d_positions[o.layout.leaves :]
    flags = {"INCLUDE_SELF": include_self, "CAUSAL": causal, **o.widths}
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    up_strides = (*up_q.stride()[:2], *up_k.stride()[:2], *up_v.stride()[:2])
    d_strides, up_d_strides = d_out.stride()[:2], up_d_out.stride()[:2]
    leaves, *above = o.layout.levels

    values = {"PRECISION": o.widths["PRECISION"], **o.values}
    rows = d_out, q, k, v, o.positions, o.up_positions, up_q, up_k, up_v, up_d_q, up_d_k, up_d_v, up_d_positions
    key = compiled_for(*rows, *strides, *up_strides, *o.position_strides, *d_strides, *up_d_strides, o.heads)
    for job, constants in o.jobs("d_down", leaves):
        _d_down(
            key,
            o.grid(job),
            (d_out, *d_strides, y, outer, inner, d_weight, up_d_out, o.parent, *o.job(job), job.count,
             o.heads),
            {"LEAVES": True, **values, **constants},
        )  # fmt: skip
    for level in above:
        for job, constants in o.jobs("d_down", level):
            _d_down(
                key,
                o.grid(job),
                (up_d_out, *up_d_strides, up_y, outer, inner, d_weight, up_d_out, o.up_parent,
                 *o.job(job), job.count, o.heads),
                {"LEAVES": False, **values, **constants},
            )  # fmt: skip
    if o.layout.top_levels:
        tops = len(o.layout.levels)
        of_top = part(tops, o.layout.top_levels * o.layout.bundles * o.heads)
        _d_top(
            key,
            o.layout.bundles * o.heads,
            (up_q, up_k, up_v, o.up_positions, *o.position_strides, up_y, outer, inner, weight, up_d_out,
             d_weight, d_inner, up_d_q, up_d_k, up_d_v, up_d_positions, of_top, o.up_parent, o.up_count, o.inside,
             o.powers(tops), o.begin, o.end, o.bundles, o.layout.bundles, o.layout.top_levels, o.layout.root, o.heads,
             scale),
            {"SINGLE": o.layout.top_single, **flags, **o.runs("d_top", o.layout.top_size)},
        )  # fmt: skip
        if powers is not None:
            parts[tops:] = [[x] for x in of_top.view(o.layout.top_levels, o.layout.bundles, o.heads)]
    for height, level in reversed([*enumerate(above, 1)]):
        for job, constants in o.jobs("d_up", level):
            _d_up(
                key,
                o.grid(job),
                (up_q, up_k, up_v, *up_strides, o.up_positions, *o.position_strides, up_d_out,
                 *up_d_strides, inner, weight, d_weight, d_inner, up_d_q, up_d_k, up_d_v,
                 up_d_positions, part(height, o.grid(job)), up_d_q, up_d_k, up_d_v, o.up_parent, o.up_count, o.up_count,
                 o.inside, o.powers(height), *o.job(job), job.count, o.layout.root, o.heads, scale),
                {"LEAVES": False, **flags, **constants},
            )  # fmt: skip
    for job, constants in o.jobs("d_up", leaves):
        _d_up(
            key,
            o.grid(job),
            (q, k, v, *strides, o.positions, *o.position_strides, d_out, *d_strides, inner, weight, d_weight,
             d_inner, d_q, d_k, d_v, d_positions, part(0, o.grid(job)), up_d_q, up_d_k, up_d_v, o.parent, o.count,
             o.up_count, o.inside, o.powers(0), *o.job(job), job.count, o.layout.root, o.heads, scale),
            {"LEAVES": True, **flags, **constants},
        )  # fmt: skip
    if powers is not None:
        d_powers = torch.stack([torch.cat(of_level).sum(0) for of_level in parts])
    return d_q, d_k, d_v, d_positions, d_powers


def _empty_gradients(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, powers: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    d_powers = q.new_empty(0, dtype=torch.float32) if powers is None else torch.empty_like(powers)
    d_positions = (
        q.new_empty(0) if positions is None else positions.new_zeros(positions.shape[0], q.shape[1], positions.shape[2])
    )
    return empty(q, *q.shape), empty(k, *k.shape), empty(v, *v.shape), d_positions, d_powers


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, positions, powers, table, ctx.layout, ctx.include_self, ctx.causal, ctx.scale, _, inside, *ctx.entmax = (
        inputs
    )
    ctx.save_for_backward(q, k, v, positions, powers, table, inside, *output[1:])


def _gradients(ctx: Any, d_out: Tensor | None, *_: Any) -> tuple[Any, ...]:
    none = (None,) * 14
    if d_out is None:
        return none
    q, k, v, positions, powers, table, inside, *kept = ctx.saved_tensors
    options = ctx.layout, ctx.include_self, ctx.causal, ctx.scale
    d_q, d_k, d_v, d_positions, d_powers = backward(
        last_stride_1(d_out), q, k, v, positions, powers, table, *options, kept, inside, *ctx.entmax
    )
    of_positions = None if positions is None else d_positions.sum_to_size(positions.shape)
    return d_q, d_k, d_v, of_positions, None if powers is None else d_powers, *none[5:]


forward = Operator("hierarchical_attention", _forward, _empty_results, _save, _gradients)
backward = Operator("hierarchical_attention_backward", _backward, _empty_gradients)
