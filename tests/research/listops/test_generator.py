import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa.errors import InvalidInput
from hsa.research.listops.generator import END, OPERATORS, VOCABULARY, expressions
from hsa.signals import Leaf

SMALL = {"shortest": 5, "longest": 60, "operands": 4, "depth": 5}


def tokens(signal):
    return [signal.value] if isinstance(signal, Leaf) else [t for member in signal.members for t in tokens(member)]


def text(ids):
    """Return the written form, such as `[MAX 2 [MIN 4 7 ] ]`."""
    names = [*map(str, range(10)), *(f"[{name}" for name in OPERATORS), "]"]
    return " ".join(names[i] for i in ids)


def evaluated(written):
    """Evaluate a written expression with a stack."""
    stack = []
    for word in written.split():
        if word == "]":
            values = []
            while not isinstance(stack[-1], str):
                values.append(stack.pop())
            name, values = stack.pop(), sorted(values)
            middle = len(values) // 2
            median = values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) // 2
            stack.append({"[MIN": values[0], "[MAX": values[-1], "[MED": median, "[SM": sum(values) % 10}[name])
        else:
            stack.append(word if word.startswith("[") else int(word))
    (value,) = stack
    return value


@settings(max_examples=10)
@given(st.integers(0, 999))
def test_value_equals_that_of_the_written_expression(seed):
    for expression in expressions(7, seed, **SMALL):
        ids = tokens(expression.signal())
        assert expression.value == evaluated(text(ids))
        assert 0 <= expression.value <= 9
        assert len(ids) == expression.length
        assert SMALL["shortest"] < len(ids) < SMALL["longest"]
        assert set(ids) <= set(range(VOCABULARY))


def families(signal):
    if not isinstance(signal, Leaf):
        yield signal
        for member in signal.members:
            yield from families(member)


def test_families_consist_of_operator_operands_and_bracket():
    for expression in expressions(11, 0, **SMALL):
        signal = expression.signal()
        assert signal.depth < SMALL["depth"]
        for family in families(signal):
            first, *operands, last = family.members
            assert first.value in range(10, END)
            assert last.value == END
            assert 2 <= len(operands) <= SMALL["operands"]
            assert all(not isinstance(o, Leaf) or o.value in range(10) for o in operands)


def test_sizes_of_the_long_range_arena():
    for expression in expressions(3, 0):
        assert 500 < expression.length < 2000
        assert expression.signal().depth <= 10
        assert max(family.domain.size for family in families(expression.signal())) <= 12


def test_seed_determines_the_expressions():
    ours, again, theirs = (list(expressions(7, seed, **SMALL)) for seed in (0, 0, 1))
    assert ours == again
    assert ours != theirs
    assert list(itertools.islice(expressions(100, 0, **SMALL), 7)) == ours
    assert list(expressions(0, 0)) == []


@pytest.mark.parametrize(
    "sizes",
    [
        {"shortest": 9, "longest": 9},
        {"shortest": 9, "longest": 10},  # no length in between
        {"operands": 1},
        {"depth": 1},
        {"depth": 2, "operands": 4},  # at most six tokens
    ],
)
def test_impossible_sizes(sizes):
    with pytest.raises(InvalidInput, match=r"listops: expected .*, got lengths"):
        next(expressions(1, 0, **sizes))
