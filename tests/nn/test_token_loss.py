import pytest
import torch
import torch.nn.functional as F

from hsa.nn import token_loss
from hsa.nn.token_loss import mean_token_loss, token_losses


def random_case(dtype=torch.float64):
    hidden = torch.randn(23, 5, dtype=dtype, requires_grad=True)
    weight = torch.randn(7, 5, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(7, (23,))


@pytest.mark.parametrize("at_once", [7, 7 * 4, 2**20])
def test_chunks_return_the_loss_and_gradients_of_one_call(monkeypatch, at_once):
    monkeypatch.setattr(token_loss, "LOGITS_AT_ONCE", at_once)
    hidden, weight, targets = random_case()
    wanted = F.cross_entropy(hidden @ weight.T, targets)
    torch.testing.assert_close(token_losses(hidden, weight, targets).mean(), wanted)
    slopes = torch.autograd.grad(wanted * 3, (hidden, weight))
    loss = mean_token_loss(hidden, weight, targets)
    torch.testing.assert_close(loss, wanted)
    for ours, theirs in zip(torch.autograd.grad(loss * 3, (hidden, weight)), slopes, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradcheck():
    hidden, weight, targets = random_case()
    assert torch.autograd.gradcheck(lambda h, w: mean_token_loss(h, w, targets), (hidden, weight))


def test_gradients_stay_in_float32_under_autocast():
    hidden, weight, targets = random_case(torch.float32)
    wanted = torch.autograd.grad(mean_token_loss(hidden, weight, targets), (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        loss = mean_token_loss(hidden, weight, targets)
    assert loss.dtype == torch.float32
    for ours, theirs in zip(torch.autograd.grad(loss, (hidden, weight)), wanted, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.01)


def test_frozen_tensors_get_no_gradients():
    hidden, weight, targets = random_case()
    assert not mean_token_loss(hidden.detach(), weight.detach(), targets).requires_grad
