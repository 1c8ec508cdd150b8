import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsa.errors import InvalidInput
from hsa.signals import Graph, Grid, Sequence, Set, Table
from hsa.signals.coordinates import EIGENVECTORS, WALK_STEPS, coordinates, graph_features


@st.composite
def connected_graphs(draw, max_nodes: int = 13):
    """Draw a random tree with some further edges."""
    nodes = draw(st.integers(2, max_nodes))
    edges = [(draw(st.integers(0, i - 1)), i) for i in range(1, nodes)]
    node = st.integers(0, nodes - 1)
    return Graph(nodes, edges + draw(st.lists(st.tuples(node, node), max_size=7)))


def laplacian(graph):
    adjacency = np.zeros((graph.num_nodes, graph.num_nodes))
    for a, b in graph.edges:
        adjacency[a, b] = adjacency[b, a] = 1
    root = np.sqrt(adjacency.sum(1))
    return np.eye(graph.num_nodes) - adjacency / root[:, None] / root, adjacency


def permuted(graph, order):
    """Return the graph with node i renamed to order[i]."""
    return Graph(graph.num_nodes, [(order[a], order[b]) for a, b in graph.edges])


def test_members_of_a_sequence_have_an_index():
    assert coordinates(Sequence(5)).numbers.tolist() == [[0], [1], [2], [3], [4]]


@pytest.mark.parametrize("shape", [(5,), (2, 3), (3, 2), (2, 3, 5)])
def test_a_grid_has_an_index_per_axis(shape):
    numbers = coordinates(Grid(shape)).numbers
    for member, row in enumerate(numbers.astype(int).tolist()):
        assert np.ravel_multi_index(row[: len(shape)], shape) == member
        assert row[len(shape) :] == [0] * (3 - len(shape))


def test_a_grid_of_four_axes():
    with pytest.raises(InvalidInput, match=r"Grid\.shape: expected at most 3 for positions, got 4 axes"):
        coordinates(Grid((1, 2, 3, 5)))


def test_a_table_has_keys_and_a_set_no_coordinates():
    assert coordinates(Table(["b", "a"])).keys == ("b", "a")
    assert coordinates(Set(3)).kind is coordinates(Set(3)).numbers is None


@given(connected_graphs())
def test_the_eigenvectors_are_those_of_the_laplacian(graph):
    """They are orthogonal, also to the constant vector, of length √nodes, with rising eigenvalues and a positive peak."""
    matrix, adjacency = laplacian(graph)
    count = min(graph.num_nodes - 1, EIGENVECTORS)
    vectors = graph_features(graph)[:, :EIGENVECTORS].astype(float)
    assert (vectors[:, count:] == 0).all()
    vectors = vectors[:, :count]
    values = (vectors * (matrix @ vectors)).sum(0) / graph.num_nodes
    np.testing.assert_allclose(matrix @ vectors, vectors * values, atol=1e-5)
    np.testing.assert_allclose(vectors.T @ vectors, graph.num_nodes * np.eye(count), atol=1e-4)
    np.testing.assert_allclose(np.sqrt(adjacency.sum(1)) @ vectors, 0, atol=1e-4)
    np.testing.assert_allclose(values, np.linalg.eigvalsh(matrix)[1 : count + 1], atol=1e-5)
    assert (vectors.max(0) >= -vectors.min(0) - 1e-5).all()


@given(connected_graphs())
def test_the_walk_is_that_of_powers_of_the_transition_matrix(graph):
    _, adjacency = laplacian(graph)
    step = adjacency / adjacency.sum(1)[:, None]
    wanted = [np.diag(np.linalg.matrix_power(step, i)) for i in range(1, WALK_STEPS + 1)]
    np.testing.assert_allclose(graph_features(graph)[:, EIGENVECTORS:], np.stack(wanted, 1), atol=1e-6)


@given(connected_graphs(), st.data())
def test_renumbered_nodes_keep_their_features(graph, data):
    order = data.draw(st.permutations(range(graph.num_nodes)))
    ours, theirs = graph_features(graph).astype(float), graph_features(permuted(graph, order))[order].astype(float)
    np.testing.assert_allclose(theirs[:, EIGENVECTORS:], ours[:, EIGENVECTORS:], atol=1e-6)
    values = np.linalg.eigvalsh(laplacian(graph)[0])
    for i in range(min(graph.num_nodes - 1, EIGENVECTORS)):
        alone = np.abs(np.delete(values, i + 1) - values[i + 1]).min() > 1e-3
        if alone:  # equal eigenvalues leave a choice of vectors; equal peaks one of signs
            sign = np.sign(ours[:, i] @ theirs[:, i])
            np.testing.assert_allclose(theirs[:, i], sign * ours[:, i], atol=1e-4)
            if abs(ours[:, i].max() + ours[:, i].min()) > 1e-4:
                assert sign == 1


@given(connected_graphs())
def test_directions_repeats_and_order_of_edges_do_not_matter(graph):
    turned = Graph(graph.num_nodes, [(b, a) for a, b in reversed(graph.edges)] + list(graph.edges))
    np.testing.assert_array_equal(graph_features(turned), graph_features(graph))


def test_linked_nodes_have_similar_features_and_a_hub_differs_from_its_leaves():
    two_halves = [(a, b) for half in (range(5), range(5, 11)) for a in half for b in half if a < b]
    first = graph_features(Graph(11, [*two_halves, (0, 5)]))[:, 0]
    assert (np.sign(first[:5]) == np.sign(first[0])).all()
    assert (np.sign(first[5:]) == -np.sign(first[0])).all()
    star = graph_features(Graph(7, [(0, i) for i in range(1, 7)]))[:, EIGENVECTORS:]
    assert star[0, 1] == pytest.approx(1)  # back at the hub after two steps
    np.testing.assert_allclose(star[1:], star[1][None].repeat(6, 0), atol=1e-6)
    assert star[1, 1] < star[0, 1]


@pytest.mark.parametrize("graph", [Graph(1, []), Graph(1, [(0, 0)]), Graph(3, []), Graph(5, [(0, 1), (3, 3)])])
def test_graphs_with_lone_nodes_have_finite_features(graph):
    features = graph_features(graph)
    assert features.shape == (graph.num_nodes, EIGENVECTORS + WALK_STEPS)
    assert np.isfinite(features).all()
