import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hsa.analysis.metrics import confusion

CLASSES = 5
pairs = st.lists(st.tuples(st.integers(0, CLASSES - 1), st.integers(0, CLASSES - 1)), min_size=1, max_size=30)


@given(pairs)
def test_confusion_counts_pairs(listed):
    predicted, true = (np.array(column) for column in zip(*listed, strict=True))
    table = confusion(predicted, true, CLASSES)
    assert table.shape == (CLASSES, CLASSES)
    for a in range(CLASSES):
        for b in range(CLASSES):
            assert table[a, b] == listed.count((b, a))
