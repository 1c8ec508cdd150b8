"""The language model: causal to the last bit, and one token at a time the same as all at once."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa.errors import InvalidInput
from hsa.models.language_model import LanguageModel, LanguageModelConfig
from tests.model_inputs import exact

TOKENS = 37
SIZES = {"width": 12, "heads": 2, "kv_heads": 1, "layers": 3, "feed_forward": 11, "branching": (3, 2), "sinks": 1}
CLUSTERED = {"branching": (2, 2, 2), "tile": 4, "threshold": 1 / 8}
CLOSES = {3: 1, 5: 2, 7: 3}
MIXED = ("flat", "multiscale", "clustered")
CASES = {
    "flat": {"attention": "flat"},
    "multiscale": {"attention": "multiscale"},
    "multiscale, closing": {"attention": "multiscale", "closes": CLOSES, "positions": "both"},
    "clustered": {"attention": "clustered", **CLUSTERED},
    "per head": {"attention": "clustered", **CLUSTERED, "threshold": (1 / 4, 1 / 32)},
    "top_k": {"attention": "clustered", **CLUSTERED, "threshold": None, "top_k": 2},
    "mixed": {"attention": MIXED, **CLUSTERED, "positions": "tree", "near": 2},
}


def config(**changes):
    return LanguageModelConfig(TOKENS, **{**SIZES, **changes})


def model(case="multiscale", dtype=torch.float64, **changes):
    made = exact(LanguageModel(config(**CASES[case], **changes)))
    return made.to(dtype)


def texts(*lengths, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(TOKENS, (n,), generator=draw) for n in lengths]


@pytest.mark.parametrize("case", CASES)
def test_no_output_depends_on_a_later_input(case):
    """Tokens are all different, so that a row of the embedding is the input of one of them."""
    made, lengths = model(case), [19, 4]
    tokens = torch.randperm(TOKENS)[: sum(lengths)]

    def outputs(weight):
        return torch.func.functional_call(_Hidden(made), {"model.embedding.weight": weight}, (tokens, lengths))

    slopes = torch.autograd.functional.jacobian(outputs, made.embedding.weight.detach())[:, tokens].abs().amax(-1)
    text, position = torch.repeat_interleave(torch.tensor(lengths)), torch.arange(sum(lengths))
    may_see = (text[:, None] == text) & (position <= position[:, None])
    assert (slopes[~may_see] == 0).all()
    assert (slopes[may_see] > 0).all()


class _Hidden(torch.nn.Module):
    """A number per token: a product with what its logits are made of."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, lengths):
        return self.model.hidden(tokens, lengths) @ torch.arange(1.0, SIZES["width"] + 1, dtype=torch.float64)


@pytest.mark.parametrize("prompts", [(0, 0), (3, 50)])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_token_by_token_is_the_full_pass_at_every_length(case, prompts):
    longest = 300
    made = model(case, torch.float32)
    written = texts(longest, longest, seed=3)
    whole = made(torch.cat(written), [longest, longest]).unflatten(0, (2, longest))
    cache = made.new_cache(2)
    now = list(prompts)
    if any(now):
        logits = made.read(torch.cat([t[:n] for t, n in zip(written, now, strict=True)]), now, cache)
        torch.testing.assert_close(logits, torch.stack([whole[i, n - 1] for i, n in enumerate(now)]), rtol=0, atol=1e-5)
    result, wanted = [], []
    while max(now) < longest:
        result.append(made.step(torch.stack([t[n] for t, n in zip(written, now, strict=True)]), cache))
        wanted.append(torch.stack([whole[i, n] for i, n in enumerate(now)]))
        now = [n + 1 for n in now]
    assert cache.lengths == now
    torch.testing.assert_close(torch.stack(result), torch.stack(wanted), rtol=0, atol=1e-5)


@settings(max_examples=12)
@given(st.sampled_from(list(CASES)), st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(0, 9))
@torch.no_grad()
def test_texts_do_not_see_each_other_and_nothing_changes_as_they_grow(case, lengths, seed):
    made = model(case)
    written = texts(*lengths, seed=seed)
    together = made(torch.cat(written), lengths).split(lengths)
    for text, logits in zip(written, together, strict=True):
        half = (len(text) + 1) // 2
        torch.testing.assert_close(made(text, [len(text)]), logits, rtol=0, atol=1e-9)
        torch.testing.assert_close(made(text[:half], [half]), logits[:half], rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_reorder_crop_save_and_restore(case):
    made = model(case)
    first, second, rest = texts(20, 11, 9)
    cache = made.new_cache(2, rewind=4)
    made.read(torch.cat([first, second]), [20, 11], cache)
    cache.reorder(torch.tensor([1, 0, 1]))
    assert (cache.batch, cache.lengths) == (3, [11, 20, 11])
    for token in rest[:3]:
        made.step(token.expand(3), cache)
    cache.crop([12, 23, 13])
    stored = io.BytesIO()
    torch.save(cache.state_dict(), stored)
    stored.seek(0)
    again = made.new_cache(3, rewind=4)
    again.load_state_dict(torch.load(stored, weights_only=True))
    for used in (cache, again):
        result = made.step(rest[5].expand(3), used)
        kept = [[second, rest[:1]], [first, rest[:3]], [second, rest[:2]]]
        for logits, parts in zip(result, kept, strict=True):
            whole = torch.cat([*parts, rest[5:6]])
            torch.testing.assert_close(logits, made(whole, [len(whole)])[-1], rtol=0, atol=1e-6)


def test_loss_is_that_of_the_logits():
    made, (tokens,) = model(), texts(23)
    targets = tokens.roll(-1)
    wanted = torch.nn.functional.cross_entropy(made(tokens, [23]), targets, reduction="none")
    torch.testing.assert_close(made.loss(tokens, targets, [23]), wanted.mean())
    torch.testing.assert_close(made.loss(tokens, targets, [23], mean=False), wanted)
    made.loss(tokens, targets, [23]).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in made.parameters())


def test_trees_computed_before_the_pass_give_the_same_result():
    made, (tokens,) = model("multiscale, closing"), texts(23)
    trees = made.trees(tokens.numpy().astype(np.uint16), [14, 9])
    assert torch.equal(made(tokens, [14, 9], trees=trees), made(tokens, [14, 9]))
    plain = model("multiscale")
    assert plain.trees(tokens, [14, 9]) is plain.trees(tokens.flip(0), [14, 9])


def test_trees_computed_in_inference_mode_can_be_used_in_training():
    (tokens,) = texts(23)
    used, fresh = model("mixed"), model("mixed")
    with torch.inference_mode():
        used(tokens, [23])
        trees = used.trees(tokens, [23])
    assert used.trees(tokens, [23]) is trees
    for made in (used, fresh):
        made.loss(tokens, tokens.roll(-1), [23]).backward()
    for (name, ours), theirs in zip(used.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name


def test_tokens_that_close_families_change_the_attention():
    closing, (tokens,) = model("multiscale, closing"), texts(60)
    fixed = LanguageModel(replace(closing.config, closes={})).double().eval()
    fixed.load_state_dict(closing.state_dict())
    assert not torch.allclose(closing(tokens, [60]), fixed(tokens, [60]))


def test_flat_and_hierarchical_differ_in_the_bias_of_pooled_nodes_alone():
    shapes = [{n: p.shape for n, p in model(case).named_parameters()} for case in ("multiscale", "flat")]
    extra = {n: s for n, s in shapes[0].items() if n not in shapes[1]}
    assert extra == {f"layers.{i}.attention.pooled_bias": (2,) for i in range(3)}
    assert all(shapes[0][n] == s for n, s in shapes[1].items())


def test_half_precision_is_close():
    made, (tokens,) = model("mixed", torch.float32), texts(40)
    with torch.autocast("cpu", torch.bfloat16):
        loss = made.loss(tokens, tokens.roll(-1), [40])
    loss.backward()
    torch.testing.assert_close(loss, made.loss(tokens, tokens.roll(-1), [40]), rtol=0.1, atol=0)


def test_memory_of_all_layers():
    made = model("mixed")
    cache = made.new_cache(2)
    with torch.no_grad():
        made.read(torch.cat(texts(30, 20)), [30, 20], cache)
    memory = cache.memory()
    assert memory.flat_bytes == 3 * 2 * 6 * 8 * 50  # layers · (key + value) · head_dim · float64 · tokens
    assert memory.leaves_kept
    assert memory.bytes == sum(part.memory().bytes for part in cache.parts.values())


@pytest.mark.parametrize("threshold", [1 / 8, (1 / 4, 1 / 32)])
def test_a_configuration_survives_json(threshold):
    wanted = config(attention=MIXED, **{**CLUSTERED, "threshold": threshold}, closes=CLOSES, max_length=99)
    assert LanguageModelConfig.from_dict(json.loads(json.dumps(wanted.to_dict()))) == wanted
    with pytest.raises(InvalidInput, match="unknown field 'color'"):
        LanguageModelConfig.from_dict({"vocabulary": 3, "color": 1})
    old = {"vocabulary": 3, "attention": "clustered", "top_k": 8, "beam": None, "chunk": 256, "group": 8}
    with pytest.raises(InvalidInput, match=r"unknown field 'beam'\. Was it saved by another version\? Then load"):
        LanguageModelConfig.from_dict(old)


def test_the_default_branching_depends_on_the_kinds():
    assert LanguageModelConfig(3).tree_branching == (32, 4)
    clustered = LanguageModelConfig(3, layers=2, attention=("flat", "clustered"))
    assert clustered.tree_branching == (8, 8, 4)
    assert LanguageModelConfig.from_dict(json.loads(json.dumps(clustered.to_dict()))) == clustered


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "heads: expected .*, got 5 heads"),
        ({"kv_heads": 3, "heads": 4}, "heads: expected .*, got 4 heads, 3 of keys"),
        ({"heads": 4}, "heads: expected .*, got 3 channels"),
        ({"attention": "linear"}, "attention: expected .*, got 'linear'"),
        ({"attention": ("flat", "flat")}, "attention: expected .*, got 2 names"),
        ({"positions": "absolute"}, "positions: expected .*, got absolute"),
        ({"branching": ()}, "branching"),
        ({"attention": "clustered"}, r"branching: expected keys per group, .*, got \(3, 2\)"),
        ({"attention": "clustered", "branching": (2, 2, 2)}, "tile: expected at most 8"),
        ({"attention": "clustered", **CLUSTERED, "top_k": 2}, "top_k: expected None with a threshold"),
        ({"attention": "clustered", **CLUSTERED, "threshold": 0}, "threshold: expected"),
        ({"attention": "clustered", **CLUSTERED, "threshold": (0.1,) * 3}, "threshold: expected .* 2 query heads"),
        ({"dropout": 1.0}, "dropout"),
        ({"near": -1}, "near: expected .*, got -1"),
        ({"layers": 0}, "layers: expected .*, got 0"),
        ({"max_length": 0}, "max_length: expected .*, got 0"),
        ({"closes": {TOKENS: 1}}, rf"closes\[{TOKENS}\]"),
    ],
)
def test_invalid_configurations(changes, message):
    with pytest.raises(InvalidInput, match=message):
        LanguageModelConfig(TOKENS, **{**SIZES, "kv_heads": None, **changes})


@torch.no_grad()
def test_invalid_inputs():
    made = model(max_length=9)
    (tokens,) = texts(12)
    for lengths in ([5], [12, 0], []):
        with pytest.raises(InvalidInput, match=r"tokens: expected .*, got shape"):
            made(tokens, lengths)
    with pytest.raises(InvalidInput, match="expected at most 9, the max_length of the model, got a text of 12 tokens"):
        made(tokens, [12])
    cache = made.new_cache(1)
    made.read(tokens[:9], [9], cache)
    with pytest.raises(InvalidInput, match="token 10 of a text"):
        made.step(tokens[:1], cache)
    with pytest.raises(InvalidInput, match="cache: expected a cache for 2, got a cache for 1 texts"):
        made.step(tokens[:2], cache)
    with pytest.raises(InvalidInput, match=r"expected a cache of this model: .*, got a cache of another model"):
        model("flat").step(tokens[:1], cache)
    with pytest.raises(InvalidInput, match=r"expected an empty cache, got a cache with tokens"):
        made.read(tokens[:3], [3], cache)
    with pytest.raises(InvalidInput, match="another model's cache"):
        cache.load_state_dict(model("flat").new_cache(1).state_dict())
