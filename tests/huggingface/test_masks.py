"""Padding on any side and in any form of mask changes nothing; masks with other patterns are refused."""

import gc

import pytest
import torch

from hsa.errors import InvalidInput
from hsa.huggingface import convert, revert
from hsa.huggingface.masks import BINDINGS
from tests.huggingface.tiny_models import (
    CLS,
    SEP,
    VOCABULARY,
    byte_tokenizer,
    random_ids,
    run,
    tiny,
    word_tokenizer,
)

WAYS = {
    "clustered": {"kind": "clustered", "branching": (4, 2), "top_k": 1},
    "clustered, tiles": {"kind": "clustered", "branching": (4, 2), "top_k": 1, "tile": 5, "sinks": None},
    "windows": {"kind": "multiscale", "branching": (4, 2), "top_k": 1, "near": 1},
    "windows, biased": {"kind": "multiscale", "branching": (4, 2), "top_k": 2, "pooled_bias": -1.0},
    "sentences": {"kind": "multiscale", "tree": "sentences", "branching": (4, 2), "top_k": 1, "sinks": "special"},
    "hierarchical": {"kind": "hierarchical", "branching": (4, 2)},
    "hierarchical, sentences": {"kind": "hierarchical", "tree": "sentences", "branching": (4, 2), "sinks": "special"},
}
CAUSAL = {
    "clusters": {"branching": (4, 2, 2), "tile": 8, "threshold": 1 / 8},
    "windows": {"kind": "multiscale", "branching": (4, 2, 2), "tile": 4, "top_k": 1},
    "windows, near": {"kind": "multiscale", "branching": (4, 2), "top_k": 0, "near": 1},
}
TOKENIZER = word_tokenizer()


def words(side="right"):
    """Return ids between [CLS] and [SEP], with full stops among them."""
    ids, mask = random_ids(side=side)
    ids = ids.where((mask == 0) | (ids < 22), ids % 18 + 4)
    for row, seen in enumerate(mask.bool()):
        first, *_, last = seen.nonzero().flatten().tolist()
        ids[row, first], ids[row, last] = CLS, SEP
        ids[row, first + 9], ids[row, first + 20] = TOKENIZER.convert_tokens_to_ids([".", "!"])
    return ids, mask


def converted(family, way, **changes):
    return convert(tiny(family, **changes), tokenizer=TOKENIZER, **way)


def positions(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_is_its_sequences_alone(way, side):
    """Ids at padded positions do not matter."""
    if "sentences" in way:
        pytest.importorskip("sentencex")
    model = converted("bert", WAYS[way])
    ids, mask = words(side)
    position_ids = positions(mask)
    together = run(model, input_ids=ids, attention_mask=mask, position_ids=position_ids)
    for row, seen in enumerate(mask.bool()):
        alone = run(model, input_ids=ids[row, seen][None], position_ids=position_ids[row, seen][None])
        torch.testing.assert_close(together[row, seen], alone[0], rtol=1e-9, atol=1e-9)
    others = ids.where(mask.bool(), 7)
    again = run(model, input_ids=others, attention_mask=mask, position_ids=position_ids)
    assert torch.equal(again[mask.bool()], together[mask.bool()])
    assert (
        run(revert(model), input_ids=ids, attention_mask=mask, position_ids=position_ids) - together
    ).abs().max() > 1e-3


@pytest.mark.parametrize("way", CAUSAL)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_padded_batch_is_its_sequences_alone_in_decoders(way, side, family):
    model = converted(family, CAUSAL[way])
    ids, mask = random_ids(side=side)
    position_ids = positions(mask)
    together = run(model, input_ids=ids, attention_mask=mask, position_ids=position_ids)
    for row, seen in enumerate(mask.bool()):
        alone = run(model, input_ids=ids[row, seen][None])
        torch.testing.assert_close(together[row, seen], alone[0], rtol=1e-9, atol=1e-9)
    others = ids.where(mask.bool(), 7)
    again = run(model, input_ids=others, attention_mask=mask, position_ids=position_ids)
    assert torch.equal(again[mask.bool()], together[mask.bool()])


def test_short_sequences():
    """Sequences of one token, of as many tokens as sinks, and shorter than a family."""
    for way in (WAYS["clustered"], WAYS["windows"], WAYS["hierarchical"]):
        for sinks in (None, 2):
            model = convert(tiny("bert"), **{**way, "sinks": sinks})
            ids, mask = random_ids([1, 2, 3, 40])
            together = run(model, input_ids=ids, attention_mask=mask)
            for row, seen in enumerate(mask.bool()):
                torch.testing.assert_close(together[row, seen], run(model, input_ids=ids[row, seen][None])[0])


def test_a_batch_with_an_empty_sequence():
    ids, mask = random_ids()
    mask[1] = 0
    with pytest.raises(InvalidInput, match=r"mask\[1\]: no token"):
        run(convert(tiny("bert"), **WAYS["windows"]), input_ids=ids, attention_mask=mask)


def four_dimensional(mask, causal, kind):
    """Return masks `[batch, 1, queries, keys]` in the forms that transformers and users make."""
    width = mask.shape[1]
    seen = mask.bool()[:, None, None, :].expand(-1, -1, width, -1)
    if causal:
        seen = seen & torch.ones(width, width, dtype=torch.bool).tril()
    if kind == "bool":
        return seen
    lowest = torch.finfo(torch.float64).min if kind == "lowest" else -torch.inf
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, lowest)


@pytest.mark.parametrize("kind", ["bool", "lowest", "infinite"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_masks_of_four_dimensions(kind, side, family):
    """They have the same effect as two-dimensional masks, in converted and in exact layers."""
    causal = family == "llama"
    ids, mask = words(side)
    for layers in ([1], [0, 1]):
        way = CAUSAL["clusters"] if causal else {**WAYS["windows"], "sinks": "special"}
        model = convert(tiny(family), layers, tokenizer=TOKENIZER, **way)
        inputs = {"input_ids": ids, "position_ids": positions(mask)}
        expected = run(model, attention_mask=mask, **inputs)[mask.bool()]
        result = run(model, attention_mask=four_dimensional(mask, causal, kind), **inputs)[mask.bool()]
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)


def test_a_mask_of_four_dimensions_for_all_sequences():
    """`[1, 1, 1, keys]` and `[1, heads, queries, keys]`."""
    model = convert(tiny("bert"), **WAYS["windows"])
    ids, mask = random_ids([41, 41])
    mask[:, 30:] = 0
    expected = run(model, input_ids=ids, attention_mask=mask)[:, :30]
    for shape in ((1, 1, 1, 41), (1, 4, 41, 41), (2, 1, 1, 41)):
        one = mask.bool()[: shape[0], None, None, :].expand(shape)
        torch.testing.assert_close(run(model, input_ids=ids, attention_mask=one)[:, :30], expected)


def test_a_causal_mask_makes_an_encoder_causal():
    model = convert(tiny("bert"), **CAUSAL["windows"])
    ids, mask = random_ids()
    causal = four_dimensional(mask, True, "bool")
    before = run(model, input_ids=ids, attention_mask=causal)
    ids[:, 20:] = 9
    assert torch.equal(run(model, input_ids=ids, attention_mask=causal)[:, :20], before[:, :20])
    convert(model, **WAYS["hierarchical"])
    with pytest.raises(InvalidInput, match="in layer 0, which is causal, got 'hierarchical'"):
        run(model, input_ids=ids, attention_mask=causal)


def strange_masks(batch=2, width=20):
    seen = torch.ones(batch, 1, width, width, dtype=torch.bool)
    zeros = torch.zeros(batch, 1, width, width, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    per_head = seen.expand(-1, 4, -1, -1).clone()
    per_head[:, 1, :, 3] = False
    one_pair = seen.tril()
    one_pair[1, 0, 9, 4] = False
    return {
        "random": torch.rand(seen.shape, generator=generator) < 0.7,
        "bias": torch.randn(seen.shape, generator=generator, dtype=torch.float64),
        "bias of one pair": zeros.index_put(
            (torch.tensor([0]), torch.tensor([0]), torch.tensor([3])), zeros[0, 0, 0] - 1
        ),
        "reversed": seen.triu(),
        "window": seen.tril() & ~seen.tril(-6),
        "blocks": torch.block_diag(torch.ones(9, 9), torch.ones(11, 11)).bool().expand_as(seen),
        "heads apart": per_head,
        "one pair": one_pair,
        "numbers": seen.long(),
    }


@pytest.mark.parametrize("name", strange_masks())
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_masks_with_other_patterns_are_refused(name, family):
    model = tiny(family)
    ids, _ = random_ids([20, 20])
    mask = strange_masks()[name]
    entering = []  # inputs of the second layer
    layers = model.model.layers if family == "llama" else model.encoder.layer
    layers[1].register_forward_pre_hook(lambda module, arguments: entering.append(arguments[0]))
    if name != "numbers":  # not supported by exact layers either
        run(model, input_ids=ids, attention_mask=mask)
        convert(model, [1], **CAUSAL["windows"])
        with pytest.raises(InvalidInput, match=r"attention_mask: .*with another pattern in converted layer 1"):
            run(model, input_ids=ids, attention_mask=mask)
        torch.testing.assert_close(*entering)
    convert(model, [0], **CAUSAL["windows"])
    with pytest.raises(InvalidInput, match=r"attention_mask: .*with another pattern in converted layer 0"):
        run(model, input_ids=ids, attention_mask=mask)


def test_packed_sequences_are_refused():
    """transformers recognises several texts in one row by restarting positions. Exact layers support them."""
    model = tiny("llama")
    ids, _ = random_ids([20])
    packed = torch.cat([torch.arange(9), torch.arange(11)])[None]
    whole = run(model, input_ids=ids)
    exact = run(model, input_ids=ids, position_ids=packed, use_cache=False)
    assert (exact - whole)[:, 9:].abs().max() > 1e-3
    convert(model, kind="multiscale", branching=(4, 2), near=99)
    with pytest.raises(InvalidInput, match="Pad packed sequences to a batch"):
        run(model, input_ids=ids, position_ids=packed, use_cache=False)


def test_inputs_embeds_have_no_ids():
    ids, mask = words()
    model = tiny("bert")
    vectors = model.get_input_embeddings()(ids)
    expected = run(convert(model, **WAYS["clustered"]), input_ids=ids, attention_mask=mask)
    assert torch.equal(run(model, inputs_embeds=vectors, attention_mask=mask), expected)
    for way in (
        {**WAYS["clustered"], "sinks": "special"},
        WAYS["sentences"],
        {"kind": "multiscale", "tree": lambda ids: None},
    ):
        convert(model, tokenizer=TOKENIZER, **way)
        with pytest.raises(InvalidInput, match=r"input_ids: not known in this forward pass; .*pass input_ids"):
            run(model, inputs_embeds=vectors, attention_mask=mask)


def test_ids_of_an_earlier_pass_are_forgotten():
    """Ids do not outlive a call of an inner model, or a failed pass."""
    torch.manual_seed(1)
    from transformers import BertForMaskedLM

    whole = BertForMaskedLM(tiny("bert").config).double().eval()
    ids, mask = words()
    convert(whole, tokenizer=TOKENIZER, kind="multiscale", branching=(4, 2), top_k=1, sinks="special")
    others, _ = words("left")
    states = run(whole.bert, input_ids=others, attention_mask=mask)
    run(whole, input_ids=ids, attention_mask=mask)
    assert torch.equal(run(whole.bert, input_ids=others, attention_mask=mask), states)
    with pytest.raises(InvalidInput, match="input_ids: not known in this forward pass"):
        run(whole, inputs_embeds=whole.get_input_embeddings()(ids))
    with pytest.raises(IndexError):
        run(whole, input_ids=ids + VOCABULARY)
    with pytest.raises(InvalidInput, match="input_ids: not known in this forward pass"):
        run(whole, inputs_embeds=whole.get_input_embeddings()(ids))


def test_a_modified_mask():
    """The mask has the same storage but new values."""
    ids, mask = random_ids([41, 41])
    model = convert(tiny("bert"), **WAYS["windows"])
    seen = four_dimensional(mask, False, "bool").clone()
    before = run(model, input_ids=ids, attention_mask=seen)
    with torch.inference_mode():
        frozen = seen.clone()
        torch.testing.assert_close(model(input_ids=ids, attention_mask=frozen)[0], before)
    for changing in (seen, frozen):
        with torch.inference_mode(changing.is_inference()):
            changing[:, :, :, 30:] = False
            after = model(input_ids=ids, attention_mask=changing)[0][:, :30]
        mask[:, 30:] = 0
        torch.testing.assert_close(after, run(model, input_ids=ids, attention_mask=mask)[:, :30])


def test_past_masks_are_freed():
    ids, mask = random_ids()
    for family in ("bert", "llama"):
        model = convert(tiny(family), [1], kind="multiscale", branching=(4, 2), near=1)
        for given in (mask, None, four_dimensional(mask, family == "llama", "bool")):
            run(model, input_ids=ids, attention_mask=given)
        del given
    gc.collect()
    assert len(BINDINGS) == 0


def test_a_copied_mask(monkeypatch):
    """Models on several devices copy the mask before some layers."""
    from transformers.models.llama import modeling_llama

    ids, mask = random_ids(side="left")
    for layers in ([0], [0, 1]):
        model = convert(tiny("llama"), layers, **CAUSAL["clusters"])
        expected = run(model, input_ids=ids, attention_mask=mask)
        forward = modeling_llama.LlamaAttention.forward

        def copying(self, *arguments, attention_mask, forward=forward, **options):
            return forward(self, *arguments, attention_mask=attention_mask.clone(), **options)

        with monkeypatch.context() as patched:
            patched.setattr(modeling_llama.LlamaAttention, "forward", copying)
            copied = run(model, input_ids=ids, attention_mask=mask)
        assert torch.equal(copied[mask.bool()], expected[mask.bool()])


def test_byte_tokens_as_sinks():
    """A byte-level tokenizer has special ids, but no [CLS]."""
    tokenizer = byte_tokenizer(["a cat sat"])
    ids, mask = random_ids()
    ids[:, 0], ids[:, 12] = tokenizer.bos_token_id, tokenizer.eos_token_id
    model = tiny("bert")
    settings = {"kind": "multiscale", "branching": (4, 2), "top_k": 0}
    special = run(convert(model, tokenizer=tokenizer, sinks="special", **settings), input_ids=ids, attention_mask=mask)
    none = run(convert(model, sinks=None, **settings), input_ids=ids, attention_mask=mask)
    assert (special - none)[mask.bool()].abs().max() > 1e-3
