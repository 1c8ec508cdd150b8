import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hsa.training.language_model.experiment import binned


@given(st.lists(st.floats(0, 9), min_size=1, max_size=300), st.integers(1, 5))
def test_bins_hold_every_place_once(losses, per_octave):
    losses = np.array(losses)
    found = binned(losses, per_octave)
    places = [place for place, _ in found]
    assert places == sorted(places)
    begin, total = 0, 0.0
    for place, mean in found:
        end = round(2 * place - 1 - begin)
        total += mean * (end - begin)
        begin = end
    assert begin == len(losses)
    np.testing.assert_allclose(total, losses.sum(), atol=1e-9)
