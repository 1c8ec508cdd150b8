import pickle

import numpy as np
import pytest
import torch

from hsa.errors import InvalidInput
from hsa.signals import Graph, Grid, Sequence, Set, Table

DOMAINS = [Sequence(6), Set(6), Grid((2, 3)), Grid((6,)), Graph(6, [(0, 5)]), Graph(6, []), Table(list("abcdef"))]


@pytest.mark.parametrize(
    ("domain", "size", "text"),
    [
        (Sequence(7), 7, "Sequence(7)"),
        (Set(5), 5, "Set(5)"),
        (Grid((2, 3, 5)), 30, "Grid((2, 3, 5))"),
        (Graph(3, [(0, 1), (2, 2)]), 3, "Graph(3 nodes, 2 edges)"),
        (Graph(1, []), 1, "Graph(1 node, 0 edges)"),
        (Table(["a", "b"]), 2, "Table('a', 'b')"),
        (Table("abcdef"[i] for i in range(6)), 6, "Table('a', 'b', 'c', 'd', … 2 more)"),
    ],
)
def test_size_and_repr(domain, size, text):
    assert domain.size == size
    assert repr(domain) == text


def test_equal_means_same_kind_and_same_fields():
    for i, a in enumerate(DOMAINS):
        for j, b in enumerate(DOMAINS):
            assert (a == b) == (i == j)
    assert Grid([2, 3]) == Grid(np.array([2, 3]))
    assert len({Sequence(3), Sequence(np.int64(3)), Set(3)}) == 2
    assert Graph(3, torch.tensor([[0, 1]])) == Graph(3, [(0, 1)]) == Graph(3, np.array([[0, 1]]))


@pytest.mark.parametrize("domain", DOMAINS, ids=repr)
def test_pickles_and_stays_frozen(domain):
    assert pickle.loads(pickle.dumps(domain)) == domain
    with pytest.raises(AttributeError, match="frozen"):
        domain.size = 3


def test_steps_name_members():
    assert Grid((2, 3)).step(5) == "[1, 2]"
    assert Set(3).step(1) == Graph(3, []).step(1) == "[1]"
    assert [Table(["image", "two words"]).step(i) for i in range(2)] == [".image", "['two words']"]
    with pytest.raises(InvalidInput, match=r"expected a member of Sequence\(3\), 0\.\.2, got 3"):
        Sequence(3).step(3)


@pytest.mark.parametrize(
    ("make", "where", "wrong", "expected"),
    [
        (lambda: Sequence(0), "Sequence.length", 0, "1 or more: families have at least one member"),
        (lambda: Sequence(-3), "Sequence.length", -3, "1 or more: families have at least one member"),
        (lambda: Set(2.0), "Set.size", "2.0", "a positive integer"),
        (lambda: Set(True), "Set.size", "True", "a positive integer"),
        (lambda: Grid(()), "Grid.shape", "()", "at least one axis"),
        (lambda: Grid(5), "Grid.shape", "5", "one length per axis"),
        (lambda: Grid((2, 0)), "Grid.shape[1]", 0, "1 or more: families have at least one member"),
        (lambda: Graph(3, [(0, 1), (1, 3)]), "Graph.edges[1]", (1, 3), "a pair of nodes in 0..2"),
        (lambda: Graph(3, [(-1, 0)]), "Graph.edges[0]", (-1, 0), "a pair of nodes in 0..2"),
        (lambda: Graph(3, [(0, 1), (1,)]), "Graph.edges", "[(0, 1), (1,)]", "pairs (from, to) of nodes"),
        (lambda: Graph(3, [(0.5, 1)]), "Graph.edges", "[(0.5, 1)]", "pairs (from, to) of nodes"),
        (lambda: Table([]), "Table.keys", "no keys", "at least one: families have at least one member"),
        (lambda: Table("ab"), "Table.keys", "'ab'", "a list of keys"),
        (lambda: Table(["a", 3]), "Table.keys[1]", "3", "a string"),
        (lambda: Table(["a", "b", "a"]), "Table.keys[2]", "'a'", "a key other than that of Table.keys[0]"),
    ],
)
def test_errors_have_location_input_and_expectation(make, where, wrong, expected):
    with pytest.raises(InvalidInput) as caught:
        make()
    error = caught.value
    assert (error.where, error.got if error.problem is None else error.problem, error.expected) == (
        where,
        wrong,
        expected,
    )


def test_first_members():
    assert Sequence(5).first(3) == Sequence(3)
    assert Set(5).first(1) == Set(1)
    assert Table(["a", "b", "c"]).first(2) == Table(["a", "b"])
    assert Graph(3, [(0, 1), (2, 0), (1, 0)]).first(2) == Graph(2, [(0, 1), (1, 0)])
    for whole in (Sequence(5), Set(2), Grid((2, 3)), Graph(2, [(0, 1)]), Table(["a", "b"])):
        assert whole.first(whole.size) is whole


@pytest.mark.parametrize(
    ("domain", "count", "message"),
    [
        (Sequence(3), 0, "count: expected 1 or more: families have at least one member, got 0"),
        (Sequence(3), 4, r"count: expected at most 3, the members of Sequence\(3\), got 4"),
        (Grid((2, 3)), 3, r"count: expected 6, all members of Grid\(\(2, 3\)\), got 3. Keep a grid whole or leave"),
    ],
)
def test_counts_that_no_domain_has(domain, count, message):
    with pytest.raises(InvalidInput, match=message):
        domain.first(count)
