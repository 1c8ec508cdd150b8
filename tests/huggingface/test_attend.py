"""One converted layer: its weights, and its operations counted."""

import math

import pytest
import torch

from hsa import Hierarchy, Padding, Queries, cluster_keys, flops, flops_flat, select
from hsa.huggingface import convert, counting, revert
from hsa.huggingface.attend import attend, attend_exactly
from hsa.huggingface.sequences import Sequences
from hsa.huggingface.settings import LayerSettings
from tests.huggingface.tiny_models import inputs_of, random_ids, run, tiny

OPEN = {"hierarchy": "windows", "branching": (4, 2), "top_k": 0, "near": 99}
WAYS = {
    "keys": {"branching": (4, 2), "top_k": 1},
    "windows": {"hierarchy": "windows", "branching": (4, 2), "top_k": 1, "near": 1},
    "dropped": {"hierarchy": "windows", "branching": (4, 2), "top_k": 1, "pooled_bias": -math.inf},
    "paper": {"operator": "hierarchical", "hierarchy": "windows", "branching": (4, 2)},
}
WIDTH, HEADS = 32, 4
ENTRY = 4 * WIDTH + HEADS


def padded(lengths, side="right", kv_heads=2, asking=None, seed=5):
    """q `[batch, 6, tokens, 5]`, k and v with fewer heads, and the mask."""
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
    if causal and way == "paper":
        pytest.skip("leaks, and is refused")
    settings = LayerSettings(**WAYS[way], **({"chunk": 8} if causal and way == "keys" else {}))
    for asking in [None, 7] if causal and side == "left" else [None]:
        q, k, v, mask = padded([23, 17, 1 if asking is None else 9], side, asking=asking)
        sequences = Sequences(mask, causal=causal, first_query=0 if asking is None else mask.shape[1] - asking)
        out, weights = attend(settings, 0, q, k, v, sequences, scale=0.7, dropout_p=0.0, weights=True)
        silent, none = attend(settings, 0, q, k, v, sequences, scale=0.7, dropout_p=0.0, weights=False)
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
            place = torch.arange(mask.shape[1])
            later = place > place[mask.shape[1] - q.shape[2] :, None]
            assert weights[later.expand_as(weights)].abs().max() == 0


@pytest.mark.parametrize("hierarchy", ["keys", "windows"])
def test_a_bias_for_every_head(hierarchy):
    """Each head is as if all had its bias; without pooled nodes, weight is left on open leaves only."""
    q, k, v, mask = padded([23, 17])
    biases = (0.0, -math.inf, -1.0, 0.5, -math.inf, 2.0)

    def weights(bias):
        settings = LayerSettings(hierarchy=hierarchy, branching=(4, 2), top_k=1, pooled_bias=bias)
        sequences = Sequences(mask, causal=False)
        return attend(settings, 0, q, k, v, sequences, scale=None, dropout_p=0.0, weights=True)[1]

    together = weights(biases)
    for head, bias in enumerate(biases):
        torch.testing.assert_close(together[:, head], weights(bias)[:, head], rtol=1e-9, atol=1e-9)
    plain = weights(0.0)
    assert (plain - together)[:, 2:4].abs().max() > 1e-3
    left = together[:, 1] > 0
    assert (left.sum(-1) < mask.sum(1, keepdim=True))[mask].all()
    kept = plain[:, 1].where(left, 0)
    torch.testing.assert_close(together[:, 1][mask], (kept / kept.sum(-1, keepdim=True))[mask])


@pytest.mark.parametrize("way", ["keys", "windows", "neighbours", "one window"])
@pytest.mark.parametrize("causal", [False, True])
def test_all_open_is_softmax(way, causal):
    """By the operator itself: models whose texts are short go to PyTorch's attention instead."""
    settings = {
        "keys": LayerSettings(branching=(4, 2), top_k=99, chunk=8 if causal else None),
        "windows": LayerSettings(hierarchy="windows", branching=(4, 2), top_k=99),
        "neighbours": LayerSettings(hierarchy="windows", branching=(4, 2), top_k=0, near=99),
        "one window": LayerSettings(hierarchy="windows", branching=(64,), top_k=0, sinks=None),
    }[way]
    q, k, v, mask = padded([23, 17, 1], side="left")
    sequences = Sequences(mask, causal=causal)
    out, _ = attend(settings, 0, q, k, v, sequences, scale=0.7, dropout_p=0.0, weights=False)
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
    """All layers give theirs; with all open they are those of transformers' own."""
    model = tiny(family, dtype=torch.float32)  # transformers' own softmax is no more exact
    inputs, counts = inputs_of(family)
    if family == "vit":
        inputs = {"pixel_values": inputs["pixel_values"].float()}
    with torch.no_grad():
        eager = tiny(family, dtype=torch.float32, attn_implementation="eager")
        own = eager(**inputs, output_attentions=True)
    numbers = [0, 3] if family == "modernbert" else [0, 1]
    for layers in (numbers, numbers[:1]):
        convert(model, layers, **OPEN)
        with torch.no_grad():
            ours = model(**inputs, output_attentions=True)
        assert len(ours.attentions) == len(own.attentions) == model.config.num_hidden_layers
        for found, expected in zip(ours.attentions, own.attentions, strict=True):
            asks = counts[:, None, :, None].expand_as(found)
            torch.testing.assert_close(found.where(asks, 0), expected.where(asks, 0), rtol=1e-4, atol=1e-5)
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


def test_exact_layers_are_counted_flat():
    ids, mask = random_ids([41])
    model = convert(tiny("bert"), [1], **OPEN)
    with counting() as counted:
        run(model, input_ids=ids)
    assert counted.layers[0].total == counted.exact[0] == flops_flat(41, WIDTH, HEADS)
    assert counted.exact[1] == flops_flat(41, WIDTH, HEADS)
    ids, mask = random_ids()
    with counting() as counted:
        run(model, input_ids=ids, attention_mask=mask)
        run(model, input_ids=ids[:1])
    lengths = mask.sum(1).tolist()
    assert counted.exact[0] == sum(flops_flat(n, WIDTH, HEADS) for n in [*lengths, ids.shape[1]])


@pytest.mark.parametrize("side", ["left", "right"])
def test_causal_layers_are_counted_up_to_themselves(side):
    ids, mask = random_ids(side=side)
    model = convert(tiny("llama"), [0], hierarchy="windows", branching=(4, 2))
    with counting() as counted:
        run(model, input_ids=ids, attention_mask=mask)
    expected = ENTRY * sum(n * (n + 1) // 2 for n in mask.sum(1).tolist())
    assert counted.exact == {0: expected, 1: expected}
    assert counted.layers[1].total == expected
    assert counted.total == sum(layer.total for layer in counted.layers.values())
    assert counted.ratio == 2 * expected / counted.total


def test_writing_counts_what_a_pass_does():
    """With a cache, all steps together see what one whole pass sees."""
    model = convert(tiny("llama"), [0], hierarchy="windows", branching=(4, 2), top_k=1)
    ids, mask = random_ids([19, 11], side="left")
    with counting() as steps:
        written = model.generate(
            ids, attention_mask=mask, max_new_tokens=7, min_new_tokens=7, do_sample=False, pad_token_id=0
        )
    mask = torch.cat([mask, mask.new_ones(2, 6)], 1)  # the last token is written, not read
    with counting() as whole:
        run(model, input_ids=written[:, :-1], attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    assert steps.exact == whole.exact
    assert steps.layers[1] == whole.layers[1]
    assert steps.layers[0].attention == whole.layers[0].attention
    assert steps.layers[0].selection == whole.layers[0].selection


def test_sliding_layers_are_counted_by_their_mask():
    model = tiny("modernbert")
    inputs, counts = inputs_of("modernbert")
    convert(model, [0], **OPEN)
    with counting() as counted:
        run(model, **inputs)
    window = model.config.sliding_window
    pairs = sum(min(n - 1, i + window) - max(0, i - window) + 1 for n in counts.sum(1).tolist() for i in range(n))
    assert counted.exact[1] == counted.layers[1].total == ENTRY * pairs
    assert counted.exact[3] == counted.exact[0] == ENTRY * sum(n**2 for n in counts.sum(1).tolist())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("causal", [False, True])
def test_converted_layers_are_counted_by_their_structure(way, causal):
    if causal and way == "paper":
        pytest.skip("leaks, and is refused")
    settings = LayerSettings(**WAYS[way], **({"chunk": 8} if causal and way == "keys" else {}))
    q, k, v, mask = padded([23, 17])
    with counting() as counted:
        attend(settings, 3, q, k, v, Sequences(mask, causal=causal), scale=None, dropout_p=0.0, weights=False)
    padding = Padding(mask)
    tree = Hierarchy.regular([23, 17], (4, 2), repeat_last=way != "paper", sinks=1)
    if way == "paper":
        expected = flops(tree, 30, 6)
    else:
        packed_q, packed_k = padding.pack(q), padding.pack(k)
        order = cluster_keys(packed_k, tree, chunk=8 if causal else None) if way == "keys" else None
        alone = Queries.windows(tree, 1) if causal or way == "keys" else None
        choice = {"near": settings.near, "top_k": settings.top_k, "clusters": order, "causal": causal}
        selection = select(packed_q, packed_k, tree, queries=alone, **choice)
        expected = flops(selection, 30, 6, hierarchy=tree, clusters=order)
    assert counted.layers == {3: expected}
    pairs = [n * (n + 1) // 2 if causal else n**2 for n in (23, 17)]
    assert counted.exact == {3: (4 * 30 + 6) * sum(pairs)}
    assert counted.ratio == counted.exact[3] / expected.total


def test_nothing_counted():
    with counting() as counted:
        run(tiny("bert"), input_ids=random_ids()[0])  # not ours
    assert counted.layers == {}
    assert counted.total == 0
    assert math.isnan(counted.ratio)
    model = convert(tiny("bert"), **OPEN)
    run(model, input_ids=random_ids()[0])
    assert counted.layers == {}
    with counting() as outer:
        with counting() as inner:
            run(model, input_ids=random_ids()[0])
        assert sorted(inner.layers) == [0, 1]
    assert outer.layers == {}
