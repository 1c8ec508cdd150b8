"""Texts that grow token by token in a cache, compared with a pass over the whole texts."""

import io

import numpy as np
import torch

from hsa import multiscale_attention, select
from hsa.tree.causal_tree import causal_tree

HEADS, KV_HEADS, DIM, VALUE_DIM = 6, 3, 5, 7


class Text:
    """A batch of texts, with the expected output of every token.

    Args:
        lengths: Lengths of the texts; a cache gets their first tokens as prompts, the others one by one.
        closing: Greatest height up to which tokens close families, at random; 0 for families of fixed size.
    """

    def __init__(
        self,
        lengths,
        branching=(4, 3),
        near=1,
        sinks=0,
        closing=0,
        *,
        heads=(HEADS, KV_HEADS),
        dims=(DIM, VALUE_DIM),
        pooled_bias=0.0,
        scale=None,
        seed=0,
        dtype=torch.float32,
    ):
        self.lengths, self.near, self.closing = lengths, near, closing
        self.attention = {"pooled_bias": pooled_bias, "scale": scale}
        generator, random = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
        shapes = (heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])
        self.q, self.k, self.v = (torch.randn(sum(lengths), *s, generator=generator).to(dtype) for s in shapes)
        self.first = np.cumsum(lengths) - lengths
        self.closes = None
        if closing:
            self.closes = random.integers(1, closing + 1, sum(lengths)) * (random.random(sum(lengths)) < 0.3)
            self.closes[self.first] = closing  # the first token: a sink, which closes nothing, or a family of one
        self.tree = causal_tree(lengths, branching, self.closes, sinks)
        self.out = self.outputs(self.q, self.k, self.v)
        self.garbage = generator

    def outputs(self, q, k, v):
        """Return the outputs of a pass over the whole texts."""
        selection = select(q, k, self.tree, near=self.near, causal=True)
        return multiscale_attention(q, k, v, self.tree, selection=selection, causal=True, **self.attention)

    def of(self, prompts):
        """Return the rows of the first tokens of every text."""
        return np.concatenate([first + np.arange(n) for first, n in zip(self.first, prompts, strict=True)])

    def prompts(self, lengths):
        """Return the packed keys and values of the first tokens."""
        return self.k[self.of(lengths)], self.v[self.of(lengths)]

    def begin(self, cache, lengths):
        """Fill a cache with the first tokens of every text."""
        tree = cache.begin(lengths, None if self.closes is None else self.closes[self.of(lengths)])
        for layer in range(cache.layers):
            cache.fill(layer, *(x.to(cache.device) for x in self.prompts(lengths)))
        return tree

    def rows(self, cache, which=None):
        """Return the row of the next token of every sequence; `which` is the text of each."""
        return self.first[range(len(self.lengths)) if which is None else which] + np.array(cache.lengths)

    def attend(self, cache, rows, layer=0):
        """Attend in one layer, and return the largest error."""
        token = (x[rows].to(cache.device) for x in (self.q, self.k, self.v))
        out = cache.attend(layer, *token, **self.attention)
        assert out.dtype == self.q.dtype
        return (out.cpu() - self.out[rows]).abs().max().item()

    def step(self, cache, which=None):
        """Add a token to every sequence, and return the largest error."""
        rows = self.rows(cache, which)
        cache.append(None if self.closes is None else self.closes[rows])
        return max(self.attend(cache, rows, layer) for layer in range(cache.layers))

    def step_garbage(self, cache):
        """Add a token that is in none of the texts and closes a random height."""
        heights = torch.randint(0, self.closing + 1, (cache.batch,), generator=self.garbage)
        cache.append(heights if self.closing else None)
        for layer in range(cache.layers):
            q, k, v = (
                torch.randn(cache.batch, *x.shape[1:], generator=self.garbage).to(x.dtype)
                for x in (self.q, self.k, self.v)
            )
            cache.attend(layer, q, k, v)


def saved(cache):
    """Return the state of a cache, saved to a file and loaded again."""
    file = io.BytesIO()
    torch.save(cache.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)
