"""Chunks and tiles of a packed batch, against their definition token by token."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa.attention.clustered.layout import Shape, layout_of
from tests.attention.clustered.batches import BRANCHINGS


@st.composite
def layouts(draw):
    causal = draw(st.booleans())
    branching = draw(st.sampled_from(BRANCHINGS))
    chunk = branching[0] * branching[1] * branching[2]
    tile = draw(st.sampled_from([t for t in (1, 2, 4, 8) if not causal or t <= chunk]))
    shape = Shape(branching, tile, draw(st.sampled_from([0, chunk + 1, 2 * chunk])))
    lengths = draw(st.lists(st.integers(1, 4 * chunk), min_size=1, max_size=4))
    queries = [draw(st.integers(0, n if causal else 9)) for n in lengths]
    recent = []
    for n, rows in zip(lengths, queries, strict=True):
        first = shape.first_exact(n - rows if causal else n)  # for the first query
        recent.append(draw(st.integers(n - first if rows else 0, n)))
    capacity = draw(st.sampled_from([None, 5]))
    return layout_of(lengths, queries, recent, shape=shape, causal=causal, capacity=capacity)


def tokens_of(layout):
    """Yield sequence, position and row of q of every query. Positions of other queries count from 0."""
    row = 0
    for sequence, (length, queries) in enumerate(zip(layout.lengths, layout.queries, strict=True)):
        before = length - queries if layout.causal else 0
        for i in range(queries):
            yield sequence, before + i, row
            row += 1


@given(layouts())
def test_every_query_is_in_its_tile_and_sees_its_chunks(layout):
    chunk, held = layout.shape.chunk, np.cumsum((0, *layout.recent))
    seen = {}
    for sequence, position, row in tokens_of(layout):
        tile = int(np.searchsorted(layout.tile_row, row, side="right")) - 1
        seen.setdefault((sequence, position // layout.shape.tile), set()).add(tile)
        length = layout.lengths[sequence]
        assert layout.tile_sequence[tile] == sequence
        visible = (position if layout.causal else length) // chunk
        if visible * chunk < layout.shape.exact_until:
            visible = 0
        assert layout.tile_chunks[tile] == visible
        before = sum(n // chunk for n in layout.lengths[:sequence])
        assert layout.tile_chunk[tile] == (5 * sequence if layout.capacity else before)
        missing = length - layout.recent[sequence]  # keys that k does not hold
        assert layout.tile_exact[tile] == held[sequence] + visible * chunk - missing
        more = row - layout.tile_row[tile] if layout.causal else 0
        end = position + 1 if layout.causal else length
        assert layout.tile_end[tile] + more == held[sequence] + end - missing
    tiles = [tile for found in seen.values() for tile in found]
    assert sorted(tiles) == list(range(layout.num_tiles))  # tiles and groups of queries correspond one to one
    assert all(len(found) == 1 for found in seen.values())
    assert layout.num_queries == layout.tile_row[-1] == sum(layout.queries)
    assert layout.tile_offset.tolist() == [0, *np.cumsum(layout.tile_chunks)]


@given(layouts())
def test_chunks_and_cut_tiles(layout):
    chunk, tile = layout.shape.chunk, layout.shape.tile
    rows, first = [], 0
    for s, (length, queries) in enumerate(zip(layout.lengths, layout.queries, strict=True)):
        assert layout.chunk_counts[s] == length // chunk
        rows += [first + i * chunk for i in range(length // chunk)]
        first += length
        assert layout.is_cut(s) == (layout.causal and queries > 0 and (length - queries) % tile > 0)
        if queries:
            assert layout.tile_sequence[layout.first_tiles[s]] == s
            assert layout.first_tiles[s] == 0 or layout.tile_sequence[layout.first_tiles[s] - 1] < s
        else:
            assert layout.first_tiles[s] == -1
    assert layout.chunk_rows.tolist() == rows
    assert layout.num_chunks == len(rows)
    assert layout.num_pages == (5 * len(layout.lengths) if layout.capacity else len(rows))


@given(layouts())
def test_rows_of_chunks_on_a_device(layout):
    rows, first = layout.rows_of_chunks(torch.device("cpu")).tolist()
    assert rows == layout.chunk_rows.tolist()
    counts = layout.chunk_counts
    assert first == np.repeat(np.cumsum(counts) - counts, counts).tolist()


def test_a_layout_is_built_once():
    shape = Shape((2, 2, 2), 4)
    one, same = (layout_of(x, shape=shape, causal=True) for x in ([9, 3], torch.tensor([9, 3])))
    assert one is same
    assert one is not layout_of([9, 3], shape=shape, causal=False)


def test_tables_built_in_inference_mode_work_for_training():
    layout = layout_of([31], shape=Shape((2, 2, 2), 4), causal=True)
    with torch.inference_mode():
        assert not layout.rows_of_chunks(torch.device("cpu")).is_inference()


@pytest.mark.parametrize("branching", [*BRANCHINGS, (8, 8, 4), (256, 16, 1)])
def test_sizes_of_a_shape(branching):
    shape = Shape.of(list(branching), 2, causal=True)
    assert shape == Shape(branching, 2)
    group, per_node, nodes = branching
    assert (shape.group, shape.node, shape.chunk) == (group, group * per_node, group * per_node * nodes)
    assert shape.groups * shape.group == shape.chunk
    assert shape.rows == (shape.chunk, shape.chunk // group, nodes, 1)
