"""Our attention in your own module: a small text encoder with a padding mask.

    python examples/own_module.py

`Block` was written for `torch.nn.MultiheadAttention`. One line changes; the trained weights stay.
"""

import time

import torch
from torch import Tensor, nn

import hsa


class Block(nn.Module):
    """Pre-norm transformer block on `[batch, length, width]` with a padding mask."""

    def __init__(self, width: int, heads: int, attention: nn.Module):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = attention
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, key_padding_mask=padding, need_weights=False)[0]
        return x + self.feed_forward(self.norm2(x))


def main(length: int = 4096) -> float:
    torch.manual_seed(0)
    width, heads = 256, 4
    theirs = Block(width, heads, nn.MultiheadAttention(width, heads, batch_first=True)).eval()
    ours = Block(width, heads, hsa.nn.MultiscaleAttention(width, heads)).eval()  # the line that changes
    ours.load_state_dict(theirs.state_dict())  # same names, same shapes

    x = torch.randn(2, length, width)
    padding = torch.arange(length) >= torch.tensor([[length], [length * 3 // 4]])  # True at padding, as in PyTorch
    with torch.no_grad():
        for name, block in (("torch.nn.MultiheadAttention", theirs), ("hsa.nn.MultiscaleAttention", ours)):
            y = block(x, padding)
            times = []
            for _ in range(3):
                start = time.perf_counter()
                block(x, padding)
                times.append(time.perf_counter() - start)
            print(f"{name:<30} {1000 * min(times):6.0f} ms   output {tuple(y.shape)}")
        difference = (ours(x, padding) - theirs(x, padding))[~padding].norm() / theirs(x, padding)[~padding].norm()
    print(f"relative difference of the block's outputs, with random weights and inputs: {difference:.3f}")
    return difference.item()


if __name__ == "__main__":
    main()
