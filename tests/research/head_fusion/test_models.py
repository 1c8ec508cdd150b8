"""Models with every head fusion: caches, independence of texts, initialisation, saving and loading."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa import collate
from hsa.attention.mixing import HeadMixing
from hsa.errors import HsaError, InvalidInput
from hsa.models.classifier import Classifier, ModelConfig
from hsa.models.language_model import LanguageModel, LanguageModelConfig
from hsa.models.saved import (
    load_language_model,
    load_model,
    load_seq2seq,
    save_language_model,
    save_model,
    save_seq2seq,
)
from hsa.models.seq2seq import Seq2Seq, Seq2SeqConfig
from hsa.nn.embedding import Modality
from hsa.nn.encoder_config import EncoderConfig
from hsa.nn.head_fusion import HeadFusion
from hsa.nn.penalties import collecting_penalties
from hsa.signals.readers.nested import from_nested
from tests.model_inputs import encoder, exact, readable
from tests.sealing import reseal

TOKENS, LONGEST = 37, 40
FUSIONS = ("talking", "collaborative", "over-heads")
ATTENTIONS = {
    "flat": {"attention": "flat"},
    "multiscale": {"attention": "multiscale"},
    "multiscale, closing": {"attention": "multiscale", "closes": {3: 1, 5: 2}, "positions": "both", "sinks": 1},
    "clustered": {"attention": "clustered"},
    "mixed": {"attention": ("flat", "multiscale"), "positions": "tree", "near": 2},
}
CASES = [(f, a) for f in FUSIONS for a in ATTENTIONS if (f, a) != ("talking", "clustered")]


def config(fusion, attention, /, **changes):
    sizes = {"width": 30, "heads": 3, "layers": 2, "feed_forward": 11, "fusion": fusion}
    clustered = {"branching": (2, 2, 2), "tile": 4, "top_k": 2}
    result = clustered if attention == "clustered" else {"branching": (3, 2)}
    shared = {"shared_dim": 20} if fusion == "collaborative" else {}
    return LanguageModelConfig(TOKENS, **{**sizes, **result, **shared, **ATTENTIONS[attention], **changes})


def language_model(fusion, attention, /, **changes):
    return exact(LanguageModel(config(fusion, attention, **changes)))


def text(length, seed=0):
    return torch.randint(TOKENS, (length,), generator=torch.Generator().manual_seed(seed))


def close(a, b, atol=1e-9):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


# Caches


@pytest.mark.parametrize("prompts", [(0, 0), (3, 17)])
@pytest.mark.parametrize(("fusion", "attention"), CASES)
@torch.no_grad()
def test_generation_equals_the_full_pass_at_every_length(fusion, attention, prompts):
    """Use two texts, with prompts of unequal lengths or none."""
    model, written = language_model(fusion, attention), torch.stack([text(LONGEST, seed) for seed in (3, 4)])
    whole = model(written.flatten(), [LONGEST] * 2).unflatten(0, (2, LONGEST))
    cache, now = model.new_cache(2), list(prompts)
    if any(now):
        read = model.read(torch.cat([t[:n] for t, n in zip(written, now, strict=True)]), now, cache)
        close(read, torch.stack([whole[i, n - 1] for i, n in enumerate(now)]))
    while max(now) < LONGEST:
        result = model.step(torch.stack([written[i, n] for i, n in enumerate(now)]), cache)
        close(result, torch.stack([whole[i, n] for i, n in enumerate(now)]))
        now = [n + 1 for n in now]
    assert cache.lengths == now


@pytest.mark.parametrize(("fusion", "attention"), CASES)
@torch.no_grad()
def test_shared_keys_and_values(fusion, attention):
    """Heads may share keys and values, unless they share projections already."""
    if fusion == "collaborative":
        with pytest.raises(InvalidInput, match=r"kv_heads: expected 3.*, got 1"):
            language_model(fusion, attention, kv_heads=1)
        return
    model, tokens = language_model(fusion, attention, width=24, heads=4, kv_heads=2), text(23)
    cache = model.new_cache(1)
    model.read(tokens[:20], [20], cache)
    steps = torch.cat([model.step(token[None], cache) for token in tokens[20:]])
    close(steps, model(tokens, [23])[20:])


@pytest.mark.parametrize(("fusion", "attention"), CASES)
@torch.no_grad()
def test_caches_are_reordered_cropped_and_stored(fusion, attention):
    model, first, second, more = language_model(fusion, attention), text(20, 1), text(11, 2), text(3, 5)
    cache = model.new_cache(2, rewind=3)
    model.read(torch.cat([first, second]), [20, 11], cache)
    cache.reorder(torch.tensor([1, 0]))
    for token in more[:2]:
        model.step(token.expand(2), cache)
    cache.crop([12, 21])
    again = model.new_cache(2, rewind=3)
    again.load_state_dict(cache.state_dict())
    for used in (cache, again):
        result = model.step(more[2].expand(2), used)
        for logits, before in zip(result, (second, first), strict=True):
            whole = torch.cat([before, more[:1], more[2:]])
            close(logits, model(whole, [len(whole)])[-1])


def test_key_width_of_a_cache():
    for fusion, wide in (("talking", 10), ("collaborative", 20), ("over-heads", 10)):
        made = config(fusion, "flat")
        part = LanguageModel(made).new_cache(2).parts["flat"]
        assert made.key_dim == part.head_dim == wide
        assert part.value_dim == 10


def test_caches_that_cannot_mix_heads():
    q, k, v = torch.randn(3, 1, 3, 10).unbind(0)
    refusals = {
        "clustered": (3, "ClusteredCache cannot mix heads"),
        "flat": (2, r"mixing.logits: expected .*\(3, 3\).* 3 heads.*, got .*\(2, 2\)"),
        "multiscale": (2, r"mixing.logits: expected .*\(3, 3\).* 3 heads.*, got .*\(2, 2\)"),
    }
    for attention, (heads, message) in refusals.items():
        part = LanguageModel(config("over-heads", attention)).new_cache(1).parts[attention]
        part.append()
        with pytest.raises(HsaError, match=message):
            part.attend(0, q, k, v, mixing=HeadMixing.identity(heads))


# Independence and causality


@settings(max_examples=10)
@given(st.sampled_from(CASES), st.lists(st.integers(1, 30), min_size=1, max_size=3), st.integers(0, 9))
@torch.no_grad()
def test_texts_are_independent_and_causal(case, lengths, seed):
    model, written = language_model(*case), [text(n, seed + i) for i, n in enumerate(lengths)]
    together = model(torch.cat(written), lengths).split(lengths)
    for tokens, logits in zip(written, together, strict=True):
        half = (len(tokens) + 1) // 2
        close(model(tokens, [len(tokens)]), logits)
        close(model(tokens[:half], [half]), logits[:half])


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("kind", ["hierarchical", "multiscale", "bottom-up", "flat"])
@settings(max_examples=4)
@given(readable(trees=(2, 4)))
def test_trees_are_independent(fusion, kind, listed):
    """Use modalities, domains and positions of all kinds."""
    model = encoder(kind, fusion=fusion, near=1)
    with torch.no_grad():
        x, forest = model(collate(listed))
        for signal, rows in zip(listed, x.split(forest.lengths), strict=True):
            close(model(collate([signal]))[0], rows, 1e-10)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_gradients_reach_every_parameter_of_the_fusion(fusion):
    model, tokens = language_model(fusion, "mixed"), text(23)
    model.loss(tokens, tokens.roll(-1), [23]).backward()
    own = [p for m in model.modules() if isinstance(m, HeadFusion) for p in m.parameters()]
    assert len(own) == 2 * {"talking": 2, "collaborative": 1, "over-heads": 3}[fusion]
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in own)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_half_precision_is_close(fusion):
    model, tokens = language_model(fusion, "mixed").float(), text(23)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(tokens, tokens.roll(-1), [23])
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    torch.testing.assert_close(loss, model.loss(tokens, tokens.roll(-1), [23]), rtol=0.1, atol=0)


# Initialisation


@pytest.mark.parametrize("attention", ["flat", "multiscale"])
def test_output_weights_are_scaled_by_the_number_of_heads(attention):
    """The scaling is applied once, however often something is initialised."""
    made = [LanguageModel(config(f, attention, width=96, layers=3)) for f in ("concatenation", "over-heads")]
    for plain, fused in zip(*(m.layers for m in made), strict=True):
        assert fused.output.weight.std().item() == pytest.approx(3 * plain.output.weight.std().item(), rel=0.05)
        assert fused.project.weight.std().item() == pytest.approx(plain.project.weight.std().item(), rel=0.05)


def seq2seq_config(fusion, top_k=None, attention="flat", width=12, **changes):
    reads = EncoderConfig(width=13, heads=3, head_dim=5, layers=1, position_width=22, position_dim=2, dropout=0.0)
    writes = {"width": width, "heads": 2, "layers": 2, "attention": attention, "branching": (3, 2), "fusion": fusion}
    decoder = LanguageModelConfig(TOKENS + 2, **{**writes, **changes})
    return Seq2SeqConfig(reads, decoder, {"text": Modality(tokens=TOKENS)}, top_k=top_k)


def test_output_weights_of_an_encoder_decoder_are_scaled():
    made = [Seq2Seq(seq2seq_config(f, width=96)) for f in ("concatenation", "over-heads")]
    for plain, fused in zip(*(m.decoder.layers for m in made), strict=True):
        for a, b in ((plain, fused), (plain.cross, fused.cross)):
            assert b.output.weight.std().item() == pytest.approx(2 * a.output.weight.std().item(), rel=0.05)
        assert type(fused.cross.fusion) is type(fused.fusion)
        assert fused.cross.fusion is not fused.fusion


@pytest.mark.parametrize("fusion", FUSIONS)
def test_config_draws_no_random_numbers(fusion):
    """Otherwise training would depend on how often a config was built."""
    before = torch.get_rng_state()
    made = config(fusion, "flat")
    EncoderConfig(width=30, heads=3, fusion=fusion)
    assert made.key_dim
    assert torch.equal(torch.get_rng_state(), before)


# Saving and loading


@pytest.mark.parametrize(("fusion", "attention"), CASES)
def test_language_models_are_saved_and_loaded(fusion, attention, tmp_path):
    model = LanguageModel(config(fusion, attention, fusion_penalty=0.25)).eval()
    assert LanguageModelConfig.from_dict(json.loads(json.dumps(model.config.to_dict()))) == model.config
    save_language_model(tmp_path, model)
    again = load_language_model(tmp_path)
    assert again.config == model.config
    assert torch.equal(again(text(23), [23]), model(text(23), [23]))


@pytest.mark.parametrize("fusion", FUSIONS)
def test_classifiers_are_saved_and_loaded(fusion, tmp_path):
    sizes = EncoderConfig(width=12, heads=2, fusion=fusion, shared_dim=6, fusion_penalty=0.25, position_width=8)
    model = Classifier(ModelConfig(sizes, {"text": Modality(tokens=TOKENS)}, outputs=3)).eval()
    save_model(tmp_path, model, ("a", "b", "c"))
    again, _ = load_model(tmp_path)
    assert again.config == model.config
    batch = collate(prompts())
    assert torch.equal(again(batch), model(batch))


def test_weights_of_another_fusion(tmp_path):
    save_language_model(tmp_path, LanguageModel(config("talking", "flat")))
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**about, "fusion": "over-heads"}))
    reseal(tmp_path)
    with pytest.raises(InvalidInput, match=r"'layers\.0\.fusion\.keys'"):
        load_language_model(tmp_path)


# Encoder-decoders


def prompts():
    nested = ([[3, 1, 4], [1, 5], [9, 2, 6, 8]], [[7, 2], [[6, 5, 3], [0, 11]]], [[10, 18, 15]])
    return [from_nested(x, "text") for x in nested]


SEQ2SEQ = [("talking", None), ("talking", 0), ("collaborative", None), ("collaborative", 1), ("over-heads", 1)]


@pytest.mark.parametrize("attention", ["flat", "multiscale"])
@pytest.mark.parametrize(("fusion", "top_k"), SEQ2SEQ)
def test_answers_generated_token_by_token(fusion, top_k, attention):
    model, steps = exact(Seq2Seq(seq2seq_config(fusion, top_k, attention))), 11
    batch, tokens = collate(prompts()), torch.stack([text(steps, seed) for seed in range(3)])
    with torch.no_grad():
        full = model(batch, tokens.flatten(), [steps] * 3).unflatten(0, (3, steps))
        source, cache = model.encode(batch), model.decoder.new_cache(3)
        rows = [model.decoder.read(tokens[:, 0], [1] * 3, cache, memory=source)]
        rows += [model.decoder.step(tokens[:, t], cache, memory=source) for t in range(1, steps)]
        close(torch.stack(rows, 1), full)
        alone = model(collate(prompts()[1:2]), tokens[1], [steps])
    close(alone, full[1])


def test_encoder_decoders_are_saved_and_loaded(tmp_path):
    model = Seq2Seq(seq2seq_config("collaborative", 1, shared_dim=12, fusion_penalty=0.5)).eval()
    save_seq2seq(tmp_path, model)
    again = load_seq2seq(tmp_path)
    assert again.config == model.config
    tokens, batch = text(9), collate(prompts())
    assert torch.equal(again(batch, tokens, [3, 2, 4]), model(batch, tokens, [3, 2, 4]))


def test_every_layer_of_an_encoder_decoder_has_a_penalty():
    model, tokens = Seq2Seq(seq2seq_config("over-heads", 1)), text(9)
    with collecting_penalties() as penalties:
        model.loss(collate(prompts()), tokens, tokens, [3, 2, 4])
    assert len(penalties) == 4  # two layers, each with cross-attention
    with collecting_penalties() as penalties:
        model.eval().loss(collate(prompts()), tokens, tokens, [3, 2, 4])
    assert penalties == []


# Errors


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fusion": "sum"}, "fusion: expected one of concatenation, talking, collaborative, over-heads, got 'sum'"),
        ({"fusion": "collaborative", "shared_dim": 7}, "shared_dim: expected a multiple of 10, .*, got 7"),
        ({"fusion": "collaborative", "shared_dim": 0}, "shared_dim: expected a multiple of 10, .*, got 0"),
        ({"fusion": "collaborative", "shared_dim": -10}, "shared_dim: expected a multiple of 10, .*, got -10"),
        ({"fusion": "collaborative", "shared_dim": 40}, "shared_dim: expected at most 30, .*, got 40"),
        ({"fusion": "over-heads", "fusion_penalty": -1.0}, "penalty: expected a finite number, 0 or more, got -1.0"),
        ({"fusion": "over-heads", "fusion_penalty": float("nan")}, "penalty: expected .*, got nan"),
        ({"fusion": "over-heads", "fusion_penalty": float("inf")}, "penalty: expected .*, got inf"),
    ],
)
def test_invalid_configs(kind, changes, message):
    with pytest.raises(InvalidInput, match=message):
        EncoderConfig(width=30, heads=3, **changes) if kind == "encoder" else config("talking", "flat", **changes)


def test_fusions_that_do_not_fit_a_model():
    own = "fusion: expected .*, got TalkingHeads .* selection"
    with pytest.raises(InvalidInput, match=own):
        language_model("talking", "clustered")
    with pytest.raises(InvalidInput, match=own):
        language_model("talking", "mixed", attention=("flat", "clustered"), branching=None)
    with pytest.raises(InvalidInput, match=own):
        Seq2Seq(seq2seq_config("talking", top_k=1))
    for kind, changes in (("clustered", {}), ("multiscale", {"top_k": 1})):
        with pytest.raises(InvalidInput, match=own):
            encoder(kind, fusion="talking", **changes)
    for kind in ("none", "trilinear", "hierarchical-trilinear"):
        for fusion in ("talking", "collaborative"):
            with pytest.raises(InvalidInput, match=r"expected .*one query and one key.*\. .*concatenation or"):
                encoder(kind, fusion=fusion)
        assert encoder(kind, fusion="over-heads")
