"""A `DecodingStep`, in a loop and inside `generate`, gives the logits of full passes without a cache."""

import pytest
import torch

from hsa.errors import InvalidInput
from hsa.huggingface import DecodingStep, convert, decoding_graph, memory_of, new_cache, revert
from hsa.huggingface.fixed_layer import FixedLayer
from tests.huggingface.test_cache import CLUSTERED, WAYS, ready, write
from tests.huggingface.tiny_models import DECODER, random_ids, run, stepwise, tiny, transformers


def read(model, ids, mask, max_length=64):
    """Read a prompt; return its cache and the next tokens."""
    cache = new_cache(model, max_length)
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    logits = run(model, input_ids=ids, attention_mask=mask, position_ids=position_ids, past_key_values=cache)
    return cache, logits[:, -1]


def gemma(**changes):
    """Build a Gemma 3 whose first and third layers see five tokens."""
    kinds = ["sliding_attention", "full_attention"] * 2
    windows = {"num_hidden_layers": 4, "layer_types": kinds, "sliding_window": 5, "query_pre_attn_scalar": 8}
    torch.manual_seed(3)
    config = transformers.Gemma3TextConfig(**{**DECODER, **windows, **changes})
    return transformers.Gemma3ForCausalLM(config).double().eval()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("lengths", [[19, 11, 15], [1, 8]])
def test_steps_equal_full_passes(family, way, lengths):
    model = ready(family, way=way)
    ids, mask = random_ids(lengths, side="left")
    _, wanted = stepwise(model, ids, mask, 30)
    cache, logits = read(model, ids, mask)
    step, got = DecodingStep(model, cache), [logits]
    for _ in range(29):
        got.append(step(got[-1].argmax(-1)).clone())
    torch.testing.assert_close(torch.stack(got), wanted, rtol=0, atol=1e-9)
    assert cache.get_seq_length() == max(lengths) + 29


@pytest.mark.parametrize("lengths", [[19, 11, 15], [3, 2]])
def test_layers_that_are_not_converted(lengths):
    """Layers with a sliding window, and an exact one."""
    for model in (convert(gemma(), [1], **CLUSTERED), convert(tiny("llama", num_hidden_layers=3), [1], **CLUSTERED)):
        ids, mask = random_ids(lengths, side="left")
        _, wanted = stepwise(model, ids, mask, 20)
        cache, logits = read(model, ids, mask)
        step, got = DecodingStep(model, cache), [logits]
        for _ in range(19):
            got.append(step(got[-1].argmax(-1)).clone())
        torch.testing.assert_close(torch.stack(got), wanted, rtol=0, atol=1e-9)
        assert sum(isinstance(layer, FixedLayer) for layer in cache.layers) == len(cache.layers) - 1
        assert memory_of(cache).bytes > memory_of(cache).flat_bytes > 0


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("model", [ready, lambda: convert(gemma(), [1, 3], **CLUSTERED)])
def test_generate(model, beams):
    model = model()
    model.generation_config.eos_token_id = None
    ids, mask = random_ids([19, 11], side="left")
    options = {"num_beams": beams, "output_logits": False}
    wanted = write(model, ids, mask, 25, use_cache=False, **options).sequences
    forward = model.forward
    with decoding_graph(model, max_length=44):
        written = write(model, ids, mask, 25, **options)
        again = write(model, ids[:1], mask[:1], 25, **options)
    assert torch.equal(written.sequences, wanted)
    assert torch.equal(again.sequences, write(model, ids[:1], mask[:1], 25, use_cache=False, **options).sequences)
    assert model.forward == forward
    if beams == 1:
        assert any(isinstance(layer, FixedLayer) for layer in written.past_key_values.layers) == (
            model.config.model_type != "llama"
        )


def test_several_tokens_between_steps():
    """Prompt lookup verifies several tokens at once, and removes those that are rejected."""
    model = convert(tiny("llama", num_hidden_layers=3), [0, 2], **CLUSTERED)
    model.generation_config.eos_token_id = None
    ids, _ = random_ids([9])
    ids = torch.cat([ids, ids, ids], 1)
    mask = torch.ones_like(ids)
    wanted = write(model, ids, mask, 30, use_cache=False).sequences
    with decoding_graph(model, max_length=80):
        got = write(model, ids, mask, 30, prompt_lookup_num_tokens=4, output_logits=False).sequences
    assert torch.equal(got, wanted)


def test_step_then_pass_then_step():
    model = convert(tiny("llama", num_hidden_layers=3), [0, 2], **CLUSTERED)
    ids, mask = random_ids([40, 40])
    whole = run(model, input_ids=ids, use_cache=False)
    cache, _ = read(model, ids[:, :20], mask[:, :20])
    step = DecodingStep(model, cache)
    got = [step(ids[:, i]).clone() for i in range(20, 23)]
    part = run(model, input_ids=ids[:, 23:30], past_key_values=cache)
    cache.crop(-3)
    positions = torch.tensor([27, 27])
    got += [*part.unbind(1)[:4], step(ids[:, 27], positions).clone()]
    got += [step(ids[:, i]).clone() for i in range(28, 40)]
    torch.testing.assert_close(torch.stack(got, 1), whole[:, 20:], rtol=0, atol=1e-9)


def test_bad_input():
    model = ready()
    ids, mask = random_ids([12, 12])
    cache, logits = read(model, ids, mask, max_length=13)
    step = DecodingStep(model, cache)
    step(logits.argmax(-1))
    with pytest.raises(InvalidInput, match=r"the cache is full: 13 tokens per sequence \(max_length\)"):
        step(logits.argmax(-1))
    with pytest.raises(InvalidInput, match="expected one with max_length, got one that grows"):
        DecodingStep(model, read(model, ids, mask, None)[0])
    with pytest.raises(InvalidInput, match="expected the tokens of a prompt, got an empty cache"):
        DecodingStep(model, new_cache(model, 20))
    with pytest.raises(InvalidInput, match="expected a cache of trees, got DynamicCache"):
        DecodingStep(model, transformers.DynamicCache())
    with pytest.raises(InvalidInput, match="sequences of at most 13 tokens"):
        read(model, torch.cat([ids, ids], 1), torch.cat([mask, mask], 1), max_length=13)
    with pytest.raises(InvalidInput, match="max_length: expected a positive number of tokens"):
        new_cache(model, 0)
    with pytest.raises(InvalidInput, match="max_length"), decoding_graph(model, max_length=14):
        write(model, ids, mask, 8)
    assert "forward" not in vars(model)
    sliding = convert(gemma(), [1], **CLUSTERED)
    cache, logits = read(sliding, ids, mask)
    DecodingStep(sliding, cache)(logits.argmax(-1))
    with pytest.raises(
        InvalidInput, match="expected one new token per sequence, after the first step of a layer with a"
    ):
        run(sliding, input_ids=ids[:, :3], past_key_values=cache)
    with pytest.raises(InvalidInput, match="expected a converted model, got a model with its own attention"):
        DecodingStep(revert(model), cache)
