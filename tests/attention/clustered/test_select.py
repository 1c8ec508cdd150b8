"""Selection of groups: which are opened, from which query on, and the lists that follow from them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa import TileSelection, cluster, clustered_attention, select_groups
from hsa.attention.clustered.selection import NEVER, intervals_of, lists_of
from hsa.attention.clustered.torch_tiles import _products
from tests.attention.clustered.batches import HEADS, KV_HEADS, batches, rows_of


def tiles_of(selection):
    """Return number, number of queries and first queries of all tiles that see a chunk."""
    layout = selection.layout
    sizes = layout.tile_row[1:] - layout.tile_row[:-1]
    return [(t, int(sizes[t]), selection.tile(t)[0]) for t in range(layout.num_tiles) if layout.tile_chunks[t]]


@given(batches(), st.booleans())
def test_torch_equals_reference(batch, cut):
    keys = batch.cluster()
    if cut and batch.causal:  # one query less than before: the first may lie inside a tile
        queries = [max(0, n - 1) for n in batch.queries]
        rows = torch.cat(
            [torch.arange(r.stop - n, r.stop) for (r, _), n in zip(batch.sequences(), queries, strict=True)]
        )
        batch = replace(batch, q=batch.q[rows], queries=queries)
    lists = KV_HEADS if batch.rule["share_lists"] else HEADS
    opened = torch.rand(len(batch.lengths), lists, max(keys.chunks) * keys.shape.groups) < 0.3
    opened[..., :1] = True  # the group of the first key always is
    fast, slow = (batch.select(keys, backend=b, opened=opened) for b in ("torch", "reference"))
    assert fast.lists == slow.lists == lists
    assert fast.first.dtype == torch.uint8
    assert torch.equal(fast.first, slow.first)


@given(batches())
def test_rows_of_tiles_are_in_range_and_the_group_of_the_first_key_is_open(batch):
    selection = batch.select(batch.cluster())
    for _, rows, first in tiles_of(selection):
        assert (first[:, 0] == 0).all()
        assert ((first < rows) | (first == NEVER)).all()
        if not batch.causal:
            assert ((first == 0) | (first == NEVER)).all()


@given(batches())
def test_every_query_sees_every_key_once(batch):
    """Open groups stay open, and the active rows of the tables hold each key of the visible chunks exactly once."""
    selection = batch.select(batch.cluster())
    layout, shape = selection.layout, selection.layout.shape
    sizes = (1, shape.group, shape.node, shape.chunk)
    for tile, rows, first in tiles_of(selection):
        begin = int(layout.tile_chunk[tile])
        lists = lists_of(first, layout, rows, begin)
        intervals = intervals_of(first, layout, rows)
        assert all((end <= rows).all() for end in intervals.end)
        levels, low, high = (
            lists.kinds // (rows + 1) ** 2,
            lists.kinds // (rows + 1) % (rows + 1),
            lists.kinds % (rows + 1),
        )
        assert torch.equal(lists.lengths, (low < high).sum(-1))  # padding is never active
        assert ((lists.rows == lists.rows[:, :1]) | (low < high)).all()  # and repeats a row of the list
        for row in range(rows):
            is_open = first <= row
            assert row == 0 or (is_open | ~(first <= row - 1)).all()
            assert torch.equal((intervals.begin[0] <= row) & (row < intervals.end[0]), is_open)
            for which in range(len(first)):
                active = (low[which] <= row) & (row < high[which])
                seen = []
                entries = (x[which][active].tolist() for x in (lists.rows, levels))
                for number, level in zip(*entries, strict=True):
                    chunk, row_of_page = divmod(number, shape.page)
                    assert level == max(n for n in range(4) if shape.starts[n] <= row_of_page)
                    start = (chunk - begin) * shape.chunk + (row_of_page - shape.starts[level]) * sizes[level]
                    seen += range(start, start + sizes[level])
                assert sorted(seen) == list(range(int(layout.tile_chunks[tile]) * shape.chunk))


@pytest.mark.parametrize("causal", [False, True])
def test_weights_of_keys_sum_to_one(causal):
    """One-hot values give the weights of keys: positive for every visible key, 0 for others."""
    lengths = [19, 13]
    q, k, _ = rows_of(lengths, 3)
    v = torch.eye(32, dtype=torch.float64)[:, None].expand(-1, KV_HEADS, -1)
    weights = clustered_attention(q, k, v, lengths, causal=causal, threshold=0.3, branching=(2, 2, 1), tile=4)
    sequence = torch.arange(2).repeat_interleave(torch.tensor(lengths))
    visible = sequence[:, None] == sequence
    if causal:
        visible = visible.tril()
    assert torch.equal(weights > 0, visible[:, None].expand_as(weights))
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), rtol=1e-12, atol=1e-12)


@given(batches(), st.integers(0, 5))
def test_top_k_is_a_number_of_groups_per_query(batch, top_k):
    batch = replace(batch, tile=1, rule={"top_k": top_k, "spread": 0.0})
    for _, _, first in tiles_of(batch.select(batch.cluster())):
        number = (first == 0).sum(-1)
        least, groups = max(top_k, 1), first.shape[-1]
        assert ((number >= min(least, groups)) & (number <= min(top_k + 1, groups))).all()


@given(batches())
def test_smaller_thresholds_open_more(batch):
    keys = batch.cluster()
    last = None
    for threshold in (1, 0.3, 0.1, 0.01, 1e-30):
        first = replace(batch, rule={**batch.rule, "threshold": threshold, "top_k": None}).select(keys).first
        assert last is None or (first <= last).all()
        last = first
    assert (last == 0).all()


@given(batches(), st.sampled_from(["torch", "reference"]))
def test_every_head_selects_by_its_threshold(batch, backend):
    keys = batch.cluster()

    def select(threshold):
        rule = {**batch.rule, "threshold": threshold, "top_k": None, "share_lists": False}
        return [first for _, _, first in tiles_of(replace(batch, rule=rule).select(keys, backend=backend))]

    thresholds = (0.5, 0.03, 1.0, 0.2)
    per_head = select(torch.tensor(thresholds, dtype=torch.float64))
    for head, threshold in enumerate(thresholds):
        for ours, wanted in zip(per_head, select(threshold), strict=True):
            assert torch.equal(ours[head], wanted[head])
    for ours, wanted in zip(select([0.2] * HEADS), select(0.2), strict=True):
        assert torch.equal(ours, wanted)


@given(batches())
def test_the_spread_of_a_group_opens_more(batch):
    keys = batch.cluster()
    rule = {"threshold": 0.3, "share_lists": batch.rule["share_lists"]}
    last = None
    for spread in (0, 0.5, 1, 3.0):
        first = replace(batch, rule={**rule, "spread": spread}).select(keys).first
        assert last is None or (first <= last).all()
        last = first
    by_default = replace(batch, rule=rule).select(keys).first
    assert torch.equal(by_default, replace(batch, rule={**rule, "spread": 1.0}).select(keys).first)


@given(batches())
def test_shared_lists_are_the_union_of_those_of_the_heads(batch):
    keys = batch.cluster()
    own, shared = (replace(batch, rule={**batch.rule, "share_lists": s}).select(keys) for s in (False, True))
    assert (own.lists, shared.lists) == (HEADS, KV_HEADS)
    for (tile, _, first), (_, _, union) in zip(tiles_of(own), tiles_of(shared), strict=True):
        assert torch.equal(first.unflatten(0, (KV_HEADS, -1)).amin(1), union), tile


@given(batches())
def test_tiles_of_a_block_are_selected_as_one_by_one(batch):
    keys = batch.cluster()
    together = batch.select(keys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hsa.attention.clustered.torch_tiles.SCORES", {"cpu": 1})
        assert torch.equal(batch.select(keys).first, together.first)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 4), (3, 2, 32)])
def test_products_of_float32(heads, shape):
    """Products of float32 on a CPU are those of a convolution. NaN and infinity stay in their row."""
    table, rows = torch.randn(*shape, heads, 9), torch.randn(heads, 40, 9)
    rows[0, 3], rows[0, 5, 2] = torch.nan, torch.inf
    found, expected = _products(table, rows), _products(table.double(), rows.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@settings(max_examples=20)
@given(batches())
def test_opened_is_that_of_the_last_tiles(batch):
    selection = batch.select(batch.cluster())
    opened = selection.opened()
    assert opened.dtype == torch.bool
    assert opened.shape[:2] == (len(batch.lengths), selection.lists)
    last = {int(selection.layout.tile_sequence[t]): first for t, _, first in tiles_of(selection)}
    ends = {int(s): t for t, s in enumerate(selection.layout.tile_sequence)}
    assert opened.shape[2] == max((selection.tile(t).shape[-1] for t in ends.values()), default=0)
    for s in range(len(batch.lengths)):
        groups = last[s].shape[-1] if s in last else 0
        assert not opened[s, :, groups:].any()
        if groups:
            assert torch.equal(opened[s, :, :groups], last[s] != NEVER)


def test_opened_groups_stay_open_in_their_tile_alone():
    q, k, v = rows_of([32], 1)
    keys = cluster(k, v, [32], branching=(2, 2, 2))
    first_group = (torch.arange(12) == 0).expand(1, HEADS, -1)
    opened = first_group.clone()
    opened[0, 2, 5] = True
    options = {"query_lengths": [14], "causal": True, "top_k": 0, "tile": 4}
    first = [select_groups(q[-14:], k, keys, [32], opened=o, **options) for o in (opened, first_group)]
    changed = (first[0].first != first[1].first).nonzero().flatten()
    assert len(changed) == 1
    assert first[0].tile(0)[0, 2, 5] == 0  # the tile of tokens 18 and 19
    # The first query of a tile needs nothing of others.
    aligned = {**options, "query_lengths": [12]}
    first = [select_groups(q[-12:], k, keys, [32], opened=o, **aligned) for o in (opened, None)]
    assert torch.equal(first[0].first, first[1].first)


def test_a_selection_says_how_many_groups_are_open():
    q, k, v = rows_of([32], 1)
    keys = cluster(k, v, [32], branching=(2, 2, 2))
    selection = select_groups(q, k, keys, [32], top_k=0, tile=8)
    assert repr(selection) == "TileSelection(4 tiles, 4 lists each, 6.2% of the groups open)"
    assert "0.0%" in repr(TileSelection(selection.first[:0], selection.layout, 4))


def test_selection_has_no_gradient():
    q, k, v = (x.requires_grad_() for x in rows_of([20], 1))
    keys = cluster(k, v, [20], branching=(2, 2, 2))
    assert keys.k.requires_grad
    assert not keys.scores.requires_grad
    assert not select_groups(q, k, keys, [20], threshold=0.2, tile=4).first.requires_grad
