import pytest
import torch
from torch import nn

from hsa import Hierarchy
from hsa.nn.causal_attention import CausalClustered, CausalFlat, CausalMultiscale
from hsa.nn.decoder import DecoderLayer, initialise
from hsa.nn.rotary import rotary_angles
from hsa.tree.causal_tree import causal_tree
from tests.model_inputs import exact

WIDTH, HEADS, KV = 12, 2, 1
LENGTHS = [13, 5]


def attention(kind):
    if kind == "flat":
        return CausalFlat(), Hierarchy.flat(LENGTHS)
    if kind == "clustered":
        return CausalClustered(HEADS, branching=(2, 2, 1), tile=2, top_k=1), Hierarchy.flat(LENGTHS)
    return CausalMultiscale(HEADS), causal_tree(LENGTHS, (3, 2), sinks=1)


@pytest.mark.parametrize(("kind", "activation"), [("flat", "gelu"), ("multiscale", "swiglu"), ("clustered", "swiglu")])
def test_no_output_depends_on_a_later_input(kind, activation):
    module, tree = attention(kind)
    sizes = {"kv_heads": KV, "feed_forward": 11, "activation": activation}
    layer = exact(DecoderLayer(WIDTH, HEADS, module, **sizes))
    angles = rotary_angles(torch.cat([torch.arange(n) for n in LENGTHS]), WIDTH // HEADS)
    x = torch.randn(sum(LENGTHS), WIDTH, dtype=torch.float64)
    slopes = torch.autograd.functional.jacobian(lambda x: layer(x, tree, angles), x).abs().amax((1, 3))
    text = torch.repeat_interleave(torch.tensor(LENGTHS))
    position = torch.arange(len(x))
    may_see = (text[:, None] == text) & (position <= position[:, None])
    assert (slopes[~may_see] == 0).all()
    assert (slopes[may_see] > 0).all()


def test_feed_forward_and_residuals():
    layer = exact(DecoderLayer(6, 1, CausalFlat(), feed_forward=5))
    x = torch.randn(1, 6, dtype=torch.float64)
    normal = nn.functional.rms_norm(x, (6,), layer.norm_attention.weight)
    x1 = x + normal @ layer.project.weight[12:].T @ layer.output.weight.T  # the only token attends to itself
    inner = nn.functional.rms_norm(x1, (6,), layer.norm_feed_forward.weight) @ layer.feed_forward.into.weight.T
    wanted = x1 + (nn.functional.silu(inner[:, :5]) * inner[:, 5:]) @ layer.feed_forward.out.weight.T
    torch.testing.assert_close(layer(x, Hierarchy.flat([1])), wanted)


def test_cross_attention_comes_before_the_feed_forward_network():
    class Cross(nn.Module):
        def forward(self, x, memory):
            return x * memory

    plain = exact(DecoderLayer(6, 1, CausalFlat(), feed_forward=5))
    crossed = exact(DecoderLayer(6, 1, CausalFlat(), feed_forward=5, cross=Cross()))
    x, tree = torch.randn(4, 6, dtype=torch.float64), Hierarchy.flat([4])
    torch.testing.assert_close(crossed(x, tree, memory=0.0), plain(x, tree))
    for layer in (plain, crossed):
        nn.init.zeros_(layer.output.weight)
    after = 3 * x
    wanted = after + plain.feed_forward(plain.norm_feed_forward(after))
    torch.testing.assert_close(crossed(x, tree, memory=2.0), wanted)


def test_dropout_only_in_training():
    layer = DecoderLayer(6, 1, CausalFlat(), dropout=0.5)
    x, tree = torch.randn(4, 6), Hierarchy.flat([4])
    assert not torch.equal(layer(x, tree), layer(x, tree))
    layer.eval()
    assert torch.equal(layer(x, tree), layer(x, tree))


def test_projections_that_add_to_the_residual_stream_start_smaller():
    layer = DecoderLayer(128, 2, CausalMultiscale(2))
    initialise(layer, 8)
    assert layer.project.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for narrow in (layer.output, layer.feed_forward.out):
        assert narrow.weight.std().item() == pytest.approx(0.005, rel=0.05)
    assert (layer.attention.pooled_bias == 0).all()
