"""Models inside other modules: a `SentenceTransformer`, and modules that resemble it."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from hsa.errors import InvalidInput, Unsupported
from hsa.huggingface import convert, convert_as, counting, register, revert, settings_of
from hsa.huggingface.settings import LayerSettings
from tests.huggingface.tiny_models import WORDS, random_ids, run, tiny, word_tokenizer

FEW = {"kind": "multiscale", "branching": (4, 2), "top_k": 0}
SENTENCES = {"kind": "multiscale", "tree": "sentences", "branching": (4, 2), "top_k": 0}


class Transformer(nn.Module):
    """A module of sentence-transformers: it gets a dictionary and calls `forward`, which bypasses the model's hooks."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.tokenizer = word_tokenizer()

    def forward(self, features):
        inputs = {name: features[name] for name in ("input_ids", "attention_mask")}
        return {**features, "token_embeddings": self.model.forward(**inputs).last_hidden_state}


class Pooling(nn.Module):
    def forward(self, features):
        mask = features["attention_mask"][..., None]
        return {**features, "sentence_embedding": (features["token_embeddings"] * mask).sum(1) / mask.sum(1)}


class Sentences(nn.Sequential):
    """The parts of a `SentenceTransformer` that matter here."""

    def __init__(self, model=None):
        super().__init__(Transformer(tiny("bert", num_hidden_layers=3) if model is None else model), Pooling())

    @property
    def tokenizer(self):
        return self[0].tokenizer

    @torch.inference_mode()
    def encode(self, texts):
        return self(dict(self.tokenizer(texts, padding=True, return_tensors="pt")))["sentence_embedding"].numpy()


def texts(lengths=(61, 40, 5), seed=3):
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, length)) for length in lengths]


def load_sentence_transformer(folder):
    """A real `SentenceTransformer` of a small model, in float64."""
    package = pytest.importorskip("sentence_transformers", reason="too heavy for the development dependencies")
    tiny("bert", num_hidden_layers=3).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return open_sentence_transformer(package, folder)


def open_sentence_transformer(package, folder, **options):
    return package.SentenceTransformer(
        str(folder), device="cpu", model_kwargs={"dtype": torch.float64, **options}, local_files_only=True
    )


@pytest.fixture(params=["similar", "real"])
def model(request, tmp_path):
    return Sentences() if request.param == "similar" else load_sentence_transformer(tmp_path)


def test_encode_goes_on_working(model):
    exact = model.encode(texts())
    assert convert(model, [0, -1], **FEW) is model
    assert settings_of(model) == dict.fromkeys((0, 2), LayerSettings(**FEW))
    with counting() as counted:
        converted = model.encode(texts())
    assert converted.shape == exact.shape
    assert sorted(counted.layers) == [0, 1, 2]
    assert np.abs(converted - exact).max() > 1e-3
    revert(model, 0)
    assert sorted(settings_of(model)) == [2]
    assert revert(model) is model
    assert settings_of(model) == {}
    np.testing.assert_allclose(model.encode(texts()), exact, rtol=0, atol=1e-12)


def test_enough_exact_groups_change_nothing(model):
    exact = model.encode(texts())
    convert_as(model, {1: LayerSettings(**{**FEW, "near": 99}), 2: LayerSettings(top_k=99)})
    np.testing.assert_allclose(model.encode(texts()), exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("settings", [{"sinks": "special", **FEW}, SENTENCES], ids=["special", "sentences"])
def test_its_tokenizer_and_token_ids_are_found(model, settings):
    """The model inside, converted with the tokenizer passed and called directly, is the reference."""
    if "tree" in settings:
        pytest.importorskip("sentencex")
    reference = copy.deepcopy(model[0].model)
    convert(reference, tokenizer=word_tokenizer(), **settings)
    convert(model, **settings)
    inputs = word_tokenizer()(texts(), padding=True, return_tensors="pt")
    mask = inputs["attention_mask"]
    states = run(reference, input_ids=inputs["input_ids"], attention_mask=mask)
    expected = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    np.testing.assert_allclose(model.encode(texts()), expected.numpy(), rtol=0, atol=1e-6)
    convert(model[0].model, [1], **settings)  # the model inside, with the hooks of the modules around it
    np.testing.assert_allclose(model.encode(texts()), expected.numpy(), rtol=0, atol=1e-6)
    revert(model)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_copies_and_pickles(model):
    convert(model, sinks="special", **FEW)
    expected = model.encode(texts())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        np.testing.assert_array_equal(other.encode(texts()), expected)
        revert(other)
        np.testing.assert_array_equal(model.encode(texts()), expected)


def test_saved_and_loaded(tmp_path):
    """Loaded as usual it is exact until `convert` applies its settings; loaded as "hsa" it has them at once."""
    model = load_sentence_transformer(tmp_path / "original")
    import sentence_transformers as package

    exact = model.encode(texts())
    converted = convert(model, [0, 2], **FEW).encode(texts())
    model.save(str(tmp_path / "saved"))
    loaded = open_sentence_transformer(package, tmp_path / "saved")
    close = {"rtol": 0, "atol": 1e-6}
    np.testing.assert_allclose(loaded.encode(texts()), exact, **close)
    np.testing.assert_allclose(convert(loaded).encode(texts()), converted, **close)
    assert settings_of(loaded) == settings_of(model)
    register()
    loaded = open_sentence_transformer(package, tmp_path / "saved", attn_implementation="hsa")
    np.testing.assert_allclose(loaded.encode(texts()), converted, **close)
    np.testing.assert_allclose(revert(loaded).encode(texts()), exact, **close)


def test_modules_without_exactly_one_model():
    with pytest.raises(Unsupported, match="Sequential is not a transformers model and contains none"):
        convert(nn.Sequential(nn.Linear(2, 2)))
    two = nn.ModuleList([tiny("bert"), nn.Sequential(tiny("gpt2"))])
    for use in (convert, revert, settings_of):
        with pytest.raises(
            Unsupported, match=r"ModuleList contains 2 transformers models \(BertModel, GPT2LMHeadModel\)"
        ):
            use(two)
    shared = tiny("bert")
    assert sorted(settings_of(convert(nn.ModuleList([shared, nn.Sequential(shared)])))) == [0, 1]


def test_sequences_joined_without_padding_are_refused():
    """FlashAttention takes all texts as one sequence with their borders beside it; other attention would mix the texts."""
    model = convert(tiny("bert"), [1], **FEW)
    borders = torch.tensor([0, 20, 41], dtype=torch.int32)
    with pytest.raises(InvalidInput, match=r"expected a padded batch.*cu_seq_lens_q\)\. Pad.*unpad_inputs = False"):
        run(model, input_ids=random_ids([41])[0], cu_seq_lens_q=borders, cu_seq_lens_k=borders)


@pytest.mark.parametrize("other", ["words", len, nn.Linear(2, 2)], ids=["text", "function", "module"])
def test_what_is_no_tokenizer_is_not_taken_for_one(other):
    inner = tiny("bert")
    wrapper = nn.Sequential(inner)
    wrapper.tokenizer = other
    with pytest.raises(InvalidInput, match="tokenizer: not given; expected the model's tokenizer"):
        convert(wrapper, kind="multiscale", sinks="special")
    convert(wrapper, **FEW)  # needs none
    with pytest.raises(
        InvalidInput, match=f"tokenizer: expected a tokenizer of transformers, got {type(other).__name__}"
    ):
        convert(inner, tokenizer=other)
