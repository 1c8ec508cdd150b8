"""Transformer layers stand where those of `torch.nn` stand."""

import copy

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from hsa import Hierarchy
from hsa.errors import InvalidInput
from hsa.nn import HierarchicalEncoderLayer, MultiscaleDecoderLayer, MultiscaleEncoderLayer
from tests.forests import forests

WIDTH, HEADS, LENGTH = 15, 3, 47
ENCODERS = {
    "multiscale": lambda **options: MultiscaleEncoderLayer(WIDTH, HEADS, 8, **{"top_k": 99, **options}),
    "clustered": lambda **options: MultiscaleEncoderLayer(
        WIDTH, HEADS, 8, kind="clustered", **{"top_k": 99, **options}
    ),
    "hierarchical": lambda **options: HierarchicalEncoderLayer(WIDTH, HEADS, 8, **{"branching": (99,), **options}),
}
DOUBLE = {"dtype": torch.float64}
SMALL = {"branching": (4, 2, 2), "tile": 8}
"""Chunks and tiles of causal attention for short sequences."""


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def tokens(length=LENGTH):
    return torch.randn(2, length, WIDTH, **DOUBLE)


def hidden(length, *lengths):
    return torch.arange(length) >= torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize(
    "options", [{}, {"norm_first": True, "activation": "gelu"}, {"bias": False, "layer_norm_eps": 0.1}]
)
def test_encoder_layer_as_pytorchs(name, options):
    theirs = nn.TransformerEncoderLayer(WIDTH, HEADS, 8, batch_first=True, **options, **DOUBLE).eval()
    ours = ENCODERS[name](batch_first=True, **options, **DOUBLE).eval()
    ours.load_state_dict(theirs.state_dict())
    x, mask = tokens(), hidden(LENGTH, LENGTH, 20)
    expected = theirs(x, src_key_padding_mask=mask)
    torch.testing.assert_close(ours(x, src_key_padding_mask=mask)[~mask], expected[~mask])
    with torch.no_grad():  # where PyTorch takes its fused path
        torch.testing.assert_close(ours(x), theirs(x))
    nested = torch.nested.nested_tensor_from_jagged(x[~mask], torch.tensor([0, LENGTH, LENGTH + 20]))
    torch.testing.assert_close(ours(nested).values(), expected[~mask])
    tree = Hierarchy.flat([LENGTH, 20])
    torch.testing.assert_close(ours(x[~mask], tree), expected[~mask])


@pytest.mark.parametrize("name", ENCODERS)
@settings(deadline=None, max_examples=10)
@given(forests())
def test_trees_do_not_see_each_other(name, forest):
    options = {} if name == "hierarchical" else {"top_k": 1}
    layer = ENCODERS[name](**options, **DOUBLE).eval()
    x = torch.randn(forest.num_leaves, WIDTH, **DOUBLE)
    out = layer(x, forest)
    changed = x.clone()
    changed[: forest.lengths[0]] += 1
    torch.testing.assert_close(layer(changed, forest)[forest.lengths[0] :], out[forest.lengths[0] :])


@pytest.mark.parametrize("kind", ["multiscale", "clustered"])
def test_inside_pytorchs_encoder_and_decoder(kind):
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, HEADS, 8, batch_first=True, **DOUBLE), 2, enable_nested_tensor=False
    ).eval()
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, 8, batch_first=True, **DOUBLE), 2).eval()
    options = {"top_k": 99, "kind": kind, **DOUBLE}
    our_encoder = nn.TransformerEncoder(
        MultiscaleEncoderLayer(WIDTH, HEADS, 8, **options), 2, enable_nested_tensor=False
    ).eval()
    our_decoder = nn.TransformerDecoder(MultiscaleDecoderLayer(WIDTH, HEADS, 8, **options), 2).eval()
    our_encoder.load_state_dict(encoder.state_dict())
    our_decoder.load_state_dict(decoder.state_dict())
    source, target = tokens(), tokens(23)
    padding, target_padding = hidden(LENGTH, 31, LENGTH), hidden(23, 23, 11)
    later = nn.Transformer.generate_square_subsequent_mask(23, **DOUBLE)
    masks = {"tgt_mask": later, "tgt_is_causal": True}
    masks["tgt_key_padding_mask"] = torch.zeros(2, 23, **DOUBLE).masked_fill(target_padding, -torch.inf)
    outs = []
    for encode, decode in ((encoder, decoder), (our_encoder, our_decoder)):
        memory = encode(source, src_key_padding_mask=padding)
        outs.append(decode(target, memory, memory_key_padding_mask=padding, **masks)[~target_padding])
    torch.testing.assert_close(*outs)
    causal_outs = [
        e(target, mask=later, is_causal=True, src_key_padding_mask=masks["tgt_key_padding_mask"])[~target_padding]
        for e in (encoder, our_encoder)
    ]
    torch.testing.assert_close(*causal_outs)


def test_packed_decoder():
    layer = MultiscaleDecoderLayer(WIDTH, HEADS, 8, causal=True, top_k=99, **DOUBLE).eval()
    target, memory = tokens(23), tokens()
    target_padding, padding = hidden(23, 23, 11), hidden(LENGTH, 31, LENGTH)
    expected = layer(target, memory, tgt_key_padding_mask=target_padding, memory_key_padding_mask=padding)
    trees = Hierarchy.regular([23, 11], (4, 2)), Hierarchy.regular([31, LENGTH], (3, 5))
    packed = layer(target[~target_padding], memory[~padding], *trees)
    torch.testing.assert_close(packed, expected[~target_padding])


def test_causal_layers_do_not_leak():
    layer = MultiscaleEncoderLayer(WIDTH, HEADS, 8, causal=True, kind="clustered", top_k=1, **SMALL, **DOUBLE).eval()
    x = tokens().requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x)[:, :30].sum(), x)
    assert not gradient[:, 30:].any()
    assert gradient[:, :30].any()


@pytest.mark.parametrize("selection", [{"top_k": 1}, {"threshold": 1 / 8}])
@pytest.mark.parametrize("kind", ["multiscale", "clustered"])
def test_later_tokens_and_padding_do_not_matter_to_a_decoder(kind, selection):
    """Compare values: a selection has no gradient that would show a leak."""
    layer = MultiscaleDecoderLayer(WIDTH, HEADS, 8, causal=True, kind=kind, **selection, **SMALL, **DOUBLE).eval()
    for parameter in layer.parameters():
        parameter.data *= 3
    target, memory = torch.randn(2, 40, WIDTH, **DOUBLE), torch.randn(2, 300, WIDTH, **DOUBLE)
    out = layer(target, memory)
    target[:, 25:] = 0
    torch.testing.assert_close(layer(target, memory)[:, :25], out[:, :25], rtol=0, atol=1e-12)
    torch.testing.assert_close(layer(target[:, :25], memory), out[:, :25], rtol=0, atol=1e-12)


def test_copies_and_saved_state(tmp_path):
    layer = MultiscaleEncoderLayer(WIDTH, HEADS, 8).eval()
    x = torch.randn(2, LENGTH, WIDTH)
    torch.save(layer, tmp_path / "layer.pt")
    for other in (copy.deepcopy(layer), torch.load(tmp_path / "layer.pt", weights_only=False)):
        assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ENCODERS["multiscale"](batch_first=False), r"batch_first: expected True"),
        (lambda: MultiscaleDecoderLayer(15, 3, batch_first=False), r"batch_first: expected True"),
        (lambda: MultiscaleEncoderLayer(15, 4), r"num_heads: expected a positive divisor"),
        (
            lambda: ENCODERS["multiscale"]()(torch.randn(1, 5, 15), torch.ones(5, 5)),
            r"hierarchy: expected an hsa.Hierarchy, got Tensor. Pass a mask by name: src_mask=…",
        ),
        (
            lambda: MultiscaleDecoderLayer(15, 3)(torch.randn(1, 5, 15), torch.randn(1, 5, 15), memory_is_causal=True),
            r"memory_is_causal: expected False",
        ),
        (
            lambda: MultiscaleEncoderLayer(15, 3)(torch.randn(1, 5, 15), src_key_padding_mask=torch.zeros(1, 4).bool()),
            r"src_key_padding_mask: expected shape",
        ),
        (
            lambda: MultiscaleDecoderLayer(15, 3)(torch.randn(1, 5, 15), torch.randn(2, 5, 15)),
            r"memory: expected shape",
        ),
        (lambda: HierarchicalEncoderLayer(15, 3)(torch.randn(1, 5, 15), is_causal=True), r"is_causal: expected False"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(InvalidInput, match=message):
        call()


def test_unknown_options():
    with pytest.raises(TypeError, match="include_selves"):
        HierarchicalEncoderLayer(15, 3, include_selves=True)
