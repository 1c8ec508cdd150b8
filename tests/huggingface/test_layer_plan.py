"""Decisions of a layer's plan: exact attention where trees save nothing, trees elsewhere, caches of trees in decoders."""

import pytest
import torch

from hsa.errors import InvalidInput
from hsa.huggingface import convert, counting, layer_plan
from hsa.huggingface.layer_plan import Call, LayerPlan, exact_is_cheaper
from hsa.huggingface.observe import probing
from hsa.huggingface.sequences import Sequences
from hsa.huggingface.settings import LayerSettings
from tests.huggingface.tiny_models import random_ids, run, tiny

WINDOWS = {"kind": "multiscale", "branching": (4, 2), "top_k": 0}


@pytest.fixture(autouse=True)
def _as_it_is(monkeypatch, _short_sequences_too):
    monkeypatch.setattr(layer_plan, "exact_is_cheaper", exact_is_cheaper)


def sequences(lengths, new=None, causal=True):
    """Return left-padded sequences, with queries at the last `new` positions."""
    mask = random_ids(lengths, side="left")[1].bool()
    return Sequences(mask, causal=causal, first_query=0 if new is None else mask.shape[1] - new)


def call(keys, new=None, **options):
    q, k = (torch.zeros(1, 1, count, 4) for count in (keys if new is None else new, keys))
    return Call(None, q, k, k, **options)


def test_the_path_without_a_cache():
    windows = LayerPlan(0, LayerSettings(**WINDOWS))
    for lengths, path in (([61, 47], "tree"), ([3, 2], "exact"), ([61, 3, 47], "split")):
        assert windows.path(call(61), sequences(lengths, causal=False)) == path
        assert LayerPlan(0, None).path(call(61), sequences(lengths)) == "exact"
    assert windows.short(sequences([61, 3, 47], causal=False)) == [False, True, False]
    tied = LayerPlan(4, LayerSettings(kind="hierarchical"))
    assert tied.path(call(61), sequences([3, 61], causal=False)) == "tree"
    with pytest.raises(InvalidInput, match="in layer 4, which is causal, got 'hierarchical'"):
        tied.path(call(61), sequences([3, 61]))
    with pytest.raises(InvalidInput, match=r"layer 4 \(NoneType\): expected .*, got attention with softcap"):
        tied.path(call(61, others={"softcap": 30.0}), sequences([61], causal=False))


@pytest.mark.parametrize(
    ("settings", "caches"),
    [
        (None, False),
        (LayerSettings(), True),
        (LayerSettings(threshold=1 / 8), True),
        (LayerSettings(sinks="special"), False),
        (LayerSettings(**WINDOWS), True),
        (LayerSettings(kind="multiscale"), True),
        (LayerSettings(kind="multiscale", threshold=1 / 8), True),
        (LayerSettings(kind="multiscale", top_k=1), True),
        (LayerSettings(kind="multiscale", tree=lambda ids: None, top_k=0), False),
        (LayerSettings(kind="hierarchical"), False),
    ],
)
def test_layers_that_cache_trees(settings, caches):
    assert LayerPlan(0, settings).caches_trees == caches


def test_the_path_of_a_prompt():
    prompt = sequences([40])
    clustered, windows = LayerPlan(0, LayerSettings()), LayerPlan(0, LayerSettings(**WINDOWS))
    assert clustered.cache_path(call(40), prompt, empty=True) == "inside"
    assert windows.cache_path(call(40), prompt, empty=True) == "whole"
    for options in ({"weights": True}, {"dropout_p": 0.1}):
        assert clustered.cache_path(call(40, **options), prompt, empty=True) == "whole"
    with counting():
        assert clustered.cache_path(call(40), prompt, empty=True) == "whole"
    with probing([0.0]):
        assert clustered.cache_path(call(40), prompt, empty=True) == "whole"
    trained = call(40)
    trained.query.requires_grad_()
    assert clustered.cache_path(trained, prompt, empty=True) == "whole"
    with torch.no_grad():
        assert clustered.cache_path(trained, prompt, empty=True) == "inside"


def test_the_path_of_new_tokens():
    clustered, windows = LayerPlan(0, LayerSettings()), LayerPlan(0, LayerSettings(**WINDOWS))
    for new, path in ((1, "steps"), (2, "inside"), (17, "inside")):
        assert clustered.cache_path(call(40, new), sequences([40], new), empty=False) == path
        assert windows.cache_path(call(40, new), sequences([40], new), empty=False) == "steps"
    padding = sequences([40, 3], 5)  # two of the new positions of the second sequence
    asks = call(40, 5, weights=True), sequences([40], 5)
    for arguments, path in (((call(40, 5), padding), "inside"), (asks, "whole")):
        assert clustered.cache_path(*arguments, empty=False) == path
        with pytest.raises(InvalidInput, match="keeps no leaves"):
            windows.cache_path(*arguments, empty=False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "settings", [LayerSettings(), LayerSettings(top_k=2), LayerSettings(**WINDOWS), LayerSettings(near=2, **WINDOWS)]
)
def test_trees_save_from_one_length_on(settings, causal):
    short = [exact_is_cheaper(settings, length, causal=causal) for length in (*range(1, 200), *range(200, 6000, 97))]
    assert short[0] or (causal and settings.kind == "multiscale")  # in which case even one family is pooled
    assert not short[-1]
    assert short == sorted(short, reverse=True)


def test_more_exact_groups_need_longer_sequences():
    def first(**changes):
        return next(n for n in range(1, 5000) if not exact_is_cheaper(LayerSettings(**changes), n, causal=False))

    assert first(top_k=1) < first(top_k=4) < first(top_k=16)
    assert first(**WINDOWS) < first(near=1, **WINDOWS) < first(near=3, **WINDOWS)


def test_trees_of_a_requested_shape_are_always_used():
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
def test_outputs_do_not_depend_on_other_sequences_of_the_batch(weights):
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
            inside = together.attentions[0][i, :, :length, :length]
            torch.testing.assert_close(inside, alone.attentions[0][0], rtol=0, atol=1e-10)
    assert counted.total == alone_counted


def test_a_causal_token_does_not_depend_on_the_length_of_the_text():
    model = tiny("llama")
    convert(model, kind="multiscale", branching=(4, 2, 2), tile=8, top_k=3)
    ids, _ = random_ids([61])
    whole = model(input_ids=ids).logits
    for length in (3, 11, 13, 17, 20, 21, 40):
        start = model(input_ids=ids[:, :length]).logits
        torch.testing.assert_close(start, whole[:, :length], rtol=0, atol=1e-10)


def test_long_sequences_use_trees():
    model = tiny("bert")
    ids, mask = random_ids([61, 47])
    exact = run(model, input_ids=ids, attention_mask=mask)
    convert(model, **WINDOWS)
    with counting() as counted:
        changed = run(model, input_ids=ids, attention_mask=mask)
    assert (changed - exact)[mask.bool()].abs().max() > 1e-3
    assert counted.ratio > 1
