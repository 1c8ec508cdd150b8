import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa.nn.grouped_linear import GroupedLinear, Groups
from tests.forests import gradients

NAMES = ("text", "patch", "audio")
INPUTS, OUTPUTS = 5, 7


def leaves_of(modality):
    """Return the leaves of each modality, from the modality of every leaf."""
    numbers = torch.tensor(modality, dtype=torch.int64)
    by_name = {name: (numbers == i).nonzero()[:, 0] for i, name in enumerate(NAMES)}
    return {name: leaves for name, leaves in by_name.items() if len(leaves)}


def layer(groups=3, bias=True):
    made = GroupedLinear(groups, INPUTS, OUTPUTS, bias=bias).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def by_leaf(made, x, modality):
    """Compute W_m x + b_m leaf by leaf."""
    rows = [
        row @ made.weight[m] + (0 if made.bias is None else made.bias[m]) for row, m in zip(x, modality, strict=True)
    ]
    return torch.stack(rows)


@given(st.lists(st.integers(0, len(NAMES) - 1), min_size=1, max_size=11), st.booleans())
def test_every_leaf_is_mapped_by_its_modality(modality, bias):
    made = layer(bias=bias)
    x = torch.randn(len(modality), INPUTS, dtype=torch.float64, requires_grad=True)
    inputs = [x, *made.parameters()]
    y, wanted = made(x, Groups.of(leaves_of(modality), NAMES)), by_leaf(made, x, modality)
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-12)
    for ours, theirs in zip(gradients(y, inputs), gradients(wanted, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("only", range(len(NAMES)))
def test_the_short_path_of_one_modality_is_the_same(only):
    made, x = layer(), torch.randn(11, INPUTS, dtype=torch.float64)
    every = torch.arange(11)
    short = Groups.of({NAMES[only]: every}, NAMES)
    assert short.order is None
    general = Groups(short.sizes, every, every)
    torch.testing.assert_close(made(x, short), made(x, general), rtol=0, atol=1e-12)


def test_more_groups_than_modalities_are_empty():
    leaves = leaves_of([0, 1, 0])
    groups = Groups.of(leaves, NAMES[:2], 5)
    assert groups.sizes == (2, 1, 0, 0, 0)
    made, x = layer(groups=5), torch.randn(3, INPUTS, dtype=torch.float64)
    torch.testing.assert_close(made(x, groups), by_leaf(made, x, [0, 1, 0]), rtol=0, atol=1e-12)
    y = made(x, groups)
    assert not torch.autograd.grad(y.sum(), made.weight)[0][2:].any()


def test_only_the_last_group_has_leaves():
    made, x = layer(), torch.randn(11, INPUTS, dtype=torch.float64)
    torch.testing.assert_close(made(x, Groups((0, 0, 11), None, None)), by_leaf(made, x, [2] * 11), rtol=0, atol=1e-12)


def test_half_precision_by_autocast():
    made, x = layer().float(), torch.randn(7, INPUTS)
    groups = Groups.of(leaves_of([0, 1, 2, 0, 1, 2, 2]), NAMES)
    with torch.autocast("cpu", torch.bfloat16):
        y = made(x, groups)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), made(x, groups), rtol=0.02, atol=0.05)
