"""Conversion between padded and packed tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa import Hierarchy, HsaError, Padding, hierarchical_attention


@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7).filter(any), min_size=1, max_size=4))
def test_pack_and_unpack(mask):
    mask = torch.tensor(mask)
    padding = Padding(mask)
    x = torch.randn(len(mask), 3, 7, 5)
    packed = padding.pack(x)
    assert padding.lengths == mask.sum(1).tolist()
    assert torch.equal(packed, x.transpose(1, 2)[mask])
    assert torch.equal(padding.unpack(packed), x * mask[:, None, :, None])


def test_left_and_right_padding_agree():
    x = torch.randn(3, 2, 4, 5, 8)
    lengths = [3, 5]
    tree = Hierarchy.regular(lengths, (2, 2))
    right = Padding(lengths=lengths)
    left = Padding(right.mask.flip(1))
    shifted = torch.stack([torch.stack([row.roll(5 - n, 1) for row, n in zip(y, lengths, strict=True)]) for y in x])
    a = right.unpack(hierarchical_attention(*map(right.pack, x), tree))
    b = left.unpack(hierarchical_attention(*map(left.pack, shifted), tree))
    torch.testing.assert_close(b[0].roll(-2, 1), a[0])
    torch.testing.assert_close(b[1], a[1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Padding(), "Padding: expected exactly one of mask and lengths, got neither"),
        (lambda: Padding(torch.ones(1, 2), lengths=[2]), "Padding: expected exactly one of mask and lengths, got both"),
        (lambda: Padding(torch.ones(2)), r"mask: expected shape \[batch, seq\], got \(2,\)"),
        (lambda: Padding(torch.tensor([[1, 0], [0, 0]])), r"mask\[1\]: no token; expected at least one token"),
        (lambda: Padding(lengths=[3, 9], width=8), "lengths: expected at most width=8, got 9 tokens"),
        (
            lambda: Padding(lengths=[3]).pack(torch.zeros(1, 2, 4, 5)),
            r"x: expected shape \[1, heads, 3, head_dim\], got \(1, 2, 4, 5\)",
        ),
        (
            lambda: Padding(lengths=[3]).unpack(torch.zeros(4, 2, 5)),
            r"x: expected shape \[3, heads, head_dim\], got \(4, 2, 5\)",
        ),
    ],
)
def test_invalid_input(make, message):
    with pytest.raises(HsaError, match=message):
        make()
