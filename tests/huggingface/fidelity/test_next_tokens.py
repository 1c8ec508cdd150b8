"""Losses and divergences from slices of logits equal those from all logits at once."""

import pytest
import torch

from hsa.huggingface import convert
from hsa.huggingface.fidelity import next_tokens
from hsa.huggingface.fidelity.next_tokens import (
    STRIDE,
    compared_states,
    final_states,
    has_separate_head,
    logits_of,
    mean_divergences,
    mean_losses,
)
from tests.huggingface.tiny_models import DECODER, random_ids, tiny, transformers


def decoder(kind, seed=1, **changes):
    torch.manual_seed(seed)
    config = "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config"
    shape = {**DECODER, "tie_word_embeddings": False, **changes}
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, config)(**shape)).double().eval()


class Whole(torch.nn.Module):
    """A language model without a decoder of its own."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.config, self.passes = inner, inner.config, 0

    def forward(self, input_ids, use_cache=None):
        self.passes += 1
        return self.inner(input_ids, use_cache=use_cache)


MODELS = {
    "gpt2": lambda: tiny("gpt2"),
    "llama": lambda: decoder("Llama"),
    "qwen2": lambda: decoder("Qwen2"),
    "qwen3": lambda: decoder("Qwen3"),
    "mistral": lambda: decoder("Mistral"),
    "gemma3, soft cap": lambda: decoder("Gemma3", final_logit_softcapping=3.0),
    "granite, scaled logits": lambda: decoder("Granite", logits_scaling=8.0),
    "cohere, scaled logits": lambda: decoder("Cohere"),
}


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch):
    monkeypatch.setattr(next_tokens, "MOST_LOGITS", 2 * 59 * 7)  # 7 tokens of 2 pieces


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("warm_up", [0, 11])
@torch.no_grad()
def test_slices_equal_the_whole(name, warm_up):
    model, (ids, _) = MODELS[name](), random_ids([61, 61])
    assert has_separate_head(model, ids)
    whole = model(ids).logits
    states = final_states(model, ids)
    torch.testing.assert_close(logits_of(model, states), whole.float())
    logs = whole.log_softmax(-1)
    wanted = -logs[:, :-1].gather(-1, ids[:, 1:, None])[:, warm_up:, 0].mean(1)
    torch.testing.assert_close(mean_losses(model, ids, states, warm_up), wanted, atol=1e-5, rtol=1e-5)
    before = compared_states(states, warm_up)
    assert before.shape[1] == -(-(60 - warm_up) // STRIDE)
    assert mean_divergences(model, before, before).tolist() == [0, 0]
    if name not in ("gemma3, soft cap", "mistral"):  # which have layers with a sliding window
        convert(model, kind="multiscale", branching=(4, 2))
        changed = model(ids).logits.log_softmax(-1)
        each = (logs.exp() * (logs - changed)).sum(-1)[:, warm_up:-1:STRIDE]
        result = mean_divergences(model, before, compared_states(final_states(model, ids), warm_up))
        torch.testing.assert_close(result, each.mean(1), atol=1e-5, rtol=1e-4)
        assert (result > 1e-4).all()


@torch.no_grad()
def test_a_model_without_a_separate_head_keeps_all_logits():
    model, (ids, _) = Whole(decoder("Llama")), random_ids([61, 61])
    assert not has_separate_head(model, ids)
    assert model.passes == 0  # nothing to compare with
    states = final_states(model, ids)
    assert torch.equal(states, model.inner(ids).logits)
    wanted = (
        mean_losses(model.inner, ids, states) if has_separate_head(model, ids) else model.inner(ids, labels=ids).loss
    )
    torch.testing.assert_close(mean_losses(model, ids, states).mean(), wanted.double(), atol=1e-5, rtol=1e-5)
    assert mean_divergences(model, *[compared_states(states)] * 2).tolist() == [0, 0]


@torch.no_grad()
def test_a_head_that_reads_more_than_the_decoders_output_is_not_separate():
    model, (ids, _) = decoder("Llama"), random_ids([61, 61])
    model.lm_head.register_forward_hook(lambda module, arguments, output: output * seen[0])
    seen = [1.0]
    model.register_forward_pre_hook(
        lambda module, arguments, options: seen.__setitem__(0, ids_of(options)), with_kwargs=True
    )
    assert not has_separate_head(model, ids)
    torch.testing.assert_close(logits_of(model, final_states(model, ids)), model(input_ids=ids).logits.float())


def ids_of(options):
    return 1.0 + float(options["input_ids"].sum())


@torch.no_grad()
def test_the_comparison_is_made_once():
    model, (ids, _) = decoder("Llama"), random_ids([61, 61])
    passes = []
    model.model.layers[0].register_forward_hook(lambda *_: passes.append(1))
    for _ in range(3):
        has_separate_head(model, ids)
    assert len(passes) == 2
    final_states(model, ids)
    assert len(passes) == 3
    assert "forward" not in vars(model.model)  # as it was
