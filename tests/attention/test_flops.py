"""Operation counts: the paper's figures, and counts of families and lists."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa import Hierarchy, HsaError, cluster, cluster_keys, flops, flops_flat, flops_regular, select, select_groups
from hsa.attention.clustered.flops import operations
from hsa.attention.clustered.keys import clustering_operations
from hsa.attention.clustered.selection import lists_of
from tests.forests import forests, random_inputs

# Table 3 of the paper: average length, MFLOPs of the original and of the hierarchical layer, as printed.
TABLE_3 = {
    "IMDB": (264, "214.94", "4.32"),
    "AGNEWS": (54, "8.99", "0.8357"),
    "CoLA": (12, "0.4441", "0.1912"),
    "SST-2": (26, "2.08", "0.4132"),
    "MRPC": (55, "9.33", "0.8481"),
    "RTE": (70, "15.11", "1.29"),
    "QNLI": (38, "4.45", "0.5643"),
}


@pytest.mark.parametrize(("length", "flat", "tree"), TABLE_3.values(), ids=TABLE_3)
def test_the_papers_table_3(length, flat, tree):
    def printed(operations, like):
        """Return whether the count is within one unit of the last printed digit: the table both rounds and truncates."""
        digits = len(like.split(".")[1])
        return abs(operations / 1e6 - float(like)) < 10**-digits

    assert printed(flops_flat(length, 768, 12), flat)
    assert printed(flops_regular(length, (2, 4, 8, 16), 768, 12), tree)


@given(forests())
def test_hierarchical_count_is_the_sum_over_families(forest):
    counts = flops(forest, 24, 3)
    sizes = [int(n) for n in forest.structure.num_children]
    assert counts.attention == (4 * 24 + 3) * sum(n * n for n in sizes)
    assert counts.total == counts.attention + counts.pooling


@given(forests(), st.integers(0, 2), st.integers(0, 2))
def test_multiscale_count_is_the_sum_over_lists(forest, near, top_k):
    q, k, _ = random_inputs(forest, 0)
    selection = select(q, k, forest, near=near, top_k=top_k)
    partition = selection.partition(forest)
    counts = flops(selection, 24, 6, hierarchy=forest)
    per_head = (partition.lengths * selection.queries.offsets.diff()[:, None]).sum(0).tolist()
    assert counts.attention == (4 * 24 + 6) * sum(per_head) // len(per_head)
    assert counts.selection == selection.scored * (2 * 24 // 6 + 1)
    assert flops(partition, 24, 6, hierarchy=forest).attention == counts.attention
    if top_k == 0:
        assert counts.selection == 0


def test_causal_counts_include_only_visible_keys():
    forest = Hierarchy.regular([16], (4, 4))
    q, k, _ = random_inputs(forest, 0)
    selection = select(q, k, forest, causal=True)
    seen = sum(position + 1 + window for window in range(4) for position in range(4))  # own window so far, earlier ones
    assert flops(selection, 24, 6, hierarchy=forest).attention == (4 * 24 + 6) * seen


def test_own_family_only():
    forest = Hierarchy.regular([16], (4, 4))
    q, k, _ = random_inputs(forest, 0)
    counts = flops(select(q, k, forest), 24, 6, hierarchy=forest)
    assert counts.attention == (4 * 24 + 6) * 16 * (4 + 3)


def test_clustering_is_counted_separately():
    forest = Hierarchy.regular([64], (4, 2), repeat_last=True)
    q, k, _ = random_inputs(forest, 0)
    clusters = cluster_keys(k, forest)
    selection = select(q, k, forest, top_k=2, clusters=clusters)
    assert flops(selection, 24, 6, hierarchy=forest, clusters=clusters).clustering == clusters.operations > 0


@settings(max_examples=20)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=3), st.booleans(), st.booleans(), st.integers(0, 9))
def test_clustered_count_is_the_sum_over_tiles(lengths, causal, share_lists, seed):
    draw = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(sum(lengths), heads, 4, generator=draw) for heads in (6, 2))
    keys = cluster(k, k, lengths, branching=(4, 2, 2))
    selection = select_groups(q, k, keys, lengths, causal=causal, tile=8, threshold=1 / 8, share_lists=share_lists)
    counts = flops(selection, 24, 6)
    layout, entries, scored = selection.layout, 0, 0
    for tile in range(layout.num_tiles):
        rows = int(layout.tile_row[tile + 1] - layout.tile_row[tile])
        chunks = int(layout.tile_chunks[tile])
        exact = int(layout.tile_end[tile] - layout.tile_exact[tile]) + (rows - 1) * causal
        lists = lists_of(selection.tile(tile)[0], layout, rows, 0).lengths if chunks else torch.zeros(1)
        entries += rows * (int(lists.sum()) * 6 // selection.lists + exact * 6)
        scored += rows * 6 * (chunks * (4 + 4 + 2 + 1) + exact) if chunks else 0
    assert counts.attention == (4 * 24 + 6) * entries // 6
    assert counts.selection == scored * (2 * 4 + 1)
    assert counts.pooling == keys.num_chunks * (16 + 4 + 2) * 2 * 2 * 24
    assert counts.clustering == clustering_operations(keys.num_chunks, 6, 4, layout.shape)
    assert operations(selection, 24, 6, kv_heads=2).clustering * 3 == counts.clustering
    without = operations(selection, 24, 6, spread=0.0, top_k=1).selection
    assert without == sum(n * c for n, c in zip(np.diff(layout.tile_row), layout.tile_chunks, strict=True)) * 6 * 5 * 9


def test_invalid_input():
    with pytest.raises(HsaError, match=r"branching\[1\]: expected .*, got 0"):
        flops_regular(5, (2, 0), 8, 2)
    with pytest.raises(HsaError, match=r"n: expected .*, got -1"):
        flops_flat(-1, 8, 2)
    with pytest.raises(HsaError, match=r"width: expected .*, got 0"):
        flops(Hierarchy.flat([3]), 0, 2)
    with pytest.raises(HsaError, match=r"structure: expected .*, got int"):
        flops(3, 8, 2)
    with pytest.raises(HsaError, match=r"branching: expected .*, got 2"):
        flops_regular(5, 2, 8, 2)
    forest = Hierarchy.flat([3])
    q, k, _ = random_inputs(forest, 0)
    with pytest.raises(HsaError, match=r"hierarchy: not given; expected the tree of the selection"):
        flops(select(q, k, forest), 24, 6)
