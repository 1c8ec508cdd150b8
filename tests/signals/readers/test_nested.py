import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa.errors import InvalidInput
from hsa.signals import Leaf, Sequence, Set, Signal, Table
from hsa.signals.readers import from_nested

scalars = st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=2) | st.booleans()
nestings = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3) | st.dictionaries(st.text(max_size=2), inner, min_size=1, max_size=3)
    ),
    max_leaves=12,
)


def back(signal):
    if isinstance(signal, Leaf):
        return signal.value
    members = [back(member) for member in signal.members]
    return dict(zip(signal.domain.keys, members, strict=True)) if isinstance(signal.domain, Table) else members


def same(a, b):
    """Equal in types too: 1, 1.0 and True differ."""
    return repr(a) == repr(b)


@given(nestings)
def test_lists_and_dictionaries_come_back(nested):
    assert same(back(from_nested(nested)), nested)


def test_domains_and_modalities():
    nested = {"words": ("a", "b"), "mixed": [1, "x"], "tags": frozenset({3, 1, 2}), "on": True}
    assert from_nested(nested) == Signal(
        Table(["words", "mixed", "tags", "on"]),
        [
            Signal.of(["a", "b"], "text"),
            Signal(Sequence(2), [Leaf(1, "number"), Leaf("x", "text")]),
            Signal.of([1, 2, 3], "number", Set(3)),
            Leaf(True, "number"),
        ],
    )
    assert from_nested(nested, "cell").modalities == ("cell",)
    assert from_nested({1, "a"}) == Signal(Set(2), [Leaf("a", "text"), Leaf(1, "number")])  # sorted by repr
    kept = [Signal.of([1], "token"), Leaf(torch.ones(3), "vector")]
    assert from_nested(kept, "other") == Signal(Sequence(2), kept)


def test_arrays_become_sequences_of_rows():
    assert from_nested(np.arange(3)) == Signal.of([0, 1, 2], "number")
    rows = torch.randn(2, 3, 5)
    assert from_nested(rows) == Signal(Sequence(2), [Leaf(row, "array") for row in rows])
    assert from_nested(np.array(["a", "b"])) == Signal.of(["a", "b"], "text")
    assert from_nested(np.array(5)) == Leaf(5, "number")
    assert from_nested([np.float32(2), "a"]).members[0] == Leaf(torch.tensor(2.0), "number")


def test_drop_empty():
    nested = {"a": None, "b": [1, None], "c": [[], [{}]], "d": np.zeros((0, 3))}
    assert from_nested(nested, drop_empty=True) == from_nested({"b": [1]})
    with pytest.raises(InvalidInput, match=r"nested: no values, only empty containers; expected at least one value"):
        from_nested([[], None], drop_empty=True)


def test_deep_nesting():
    nested: list = [7]
    for _ in range(3000):
        nested = [nested]
    assert from_nested(nested).depth == 3001


def test_shared_objects_are_not_taken_for_cycles():
    row = [1, "a"]
    assert from_nested([row, row]).num_leaves == 4


def cyclic():
    inner: dict = {"x": 1}
    inner["self"] = [inner]
    return {"page": [0, inner]}


@pytest.mark.parametrize(
    ("nested", "message"),
    [
        (cyclic(), "nested.page[1].self[0]: expected a tree, got a dict that contains itself"),
        (
            {"page": [{"image": object()}]},
            "nested.page[0].image: expected a list, tuple, dict, set, array, number or string, got a value of type object. "
            "Convert it to one of these, or to a Leaf",
        ),
        (
            {"a b": [1, None]},
            "nested['a b'][1]: expected a list, tuple, dict, set, array, number or string, got None. "
            "Leave it out, or pass drop_empty=True",
        ),
        (
            [1, [2, ()]],
            "nested[1][1]: expected at least one member, got an empty tuple. Leave it out, or pass drop_empty=True",
        ),
        ([{3: 4}], "nested[0]: expected keys that are strings, got the key 3. Use str(key)"),
        ({"a": [0, np.zeros((0, 3))]}, "nested.a[1]: expected at least one row, got an array of shape (0, 3)"),
        ([[1, 2**70]], f"nested[0][1]: expected an integer of at most 64 bits, got {2**70}"),
        ([["a", 2**70]], f"nested[0][1]: expected an integer of at most 64 bits, got {2**70}"),
    ],
)
def test_errors_carry_the_path(nested, message):
    with pytest.raises(InvalidInput) as caught:
        from_nested(nested)
    assert str(caught.value) == message
