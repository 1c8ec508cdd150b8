import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsa.errors import InvalidInput
from hsa.signals import Leaf, Sequence, Set, Signal
from hsa.signals.windows import in_windows
from tests.signals.random_signals import leaves, signals

long = st.builds(
    lambda n, inner: Signal(Sequence(n + 1), [*(Leaf(i, "token") for i in range(n)), inner]),
    st.integers(1, 40),
    signals | leaves,
)
strings = st.builds(lambda n: Signal.of([str(i) for i in range(n)], "text"), st.integers(1, 40))
wide = st.builds(lambda n: Signal.of(range(n), "token", Set(n)), st.integers(1, 40))
any_signal = st.one_of(long, strings, wide, signals, leaves)
sizes = st.integers(2, 7)


def leaves_of(node):
    return [node] if isinstance(node, Leaf) else [leaf for member in node.members for leaf in leaves_of(member)]


def families(node):
    return [] if isinstance(node, Leaf) else [node, *(family for member in node.members for family in families(member))]


@given(any_signal, sizes)
def test_the_leaves_stay_in_order_and_no_sequence_is_long(signal, most):
    windowed = in_windows(signal, most)
    assert leaves_of(windowed) == leaves_of(signal)
    assert all(f.domain.size <= most for f in families(windowed) if isinstance(f.domain, Sequence))


@given(any_signal, sizes)
def test_other_domains_stay(signal, most):
    def others(node):
        return [f.domain for f in families(node) if not isinstance(f.domain, Sequence)]

    assert others(in_windows(signal, most)) == others(signal)


@given(any_signal, sizes)
def test_short_families_are_the_same_objects(signal, most):
    short = all(f.domain.size <= most for f in families(signal) if isinstance(f.domain, Sequence))
    windowed = in_windows(signal, most)
    assert (windowed is signal) == short
    assert in_windows(windowed, most) is windowed


def test_members_without_long_sequences_are_shared():
    kept = Signal.of(range(3), "token")
    cut = in_windows(Signal(Set(2), [kept, Signal.of(range(5), "token")]), 3)
    assert cut.members[0] is kept


@given(st.integers(1, 200), sizes)
def test_sizes_of_windows_differ_by_at_most_one(length, most):
    level = [in_windows(Signal.of(range(length), "token"), most)]
    while isinstance(level[0], Signal):
        sizes = {family.domain.size for family in level}
        assert max(sizes) - min(sizes) <= 1
        level = [member for family in level for member in family.members]
    assert len(level) == length


@pytest.mark.parametrize("most", [1, 0, -3])
def test_windows_of_one_member_are_refused(most):
    with pytest.raises(InvalidInput, match=f"most: expected 2 or more, got {most}"):
        in_windows(Signal.of(range(5), "token"), most)


def test_deep_chains():
    deep = Signal.of(range(7), "token")
    for _ in range(2003):
        deep = Signal(Sequence(1), [deep])
    assert in_windows(deep, 7) is deep
    assert in_windows(deep, 5).num_leaves == 7
