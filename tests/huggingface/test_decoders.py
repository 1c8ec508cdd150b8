"""Causal models: later tokens have no effect, and generation token by token equals the whole pass."""

import warnings

import pytest
import torch

from hsa import Hierarchy
from hsa.errors import HsaWarning, InvalidInput
from hsa.huggingface import convert, revert
from hsa.huggingface.loading import most_tokens, trained_context
from tests.huggingface.tiny_models import DECODERS, PAD, random_ids, run, stepwise, tiny, transformers, word_tokenizer


def windows(ids):
    return Hierarchy.regular([len(i) for i in ids], (4, 2), repeat_last=True)


WAYS = {
    "clusters": {"branching": (4, 2, 2), "tile": 8, "threshold": 1 / 8},
    "clusters, top_k": {"branching": (2, 2, 2), "tile": 4, "top_k": 1, "sinks": None},
    "exact at first": {"branching": (4, 2, 2), "tile": 8, "threshold": 1 / 8, "exact_until": 20},
    "windows": {"kind": "multiscale", "branching": (4, 2, 2), "tile": 4, "threshold": 1 / 8},
    "windows, top_k": {"kind": "multiscale", "branching": (2, 4, 2), "tile": 16, "top_k": 1, "pooled_bias": -0.5},
    "neighbours": {"kind": "multiscale", "branching": (4, 2), "near": 1, "sinks": 3, "tile": 6, "pooled_bias": -0.5},
    "function": {"kind": "multiscale", "tree": windows, "top_k": 1, "near": 1, "sinks": None},
}


@pytest.mark.parametrize("way", WAYS)
def test_later_tokens_have_no_effect(way):
    model = tiny("llama", num_hidden_layers=3)
    ids, mask = random_ids([53, 47])
    exact = run(model, input_ids=ids, attention_mask=mask)
    convert(model, **WAYS[way])
    before = run(model, input_ids=ids, attention_mask=mask)
    assert (before - exact)[mask.bool()].abs().max() > 1e-3
    for first in (1, 9, 24, 37, 46):
        others = ids.clone()
        others[:, first:] = ids[:, first:].flip(1)
        assert torch.equal(run(model, input_ids=others, attention_mask=mask)[:, :first], before[:, :first])


@pytest.mark.parametrize("way", [way for way in WAYS if way != "function"])
@pytest.mark.parametrize("family", DECODERS)
def test_generation_token_by_token_equals_the_whole_pass(way, family):
    model = convert(tiny(family), **WAYS[way])
    model.generation_config.eos_token_id = None
    ids, mask = random_ids([19, 11, 15], side="left")
    whole, logits = stepwise(model, ids, mask, 20)  # completes chunks and windows
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": PAD}
    written = model.generate(ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **options)
    assert torch.equal(written.sequences, whole)
    torch.testing.assert_close(written.logits[-1], logits[-1].float())  # generate rounds them
    assert (stepwise(revert(model), ids, mask, 20)[1] - logits).abs().max() > 1e-3


@pytest.mark.parametrize("layers", [[1], [0, 1]])
def test_a_cache_of_fixed_size(layers):
    """Exact layers must not see its empty slots either."""
    model = convert(tiny("llama"), layers, **WAYS["neighbours"])
    ids, mask = random_ids([19, 11, 15], side="left")
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD, "attention_mask": mask}
    growing = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), growing)
    cache = transformers.StaticCache(config=model.config, max_cache_len=30)
    whole = run(model, input_ids=ids)
    first = run(model, input_ids=ids[:, :11], past_key_values=cache)  # without a mask
    torch.testing.assert_close(torch.cat([first, run(model, input_ids=ids[:, 11:], past_key_values=cache)], 1), whole)


@pytest.mark.parametrize("layers", [[1], [0, 1]])
@pytest.mark.parametrize("lengths", [[40, 40], [40, 33]])
def test_several_tokens_at_once_after_a_cache(layers, lengths):
    model = convert(tiny("llama"), layers, **WAYS["clusters"])
    ids, mask = random_ids(lengths, side="left")
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    whole = run(model, input_ids=ids, attention_mask=mask, position_ids=position_ids)
    cache, parts = None, []
    for part in (slice(0, 13), slice(13, 14), slice(14, 31), slice(31, 40)):
        with torch.no_grad():
            out = model(
                ids[:, part],
                attention_mask=mask[:, : part.stop],
                position_ids=position_ids[:, part],
                past_key_values=cache,
                use_cache=True,
            )
        cache = out.past_key_values
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1)[mask.bool()], whole[mask.bool()], rtol=1e-9, atol=1e-9)


def test_settings_that_would_show_later_tokens_are_refused():
    """The paper's operator ties rows, and the end of a sentence depends on later text."""
    for family, changes in (("llama", {}), ("gpt2", {}), ("bert", {"is_decoder": True})):
        model = tiny(family, **changes)
        with pytest.raises(
            InvalidInput,
            match=r"kind: expected 'clustered' or 'multiscale' in layer 0, which is causal, got 'hierarchical'",
        ):
            convert(model, kind="hierarchical")
        with pytest.raises(
            InvalidInput,
            match=r"tree: expected 'windows', or kind='clustered', in layer 1, .*, got 'sentences'",
        ):
            convert(model, layers=[1], kind="multiscale", tree="sentences", tokenizer=word_tokenizer())
        assert not hasattr(model.config, "hsa")
        assert model.config._attn_implementation != "hsa"


def test_a_bidirectional_decoder():
    """`config.is_causal = False` makes a decoder an encoder."""
    model = tiny("llama", is_causal=False)
    ids, mask = random_ids()
    exact = run(model, input_ids=ids, attention_mask=mask, use_cache=False)
    later = ids.clone()
    later[:, 25] = 5
    assert (run(model, input_ids=later, attention_mask=mask, use_cache=False) - exact)[:, :25].abs().max() > 1e-3
    convert(model, kind="hierarchical", branching=(64,), sinks=None)
    tied = run(model, input_ids=ids, attention_mask=mask, use_cache=False)
    torch.testing.assert_close(tied[mask.bool()], exact[mask.bool()])


def test_ids_of_a_cache_are_not_known():
    """A tree function needs the ids of all keys; the error says what to do instead."""
    model = convert(tiny("llama"), kind="multiscale", tree=lambda ids: Hierarchy.regular([len(i) for i in ids], (4, 2)))
    ids, _ = random_ids([20])
    run(model, input_ids=ids)
    with pytest.raises(
        InvalidInput, match=r"the ids of all keys, \(1, 21\), .*, got shape \(1, 1\).*cache of earlier keys"
    ):
        model.generate(ids, max_new_tokens=2, do_sample=False)


def too_long(model, *parts, **options):
    """Run a model on parts of a text with one cache, and return the warnings."""
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        for ids in parts:
            model(**ids, **options)
    return [str(warning.message) for warning in said if issubclass(warning.category, HsaWarning)]


def test_texts_longer_than_the_trained_context_are_warned_about_once():
    model = convert(tiny("llama"), **WAYS["clusters"])
    longest, longer = ({"input_ids": torch.full((2, n), 7)} for n in (97, 98))
    assert too_long(model, longest) == []
    (said,) = too_long(model, longer, longer)
    assert said.startswith("LlamaForCausalLM reads 98 tokens, but was trained on at most 97")
    assert "YaRN" in said
    convert(model, [0], threshold=1 / 4)
    assert too_long(model, longer) == []  # other settings do not make another model
    assert too_long(revert(model), longer) == []  # transformers says nothing either
    (said,) = too_long(
        convert(model, **WAYS["windows"]), {"inputs_embeds": torch.zeros(1, 99, 32, dtype=torch.float64)}
    )
    assert "reads 99 tokens" in said


def test_tokens_in_the_cache_count_for_the_trained_context():
    model = convert(tiny("llama"), **WAYS["clusters"])
    part = {"input_ids": torch.full((1, 40), 7)}
    with torch.no_grad():
        cache = transformers.DynamicCache(config=model.config)
        assert too_long(model, part, part, past_key_values=cache) == []
        (said,) = too_long(model, part, past_key_values=cache)
    assert "reads 120 tokens" in said
    ids = {"input_ids": torch.full((1, 90), 7)}
    again = convert(tiny("llama"), **WAYS["clusters"])
    again.generation_config.eos_token_id = None
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        again.generate(**ids, max_new_tokens=20, do_sample=False, pad_token_id=PAD)
    assert len([w for w in heard if issubclass(w.category, HsaWarning)]) == 1
    static = transformers.StaticCache(config=model.config, max_cache_len=200)
    fixed = convert(tiny("llama"), **WAYS["neighbours"])
    too_long(fixed, part, part, part, past_key_values=static)  # whatever it says, it must not read a count from the GPU


def test_scaled_positions_extend_the_context():
    scaled = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 97}
    model = convert(tiny("llama", rope_parameters=scaled), **WAYS["clusters"])
    assert too_long(model, {"input_ids": torch.full((1, 194), 7)}) == []
    assert len(too_long(model, {"input_ids": torch.full((1, 195), 7)})) == 1


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({}, 97),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, 388),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, 194),
        (
            {
                "max_position_embeddings": 1000,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 100,
                    "rope_theta": 1e4,
                },
            },
            1000,
        ),
    ],
)
def test_the_trained_context_is_read_from_the_config(settings, most):
    config = tiny("llama", **settings).config
    assert trained_context(config) == most
    known = word_tokenizer()
    known.model_max_length = 90
    model = tiny("llama", **settings)
    assert most_tokens(model, known) == (90 if most in (97, 1000) else most)  # a tokenizer does not know of scaling


def test_configs_that_do_not_say_how_much_was_read():
    assert trained_context(transformers.BloomConfig()) is None
    assert trained_context(transformers.GPT2Config(n_positions=55)) == 55
