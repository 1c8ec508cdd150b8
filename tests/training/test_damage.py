"""Damaged, incomplete and exchanged files are refused; no loop resumes from them, and no model loads from them."""

import json
import random
import shutil
from contextlib import suppress

import numpy as np
import pytest
import torch

from hsa import load
from hsa.checksums import SUMS
from hsa.errors import InvalidInput
from hsa.files import load_state, save_state
from hsa.huggingface.fidelity.finetune import STATE, finetune
from hsa.huggingface.fidelity.options import FinetuneOptions
from hsa.models.language_model import LanguageModelConfig
from hsa.models.options import ModelOptions
from hsa.models.saved import (
    load_language_model,
    load_model,
    load_seq2seq,
    save_language_model,
    save_model,
    save_seq2seq,
)
from hsa.models.seq2seq import Seq2Seq
from hsa.signals import train_tokenizer
from hsa.training.data.prepare import InputSpec, load_input_spec, save_input_spec
from hsa.training.data.sources import Columns
from hsa.training.experiment import RESULT, Result, save_result
from hsa.training.language_model.loop import train_language_model
from hsa.training.loop import CHECKPOINT, EpochRecord
from hsa.training.metrics import Scores
from hsa.training.options import DataOptions, LanguageOptions, Seq2SeqOptions, TrainingOptions
from hsa.training.seq2seq.data import prepare_pairs
from hsa.training.seq2seq.loop import seq2seq_config, train_seq2seq
from tests.huggingface.fidelity.small import classifier as transformer
from tests.huggingface.fidelity.small import learnable, tokenizer
from tests.sealing import reseal
from tests.tables import write_rows
from tests.tasks import classifier, trainer

TEXT = np.tile(np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], np.uint16), 30)


def run_classifier(folder):
    run = trainer(folder=folder)
    if (folder / CHECKPOINT).exists():
        run.resume()
    run.fit()
    return run.model


def run_language_model(folder, text=TEXT):
    config = LanguageModelConfig(11, width=12, heads=2, layers=1, branching=(3, 2))
    options, language = TrainingOptions(batch_tokens=96), LanguageOptions(context=24, steps=4)
    trained = train_language_model(config, text, text[:99], options, language, folder=folder, resume=True, device="cpu")
    return trained.model


def run_seq2seq(folder, question="The light is {}. Day {}."):
    rows = [
        {"question": question.format(["red", "blue"][i % 2], i), "answer": ["Stop", "Go"][i % 2]} for i in range(20)
    ]
    path = write_rows(folder.parent / "lights.csv", rows)
    read = DataOptions(text=("question",), label="answer", task="seq2seq", vocabulary=300)
    sizes = ModelOptions(width=12, heads=2, dropout=0.1, near=0, position_width=8)
    prepared = prepare_pairs(path, read)
    config = seq2seq_config(prepared, "flat", sizes, LanguageOptions(branching=(2, 2)), Seq2SeqOptions())
    options = TrainingOptions(epochs=2, batch_size=8)
    return train_seq2seq(config, prepared, options, folder=folder, resume=True)[0]


def run_finetuning(folder, data=None):
    options = FinetuneOptions(epochs=2, batch_size=8)
    return finetune(transformer(), tokenizer(), data or learnable(16), options, folder=folder)


LOOPS = {
    "classifier": (run_classifier, CHECKPOINT),
    "language model": (run_language_model, CHECKPOINT),
    "seq2seq": (run_seq2seq, CHECKPOINT),
    "finetuning": (run_finetuning, STATE),
}


@pytest.fixture(scope="module", params=LOOPS)
def finished(request, tmp_path_factory):
    """Return a loop, and the checkpoint of its finished run."""
    run, name = LOOPS[request.param]
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(folder)
    return run, folder / name


def copied(finished, tmp_path):
    run, path = finished
    shutil.copytree(path.parent, tmp_path / "run")
    return run, tmp_path / "run" / path.name


def test_flipped_bits_in_the_checkpoint_of_a_finished_run(finished, tmp_path):
    run, path = copied(finished, tmp_path)
    whole, generator = path.read_bytes(), random.Random(0)
    for flips in (1, 1, 1, 200):
        damaged = bytearray(whole)
        for place in generator.sample(range(len(whole)), flips):
            damaged[place] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(InvalidInput, match=rf"{path}: expected .*, got a damaged file .*Delete it"):
            run(path.parent)
    path.write_bytes(whole[: generator.randrange(len(whole))])
    with pytest.raises(InvalidInput, match=rf"{path}: expected .*, got a damaged file .*Delete it"):
        run(path.parent)


def test_checkpoints_without_a_field(finished, tmp_path):
    run, path = copied(finished, tmp_path)
    content = load_state(path, "a checkpoint", "")

    def refused(changed):
        save_state(path, changed)
        with pytest.raises(InvalidInput, match=f"{path.parent}"):
            run(path.parent)

    for name in content:
        for other in (None, 7, "text", [], {}):
            if content[name] != other:
                refused({**content, name: other})
        refused({key: value for key, value in content.items() if key != name})
    progress = content.get("progress", {})
    for name in ("state", "training"):
        if name in progress:
            refused({**content, "progress": {key: value for key, value in progress.items() if key != name}})
            refused({**content, "progress": {**progress, name: 7}})
    for name in progress.get("state", {}):
        refused({**content, "progress": {**progress, "state": {**progress["state"], name: "text"}}})
    if progress.get("best_weights"):
        refused({**content, "progress": {**progress, "best_weights": {}}})
    save_state(path, content)
    run(path.parent)


def test_other_data_of_the_same_size(tmp_path):
    run_language_model(tmp_path / "lm")
    with pytest.raises(InvalidInput, match="a run on other data"):
        run_language_model(tmp_path / "lm", np.concatenate([TEXT[:40], TEXT[40:60][::-1], TEXT[60:]]))
    run_seq2seq(tmp_path / "seq2seq")
    with pytest.raises(InvalidInput, match=r"a run on other data|vocabulary|tokens"):
        run_seq2seq(tmp_path / "seq2seq", "The lamp is {}. Day {}.")
    run_finetuning(tmp_path / "finetuning")
    with pytest.raises(InvalidInput, match="expected a run with these data, got one with other data"):
        run_finetuning(tmp_path / "finetuning", learnable(16, seed=7))


def saved_classifier(folder, seed=0):
    save_model(folder, classifier(seed=seed), ("no", "yes"))
    words = train_tokenizer(["good film", f"bad film {seed}"], 260)
    save_input_spec(folder, InputSpec("rows", Columns(text=("review",)), 512, 128, words))
    record = EpochRecord(1, 0.5, 0.5, 0.5, 0.1, 1.0)
    save_result(folder, Result("flat", 7, Scores(accuracy=0.5 + seed / 10), 1.0, 1.0, 1.0, 1, (record,)))


def load_classifier(folder):
    model, _ = load_model(folder)
    load_input_spec(folder)
    Result.load(folder)
    return model


def saved_language_model(folder, seed=0):
    words = train_tokenizer(["It was a dark and stormy night", f"again {seed}"], 280)
    torch.manual_seed(seed)
    from hsa.models import LanguageModel

    config = LanguageModelConfig(words.get_vocab_size(), width=8, heads=2, layers=1, dropout=seed / 10)
    save_language_model(folder, LanguageModel(config), words)


MODELS = {
    "classifier": (saved_classifier, load_classifier),
    "language model": (saved_language_model, lambda folder: load(folder).model),
}


@pytest.mark.parametrize("kind", MODELS)
def test_damaged_models(kind, tmp_path):
    save, load_again = MODELS[kind]
    save(tmp_path)
    assert load_again(tmp_path) is not None
    generator = random.Random(0)
    for path in sorted(tmp_path.iterdir()):
        whole = path.read_bytes()
        for _ in range(25):
            damaged = bytearray(whole)
            damaged[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
            path.write_bytes(damaged)
            with pytest.raises(InvalidInput, match=f"^{tmp_path}"):
                load_again(tmp_path)
        path.write_bytes(whole[: generator.randrange(len(whole))])
        with pytest.raises(InvalidInput, match=f"^{tmp_path}"):
            load_again(tmp_path)
        path.write_bytes(whole)
    load_again(tmp_path)


@pytest.mark.parametrize("kind", MODELS)
def test_files_of_another_model(kind, tmp_path):
    save, load_again = MODELS[kind]
    save(tmp_path / "a")
    save(tmp_path / "b", seed=1)
    for path in sorted((tmp_path / "a").iterdir()):
        other = tmp_path / "b" / path.name
        own, theirs = path.read_bytes(), other.read_bytes()
        if own == theirs:
            continue
        path.write_bytes(theirs)
        with pytest.raises(InvalidInput, match="another model"):
            load_again(tmp_path / "a")
        path.write_bytes(own)


def test_a_model_without_checksums(tmp_path):
    """Refuse a model that an earlier version saved."""
    saved_classifier(tmp_path)
    (tmp_path / SUMS).unlink()
    message = rf"{SUMS}: no such file; expected the checksums .*save the model again with this version of hsa"
    with pytest.raises(InvalidInput, match=message):
        load_model(tmp_path)


def test_an_encoder_decoder_of_other_weights(tmp_path):
    config = run_seq2seq(tmp_path / "run").config
    for name in "ab":
        save_seq2seq(tmp_path / name, Seq2Seq(config))
    (tmp_path / "b" / "model.safetensors").replace(tmp_path / "a" / "model.safetensors")
    with pytest.raises(InvalidInput, match="one of another model"):
        load_seq2seq(tmp_path / "a")


def entries(value, path=()):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [p for key, part in items for p in ((*path, key), *entries(part, (*path, key)))]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("classifier", "config.json"),
        ("classifier", "input_spec.json"),
        ("classifier", RESULT),
        ("language model", "config.json"),
    ],
)
def test_odd_fields_with_valid_checksums(kind, name, tmp_path):
    """Change every field: the model loads, or the error is one for the user."""
    save, load_again = MODELS[kind]
    save(tmp_path)
    whole = (tmp_path / name).read_text()
    for path in entries(json.loads(whole)):
        for other in (None, -1, 0, 2.5, "text", [], {}, True, ...):
            content = json.loads(whole)
            inside = content
            for key in path[:-1]:
                inside = inside[key]
            if other is ...:
                del inside[path[-1]]
            else:
                inside[path[-1]] = other
            (tmp_path / name).write_text(json.dumps(content))
            reseal(tmp_path)
            with suppress(InvalidInput):
                load_again(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "input_spec.json", RESULT])
@pytest.mark.parametrize("content", ["[" * 100_000, "{", "[]", "7", "null", '"text"', '{"a":' * 100_000])
def test_json_that_is_something_else(name, content, tmp_path):
    saved_classifier(tmp_path)
    (tmp_path / name).write_text(content)
    for seal in (lambda folder: None, reseal):
        seal(tmp_path)
        with pytest.raises(InvalidInput, match=f"{tmp_path / name}: "):
            load_classifier(tmp_path)


@pytest.mark.parametrize(
    "content", ["{}", "7", "[7]", '[{"model": 7}]', '[{"score": 1}]', "[[]]", "[" * 100_000, '"a"']
)
def test_results_of_a_run_that_are_something_else(content, tmp_path):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(InvalidInput, match=r"results\.json: expected the results of a run"):
        load(tmp_path)


def test_deep_nesting_in_a_recipe(tmp_path):
    from hsa.training.recipe import load_recipe

    (tmp_path / "a.yaml").write_text("[" * 100_000)
    with pytest.raises(InvalidInput, match=r"a\.yaml: "):
        load_recipe(tmp_path / "a.yaml")


def test_load_language_model_checks_its_own_files_only(tmp_path):
    saved_language_model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert load_language_model(tmp_path) is not None
    with pytest.raises(InvalidInput, match=r"tokenizer\.json: no such file"):
        load(tmp_path)
