"""Settings are saved in a model's config, read back, and refused if they do not fit."""

import dataclasses
import inspect
import json
import math

import pytest
import torch

from hsa import Hierarchy
from hsa.errors import InvalidInput
from hsa.huggingface import convert, register, revert, settings_of
from hsa.huggingface.settings import DEFAULT, VERSION, LayerSettings, ModelSettings
from tests.huggingface.tiny_models import CLS, SEP, inputs_of, random_ids, run, tiny, transformers, word_tokenizer

WAYS = {
    "clustered": {"branching": (4, 2), "top_k": 1},
    "dropped": {"kind": "multiscale", "branching": [4, 3, 2], "top_k": 2, "near": 1, "pooled_bias": -math.inf},
    "per head": {"kind": "multiscale", "branching": (4, 2), "top_k": 0, "pooled_bias": (0.5, -math.inf, -2.0, 0.0)},
    "tiles": {"branching": (4, 2), "top_k": 1, "tile": 6, "sinks": None},
    "special": {"kind": "multiscale", "branching": (4, 2), "top_k": 0, "sinks": "special"},
    "hierarchical": {"kind": "hierarchical", "branching": (4, 2), "sinks": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_model_saved_and_loaded(way, tmp_path):
    """Loaded as "hsa", it has its settings at once; loaded as usual, it is exact until `convert` applies them."""
    model = convert(tiny("bert", num_hidden_layers=3), [0, -1], tokenizer=word_tokenizer(), **WAYS[way])
    ids, mask = random_ids()
    ids[:, 0], ids[:, 17] = CLS, SEP
    inputs = {"input_ids": ids, "attention_mask": mask}
    expected, settings = run(model, **inputs), settings_of(model)
    model.save_pretrained(tmp_path)
    exact = run(revert(model), **inputs)
    assert (exact - expected).abs().max() > 1e-3

    register()
    options = {"dtype": torch.float64}
    if way != "special":  # hooks for ids come with `convert`
        loaded = transformers.BertModel.from_pretrained(tmp_path, attn_implementation="hsa", **options).eval()
        assert torch.equal(run(loaded, **inputs), expected)
        assert settings_of(loaded) == settings
        assert torch.equal(run(revert(loaded), **inputs), exact)

    plain = transformers.AutoModel.from_pretrained(tmp_path, **options).eval()
    assert torch.equal(run(plain, **inputs), exact)
    assert convert(plain) is plain
    assert settings_of(plain) == settings
    assert torch.equal(run(plain, **inputs), expected)
    assert torch.equal(run(revert(plain), **inputs), exact)
    assert not hasattr(plain.config, "hsa")


def test_thresholds_saved_and_loaded(tmp_path):
    """One per layer, one per head."""
    thresholds = [0.01, (0.5, 0.1, 0.02, 0.3)]
    model = convert(tiny("llama"), branching=(4, 2, 2), tile=8, threshold=thresholds)
    ids, mask = random_ids()
    inputs = {"input_ids": ids, "attention_mask": mask}
    expected, settings = run(model, **inputs), settings_of(model)
    assert [layer.threshold for layer in settings.values()] == thresholds
    model.save_pretrained(tmp_path)
    register()
    options = {"dtype": torch.float64}
    for loaded in (
        transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="hsa", **options).eval(),
        convert(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()),
    ):
        assert torch.equal(run(loaded, **inputs), expected)
        assert settings_of(loaded) == settings


def test_special_ids_need_hooks(tmp_path):
    model = convert(tiny("bert"), tokenizer=word_tokenizer(), **WAYS["special"])
    model.save_pretrained(tmp_path)
    loaded = transformers.BertModel.from_pretrained(tmp_path, attn_implementation="hsa")
    with pytest.raises(InvalidInput, match=r"not known in this forward pass.*Call hsa.huggingface.convert\(model\)"):
        run(loaded, input_ids=random_ids()[0])


def test_a_config_is_json():
    several = {
        "pooled_bias": torch.tensor([0.0, -math.inf, 1.5, 0.25]),
        "threshold": torch.tensor([[0.5, 0.25, 1, 0.5]]),
    }
    model = convert(tiny("llama"), [1], **several)
    written = json.loads(model.config.to_json_string())["hsa"]
    assert written == json.loads(json.dumps(written, allow_nan=False)) == model.config.hsa
    assert written["version"] == VERSION
    settings = LayerSettings(pooled_bias=(0.0, -math.inf, 1.5, 0.25), threshold=(0.5, 0.25, 1.0, 0.5))
    assert settings_of(model) == {1: settings}
    assert ModelSettings.of(model.config).to_json() == written


def test_loaded_as_hsa_without_settings():
    """All layers without a sliding window are converted, which is the default of `convert`."""
    register()
    ids, mask = random_ids([93, 81])
    inputs, counts = {"input_ids": ids, "attention_mask": mask}, mask.bool()
    model = tiny("modernbert")
    exact = run(model, **inputs)
    expected = run(convert(model), **inputs)
    loaded = tiny("modernbert", attn_implementation="hsa")
    assert torch.equal(run(loaded, **inputs), expected)
    assert (exact - expected)[counts].abs().max() > 1e-3
    torch.testing.assert_close(run(revert(loaded), **inputs)[counts], exact[counts])
    assert loaded.config._attn_implementation == "sdpa"
    loaded = tiny("modernbert", attn_implementation="hsa")
    revert(loaded, [3])
    assert settings_of(loaded) == {0: LayerSettings()}
    assert torch.equal(run(loaded, **inputs), run(convert(tiny("modernbert"), [0]), **inputs))


def test_layers_without_numbers():
    """Layers of DistilBERT do not know their numbers, so `convert` numbers them."""
    model = convert(tiny("distilbert"), [1], **WAYS["clustered"])
    inputs, _ = inputs_of("distilbert")
    expected = run(model, **inputs)
    fresh = tiny("distilbert", attn_implementation="hsa", hsa=model.config.hsa)
    with pytest.raises(InvalidInput, match=r"'hsa' for DistilBertSelfAttention.*Call hsa.huggingface.convert\(model\)"):
        run(fresh, **inputs)
    assert torch.equal(run(convert(fresh), **inputs), expected)


def test_a_tree_from_a_function(tmp_path):
    """A config cannot hold a function, so it must be passed again after loading."""

    def trees(ids):
        return Hierarchy.regular([len(i) for i in ids], (5, 3))

    ids, mask = random_ids()
    model = convert(tiny("bert", num_hidden_layers=3), [1], kind="multiscale", tree=trees, top_k=1, sinks=None)
    convert(model, [2], **WAYS["dropped"])
    expected = run(model, input_ids=ids, attention_mask=mask)
    model.save_pretrained(tmp_path)
    loaded = transformers.BertModel.from_pretrained(tmp_path, attn_implementation="hsa", dtype=torch.float64).eval()
    with pytest.raises(InvalidInput, match=r"came from a function.*convert\(model, tree=function\)"):
        run(loaded, input_ids=ids, attention_mask=mask)
    with pytest.raises(
        InvalidInput, match=r"the tree of layer 1 came from a function.*convert\(model, tree=function\)"
    ):
        convert(loaded)
    with pytest.raises(InvalidInput, match="the function itself"):
        convert(loaded, [1], kind="multiscale", tree="function")
    convert(loaded, tree=trees)
    assert settings_of(loaded) == settings_of(model)
    assert torch.equal(run(loaded, input_ids=ids, attention_mask=mask), expected)


WRONG = {
    "newer": (
        {"version": VERSION + 1, "layers": {}},
        rf"version'\]: expected {VERSION}, .*, got {VERSION + 1}. Run: pip install -U hsa",
    ),
    "no version": ({"layers": {}}, "config.hsa: expected settings that hsa.huggingface.convert wrote"),
    "version is true": (
        {"version": True, "layers": {}},
        "config.hsa: expected settings that hsa.huggingface.convert wrote",
    ),
    "a word": ("multiscale", "config.hsa: expected settings that hsa.huggingface.convert wrote"),
    "unknown key": (
        {"version": VERSION, "layers": {"0": {"colour": 1}}},
        r"layers'\]\['0'\]: expected .*, got \['colour'\].*newer",
    ),
    "list of layers": (
        {"version": VERSION, "layers": [0, 1]},
        r"layers'\]: expected settings by layer number, got \[0, 1\]. A newer hsa may",
    ),
    "layer name": ({"version": VERSION, "layers": {"first": {}}}, "expected settings by layer number"),
    "negative layer": ({"version": VERSION, "layers": {"-1": {}}}, "expected settings by layer number"),
    "no settings": ({"version": VERSION, "layers": {"0": 3}}, r"\['0'\]: expected some of .*, got 3. A newer"),
    "too many layers": (
        {"version": VERSION, "layers": {"0": {}, "2": {}}},
        r"layers'\]: expected .* 0 to 1, .*, got 2",
    ),
    "kind": ({"version": VERSION, "layers": {"0": {"kind": "x"}}}, r"\['0'\].kind: expected .*, got 'x'"),
    "branching": ({"version": VERSION, "layers": {"0": {"branching": 8}}}, r"\['0'\].branching: expected .*, got 8"),
    "threshold": (
        {"version": VERSION, "layers": {"0": {"threshold": [0.1, "x"]}}},
        r"\['0'\].threshold\[1\]: expected a number above 0 and at most 1, got 'x'",
    ),
    "bias": (
        {"version": VERSION, "layers": {"0": {"pooled_bias": "much"}}},
        r"\['0'\].pooled_bias: expected .*, got 'much'",
    ),
    "biases": (
        {"version": VERSION, "layers": {"0": {"pooled_bias": [0, None]}}},
        r"\['0'\].pooled_bias: expected .*, got \[0, None\]",
    ),
    "bias not a number": (
        {"version": VERSION, "layers": {"0": {"pooled_bias": "nan"}}},
        r"\['0'\].pooled_bias: expected .*, got nan",
    ),
    "no bias": (
        {"version": VERSION, "layers": {"0": {"pooled_bias": None}}},
        r"\['0'\].pooled_bias: expected .*, got None",
    ),
    "ids": ({"version": VERSION, "layers": {}, "special_ids": ["[CLS]"]}, r"special_ids'\].*expected token ids"),
}


OLD = {
    "version": 1,
    "special_ids": [],
    "layers": {"0": {"operator": "multiscale", "hierarchy": "keys", "branching": [8, 2], "refine": 8, "share": None}},
}


@pytest.mark.parametrize("version", [1, 2])
def test_a_model_that_an_earlier_hsa_converted(version, tmp_path):
    """All uses are refused until `revert` removes the old conversion."""
    register()
    tiny("bert", hsa={**OLD, "version": version}).save_pretrained(tmp_path)
    message = (
        rf"config.hsa\['version'\]: expected 3, got {version}, from a model that hsa 0.{version} converted.*"
        "then convert the model again"
    )
    model = transformers.BertModel.from_pretrained(tmp_path, attn_implementation="hsa", dtype=torch.float64).eval()
    ids, _ = random_ids()
    for use in (convert, settings_of, lambda model: convert(model, [0]), lambda model: run(model, input_ids=ids)):
        with pytest.raises(InvalidInput, match=message):
            use(model)
    exact = run(revert(model), input_ids=ids)
    assert not hasattr(model.config, "hsa")
    assert settings_of(convert(model, [1], **WAYS["clustered"])) == {1: LayerSettings(**WAYS["clustered"])}
    assert (run(model, input_ids=ids) - exact).abs().max() > 1e-3


@pytest.mark.parametrize("name", WRONG)
def test_configs_that_are_wrong(name):
    written, message = WRONG[name]
    register()
    model = tiny("bert", hsa=written, attn_implementation="hsa")
    for use in (convert, lambda model: run(model, input_ids=random_ids()[0])):
        with pytest.raises(InvalidInput, match=message):
            use(model)
    with pytest.raises(InvalidInput, match=message):
        settings_of(model)
    with pytest.raises(InvalidInput, match=message):
        convert(model, [0], top_k=3)


REFUSED = [
    ({"kind": "linear"}, r"kind: expected one of 'clustered', 'multiscale', 'hierarchical', got 'linear'"),
    ({"kind": "multiscale", "tree": "oak"}, r"tree: expected one of 'windows', 'sentences' or a function, got 'oak'"),
    ({"tree": "windows"}, r"tree: expected None with kind='clustered'.*, got 'windows'. Pass kind='multiscale'"),
    ({"branching": ()}, r"branching: expected .*, got \(\)"),
    ({"branching": (4, 1)}, r"branching\[1\]: expected 2 or more, got 1"),
    ({"branching": "42"}, "branching: expected .*, got '42'"),
    ({"near": -1}, "near: expected .*, got -1"),
    ({"near": 1}, "near: expected 0 with kind='clustered', got 1. Select more groups with top_k"),
    ({"top_k": 1.5}, "top_k: expected .*, got 1.5"),
    ({"top_k": True}, "top_k: expected .*, got True"),
    ({"tile": 0}, "tile: expected .*, got 0"),
    ({"threshold": 0}, "threshold: expected a number above 0 and at most 1, got 0"),
    ({"threshold": 0.1, "top_k": 2}, "top_k: expected None with a threshold, got 2. Pass one of the two"),
    (
        {"kind": "multiscale", "tree": "sentences", "threshold": 0.1},
        "threshold: expected None, with top_k in its place, in layer 0, which is not causal, got 0.1. Only clustered keys",
    ),
    ({"threshold": 0.1, "sinks": 2}, "sinks: expected 1, the default, in layer 0, which is not causal, got 2"),
    (
        {"kind": "multiscale", "threshold": 0.1, "near": 1},
        "near: expected 0 with threshold or top_k in layer 0, .*, got 1",
    ),
    ({"sinks": "first"}, "sinks: expected .*, got 'first'"),
    ({"pooled_bias": math.inf}, "pooled_bias: expected .*, got inf"),
    ({"pooled_bias": (0.0, 0.0)}, "expected one number, or one for each of the 4 heads of layer 0, got 2 numbers"),
    ({"kind": "hierarchical", "near": 1}, "near: expected 0, the default, with kind='hierarchical', got 1"),
    (
        {"kind": "hierarchical", "threshold": 0.1},
        "threshold: expected None, the default, with kind='hierarchical', got",
    ),
    ({"kind": "hierarchical", "pooled_bias": -1.0}, "pooled_bias: expected .*, got -1.0"),
    ({"sinks": "special"}, r"tokenizer: not given; expected the model's tokenizer.*tokenizer=AutoTokenizer"),
    (
        {"kind": "multiscale", "tree": "sentences"},
        r"tokenizer: not given; expected the model's tokenizer.*tokenizer=AutoTokenizer",
    ),
]


CAUSAL_REFUSED = [
    (
        {"threshold": [0.1, 0.1, 0.1, 0.1]},
        r"threshold: expected one number, or an entry for each of the 2 layers \[0, 1\], got a sequence of 4. An entry is",
    ),
    ({"threshold": [0.1, 2]}, r"threshold\[1\]: expected a number above 0 and at most 1, got 2"),
    ({"threshold": [0.1, [0.1, 0, 0.1, 0.1]]}, r"threshold\[1\]\[1\]: expected a number above 0 and at most 1, got 0"),
    ({"threshold": [0.1, None]}, r"threshold\[1\]: expected a number above 0 and at most 1, got None"),
    (
        {"threshold": [0.1, [0.1, 0.2]]},
        "threshold: expected one number, or one for each of the 4 heads of layer 1, got 2 numbers. Pass as many numbers as",
    ),
    ({"threshold": [0.1, 0.1], "top_k": 2}, "top_k: expected None with a threshold, got 2. Pass one of the two"),
    (
        {"branching": (8, 2)},
        r"branching: expected keys per group, groups per node and nodes per chunk, .*, got \(8, 2\)",
    ),
    ({"tile": 48}, "tile: expected a power of two from 1 to 128, got 48"),
    ({"branching": (4, 2, 2)}, "tile: expected at most 16, the keys of a chunk"),
    ({"sinks": 2}, "sinks: expected 1, the default, in layer 0, which is causal, got 2. The group of the first token"),
    ({"sinks": "special"}, "sinks: expected 1, .*, got 'special'"),
    ({"kind": "multiscale", "top_k": 1, "near": 1}, "near: expected 0 with threshold or top_k in layer 0, .*, got 1"),
    (
        {"kind": "multiscale", "tree": len, "threshold": 0.1},
        "threshold: expected None, with top_k in its place, in layer 0, which is causal, got 0.1",
    ),
]


@pytest.mark.parametrize(("settings", "message"), CAUSAL_REFUSED, ids=[str(settings) for settings, _ in CAUSAL_REFUSED])
def test_settings_that_are_wrong_in_decoders(settings, message):
    model = tiny("llama")
    with pytest.raises(InvalidInput, match=message):
        convert(model, **settings)
    assert not hasattr(model.config, "hsa")


def test_defaults_depend_on_the_layer():
    encoder, decoder = (LayerSettings().resolved(causal) for causal in (False, True))
    assert (encoder.branching, encoder.threshold, encoder.top_k, encoder.tile) == ((8, 2), None, 8, 1)
    assert (decoder.branching, decoder.threshold, decoder.top_k, decoder.tile) == ((8, 8, 4), 1 / 256, None, 64)
    few = LayerSettings(top_k=3).resolved(causal=True)
    assert (few.threshold, few.top_k) == (None, 3)
    windows = LayerSettings(kind="multiscale")
    assert (windows.resolved(causal=False).top_k, windows.resolved(causal=True).top_k) == (8, 0)
    assert windows.resolved(causal=True).branching == (8, 2)
    selecting = LayerSettings(kind="multiscale", threshold=0.1)
    assert (selecting.uses_tiles(causal=True), windows.uses_tiles(causal=True)) == (True, False)
    assert selecting.resolved(causal=True).branching == (8, 8, 4)


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[str(settings) for settings, _ in REFUSED])
def test_settings_that_are_wrong(settings, message):
    model = tiny("bert")
    with pytest.raises(InvalidInput, match=message):
        convert(model, **settings)
    assert model.config._attn_implementation == "sdpa"
    assert not hasattr(model.config, "hsa")


def test_settings_as_json():
    """Settings read from JSON equal those written."""
    for way in (*WAYS.values(), {"threshold": (0.5, 0.1)}):
        settings = LayerSettings(**way)
        assert LayerSettings.from_json("here", json.loads(json.dumps(settings.to_json()))) == settings
    assert LayerSettings.from_json("here", {}) == LayerSettings()


def test_settings_are_keywords_of_convert():
    """The signature shows the defaults of `LayerSettings`. A keyword equal to its default still counts as passed."""
    signature = inspect.signature(convert)
    names = [field.name for field in dataclasses.fields(LayerSettings)]
    assert list(signature.parameters) == ["model", "layers", "tokenizer", *names]
    for name in names:
        assert repr(signature.parameters[name].default) == repr(getattr(LayerSettings(), name))
        assert signature.parameters[name].default is getattr(DEFAULT, name)
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        convert(tiny("bert"), colour=3)
    model = convert(tiny("bert"), top_k=3)
    assert settings_of(convert(model))[0].top_k == 3
    assert settings_of(convert(model, top_k=LayerSettings.top_k))[0] == LayerSettings()
