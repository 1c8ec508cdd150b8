"""Coordinates of the members of domains, for position embeddings."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from hsa.errors import InvalidInput
from hsa.signals.domains import Domain, Graph, Grid, Sequence, Table
from hsa.tree.positions import Coordinates

GRID_AXES = 3
"""Number of coordinates of a member of a grid; missing axes have coordinate 0."""
EIGENVECTORS = 8
WALK_STEPS = 8


@lru_cache(maxsize=4096)
def coordinates(domain: Domain) -> Coordinates:
    """Return the coordinates of the members of a domain.

    Members of a sequence have an index, of a grid an index per axis, of a table a key, of a graph `graph_features`; members
    of a set have no coordinates.

    >>> from hsa.signals import Grid
    >>> coordinates(Grid((2, 2))).numbers.tolist()
    [[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    """
    if isinstance(domain, Sequence):
        return Coordinates("sequence", np.arange(domain.length, dtype=np.float32)[:, None])
    if isinstance(domain, Grid):
        axes = len(domain.shape)
        if axes > GRID_AXES:
            raise InvalidInput("Grid.shape", got=f"{axes} axes", expected=f"at most {GRID_AXES} for positions")
        numbers = np.zeros((domain.size, GRID_AXES), np.float32)
        numbers[:, :axes] = np.indices(domain.shape).reshape(axes, -1).T
        return Coordinates("grid", numbers)
    if isinstance(domain, Graph):
        return Coordinates("graph", graph_features(domain))
    if isinstance(domain, Table):
        return Coordinates("table", keys=domain.keys)
    return Coordinates(None)


def graph_features(graph: Graph) -> np.ndarray:
    """Return features `[nodes, EIGENVECTORS + WALK_STEPS]` of the undirected graph.

    First the eigenvectors of the normalised Laplacian with the smallest positive eigenvalues, scaled by √nodes, the largest
    entry of each made positive (not unique for equal eigenvalues; zeros for missing ones); then the probabilities that a
    random walk returns after 1, 2, … steps. Linked nodes have similar eigenvector entries; the walk tells hubs from leaves.
    """
    n = graph.num_nodes
    adjacency = np.zeros((n, n))
    if graph.edges:
        begin, end = np.array(graph.edges).T
        adjacency[begin, end] = adjacency[end, begin] = 1
    degree = adjacency.sum(1)
    scaled = adjacency / np.sqrt(np.maximum(degree, 1))[:, None] / np.sqrt(np.maximum(degree, 1))[None]
    values, vectors = np.linalg.eigh(np.eye(n) - scaled)
    vectors = vectors[:, values > 1e-8][:, :EIGENVECTORS] * np.sqrt(n)
    peak = np.abs(vectors).argmax(0)
    vectors *= np.sign(vectors[peak, np.arange(vectors.shape[1])])
    features = np.zeros((n, EIGENVECTORS + WALK_STEPS), np.float32)
    features[:, : vectors.shape[1]] = vectors
    walk = step = adjacency / np.maximum(degree, 1)[:, None]
    for i in range(WALK_STEPS):
        features[:, EIGENVECTORS + i] = np.diagonal(walk)
        walk = walk @ step
    return features
