import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hsa
from hsa import Hierarchy, Queries
from hsa.baselines.deepsets import NoAttention
from hsa.nn.attention import Clustered, Flat, Hierarchical, Multiscale, counting_operations
from tests.forests import forests, gradients, random_inputs, random_positions

HEADS, DIM = 3, 5
few = st.lists(st.integers(1, 11), min_size=1, max_size=8)
many = st.lists(st.one_of(st.integers(1, 5), st.integers(60, 70)), min_size=9, max_size=11)
"""Lengths of more than eight trees, which share calls by their lengths rounded up to multiples of 64."""


def inputs(hierarchy, seed=0, value_dim=DIM, **more):
    return random_inputs(hierarchy, seed, heads=HEADS, kv_heads=HEADS, dim=DIM, value_dim=value_dim, **more)


def close(a, b, atol=1e-10):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def softmax_attention(q, k, v, hierarchy, positions):
    """Compute softmax attention tree by tree."""
    leaf, parts = hierarchy.tensor("leaf_nodes"), []
    for begin, end in zip(hierarchy.tensor("leaf_offsets")[:-1], hierarchy.tensor("leaf_offsets")[1:], strict=True):
        logits = torch.einsum("ihd,jhd->hij", q[begin:end], k[begin:end]) / q.shape[-1] ** 0.5
        if positions is not None:
            ε = positions[leaf[begin:end]]
            logits = logits + torch.einsum("ihd,jhd->hij", ε, ε)
        parts.append(torch.einsum("hij,jhd->ihd", logits.softmax(-1), v[begin:end]))
    return torch.cat(parts)


@settings(max_examples=15)
@given(few | many, st.booleans(), st.sampled_from([DIM, 2, 13]))
def test_flat_is_softmax_attention_in_every_tree(lengths, with_positions, value_dim):
    tree = Hierarchy.flat(lengths)
    q, k, v = inputs(tree, value_dim=value_dim, requires_grad=True)
    positions = random_positions(tree, 0, HEADS, requires_grad=True) if with_positions else None
    out, wanted = Flat()(q, k, v, tree, positions), softmax_attention(q, k, v, tree, positions)
    close(out, wanted)
    tensors = [q, k, v, positions]
    for ours, theirs in zip(gradients(out, tensors), gradients(wanted, tensors), strict=True):
        close(ours, theirs)


@settings(max_examples=10)
@given(few)
def test_flat_is_the_hierarchical_operator_on_one_family(lengths):
    tree = Hierarchy.flat(lengths)
    q, k, v = inputs(tree)
    positions = random_positions(tree, 0, HEADS)
    wanted = hsa.hierarchical_attention(q, k, v, tree, positions=positions, include_self=True)
    close(Flat()(q, k, v, tree, positions), wanted)
    close(Hierarchical(include_self=True)(q, k, v, tree, positions), wanted)


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [1, 7], [1] * 11, [1, 5, 64, 65, 128, 2, 3, 1, 63]])
def test_flat_on_trees_of_one_leaf_and_at_the_edges_of_buckets(lengths):
    tree = Hierarchy.flat(lengths)
    q, k, v = inputs(tree)
    positions = random_positions(tree, 0, HEADS)
    close(Flat()(q, k, v, tree, positions), softmax_attention(q, k, v, tree, positions))


def test_flat_takes_positions_that_all_heads_share():
    tree = Hierarchy.flat([3, 5])
    q, k, v = inputs(tree)
    positions = random_positions(tree, 0, 1)
    close(Flat()(q, k, v, tree, positions), softmax_attention(q, k, v, tree, positions))


@pytest.mark.parametrize("lengths", [[2, 3], [2, 1, 1, 2, 1, 1, 1, 1, 2]])
def test_flat_gradients(lengths):
    tree = Hierarchy.flat(lengths)
    q, k, v = (torch.randn(tree.num_leaves, 2, 1, dtype=torch.float64, requires_grad=True) for _ in range(3))
    positions = random_positions(tree, 0, 2, requires_grad=True)
    assert torch.autograd.gradcheck(lambda q, k, v, positions: Flat()(q, k, v, tree, positions), (q, k, v, positions))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_flat_keeps_half_precision_and_hides_the_padding(dtype):
    tree = Hierarchy.flat([5, 7, 1, 3, 11, 2, 13, 6, 4])
    q, k, v = inputs(tree, dtype=dtype)
    out = Flat()(q, k, v, tree, None)
    assert out.dtype == dtype
    close(out.double(), softmax_attention(q.double(), k.double(), v.double(), tree, None), atol=0.03)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lengths", [[1], [5, 7, 1, 130, 64, 2, 65, 3, 11, 300]])
@pytest.mark.parametrize("value_dim", [DIM, 13])
def test_flat_on_a_gpu(dtype, lengths, value_dim):
    tree = Hierarchy.flat(lengths)
    tensors = [*inputs(tree, value_dim=value_dim), random_positions(tree, 0, HEADS)]
    tensors = [x.to(dtype).double().requires_grad_() for x in tensors]
    wanted = softmax_attention(*tensors[:3], tree, tensors[3])
    on_gpu = [x.detach().to("cuda", dtype).requires_grad_() for x in tensors]
    out = Flat()(*on_gpu[:3], tree.to("cuda"), on_gpu[3])
    assert out.dtype == dtype
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5}[dtype]
    weight = torch.randn(wanted.shape, dtype=torch.float64).to(dtype)
    ours = [out, *torch.autograd.grad(out, on_gpu, weight.to("cuda"))]
    theirs = [wanted, *torch.autograd.grad(wanted, tensors, weight.double())]
    for one, other in zip(ours, theirs, strict=True):
        close(one.double().cpu(), other, atol=tolerance * float(other.detach().abs().max() + 1))


@pytest.mark.parametrize("include_self", [False, True])
@settings(max_examples=8)
@given(forests())
def test_hierarchical_calls_the_operator(include_self, tree):
    q, k, v = inputs(tree)
    positions = random_positions(tree, 0, HEADS)
    wanted = hsa.hierarchical_attention(q, k, v, tree, positions=positions, include_self=include_self)
    assert torch.equal(Hierarchical(include_self=include_self)(q, k, v, tree, positions), wanted)


@pytest.mark.parametrize(("near", "top_k"), [(0, 0), (1, 0), (0, 2), (1, 1)])
@settings(max_examples=8)
@given(forests())
def test_multiscale_calls_the_operator(near, top_k, tree):
    q, k, v = inputs(tree)
    positions = random_positions(tree, 0, HEADS)
    attention = Multiscale(HEADS, near=near, top_k=top_k).double()
    torch.nn.init.normal_(attention.pooled_bias)
    options = {"near": near, "top_k": top_k, "positions": positions, "pooled_bias": attention.pooled_bias}
    wanted = hsa.multiscale_attention(q, k, v, tree, **options)
    for _ in range(2):  # the second call may use the cached selection of the first
        close(attention(q, k, v, tree, positions), wanted)


def test_multiscale_layers_of_other_widths_share_a_tree():
    tree = Hierarchy.regular([30, 7], (3, 2))
    for near in (0, 1):
        for heads in (2, 3):
            q, k, v = random_inputs(tree, heads, heads=heads, kv_heads=heads, value_dim=3)
            wanted = hsa.multiscale_attention(q, k, v, tree, near=near)
            close(Multiscale(heads, near=near)(q, k, v, tree, None), wanted)


@settings(max_examples=8)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(0, 3))
def test_clustered_calls_the_operators(lengths, top_k):
    group, tile = 3, 7
    flat, tree = Hierarchy.flat(lengths), Hierarchy.regular(lengths, (group, 2), repeat_last=True)
    q, k, v = inputs(tree)
    attention = Clustered(HEADS, group=group, top_k=top_k, tile=tile).double()
    torch.nn.init.normal_(attention.pooled_bias)
    clusters = hsa.cluster_keys(k, tree)
    selection = hsa.select(q, k, tree, queries=Queries.windows(tree, tile), top_k=top_k, clusters=clusters)
    wanted = hsa.multiscale_attention(
        q, k, v, tree, selection=selection, clusters=clusters, pooled_bias=attention.pooled_bias
    )
    close(attention(q, k, v, flat, None), wanted)


def test_clustered_with_all_groups_selected_is_softmax_attention():
    tree = Hierarchy.flat([23, 5])
    q, k, v = inputs(tree)
    close(Clustered(HEADS, group=3, top_k=8, tile=7)(q, k, v, tree, None), softmax_attention(q, k, v, tree, None))


@pytest.mark.parametrize("lengths", [[5, 8], [6, 5, 7], [9, 16, 3, 12]])
def test_clusters_do_not_depend_on_the_other_trees(lengths):
    """The principal directions of a tree are the same whatever the sizes of the others."""
    whole = Hierarchy.regular(lengths, (2, 2), repeat_last=True)
    k = torch.randn(whole.num_leaves, 499, DIM, dtype=torch.float64)
    together, begin = hsa.cluster_keys(k, whole).order, 0
    for length in lengths:
        alone = hsa.cluster_keys(k[begin : begin + length], Hierarchy.regular([length], (2, 2), repeat_last=True))
        assert torch.equal(together[:, begin : begin + length] - begin, alone.order)
        begin += length


def test_no_attention_returns_the_values():
    tree = Hierarchy.from_nested([[3, 2], [4]])
    _, _, v = inputs(tree)
    assert NoAttention()(v, tree, None) is v


ATTENTIONS = {
    "hierarchical": Hierarchical(),
    "multiscale": Multiscale(HEADS, near=1),
    "multiscale top_k": Multiscale(HEADS, top_k=2),
    "clustered": Clustered(HEADS, group=3, top_k=2, tile=5),
    "flat": Flat(),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_prepare_does_not_change_results(name):
    make = lambda: Hierarchy.regular([23, 7, 1], (3, 2))  # noqa: E731
    q, k, v = inputs(make())
    prepared = make()
    ATTENTIONS[name].prepare(prepared)
    assert torch.equal(ATTENTIONS[name](q, k, v, prepared, None), ATTENTIONS[name](q, k, v, make(), None))


@pytest.mark.parametrize("name", ATTENTIONS)
def test_counted_operations_are_those_of_hsa_flops(name):
    tree, width = Hierarchy.regular([29, 13], (3, 2)), HEADS * DIM
    q, k, v = inputs(tree)
    attention = ATTENTIONS[name]
    with counting_operations() as counts:
        attention(q, k, v, tree, None)
    if name == "flat":
        assert counts[0].attention == sum(hsa.flops_flat(n, width, HEADS) for n in tree.lengths)
    elif name == "hierarchical":
        assert counts == [hsa.flops(tree, width, HEADS)]
    elif name == "clustered":
        regular = Hierarchy.regular(tree.lengths, (3, 2), repeat_last=True)
        clusters = hsa.cluster_keys(k, regular)
        selection = hsa.select(q, k, regular, queries=Queries.windows(regular, 5), top_k=2, clusters=clusters)
        assert counts == [hsa.flops(selection, width, HEADS, hierarchy=regular, clusters=clusters)]
        assert counts[0].clustering == clusters.operations > 0
    else:
        selection = hsa.select(q, k, tree, near=attention.near, top_k=attention.top_k)
        assert counts == [hsa.flops(selection, width, HEADS, hierarchy=tree)]


def test_an_outer_count_includes_the_inner_one():
    tree = Hierarchy.flat([7])
    q, k, v = inputs(tree)

    def attend():
        return Flat()(q, k, v, tree, None)

    with counting_operations() as outer:
        attend()
        with counting_operations() as inner:
            attend()
            attend()
        attend()
    attend()
    assert len(inner) == 2
    assert len(outer) == 4
    assert len({count.total for count in outer}) == 1


def test_an_error_ends_the_count():
    tree = Hierarchy.flat([7])
    q, k, v = inputs(tree)
    with pytest.raises(ZeroDivisionError), counting_operations() as counts:
        raise ZeroDivisionError
    Flat()(q, k, v, tree, None)
    assert counts == []
