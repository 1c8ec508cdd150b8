"""Settings travel in a model's config: written, read back, and refused when they do not fit."""

import dataclasses
import inspect
import json
import math

import pytest
import torch

from hsa import Hierarchy
from hsa.errors import InvalidInput
from hsa.huggingface import convert, register, revert, settings_of
from hsa.huggingface.settings import DEFAULT, VERSION, LayerSettings, ModelSettings, leaves_of_a_node
from tests.huggingface.tiny_models import CLS, SEP, inputs_of, random_ids, run, tiny, transformers, word_tokenizer

WAYS = {
    "clustered": {"branching": (4, 2), "top_k": 1},
    "dropped": {"kind": "multiscale", "branching": [4, 3, 2], "top_k": 2, "near": 1, "pooled_bias": -math.inf},
    "per head": {"kind": "multiscale", "branching": (4, 2), "top_k": 0, "pooled_bias": (0.5, -math.inf, -2.0, 0.0)},
    "tiles": {"branching": (4, 2), "top_k": 1, "tile": 6, "beam": 3, "sinks": None},
    "special": {"kind": "multiscale", "branching": (4, 2), "top_k": 0, "sinks": "special"},
    "hierarchical": {"kind": "hierarchical", "branching": (4, 2), "sinks": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_saved_model_comes_back(way, tmp_path):
    """Loaded as "hsa" it runs as it did; loaded as usual it is exact until `convert` gives it its settings back."""
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


def test_special_ids_need_hooks(tmp_path):
    model = convert(tiny("bert"), tokenizer=word_tokenizer(), **WAYS["special"])
    model.save_pretrained(tmp_path)
    loaded = transformers.BertModel.from_pretrained(tmp_path, attn_implementation="hsa")
    with pytest.raises(InvalidInput, match=r"call hsa.huggingface.convert\(model\) after loading"):
        run(loaded, input_ids=random_ids()[0])


def test_a_config_is_json():
    model = convert(tiny("llama"), [1], pooled_bias=torch.tensor([0.0, -math.inf, 1.5, 0.25]), chunk=16)
    written = json.loads(model.config.to_json_string())["hsa"]
    assert written == json.loads(json.dumps(written, allow_nan=False)) == model.config.hsa
    assert written["version"] == VERSION
    assert settings_of(model) == {1: LayerSettings(pooled_bias=(0.0, -math.inf, 1.5, 0.25), chunk=16)}
    assert ModelSettings.of(model.config).to_json() == written


def test_loaded_with_nothing_said():
    """Then every layer that sees the whole text is converted, as `convert` does by default."""
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
    """DistilBERT's do not know theirs: `convert` numbers them."""
    model = convert(tiny("distilbert"), [1], **WAYS["clustered"])
    inputs, _ = inputs_of("distilbert")
    expected = run(model, **inputs)
    fresh = tiny("distilbert", attn_implementation="hsa", hsa=model.config.hsa)
    with pytest.raises(InvalidInput, match=r"'hsa' for DistilBertSelfAttention.*call hsa.huggingface.convert\(model\)"):
        run(fresh, **inputs)
    assert torch.equal(run(convert(fresh), **inputs), expected)


def test_a_hierarchy_from_a_function(tmp_path):
    """No config holds a function: it is asked for, and with it the model is what it was."""

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
    with pytest.raises(InvalidInput, match=r"that of layer 1 came from a function.*convert\(model, tree=function\)"):
        convert(loaded)
    with pytest.raises(InvalidInput, match="the function itself"):
        convert(loaded, [1], kind="multiscale", tree="function")
    convert(loaded, tree=trees)
    assert settings_of(loaded) == settings_of(model)
    assert torch.equal(run(loaded, input_ids=ids, attention_mask=mask), expected)


WRONG = {
    "newer": ({"version": VERSION + 1, "layers": {}}, rf"version'\]: given {VERSION + 1}.*pip install -U hsa"),
    "no version": ({"layers": {}}, "what hsa.huggingface.convert writes"),
    "version is true": ({"version": True, "layers": {}}, "what hsa.huggingface.convert writes"),
    "a word": ("multiscale", "what hsa.huggingface.convert writes"),
    "unknown key": (
        {"version": VERSION, "layers": {"0": {"colour": 1}}},
        r"layers'\]\['0'\]: given \['colour'\].*newer",
    ),
    "list of layers": (
        {"version": VERSION, "layers": [0, 1]},
        r"layers'\]: given \[0, 1\], expected settings by layer number",
    ),
    "layer name": ({"version": VERSION, "layers": {"first": {}}}, "expected settings by layer number"),
    "negative layer": ({"version": VERSION, "layers": {"-1": {}}}, "expected settings by layer number"),
    "no settings": ({"version": VERSION, "layers": {"0": 3}}, r"\['0'\]: given int"),
    "too many layers": ({"version": VERSION, "layers": {"0": {}, "2": {}}}, r"layers'\]: given 2, expected 0 to 1"),
    "kind": ({"version": VERSION, "layers": {"0": {"kind": "x"}}}, r"\['0'\].kind: given 'x'"),
    "branching": ({"version": VERSION, "layers": {"0": {"branching": 8}}}, r"\['0'\].branching: given 8"),
    "bias": ({"version": VERSION, "layers": {"0": {"pooled_bias": "much"}}}, r"\['0'\].pooled_bias: given 'much'"),
    "biases": (
        {"version": VERSION, "layers": {"0": {"pooled_bias": [0, None]}}},
        r"\['0'\].pooled_bias: given \[0, None\]",
    ),
    "bias not a number": (
        {"version": VERSION, "layers": {"0": {"pooled_bias": "nan"}}},
        r"\['0'\].pooled_bias: given nan",
    ),
    "no bias": ({"version": VERSION, "layers": {"0": {"pooled_bias": None}}}, r"\['0'\].pooled_bias: given None"),
    "ids": ({"version": VERSION, "layers": {}, "special_ids": ["[CLS]"]}, r"special_ids'\].*expected token ids"),
}


OLD = {
    "version": 1,
    "special_ids": [],
    "layers": {"0": {"operator": "multiscale", "hierarchy": "keys", "branching": [8, 2], "refine": 8, "share": None}},
}


def test_a_model_that_hsa_0_1_converted(tmp_path):
    """It is refused, whatever is done with it, until `revert` removes the old conversion."""
    register()
    tiny("bert", hsa=OLD).save_pretrained(tmp_path)
    message = r"config.hsa\['version'\]: given 1: this model was converted by hsa 0.1.*convert the model again"
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
    ({"kind": "linear"}, r"kind: given 'linear', expected one of 'clustered', 'multiscale', 'hierarchical'"),
    ({"kind": "multiscale", "tree": "oak"}, r"tree: given 'oak', expected one of 'windows', 'sentences' or a function"),
    ({"tree": "windows"}, r"tree: given 'windows' with kind='clustered', expected None.*pass kind='multiscale'"),
    ({"branching": ()}, r"branching: given \(\)"),
    ({"branching": (4, 1)}, r"branching\[1\]: given 1, expected 2 or more"),
    ({"branching": "42"}, "branching: given '42'"),
    ({"near": -1}, "near: given -1"),
    ({"near": 1}, "near: given 1, expected 0 with kind='clustered'; select more groups with top_k"),
    ({"top_k": 1.5}, "top_k: given 1.5"),
    ({"top_k": True}, "top_k: given True"),
    ({"tile": 0}, "tile: given 0"),
    ({"beam": "wide"}, "beam: given 'wide'"),
    ({"sinks": "first"}, "sinks: given 'first'"),
    ({"pooled_bias": math.inf}, "pooled_bias: given inf"),
    ({"pooled_bias": (0.0, 0.0)}, "given 2 numbers, expected one, or one for each of the 4 heads of layer 0"),
    ({"chunk": 12, "branching": (4, 2)}, r"chunk: given 12 with branching \(4, 2\).*for example chunk=16"),
    ({"chunk": 16, "kind": "multiscale"}, "chunk: given 16, expected None, unless kind='clustered'"),
    ({"kind": "hierarchical", "near": 1}, "near: given 1, expected nothing"),
    ({"kind": "hierarchical", "beam": 9}, "beam: given 9, expected nothing"),
    ({"kind": "hierarchical", "pooled_bias": -1.0}, "pooled_bias: given -1.0"),
    ({"sinks": "special"}, r"tokenizer: given None.*tokenizer=AutoTokenizer"),
    ({"kind": "multiscale", "tree": "sentences"}, r"tokenizer: given None.*tokenizer=AutoTokenizer"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[str(settings) for settings, _ in REFUSED])
def test_settings_that_are_wrong(settings, message):
    model = tiny("bert")
    with pytest.raises(InvalidInput, match=message):
        convert(model, **settings)
    assert model.config._attn_implementation == "sdpa"
    assert not hasattr(model.config, "hsa")


def test_every_combination_of_json_comes_back():
    """What is written is what is read."""
    for way in WAYS.values():
        settings = LayerSettings(**way)
        assert LayerSettings.from_json("here", json.loads(json.dumps(settings.to_json()))) == settings
    assert LayerSettings.from_json("here", {}) == LayerSettings()


def test_chunks_are_whole_nodes():
    for branching in ((8, 2), (4, 3, 5), (7,)):
        for least in (1, 20, 256):
            leaves = leaves_of_a_node(branching, least)
            tree = Hierarchy.regular([3 * leaves], branching, repeat_last=True)
            assert leaves >= least
            assert (tree.leaf_count == leaves).sum() >= 3


def test_settings_are_keywords_of_convert():
    """With the defaults of `LayerSettings`, which help shows. A keyword that equals a default counts as given."""
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
