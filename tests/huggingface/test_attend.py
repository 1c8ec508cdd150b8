"""One converted layer: its output and its weights."""

import math

import pytest
import torch

from hsa.huggingface import convert, revert
from hsa.huggingface.attend import attend_exactly
from hsa.huggingface.sequences import Sequences
from hsa.huggingface.settings import LayerSettings
from tests.huggingface.tiny_models import attend_layer, inputs_of, random_ids, tiny

ALL_EXACT = {"kind": "multiscale", "branching": (4, 2), "top_k": 0, "near": 99}
WAYS = {
    "clustered": {"branching": (4, 2), "top_k": 1},
    "threshold": {"branching": (4, 2, 2), "tile": 8, "threshold": 1 / 8},
    "windows with a threshold": {"kind": "multiscale", "branching": (4, 2, 2), "tile": 8, "threshold": 1 / 8},
    "windows": {"kind": "multiscale", "branching": (4, 2), "top_k": 1, "near": 1},
    "dropped": {"kind": "multiscale", "branching": (4, 2), "top_k": 1, "pooled_bias": -math.inf},
    "hierarchical": {"kind": "hierarchical", "branching": (4, 2)},
}
HEADS = 4
SMALL = {"branching": (4, 2, 2), "tile": 8, "near": 0}
"""Chunks and tiles of causal layers that select groups."""


def padded(lengths, side="right", kv_heads=2, asking=None, seed=5):
    """Return q `[batch, 6, tokens, 5]`, k and v with fewer heads, and the mask."""
    _, mask = random_ids(lengths, side=side)
    torch.manual_seed(seed)
    batch, width = mask.shape
    q = torch.randn(batch, 6, width if asking is None else asking, 5, dtype=torch.float64)
    k, v = torch.randn(2, batch, kv_heads, width, 5, dtype=torch.float64).unbind(0)
    return q, k, v, mask.bool()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_weights_give_the_output(way, causal, side):
    if causal and way == "hierarchical":
        pytest.skip("leaks, and is refused")
    settings = LayerSettings(**{**WAYS[way], **(SMALL if causal else {})})
    for asking in [None, 7] if causal and side == "left" else [None]:
        q, k, v, mask = padded([23, 17, 1 if asking is None else 9], side, asking=asking)
        sequences = Sequences(mask, causal=causal, first_query=0 if asking is None else mask.shape[1] - asking)
        out, weights, *_ = attend_layer(settings, q, k, v, sequences, scale=0.7, weights=True)
        silent, none, *_ = attend_layer(settings, q, k, v, sequences, scale=0.7)
        assert none is None
        assert torch.equal(silent, out)
        assert out.shape == (3, q.shape[2], 6, 5)
        assert weights.shape == (3, 6, q.shape[2], mask.shape[1])
        spread = weights @ v.repeat_interleave(3, 1)
        torch.testing.assert_close(spread.transpose(1, 2), out, rtol=1e-9, atol=1e-9)
        asks = mask if asking is None else mask[:, -asking:]
        torch.testing.assert_close(weights.sum(-1), asks[:, None].expand(-1, 6, -1).double())
        assert (weights >= 0).all()
        assert weights[~mask[:, None, None, :].expand_as(weights)].abs().max() == 0
        if causal:
            position = torch.arange(mask.shape[1])
            later = position > position[mask.shape[1] - q.shape[2] :, None]
            assert weights[later.expand_as(weights)].abs().max() == 0


@pytest.mark.parametrize("kind", ["clustered", "multiscale"])
def test_a_bias_for_every_head(kind):
    """Each head gives the same output as if all heads had its bias; with −∞, only selected leaves have weight."""
    q, k, v, mask = padded([23, 17])
    biases = (0.0, -math.inf, -1.0, 0.5, -math.inf, 2.0)

    def weights(bias):
        settings = LayerSettings(kind=kind, branching=(4, 2), top_k=1, pooled_bias=bias)
        sequences = Sequences(mask, causal=False)
        return attend_layer(settings, q, k, v, sequences, weights=True).weights

    together = weights(biases)
    for head, bias in enumerate(biases):
        torch.testing.assert_close(together[:, head], weights(bias)[:, head], rtol=1e-9, atol=1e-9)
    plain = weights(0.0)
    assert (plain - together)[:, 2:4].abs().max() > 1e-3
    left = together[:, 1] > 0
    assert (left.sum(-1) < mask.sum(1, keepdim=True))[mask].all()
    kept = plain[:, 1].where(left, 0)
    torch.testing.assert_close(together[:, 1][mask], (kept / kept.sum(-1, keepdim=True))[mask])


@pytest.mark.parametrize("way", ["clustered", "windows", "neighbours", "one window"])
@pytest.mark.parametrize("causal", [False, True])
def test_all_groups_exact_is_softmax(way, causal):
    """The operator itself is tested here: models use PyTorch's attention for short texts."""
    shape = SMALL if causal else {"branching": (4, 2)}
    settings = {
        "clustered": LayerSettings(**shape, top_k=99),
        "windows": LayerSettings(kind="multiscale", **shape, top_k=99),
        "neighbours": LayerSettings(kind="multiscale", branching=(4, 2), top_k=0, near=99),
        "one window": LayerSettings(kind="multiscale", branching=(64,), top_k=0, sinks=None),
    }[way]
    q, k, v, mask = padded([23, 17, 1], side="left")
    sequences = Sequences(mask, causal=causal)
    out = attend_layer(settings, q, k, v, sequences, scale=0.7).values
    seen = mask[:, None, None, :] & (torch.ones(23, 23, dtype=torch.bool).tril() if causal else True)
    exact, weights = attend_exactly(q, k, v, seen, causal=causal, scale=0.7, dropout_p=0.0)
    torch.testing.assert_close(out[mask], exact[mask], rtol=1e-9, atol=1e-9)
    own = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), attn_mask=seen, scale=0.7
    )
    torch.testing.assert_close(exact[mask], own.transpose(1, 2)[mask], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close((weights @ v.repeat_interleave(3, 1)).transpose(1, 2), exact)


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2", "vit", "modernbert"])
def test_attentions_of_a_model(family):
    """All layers return weights; with every group exact they equal those of transformers."""
    model = tiny(family, dtype=torch.float32)  # transformers' own softmax is no more exact
    inputs, counts = inputs_of(family)
    if family == "vit":
        inputs = {"pixel_values": inputs["pixel_values"].float()}
    with torch.no_grad():
        eager = tiny(family, dtype=torch.float32, attn_implementation="eager")
        own = eager(**inputs, output_attentions=True)
    numbers = [0, 3] if family == "modernbert" else [0, 1]
    for layers in (numbers, numbers[:1]):
        convert(model, layers, **ALL_EXACT)
        with torch.no_grad():
            ours = model(**inputs, output_attentions=True)
        assert len(ours.attentions) == len(own.attentions) == model.config.num_hidden_layers
        for result, expected in zip(ours.attentions, own.attentions, strict=True):
            asks = counts[:, None, :, None].expand_as(result)
            torch.testing.assert_close(result.where(asks, 0), expected.where(asks, 0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours[0][counts], own[0][counts], rtol=1e-4, atol=1e-4)
        revert(model)


@pytest.mark.parametrize("way", WAYS)
def test_attentions_give_the_output_of_a_layer(way):
    model = convert(tiny("bert"), **WAYS[way])
    inputs, counts = inputs_of("bert")
    seen = {}
    layer = model.encoder.layer[1].attention.self
    layer.register_forward_hook(
        lambda module, arguments, options, output: seen.update(given=(*arguments, *options.values())[0], out=output[0]),
        with_kwargs=True,
    )
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).attentions[1]
        values = layer.value(seen["given"]).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    torch.testing.assert_close((weights @ values).transpose(1, 2).flatten(2), seen["out"], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(weights.sum(-1), counts[:, None].expand(-1, HEADS, -1).double())
