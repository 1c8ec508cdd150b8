import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa import Hierarchy
from hsa.baselines.han.family_gru import FamilyGRU
from tests.model_inputs import exact

WIDTH, INNER = 5, 3


@pytest.mark.parametrize("layers", [1, 2])
@settings(max_examples=15)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=7))
def test_equals_a_gru_on_each_family_alone(layers, lengths):
    model = exact(FamilyGRU(WIDTH, INNER, layers))
    x = torch.randn(sum(lengths), WIDTH, dtype=torch.float64, requires_grad=True)
    alone = [model.output(model.gru(rows[:, None])[0][:, 0]) for rows in x.split(lengths)]
    result, wanted = model(x, Hierarchy.flat(lengths)), torch.cat(alone)
    torch.testing.assert_close(result, wanted, rtol=0, atol=1e-12)
    weight, inputs = torch.randn_like(result), [x, *model.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad(result, inputs, weight), torch.autograd.grad(wanted, inputs, weight), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_gradients():
    model, families = exact(FamilyGRU(WIDTH, INNER)), Hierarchy.flat([3, 1, 2])
    x = torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: model(x, families), (x, *model.parameters()), fast_mode=True)


def test_no_families():
    empty = Hierarchy.collate([])
    assert FamilyGRU(WIDTH, INNER)(torch.empty(0, WIDTH), empty).shape == (0, WIDTH)


def test_dropout_only_in_training():
    model, families = FamilyGRU(WIDTH, INNER, 2, dropout=0.5), Hierarchy.flat([3, 2])
    x = torch.randn(5, WIDTH)
    assert not torch.equal(model(x, families), model(x, families))
    assert torch.equal(model.eval()(x, families), model(x, families))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hidden_states_stay_in_full_precision(dtype):
    model, families = exact(FamilyGRU(WIDTH, INNER)).float(), Hierarchy.flat([7, 2])
    caught = []
    model.gru.register_forward_hook(lambda module, inputs, outputs: caught.append(outputs[0].data.dtype))
    with torch.autocast("cpu", dtype):
        model(torch.randn(9, WIDTH).to(dtype), families)
    assert caught == [torch.float32]
