import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hsa.training.language_model.experiment import binned


@given(st.lists(st.floats(0, 9), min_size=1, max_size=300), st.integers(1, 5))
def test_bins_contain_every_position_once(losses, per_octave):
    losses = np.array(losses)
    result = binned(losses, per_octave)
    positions = [position for position, _ in result]
    assert positions == sorted(positions)
    begin, total = 0, 0.0
    for position, mean in result:
        end = round(2 * position - 1 - begin)
        total += mean * (end - begin)
        begin = end
    assert begin == len(losses)
    np.testing.assert_allclose(total, losses.sum(), atol=1e-9)
