"""Sequences too short for trees to save anything, and how far layers are from exact attention."""

import pytest
import torch

from hsa.huggingface import convert, counting, layer_plan, revert
from hsa.huggingface.layer_plan import exact_is_cheaper
from hsa.huggingface.observe import probing
from hsa.huggingface.settings import LayerSettings
from tests.huggingface.tiny_models import random_ids, run, tiny

WINDOWS = {"kind": "multiscale", "branching": (4, 2), "top_k": 0}


@pytest.fixture(autouse=True)
def _as_it_is(monkeypatch, _short_sequences_too):
    monkeypatch.setattr(layer_plan, "exact_is_cheaper", exact_is_cheaper)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "settings", [LayerSettings(), LayerSettings(top_k=2), LayerSettings(**WINDOWS), LayerSettings(near=2, **WINDOWS)]
)
def test_there_is_one_length_from_which_trees_save(settings, causal):
    short = [exact_is_cheaper(settings, length, causal=causal) for length in (*range(1, 200), *range(200, 6000, 97))]
    assert short[0] or (causal and settings.top_k == 0)  # there even one family is pooled
    assert not short[-1]
    assert short == sorted(short, reverse=True)


def test_more_that_is_exact_needs_longer_sequences():
    def first(**changes):
        return next(n for n in range(1, 5000) if not exact_is_cheaper(LayerSettings(**changes), n, causal=False))

    assert first(top_k=1) < first(top_k=4) < first(top_k=16)
    assert first(**WINDOWS) < first(near=1, **WINDOWS) < first(near=3, **WINDOWS)


def test_trees_that_were_asked_for_by_their_shape_are_used():
    for settings in (
        LayerSettings(kind="hierarchical"),
        LayerSettings(kind="multiscale", tree="sentences"),
        LayerSettings(kind="multiscale", tree=lambda ids: None),
    ):
        assert not exact_is_cheaper(settings, 1, causal=False)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_short_sequences_attend_exactly(family):
    model = tiny(family)
    ids, mask = random_ids([7, 5, 6])
    exact = run(model, input_ids=ids, attention_mask=mask)
    convert(model)
    with counting() as counted:
        short = run(model, input_ids=ids, attention_mask=mask)
    torch.testing.assert_close(short[mask.bool()], exact[mask.bool()], rtol=0, atol=1e-10)
    assert counted.ratio == 1
    assert {layer.total for layer in counted.layers.values()} == set(counted.exact.values())


@pytest.mark.parametrize("weights", [False, True])
def test_answers_do_not_depend_on_who_shares_the_batch(weights):
    model = tiny("bert")
    convert(model, **WINDOWS)
    lengths = [61, 3, 47, 2, 5]
    ids, mask = random_ids(lengths)
    together = model(input_ids=ids, attention_mask=mask, output_attentions=weights)
    with counting() as counted:
        run(model, input_ids=ids, attention_mask=mask)
    alone_counted = 0
    for i, length in enumerate(lengths):
        with counting() as counted_alone:
            alone = model(input_ids=ids[i : i + 1, :length], output_attentions=weights)
        alone_counted += counted_alone.total
        torch.testing.assert_close(
            together.last_hidden_state[i, :length], alone.last_hidden_state[0], rtol=0, atol=1e-10
        )
        if weights:
            found = together.attentions[0][i, :, :length, :length]
            torch.testing.assert_close(found, alone.attentions[0][0], rtol=0, atol=1e-10)
    assert counted.total == alone_counted


def test_a_token_of_a_causal_model_sees_the_same_however_long_the_text_becomes():
    model = tiny("llama")
    convert(model, kind="multiscale", branching=(4, 2), top_k=3)
    ids, _ = random_ids([61])
    whole = model(input_ids=ids).logits
    for length in (3, 11, 13, 17, 20, 21, 40):
        start = model(input_ids=ids[:, :length]).logits
        torch.testing.assert_close(start, whole[:, :length], rtol=0, atol=1e-10)


def test_long_sequences_do_not():
    model = tiny("bert")
    ids, mask = random_ids([61, 47])
    exact = run(model, input_ids=ids, attention_mask=mask)
    convert(model, **WINDOWS)
    with counting() as counted:
        changed = run(model, input_ids=ids, attention_mask=mask)
    assert (changed - exact)[mask.bool()].abs().max() > 1e-3
    assert counted.ratio > 1


@pytest.mark.parametrize("settings", [WINDOWS, {"branching": (4, 2), "top_k": 2}])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_probing_is_the_distance_from_exact_attention(family, settings, monkeypatch):
    """Of the first layer, whose inputs conversion leaves as they are."""
    monkeypatch.setattr(layer_plan, "exact_is_cheaper", lambda settings, length, causal: False)
    biases = (-1.0, 0.0, 2.0)
    model = tiny(family)
    ids, mask = random_ids([61, 47])
    if family == "llama":  # which clusters keys in whole chunks
        settings = {**settings, "chunk": 16} if "kind" not in settings else settings
    caught = []
    layers = [m for m in model.modules() if hasattr(m, "o_proj")] or [m for m in model.modules() if hasattr(m, "query")]

    def outputs(**changes):
        """What the first layer's attention gives, before it is projected."""
        convert(model, [0], **{**settings, **changes})
        caught.clear()
        if family == "llama":
            hook = layers[0].o_proj.register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0]))
        else:
            hook = layers[0].register_forward_hook(lambda module, inputs, out: caught.append(out[0]))
        run(model, input_ids=ids, attention_mask=mask)
        hook.remove()
        return caught[0].unflatten(-1, (4, 8))[mask.bool()]  # [tokens, heads, dim]

    found = {bias: outputs(pooled_bias=bias) for bias in biases}
    exact = outputs(top_k=1000, beam="exact")
    revert(model)
    convert(model, [0], **settings)
    with probing(biases) as errors:
        plain = run(model, input_ids=ids, attention_mask=mask)
        assert set(errors) == {0}
        wanted = torch.stack([(found[bias] - exact).square().sum((0, 2)) for bias in biases])
        assert wanted.min() > 0
        torch.testing.assert_close(errors[0].double(), wanted, rtol=1e-4, atol=1e-6)
        run(model, input_ids=ids, attention_mask=mask)
        torch.testing.assert_close(errors[0].double(), 2 * wanted, rtol=1e-4, atol=1e-6)  # summed over passes
    assert torch.equal(plain, run(model, input_ids=ids, attention_mask=mask))  # and the outputs are as ever
    assert errors[0].shape == (3, 4)


def test_probing_leaves_out_what_pools_nothing():
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
