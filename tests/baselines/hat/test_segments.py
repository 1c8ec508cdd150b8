"""Segments compared with a recursive walk over every tree."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa import Hierarchy
from hsa.baselines.hat.segments import text_segments
from tests.forests import forests


def by_hand(hierarchy, longest, level):
    """Return the leaves of every segment of every document."""
    s = hierarchy.structure

    def leaves(node):
        return list(range(s.first_leaf[node], s.first_leaf[node] + s.leaf_count[node]))

    def runs(node):
        if s.height[node] <= level:
            yield leaves(node)
            return
        loose = []
        for child in range(s.first_child[node], s.first_child[node] + s.num_children[node]):
            if s.num_children[child] == 0:
                loose += leaves(child)
                continue
            if loose:
                yield loose
                loose = []
            yield from runs(child)
        if loose:
            yield loose

    documents = []
    for root in range(hierarchy.num_trees):
        result = runs(root) if level else [leaves(root)]
        documents.append([run[i : i + longest] for run in result for i in range(0, len(run), longest)])
    return documents


@given(hierarchy=forests(), longest=st.integers(1, 7), level=st.integers(0, 4), last_row=st.booleans())
def test_segments_match_a_recursive_walk(hierarchy, longest, level, last_row):
    wanted = by_hand(hierarchy, longest, level)
    result = text_segments(hierarchy, longest, level, last_row=last_row)
    segments = [segment for document in wanted for segment in document]
    assert result.documents == Hierarchy.flat([len(document) for document in wanted])
    assert result.rows == Hierarchy.flat([len(segment) + 1 + last_row for segment in segments])
    begin, end = hierarchy.num_leaves, hierarchy.num_leaves + 1
    rows = [[begin, *segment, *([end] if last_row else [])] for segment in segments]
    flat = [source for row in rows for source in row]
    assert result.source.tolist() == flat
    assert result.position.tolist() == [position for row in rows for position in range(len(row))]
    assert result.first.tolist() == [i for i, source in enumerate(flat) if source == begin]
    assert result.leaf.tolist() == [flat.index(leaf) for leaf in range(hierarchy.num_leaves)]
    assert result.number.tolist() == [number for document in wanted for number in range(len(document))]


def test_sentences_paragraphs_and_loose_tokens():
    # A title of two tokens under the root, a paragraph of two sentences, a sentence under the root.
    text = Hierarchy.from_parents([-1, 0, 0, 0, 3, 3, 4, 4, 5, 0, 9, 9, 9])
    lengths = {level: [n - 1 for n in text_segments(text, 99, level).rows.lengths] for level in (0, 1, 2, 3)}
    assert lengths == {0: [8], 1: [2, 2, 1, 3], 2: [2, 3, 3], 3: [8]}


@pytest.mark.parametrize("level", [0, 1])
def test_no_documents(level):
    result = text_segments(Hierarchy.flat([]), 5, level)
    assert result.rows.num_leaves == result.documents.num_leaves == len(result.source) == 0
    assert result.first.dtype == result.source.dtype == torch.int64


def test_segments_are_built_once():
    text = Hierarchy.from_nested([[3, 2]])
    assert text_segments(text, 4, 1) is text_segments(text, 4, 1)
    assert text_segments(text, 4, 1) is not text_segments(text, 4, 0)


def test_loose_tokens_of_two_documents_are_not_neighbours():
    """Do not join the last leaf of one family with the first of the next if both are above the sentences."""
    texts = Hierarchy.from_parents([-1, -1, 0, 0, 1, 1, 2, 2, 5, 5])
    result = text_segments(texts, 99, 1)
    assert [n - 1 for n in result.rows.lengths] == [2, 1, 1, 2]
    assert result.documents.lengths == [2, 2]
