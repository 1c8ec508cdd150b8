"""Saved language models on new texts, and memories longer than in training."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import pytest
import torch

from hsa.baselines.transformer_xl.language_model import TransformerXLLanguageConfig, TransformerXLLanguageModel
from hsa.cli.main import run
from hsa.errors import InvalidInput
from hsa.models.language_model import LanguageModel, LanguageModelConfig
from hsa.models.memory import set_test_memory
from hsa.models.saved import load_language_model, save_language_model
from hsa.signals.readers.text import train_tokenizer
from hsa.training.language_model.data import CHAPTER, END, PARAGRAPH, encode_documents
from hsa.training.language_model.inference import evaluate_text, is_language_model
from hsa.training.language_model.loop import evaluate_language_model
from tests.tables import write_rows

STORY = [f"The cat sat on mat {i}. It was warm there." for i in range(60)]


@pytest.fixture
def saved(tmp_path):
    """The folder of a model with weights that matter, and a text."""
    tokenizer = train_tokenizer(STORY, 300, special_tokens=(END, PARAGRAPH, CHAPTER))
    sizes = {"width": 14, "heads": 2, "layers": 2, "segment": 24, "memory": 10}
    model = TransformerXLLanguageModel(TransformerXLLanguageConfig(tokenizer.get_vocab_size(), **sizes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save_language_model(tmp_path / "model", model, tokenizer)
    (tmp_path / "tale.txt").write_text("\n\n".join(STORY))
    return tmp_path / "model", tmp_path / "tale.txt", tokenizer


@pytest.mark.parametrize("memory", [None, 0, 10, 70])
def test_the_memory_is_that_of_a_model_made_with_it(saved, memory):
    folder, text, tokenizer = saved
    actual = evaluate_text(folder, text, memory=memory)
    trained = load_language_model(folder)
    wanted = TransformerXLLanguageModel(replace(trained.config, test_memory=memory)).eval()
    wanted.load_state_dict(trained.state_dict())
    tokens = encode_documents(["\n\n".join(STORY)], tokenizer)
    loss = evaluate_language_model(wanted, tokens, 24).loss
    assert actual.loss == pytest.approx(loss, rel=1e-6)
    assert actual.perplexity == pytest.approx(math.exp(loss))
    assert actual.memory == (10 if memory is None else memory)
    assert actual.tokens == (len(tokens) - 1) // 24 * 24
    characters = len(tokenizer.decode(tokens[: actual.tokens].tolist(), skip_special_tokens=False))
    assert actual.bits_per_character == pytest.approx(loss / math.log(2) * actual.tokens / characters)
    entry = 3 * 2 * 14 + 2
    assert actual.attention_operations == 2 * entry * (actual.memory + 12.5)


def test_memories_differ_and_the_saved_model_stays(saved):
    folder, text, _ = saved
    before = (folder / "config.json").read_text()
    losses = {evaluate_text(folder, text, memory=memory).loss for memory in (0, 10, 70)}
    assert len(losses) == 3
    assert (folder / "config.json").read_text() == before


def test_test_rows_of_a_table(saved, tmp_path):
    folder, _, tokenizer = saved
    splits = np.resize(["train", "validation", "test", "train"], len(STORY))
    table = [{"body": text, "split": str(split)} for text, split in zip(STORY, splits, strict=True)]
    actual = evaluate_text(folder, write_rows(tmp_path / "rows.csv", table), columns=("body",))
    tokens = encode_documents([row["body"] for row in table if row["split"] == "test"], tokenizer)
    assert actual.loss == evaluate_language_model(load_language_model(folder), tokens, 24).loss


@pytest.fixture
def ours(saved):
    """A model that reads blocks, in the same folder."""
    folder, text, tokenizer = saved
    torch.manual_seed(0)
    sizes = {"width": 8, "heads": 2, "layers": 1, "branching": (4, 2), "near": 0}
    model = LanguageModel(LanguageModelConfig(tokenizer.get_vocab_size(), **sizes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save_language_model(folder, model, tokenizer)
    return folder, text, tokenizer


@pytest.mark.parametrize("context", [7, 50])
def test_blocks_as_long_as_asked_for(ours, context):
    folder, text, tokenizer = ours
    actual = evaluate_text(folder, text, context=context)
    tokens = encode_documents(["\n\n".join(STORY)], tokenizer)
    assert actual.loss == evaluate_language_model(load_language_model(folder), tokens, context).loss
    assert (actual.context, actual.memory) == (context, 0)


def test_blocks_as_long_as_in_training(ours):
    folder, text, _ = ours
    (folder / "result.json").write_text('{"context": 33}')
    assert evaluate_text(folder, text) == replace(evaluate_text(folder, text, context=33), seconds=ANY)


def test_what_does_not_fit_the_model(saved, ours):
    folder, text, _ = ours
    with pytest.raises(
        InvalidInput,
        match=r"^test_memory: given 7 tokens for a model without a memory, expected a model that reads texts in segments",
    ):
        evaluate_text(folder, text, memory=7)
    with pytest.raises(
        InvalidInput, match=r"^context: given none, and the model's folder does not say, expected tokens"
    ):
        evaluate_text(folder, text)
    with pytest.raises(InvalidInput, match=r"^context: given 0, expected tokens of a block, 1 or more"):
        evaluate_text(folder, text, context=0)


def test_a_transformer_xl_has_segments(saved):
    folder, text, _ = saved
    with pytest.raises(InvalidInput, match=r"^context: given 9 tokens .* segments of 24; set how much it remembers"):
        evaluate_text(folder, text, context=9)


def test_what_cannot_be_read(saved, tmp_path):
    folder, text, _ = saved
    (tmp_path / "empty.txt").write_text(" \n")
    for memory in (-1, -100):
        with pytest.raises(InvalidInput, match=f"^test_memory: given {memory}, expected 0 tokens or more"):
            evaluate_text(folder, text, memory=memory)
    with pytest.raises(InvalidInput, match=r"empty.txt: given no text"):
        evaluate_text(folder, tmp_path / "empty.txt")
    with pytest.raises(InvalidInput, match=r"none.txt: given no such file"):
        evaluate_text(folder, tmp_path / "none.txt")


def test_training_goes_on_with_its_own_memory():
    model = TransformerXLLanguageModel(TransformerXLLanguageConfig(11, width=8, heads=2, layers=1, memory=3))
    set_test_memory(model, 50)
    assert (model.eval().layers.memory, model.train().layers.memory) == (50, 3)


def test_from_the_command_line(saved, capsys):
    folder, text, _ = saved
    assert is_language_model(folder)
    assert not is_language_model(folder.parent)

    def call(*words):
        with pytest.raises(SystemExit) as caught:
            run(["evaluate", *map(str, words)])
        return caught.value.code, *capsys.readouterr()

    code, out, err = call(folder, text, "--test-memory", "70", "--json")
    assert (code, err) == (0, "")
    actual = json.loads(out)
    assert list(actual) == list(asdict(evaluate_text(folder, text)))
    assert actual["memory"] == 70
    assert actual["loss"] == pytest.approx(evaluate_text(folder, text, memory=70).loss, rel=1e-4)
    code, out, _ = call(folder, text)
    assert "memory                10\n" in out
    assert call(folder, text, "--test-memory", "-2")[2] == (
        "test_memory: given -2, expected 0 tokens or more; 0 reads every segment on its own\n"
    )
    assert "skip_bad: given with a language model" in call(folder, text, "--skip-bad")[2]
    assert "no such folder" in call(Path("nowhere"), text)[2]
