"""The transformer layer compared with PyTorch's own, tree by tree, and with attention written out."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hsa import Hierarchy
from hsa.baselines.hat.layer import TransformerLayer
from hsa.errors import InvalidInput
from hsa.nn.attention import counting_operations
from tests.forests import softmax_weights
from tests.model_inputs import exact

WIDTH, HEADS, INNER = 15, 3, 17  # heads of 5
LENGTHS = st.lists(st.integers(1, 13), min_size=1, max_size=11)  # more than 8 trees are padded to similar lengths


def layer_of(**options):
    return exact(TransformerLayer(WIDTH, HEADS, feed_forward=INNER, **options))


def rows(lengths, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(lengths), WIDTH, generator=generator, dtype=torch.float64)


def torch_layer(layer, norm, activation, epsilon):
    """Return PyTorch's layer with the same weights."""
    twin = nn.TransformerEncoderLayer(
        WIDTH, HEADS, INNER, 0.0, activation, layer_norm_eps=epsilon, batch_first=True, norm_first=norm == "pre"
    ).double()
    names = {
        "self_attn.in_proj_": "project.",
        "self_attn.out_proj.": "output.",
        "linear1.": "inner.",
        "linear2.": "outer.",
        "norm1.": "norm_attention.",
        "norm2.": "norm_feed_forward.",
    }
    own = layer.state_dict()
    twin.load_state_dict({f"{a}{kind}": own[f"{b}{kind}"] for a, b in names.items() for kind in ("weight", "bias")})
    return twin


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
@given(lengths=LENGTHS)
def test_equals_the_layer_of_pytorch_on_each_tree(norm, activation, lengths):
    layer = layer_of(norm=norm, activation=activation, epsilon=0.03)
    twin = torch_layer(layer, norm, activation, 0.03)
    x = rows(lengths).requires_grad_()
    result = layer(x, Hierarchy.flat(lengths))
    wanted = torch.cat([twin(part[None])[0] for part in x.split(lengths)])
    torch.testing.assert_close(result, wanted, rtol=1e-10, atol=1e-10)
    weight = torch.randn_like(result)
    torch.testing.assert_close(
        torch.autograd.grad(result, x, weight)[0], torch.autograd.grad(wanted, x, weight)[0], rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_positions_are_added_to_queries_keys_and_values(norm):
    lengths = [7, 2, 1]
    forest, x, positions = Hierarchy.flat(lengths), rows(lengths), rows(lengths, seed=6)
    layer = layer_of(norm=norm, activation="gelu-tanh")
    inputs = (layer.norm_attention(x) if norm == "pre" else x) + positions
    q, k, v = (part.view(-1, HEADS, WIDTH // HEADS) for part in layer.project(inputs).split(WIDTH, -1))
    attended = torch.einsum("hij,jhd->ihd", softmax_weights(q, k, forest), v).flatten(1)
    y = x + layer.output(attended)
    if norm == "post":
        y = layer.norm_attention(y)
    fed = layer.inner(layer.norm_feed_forward(y) if norm == "pre" else y)
    wanted = y + layer.outer(F.gelu(fed, approximate="tanh"))
    if norm == "post":
        wanted = layer.norm_feed_forward(wanted)
    torch.testing.assert_close(layer(x, forest, positions), wanted, rtol=1e-10, atol=1e-10)


def test_layer_starts_as_the_identity_and_can_learn():
    lengths = [5, 3]
    layer = TransformerLayer(WIDTH, HEADS, identity=True).double()
    x = rows(lengths)
    out = layer(x, Hierarchy.flat(lengths))
    assert torch.equal(out, x)
    out.square().sum().backward()
    assert layer.output.weight.grad.abs().max() > 0
    assert layer.outer.weight.grad.abs().max() > 0


def test_gradients():
    layer, forest = layer_of(), Hierarchy.flat([3, 1])
    x, positions = rows([3, 1]).requires_grad_(), rows([3, 1], seed=6).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, p: layer(x, forest, p), (x, positions))


def test_operations_are_counted():
    lengths = [7, 2, 1]
    with counting_operations() as counts:
        layer_of()(rows(lengths), Hierarchy.flat(lengths))
    assert [count.attention for count in counts] == [(4 * WIDTH + HEADS) * (49 + 4 + 1)]


def test_no_rows():
    assert layer_of()(rows([]), Hierarchy.flat([])).shape == (0, WIDTH)


def test_dropout_is_on_both_branches():
    lengths = [5]
    layer = layer_of(dropout=0.5).train()
    for silent in (layer.output, layer.outer):  # the other branch alone
        kept = silent.weight.data.clone(), silent.bias.data.clone()
        silent.weight.data.zero_()
        silent.bias.data.zero_()
        outs = [layer(rows(lengths), Hierarchy.flat(lengths)) for _ in range(2)]
        assert not torch.equal(*outs)
        silent.weight.data, silent.bias.data = kept


def test_heads_divide_the_width():
    with pytest.raises(InvalidInput, match="heads that divide the width, got 4 heads for a width of 15"):
        TransformerLayer(WIDTH, 4)
