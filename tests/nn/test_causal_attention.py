import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa import Hierarchy
from hsa.nn.attention import counting_operations
from hsa.nn.causal_attention import CausalClustered, CausalFlat, CausalMultiscale
from hsa.tree.causal_tree import causal_tree

HEADS, KV, DIM, VALUE = 6, 2, 5, 3


def inputs(tokens, seed=0):
    draw = torch.Generator().manual_seed(seed)

    def random(heads, dim):
        return torch.randn(tokens, heads, dim, dtype=torch.float64, generator=draw)

    return random(HEADS, DIM), random(KV, DIM), random(KV, VALUE)


def exact(q, k, v, lengths):
    """Compute causal softmax attention sequence by sequence and token by token."""
    k, v = (t.repeat_interleave(HEADS // KV, 1) for t in (k, v))
    rows, start = [], 0
    for length in lengths:
        for i in range(start, start + length):
            weights = torch.einsum("hd,jhd->hj", q[i], k[start : i + 1]).div(DIM**0.5).softmax(-1)
            rows.append(torch.einsum("hj,jhd->hd", weights, v[start : i + 1]))
        start += length
    return torch.stack(rows)


@settings(max_examples=15)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_flat_is_causal_softmax_attention(lengths):
    q, k, v = inputs(sum(lengths))
    wanted = exact(q, k, v, lengths)
    torch.testing.assert_close(CausalFlat()(q, k, v, Hierarchy.flat(lengths)), wanted, rtol=0, atol=1e-12)


@settings(max_examples=10)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=3))
def test_all_kinds_are_exact_if_nothing_is_pooled(lengths):
    q, k, v = inputs(sum(lengths))
    wanted = exact(q, k, v, lengths)
    near = CausalMultiscale(HEADS, near=99)
    torch.testing.assert_close(near(q, k, v, causal_tree(lengths, (3, 2))), wanted, rtol=0, atol=1e-12)
    chunk = CausalClustered(HEADS, chunk=32, top_k=1)
    torch.testing.assert_close(chunk(q, k, v, causal_tree(lengths, (4, 2))), wanted, rtol=0, atol=1e-12)


def test_the_bias_of_pooled_nodes_changes_its_head():
    q, k, v = inputs(40)
    tree = causal_tree([40], (3, 2))
    for attention in (CausalMultiscale(HEADS, near=1), CausalClustered(HEADS, chunk=12, top_k=1)):
        before = attention(q, k, v, tree)
        with torch.no_grad():
            attention.pooled_bias[1] = 2.0
        changed = (attention(q, k, v, tree) - before).abs().amax((0, 2)) > 1e-6
        assert changed.tolist() == [False, True, False, False, False, False]
        attention(q, k, v, tree).square().sum().backward()
        assert attention.pooled_bias.grad.abs().min() > 0
    assert CausalFlat().bias == 0.0


def test_layers_share_the_selection_of_a_tree(monkeypatch):
    tree = causal_tree([20], (3, 2))
    first, second = CausalMultiscale(HEADS), CausalMultiscale(HEADS)
    first.prepare(tree)
    monkeypatch.setattr("hsa.nn.causal_attention.select", None)
    second(*inputs(20), tree)


def test_clusters_are_computed_once(monkeypatch):
    q, k, v = inputs(40)
    tree, attention = causal_tree([40], (4, 2)), CausalClustered(HEADS, chunk=16, top_k=2)
    description, wanted = attention.describe_keys(k, tree), attention(q, k, v, tree)
    monkeypatch.setattr("hsa.nn.causal_attention.cluster_keys", None)
    assert torch.equal(attention(q, k, v, tree, **description), wanted)


@pytest.mark.parametrize(
    ("attention", "tree"),
    [(CausalFlat(), Hierarchy.flat([7, 4])), (CausalMultiscale(6, near=9), causal_tree([7, 4], (3, 2)))],
)
def test_operations_are_counted_per_visible_token(attention, tree):
    with counting_operations() as counts:
        attention(*inputs(11), tree)
    assert [c.attention for c in counts] == [(2 * HEADS * (DIM + VALUE) + HEADS) * (7 * 8 // 2 + 4 * 5 // 2)]
