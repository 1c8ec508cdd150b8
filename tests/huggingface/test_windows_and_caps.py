"""Layers with sliding windows, soft caps or learned sinks are left alone or refused by `convert`, never by `forward`."""

import pytest
import torch

from hsa.errors import InvalidInput
from hsa.huggingface import convert, revert, settings_of
from tests.huggingface.tiny_models import DECODER, VOCABULARY, run, transformers

EXACT = {"branching": (4, 2, 2), "tile": 8, "threshold": 1e-30}
WINDOW = {"num_hidden_layers": 4, "sliding_window": 8}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
CONVERTED = {  # class, config, layers that are converted by default
    "mistral": ("Mistral", {**WINDOW, "sliding_window": None}, [0, 1, 2, 3]),
    "mistral, a window as long as the context": ("Mistral", {**WINDOW, "sliding_window": 97}, [0, 1, 2, 3]),
    "phi3": ("Phi3", {**WINDOW, "sliding_window": None}, [0, 1, 2, 3]),
    "starcoder2": ("Starcoder2", {**WINDOW, "sliding_window": None}, [0, 1, 2, 3]),
    "qwen2": ("Qwen2", WINDOW, [0, 1, 2, 3]),  # use_sliding_window is False
    "qwen2, sliding": ("Qwen2", {**WINDOW, "use_sliding_window": True, "max_window_layers": 3}, [0, 1, 2]),
    "qwen3, sliding": ("Qwen3", {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}, [0]),
    "gemma2 without a cap": ("Gemma2", {**WINDOW, "attn_logit_softcapping": None}, [1, 3]),
    "gemma3": ("Gemma3", {**WINDOW, "layer_types": ALTERNATING}, [1, 3]),
}
REFUSED = {
    "mistral": ("Mistral", WINDOW, "a sliding window"),
    "phi3": ("Phi3", WINDOW, "a sliding window"),
    "starcoder2": ("Starcoder2", WINDOW, "a sliding window"),
    "gemma2": ("Gemma2", WINDOW, "a sliding window or a soft cap on its logits"),
}


def build(name, changes):
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    made = config(**{**DECODER, **changes})
    return getattr(transformers, f"{name}ForCausalLM")(made).double().eval()


@pytest.mark.parametrize("case", CONVERTED)
def test_layers_that_attend_to_everything_are_converted(case):
    name, changes, numbers = CONVERTED[case]
    model = build(name, changes)
    ids = torch.randint(3, VOCABULARY, (2, 61))
    exact = run(model, input_ids=ids)
    convert(model, **EXACT)
    assert sorted(settings_of(model)) == numbers
    torch.testing.assert_close(run(model, input_ids=ids), exact, rtol=0, atol=1e-4)  # Gemma rounds to float32
    convert(model, branching=(4, 2, 2), tile=8, top_k=1)
    assert (run(model, input_ids=ids) - exact).abs().max() > 1e-3
    revert(model)
    torch.testing.assert_close(run(model, input_ids=ids), exact, rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", REFUSED)
def test_models_without_such_layers_are_refused(case):
    name, changes, reasons = REFUSED[case]
    model = build(name, changes)
    with pytest.raises(
        InvalidInput, match=f"model: expected layers with plain softmax.*, got only layers with {reasons}"
    ):
        convert(model)
    assert settings_of(model) == {}


@pytest.mark.parametrize(
    ("case", "layer", "reason"), [("gemma3", 2, "a sliding window"), ("qwen2, sliding", 3, "a sl")]
)
def test_a_layer_that_cannot_be_converted_is_refused_by_number(case, layer, reason):
    name, changes, _ = CONVERTED[case]
    model = build(name, changes)
    with pytest.raises(InvalidInput, match=rf"layers: .*got layer {layer}, with {reason}.*Leave layer {layer} out"):
        convert(model, layers=[1, layer])


def test_learned_sinks_are_refused():
    few = {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["full_attention"] * 2}
    model = build("GptOss", few)
    with pytest.raises(InvalidInput, match="got only layers with learned sinks"):
        convert(model)
