import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hsa.nn.buckets import _FEW, _STEP, alike, padded, way_back

LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=30).map(np.array)


def starts(lengths):
    return np.cumsum(lengths) - lengths


@given(LENGTHS, st.data())
def test_every_sequence_is_in_one_group_of_its_like(lengths, data):
    others = np.array(data.draw(st.lists(st.integers(0, 200), min_size=len(lengths), max_size=len(lengths))))
    for sizes in ((lengths,), (lengths, others)):
        groups = alike(*sizes)
        assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
        step = _STEP if len(lengths) > _FEW else 1
        kinds = [{tuple(-(-size[i] // step) for size in sizes) for i in group.tolist()} for group in groups]
        assert all(len(kind) == 1 for kind in kinds)
        assert len(set.union(*kinds)) == len(groups)  # no two that could be one


@given(LENGTHS)
def test_there_and_back(lengths):
    rows = np.random.default_rng(0).normal(size=int(lengths.sum()))
    groups = alike(lengths)
    there = [padded(starts(lengths)[group], lengths[group]) for group in groups]
    assert [part.shape for part in there] == [(len(group), lengths[group].max()) for group in groups]
    moved = np.concatenate([rows[part].ravel() for part in there])
    assert np.array_equal(moved[way_back(groups, starts(lengths), lengths)], rows)
    for part, group in zip(there, groups, strict=True):  # padding is the last row
        last = (starts(lengths) + lengths - 1)[group]
        assert (part.max(1) == last).all()


def test_nothing():
    none = np.empty(0, np.int64)
    assert alike(none, none) == []
    assert way_back([], none, none).shape == (0,)
