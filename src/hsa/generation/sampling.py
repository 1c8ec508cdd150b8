"""`Sampling`: options for drawing the next token from logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hsa.errors import InvalidInput


@dataclass(frozen=True)
class Sampling:
    """Options for drawing the next token.

    Args:
        temperature: Divisor of the logits; 0 takes the most likely token.
        top_k: Number of most likely tokens to draw from; 0 for all.
        top_p: Draw from the most likely tokens that together have this probability; 1 for all.
        seed: Random seed; None for a different one each time.

    >>> Sampling(temperature=0).draw(torch.tensor([[0.1, 2.0, 0.3]])).tolist()
    [1]
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise InvalidInput("temperature", got=self.temperature, expected="0 or a positive number")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise InvalidInput("top_k", got=self.top_k, expected="a number of tokens, or 0 for all")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise InvalidInput("top_p", got=self.top_p, expected="a probability: more than 0, at most 1")
        whole = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        if self.seed is not None and not (whole and 0 <= self.seed < 2**63):
            raise InvalidInput("seed", got=self.seed, expected="an integer of 0 or more, below 2^63")

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a new random generator for the tokens of a text."""
        generator = torch.Generator(device)
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator

    def draw(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw a token for every row of `logits` `[batch, vocabulary]`."""
        if self.temperature == 0:
            return logits.argmax(-1)
        return torch.multinomial(self.probabilities(logits), 1, generator=generator).squeeze(-1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities `[batch, vocabulary]` to draw from; the temperature must not be 0.

        >>> Sampling(top_p=0.6).probabilities(torch.tensor([[0.5, 0.3, 0.2]]).log()).tolist()  # 0.5 is less than 0.6
        [[0.625, 0.375, 0.0]]
        """
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # Subtract the maximum first: the most likely token stays finite at any temperature.
        wide = (wide - wide.amax(-1, keepdim=True)) / self.temperature
        if 0 < self.top_k < wide.shape[-1]:
            least = wide.topk(self.top_k).values[..., -1:]
            wide = wide.masked_fill(wide < least, -torch.inf)
        probabilities = wide.softmax(-1)
        if self.top_p < 1:
            ordered, index = probabilities.sort(-1, descending=True)
            before = ordered.cumsum(-1) - ordered  # probability of more likely tokens: the first is always kept
            kept = torch.zeros_like(probabilities, dtype=torch.bool).scatter_(-1, index, before < self.top_p)
            probabilities = probabilities.masked_fill(~kept, 0.0)
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return probabilities


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
