"""Tables that kernels read: slabs of tiles, bundles, readers of chunks, and blocks of exact keys."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa.attention.clustered.layout import Shape, layout_of
from hsa.attention.clustered.slabs import (
    key_blocks,
    number_within,
    readers,
    slabs,
    slabs_within,
    tile_table,
)
from tests.attention.clustered.test_layout import layouts

CPU = torch.device("cpu")
wholes, bundles = st.booleans(), st.sampled_from([1, 2, 4])


@given(layouts(), st.sampled_from([1, 2, 3, 100]), bundles, wholes)
def test_slabs_hold_every_tile_once(layout, number, bundle, whole):
    """Tiles that see most chunks come first in a slab."""
    columns = (layout.tile_row[:-1], np.diff(layout.tile_row), layout.tile_chunk, layout.tile_chunks)
    tiles = np.stack([*columns, layout.tile_exact, layout.tile_end], 1)
    made = slabs(layout, CPU, bundle, number, whole)
    assert len(made) == min(number, layout.num_tiles)
    assert sorted(tile for slab in made for tile in slab.members.tolist()) == list(range(layout.num_tiles))
    for slab in made:
        assert slab.num_tiles == len(slab.tiles) > 0
        assert slab.tiles.dtype == torch.int32
        assert slab.tiles[:, :6].tolist() == tiles[slab.members].tolist()
        assert slab.tiles[:, 8].tolist() == slab.members.tolist()
        chunks = slab.tiles[:, 3]
        assert chunks.diff().le(0).all()
        assert slab.chunks == chunks.sum()
        inside = (chunks.cumsum(0) - chunks).tolist()
        assert slab.tiles[:, 7].tolist() == inside
        assert slab.tiles[:, 6].tolist() == (layout.tile_offset[slab.members].tolist() if whole else inside)


@given(layouts(), st.sampled_from([1, 3, 10]), bundles)
def test_slabs_have_at_most_a_number_of_chunks_or_a_single_tile(layout, most, bundle):
    for slab in slabs_within(layout, CPU, bundle, most, whole=False):
        assert slab.chunks <= most or (slab.tiles[:, 3] > 0).sum() == 1
    sizes = layout.tile_row[1:] - layout.tile_row[:-1]
    number = number_within(layout, bundle, sizes, most)
    for slab in slabs(layout, CPU, bundle, number):
        assert sizes[slab.members].sum() <= most or slab.num_tiles == 1


@given(layouts(), st.sampled_from([1, 3]), bundles)
def test_bundles_hold_every_tile_that_sees_chunks_once(layout, number, bundle):
    """Their tiles see the same chunks, and no two bundles could be one."""
    for slab in slabs(layout, CPU, bundle, number, False):
        tiles = slab.tiles.tolist()
        sequences = layout.tile_sequence[slab.members].tolist()
        members = [list(range(first, first + count)) for first, count in slab.bundles.tolist()]
        assert [tile for bundled in members for tile in bundled] == [i for i, row in enumerate(tiles) if row[3]]
        for bundled in members:
            assert 1 <= len(bundled) <= bundle
            assert len({(sequences[i], tiles[i][3]) for i in bundled}) == 1
            assert all(tiles[i + 1][6] == tiles[i][6] + tiles[i][3] for i in bundled[:-1])
        for left, right in pairwise(members):
            same = {(sequences[i], tiles[i][3]) for i in (*left, *right)}
            assert len(left) == bundle or len(same) == 2


def test_slabs_end_with_short_tiles():
    """Tiles are dealt out in turn, so that slabs are alike."""
    layout = layout_of([64 * 1024], shape=Shape.of(causal=True), causal=True)
    made = slabs_within(layout, CPU, 2, 40_000, whole=False)
    assert len(made) == 4
    for slab in made:
        assert slab.tiles[0, 3] >= 254
        assert slab.tiles[-1, 3] <= 1
        assert abs(4 * slab.chunks / layout.tile_chunks.sum() - 1) < 0.01
        assert (slab.bundles[:, 1] == 2).all()


@given(layouts(), st.sampled_from([1, 2]), bundles)
def test_readers_are_the_tiles_that_see_a_chunk(layout, number, bundle):
    for slab in slabs(layout, CPU, bundle, number):
        made = readers(layout, slab, CPU)
        wanted = []
        for sequence, chunks in enumerate(layout.chunk_counts):
            for chunk in range(chunks):
                tiles = [
                    i
                    for i, tile in enumerate(slab.members)
                    if layout.tile_sequence[tile] == sequence and layout.tile_chunks[tile] > chunk
                ]
                wanted.append((int(layout.starts[sequence]) + chunk, chunk, tiles))
        before = 0
        for (page, number_of, first, count, offset), (wanted_page, chunk, tiles) in zip(
            made.chunks.tolist(), wanted, strict=True
        ):
            assert (page, number_of, offset) == (wanted_page, chunk, before)
            assert sorted(made.tiles[first : first + count].tolist()) == tiles
            before += count
        assert made.total == before == slab.chunks


@given(layouts())
def test_key_blocks_hold_every_key_once_with_the_tiles_that_see_it(layout):
    """A block lies in one chunk, and its tiles are those that see one of its keys exactly, or more of them."""
    chunk, seen, tiles = layout.shape.chunk, [], tile_table(layout, CPU).tolist()
    for row, count, page, index, first, number in key_blocks(layout, CPU).tolist():
        assert 1 <= count <= min(64, chunk)
        assert index + count <= chunk
        sequence = int(np.searchsorted(np.cumsum(layout.recent), row, side="right"))
        position = row - sum(layout.recent[:sequence]) + layout.lengths[sequence] - layout.recent[sequence]
        assert position % chunk == index
        is_complete = position // chunk < layout.chunk_counts[sequence]
        assert page == (layout.starts[sequence] + position // chunk if is_complete else -1)
        seen += range(row, row + count)
        for tile, (_, queries, exact, end) in enumerate(tiles):
            last = end + (queries - 1 if layout.causal else 0)
            if layout.tile_sequence[tile] == sequence and exact < row + count and last > row:
                assert first <= tile < first + number
        assert all(layout.tile_sequence[tile] == sequence for tile in range(first, first + number))
    assert sorted(seen) == list(range(sum(layout.recent)))


def test_tables_are_built_once_also_in_inference_mode():
    layout = layout_of([31], shape=Shape((2, 2, 2), 4), causal=True)
    with torch.inference_mode():
        (slab,) = slabs(layout, CPU, 1)
        assert not slab.tiles.is_inference()
        assert not layout.rows_of_chunks(CPU).is_inference()
    assert slabs(layout, CPU, 1)[0] is slab
    assert readers(layout, slab, CPU) is readers(layout, slab, CPU)
