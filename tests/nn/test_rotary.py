import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa.errors import InvalidInput
from hsa.nn.rotary import rotary_angles, rotate


@given(st.integers(0, 100_000), st.integers(0, 1000), st.sampled_from([2, 6, 10]))
def test_products_of_rotated_vectors_depend_on_the_distance_alone(position, distance, dim):
    q, k = torch.randn(2, 1, 3, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(dim)).unbind(0)

    def product(at: int):
        rotated = rotate(q, rotary_angles(torch.tensor([at + distance]), dim))
        return (rotated * rotate(k, rotary_angles(torch.tensor([at]), dim))).sum(-1)

    torch.testing.assert_close(product(position), product(0), rtol=0, atol=1e-5)


def test_rotation_is_multiplication_by_complex_numbers():
    x, positions = torch.randn(7, 3, 10, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0, 1, 50])
    phase = positions[:, None, None] * 500.0 ** (-torch.arange(5) / 5)
    rotated = torch.complex(x[..., :5], x[..., 5:]) * torch.polar(torch.ones_like(phase), phase)
    wanted = torch.cat([rotated.real, rotated.imag], -1)
    torch.testing.assert_close(rotate(x, rotary_angles(positions, 10, base=500.0)), wanted, rtol=0, atol=1e-5)


def test_the_dtype_is_kept_and_far_positions_are_exact():
    assert rotate(torch.randn(2, 1, 4, dtype=torch.bfloat16), rotary_angles(torch.arange(2), 4)).dtype == torch.bfloat16
    cos, sin = rotary_angles(torch.tensor([1_000_000]), 2)
    exact = torch.tensor(1_000_000.0, dtype=torch.float64)
    torch.testing.assert_close(torch.cat([cos, sin]).flatten(), torch.stack([exact.cos(), exact.sin()]).float())


def test_an_odd_number_of_channels():
    with pytest.raises(InvalidInput, match=r"head_dim: expected an even number.*, got 5"):
        rotary_angles(torch.arange(3), 5)
