"""Facts hidden in a text, and questions about them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# fmt: off
CITIES = (
    "Amsterdam", "Berlin", "Cairo", "Dublin", "Edinburgh", "Florence", "Geneva", "Havana",
    "Istanbul", "Jakarta", "Kyoto", "Lisbon", "Madrid", "Nairobi", "Oslo", "Prague",
    "Quito", "Rome", "Stockholm", "Toronto", "Utrecht", "Vienna", "Warsaw", "Zurich",
)
# fmt: on
FACT = "\n\nOne of the special magic numbers for {city} is: {code}.\n\n"
QUESTION = (
    "\n\nWhat is the special magic number for {city} mentioned in the provided text? "
    "The special magic number for {city} mentioned in the provided text is:"
)


@dataclass(frozen=True)
class Question:
    """A text with hidden facts and a question at its end.

    Attributes:
        tokens: Text, question and answer.
        digits: Positions of the digits of the answer.
    """

    tokens: Tensor
    digits: tuple[int, ...]


def questions_of(text: Tensor, needles: int, tokenizer: Any) -> list[Question]:
    """Hide facts at evenly spaced depths of a text, and return one question for each of them."""
    if not 0 < needles <= len(CITIES):
        raise SystemExit(f"--needles: expected a number from 1 to {len(CITIES)}, got {needles}")
    dice = random.Random(0)
    codes = {city: f"{dice.randrange(10_000, 100_000)}" for city in dice.sample(CITIES, needles)}

    def tokens(string: str) -> list[int]:
        return list(tokenizer(string, add_special_tokens=False).input_ids)

    facts = [tokens(FACT.format(city=city, code=code)) for city, code in codes.items()]
    asked = {city: QUESTION.format(city=city) for city in codes}
    room = len(text) - sum(map(len, facts)) - max(len(tokens(f"{asked[city]} {code}.")) for city, code in codes.items())
    rest, haystack = text[:room].tolist(), []
    for number, fact in enumerate(facts):
        begin, end = ((2 * i - 1) * room // (2 * needles) if i else 0 for i in (number, number + 1))
        haystack += rest[begin:end] + fact
    haystack += rest[(2 * needles - 1) * room // (2 * needles) :]
    questions = []
    for city, code in codes.items():
        row = haystack + tokens(f"{asked[city]} {code}")
        answer = range(len(haystack) + len(tokens(asked[city])), len(row))
        digits = tuple(i for i in answer if tokenizer.decode([row[i]]).strip())
        if "".join(tokenizer.decode([row[i]]) for i in digits).strip() != code:
            raise SystemExit(f"the tokenizer does not separate the code {code} from the question")
        questions.append(Question(torch.tensor(row), digits))
    return questions
