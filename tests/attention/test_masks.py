"""Masks are read for what they hide, or refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa.attention.masks import read_mask
from hsa.errors import InvalidInput


def padding(lengths, keys):
    return torch.arange(keys) < torch.tensor(lengths)[:, None]


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


def additive(mask, dtype=torch.float32, lowest=False):
    hidden = torch.finfo(dtype).min if lowest else -torch.inf
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, hidden)


@st.composite
def masks(draw):
    """Draw a mask of padding, with or without later keys, in one of its shapes, and what it means."""
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    keys = draw(st.integers(1, 7))
    lengths = draw(st.lists(st.integers(1, keys), min_size=batch, max_size=batch))
    present = padding(lengths, keys)
    if draw(st.booleans()):
        present = present.flip(1)  # padding on the left
    hides_later = draw(st.booleans()) and keys > 1
    queries = keys if hides_later else draw(st.integers(1, 7))
    mask = present[:, None, None]
    if hides_later:
        mask = mask & causal(keys)
    elif draw(st.booleans()):
        mask = mask.expand(-1, -1, queries, -1)
    if draw(st.booleans()):
        mask = mask.expand(-1, heads, -1, -1)
    if draw(st.booleans()):
        mask = additive(mask, draw(st.sampled_from([torch.float32, torch.bfloat16])), draw(st.booleans()))
    return mask, (batch, heads, queries, keys), present, hides_later


@given(masks())
def test_padding_and_later_keys(drawn):
    mask, shape, present, hides_later = drawn
    visible = read_mask(mask, shape)
    assert torch.equal(visible.keys, present)
    if visible.causal != hides_later:  # one token per sequence sees the same either way
        assert hides_later
        assert present.sum(1).max() == 1


@given(st.integers(2, 6), st.data())
def test_any_other_mask_is_refused(length, data):
    """Flip one entry that a query of the sequence sees."""
    mask = causal(length) if data.draw(st.booleans()) else torch.ones(length, length, dtype=torch.bool)
    rows, keys = mask.nonzero().T.tolist()
    number = data.draw(st.integers(0, len(rows) - 1))
    mask[rows[number], keys[number]] = False
    shown_by_others = mask[:, keys[number]].any()
    as_before = torch.equal(mask, causal(length))
    sees_nothing = not mask[rows[number]].any()  # any query may be hidden from everything
    if as_before or sees_nothing or not shown_by_others:
        return
    with pytest.raises(InvalidInput, match="attn_mask: expected a mask that hides padding, or padding and later keys"):
        read_mask(mask, (1, 1, length, length))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.full((3, 5), torch.nan), r"expected 0 and −∞ only.*got nan"),
        (torch.full((5, 5), -1e4), r"expected 0 and −∞ only.*got -10000. For padding, pass −∞ or a bool mask"),
        (torch.ones(3, 5), r"expected 0 and −∞ only, as attention over trees takes no bias, got 1"),
        (
            torch.ones(5, 5, dtype=torch.long),
            r"expected a tensor of bool or floating-point numbers, got dtype torch.int64",
        ),
        ([[True]], r"expected a tensor of bool or floating-point numbers, got list"),
        (
            torch.ones(4, 5, dtype=torch.bool),
            r"broadcasts to \[2 sequences, 3 heads, 5 queries, 5 keys\], got \(4, 5\)",
        ),
        (torch.ones(2, 5, 5, dtype=torch.bool), r"broadcasts to .*got \(2, 5, 5\)"),
        (torch.ones(1, 2, 3, 5, 5, dtype=torch.bool), r"broadcasts to"),
        (torch.rand(2, 3, 1, 5) < 0.5, r"expected the same mask for all heads"),
        (causal(5).triu(-1), r"hides key 0 from query 2 of sequence 0 but not from all queries"),
        (causal(5).T, r"hides key 0 from query 1"),
        (causal(5) | (torch.arange(5) < 2), r"hides key 2 from query 0"),  # a prefix that all may see
    ],
)
def test_refusals_name_the_reason(mask, message):
    torch.manual_seed(0)
    with pytest.raises(InvalidInput, match=f"attn_mask: .*{message}"):
        read_mask(mask, (2, 3, 5, 5))


def test_a_causal_mask_needs_as_many_queries_as_keys():
    with pytest.raises(InvalidInput, match="hides key 1 from query 0"):
        read_mask(torch.ones(3, 5, dtype=torch.bool).tril(), (1, 1, 3, 5))
