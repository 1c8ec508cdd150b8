"""Hierarchical three-way attention compared with its definition, node by node; visibility and tied weights."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa import Hierarchy
from hsa.errors import InvalidInput
from hsa.research.decomposition import CP
from hsa.research.trilinear.counts import flops_hierarchical_trilinear, flops_trilinear
from hsa.research.trilinear.operator import hierarchical_trilinear_attention, trilinear_attention
from tests.forests import forests, gradients, parent_vectors
from tests.research.trilinear.three_way import DIM, FORMS, HEADS, VALUE_DIM, assert_same, form, full, rows

seeds = st.integers(0, 10**6)
both = pytest.mark.parametrize("causal", [False, True], ids=["tied rows", "own rows"])
small = parent_vectors(max_nodes=12, max_depth=4).map(Hierarchy.from_parents)
MIXED = Hierarchy.from_nested([[3, [2, 4, 1], 2], [1], [[[2]]], 3], sinks=(0,))


class Definition:
    """The definition, computed one node at a time."""

    def __init__(self, q, k1, k2, v1, v2, forest, tensor):
        self.x = {"q": q, "k1": k1, "k2": k2, "v1": v1, "v2": v2}
        self.s, self.forest, self.tensor = forest.structure, forest, full(tensor)

    def mean(self, name, node):
        return self.x[name][self.s.first_leaf[node] : self.s.end_leaf[node]].mean(0)

    def children(self, node):
        return list(range(self.s.first_child[node], self.s.first_child[node] + self.s.num_children[node]))

    def logit(self, query, b, c):
        similarity = torch.einsum("habc,ha,hb,hc->h", self.tensor, query, self.mean("k1", b), self.mean("k2", c))
        return DIM**-0.5 * similarity + math.log(self.s.leaf_count[b]) + math.log(self.s.leaf_count[c])

    def average(self, query, pairs):
        """Return the log-mass of the pairs, None if there are none, and their average."""
        if not pairs:
            return None, torch.zeros(HEADS, self.x["v1"].shape[-1], dtype=torch.float64)
        logits = torch.stack([self.logit(query, b, c) for b, c in pairs])
        values = torch.stack([self.mean("v1", b) * self.mean("v2", c) for b, c in pairs])
        return logits.logsumexp(0), (logits.softmax(0)[..., None] * values).sum(0)

    def family(self, node):
        """Return the siblings of a node; a leaf is one of its own."""
        parent = self.s.parent[node]
        members = [node] if parent < 0 else self.children(parent)
        return [b for b in members if b != node or self.s.num_children[node] == 0]

    def inner(self, node):
        """Return the log-mass inside a node; None for a leaf."""
        children = self.children(node)
        if not children:
            return None
        masses = []
        for child in children:
            siblings = self.family(child)
            outer, _ = self.average(self.mean("q", child), list(product(siblings, siblings)))
            inner = self.inner(child)
            parts = [m for m in (outer, inner) if m is not None]
            masses.append(torch.stack(parts).logsumexp(0) * self.s.leaf_count[child] / self.s.leaf_count[node])
        return torch.stack(masses).sum(0)

    def tied(self):
        out = {}

        def down(node, weight, result):
            siblings = self.family(node)
            if self.s.parent[node] >= 0 or not self.s.num_children[node]:
                outer, average = self.average(self.mean("q", node), list(product(siblings, siblings)))
                inner = self.inner(node)
                if outer is None:
                    side, own = 0, 1
                elif inner is None:
                    side, own = 1, 0
                else:
                    side, own = (outer - inner).sigmoid()[:, None], (inner - outer).sigmoid()[:, None]
                weight, result = weight * own, result + weight * side * average
            if not self.s.num_children[node]:
                out[self.s.first_leaf[node]] = result
            for child in self.children(node):
                down(child, weight, result)

        zero = torch.zeros(HEADS, self.x["v1"].shape[-1], dtype=torch.float64)
        for root in range(self.forest.num_trees):
            down(root, torch.ones(HEADS, 1, dtype=torch.float64), zero)
        return torch.stack([out[i] for i in range(self.forest.num_leaves)])

    def causal(self):
        out = []
        for i, leaf in enumerate(self.s.leaf_nodes):
            pairs, node = [], leaf
            while node >= 0:
                before = [b for b in self.family(node) if b <= node]
                pairs += product(before, before)
                node = self.s.parent[node]
            out.append(self.average(self.x["q"][i], pairs)[1])
        return torch.stack(out)


@both
@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=12)
@given(forest=small, seed=seeds)
def test_matches_the_definition(name, causal, forest, seed):
    x = rows(forest, seed=seed, requires_grad=True)
    tensor, parameters = form(name, seed, requires_grad=True)
    out = hierarchical_trilinear_attention(*x, forest, tensor=tensor, causal=causal)
    definition = Definition(*x, forest, tensor)
    expected = definition.causal() if causal else definition.tied()
    inputs = [*x, *parameters]
    assert_same([out, *gradients(out, inputs)], [expected, *gradients(expected, inputs)])


@both
def test_matches_the_definition_on_a_mixed_forest(causal):
    """Cover buckets with padding, sinks, chains and a single leaf."""
    x = rows(MIXED, requires_grad=True)
    out = hierarchical_trilinear_attention(*x, MIXED, causal=causal)
    definition = Definition(*x, MIXED, None)
    expected = definition.causal() if causal else definition.tied()
    assert_same([out, *gradients(out, x)], [expected, *gradients(expected, x)])


@both
@pytest.mark.parametrize("name", FORMS)
def test_flat_tree_equals_three_way_attention(name, causal):
    forest = Hierarchy.flat([7, 1, 4])
    x = rows(forest, requires_grad=True)
    tensor, parameters = form(name, requires_grad=True)
    out = hierarchical_trilinear_attention(*x, forest, tensor=tensor, causal=causal)
    dense = trilinear_attention(*x, forest, tensor=tensor, causal=causal, backend="dense")
    inputs = [*x, *parameters]
    assert_same([out, *gradients(out, inputs)], [dense, *gradients(dense, inputs)])


def weights(x, forest, **options):
    """Return the weights [leaves i, heads, leaves j, leaves k], the outputs for v1 = e_j and v2 = e_k."""
    n = forest.num_leaves
    eye = torch.eye(n, dtype=torch.float64)
    v1 = eye.repeat_interleave(n, 1)[:, None].expand(-1, HEADS, -1)
    v2 = eye.repeat(1, n)[:, None].expand(-1, HEADS, -1)
    return hierarchical_trilinear_attention(*x[:3], v1, v2, forest, **options).unflatten(-1, (n, n))


def meeting(forest, i, j):
    """Return the parent in whose family i and j meet; a leaf meets itself in its own family."""
    s = forest.structure
    path = []
    node = s.parent[s.leaf_nodes[i]]
    while node >= 0:
        path.append(node)
        node = s.parent[node]
    return next((p for p in path if s.first_leaf[p] <= j < s.end_leaf[p]), -1 if i == j else None)


@both
@settings(max_examples=15)
@given(forest=small, seed=seeds)
def test_weights_are_positive_for_pairs_that_meet_at_one_node(causal, forest, seed):
    x = rows(forest, seed=seed)
    w = weights(x, forest, causal=causal)
    n = forest.num_leaves
    assert_same([w.sum((-2, -1))], [torch.ones(n, HEADS, dtype=torch.float64)], 1e-12)
    for i, j, k in product(range(n), repeat=3):
        seen = meeting(forest, i, j) == meeting(forest, i, k) is not None
        if causal:
            seen = seen and j <= i and k <= i and all(before(forest, i, m) for m in (j, k))
        assert ((w[i, :, j, k] > 0) == seen).all(), (i, j, k)


def before(forest, i, j):
    """Return whether the sibling that contains j, where j meets i, ends before i or is i."""
    s = forest.structure
    node = s.leaf_nodes[j]
    if i == j:
        return True
    while s.parent[node] != meeting(forest, i, j):
        node = s.parent[node]
    return s.end_leaf[node] <= i


@settings(max_examples=15)
@given(forest=small, seed=seeds)
def test_weights_are_tied_over_siblings(forest, seed):
    w = weights(rows(forest, seed=seed), forest)
    s = forest.structure
    for parent in s.num_children.nonzero()[0]:
        family = range(s.first_child[parent], s.first_child[parent] + s.num_children[parent])
        for triple in product(family, repeat=3):
            if s.num_children[triple[0]] and triple[0] in triple[1:]:
                continue
            a, b, c = (slice(s.first_leaf[n], s.end_leaf[n]) for n in triple)
            block = w[a, :, b, c].transpose(0, 1).flatten(1)
            torch.testing.assert_close(block, block[:, :1].expand_as(block), rtol=1e-10, atol=1e-14)


@both
@settings(max_examples=15)
@given(forest=small, seed=seeds)
def test_pooling_values_is_exact(causal, forest, seed):
    """The mean of v1_j∘v2_k over a block of pairs is the product of the means, because it is bilinear."""
    x = rows(forest, seed=seed)
    expanded = torch.einsum("ihjk,jhe,khe->ihe", weights(x, forest, causal=causal), x[3], x[4])
    assert_same([hierarchical_trilinear_attention(*x, forest, causal=causal)], [expanded])


@settings(max_examples=15)
@given(forest=forests(), seed=seeds)
def test_no_output_depends_on_a_later_leaf(forest, seed):
    x = rows(forest, seed=seed, requires_grad=True)
    out = hierarchical_trilinear_attention(*x, forest, causal=True)
    for i in sorted({0, forest.num_leaves // 3, forest.num_leaves // 2, forest.num_leaves - 1}):
        grads = torch.autograd.grad(out[i].square().sum(), x, retain_graph=True)
        for grad in grads:
            assert (grad[i + 1 :] == 0).all()
        assert (grads[3][i] != 0).any()


def test_tied_rows_are_not_causal():
    """The mean query of a node depends on its last leaf, so causal=True has a row per leaf."""
    forest = Hierarchy.from_nested([[2, 2]])
    x = rows(forest, requires_grad=True)
    out = hierarchical_trilinear_attention(*x, forest)
    (grad,) = torch.autograd.grad(out[0].sum(), x[:1])
    assert (grad[1] != 0).any()


@both
@pytest.mark.parametrize("name", FORMS)
def test_gradcheck(name, causal):
    forest = Hierarchy.from_nested([[2, 1], 1])
    x = rows(forest, requires_grad=True)
    _, parameters = form(name, requires_grad=True)

    def attend(*inputs):
        tensor = CP(*inputs[5:]) if name.startswith("CP") else next(iter(inputs[5:]), None)
        return hierarchical_trilinear_attention(*inputs[:5], forest, tensor=tensor, causal=causal, scale=0.7)

    assert torch.autograd.gradcheck(attend, [*x, *parameters], fast_mode=True)


@both
@settings(max_examples=15)
@given(forest=forests(), seed=seeds)
def test_a_tree_does_not_depend_on_its_batch(causal, forest, seed):
    x = rows(forest, seed=seed)
    out = hierarchical_trilinear_attention(*x, forest, causal=causal).split(forest.lengths)
    for t, tree in enumerate(forest.uncollate()):
        alone = hierarchical_trilinear_attention(*(y.split(forest.lengths)[t] for y in x), tree, causal=causal)
        assert_same([out[t]], [alone], 1e-12)


@both
@pytest.mark.parametrize("name", ["none", "full", "CP"])
def test_no_trees_single_leaves_and_chains(name, causal):
    tensor, parameters = form(name, requires_grad=True)
    chain = Hierarchy.from_nested([[[1]]])
    for forest in (Hierarchy.flat([]), Hierarchy.from_parents([-1]), Hierarchy.from_parents([-1, -1]), chain):
        x = rows(forest, requires_grad=True)
        out = hierarchical_trilinear_attention(*x, forest, tensor=tensor, causal=causal)
        assert out.shape == (forest.num_leaves, HEADS, VALUE_DIM)
        assert_same([out], [x[3] * x[4]], 1e-12)
        for grad in gradients(out, [*x, *parameters]):
            assert grad.isfinite().all()


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lower_precision(dtype, causal):
    x = rows(MIXED, dtype=dtype, requires_grad=True)
    tensor, parameters = form("full", dtype=dtype, requires_grad=True)
    out = hierarchical_trilinear_attention(*x, MIXED, tensor=tensor, causal=causal)
    inputs = [*x, *parameters]
    exact = [y.detach().double().requires_grad_() for y in inputs]
    expected = hierarchical_trilinear_attention(*exact[:5], MIXED, tensor=exact[5], causal=causal)
    weight = torch.randn(out.shape, dtype=torch.float64).to(dtype)
    ours = [out, *torch.autograd.grad(out, inputs, weight)]
    wanted = [expected, *torch.autograd.grad(expected, exact, weight.double())]
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5}[dtype]
    for a, b in zip(ours, wanted, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).abs().max() <= tolerance * b.abs().max()


def test_bad_input():
    x = rows(MIXED)
    with pytest.raises(InvalidInput, match=r"k2: expected .*, got 11 rows"):
        hierarchical_trilinear_attention(x[0], x[1], x[2][:11], x[3], x[4], MIXED)
    with pytest.raises(InvalidInput, match=r"expected a rank of at most 9.*, got a CP of rank 10"):
        hierarchical_trilinear_attention(*x, MIXED, tensor=CP(*torch.zeros(3, 10, DIM, dtype=torch.float64)))
    with pytest.raises(InvalidInput, match="hierarchy"):
        hierarchical_trilinear_attention(*x, [3, 4])


@settings(max_examples=20)
@given(forest=forests())
def test_counts(forest):
    s = forest.structure
    sizes = s.num_children.tolist()
    count = flops_hierarchical_trilinear(forest, 26, 2, value_width=14)
    expected = sum(n**3 for n in sizes) * (2 * 26 + 2 * 14 + 2) + sum(n**2 for n in sizes) * (26 + 2 * 14)
    assert count.attention == expected
    assert count.pooling == 2 * (3 * 26 + 2 * 14) * (forest.num_nodes - forest.num_trees)
    triples = pairs = 0
    definition = Definition(*rows(forest), forest, None)
    for node in s.leaf_nodes:
        while node >= 0:
            seen = sum(b <= node for b in definition.family(node))
            triples, pairs, node = triples + seen**2, pairs + seen, s.parent[node]
    causal = flops_hierarchical_trilinear(forest, 26, 2, value_width=14, causal=True)
    assert causal.attention == triples * (2 * 26 + 2 * 14 + 2) + pairs * (26 + 2 * 14)


def test_counts_of_one_family_equal_those_of_three_way_attention():
    forest = Hierarchy.flat([12, 5])
    for causal in (False, True):
        flat = flops_trilinear(forest, 24, 3, causal=causal)
        assert flops_hierarchical_trilinear(forest, 24, 3, causal=causal).attention == flat.attention
