"""A warm-started HAT compared with the pre-trained model itself, and its use from the command line."""

import json
import re
from dataclasses import replace

import pytest
import torch

from hsa import Signal, collate
from hsa.baselines.hat.model import HatEncoder
from hsa.baselines.hat.warm_start import pretrained_tokenizer, warm_start
from hsa.baselines.options import DocumentOptions
from hsa.errors import InvalidInput
from hsa.models.classifier import Classifier
from hsa.models.options import ModelOptions
from hsa.models.saved import load_model
from hsa.nn.embedding import Modality
from hsa.training.accelerator import make_accelerator
from hsa.training.data.prepare import prepare
from hsa.training.experiment import model_config, train_model, train_models
from hsa.training.options import DataOptions, TrainingOptions
from tests.tables import FILLERS, WORDS, reviews, write_rows

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

SHAPE = {"hidden_size": 15, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 17}
WIDE = {"initializer_range": 0.4, "layer_norm_eps": 1e-3}  # large enough to show in the outputs
POSITIONS = 23
BERT = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
ROBERTA = {"cls_token": "<s>", "pad_token": "<pad>", "sep_token": "</s>", "unk_token": "<unk>"}


def save_tokenizer(folder, special):
    names = [*special.values(), *FILLERS, *WORDS["pos"], *WORDS["neg"], "."]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=special["unk_token"])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.enable_truncation(3)  # common in published tokenizers
    tokenizer.enable_padding(length=3)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return len(names)


def save_bert(folder, **changes):
    size = save_tokenizer(folder, BERT)
    sizes = {**SHAPE, **WIDE, "vocab_size": size, "max_position_embeddings": POSITIONS}
    model = transformers.BertModel(transformers.BertConfig(**{**sizes, **changes})).eval()
    return save(folder, model)


def save_roberta(folder, **changes):
    size = save_tokenizer(folder, ROBERTA)
    ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "type_vocab_size": 1}
    sizes = {**SHAPE, **WIDE, **ids, "vocab_size": size + 5, "max_position_embeddings": POSITIONS + 2}
    model = transformers.RobertaModel(transformers.RobertaConfig(**{**sizes, **changes})).eval()
    return save(folder, model)


def save(folder, model):
    with torch.no_grad():  # new models have biases of 0 and norms of 1
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return str(folder), model


SAVE = {"bert": save_bert, "roberta": save_roberta}
MARKS = {"bert": (2, 3), "roberta": (0, 2)}


@pytest.fixture(scope="module", params=SAVE)
def pretrained(request, tmp_path_factory):
    torch.manual_seed(1)
    return request.param, *SAVE[request.param](tmp_path_factory.mktemp(request.param))


def encoder_of(name, **options):
    config, tensors = warm_start(name, **options)
    size = pretrained_tokenizer(name).get_vocab_size()
    encoder = HatEncoder(config, {"text": Modality(tokens=size)})
    encoder.start_from(tensors)
    return encoder.eval()


def ids(*lengths, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randint(4, 12, (sum(lengths),), generator=generator).split(lengths))


def direct(kind, model, part):
    """Return the last hidden states of one text with its special tokens."""
    begin, end = MARKS[kind]
    with torch.no_grad():
        return model(torch.tensor([[begin, *part.tolist(), end]])).last_hidden_state[0]


@pytest.mark.parametrize("layout", ["interleaved", "ad-hoc", "early", "late", "SCCS"])
def test_one_segment_equals_the_pretrained_model(pretrained, layout):
    kind, name, model = pretrained
    texts = ids(7, 1, 21)
    batch = collate([Signal.of(part, "text") for part in texts])
    for returns, rows in (("segments", slice(0, 1)), ("leaves", slice(1, -1))):
        encoder = encoder_of(name, layout=layout, segment=21, returns=returns)
        wanted = torch.cat([direct(kind, model, part)[rows] for part in texts])
        with torch.no_grad():
            torch.testing.assert_close(encoder(batch)[0], wanted, rtol=1e-5, atol=1e-5)


def test_segments_start_as_independent_texts(pretrained):
    kind, name, model = pretrained
    (text,) = ids(19)
    encoder = encoder_of(name, segment=7)
    wanted = torch.stack([direct(kind, model, part)[0] for part in text.split(7)])
    with torch.no_grad():
        x, documents = encoder(collate([Signal.of(text, "text")]))
    assert documents.lengths == [3]
    torch.testing.assert_close(x, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["gelu_new", "gelu_pytorch_tanh", "relu"])
def test_activations(tmp_path, activation):
    name, model = save_bert(tmp_path, hidden_act=activation)
    (text,) = ids(7)
    with torch.no_grad():
        x, _ = encoder_of(name, segment=9)(collate([Signal.of(text, "text")]))
    torch.testing.assert_close(x[0], direct("bert", model, text)[0], rtol=1e-5, atol=1e-5)


def test_tokenizer_does_not_truncate(pretrained):
    _, name, _ = pretrained
    tokenizer = pretrained_tokenizer(name)
    text = " ".join(["the", "it", "."] * 9)
    wanted = transformers.AutoTokenizer.from_pretrained(name)
    known = [wanted.convert_tokens_to_ids(word) for word in text.split()]
    assert tokenizer.encode(text, add_special_tokens=False).ids == known


def test_options_that_do_not_fit_the_encoder(tmp_path, pretrained):
    _, name, _ = pretrained
    with pytest.raises(InvalidInput, match=r"segment: expected at most 21 \(.* has 23 positions, .*\), got 22"):
        warm_start(name, segment=22)
    with pytest.raises(InvalidInput, match=r"layout: expected .* 2 layers inside segments.*, got 'SSCS', which has 3"):
        warm_start(name, layout="SSCS", segment=5)
    with pytest.raises(InvalidInput, match="no such folder"):
        warm_start(str(tmp_path / "nothing"))
    with pytest.raises(InvalidInput, match="no such folder"):
        pretrained_tokenizer(str(tmp_path / "nothing"))


def test_models_of_other_kinds(tmp_path):
    config = transformers.DistilBertConfig(vocab_size=31, dim=8, n_layers=1, n_heads=2, hidden_dim=8)
    transformers.DistilBertModel(config).save_pretrained(tmp_path / "other")
    message = "expected an encoder: one of bert, roberta, .*, got a model of type 'distilbert'"
    with pytest.raises(InvalidInput, match=message):
        warm_start(str(tmp_path / "other"))
    for changes, match in (
        ({"is_decoder": True}, "a model of type 'bert'"),
        ({"hidden_act": "swish"}, "the activation 'swish'"),
        ({"vocab_size": 9}, r"got 9 vectors for a tokenizer of \d+ tokens"),
    ):
        name, _ = save_bert(tmp_path / next(iter(changes)), **changes)
        with pytest.raises(InvalidInput, match=match):
            warm_start(name, segment=5)


# Training


@pytest.fixture
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HSA_CACHE", str(tmp_path / "cache"))


READ = DataOptions(text=("text",), label="label", vocabulary=300)
TINY = ModelOptions(width=8, heads=2, position_width=8, dropout=0.0)


@pytest.mark.parametrize("pretrained", ["bert"], indirect=True)
@pytest.mark.usefixtures("_cache")
def test_training_starts_from_the_pretrained_weights(tmp_path, pretrained):
    """Train with a tiny learning rate, so that the weights are still those of the start."""
    _, name, _ = pretrained
    data = write_rows(tmp_path / "reviews.csv", reviews())
    options = TrainingOptions(epochs=1, learning_rate=1e-12, weight_decay=0.0)
    extra = {"documents": DocumentOptions(warm_start=name, segment=5)}
    prepared = prepare(data, READ, tokenizer=pretrained_tokenizer(name))
    accelerator = make_accelerator(options, cpu=True)
    hat, hsa = train_models(
        ("hat", "hierarchical"), TINY, prepared, options, tmp_path / "run", accelerator, extra=extra
    )
    model, _ = load_model(tmp_path / "run" / "hat")
    config, tensors = warm_start(name, segment=5, dropout=0.0)
    assert model.config.encoder == config
    own = model.encoder.state_dict()
    assert all(torch.allclose(own[key], tensor, atol=1e-8) for key, tensor in tensors.items())
    assert model.config.modalities["text"] == Modality(tokens=pretrained_tokenizer(name).get_vocab_size())
    assert hsa.parameters == pytest.approx(hat.parameters, rel=0.02)  # the first model is the reference
    last = model_config(prepared, TINY, "hat", "hierarchical", extra)
    assert last.encoder == config  # no feed-forward networks of another width


@pytest.mark.parametrize("pretrained", ["bert"], indirect=True)
@pytest.mark.usefixtures("_cache")
def test_pretrained_weights_learn_at_a_tenth_of_the_rate(tmp_path, pretrained):
    """Compare the first steps of Adam, which are as long as the learning rate."""
    _, name, _ = pretrained
    data = write_rows(tmp_path / "reviews.jsonl", reviews())
    rates = {"warmup": 0.0, "schedule": "constant", "weight_decay": 0.0, "learning_rate": 1e-3}
    options = TrainingOptions(epochs=1, batch_size=64, **rates)  # one step
    extra = {"documents": DocumentOptions(warm_start=name, segment=5)}
    prepared = prepare(data, replace(READ, number=("stars",)), tokenizer=pretrained_tokenizer(name))
    config = model_config(prepared, TINY, "hat", "hat", extra)
    accelerator, folder = make_accelerator(options, cpu=True), tmp_path / "run"
    actual = train_model("hat", config, prepared, options, folder, accelerator)
    after, _ = load_model(folder)
    torch.manual_seed(options.seed)
    before = Classifier(config)
    before.encoder.start_from(warm_start(name, segment=5, dropout=0.0)[1])
    slow = {id(p) for p in before.encoder.pretrained_parameters()}
    moved = {True: {}, False: {}}
    for (key, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        moved[id(old) in slow][key] = (new - old).abs().max().item()
    assert max(moved[True].values()) == pytest.approx(1e-4, rel=1e-2)
    assert max(moved[False].values()) == pytest.approx(1e-3, rel=1e-2)
    assert {"encoder.layers.1.output.weight", "encoder.embedding.maps.number.weight"} <= set(moved[False])
    assert {"encoder.layers.2.output.weight", "encoder.embedding.tables.text.weight"} <= set(moved[True])
    (folder / "result.json").unlink()  # as after an interruption
    again = train_model("hat", config, prepared, options, folder, accelerator, resume=True)
    assert again.scores == actual.scores


@pytest.mark.parametrize("pretrained", ["bert"], indirect=True)
@pytest.mark.usefixtures("_cache")
def test_data_are_read_with_the_tokenizer_of_the_pretrained_model(tmp_path, pretrained):
    _, name, _ = pretrained
    data = write_rows(tmp_path / "reviews.csv", reviews())
    pretrained = {"tokenizer": pretrained_tokenizer(name)}
    own, prepared, again = prepare(data, READ), prepare(data, READ, **pretrained), prepare(data, READ)
    assert prepared.input_spec.tokenizer.to_str() == pretrained_tokenizer(name).to_str()
    assert own.train.digest == again.train.digest != prepared.train.digest
    for conflict in ({"encoder": name}, {"word_vectors": tmp_path / "vectors.txt"}):
        with pytest.raises(InvalidInput, match=f"^{next(iter(conflict))}: .* tokenizer"):
            prepare(data, replace(READ, **conflict), **pretrained)
    numbers = write_rows(tmp_path / "numbers.csv", [{"a": i, "label": "xy"[i % 2]} for i in range(40)])
    with pytest.raises(InvalidInput, match="without text"):
        prepare(numbers, DataOptions(number=("a",), label="label"), **pretrained)


@pytest.mark.usefixtures("_cache")
def test_from_the_command_line(tmp_path, monkeypatch, capsys):
    from hsa.cli.main import run

    monkeypatch.chdir(tmp_path)
    name, _ = save_bert(tmp_path / "bert")
    write_rows(tmp_path / "reviews.csv", reviews())

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            run([str(argument) for argument in arguments])
        streams = capsys.readouterr()
        return caught.value.code, " ".join((streams.out + streams.err).split())

    columns = ("reviews.csv", "--text", "text", "--label", "label", "--cpu", "--epochs", "1")
    warm = ("--warm-start", name, "--segment", "11", "--segment-level", "1")
    code, out = call("train", *columns, "--models", "hat", *warm, "--out", "run")
    assert code == 0, out
    saved = json.loads((tmp_path / "run" / "hat" / "config.json").read_text())
    assert saved["encoder"]["segment_level"] == 1
    code, out = call("predict", "run/hat", "reviews.csv")  # needs only the saved files
    assert code == 0, out
    assert len(re.findall(r" \d+ (pos|neg) [01]\.\d\d ", out)) == len(reviews())
    code, out = call("train", *columns, "--models", "hierarchical", *warm)
    assert code != 0
    assert "hat among the models" in out
    code, out = call("train", *columns, "--models", "hat", *warm[:4], "--segment-level", "9")
    assert code != 0
    assert "segment_level" in out
