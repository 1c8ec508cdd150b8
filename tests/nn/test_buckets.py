import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hsa.nn.buckets import _FEW, _STEP, group_by_size, padded_rows, rows_after_padding

LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=30).map(np.array)


def starts(lengths):
    return np.cumsum(lengths) - lengths


@given(LENGTHS, st.data())
def test_every_sequence_is_in_one_group_of_its_size(lengths, data):
    others = np.array(data.draw(st.lists(st.integers(0, 200), min_size=len(lengths), max_size=len(lengths))))
    for sizes in ((lengths,), (lengths, others)):
        groups = group_by_size(*sizes)
        assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
        step = _STEP if len(lengths) > _FEW else 1
        kinds = [{tuple(-(-size[i] // step) for size in sizes) for i in group.tolist()} for group in groups]
        assert all(len(kind) == 1 for kind in kinds)
        assert len(set.union(*kinds)) == len(groups)  # no two groups of the same size


@given(LENGTHS)
def test_padding_and_back_returns_the_rows(lengths):
    rows = np.random.default_rng(0).normal(size=int(lengths.sum()))
    groups = group_by_size(lengths)
    padded = [padded_rows(starts(lengths)[group], lengths[group]) for group in groups]
    assert [part.shape for part in padded] == [(len(group), lengths[group].max()) for group in groups]
    moved = np.concatenate([rows[part].ravel() for part in padded])
    assert np.array_equal(moved[rows_after_padding(groups, starts(lengths), lengths)], rows)
    for part, group in zip(padded, groups, strict=True):  # padding repeats the last row
        last = (starts(lengths) + lengths - 1)[group]
        assert (part.max(1) == last).all()


def test_no_sequences():
    none = np.empty(0, np.int64)
    assert group_by_size(none, none) == []
    assert rows_after_padding([], none, none).shape == (0,)
