"""Generation with caches of trees gives the same tokens as full passes without a cache."""

import contextlib
import copy

import pytest
import torch

from hsa.errors import InvalidInput
from hsa.huggingface import convert, counting, layer_plan, memory_of, new_cache, revert
from hsa.huggingface.cache import CacheLayer
from hsa.huggingface.layer_plan import exact_is_cheaper
from tests.huggingface.tiny_models import PAD, random_ids, run, stepwise, tiny, transformers

CLUSTERED = {"branching": (4, 2, 2), "tile": 8, "threshold": 1 / 8}
WINDOWS = {"kind": "multiscale", "branching": (4, 2), "top_k": 0, "near": 1}
WAYS = {
    "clustered": CLUSTERED,
    "clustered, top_k": {"branching": (2, 2, 2), "tile": 4, "top_k": 1, "sinks": None, "pooled_bias": -0.4},
    "clustered, bias per head": {**CLUSTERED, "pooled_bias": (0.0, -0.5, 0.5, -1.0)},
    "clustered, threshold per head": {**CLUSTERED, "threshold": [(1 / 4, 1 / 8, 1 / 32, 1 / 2), 1 / 16]},
    "windows that are selected": {"kind": "multiscale", **CLUSTERED},
    "windows": WINDOWS,
}


def ready(family="llama", layers=None, way="clustered", **changes):
    model = convert(tiny(family, **changes), layers, **WAYS[way])
    model.generation_config.eos_token_id = None
    return model


def write(model, ids, mask, steps, **options):
    wanted = {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": PAD, "do_sample": False}
    return model.generate(ids, attention_mask=mask, max_new_tokens=steps, **{**wanted, **options})


@pytest.fixture
def steps(monkeypatch):
    """Record each token that attends to a cache of trees."""
    taken = []
    step = CacheLayer._step

    def counted(self, *arguments):
        taken.append(self)
        return step(self, *arguments)

    monkeypatch.setattr(CacheLayer, "_step", counted)
    return taken


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("lengths", [[19, 11, 15], [1, 8]])
def test_generate_equals_full_passes(steps, family, way, lengths):
    model = ready(family, way=way)
    ids, mask = random_ids(lengths, side="left")
    whole, logits = stepwise(model, ids, mask, 30)
    written = write(model, ids, mask, 30)
    assert torch.equal(written.sequences, whole)
    torch.testing.assert_close(torch.stack(written.logits), logits.float(), rtol=0, atol=1e-4)
    assert len(steps) == 29 * 2  # in both layers


@pytest.mark.parametrize("way", ["clustered", "windows"])
def test_trees_grow_from_short_sequences_that_attend_exactly(monkeypatch, way):
    monkeypatch.setattr(layer_plan, "exact_is_cheaper", exact_is_cheaper)
    model = ready(way=way)
    ids, mask = random_ids([3, 14], side="left")
    whole, logits = stepwise(model, ids, mask, 40)
    written = write(model, ids, mask, 40)
    torch.testing.assert_close(torch.stack(written.logits), logits.float(), rtol=0, atol=1e-4)
    assert torch.equal(written.sequences, whole)


@pytest.mark.parametrize("way", ["clustered", "windows"])
def test_beam_search(steps, way):
    model = ready(way=way)
    ids, mask = random_ids([19, 11], side="left")
    options = {"num_beams": 3, "num_return_sequences": 2, "output_logits": False}
    with_trees = write(model, ids, mask, 25, **options).sequences
    assert len(steps) == 24 * 2
    without = write(model, ids, mask, 25, use_cache=False, **options).sequences
    assert torch.equal(with_trees, without)


@pytest.mark.parametrize("way", ["clustered", "windows"])
def test_rejected_tokens_change_nothing(steps, monkeypatch, way):
    """Prompt lookup adds several new tokens at once and removes those that are rejected."""
    model = ready(way=way)
    ids, mask = random_ids([9])
    ids = torch.cat([ids, ids, ids], 1)
    mask = torch.ones_like(ids)
    plain = write(model, ids, mask, 30).sequences
    steps.clear()
    crops = []
    crop = CacheLayer.crop
    monkeypatch.setattr(CacheLayer, "crop", lambda self, n: crops.append(n) or crop(self, n))
    guessed = write(model, ids, mask, 30, prompt_lookup_num_tokens=4, output_logits=False).sequences
    assert torch.equal(guessed, plain)
    assert any(n < 0 for n in crops)
    assert way == "clustered" or len(steps) > 30 * 2


@pytest.mark.parametrize("kind", ["cropped", "absolute"])
def test_crop_in_any_version_of_transformers(kind):
    model = ready()
    ids, mask = random_ids([30, 22], side="left")
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    whole = run(model, input_ids=ids, attention_mask=mask, position_ids=position_ids)
    cache = new_cache(model)
    run(model, input_ids=ids, attention_mask=mask, position_ids=position_ids, past_key_values=cache)
    cache.crop(-7 if kind == "cropped" else 23)
    assert cache.get_seq_length() == 23
    rest = run(
        model, input_ids=ids[:, 23:], attention_mask=mask, position_ids=position_ids[:, 23:], past_key_values=cache
    )
    torch.testing.assert_close(rest, whole[:, 23:], rtol=0, atol=1e-9)
    cache.crop(0)
    assert cache.get_seq_length() == 30
    cache.crop(-30)
    assert cache.get_seq_length() == 0
    again = run(model, input_ids=ids, attention_mask=mask, position_ids=position_ids, past_key_values=cache)
    torch.testing.assert_close(again[mask.bool()], whole[mask.bool()], rtol=0, atol=1e-9)


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_several_new_tokens_at_once_with_padding_anywhere(side, counts):
    """Counting operations needs whole passes beside the cache."""
    model = ready()
    lengths = [40, 33]
    ids, mask = random_ids(lengths, side=side)
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    whole = run(model, input_ids=ids, attention_mask=mask, position_ids=position_ids)
    cache, parts = new_cache(model), []
    for part in (slice(0, 13), slice(13, 14), slice(14, 31), slice(31, 36) if side == "left" else slice(31, 40)):
        with counting() if counts else contextlib.nullcontext():
            parts.append(
                run(
                    model,
                    input_ids=ids[:, part],
                    attention_mask=mask[:, : part.stop],
                    position_ids=position_ids[:, part],
                    past_key_values=cache,
                )
            )
    result = torch.cat(parts, 1)
    there = mask[:, : result.shape[1]].bool()
    torch.testing.assert_close(result[there], whole[:, : result.shape[1]][there], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("settings", [{}, {"kind": "multiscale", "threshold": 1 / 16}, {"top_k": 2}])
def test_chunks_and_tiles_of_the_default_sizes(settings):
    """A prompt in pieces, then single tokens, across the end of a chunk and of a tile."""
    model = convert(tiny("llama", max_position_embeddings=400), **settings)
    ids, _ = random_ids([330])
    whole = run(model, input_ids=ids, use_cache=False)
    cache, parts = new_cache(model), []
    for begin, end in [(0, 200), (200, 300), *((i, i + 1) for i in range(300, 325)), (325, 330)]:
        parts.append(run(model, input_ids=ids[:, begin:end], past_key_values=cache))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-9)


def test_use_cache_gives_a_cache_of_trees():
    model = ready()
    ids, _ = random_ids([30])
    whole = run(model, input_ids=ids, use_cache=False)
    with torch.no_grad():
        cache = model(ids[:, :27], use_cache=True).past_key_values
    assert all(isinstance(layer, CacheLayer) for layer in cache.layers)
    torch.testing.assert_close(run(model, input_ids=ids[:, 27:], past_key_values=cache), whole[:, 27:])


def test_layers_differ_and_some_are_exact(steps):
    model = tiny("llama", num_hidden_layers=4)
    convert(model, [0], **WINDOWS)
    convert(model, [2], **CLUSTERED)
    convert(model, [3], branching=(2, 2, 2), tile=4, top_k=2)
    model.generation_config.eos_token_id = None
    ids, mask = random_ids([19, 11], side="left")
    whole, logits = stepwise(model, ids, mask, 20)
    written = write(model, ids, mask, 20)
    assert torch.equal(written.sequences, whole)
    torch.testing.assert_close(written.logits[-1], logits[-1].float(), rtol=0, atol=1e-4)
    kinds = [type(layer).__name__ for layer in written.past_key_values.layers]
    assert kinds == ["CacheLayer", "DynamicLayer", "CacheLayer", "CacheLayer"]


def test_generation_without_a_cache_of_trees(steps):
    """A cache of fixed size does not know which groups are open, so all must be for equal results; gradients."""
    ids, mask = random_ids([19, 11], side="left")
    model = ready()
    assert write(model, ids, mask, 10, cache_implementation="static").sequences.shape == (2, 29)
    convert(model, **{**CLUSTERED, "threshold": 1e-30})
    whole, _ = stepwise(model, ids, mask, 10)
    assert torch.equal(write(model, ids, mask, 10, cache_implementation="static").sequences, whole)
    with torch.enable_grad():
        cache = transformers.DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        assert not any(isinstance(layer, CacheLayer) for layer in cache.layers)
    assert steps == []


def test_a_cache_from_the_user(steps):
    """A cache built with or without the model's config, reused after a reset, and copied."""
    model = ready()
    ids, mask = random_ids([19, 11], side="left")
    plain = write(model, ids, mask, 12).sequences
    for cache in (transformers.DynamicCache(), transformers.DynamicCache(config=model.config), new_cache(model)):
        assert torch.equal(write(model, ids, mask, 12, past_key_values=cache).sequences, plain)
        cache.reset()
        assert torch.equal(write(model, ids, mask, 12, past_key_values=cache).sequences, plain)
    assert len(steps) == 6 * 11 * 2 + 11 * 2
    prompt = new_cache(model)
    run(model, input_ids=ids[:1, :15], past_key_values=prompt)
    once = write(model, ids[:1], mask[:1], 12, past_key_values=copy.deepcopy(prompt)).sequences
    assert torch.equal(write(model, ids[:1], mask[:1], 12, past_key_values=prompt).sequences, once)
    assert torch.equal(once, write(model, ids[:1], mask[:1], 12).sequences)


def test_batches_that_are_repeated_and_selected():
    model = ready()
    ids, _ = random_ids([19, 19])
    cache = new_cache(model)
    run(model, input_ids=ids, past_key_values=cache)
    cache.batch_repeat_interleave(2)
    new = torch.tensor([[5], [6], [7], [8]])
    result = run(model, input_ids=new, past_key_values=cache)
    whole = run(model, input_ids=torch.cat([ids.repeat_interleave(2, 0), new], 1))
    torch.testing.assert_close(result[:, -1], whole[:, -1], rtol=0, atol=1e-9)
    cache.batch_select_indices(torch.tensor([2, 1]))
    result = run(model, input_ids=new[:2], past_key_values=cache)
    whole = run(model, input_ids=torch.cat([ids[[1, 0]], new[[2, 1]], new[:2]], 1))
    torch.testing.assert_close(result[:, -1], whole[:, -1], rtol=0, atol=1e-9)


def test_attention_weights_on_request():
    model = ready()
    ids, _ = random_ids([30])
    cache = new_cache(model)
    run(model, input_ids=ids[:, :29], past_key_values=cache)
    with torch.no_grad():
        out = model(ids[:, 29:], past_key_values=cache, output_attentions=True)
        whole = model(ids, output_attentions=True, use_cache=False)
    assert out.attentions[0].shape == (1, 4, 1, 30)
    torch.testing.assert_close(out.attentions[1][:, :, 0], whole.attentions[1][:, :, -1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("way", ["clustered", "windows"])
def test_operations_and_memory(way):
    model = ready(way=way)
    ids, mask = random_ids([61])
    with counting() as counted:
        out = write(model, ids, mask, 30)
    assert all(layer.attention < counted.exact[number] for number, layer in counted.layers.items())
    memory = memory_of(out.past_key_values)
    assert memory.flat_bytes == 2 * 90 * 2 * (8 + 8) * 8
    assert memory.leaves_kept == (way == "clustered")
    assert memory_of(transformers.DynamicCache()).bytes == 0


def test_saved_models_generate_with_trees_after_loading(steps, tmp_path):
    model = ready()
    ids, mask = random_ids([19])
    written = write(model, ids, mask, 12).sequences
    model.save_pretrained(tmp_path)
    loaded = convert(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval())
    steps.clear()
    assert torch.equal(write(loaded, ids, mask, 12).sequences, written)
    assert torch.equal(write(copy.deepcopy(loaded), ids, mask, 12).sequences, written)
    assert len(steps) == 2 * 11 * 2


def test_caches_that_do_not_fit_are_refused():
    model = ready()
    ids, mask = random_ids([19, 15], side="left")
    token = torch.tensor([[5], [6]])

    def filled():
        cache = new_cache(model)
        run(model, input_ids=ids, attention_mask=mask, past_key_values=cache)
        return cache

    with pytest.raises(
        InvalidInput, match=r"cache whose number of sequences is 1, as in the new tokens, got a cache with 2"
    ):
        run(model, input_ids=token[:1], past_key_values=filled())
    with pytest.raises(InvalidInput, match=r"number of key dimensions is 16, as in the new tokens, got a cache with 8"):
        run(ready(head_dim=16), input_ids=token, past_key_values=filled())
    with pytest.raises(
        InvalidInput, match=r"attention_mask: expected .* \[19, 15\] tokens .*, got a mask that includes \[19, 19\]$"
    ):
        run(model, input_ids=token, past_key_values=filled())
    with pytest.raises(
        InvalidInput, match="expected a cache with the settings of layer 0, got one with other settings"
    ):
        run(ready(way="clustered, top_k"), input_ids=token, past_key_values=filled())
    longer = torch.cat([mask, mask.new_ones(2, 1)], 1)
    with pytest.raises(InvalidInput, match=r"got a cache of trees in a pass that needs gradients.*torch.no_grad"):
        model(token, attention_mask=longer, past_key_values=filled())
    cache = filled()
    revert(model)
    assert run(model, input_ids=token, attention_mask=longer, past_key_values=cache).isnan().all()
    with pytest.raises(InvalidInput, match="layers that are not converted"):
        run(model, input_ids=token, past_key_values=cache)


def test_windows_refuse_attention_weights():
    model = ready(way="windows")
    ids, _ = random_ids([90])
    cache = new_cache(model)
    run(model, input_ids=ids[:, :80], past_key_values=cache)
    with pytest.raises(InvalidInput, match="keeps no leaves"):
        run(model, input_ids=ids[:, 80:81], past_key_values=cache, output_attentions=True)


def test_a_refused_crop_leaves_the_cache_as_it_was():
    model = ready(way="windows")
    ids = torch.randint(5, 40, (1, 90), generator=torch.Generator().manual_seed(0))
    cache = new_cache(model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(InvalidInput, match="at most 64"):
            cache.layers[0].crop(-70)
        assert cache.get_seq_length() == 90
        model(ids[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == 91


def test_layers_without_trees_count_in_the_memory():
    model = ready(layers=[0])
    with torch.no_grad():
        cache = model(torch.full((1, 30), 7), use_cache=True).past_key_values
    flat = cache.layers[1].keys.nbytes * 2
    assert memory_of(cache).flat_bytes == flat * len(cache.layers)
    assert memory_of(cache).bytes > flat
