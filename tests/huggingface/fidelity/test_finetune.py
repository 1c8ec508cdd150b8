"""Fine-tuning learns, resumes, and refuses to resume runs with other options."""

import json
import os
import stat

import pytest
import torch

from hsa.errors import InvalidInput
from hsa.huggingface import convert, settings_of
from hsa.huggingface.fidelity import finetune as finetuning
from hsa.huggingface.fidelity.examples import Examples, tokenize
from hsa.huggingface.fidelity.finetune import OPTIONS, STATE, finetune, list_classes, save_finetuned
from hsa.huggingface.fidelity.judge import Judge
from hsa.huggingface.fidelity.options import FinetuneOptions
from hsa.huggingface.layers import attention_layers, set_attention_dropout
from hsa.huggingface.loading import load_for_task, load_for_training
from tests.huggingface.fidelity.small import CHEAP, LONGEST, classifier, examples, learnable, save, tokenizer
from tests.huggingface.tiny_models import tiny

SHORT = {"batch_size": 8, "learning_rate": 3e-3}


def calm(**changes):
    """Build a classifier with weights small enough to train."""
    return classifier(initializer_range=0.05, **changes)


@pytest.mark.parametrize("converted", [False, True])
def test_it_learns(converted):
    model, losses = calm(), []
    if converted:
        convert(model, **vars(CHEAP))
    options = FinetuneOptions(epochs=6, batch_size=8, learning_rate=1e-2)
    finetune(
        model, tokenizer(), learnable(), options, watch=lambda done, total, loss: losses.append((done, total, loss))
    )
    assert losses[-1][0] == losses[-1][1] == 6 * 6
    assert losses[-1][2] < 0.3 * losses[0][2]
    assert not model.training
    new = learnable(seed=9)
    judge = Judge(new, "classification", model, tokenizer(), longest=LONGEST)
    assert judge.scores(judge.ask(model))["accuracy"] > 0.9
    assert bool(settings_of(model)) == converted


class Broken(Exception):
    pass


def breaks_at(step):
    def watch(done, total, loss):
        if done >= step:
            raise Broken

    return watch


def test_a_resumed_run_gives_the_same_weights(tmp_path):
    """The models use dropout, so this includes random states."""
    options, data = FinetuneOptions(epochs=3, **SHORT), learnable(24)
    whole = finetune(calm(), tokenizer(), data, options)
    with pytest.raises(Broken):
        finetune(calm(), tokenizer(), data, options, folder=tmp_path, watch=breaks_at(3 + 2))  # in the second epoch
    torch.manual_seed(123)
    again = finetune(calm(seed=5), tokenizer(), data, options, folder=tmp_path)
    for (name, wanted), result in zip(whole.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(wanted, result), name
    other = finetune(calm(), tokenizer(), data, FinetuneOptions(epochs=3, seed=1, **SHORT))
    assert not torch.equal(other.classifier.weight, whole.classifier.weight)
    without = calm(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    finetune(without, tokenizer(), data, options)
    assert not torch.equal(without.classifier.weight, whole.classifier.weight)


def test_other_options_and_data_are_refused(tmp_path):
    data, options = learnable(24), FinetuneOptions(epochs=2, **SHORT)
    with pytest.raises(Broken):
        finetune(calm(), tokenizer(), data, options, folder=tmp_path, watch=breaks_at(4))
    assert json.loads((tmp_path / OPTIONS).read_text())["learning_rate"] == 3e-3
    changed = FinetuneOptions(epochs=2, batch_size=8, learning_rate=1e-3)
    with pytest.raises(
        InvalidInput, match=r"expected a run with learning_rate 0.001, got one with learning_rate 0.003"
    ):
        finetune(calm(), tokenizer(), data, changed, folder=tmp_path)
    with pytest.raises(InvalidInput, match=r"expected a run with texts 25, got one with texts 24. Pass the same data"):
        finetune(calm(), tokenizer(), learnable(25), options, folder=tmp_path)
    with pytest.raises(InvalidInput, match=r"expected a run with classes 3, got one with classes 2"):
        finetune(calm(num_labels=3), tokenizer(), data, options, folder=tmp_path)


def test_the_folder_is_a_model(tmp_path):
    model, data = calm(), learnable(16)
    finetune(model, tokenizer(), data, FinetuneOptions(epochs=1, **SHORT), folder=tmp_path)
    assert (tmp_path / STATE).exists()
    save_finetuned(tmp_path, model, tokenizer())
    assert not (tmp_path / STATE).exists()
    loaded, known = load_for_task(str(tmp_path), "classification")
    judge = Judge(data, "classification", loaded, known, longest=LONGEST)
    assert (judge.ask(loaded).values == judge.ask(model).values).all()


def test_files_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        save_finetuned(tmp_path, calm(), tokenizer())
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o640}


def test_a_model_is_saved_as_a_whole(tmp_path, monkeypatch):
    """`config.json`, the mark of a complete model, comes last; a failure leaves nothing."""

    def fail(self, folder):
        raise OSError(28, "No space left on device")

    words = tokenizer()
    monkeypatch.setattr(type(words), "save_pretrained", fail)
    with pytest.raises(InvalidInput, match=rf"{tmp_path}: cannot be written .*No space left on device"):
        save_finetuned(tmp_path, calm(), words)
    assert list(tmp_path.iterdir()) == []


def test_no_weights_of_an_earlier_model_stay(tmp_path):
    old = [tmp_path / name for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json")]
    for path in old:
        path.write_text("old")
    save_finetuned(tmp_path, calm(), tokenizer())
    assert not any(path.exists() for path in old)
    assert (tmp_path / "model.safetensors").exists()


def test_a_run_with_another_conversion_is_not_resumed(tmp_path):
    data, options = learnable(24), FinetuneOptions(epochs=2, **SHORT)
    with pytest.raises(Broken):
        finetune(calm(), tokenizer(), data, options, folder=tmp_path, watch=breaks_at(4))
    with pytest.raises(InvalidInput, match=r"expected a run with conversion .*, got one with conversion {}"):
        finetune(convert(calm(), **vars(CHEAP)), tokenizer(), data, options, folder=tmp_path)


def test_a_loss_that_is_not_finite():
    model = calm()
    with torch.no_grad():
        model.classifier.weight.fill_(float("nan"))
    with pytest.raises(
        InvalidInput, match=r"learning_rate: the loss is not finite at 0.003; expected a smaller learning rate"
    ):
        finetune(model, tokenizer(), learnable(8), FinetuneOptions(**SHORT))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "epochs: expected 1 or more, got 0"),
        ({"batch_size": 0}, "batch_size: expected .*, got 0"),
        ({"max_tokens": -1}, "max_tokens: expected .*, got -1"),
        ({"learning_rate": 0.0}, "learning_rate: expected more than 0, got 0.0"),
        ({"learning_rate": float("nan")}, "learning_rate: expected .*, got nan"),
        ({"weight_decay": -0.1}, "weight_decay: expected 0 or more, got -0.1"),
        ({"seed": -1}, "seed: expected .*, got -1"),
        ({"attention_dropout": 1.0}, "attention_dropout: expected at least 0 and less than 1, got 1.0"),
    ],
)
def test_options_that_do_not_fit(changes, message):
    with pytest.raises(InvalidInput, match=message):
        FinetuneOptions(**changes)


def test_texts_longer_than_the_model_takes_are_cut():
    model, widths = calm(), []
    model.register_forward_pre_hook(
        lambda module, arguments, options: widths.append(options["input_ids"].shape[1]), with_kwargs=True
    )
    long = Examples("long", [(" ".join(["cat"] * 300),)] * 4, [0, 1, 0, 1])
    before = model.classifier.weight.clone()
    finetune(model, tokenizer(), long, FinetuneOptions(epochs=1, max_tokens=512, **SHORT))
    assert widths == [LONGEST]  # not 302 tokens, and not 512, the default
    assert not torch.equal(model.classifier.weight, before)


def test_names_of_classes():
    def names(labels):
        return list_classes(Examples("t", [("x",)] * len(labels), labels))

    assert names([10, 9, 2, 10]) == ["2", "9", "10"]
    assert names(["pos", "neg", "pos"]) == ["neg", "pos"]
    assert names(["b", "10", "a", "9"]) == ["9", "10", "a", "b"]
    with pytest.raises(InvalidInput, match=r"t: label: expected at least 2 classes, got nothing but 'a'"):
        names(["a", "a"])
    with pytest.raises(InvalidInput, match="t: no labels; expected a label per row"):
        list_classes(Examples("t", [("x",)]))


def test_each_epoch_has_every_text_once_in_a_new_order():
    tokens = tokenize(examples(203, least=3), tokenizer(), LONGEST)
    options = FinetuneOptions(batch_size=2)  # two pools
    batches = [list(finetuning._epoch(tokens, options, epoch)) for epoch in (0, 0, 1)]
    for some in batches:
        assert sorted(i for batch in some for i in batch.tolist()) == list(range(203))
        assert len(some) == 102  # the number of steps of the schedule
    first, same, other = ([batch.tolist() for batch in some] for some in batches)
    assert first == same != other
    padding = sum(tokens.lengths_of(batch).max() * len(batch) - tokens.lengths_of(batch).sum() for batch in batches[0])
    assert padding < 0.1 * tokens.lengths.sum()


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "distilbert"])
def test_dropout_of_attention_weights(family):
    model = tiny(family, dtype=torch.float32)

    def held():
        return {
            float(p)
            for module in attention_layers(model)
            for name in ("dropout", "attn_dropout", "attention_dropout")
            if (p := getattr(getattr(module, name, None), "p", getattr(module, name, None))) is not None
        }

    others = [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    set_attention_dropout(model, 0.625)
    assert held() == {0.625}
    assert len([m.p for m in model.modules() if isinstance(m, torch.nn.Dropout) and m.p == 0.625]) < len(others) or (
        family == "llama"
    )
    set_attention_dropout(model, 0.0)
    assert held() == {0.0}


def test_dropout_that_is_an_integer_in_the_config():
    model = tiny("llama", dtype=torch.float32, attention_dropout=0)
    set_attention_dropout(model, 0.5)
    assert {module.attention_dropout for module in attention_layers(model)} == {0.5}


def test_classes_and_new_heads(tmp_path):
    folder = save(tmp_path / "three", classifier(num_labels=3))
    model, _ = load_for_training(str(folder), ["neg", "pos"])
    assert model.config.label2id == {"neg": 0, "pos": 1}
    assert model.classifier.out_features == 2
    kept = classifier(num_labels=3)
    assert torch.equal(model.bert.encoder.layer[0].output.dense.weight, kept.bert.encoder.layer[0].output.dense.weight)
    fresh, _ = load_for_training(str(folder), ["neg", "pos"], fresh=True)
    assert fresh.classifier.out_features == 2
    assert not torch.equal(
        fresh.bert.encoder.layer[0].output.dense.weight, kept.bert.encoder.layer[0].output.dense.weight
    )


def test_language_models_as_classifiers_know_their_padding(tmp_path):
    known = tokenizer()
    known.pad_token, known.eos_token = None, "[SEP]"
    model = tiny("gpt2", dtype=torch.float32, pad_token_id=None)
    model.save_pretrained(tmp_path)
    known.save_pretrained(tmp_path)
    trained, known = load_for_training(str(tmp_path), ["0", "1"])
    assert trained.config.pad_token_id == known.pad_token_id == known.eos_token_id
    known.model_input_names = ["input_ids", "attention_mask"]
    before = trained.score.weight.clone()
    finetune(trained, known, learnable(8), FinetuneOptions(epochs=1, **SHORT))
    assert not torch.equal(trained.score.weight, before)
