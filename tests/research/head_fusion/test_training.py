"""Head fusion in training: all loops add the penalty, models have equal sizes, and names are checked."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from hsa.cli.main import run
from hsa.errors import InvalidInput
from hsa.models.classifier import Classifier, ModelConfig, count_parameters, equal_parameters
from hsa.models.language_model import LanguageModel, LanguageModelConfig
from hsa.models.options import ModelOptions
from hsa.models.registry import find_model
from hsa.models.seq2seq import Seq2Seq
from hsa.nn.embedding import Modality
from hsa.nn.encoder_config import EncoderConfig
from hsa.research.head_fusion import AttentionOverHeads
from hsa.training.accelerator import make_accelerator
from hsa.training.experiment import check_models
from hsa.training.language_model.decoder import decoder_sizes
from hsa.training.language_model.loop import train_language_model
from hsa.training.options import DataOptions, LanguageOptions, Seq2SeqOptions, TrainingOptions
from hsa.training.seq2seq import loop as seq2seq
from hsa.training.seq2seq.data import prepare_pairs
from tests.tables import reviews, write_rows
from tests.tasks import classifier, data, trainer

FUSIONS = ("talking", "collaborative", "over-heads")
ONCE = TrainingOptions(epochs=1, learning_rate=3e-2, schedule="constant", warmup=0.0, batch_size=2, patience=0)
HALF = replace(ONCE, mixed_precision="bf16", batch_tokens=48)
HUGE = 30.0


# Penalties in all loops


def tilted(model):
    """Make all tokens strongly prefer the first head."""
    for module in model.modules():
        if isinstance(module, AttentionOverHeads):
            with torch.no_grad():
                module.query.weight.zero_()
                module.query.bias.fill_(1.0)
                module.keys[0] = 0.5  # logits of 2 and 0
    return model


def first_head(model, forward):
    """Return the mean weight of the first head in a forward pass, layer by layer."""
    outcome, hooks = [], []

    def watch(fusion):
        weigh = fusion.weigh

        def watched(attended, x):
            outcome.append(fusion.weights(x)[:, 0].mean().item())
            return weigh(attended, x)

        fusion.weigh = watched
        hooks.append(lambda: delattr(fusion, "weigh"))

    for module in model.modules():
        if isinstance(module, AttentionOverHeads):
            watch(module)
    with torch.no_grad():
        forward(model.eval())
    for remove in hooks:
        remove()
    return outcome


def classify(penalty, options=ONCE):
    """Train a classifier; return the weights of the first head before and after, and the reported loss."""
    model = tilted(
        classifier("hierarchical", layers=2, include_self=False, fusion="over-heads", fusion_penalty=penalty)
    )
    examples = data(40)

    def weights():
        return first_head(model, lambda m: m(examples.batch))

    loop = trainer(options, model=model, train=examples, accelerator=make_accelerator(options, cpu=True))
    before = weights()
    (record,) = loop.fit()
    return before, weights(), record.loss


def model_language(penalty, options=HALF, steps=20):
    text = np.tile(np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], np.uint16), 30)
    sizes = {"width": 12, "heads": 2, "layers": 2, "branching": (3, 2), "fusion": "over-heads"}
    config = LanguageModelConfig(11, **sizes, fusion_penalty=penalty)
    torch.manual_seed(0)
    start = tilted(LanguageModel(config))

    def weights(model):
        return first_head(model, lambda m: m(torch.from_numpy(text[:100].astype(np.int64)), [100]))

    language = LanguageOptions(context=24, steps=steps, evaluate_every=steps)
    outcome = train_language_model(config, text, text[:60], options, language, start=start.state_dict(), device="cpu")
    return weights(start), weights(outcome.model), outcome.history[0].loss


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    rows = [{"question": f"Light {i % 3} is on. Day {i}.", "answer": f"It is {i % 3}."} for i in range(40)]
    path = write_rows(tmp_path_factory.mktemp("rows") / "lights.csv", rows)
    return prepare_pairs(path, DataOptions(text=("question",), label="answer", task="seq2seq", vocabulary=300))


def seq2seq_config(pairs, **model):
    sizes = ModelOptions(**{"width": 12, "heads": 2, "dropout": 0.0, "position_width": 8, "near": 0, **model})
    return seq2seq.seq2seq_config(pairs, "hierarchical", sizes, LanguageOptions(branching=(2, 2)), Seq2SeqOptions())


@pytest.fixture
def answer(pairs, monkeypatch):
    def tilted_model(config):
        return tilted(Seq2Seq(config))

    monkeypatch.setattr(seq2seq, "Seq2Seq", tilted_model)
    inputs, targets, lengths = pairs.train.shifted(1, 2)

    def weights(model):
        return first_head(model, lambda m: m.loss(pairs.train.prompts, inputs, targets, lengths))

    def run(penalty, options=ONCE):
        config = seq2seq_config(pairs, fusion="over-heads", fusion_penalty=penalty)
        model, (record,) = seq2seq.train_seq2seq(config, pairs, options)
        return weights(tilted_model(config)), weights(model), record.loss

    return run


def check(train, fusions):
    """Check that weights stay tilted without a penalty, and become nearly uniform with a huge one."""
    (before, kept, _), (_, levelled, _) = train(0.0), train(HUGE)
    assert len(before) == len(kept) == len(levelled) == fusions
    assert min(before) > 0.87
    assert max(kept) > 0.7
    assert max(abs(β - 0.5) for β in levelled) < 0.05


def test_penalty_in_classifier_training():
    check(classify, fusions=2)


def test_penalty_in_language_model_training():
    check(model_language, fusions=2)


def test_penalty_in_seq2seq_training(answer):
    check(answer, fusions=3)  # a layer of the encoder, one of the decoder, and cross-attention


def test_reported_loss_excludes_the_penalty(answer):
    frozen = replace(ONCE, learning_rate=1e-12, batch_size=64)
    for train in (classify, lambda *args: model_language(*args, steps=1), answer):
        assert train(HUGE, frozen)[2] == pytest.approx(train(0.0, frozen)[2], rel=1e-5)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_every_fusion_learns(fusion):
    options = TrainingOptions(epochs=6, learning_rate=1e-2, batch_size=7, patience=0)
    loop = trainer(options, model=classifier("hierarchical", fusion=fusion))
    before = {name: p.detach().clone() for name, p in loop.model.named_parameters() if ".fusion." in name}
    history = loop.fit()
    assert history[-1].loss < 0.6 * history[0].loss
    moved = {name: (p - before[name]).abs().max().item() for name, p in loop.model.named_parameters() if name in before}
    assert moved
    assert min(moved.values()) > 1e-4


# Equal numbers of parameters


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("sizes", [(128, 4, 1), (96, 4, 2), (24, 3, 3), (12, 2, 1)])
def test_models_have_equal_sizes(fusion, sizes):
    """Sizes differ by at most half a channel of the feed-forward networks of all layers."""
    width, heads, layers = sizes
    encoder = EncoderConfig(width=width, heads=heads, layers=layers)
    plain = ModelConfig(encoder, {"text": Modality(tokens=97)}, outputs=3)
    fused = equal_parameters(plain, replace(plain.encoder, fusion=fusion))
    assert fused.encoder.fusion == fusion
    with torch.device("meta"):
        wanted, outcome = (count_parameters(Classifier(config)) for config in (plain, fused))
    assert abs(outcome - wanted) <= layers * (2 * width + 1) / 2
    assert abs(outcome - wanted) < 0.01 * wanted


# Names and options


def test_names_of_models():
    assert find_model("hierarchical").changes == {"kind": "hierarchical"}
    assert find_model("hierarchical+talking").changes == {"kind": "hierarchical", "fusion": "talking"}
    assert find_model("clustered+over-heads").changes == {"kind": "clustered", "fusion": "over-heads"}
    check_models(["hierarchical", "flat+collaborative", "deepsets+over-heads"])
    for name in ("hierarchical+nonsense", "hierarchical+", "flat+talking+talking"):
        base = name.partition("+")[0]
        message = rf"^models: expected {base}\+.* concatenation, talking, coll.*, got '{re.escape(name)}'"
        with pytest.raises(InvalidInput, match=message):
            check_models(["hierarchical", name])
    for name in ("nonsense+talking", "+talking", ""):
        base = name.partition("+")[0]
        with pytest.raises(InvalidInput, match=f"^models: expected one of hierarchical, mult.*, got '{base}'"):
            check_models(["hierarchical", name])


def test_options_reach_the_models(pairs):
    options = {"fusion": "collaborative", "shared_dim": 6, "fusion_penalty": 0.5}
    both = seq2seq_config(pairs, **options)
    alone = LanguageModelConfig(11, **decoder_sizes(ModelOptions(width=12, heads=2, **options), LanguageOptions()))
    for config in (both.encoder, both.decoder, alone):
        assert {name: getattr(config, name) for name in options} == options


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run `hsa train` on rows; return the exit code and stderr."""
    monkeypatch.setenv("HSA_CACHE", str(tmp_path / "cache"))
    rows = write_rows(tmp_path / "reviews.csv", reviews())
    sizes = ("--width", "8", "--heads", "2", "--epochs", "1", "--position-width", "8", "--vocabulary", "300", "--cpu")

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            run(["train", str(rows), "--text", "text", "--label", "label", *sizes, *arguments])
        return caught.value.code, capsys.readouterr().err

    return call


def test_errors_of_the_command(command, tmp_path):
    out = ("--out", str(tmp_path / "out"))
    for arguments, message in (
        (
            ("--models", "hierarchical+nonsense"),
            r"models: expected hierarchical\+.* concatenation, talking.*, got 'hierarchical\+nonsense'",
        ),
        (
            ("--models", "hierarchical", "nonsense+talking"),
            r"models: expected one of hierarchical, multiscale.*, got 'nonsense'",
        ),
        (
            ("--models", "hierarchical", "--fusion", "collaborative", "--shared-dim", "3"),
            r"shared_dim: expected a multiple of 4, the channels of a head, got 3\n",
        ),
        (
            ("--models", "hierarchical", "--fusion", "over-heads", "--fusion-penalty", "-1"),
            r"penalty: expected a finite number, 0 or more, got -1\.0\n",
        ),
    ):
        code, error = command(*out, *arguments)
        assert (code, error.count("\n")) == (2, 1)
        assert re.match(message, error), error
    code, error = command(*out, "--fusion", "talkin")
    assert code == 2
    assert "did you mean 'talking'" in error.lower()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "models", [("hierarchical+talking", "hierarchical"), ("bottom-up+over-heads", "flat+collaborative")]
)
def test_command_compares_fusions(command, tmp_path, models):
    """The report shows attention if the first model has an attention matrix."""
    assert command("--out", str(tmp_path / "out"), "--models", *models) == (0, "")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [result["model"] for result in results] == list(models)
    sizes = [result["parameters"] for result in results]
    assert abs(sizes[0] - sizes[1]) < 0.01 * sizes[0]
    assert (tmp_path / "out" / "report.md").is_file()
    assert (tmp_path / "out" / "attention.png").is_file() == models[0].startswith("hierarchical")
