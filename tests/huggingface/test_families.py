"""All model families: with every group exact, outputs equal those of the exact model, and `revert` restores the model."""

import pytest
import torch

from hsa.errors import InvalidInput
from hsa.huggingface import convert, revert, settings_of
from tests.huggingface.tiny_models import DECODERS, FAMILIES, inputs_of, random_ids, run, tiny, transformers

ALL_EXACT = {
    "clustered keys": {"kind": "clustered", "branching": (4, 2), "top_k": 99},
    "windows": {"kind": "multiscale", "branching": (4, 2), "top_k": 99, "sinks": None},
    "neighbours": {"kind": "multiscale", "branching": (4, 2), "top_k": 0, "near": 99},
    "one window": {"kind": "multiscale", "branching": (64,), "top_k": 0, "sinks": None},
}
TILES = {"branching": (4, 2, 2), "tile": 8}
CAUSAL_EXACT = {
    "clustered keys": {**TILES, "threshold": 1e-30},
    "windows": {"kind": "multiscale", **TILES, "top_k": 99},
    "neighbours": ALL_EXACT["neighbours"],
    "one window": ALL_EXACT["one window"],
}
NAMES = [name for name in FAMILIES if name != "bart"]


@pytest.mark.parametrize("family", NAMES)
def test_all_groups_exact_equals_the_exact_model(family):
    model = tiny(family)
    inputs, counts = inputs_of(family)
    exact = run(model, **inputs)
    for settings in (CAUSAL_EXACT if family in DECODERS else ALL_EXACT).values():
        convert(model, **settings)
        torch.testing.assert_close(run(model, **inputs)[counts], exact[counts], rtol=1e-9, atol=1e-9)
        revert(model)
    convert(model, kind="multiscale", branching=(4, 2))
    assert (run(model, **inputs) - exact)[counts].abs().max() > 1e-3


@pytest.mark.parametrize("family", ["bert", "vit"])
def test_the_papers_operator_with_one_family_equals_the_exact_model(family):
    model = tiny(family)
    inputs, counts = inputs_of(family)
    exact = run(model, **inputs)
    convert(model, kind="hierarchical", branching=(64,), sinks=None)
    torch.testing.assert_close(run(model, **inputs)[counts], exact[counts], rtol=1e-9, atol=1e-9)
    revert(model)
    convert(model, kind="hierarchical", branching=(4, 2), sinks=1)
    assert (run(model, **inputs) - exact)[counts].abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("before", ["sdpa", "eager"])
def test_revert_leaves_nothing_behind(family, before):
    model = tiny(family, attn_implementation=before)
    part = model.get_encoder() if family == "bart" else model
    inputs, counts = inputs_of(family)
    traces = [(set(vars(module)), dict(module._forward_hooks)) for module in model.modules()]
    config, exact = model.config.to_dict(), run(model, **inputs)
    assert convert(part, top_k=1) is part
    if family != "vit":  # hooks are there for token ids
        convert(part, kind="multiscale", tree=lambda ids: None)
    assert model.config._attn_implementation == "hsa"
    assert revert(part) is part
    after = run(model, **inputs)[counts]
    torch.testing.assert_close(after, exact[counts], rtol=0, atol=0, equal_nan=True)  # eager ModernBERT has some
    assert model.config._attn_implementation == before
    assert model.config.to_dict() == config
    assert not hasattr(model.config, "hsa")
    assert [(set(vars(module)), dict(module._forward_hooks)) for module in model.modules()] == traces
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert revert(part) is part


def test_sliding_layers_stay_exact():
    """Every third layer of ModernBERT has no sliding window and is converted."""
    model = tiny("modernbert")
    convert(model, branching=(4, 2), top_k=1)
    assert sorted(settings_of(model)) == [0, 3]
    with pytest.raises(
        InvalidInput, match=r"layers: .*got layer 1, with a sliding window. Leave layer 1 out of layers"
    ):
        convert(model, layers=[1], branching=(4, 2), top_k=1)
    everything_slides = tiny("qwen3", use_sliding_window=True, max_window_layers=0, sliding_window=8)
    with pytest.raises(InvalidInput, match=r"model: .*got only layers with a sliding window"):
        convert(everything_slides)


def test_sliding_layers_of_a_decoder_stay_exact():
    """Their cache drops keys outside of the window, so its first key is not the first token."""
    shape = {"num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 2, "sliding_window": 8}
    model = tiny("qwen3", **shape)
    ids, mask = random_ids(side="left")
    exact = run(model, input_ids=ids, attention_mask=mask)
    written = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    convert(model, kind="multiscale", branching=(4, 2), top_k=0, near=99)
    assert sorted(settings_of(model)) == [0, 1]
    torch.testing.assert_close(run(model, input_ids=ids, attention_mask=mask)[mask.bool()], exact[mask.bool()])
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False), written)


def test_a_decoder_of_a_family_with_encoders():
    """One class computes self-attention and cross-attention; only self-attention is converted."""
    torch.manual_seed(1)
    config = tiny("bart").config
    config.is_decoder, config.is_encoder_decoder = True, False
    model = transformers.BartForCausalLM(config).double().eval()
    inputs, counts = inputs_of("bart")
    states = torch.randn(3, 23, 32, dtype=torch.float64)
    exact, crossing = run(model, **inputs), run(model, **inputs, encoder_hidden_states=states)
    convert(model, kind="multiscale", branching=(4, 2), top_k=0, near=99)
    assert sorted(settings_of(model)) == [0, 1]
    torch.testing.assert_close(run(model, **inputs)[counts], exact[counts])
    torch.testing.assert_close(run(model, **inputs, encoder_hidden_states=states)[counts], crossing[counts])


@pytest.mark.parametrize("reenters", [False, True])
def test_decoders_with_cross_attention(reenters):
    """GPT-2 and BERT with cross-attention: only self-attention is converted."""
    for family, changes in (("gpt2", {}), ("bert", {"is_decoder": True})):
        model = tiny(family, add_cross_attention=True, **changes)
        inputs, counts = inputs_of(family)
        width = 41 if reenters else 23  # as many encoder states as tokens, or not
        states = torch.randn(3, width, 32, dtype=torch.float64)
        seen = torch.ones(3, width, dtype=torch.long)
        seen[0, 11:] = 0
        inputs |= {"encoder_hidden_states": states, "encoder_attention_mask": seen}
        exact = run(model, **inputs)
        convert(model, kind="multiscale", branching=(4, 2), top_k=0, near=99)
        assert sorted(settings_of(model)) == [0, 1]
        torch.testing.assert_close(run(model, **inputs)[counts], exact[counts])
        convert(model, kind="multiscale", branching=(4, 2))
        assert (run(model, **inputs) - exact)[counts].abs().max() > 1e-3
