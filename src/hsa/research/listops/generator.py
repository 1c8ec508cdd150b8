"""ListOps: nested operations on digits with a known tree, which test whether a model can use structure.

The task is that of Nangia and Bowman (2018), with the sizes of the Long Range Arena (Tay et al., 2020): expressions such as
`[MAX 2 9 [MIN 4 7 ] 0 ]` of 500 to 2,000 tokens, with at most ten operands and ten levels. The answer is a digit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hsa.errors import InvalidInput
from hsa.signals import Leaf, Sequence, Signal

OPERATORS = ("MIN", "MAX", "MED", "SM")
END = 10 + len(OPERATORS)
"""Token id of the closing bracket. Digits are their own ids; the operators follow them."""
VOCABULARY = END + 1
WORDS = (*map(str, range(10)), *(f"[{name}" for name in OPERATORS), "]")
"""Written forms of the tokens, by id."""
_OPERATION_CHANCE = 0.25


@dataclass(frozen=True)
class Expression:
    """An operator and its operands, which are digits or expressions."""

    operator: int
    operands: tuple[int | Expression, ...]

    @property
    def value(self) -> int:
        """Value of the expression; the median of an even number of operands is rounded down.

        >>> Expression(1, (2, 9, Expression(0, (4, 7)), 0)).value
        9
        """
        values = sorted(o if isinstance(o, int) else o.value for o in self.operands)
        name = OPERATORS[self.operator]
        if name == "SM":
            return sum(values) % 10
        return {"MIN": values[0], "MAX": values[-1], "MED": int(np.median(values))}[name]

    @property
    def length(self) -> int:
        """Number of tokens: operator, operands and closing bracket."""
        return 2 + sum(1 if isinstance(o, int) else o.length for o in self.operands)

    def signal(self) -> Signal:
        """Return the expression tree; a family consists of an operator, its operands and the closing bracket.

        >>> print(Expression(1, (2, Expression(0, (4, 7)))).signal().show())
        Sequence(4) · 7 leaves · text
        ├─ [0] text · 11
        ├─ [1] text · 2
        ├─ [2] Sequence(4) · 4 leaves · text · 10 4 7 14
        └─ [3] text · 14
        """
        members: list[Signal | Leaf] = [Leaf(10 + self.operator, "text")]
        members += [Leaf(o, "text") if isinstance(o, int) else o.signal() for o in self.operands]
        members.append(Leaf(END, "text"))
        return Signal(Sequence(len(members)), members)


def expressions(
    count: int, seed: int, *, shortest: int = 500, longest: int = 2000, operands: int = 10, depth: int = 10
) -> Iterator[Expression]:
    """Generate random expressions with more than `shortest` and fewer than `longest` tokens, as the Long Range Arena does.

    Raises:
        InvalidInput: If no expression has such a length, or fewer than 2 operands or levels are allowed.
    """
    largest = 1
    for _ in range(depth - 1):
        largest = 2 + operands * largest
    if shortest + 1 >= min(longest, largest + 1) or operands < 2 or depth < 2:
        raise InvalidInput(
            "listops",
            got=f"lengths {shortest} to {longest}, {operands} operands, depth {depth}",
            expected="lengths that such expressions can have, and at least 2 operands and 2 levels",
        )
    generator = random.Random(seed)

    def grow(level: int, room: int) -> tuple[int | Expression, int]:
        """Return an operand and its length; give up, with a length above `room`, when it gets too long."""
        if level >= depth or generator.random() > _OPERATION_CHANCE:
            return generator.randrange(10), 1
        length, members = 2, []
        for _ in range(generator.randint(2, operands)):
            member, size = grow(level + 1, room - length)
            members.append(member)
            length += size
            if length > room:
                return 0, length
        return Expression(generator.randrange(len(OPERATORS)), tuple(members)), length

    made = 0
    while made < count:
        expression, length = grow(1, longest)
        if isinstance(expression, Expression) and shortest < length < longest:
            made += 1
            yield expression
