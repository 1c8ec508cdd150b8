"""Backend "triton" of `hsa.cluster_keys`, with one or two launches per level of the tree.

Every head has a list of leaves, one per slot of the tree. From the root down, the keys below a node are projected onto
their first principal direction, and the list is partitioned at the bounds of the node's children. A partition keeps the
leaves of each part in order, so equal coordinates are ordered by leaf, and leaf families end up sorted.

There are kernels for three sizes of nodes:

- small nodes (`_sort_nodes`): the products of all pairs of keys stay in registers. The direction is iterated on them, the
  slot of a key is the number of keys before it, and any number of children is filled at once;
- up to 4,096 keys (`_measure_nodes`): one program per node sums the covariance, iterates, and projects;
- more (`_sum_blocks`, `_find_directions`, `_measure_blocks`): the same three steps, with many programs per node.

Projected keys are then partitioned in two (`_split`, `_split_long`): a search, bit by bit, finds the coordinate at the
bound, which is much cheaper than sorting. Nodes with more than two children are halved again, by the same coordinates,
until every part is one child.

An approximate direction is enough, so products may be rounded (half precision or tf32). They are taken relative to one of
the node's own keys, so that differences between similar keys stay precise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hsa.attention.kernels.available import WIDEST_CLUSTERED, padded
from hsa.attention.kernels.triton.launch import Operator, last_stride_1
from hsa.attention.multiscale.cluster import ITERATIONS, nodes_to_sort, sort_inside_leaf_families
from hsa.tree.hierarchy import Hierarchy, ranges

SMALL = 64
"""Maximum number of keys of a small node; one warp can hold the products of their pairs."""
NODE = 4096
"""Maximum number of keys of a node that one program projects."""
BLOCK = 1024
"""Number of keys of a larger node that one program projects."""
ROWS = 128
"""Number of keys of a node or block that a program holds at a time."""
PAIRS = 1024
"""Number of pairs of keys that a program holds, for the smallest nodes."""
SPLIT, LONGEST_SPLIT = 256, 1024
"""Number of keys of small pieces that one warp partitions together; most keys of a piece to partition in registers."""
LONG_SPLIT = 4096
"""Number of keys of longer pieces that a program reads at a time."""

SORT_NODES, MEASURE_NODES, MEASURE_BLOCKS, SPLIT_NODES, SPLIT_AGAIN = range(5)


@torch.no_grad()
def cluster_keys(k: Tensor, hierarchy: Hierarchy) -> Tensor:
    """Return `[kv_heads, leaves]` the leaf whose key lies at each leaf slot, for keys `[leaves, kv_heads, dim]`."""
    plan = hierarchy.cached("key steps", lambda: _build(hierarchy))
    order = operator(k, plan.start, plan.slots, plan.table, plan.steps, ITERATIONS)
    if plan.mixed_families:
        sort_inside_leaf_families(order, hierarchy)
    return order


# The plan


@dataclass(frozen=True, eq=False)
class _Plan:
    """Launches, in order. Each step is five integers: its kind, the begin of its part of the table, and three numbers."""

    slots: Tensor  # [moving] leaf slots whose keys may move; tables and kernels count only these
    start: Tensor  # [WIDEST_CLUSTERED] start vector of iterations
    mixed_families: bool  # whether some leaves have siblings that are not leaves
    table: Tensor  # int32, the parts of all steps
    steps: list[int]


@dataclass
class _Steps:
    """Steps of a plan under construction."""

    parts: list[np.ndarray] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    length: int = 0

    def add(self, kind: int, numbers: tuple[int, int, int], *parts: np.ndarray) -> None:
        """Append a step and its part of the table."""
        self.steps += [kind, self.length, *numbers]
        flat = np.concatenate([part.reshape(-1) for part in parts]).astype(np.int32)
        # Align parts to 16 bytes: kernels would be compiled again for other addresses.
        flat = np.pad(flat, (0, -len(flat) % 4))
        self.parts.append(flat)
        self.length += len(flat)


def _build(hierarchy: Hierarchy) -> _Plan:
    s = hierarchy.structure
    slots, begin, end, useful = nodes_to_sort(hierarchy)
    size = end - begin
    # `children` leaves out children without a key that may move (sinks).
    children = np.flatnonzero(size > 0)
    before = np.concatenate([[0], np.cumsum(size > 0)])
    first_child, last_child = before[s.first_child], before[s.first_child + s.num_children] - 1
    useful &= last_child > first_child
    steps = _Steps()
    for depth_begin, depth_end in zip(s.depth_offsets, s.depth_offsets[1:], strict=False):
        nodes = depth_begin + np.flatnonzero(useful[depth_begin:depth_end])
        small = size[nodes] <= SMALL
        _add_small(steps, hierarchy, nodes[small], begin, size)
        nodes = nodes[~small]
        _add_measures(steps, begin[nodes], size[nodes])
        # Pieces of a node are ranges of its children, halved until every piece is one child.
        first, last, kind = first_child[nodes], last_child[nodes], SPLIT_NODES
        while len(first):
            middle = (first + last + 1) // 2
            _add_splits(steps, kind, begin[children[first]], begin[children[middle]], end[children[last]])
            first, last, kind = np.append(first, middle), np.append(middle - 1, last), SPLIT_AGAIN
            first, last = first[last > first], last[last > first]
    table = np.concatenate(steps.parts) if steps.parts else np.zeros(0, np.int32)
    # Irregular, as a regular vector could be orthogonal to the principal direction; the same as in backend "torch".
    start = torch.arange(1, WIDEST_CLUSTERED + 1, dtype=torch.float64).mul(2.4).cos().float()
    return _Plan(
        slots=torch.from_numpy(slots).to(hierarchy.device),
        start=start.to(hierarchy.device),
        mixed_families=bool((s.height[s.parent[s.leaf_nodes[slots]]] > 1).any()),
        table=torch.from_numpy(table).to(hierarchy.device),
        steps=steps.steps,
    )


def _add_small(steps: _Steps, hierarchy: Hierarchy, nodes: np.ndarray, begin: np.ndarray, size: np.ndarray) -> None:
    """Add launches for small nodes of similar size. Their table holds, for every slot of a node, the begin of its child."""
    s = hierarchy.structure
    width = np.maximum(_power_of_2(size[nodes]), 16)
    for w in np.unique(width):
        some = nodes[width == w]
        number = np.repeat(np.arange(len(some)), s.num_children[some])
        child = ranges(s.first_child[some], s.num_children[some])
        child_begin = begin[child] - begin[some][number]
        child_of_slot = np.repeat(np.arange(len(child)), size[child])
        table = np.zeros((len(some), w), np.int64)
        table[number[child_of_slot], ranges(child_begin, size[child])] = child_begin[child_of_slot]
        steps.add(SORT_NODES, (len(some), 0, int(w)), begin[some], size[some], table)


def _add_measures(steps: _Steps, begin: np.ndarray, size: np.ndarray) -> None:
    """Add launches that project the keys of larger nodes, as a whole or in blocks."""
    whole = size <= NODE
    if whole.any():
        steps.add(MEASURE_NODES, (int(whole.sum()), 0, 0), begin[whole], size[whole])
    begin, size = begin[~whole], size[~whole]
    if len(begin):
        blocks = -(-size // BLOCK)
        first_block = np.cumsum(blocks) - blocks
        node = np.repeat(np.arange(len(size)), blocks)
        block_begin = (np.arange(len(node)) - first_block[node]) * BLOCK
        block_end = np.minimum(block_begin + BLOCK, size[node])
        of_nodes, of_blocks = (begin, size, first_block, blocks), (node, block_begin, block_end)
        steps.add(MEASURE_BLOCKS, (len(size), len(node), 0), *of_nodes, *of_blocks)


def _add_splits(steps: _Steps, kind: int, begin: np.ndarray, middle: np.ndarray, end: np.ndarray) -> None:
    """Add launches that partition pieces of similar size at `middle`."""
    size = end - begin
    width = np.maximum(_power_of_2(size), 32)
    width[width > LONGEST_SPLIT] = LONG_SPLIT
    for w in np.unique(width):
        some = width == w
        numbers = (int(some.sum()), int(size[some].max()), int(w))
        steps.add(kind, numbers, begin[some], size[some], (middle - begin)[some])


def _power_of_2(size: np.ndarray) -> np.ndarray:
    return 2 ** np.ceil(np.log2(size)).astype(np.int64)


# The kernels. Program number = number of the node, block or piece · heads + head, so heads of the same keys run together.


@triton.jit
def _key(keys, leaf, key_stride, first_dim, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Return the keys […, WIDTH] of leaves, from dimension `first_dim` on; 0 beyond DIM."""
    dims = first_dim + tl.arange(0, WIDTH)
    return tl.load(keys + tl.expand_dims(leaf.to(tl.int64) * key_stride, -1) + dims, mask=dims < DIM, other=0.0)


@triton.jit
def _sums(
    keys, order, first_leaf, begin, end, key_stride, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Return products [WIDTH, WIDTH] between dimensions and sums [WIDTH] of the keys at `begin : end`.

    Both are relative to the node's first key, which is close to the others, so that subtracting the mean loses little
    precision. The same key serves as padding, which adds nothing.
    """
    anchor = _key(keys, first_leaf, key_stride, 0, DIM, WIDTH)
    products = tl.zeros([WIDTH, WIDTH], tl.float32)
    totals = tl.zeros([WIDTH, WIDTH], tl.float32)  # the sums in every row: multiplying by ones is cheaper than summing
    first = begin
    while first < end:
        at = first + tl.arange(0, ROWS)
        leaf = tl.load(order + at, mask=at < end, other=first_leaf)
        x = _key(keys, leaf, key_stride, 0, DIM, WIDTH) - anchor[None, :]
        products = tl.dot(tl.trans(x), x, products, input_precision="tf32")
        totals = tl.dot(tl.full([WIDTH, ROWS], 1, x.dtype), x, totals, input_precision="tf32")
        first += ROWS
    return products, tl.sum(totals, 0) / WIDTH


@triton.jit
def _direction(products, total, size, start, ITERATIONS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Return the first principal direction [WIDTH], of any length, by power iteration from `start`."""
    dims = tl.arange(0, WIDTH)
    spread = products - total[:, None] * (total / size)[None, :]
    # Divide by the trace, which is 1 to WIDTH times the largest eigenvalue, so that no iteration over- or underflows.
    trace = tl.sum(tl.sum(tl.where(dims[:, None] == dims[None, :], spread, 0.0), 1), 0)
    spread *= 1 / tl.where(trace > 0, trace, 1.0)
    direction = tl.load(start + dims, mask=dims < DIM, other=0.0)
    for _ in range(ITERATIONS + 1):
        direction = tl.sum(spread * direction[None, :], 1)
    longest = tl.max(tl.abs(direction), 0)
    return direction / tl.where(longest > 0, longest, 1.0)


@triton.jit
def _measure(
    keys, order, coordinates, direction, centre, begin, end, key_stride,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store the coordinates of the keys at `begin : end` along the direction; 0 is at the centre."""
    first = begin
    while first < end:
        at = first + tl.arange(0, ROWS)
        leaf = tl.load(order + at, mask=at < end, other=0)
        x = _key(keys, leaf, key_stride, 0, DIM, WIDTH).to(tl.float32)
        tl.store(coordinates + at, tl.sum(x * direction[None, :], 1) - centre, mask=at < end)
        first += ROWS


@triton.jit(do_not_specialize=["nodes", "heads", "slots"])
def _measure_nodes(
    keys, start, order, coordinates, table, key_stride, head_stride, nodes, heads, slots,
    ITERATIONS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store the coordinates of one node's keys. `table` has begin and size of every node."""
    node, head = tl.program_id(0) // heads, (tl.program_id(0) % heads).to(tl.int64)
    begin, size = tl.load(table + node), tl.load(table + nodes + node)
    keys += head * head_stride
    order += head * slots + begin
    coordinates += head * slots + begin
    first_leaf = tl.load(order)
    products, total = _sums(keys, order, first_leaf, 0, size, key_stride, DIM, WIDTH, ROWS)
    direction = _direction(products, total, size, start, ITERATIONS, DIM, WIDTH)
    mean = _key(keys, first_leaf, key_stride, 0, DIM, WIDTH).to(tl.float32) + total / size
    _measure(keys, order, coordinates, direction, tl.sum(mean * direction, 0), 0, size, key_stride, DIM, WIDTH, ROWS)


@triton.jit(do_not_specialize=["nodes", "blocks", "heads", "slots"])
def _sum_blocks(
    keys, order, table, products, totals, key_stride, head_stride, nodes, blocks, heads, slots,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store the sums over one block.

    `table` has begin, size, first block and number of blocks of every node; then node, begin and end of every block.
    """
    block, head = tl.program_id(0) // heads, (tl.program_id(0) % heads).to(tl.int64)
    of_block = table + 4 * nodes + block
    node, begin, end = tl.load(of_block), tl.load(of_block + blocks), tl.load(of_block + 2 * blocks)
    order += head * slots + tl.load(table + node)
    keys += head * head_stride
    product, total = _sums(keys, order, tl.load(order), begin, end, key_stride, DIM, WIDTH, ROWS)
    dims = tl.arange(0, WIDTH)
    offset = (head * blocks + block) * WIDTH
    tl.store(products + (offset + dims[:, None]) * WIDTH + dims[None, :], product)
    tl.store(totals + offset + dims, total)


@triton.jit(do_not_specialize=["nodes", "blocks", "heads", "slots"])
def _find_directions(
    keys, start, order, table, products, totals, directions, centres, key_stride, head_stride,
    nodes, blocks, heads, slots, ITERATIONS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store the direction of one node, from the sums over its blocks, and the coordinate of its mean."""
    node, head = tl.program_id(0) // heads, (tl.program_id(0) % heads).to(tl.int64)
    begin, size = tl.load(table + node), tl.load(table + nodes + node)
    block, number = tl.load(table + 2 * nodes + node), tl.load(table + 3 * nodes + node)
    dims = tl.arange(0, WIDTH)
    product = tl.zeros([WIDTH, WIDTH], tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    past_last = block + number
    while block < past_last:
        offset = (head * blocks + block) * WIDTH
        product += tl.load(products + (offset + dims[:, None]) * WIDTH + dims[None, :])
        total += tl.load(totals + offset + dims)
        block += 1
    direction = _direction(product, total, size, start, ITERATIONS, DIM, WIDTH)
    first_leaf = tl.load(order + head * slots + begin)
    mean = _key(keys + head * head_stride, first_leaf, key_stride, 0, DIM, WIDTH).to(tl.float32) + total / size
    tl.store(directions + (head * nodes + node) * WIDTH + dims, direction)
    tl.store(centres + head * nodes + node, tl.sum(mean * direction, 0))


@triton.jit(do_not_specialize=["nodes", "blocks", "heads", "slots"])
def _measure_blocks(
    keys, order, coordinates, table, directions, centres, key_stride, head_stride, nodes, blocks, heads, slots,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store the coordinates of one block's keys along the direction of its node."""
    block, head = tl.program_id(0) // heads, (tl.program_id(0) % heads).to(tl.int64)
    of_block = table + 4 * nodes + block
    node, begin, end = tl.load(of_block), tl.load(of_block + blocks), tl.load(of_block + 2 * blocks)
    here = head * slots + tl.load(table + node)
    direction = tl.load(directions + (head * nodes + node) * WIDTH + tl.arange(0, WIDTH))
    centre = tl.load(centres + head * nodes + node)
    keys += head * head_stride
    _measure(keys, order + here, coordinates + here, direction, centre, begin, end, key_stride, DIM, WIDTH, ROWS)


@triton.jit
def _sortable(x):
    """Return integers that are ordered as the numbers are; −0 counts as 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["pieces", "heads", "slots"])
def _split(
    order, coordinates, sortable, table, pieces, heads, slots,
    FRESH: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Partition pieces in two: the `left` keys of smallest coordinate first, each part in its old order.

    `table` has begin, size and left of every piece. FRESH: the pieces are nodes whose coordinates were just computed;
    otherwise the split of a larger piece has left them in their sortable form.
    """
    piece, head = tl.program_id(0) // heads * PIECES + tl.arange(0, PIECES), (tl.program_id(0) % heads).to(tl.int64)
    begin = tl.load(table + piece, mask=piece < pieces, other=0)
    size = tl.load(table + pieces + piece, mask=piece < pieces, other=0)
    left = tl.load(table + 2 * pieces + piece, mask=piece < pieces, other=0)[:, None]
    at = tl.arange(0, WIDTH)[None, :]
    real = at < size[:, None]
    begin = head * slots + begin[:, None]
    leaf = tl.load(order + begin + at, mask=real)
    if FRESH:
        x = tl.load(coordinates + begin + at, mask=real, other=0.0)
        # The sign of a direction is arbitrary: make the coordinate of the outermost member positive.
        flip = -tl.min(x, 1) > tl.max(x, 1)
        value = _sortable(tl.where(flip[:, None], -x, x))
    else:
        value = tl.load(sortable + begin + at, mask=real, other=0)
    value = tl.where(real, value, 2147483647)
    # The bound, the value with index `left` in sorted order, is the largest number with at most `left` values below it.
    bound = tl.full([PIECES, 1], -2147483648, tl.int32)
    for bit in range(32):
        higher = bound ^ (tl.full([PIECES, 1], 1, tl.int32) << (31 - bit))
        below = tl.sum((value < higher).to(tl.int32), 1)[:, None]
        bound = tl.where(below <= left, higher, bound)
    # Of the keys equal to the bound, the first go left, until the left part is full.
    room = left - tl.sum((value < bound).to(tl.int32), 1)[:, None]
    equal = (real & (value == bound)).to(tl.int32)
    goes_left = (value < bound) | ((equal > 0) & (tl.cumsum(equal, 1) <= room))
    left_before = tl.cumsum(goes_left.to(tl.int32), 1) - goes_left.to(tl.int32)
    target = begin + tl.where(goes_left, left_before, left + at - left_before)
    tl.debug_barrier()  # wait for all reads before writing to the same memory
    tl.store(order + target, leaf, mask=real)
    tl.store(sortable + target, value, mask=real)


@triton.jit
def _count_below(sortable, bound, size, WIDTH: tl.constexpr):
    """Return the number of values below the bound."""
    below = tl.zeros([WIDTH], tl.int32)
    first = 0
    while first < size:
        at = first + tl.arange(0, WIDTH)
        below += (tl.load(sortable + at, mask=at < size, other=2147483647) < bound).to(tl.int32)
        first += WIDTH
    return tl.sum(below, 0)


@triton.jit(do_not_specialize=["pieces", "heads", "slots"])
def _split_long(
    order, coordinates, sortable, moved_order, moved_sortable, table, pieces, heads, slots,
    FRESH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Partition one piece of any size as `_split` does, WIDTH keys at a time."""
    piece, head = tl.program_id(0) // heads, (tl.program_id(0) % heads).to(tl.int64)
    begin, size = head * slots + tl.load(table + piece), tl.load(table + pieces + piece)
    left = tl.load(table + 2 * pieces + piece)
    order += begin
    coordinates += begin
    sortable += begin
    moved_order += begin
    moved_sortable += begin
    if FRESH:
        highest = tl.zeros([WIDTH], tl.float32)
        lowest = tl.zeros([WIDTH], tl.float32)
        first = 0
        while first < size:
            at = first + tl.arange(0, WIDTH)
            x = tl.load(coordinates + at, mask=at < size, other=0.0)
            highest = tl.maximum(highest, x)
            lowest = tl.minimum(lowest, x)
            first += WIDTH
        flip = -tl.min(lowest, 0) > tl.max(highest, 0)
        first = 0
        while first < size:
            at = first + tl.arange(0, WIDTH)
            x = tl.load(coordinates + at, mask=at < size, other=0.0)
            tl.store(sortable + at, _sortable(tl.where(flip, -x, x)), mask=at < size)
            first += WIDTH
        tl.debug_barrier()
    bound = tl.full([1], -2147483648, tl.int32)
    for bit in range(32):
        higher = bound ^ (tl.full([1], 1, tl.int32) << (31 - bit))
        bound = tl.where(_count_below(sortable, higher, size, WIDTH) <= left, higher, bound)
    room = left - _count_below(sortable, bound, size, WIDTH)
    equals, lefts = 0, 0
    first = 0
    while first < size:
        at = first + tl.arange(0, WIDTH)
        real = at < size
        value = tl.load(sortable + at, mask=real, other=2147483647)
        equal = (real & (value == bound)).to(tl.int32)
        goes_left = (value < bound) | ((equal > 0) & (equals + tl.cumsum(equal, 0) <= room))
        left_before = lefts + tl.cumsum(goes_left.to(tl.int32), 0) - goes_left.to(tl.int32)
        target = tl.where(goes_left, left_before, left + at - left_before)
        tl.store(moved_order + target, tl.load(order + at, mask=real), mask=real)
        tl.store(moved_sortable + target, value, mask=real)
        equals += tl.sum(equal, 0)
        lefts += tl.sum(goes_left.to(tl.int32), 0)
        first += WIDTH
    tl.debug_barrier()
    first = 0
    while first < size:
        at = first + tl.arange(0, WIDTH)
        tl.store(order + at, tl.load(moved_order + at, mask=at < size), mask=at < size)
        tl.store(sortable + at, tl.load(moved_sortable + at, mask=at < size), mask=at < size)
        first += WIDTH


@triton.jit(do_not_specialize=["nodes", "heads", "slots"])
def _sort_nodes(
    keys, start, order, table, key_stride, head_stride, nodes, heads, slots,
    ITERATIONS: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr, NODES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Distribute the keys of small nodes to their children.

    `table` has begin and size of every node, then the begin of the child of every slot.
    """
    node, head = tl.program_id(0) // heads * NODES + tl.arange(0, NODES), (tl.program_id(0) % heads).to(tl.int64)
    begin = tl.load(table + node, mask=node < nodes, other=0)
    size = tl.load(table + nodes + node, mask=node < nodes, other=1)[:, None]
    child_begins = table + 2 * nodes + node[:, None] * SIZE
    keys += head * head_stride
    order += head * slots + begin
    member = tl.arange(0, SIZE)[None, :]
    real = (member < size) & (node < nodes)[:, None]
    first_leaf = tl.load(order)
    leaf = tl.load(order[:, None] + member, mask=real, other=-1)
    # Products are relative to the first key of the node, which also serves as padding: see `_sums`.
    leaf_or_first = tl.where(real, leaf, first_leaf[:, None])
    products = tl.zeros([NODES, SIZE, SIZE], tl.float32)
    for first_dim in range(0, DIM, PART):
        x = _key(keys, leaf_or_first, key_stride, first_dim, DIM, PART)
        x -= _key(keys, first_leaf, key_stride, first_dim, DIM, PART)[:, None, :]
        products = tl.dot(x, tl.permute(x, (0, 2, 1)), products, input_precision="tf32")
    # Make the products relative to the mean; their leading vector is then the coordinate. Rows and columns after the last
    # member need no mask, because the scale makes their coordinates 0.
    mean = tl.sum(products, 2) / size
    mean -= (tl.sum(mean, 1)[:, None] / size) / 2
    spread = products - mean[:, :, None] - mean[:, None, :]
    norm = tl.sqrt(tl.sum(tl.sum(spread * spread, 2), 1))[:, None]
    scale = tl.where(real & (norm > 0), 1 / tl.where(norm > 0, norm, 1.0), 0.0)
    coordinate = tl.where(real, tl.load(start + member), 0.0)
    for _ in range(ITERATIONS + 1):
        coordinate = tl.sum(spread * coordinate[:, None, :], 2) * scale
    flip = -tl.min(coordinate, 1) > tl.max(coordinate, 1)
    # The lowest bits of a coordinate hold the member's number, so no two are equal and equal keys are ordered by leaf.
    value = _sortable(tl.where(flip[:, None], -coordinate, coordinate))
    value = tl.where(real, value, 2147483647) & -SIZE | member
    rank = tl.sum((value[:, None, :] < value[:, :, None]).to(tl.int32), 2)
    child = tl.load(child_begins + rank, mask=real, other=SIZE) * SIZE + member
    target = tl.sum((child[:, None, :] < child[:, :, None]).to(tl.int32), 2)
    tl.store(order[:, None] + target, leaf, mask=real)


# The launches


def _cluster_keys(k: Tensor, start: Tensor, slots: Tensor, table: Tensor, steps: list[int], iterations: int) -> Tensor:
    """Run the launches, and return the order `[heads, leaves]` of keys `[leaves, heads, dim]`."""
    leaves, heads, dim = k.shape
    k = last_stride_1(k)
    moving = len(slots)
    order = slots.to(torch.int32).expand(heads, -1).contiguous()
    coordinates = torch.empty(heads, moving, device=k.device)
    sortable, moved_order, moved_sortable = torch.empty(3, heads, moving, dtype=torch.int32, device=k.device)
    width = padded(dim)
    strides = (k.stride(0), k.stride(1))
    sizes = {"DIM": dim, "WIDTH": width}
    warps = 4 if width <= 64 else 8
    for i in range(0, len(steps), 5):
        kind, offset, count, number, wide = steps[i : i + 5]
        part = table[offset:]
        counts = (count, heads, moving)
        if kind == SORT_NODES:
            together = max(1, PAIRS // wide**2)
            _sort_nodes[(triton.cdiv(count, together) * heads,)](
                k, start, order, part, *strides, *counts,
                ITERATIONS=iterations, DIM=dim, PART=min(width, 32), NODES=together, SIZE=wide, num_warps=1,
            )  # fmt: skip
        elif kind == MEASURE_NODES:
            _measure_nodes[(count * heads,)](
                k, start, order, coordinates, part, *strides, *counts,
                ITERATIONS=iterations, **sizes, ROWS=ROWS, num_warps=warps,
            )  # fmt: skip
        elif kind == MEASURE_BLOCKS:
            of_blocks = (count, number, heads, moving)
            products = torch.empty(heads, number, width, width, device=k.device)
            totals = torch.empty(heads, number, width, device=k.device)
            directions = torch.empty(heads, count, width, device=k.device)
            centres = torch.empty(heads, count, device=k.device)
            _sum_blocks[(number * heads,)](
                k, order, part, products, totals, *strides, *of_blocks, **sizes, ROWS=ROWS, num_warps=warps
            )
            _find_directions[(count * heads,)](
                k, start, order, part, products, totals, directions, centres, *strides, *of_blocks,
                ITERATIONS=iterations, **sizes, num_warps=8,
            )  # fmt: skip
            _measure_blocks[(number * heads,)](
                k, order, coordinates, part, directions, centres, *strides, *of_blocks, **sizes, ROWS=ROWS, num_warps=4
            )
        elif wide <= LONGEST_SPLIT:
            together = max(1, SPLIT // wide)
            _split[(triton.cdiv(count, together) * heads,)](
                order, coordinates, sortable, part, *counts,
                FRESH=kind == SPLIT_NODES, PIECES=together, WIDTH=wide, num_warps=max(1, wide // SPLIT),
            )  # fmt: skip
        else:
            _split_long[(count * heads,)](
                order, coordinates, sortable, moved_order, moved_sortable, part, *counts,
                FRESH=kind == SPLIT_NODES, WIDTH=wide, num_warps=16,
            )  # fmt: skip
    if moving == leaves:
        return order.to(torch.int64)
    return torch.arange(leaves, device=k.device).expand(heads, -1).index_copy(1, slots, order.to(torch.int64))


def _empty(k: Tensor, *_: Any) -> Tensor:
    return k.new_empty(k.shape[1], k.shape[0], dtype=torch.int64)


operator = Operator("cluster_keys", _cluster_keys, _empty)
