"""Conversion of some or all layers, its reversal, and models that are refused."""

import copy
import pickle
import sys
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from hsa.errors import InvalidInput, MissingExtra, Unsupported
from hsa.huggingface import convert, convert_as, register, revert, settings_of
from hsa.huggingface.layers import attention_layers
from hsa.huggingface.settings import LayerSettings
from tests.huggingface.tiny_models import CLS, SEP, inputs_of, random_ids, run, tiny, transformers, word_tokenizer

FEW = {"kind": "multiscale", "branching": (4, 2), "top_k": 0}


def test_layers_are_converted_and_reverted_one_by_one():
    model = tiny("bert", num_hidden_layers=4)
    inputs, _ = inputs_of("bert")
    exact = run(model, **inputs)
    convert(model, [1], **FEW)
    only_one = run(model, **inputs)
    convert(model, [-1, 2], top_k=3, branching=(4, 2))
    assert settings_of(model) == {
        1: LayerSettings(**FEW),
        2: LayerSettings(top_k=3, branching=(4, 2)),
        3: LayerSettings(top_k=3, branching=(4, 2)),
    }
    convert(model, 0)  # defaults
    convert(model, [2], **FEW)  # changed
    assert {n: s.top_k for n, s in settings_of(model).items()} == {0: None, 1: 0, 2: 0, 3: 3}
    everything = run(model, **inputs)
    convert(model)  # changes nothing
    assert torch.equal(run(model, **inputs), everything)
    revert(model, [0, 2])
    revert(model, -1)
    assert settings_of(model) == {1: LayerSettings(**FEW)}
    assert torch.equal(run(model, **inputs), only_one)
    revert(model, [0])  # exact already
    revert(model, [1])
    assert settings_of(model) == {}
    assert torch.equal(run(model, **inputs), exact)


HEADS = (0.1, 0.2, 0.05, 0.3), (0.5, 0.25, 0.5, 0.1)


@pytest.mark.parametrize(
    ("layers", "thresholds", "expected"),
    [
        (None, [0.5, 0.1, 0.01], {0: 0.5, 1: 0.1, 2: 0.01}),
        ([-1, 0], [0.5, list(HEADS[0])], {2: 0.5, 0: HEADS[0]}),
        ({-1, 0}, (0.5, 0.1), {0: 0.5, 2: 0.1}),  # in the order of their numbers
        (1, torch.tensor([0.25]), {1: 0.25}),
        ([2, 1], np.array(HEADS), {2: HEADS[0], 1: HEADS[1]}),
    ],
    ids=["numbers", "per head", "set", "tensor", "array"],
)
def test_a_threshold_for_each_layer(layers, thresholds, expected):
    tiles = {"branching": (4, 2, 2), "tile": 8}
    model, one_by_one, again = (tiny("llama", num_hidden_layers=3) for _ in range(3))
    convert(model, layers, threshold=thresholds, **tiles)
    assert {number: layer.threshold for number, layer in settings_of(model).items()} == expected
    for number, threshold in expected.items():
        convert(one_by_one, [number], threshold=[threshold], **tiles)
    convert_as(again, settings_of(model))
    ids, _ = random_ids()
    for other in (one_by_one, again):
        assert settings_of(other) == settings_of(model)
        assert torch.equal(run(other, input_ids=ids), run(model, input_ids=ids))


@pytest.mark.parametrize("layers", [[2], [-3], "01", [0.5], [True], None, [], 1.0])
def test_layers_that_do_not_exist(layers):
    model = tiny("bert")
    if layers is None:
        layers = object()
    with pytest.raises(InvalidInput, match="layers: expected"):
        convert(model, layers)
    convert(model)
    with pytest.raises(InvalidInput, match="layers: expected"):
        revert(model, layers)


def test_copies_and_pickles():
    """Copies give the same outputs and are reverted on their own."""
    ids, mask = random_ids()
    ids[:, 0], ids[:, 12] = CLS, SEP
    model = tiny("bert")
    exact = run(model, input_ids=ids, attention_mask=mask)
    convert(model, tokenizer=word_tokenizer(), sinks="special", **FEW)
    expected = run(model, input_ids=ids, attention_mask=mask)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(other, input_ids=ids, attention_mask=mask), expected)
        revert(other)
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in other.modules())
        assert torch.equal(run(other, input_ids=ids, attention_mask=mask), exact)
        assert torch.equal(run(model, input_ids=ids, attention_mask=mask), expected)


def test_hooks_exist_only_while_ids_are_needed():
    def hooks(model):
        return any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())

    model = convert(tiny("bert"), **FEW)
    assert not hooks(model)
    assert hooks(convert(model, [1], tokenizer=word_tokenizer(), sinks="special", **FEW))
    assert not hooks(convert(model, [1], **FEW))


def test_remaining_layers_know_their_ids():
    ids, mask = random_ids()
    ids[:, 0], ids[:, 12] = CLS, SEP
    inputs = {"input_ids": ids, "attention_mask": mask}
    special = {"tokenizer": word_tokenizer(), "sinks": "special", **FEW}
    only_one = run(convert(tiny("bert"), [1], **special), **inputs)
    assert torch.equal(run(revert(convert(tiny("bert"), **special), [0]), **inputs), only_one)


def test_a_model_inside_another():
    """Both the outer and the inner model can be converted, and either one reverts everything."""
    torch.manual_seed(1)
    whole = transformers.BertForMaskedLM(tiny("bert").config).double().eval()
    inputs, _ = inputs_of("bert")
    exact = run(whole, **inputs)
    kinds = (whole, whole.bert)
    for first in kinds:
        for second in kinds:
            for third in kinds:
                convert(first, [0], tokenizer=word_tokenizer(), sinks="special", **FEW)
                convert(second, [1], **FEW)
                assert sorted(settings_of(whole)) == sorted(settings_of(whole.bert)) == [0, 1]
                assert (run(whole, **inputs) - exact).abs().max() > 1e-3
                revert(third)
                assert torch.equal(run(whole, **inputs), exact)
                assert not any(module._forward_pre_hooks or module._forward_hooks for module in whole.modules())


def test_attention_set_by_hand():
    """Another attention implementation takes effect until the model is converted again."""
    model = convert(tiny("bert"), **FEW)
    inputs, _ = inputs_of("bert")
    expected = run(model, **inputs)
    model.set_attn_implementation("eager")
    assert (run(model, **inputs) - expected).abs().max() > 1e-3
    assert torch.equal(run(convert(model), **inputs), expected)
    model.set_attn_implementation("eager")
    revert(model)
    assert model.config._attn_implementation == "eager"


OWN = {
    "mpnet": lambda: transformers.MPNetModel(
        transformers.MPNetConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=40, vocab_size=59
        )
    ),
    "deberta": lambda: transformers.DebertaV2Model(
        transformers.DebertaV2Config(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=40, vocab_size=59
        )
    ),
    "longformer": lambda: transformers.LongformerModel(
        transformers.LongformerConfig(
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=40,
            vocab_size=59,
            attention_window=8,
        )
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_models_with_attention_of_their_own(name):
    model = OWN[name]()
    with pytest.raises(
        Unsupported,
        match=rf"{type(model).__name__} computes its attention itself.*families that use the interface include",
    ):
        convert(model)
    assert not hasattr(model.config, "hsa")


def test_objects_that_are_not_transformers_models():
    for thing in (nn.Linear(2, 2), nn.TransformerEncoderLayer(8, 2), None, "bert-base-uncased"):
        with pytest.raises(Unsupported, match=rf"{type(thing).__name__} is not a transformers model"):
            convert(thing)


def test_an_encoder_and_a_decoder():
    """The encoder is converted and the decoder stays exact, although they share a config."""
    model = tiny("bart")
    inputs, counts = inputs_of("bart")
    exact = run(model, **inputs)
    for part in (model, model.model, model.get_decoder()):
        with pytest.raises(Unsupported, match=r"convert the encoder alone: convert\(model.get_encoder\(\)\)"):
            convert(part)
    encoder = model.get_encoder()
    states = run(encoder, **inputs)
    convert(encoder, kind="multiscale", branching=(4, 2), top_k=0, near=99)
    torch.testing.assert_close(run(model, **inputs)[counts], exact[counts])
    convert(encoder, [1], kind="hierarchical", branching=(4, 2))
    assert (run(encoder, **inputs) - states)[counts].abs().max() > 1e-3
    written = run(model, **inputs)
    assert (written - exact)[counts].abs().max() > 1e-3
    # The decoder alone, on the same encoder states, is unchanged.
    later = torch.arange(3, 20)[None].expand(3, -1)
    decoder = {"input_ids": later, "encoder_hidden_states": states, "encoder_attention_mask": inputs["attention_mask"]}
    with_ours = run(model.get_decoder(), **decoder)
    revert(encoder)
    torch.testing.assert_close(run(model.get_decoder(), **decoder), with_ours)
    assert torch.equal(run(model, **inputs), exact)


def test_an_encoder_and_a_decoder_saved_and_loaded(tmp_path):
    model = tiny("bart")
    inputs, _ = inputs_of("bart")
    convert(model.get_encoder(), [1], **FEW)
    expected = run(model, **inputs)
    model.save_pretrained(tmp_path)
    register()
    kind, options = transformers.BartForConditionalGeneration, {"dtype": torch.float64}
    loaded = kind.from_pretrained(tmp_path, attn_implementation="hsa", **options).eval()
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)  # last bits depend on where weights lie in memory
    close(run(loaded, **inputs), expected)
    loaded = kind.from_pretrained(tmp_path, **options).eval()
    convert(loaded.get_encoder())
    close(run(loaded, **inputs), expected)
    ids, mask = random_ids([20, 17])
    wrote = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, num_beams=1)
    assert torch.equal(wrote, loaded.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, num_beams=1))


def test_models_of_several_parts():
    """Parts with configs of their own are converted one by one."""
    shape = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_hidden_layers": 2}
    text = {**shape, "vocab_size": 59, "bos_token_id": CLS, "eos_token_id": SEP, "max_position_embeddings": 97}
    config = transformers.CLIPConfig(text_config=text, vision_config={**shape, "image_size": 28, "patch_size": 4})
    model = transformers.CLIPModel(config).double().eval()
    with pytest.raises(Unsupported, match="configs of their own"):
        convert(model)
    ids, mask = random_ids()
    inputs = {"input_ids": ids, "attention_mask": mask}
    exact = run(model.text_model, **inputs)
    convert(model.text_model, kind="multiscale", branching=(4, 2), top_k=0, near=99)
    torch.testing.assert_close(run(model.text_model, **inputs)[mask.bool()], exact[mask.bool()])
    pictures = inputs_of("vit")[0]
    patches = run(model.vision_model, **pictures)
    convert(model.vision_model, [1], **FEW)
    assert (run(model.vision_model, **pictures) - patches).abs().max() > 1e-6
    assert sorted(settings_of(model.vision_model)) == [1]
    assert sorted(settings_of(model.text_model)) == [0, 1]


def test_layers_are_in_the_order_of_the_model():
    for family in ("bert", "llama", "gpt2", "modernbert"):
        modules = attention_layers(tiny(family))
        assert [module.layer_idx for module in modules] == list(range(len(modules)))


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"pip install 'hsa\[hf\]'"):
        register()


def test_exports():
    import hsa.huggingface as here

    assert {name: getattr(here, name).__name__ for name in here.__all__} == {name: name for name in here.__all__}
    with pytest.raises(AttributeError, match="no attribute 'transmute'"):
        here.transmute  # noqa: B018
