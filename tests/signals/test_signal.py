import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa.errors import InvalidInput
from hsa.signals import Graph, Grid, Leaf, Sequence, Set, Signal, Table
from tests.signals.random_signals import leaves, signals


def chain(depth: int, value: int = 3) -> Signal:
    signal = Signal.of([value], "token")
    for _ in range(depth - 1):
        signal = Signal(Sequence(1), [signal])
    return signal


def website() -> Signal:
    pages = [
        Signal(Set(2), [Signal.of(["a", "b", "c"], "text"), Signal.of(torch.zeros(2, 3, 5, 7), "patch", Grid((2, 3)))]),
        Signal(Table(["title", "likes"]), [Signal.of(["d"], "text"), Leaf(11, "number")]),
        Leaf("moved", "text"),
    ]
    return Signal(Graph(3, [(0, 1), (1, 2)]), pages)


def test_counts():
    site = website()
    assert site.num_leaves == 3 + 6 + 1 + 1 + 1
    assert site.num_families == 1 + 1 + 2 + 1 + 1
    assert site.depth == 3
    assert site.modalities == ("text", "patch", "number")
    assert repr(site) == "Signal(Graph(3 nodes, 2 edges), 12 leaves, 6 families, depth 3, text, patch, number)"


@given(signals)
def test_counts_add_up_over_members(signal):
    inner = [member for member in signal.members if isinstance(member, Signal)]
    assert len(signal.members) == signal.domain.size
    assert signal.num_leaves == len(signal.members) - len(inner) + sum(member.num_leaves for member in inner)
    assert signal.num_families == 1 + sum(member.num_families for member in inner)
    assert signal.depth == 1 + max((member.depth for member in inner), default=0)


@given(signals)
def test_members_give_the_signal_back(signal):
    again = Signal(signal.domain, signal.members)
    assert again == signal
    assert (again.values is None) == (signal.values is None)
    assert signal == copy.deepcopy(signal) == pickle.loads(pickle.dumps(signal))


@given(leaves, leaves)
def test_leaves_are_equal_only_in_value_dtype_and_modality(a, b):
    assert a == copy.deepcopy(a)
    as_tensors = [torch.as_tensor(leaf.value) for leaf in (a, b) if not isinstance(leaf.value, str)]
    if len(as_tensors) == 2 and (as_tensors[0].dtype, as_tensors[0].shape) != (
        as_tensors[1].dtype,
        as_tensors[1].shape,
    ):
        assert a != b


@pytest.mark.parametrize(
    "other",
    [
        Signal.of([3, 1, 5], "token"),
        Signal.of([3, 1], "token"),
        Signal.of([3.0, 1.0, 4.0], "token"),
        Signal.of(torch.tensor([3, 1, 4], dtype=torch.int32), "token"),
        Signal.of(torch.tensor([[3], [1], [4]]), "token"),
        Signal.of(["3", "1", "4"], "token"),
        Signal.of([3, 1, 4], "number"),
        Signal.of([3, 1, 4], "token", Set(3)),
        Signal.of([3, 1, True], "token"),
        Leaf(3, "token"),
    ],
    ids=repr,
)
def test_signals_that_differ_are_not_equal(other):
    assert Signal.of([3, 1, 4], "token") != other


def test_signals_built_in_different_ways_are_equal():
    forms = [[3, 1, 4], (3, 1, 4), np.array([3, 1, 4]), torch.tensor([3, 1, 4]), [np.int64(3), 1, torch.tensor(4)]]
    made = [Signal.of(form, "token") for form in forms]
    made.append(Signal(Sequence(3), [Leaf(i, "token") for i in (3, 1, 4)]))
    for signal in made:
        assert signal == made[0]
        assert signal.values.dtype == torch.int64
        assert [leaf.value for leaf in signal.members] == [3, 1, 4]
        assert type(signal.members[0].value) is int
    assert Signal.of(np.array(["a", "bc"]), "text") == Signal.of(["a", "bc"], "text")


def test_dtypes_of_scalars_survive():
    half = Signal.of(torch.tensor([0.5, 2.0], dtype=torch.float16), "x")
    assert half.members[1].value.dtype == torch.float16
    assert half == Signal(Sequence(2), list(half.members))
    mixed = Signal.of([1, 2.5, True, "a"], "x")
    assert [type(leaf.value) for leaf in mixed.members] == [int, float, bool, str]
    assert mixed.values is None


@pytest.mark.parametrize(
    "family",
    [
        [Leaf("a", "title"), Leaf("a", "body")],
        [Leaf(3, "token"), Leaf(3, "number")],
        [Leaf(torch.ones(3), "x"), Leaf(torch.ones(3, dtype=torch.float64), "x")],
        [Leaf(torch.ones(3), "x"), Leaf(torch.ones(5), "x")],
        [Leaf(torch.tensor(1.0), "x"), Leaf(1.0, "x")],
    ],
    ids=repr,
)
def test_leaves_of_several_kinds_keep_their_kinds(family):
    signal = Signal(Sequence(2), family)
    assert signal.values is None
    for member, leaf in zip(signal.members, family, strict=True):
        assert (member.modality, type(member.value)) == (leaf.modality, type(leaf.value))
        if isinstance(leaf.value, torch.Tensor):
            assert (member.value.dtype, member.value.shape) == (leaf.value.dtype, leaf.value.shape)


def test_nan_equals_nan_and_zero_shape_counts():
    nan = float("nan")
    assert Signal.of([nan, 1.0], "x") == Signal.of([nan, 1.0], "x") != Signal.of([1.0, nan], "x")
    assert Leaf(nan, "x") == Leaf(nan, "x") != Leaf(0.0, "x")
    assert Leaf(torch.empty(0, 3), "x") != Leaf(torch.empty(3, 0), "x")


def test_grid_values_are_read_row_by_row():
    image = torch.arange(2 * 3 * 5).reshape(2, 3, 5)
    signal = Signal.of(image, "patch", Grid((2, 3)))
    assert torch.equal(signal.members[4].value, image[1, 1])
    assert signal.domain.step(4) == "[1, 1]"
    assert signal == Signal.of(list(image.reshape(6, 5)), "patch", Grid((2, 3)))


def test_a_hundred_thousand_tokens_are_one_stack():
    signal = Signal.of(range(100_003), "token")
    assert signal.num_leaves == 100_003
    assert signal.values.shape == (100_003,)
    assert signal.members[-1] == Leaf(100_002, "token")
    assert signal.members[1:3] == (Leaf(1, "token"), Leaf(2, "token"))
    with pytest.raises(IndexError):
        signal.members[100_003]


def test_read_only_and_reversed_arrays():
    array = np.arange(5)
    array.flags.writeable = False
    assert Signal.of(array, "x") == Signal.of([0, 1, 2, 3, 4], "x")
    assert Signal.of(np.arange(5)[::-1], "x") == Signal.of([4, 3, 2, 1, 0], "x")


def test_deep_chains():
    deep = chain(3001)
    assert deep.depth == deep.num_families == 3001
    assert deep == chain(3001)
    assert deep != chain(3001, value=5)
    assert len(deep.show(max_rows=7).splitlines()) == 8


def test_frozen():
    for thing, field in ((Signal.of([1], "x"), "domain"), (Leaf(1, "x"), "value")):
        with pytest.raises(AttributeError, match="frozen"):
            setattr(thing, field, None)
        with pytest.raises(TypeError, match="unhashable"):
            hash(thing)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Signal(Sequence(3), [Leaf(1, "x")] * 2, where="page[2].image"),
            "page[2].image: expected 3, one per position of Sequence(3), got 2 members",
        ),
        (
            lambda: Signal.of(torch.zeros(3, 8), "x", Grid((2, 4)), where="page[2].image"),
            "page[2].image: expected shape (2, 4) + the shape of a leaf, "
            "as the domain is Grid((2, 4)), got values of shape (3, 8)",
        ),
        (
            lambda: Signal.of([1, 2, 3], "x", Table(["a", "b"]), where="row"),
            "row: expected 2, one per position of Table('a', 'b'), got 3 members",
        ),
        (
            lambda: Signal(Table(["a", "b"]), [Leaf(1, "x"), 5], where="row"),
            "row.b: expected a Signal or a Leaf, got a value of type int. Wrap a value: Leaf(value, modality); "
            "many of one modality: Signal.of(values, modality)",
        ),
        (
            lambda: Signal([1], [Leaf(1, "x")]),
            "signal: expected Sequence, Grid, Graph, Set or Table, got a domain of type list",
        ),
        (
            lambda: Signal.of([], "x"),
            "signal: no values; expected at least one: families have at least one member",
        ),
        (lambda: Signal.of("abc", "x"), "signal: expected an array or a list, got values of type str"),
        (lambda: Signal.of(torch.tensor(3), "x"), "signal: expected one row per member, got an array without axes"),
        (
            lambda: Signal.of([1, None], "x", where="row"),
            "row[1]: expected a string, a number or an array of numbers, got a value of type NoneType",
        ),
        (lambda: Signal.of([1, 2**63], "x"), f"signal[1]: expected an integer of at most 64 bits, got {2**63}"),
        (lambda: Leaf(-(2**63) - 1, "x"), f"leaf: expected an integer of at most 64 bits, got {-(2**63) - 1}"),
        (
            lambda: Leaf([1.0, 2.0], "x"),
            "leaf: expected a string, a number or an array of numbers, got a value of type list. "
            "Wrap it: torch.tensor([…])",
        ),
        (
            lambda: Leaf(np.array([None]), "x"),
            "leaf: expected a string, a number or an array of numbers, got an array of dtype object",
        ),
        (lambda: Leaf(1, ""), "leaf: expected a name, such as 'text', got modality ''"),
        (lambda: Signal.of([1], None), "signal: expected a name, such as 'text', got modality None"),
    ],
)
def test_errors(make, message):
    with pytest.raises(InvalidInput) as caught:
        make()
    assert str(caught.value) == message


def test_show():
    assert website().show(max_members=2).splitlines() == [
        "Graph(3 nodes, 2 edges) · 12 leaves · text, patch, number",
        "├─ [0] Set(2) · 9 leaves · text, patch",
        "│  ├─ [0] Sequence(3) · 3 leaves · text · 'a' 'b' 'c'",
        "│  └─ [1] Grid((2, 3)) · 6 leaves · patch · float32[5, 7]",
        "├─ [1] Table('title', 'likes') · 2 leaves · text, number",
        "│  ├─ .title Sequence(1) · 1 leaf · text · 'd'",
        "│  └─ .likes number · 11",
        "└─ … 1 more",
    ]
    assert website().show(max_rows=3).splitlines()[2:] == ["│  ├─ [0] Sequence(3) · 3 leaves · text · 'a' 'b' 'c'", "…"]
    assert website().show().splitlines()[-1] == "└─ [2] text · 'moved'"
    long = Signal.of(range(1000), "token").show()
    assert long.startswith("Sequence(1000) · 1,000 leaves · token · 0 1 2")
    assert long.endswith("…")
    assert len(long) < 100


def test_importing_signals_loads_no_heavy_package():
    code = (
        "import sys, hsa.signals, hsa.signals.readers, hsa.signals.batch; "
        "print(sorted({'sentencex', 'tokenizers', 'rich', 'cyclopts'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def leaves_of(signal):
    return [leaf for m in signal.members for leaf in ([m] if isinstance(m, Leaf) else leaves_of(m))]


def has_grid(signal):
    return isinstance(signal.domain, Grid) or any(has_grid(m) for m in signal.members if isinstance(m, Signal))


def is_cut_of(part, signal):
    """Return whether all members are the same objects, except for the last, which may be cut."""
    *before, last = part.members
    same = all(a == b for a, b in zip(before, signal.members, strict=False))
    whole = signal.members[len(before)]
    return same and (last == whole or is_cut_of(last, whole)) and part.domain == signal.domain.first(part.domain.size)


@given(signals, st.integers(0, 30))
def test_first_is_a_prefix(signal, count):
    part = signal.first(count)
    if count >= signal.num_leaves:
        assert part is signal
        return
    kept = leaves_of(part) if part else []
    assert kept == leaves_of(signal)[: len(kept)]
    assert len(kept) <= count
    if part:
        assert part.num_leaves == len(kept)
        assert is_cut_of(part, signal)
        assert part == Signal(part.domain, part.members)  # in the one form that signals have
        assert part.first(count) is part
    if not has_grid(signal):
        assert len(kept) == count


def test_first_does_not_divide_grids():
    site = website()  # 3 words, a grid of 6, a title and a number, a word
    kept = {count: site.first(count) for count in range(13)}
    assert kept[0] is None
    assert [part.num_leaves for part in list(kept.values())[1:]] == [1, 2, 3, 3, 3, 3, 3, 3, 9, 10, 11, 12]
    assert kept[3].members[0].domain == Set(1)
    assert kept[9].domain == Graph(1, [])
    assert kept[10].domain == Graph(2, [(0, 1)])
    assert kept[10].members[0] is site.members[0]
    assert kept[10].members[1].domain == Table(["title"])
    assert Signal.of(torch.zeros(2, 3), "patch", Grid((2,))).first(1) is None
    inside = Signal(Grid((1, 2)), [Signal.of([1, 2], "x"), Signal.of([3], "x")])
    assert inside.first(2) is None
    assert Signal(Sequence(2), [Leaf(0, "x"), inside]).first(3) == Signal.of([0], "x")


def test_first_shares_whole_members():
    tokens = Signal.of(range(100), "token")
    assert tokens.first(30).values.data_ptr() == tokens.values.data_ptr()
    with pytest.raises(InvalidInput, match=r"leaves: expected 0 or more, got -1"):
        tokens.first(-1)


def test_first_of_deep_chains():
    deep = Signal(Sequence(2), [chain(3001), chain(3001)])
    assert deep.first(1).depth == 3002
    two = Signal.of([1, 2], "x")
    for _ in range(3000):
        two = Signal(Sequence(1), [two])
    assert two.first(1).depth == 3001
