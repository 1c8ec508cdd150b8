"""Operations, and distances from exact attention."""

import math

import pytest
import torch

from hsa import Hierarchy, Padding, Queries, cluster, cluster_keys, flops, flops_flat, select, select_groups
from hsa.huggingface import convert, counting, layer_plan, revert
from hsa.huggingface.layer_plan import exact_is_cheaper
from hsa.huggingface.observe import probing
from hsa.huggingface.sequences import Sequences
from hsa.huggingface.settings import LayerSettings
from tests.huggingface.test_attend import ALL_EXACT, SMALL, WAYS, padded
from tests.huggingface.tiny_models import attend_layer, inputs_of, random_ids, run, tiny

WINDOWS = {"kind": "multiscale", "branching": (4, 2), "top_k": 0}
WIDTH, HEADS = 32, 4
ENTRY = 4 * WIDTH + HEADS


def test_operations_of_exact_layers():
    ids, mask = random_ids([41])
    model = convert(tiny("bert"), [1], **ALL_EXACT)
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
def test_operations_of_causal_layers(side):
    ids, mask = random_ids(side=side)
    model = convert(tiny("llama"), [0], kind="multiscale", branching=(4, 2))
    with counting() as counted:
        run(model, input_ids=ids, attention_mask=mask)
    expected = ENTRY * sum(n * (n + 1) // 2 for n in mask.sum(1).tolist())
    assert counted.exact == {0: expected, 1: expected}
    assert counted.layers[1].total == expected
    assert counted.total == sum(layer.total for layer in counted.layers.values())
    assert counted.ratio == 2 * expected / counted.total


@pytest.mark.parametrize(
    "settings", [{"kind": "multiscale", "branching": (4, 2), "near": 1}, {"branching": (4, 2, 2), "tile": 8}]
)
def test_generation_counts_no_more_than_a_whole_pass(settings):
    """The steps with a cache together count the entries of one whole pass, whose tiles also multiply masked ones."""
    model = convert(tiny("llama"), [0], **settings)
    ids, mask = random_ids([19, 11], side="left")
    with counting() as steps:
        written = model.generate(
            ids, attention_mask=mask, max_new_tokens=7, min_new_tokens=7, do_sample=False, pad_token_id=0
        )
    mask = torch.cat([mask, mask.new_ones(2, 6)], 1)  # the last token is generated, not read
    with counting() as whole:
        run(model, input_ids=written[:, :-1], attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    assert steps.exact == whole.exact
    assert steps.layers[1] == whole.layers[1]
    assert 0 < steps.layers[0].attention <= whole.layers[0].attention
    assert ("tile" in settings) or steps.layers[0].attention == whole.layers[0].attention
    assert steps.layers[0].selection <= whole.layers[0].selection


def test_operations_of_sliding_layers_follow_their_mask():
    model = tiny("modernbert")
    inputs, counts = inputs_of("modernbert")
    convert(model, [0], **ALL_EXACT)
    with counting() as counted:
        run(model, **inputs)
    window = model.config.sliding_window
    pairs = sum(min(n - 1, i + window) - max(0, i - window) + 1 for n in counts.sum(1).tolist() for i in range(n))
    assert counted.exact[1] == counted.layers[1].total == ENTRY * pairs
    assert counted.exact[3] == counted.exact[0] == ENTRY * sum(n**2 for n in counts.sum(1).tolist())


def test_nothing_counted():
    with counting() as counted:
        run(tiny("bert"), input_ids=random_ids()[0])  # not converted
    assert counted.layers == {}
    assert counted.total == 0
    assert math.isnan(counted.ratio)
    model = convert(tiny("bert"), **ALL_EXACT)
    run(model, input_ids=random_ids()[0])
    assert counted.layers == {}
    with counting() as outer:
        with counting() as inner:
            run(model, input_ids=random_ids()[0])
        assert sorted(inner.layers) == [0, 1]
    assert outer.layers == {}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("causal", [False, True])
def test_operations_of_converted_layers_follow_their_structure(way, causal):
    if causal and way == "hierarchical":
        pytest.skip("leaks, and is refused")
    settings = LayerSettings(**{**WAYS[way], **(SMALL if causal else {})})
    q, k, v, mask = padded([23, 17])
    with counting() as counted:
        attend_layer(settings, q, k, v, Sequences(mask, causal=causal), number=3)
    padding = Padding(mask)
    tree = Hierarchy.regular([23, 17], (4, 2), repeat_last=way != "hierarchical", sinks=1)
    packed_q, packed_k, packed_v = (padding.pack(x) for x in (q, k, v))
    if way == "hierarchical":
        expected = flops(tree, 30, 6)
    elif settings.uses_tiles(causal):
        keys = cluster(packed_k, packed_v, [23, 17], windows=settings.kind == "multiscale", branching=(4, 2, 2))
        rule = {"threshold": settings.threshold, "top_k": settings.top_k, "tile": 8}
        selection = select_groups(packed_q, packed_k, keys, [23, 17], causal=causal, **rule)
        expected = flops(selection, 30, 6)
    else:
        clusters = cluster_keys(packed_k, tree) if way == "clustered" else None
        alone = Queries.windows(tree, 1) if way == "clustered" else None
        options = {"near": settings.near, "top_k": settings.top_k, "clusters": clusters}
        selection = select(packed_q, packed_k, tree, queries=alone, **options)
        expected = flops(selection, 30, 6, hierarchy=tree, clusters=clusters)
    assert counted.layers == {3: expected}
    pairs = [n * (n + 1) // 2 if causal else n**2 for n in (23, 17)]
    assert counted.exact == {3: (4 * 30 + 6) * sum(pairs)}
    assert counted.ratio == counted.exact[3] / expected.total


@pytest.mark.parametrize("settings", [WINDOWS, {"branching": (4, 2), "top_k": 2}])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_probing_is_the_distance_from_exact_attention(family, settings):
    """The test uses the first layer, whose inputs do not change with the conversion."""
    biases = (-1.0, 0.0, 2.0)
    model = tiny(family)
    ids, mask = random_ids([61, 47])
    everything = {"top_k": 1000}
    if family == "llama" and "kind" not in settings:
        settings, everything = {"branching": (4, 2, 2), "tile": 8, "threshold": 1 / 8}, {"threshold": 1e-30}
    elif family == "llama":
        everything = {"near": 99}
    caught = []
    layers = [m for m in model.modules() if hasattr(m, "o_proj")] or [m for m in model.modules() if hasattr(m, "query")]

    def outputs(**changes):
        """Return the attention output of the first layer, before its projection."""
        convert(model, [0], **{**settings, **changes})
        caught.clear()
        if family == "llama":
            hook = layers[0].o_proj.register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0]))
        else:
            hook = layers[0].register_forward_hook(lambda module, inputs, out: caught.append(out[0]))
        run(model, input_ids=ids, attention_mask=mask)
        hook.remove()
        return caught[0].unflatten(-1, (4, 8))[mask.bool()]  # [tokens, heads, dim]

    result = {bias: outputs(pooled_bias=bias) for bias in biases}
    exact = outputs(**everything)
    revert(model)
    convert(model, [0], **settings)
    with probing(biases) as errors:
        plain = run(model, input_ids=ids, attention_mask=mask)
        assert set(errors) == {0}
        wanted = torch.stack([(result[bias] - exact).square().sum((0, 2)) for bias in biases])
        assert wanted.min() > 0
        torch.testing.assert_close(errors[0].double(), wanted, rtol=1e-4, atol=1e-6)
        run(model, input_ids=ids, attention_mask=mask)
        torch.testing.assert_close(errors[0].double(), 2 * wanted, rtol=1e-4, atol=1e-6)  # summed over passes
    assert torch.equal(plain, run(model, input_ids=ids, attention_mask=mask))  # outputs are unchanged
    assert errors[0].shape == (3, 4)


def test_probing_leaves_out_layers_that_pool_nothing(monkeypatch):
    monkeypatch.setattr(layer_plan, "exact_is_cheaper", exact_is_cheaper)
    model = tiny("bert")
    ids, mask = random_ids([7, 5])
    convert(model)
    with probing((0.0,)) as errors:
        run(model, input_ids=ids, attention_mask=mask)  # so short that layers are exact
    assert errors == {}
    convert(model, kind="hierarchical", sinks=None)
    with probing((0.0,)) as errors:
        run(model, input_ids=ids, attention_mask=mask)
    assert errors == {}
