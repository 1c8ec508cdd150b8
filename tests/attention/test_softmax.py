"""Exact attention inside families: both code paths, gradients of both results, rows without a visible key."""

import math

import pytest
import torch

from hsa.attention.softmax import exact


def plain(q, k, v, bias, mask, scale):
    logits = q @ k.transpose(-1, -2) * scale
    logits = logits if bias is None else logits + bias
    logits = logits if mask is None else logits.masked_fill(~mask, -math.inf)
    return logits.softmax(-1).nan_to_num(0) @ v, logits.logsumexp(-1)


@pytest.mark.parametrize("value_dim", [5, 3])  # 5: fused on the CPU
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bias_shape", [None, (1, 1, 1, 7), (2, 3, 11, 7), (2, 1, 1, 7)])
def test_values_and_gradients(value_dim, masked, bias_shape):
    q, k, v = (
        torch.randn(2, 3, n, d, dtype=torch.float64, requires_grad=True) for n, d in ((11, 5), (7, 5), (7, value_dim))
    )
    bias = None if bias_shape is None else torch.randn(bias_shape, dtype=torch.float64, requires_grad=True)
    mask = None
    if masked:
        mask = torch.rand(2, 1, 11, 7) < 0.6
        mask[0, 0, 4] = False
    out, lse = exact(q, k, v, bias, mask, scale=0.7)
    expected = plain(q, k, v, bias, mask, 0.7)
    torch.testing.assert_close((out, lse), expected, rtol=1e-12, atol=1e-12)
    if masked:
        assert out[0, :, 4].abs().max() == 0
        assert (lse[0, :, 4] == -math.inf).all()

    def run(q, k, v, bias=None):
        out, lse = exact(q, k, v, bias, mask, scale=0.7)
        return out, lse.masked_fill(lse == -math.inf, 0)

    assert torch.autograd.gradcheck(run, (q, k, v) if bias is None else (q, k, v, bias))


def test_the_bias_is_not_rounded_to_half_precision():
    """The bias holds log leaf_count."""
    q, k, v = (torch.zeros(1, 1, 2, 4, dtype=torch.bfloat16) for _ in range(3))
    v[0, 0, 1] = 1
    bias = torch.tensor([math.log(1000.0), math.log(1003.0)])[None, None, None]
    _, lse = exact(q, k, v, bias)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse[0, 0, 0], torch.tensor(math.log(2003.0)))
