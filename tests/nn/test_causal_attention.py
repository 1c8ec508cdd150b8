import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa import ClusteredCache, Hierarchy, cluster, clustered_attention, select_groups
from hsa.attention.clustered.flops import operations
from hsa.attention.mixing import HeadMixing
from hsa.errors import Unsupported
from hsa.nn.attention import counting_operations
from hsa.nn.causal_attention import CausalClustered, CausalFlat, CausalMultiscale
from hsa.tree.causal_tree import causal_tree

HEADS, KV, DIM, VALUE = 6, 2, 5, 3
SMALL = {"branching": (4, 2, 2), "tile": 8}


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
    for groups in (CausalClustered(HEADS), CausalClustered(HEADS, branching=(2, 2, 1), tile=2, top_k=9)):
        torch.testing.assert_close(groups(q, k, v, Hierarchy.flat(lengths)), wanted, rtol=0, atol=1e-12)


def test_the_bias_of_pooled_nodes_changes_its_head():
    q, k, v = inputs(40)
    tree = causal_tree([40], (3, 2))
    for attention in (CausalMultiscale(HEADS, near=1), CausalClustered(HEADS, **SMALL, top_k=1)):
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


@pytest.mark.parametrize("rule", [{"threshold": 1 / 32}, {"top_k": 2, "spread": 0.5}], ids=["threshold", "top_k"])
def test_clustered_is_the_operator(rule):
    lengths = [40, 21]
    q, k, v = inputs(sum(lengths))
    attention = CausalClustered(HEADS, **rule, **SMALL).double()
    torch.nn.init.normal_(attention.pooled_bias)
    out = attention(q, k, v, Hierarchy.flat(lengths))
    wanted = clustered_attention(q, k, v, lengths, causal=True, pooled_bias=attention.pooled_bias, **rule, **SMALL)
    assert torch.equal(out, wanted)
    with counting_operations() as counts:
        attention(q, k, v, Hierarchy.flat(lengths))
    keys = cluster(k, v, lengths, branching=SMALL["branching"])
    selection = select_groups(q, k, keys, lengths, causal=True, tile=8, **rule)
    sizes = {"value_width": HEADS * VALUE, "kv_heads": KV}
    options = {name: rule[name] for name in ("top_k", "spread") if name in rule}
    assert counts == [operations(selection, HEADS * DIM, HEADS, **sizes, **options)]
    with pytest.raises(Unsupported, match="cannot mix heads"):
        attention(q, k, v, Hierarchy.flat(lengths), mixing=HeadMixing.identity(HEADS))


def test_clustered_reads_prompts_into_a_cache():
    lengths, (q, k, v) = [40, 21], inputs(61)
    attention = CausalClustered(HEADS, threshold=1 / 32, **SMALL)
    cache = ClusteredCache(1, 2, KV, DIM, value_dim=VALUE, dtype=torch.float64, threshold=1 / 32, **SMALL)
    forest = cache.begin([39, 20])
    rows = torch.cat([torch.arange(39), torch.arange(40, 60)])
    wanted = attention(q, k, v, Hierarchy.flat(lengths))
    with torch.no_grad():
        read = attention.read(q[rows], k[rows], v[rows], forest, cache, 0)
    torch.testing.assert_close(read, wanted[rows], rtol=0, atol=1e-12)
    cache.append()
    last = torch.tensor([39, 60])
    torch.testing.assert_close(cache.attend(0, q[last], k[last], v[last]), wanted[last], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("attention", "tree"),
    [(CausalFlat(), Hierarchy.flat([7, 4])), (CausalMultiscale(6, near=9), causal_tree([7, 4], (3, 2)))],
)
def test_operations_are_counted_per_visible_token(attention, tree):
    with counting_operations() as counts:
        attention(*inputs(11), tree)
    assert [c.attention for c in counts] == [(2 * HEADS * (DIM + VALUE) + HEADS) * (7 * 8 // 2 + 4 * 5 // 2)]
