"""Kernels of `MultiscaleCache`: the same state and results as the steps in PyTorch."""

import pytest

pytest.importorskip("triton")

import torch

from hsa.attention.cache.multiscale import MultiscaleCache
from hsa.errors import Unsupported
from tests.attention.cache.growing import Text
from tests.interpreter import DEVICE, quick_interpreter  # noqa: F401

BIAS = torch.tensor([0.0, -0.5, 0.3, -1.0])
# Settings, bias, and tokens to compare: the first ones, those that close some levels, and the ones after those.
CASES = {
    "windows": ({"branching": (3, 2), "near": 1}, 0.0, (0, 2, 3, 11, 12, 23)),
    "sinks": ({"branching": (2,), "near": 0, "sinks": 2}, -0.4, (0, 1, 2, 3, 9, 17)),
    "closing": ({"branching": (3, 2), "near": 2, "sinks": 1, "closing": 3}, BIAS, (0, 1, 4, 9, 16, 23)),
    "one level": ({"branching": (24,), "near": 0}, 0.0, (0, 23)),
}


class Pair:
    """Two caches with the same tokens, one per backend."""

    def __init__(self, batch, heads=(4, 2), dims=(5, 17), dtype=torch.float32, **settings):
        sizes = {"value_dim": dims[1], "max_length": 24, "dtype": dtype, "device": DEVICE, **settings}
        self.triton, self.torch = (
            MultiscaleCache(1, batch, heads[1], dims[0], backend=name, **sizes) for name in ("triton", "torch")
        )
        self.atol = 1e-5 if dtype == torch.float32 else 0.02

    def step(self, text, both=True):
        """Add a token in PyTorch and, if `both`, with the kernels, starting from the same state."""
        rows, state = text.rows(self.torch), self.torch.state_dict()
        expected = self._step(self.torch, text, rows)
        if both:
            self.triton.load_state_dict(state)
            ours = self._step(self.triton, text, rows)
            torch.testing.assert_close(ours, expected, rtol=0, atol=self.atol)
            torch.testing.assert_close(ours.cpu(), text.out[rows], rtol=0, atol=self.atol)
            self.compare()

    def _step(self, cache, text, rows):
        cache.append(None if text.closes is None else text.closes[rows])
        q, k, v = (x[rows].to(DEVICE).transpose(0, 1).contiguous().transpose(0, 1) for x in (text.q, text.k, text.v))
        return cache.attend(0, q, k, v, **text.attention)

    def compare(self):
        for name in (*MultiscaleCache._STATE, *MultiscaleCache._STEP):
            ours, theirs = getattr(self.triton, name), getattr(self.torch, name)
            if ours.dtype == torch.int32:
                assert torch.equal(ours, theirs), name
            else:
                torch.testing.assert_close(ours, theirs, rtol=0, atol=self.atol)


@pytest.mark.parametrize("case", CASES)
def test_steps_equal_those_of_torch(case):
    settings, bias, compared = CASES[case]
    heads, dims = (4, 2), (5, 17)
    text = Text([24, 24], **settings, pooled_bias=bias, heads=heads, dims=dims, seed=3)
    pair = Pair(2, heads, dims, **settings)
    for token in range(24):
        pair.step(text, token in compared)


def test_prompts_crop_and_reorder():
    settings = {"branching": (3, 2), "near": 1, "sinks": 1, "closing": 2}
    heads, dims = (2, 1), (5, 7)
    text = Text([40, 40], **settings, heads=heads, dims=dims, scale=0.3)
    cache = Pair(2, heads, dims, max_length=200, rewind=2, **settings).triton
    text.begin(cache, [23, 17])
    for _ in range(2):
        assert text.step(cache) < 1e-5
    cache.crop([24, 17])
    assert text.step(cache) < 1e-5
    cache.reorder([1, 1, 0])
    assert text.step(cache, which=[1, 1, 0]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    heads, dims, settings = (2, 1), (16, 16), {"branching": (3, 2), "near": 0}
    text = Text([24], **settings, heads=heads, dims=dims, dtype=dtype)
    pair = Pair(1, heads, dims, dtype, **settings)
    for token in range(24):
        pair.step(text, token in (5, 12, 23))


def test_kernels_refuse_float64():
    with pytest.raises(Unsupported, match="float64"):
        MultiscaleCache(1, 1, 1, 8, dtype=torch.float64, device=DEVICE, backend="triton")
