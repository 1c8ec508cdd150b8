"""Attention modules stand where `torch.nn.MultiheadAttention(batch_first=True)` stands."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from hsa import Hierarchy, dense_weights, hierarchical_attention, multiscale_attention
from hsa.errors import InvalidInput
from hsa.nn import HierarchicalAttention, MultiscaleAttention
from tests.forests import forests

WIDTH, HEADS, LENGTH = 15, 3, 47
MAKERS = {
    "multiscale": lambda **options: MultiscaleAttention(WIDTH, HEADS, **{"top_k": 99, **options}),
    "clustered": lambda **options: MultiscaleAttention(WIDTH, HEADS, **{"kind": "clustered", "top_k": 99, **options}),
    "hierarchical": lambda **options: HierarchicalAttention(WIDTH, HEADS, **{"branching": (99,), **options}),
}
"""Modules that select everything: softmax attention."""
SMALL = {"branching": (4, 2, 2), "tile": 8}
"""Chunks and tiles of causal attention for short sequences."""


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def pair(name, **options):
    """Return PyTorch's module and ours with the same weights."""
    torch_options = {key: options[key] for key in ("bias", "kdim", "vdim") if key in options}
    theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64, **torch_options)
    nn.init.normal_(theirs.out_proj.weight)
    if theirs.in_proj_bias is not None:
        nn.init.normal_(theirs.in_proj_bias)
        nn.init.normal_(theirs.out_proj.bias)
    ours = MAKERS[name](dtype=torch.float64, **options)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    return theirs, ours


def tokens(length=LENGTH, batch=2, width=WIDTH):
    return torch.randn(batch, length, width, dtype=torch.float64, requires_grad=True)


def hidden(*lengths):
    return torch.arange(LENGTH) >= torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("bias", [True, False])
@settings(deadline=None, max_examples=5)
@given(st.lists(st.integers(1, LENGTH), min_size=2, max_size=2), st.booleans())
def test_as_pytorch_where_everything_is_selected(name, bias, lengths, average):
    theirs, ours = pair(name, bias=bias)
    x, mask = tokens(), hidden(*lengths)
    options = {"key_padding_mask": mask, "need_weights": True, "average_attn_weights": average}
    expected, expected_weights = theirs(x, x, x, **options)
    out, weights = ours(x, x, x, **options)
    torch.testing.assert_close(out[~mask], expected[~mask])
    rows = ~mask if average else (~mask)[:, None].expand(-1, HEADS, -1)
    torch.testing.assert_close(weights[rows], expected_weights[rows])
    assert not out[mask].any()
    assert not weights[~rows].any()
    torch.testing.assert_close(ours(x, key_padding_mask=mask), out)
    padding = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -torch.inf)
    torch.testing.assert_close(ours(x, key_padding_mask=padding), out)


@pytest.mark.parametrize("name", ["multiscale", "clustered"])
@pytest.mark.parametrize("everything", [{}, {"top_k": None, "threshold": 1e-30}])
def test_causal_in_four_ways(name, everything):
    theirs, ours = pair(name, **SMALL, **everything)
    _, always = pair(name, causal=True, **SMALL, **everything)
    always.load_state_dict(ours.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x, mask = tokens(), hidden(LENGTH, 20)
    later = torch.ones(LENGTH, LENGTH).triu(1).bool()
    expected, _ = theirs(x, x, x, attn_mask=later, key_padding_mask=mask)
    per_head = later.expand(2 * HEADS, -1, -1)
    outs = [
        ours(x, x, x, is_causal=True, key_padding_mask=mask)[0],
        ours(x, attn_mask=later, key_padding_mask=mask),
        ours(x, attn_mask=per_head, key_padding_mask=mask),
        always(x, key_padding_mask=mask),
        ours(x, attn_mask=nn.Transformer.generate_square_subsequent_mask(LENGTH), key_padding_mask=mask),
    ]
    for out in outs:
        torch.testing.assert_close(out[~mask], expected[~mask])


@pytest.mark.parametrize("name", ["multiscale", "clustered"])
def test_cross_attention_with_other_widths(name):
    theirs, ours = pair(name, kdim=7, vdim=11)
    query, key, value = tokens(13), tokens(width=7), tokens(width=11)
    mask = hidden(LENGTH, 9)
    expected, expected_weights = theirs(query, key, value, key_padding_mask=mask)
    out, weights = ours(query, key, value, key_padding_mask=mask, need_weights=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(weights, expected_weights)
    trees = Hierarchy.regular([LENGTH, 9], (4, 3)), Hierarchy.flat([13, 13])
    packed = ours(query.flatten(0, 1), key[~mask], value[~mask], hierarchy=trees[0], query_hierarchy=trees[1])[0]
    torch.testing.assert_close(packed, expected.flatten(0, 1))


def test_a_value_of_its_own_in_self_attention():
    """Positions may be added to query and key only."""
    theirs, ours = pair("multiscale")
    x, positions = tokens(), tokens()
    query = x + positions
    torch.testing.assert_close(ours(query, query, x)[0], theirs(query, query, x)[0])


@pytest.mark.parametrize("name", MAKERS)
@settings(deadline=None, max_examples=15)
@given(forests())
def test_packed_rows_with_any_forest(name, forest):
    options = {"top_k": 1} if name != "hierarchical" else {"include_self": False}
    ours = MAKERS[name](dtype=torch.float64, **options)
    x = torch.randn(forest.num_leaves, WIDTH, dtype=torch.float64)
    q, k, v = ours.in_proj_weight.matmul(x.T).T.unflatten(1, (3, HEADS, -1)).unbind(1)
    if name == "hierarchical":
        attended = hierarchical_attention(q, k, v, forest, include_self=False)
    else:
        attended = ours.options.attend(q, k, v, forest if name == "multiscale" else forest.lengths)
    expected = ours.out_proj(attended.flatten(1))
    torch.testing.assert_close(ours(x, hierarchy=forest), expected)
    padded = nn.utils.rnn.pad_sequence(x.split(forest.lengths), batch_first=True)
    if name == "clustered":  # takes the lengths of the tree only
        mask = torch.arange(padded.shape[1]) >= torch.tensor(forest.lengths)[:, None]
        torch.testing.assert_close(ours(padded, key_padding_mask=mask)[~mask], expected)


def test_weights_of_packed_rows():
    ours = MAKERS["multiscale"](top_k=1)
    tree = Hierarchy.regular([20, 9], (4, 2))
    x = torch.randn(29, WIDTH)
    q, k, _ = ours.in_proj_weight.matmul(x.T).T.unflatten(1, (3, HEADS, -1)).unbind(1)
    out, weights = ours(x, hierarchy=tree, need_weights=True, average_attn_weights=False)
    torch.testing.assert_close(weights, dense_weights(ours.options.attend, q, k, tree))
    torch.testing.assert_close(weights.sum(-1), torch.ones(HEADS, 29))
    assert out.shape == x.shape


@pytest.mark.parametrize("kind", ["multiscale", "clustered"])
def test_causal_selection_takes_the_lengths_of_a_tree(kind):
    """Packed, padded and nested tokens get the same, with weights that give the output."""
    ours = MultiscaleAttention(WIDTH, HEADS, causal=True, kind=kind, threshold=0.1, **SMALL, dtype=torch.float64)
    x, mask = tokens(), hidden(LENGTH, 20)
    packed, weights = ours(
        x[~mask], hierarchy=Hierarchy.flat([LENGTH, 20]), need_weights=True, average_attn_weights=False
    )
    padded, padded_weights = ours(x, key_padding_mask=mask, need_weights=True, average_attn_weights=False)
    torch.testing.assert_close(padded[~mask], packed)
    torch.testing.assert_close(padded_weights[1, :, :20, :20], weights[:, LENGTH:, LENGTH:])
    torch.testing.assert_close(weights.sum(-1), torch.ones(HEADS, LENGTH + 20, dtype=torch.float64))
    assert not weights.triu(1).any()
    nested = torch.nested.nested_tensor_from_jagged(x[~mask], torch.tensor([0, LENGTH, LENGTH + 20]))
    torch.testing.assert_close(ours(nested).values(), packed)


@pytest.mark.parametrize("name", MAKERS)
def test_nested_tensors_and_their_gradients(name):
    theirs, ours = pair(name)
    x, mask = tokens(), hidden(LENGTH, 20)
    nested = torch.nested.nested_tensor_from_jagged(x[~mask], torch.tensor([0, LENGTH, LENGTH + 20]))
    out = ours(nested)
    expected, _ = theirs(x, x, x, key_padding_mask=mask)
    torch.testing.assert_close(out.values(), expected[~mask])
    ours_gradient, theirs_gradient = (
        torch.autograd.grad(y.square().sum(), x)[0] for y in (out.values(), expected[~mask])
    )
    torch.testing.assert_close(ours_gradient, theirs_gradient)
    assert (nested + out).shape == nested.shape


def test_one_sequence_without_a_batch():
    theirs, ours = pair("multiscale")
    x = tokens()[0]
    expected, weights = theirs(x, x, x)
    torch.testing.assert_close(ours(x), expected)
    torch.testing.assert_close(ours(x, need_weights=True)[1], weights)


def test_dropout_acts_in_training_alone():
    ours = MultiscaleAttention(WIDTH, HEADS, 0.5)
    x = torch.randn(2, LENGTH, WIDTH)
    assert not torch.equal(ours(x), ours(x))
    ours.eval()
    assert torch.equal(ours(x), ours(x))
    ours.train()
    _, weights = ours(x, need_weights=True)  # without dropout: rows sum to 1
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, LENGTH))


@pytest.mark.parametrize(
    ("name", "options"),
    [("multiscale", {"near": 0, "top_k": 0}), ("clustered", {"top_k": 1}), ("hierarchical", {"branching": None})],
)
def test_it_pools(name, options):
    """Something is pooled, and gradients reach every weight."""
    theirs, ours = pair(name, **options)
    x = tokens()
    out = ours(x)
    assert (out - theirs(x, x, x)[0]).abs().max() > 1e-2
    out.sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in ours.parameters() if parameter.ndim > 1)


def test_inside_pytorchs_own_layer():
    """The fused path of `nn.TransformerEncoderLayer` would ignore our attention; it must not be taken."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 8, batch_first=True).eval()
    x = torch.randn(2, LENGTH, WIDTH)
    with torch.no_grad():
        expected = layer(x)
        layer.self_attn = MultiscaleAttention(WIDTH, HEADS, near=0, top_k=0).eval()
        layer.self_attn.load_state_dict(nn.MultiheadAttention(WIDTH, HEADS).state_dict())
        assert (layer(x) - expected).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, x: a(x[..., 1:]), r"query: expected a width of 15, got 14"),
        (lambda a, x: a(x, x[:1], x[:1]), r"key: expected shape \[2 sequences, length, dim\], got \(1, 47, 15\)"),
        (lambda a, x: a(x, x[:, 1:], x), r"value: expected as many rows as key"),
        (lambda a, x: a(x[None]), r"query: expected shape .*, got \(1, 2, 47, 15\)"),
        (
            lambda a, x: a(x, key_padding_mask=torch.zeros(2, 3).bool()),
            r"key_padding_mask: .*got \(2, 3\)",
        ),
        (
            lambda a, x: a(x, key_padding_mask=torch.zeros(2, LENGTH).long()),
            r"key_padding_mask: expected a tensor of bool",
        ),
        (lambda a, x: a(x[:, :0]), r"sequences of length 0; expected at least one token"),
        (lambda a, x: a(x[0, 0]), r"query: expected shape \[batch, length, dim\], got \(15,\)"),
        (lambda a, x: a(x, attn_mask=torch.eye(LENGTH).bool()), r"attn_mask: expected a mask that hides padding"),
        (lambda a, x: a(x, attn_mask=torch.randn(LENGTH, LENGTH)), r"attn_mask: expected 0 and −∞ only"),
        (lambda a, x: a(x, x.clone(), is_causal=True), r"is_causal: expected self-attention.*Leave key and value out"),
        (lambda a, x: a(x[0], hierarchy=[47]), r"hierarchy: expected an hsa.Hierarchy, got list"),
        (
            lambda a, x: a(x, hierarchy=Hierarchy.flat([94])),
            r"query: expected shape .*, got \(2, 47, 15\)",
        ),
        (lambda a, x: a(x[0], hierarchy=Hierarchy.flat([9])), r"query: expected shape"),
        (
            lambda a, x: a(x[0], x[1], hierarchy=Hierarchy.flat([47])),
            r"query_hierarchy: not given; expected the forest of the queries",
        ),
        (
            lambda a, x: a(x[0], x[1], hierarchy=Hierarchy.flat([47]), query_hierarchy=Hierarchy.flat([40, 7])),
            r"query_hierarchy: expected 1 trees, as hierarchy, got 2",
        ),
        (
            lambda a, x: a(x[0], hierarchy=Hierarchy.flat([47]), key_padding_mask=hidden(1)),
            r"key_padding_mask: expected None: packed rows have no padding",
        ),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(InvalidInput, match=message):
        call(MultiscaleAttention(WIDTH, HEADS), torch.randn(2, LENGTH, WIDTH))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 4}, r"num_heads: expected a positive divisor of embed_dim, which is 15, got 4"),
        ({"num_heads": 0}, r"num_heads: "),
        ({"dropout": 1.5}, r"dropout_p: "),
        ({"kind": "hierarchical"}, r"kind: .*For the paper's operator use HierarchicalAttention"),
        ({"batch_first": False}, r"batch_first: expected True"),
        ({"near": -1}, r"near: expected an integer of at least 0, got -1"),
        ({"threshold": 0}, r"threshold: expected a number above 0 and at most 1, got 0"),
        ({"threshold": [0.1, 0.2]}, rf"threshold: expected one number, or one for each of the {HEADS} query heads"),
        ({"kind": "clustered", "causal": True, "sinks": 0}, r"sinks: expected no value in causal attention .*, got 0"),
        ({"causal": True, "top_k": 1, "branching": (8, 2)}, r"branching: expected keys per group"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InvalidInput, match=message):
        MultiscaleAttention(WIDTH, **{"num_heads": HEADS, **options})


def test_a_threshold_is_for_causal_attention():
    ours, x = MultiscaleAttention(WIDTH, HEADS, threshold=0.1), torch.randn(2, LENGTH, WIDTH)
    assert ours(x, is_causal=True).shape == x.shape
    with pytest.raises(InvalidInput, match="threshold: expected no value without causality"):
        ours(x)


def test_the_papers_operator_is_not_causal_and_not_across():
    ours, x = HierarchicalAttention(WIDTH, HEADS), torch.randn(2, LENGTH, WIDTH)
    with pytest.raises(InvalidInput, match=r"is_causal: expected False for hier.*Use hsa.nn.MultiscaleA"):
        ours(x, is_causal=True)
    with pytest.raises(InvalidInput, match="key: expected the tokens of query"):
        ours(x, x.clone())


def test_sequences_of_padding_alone_and_no_sequences():
    ours = MultiscaleAttention(WIDTH, HEADS, batch_first=True)
    x, padding = torch.randn(2, LENGTH, WIDTH), torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[1] = True
    out, weights = ours(x, key_padding_mask=padding, need_weights=True)
    torch.testing.assert_close(out[:1], ours(x[:1]))
    assert not out[1].any()
    assert not weights[1].any()
    assert ours(x[:0]).shape == (0, LENGTH, WIDTH)
    assert MultiscaleAttention(WIDTH, HEADS, causal=True, kind="clustered")(x[:0]).shape == (0, LENGTH, WIDTH)


def test_self_attention_through_reentrant_checkpoints():
    """Such a checkpoint detaches one tensor into three."""
    ours = MultiscaleAttention(WIDTH, HEADS, branching=(3, 2), top_k=1)
    grads = []
    for attend in (ours, partial(checkpoint, ours, use_reentrant=True)):
        x = torch.linspace(0, 1, 2 * LENGTH * WIDTH).sin().view(2, LENGTH, WIDTH).requires_grad_()
        attend(x, x, x)[0].square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # from Dynamo
@pytest.mark.parametrize("name", [*MAKERS, "causal"])
def test_compiled(name):
    """The tree is built outside the graph, also on the first call."""
    causal = {"causal": True, "kind": "clustered", "threshold": 0.1, **SMALL}
    ours = MultiscaleAttention(WIDTH, HEADS, **causal) if name == "causal" else MAKERS[name]()
    x = torch.randn(2, LENGTH + 6, WIDTH)
    padding = torch.arange(LENGTH + 6) >= torch.tensor([[LENGTH + 6], [30]])
    torch._dynamo.reset()
    out = torch.compile(ours, backend="aot_eager")(x, key_padding_mask=padding)
    torch.testing.assert_close(out, ours(x, key_padding_mask=padding))


def test_nested_values_are_as_long_as_their_keys():
    query, key, value = (
        torch.nested.nested_tensor([torch.randn(n, WIDTH) for n in lengths], layout=torch.jagged)
        for lengths in ((3, 5), (4, 2), (2, 4))
    )
    with pytest.raises(InvalidInput, match="value: expected sequences of 4, 2 tokens, as key, got 2, 4"):
        MultiscaleAttention(WIDTH, HEADS)(query, key, value)


def test_nested_tensors_have_no_masks_and_give_no_weights():
    ours = MultiscaleAttention(WIDTH, HEADS)
    nested = torch.nested.nested_tensor([torch.randn(3, WIDTH), torch.randn(5, WIDTH)], layout=torch.jagged)
    with pytest.raises(InvalidInput, match="key_padding_mask: expected None: nested tensors have no padding"):
        ours(nested, key_padding_mask=hidden(1, 1))
    with pytest.raises(InvalidInput, match="need_weights: expected False for nested tensors"):
        ours(nested, need_weights=True)


def test_one_call_is_select_then_attend():
    """The module is the function with projections."""
    ours = MultiscaleAttention(WIDTH, HEADS, branching=(4, 2), near=1, top_k=0, sinks=0)
    x = torch.randn(29, WIDTH)
    tree = Hierarchy.regular([29], (4, 2), repeat_last=True)
    q, k, v = ours.in_proj_weight.matmul(x.T).T.unflatten(1, (3, HEADS, -1)).unbind(1)
    expected = ours.out_proj(multiscale_attention(q, k, v, tree, near=1).flatten(1))
    torch.testing.assert_close(ours(x), expected)
