"""Sequences too short for trees to save anything, and how far layers are from exact attention."""

import pytest
import torch

from hsa.huggingface import convert, counting, interface, revert
from hsa.huggingface.attend import probing, saves_nothing
from hsa.huggingface.sequences import Sequences
from hsa.huggingface.settings import LayerSettings
from tests.huggingface.tiny_models import random_ids, run, tiny

WINDOWS = {"hierarchy": "windows", "branching": (4, 2), "refine": 0}


@pytest.fixture(autouse=True)
def _as_it_is(monkeypatch, _short_sequences_too):
    monkeypatch.setattr(interface, "saves_nothing", saves_nothing)


def of_length(*lengths, causal=False):
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return Sequences(mask, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "settings", [LayerSettings(), LayerSettings(refine=2), LayerSettings(**WINDOWS), LayerSettings(near=2, **WINDOWS)]
)
def test_there_is_one_length_from_which_trees_save(settings, causal):
    short = [
        saves_nothing(settings, of_length(length, causal=causal)) for length in (*range(1, 200), *range(200, 6000, 97))
    ]
    assert short[0]
    assert not short[-1]
    assert short == sorted(short, reverse=True)


def test_more_that_is_exact_needs_longer_sequences():
    def first(**changes):
        return next(n for n in range(1, 5000) if not saves_nothing(LayerSettings(**changes), of_length(n)))

    assert first(refine=1) < first(refine=4) < first(refine=16)
    assert first(**WINDOWS) < first(near=1, **WINDOWS) < first(near=3, **WINDOWS)
    for changes in ({"refine": 4}, WINDOWS):
        found = first(**changes)
        assert not saves_nothing(LayerSettings(**changes), of_length(1, found, 1))  # the longest counts
        assert saves_nothing(LayerSettings(**changes), of_length(found - 1, found - 1))


def test_trees_that_were_asked_for_by_their_shape_are_used():
    for settings in (
        LayerSettings(operator="hierarchical", hierarchy="windows"),
        LayerSettings(hierarchy="sentences"),
        LayerSettings(hierarchy=lambda ids: None),
    ):
        assert not saves_nothing(settings, of_length(1))


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


def test_long_sequences_do_not():
    model = tiny("bert")
    ids, mask = random_ids([61, 47])
    exact = run(model, input_ids=ids, attention_mask=mask)
    convert(model, **WINDOWS)
    with counting() as counted:
        changed = run(model, input_ids=ids, attention_mask=mask)
    assert (changed - exact)[mask.bool()].abs().max() > 1e-3
    assert counted.ratio > 1


@pytest.mark.parametrize("settings", [WINDOWS, {"branching": (4, 2), "refine": 2}])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_probing_is_the_distance_from_exact_attention(family, settings, monkeypatch):
    """Of the first layer, whose inputs conversion leaves as they are."""
    monkeypatch.setattr(interface, "saves_nothing", lambda settings, sequences: False)
    biases = (-1.0, 0.0, 2.0)
    model = tiny(family)
    ids, mask = random_ids([61, 47])
    if family == "llama":  # where trees are found in whole chunks
        settings = {**settings, "chunk": 16} if "hierarchy" not in settings else settings
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
    exact = outputs(refine=1000, beam="exact")
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
    convert(model, operator="hierarchical", hierarchy="windows", sinks=None)
    with probing((0.0,)) as errors:
        run(model, input_ids=ids, attention_mask=mask)
    assert errors == {}
