"""Saved language models on new texts, and memories longer than in training."""

import json
import math
import re
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
from hsa.training.language_model.inference import LoadedLanguageModel, TextScores, evaluate_text
from hsa.training.language_model.loop import evaluate_language_model
from tests.tables import write_rows

STORY = [f"The cat sat on mat {i}. It was warm there." for i in range(60)]


@pytest.fixture
def saved(tmp_path):
    """Folder of a model with large random weights, a text, and the tokenizer."""
    tokenizer = train_tokenizer(STORY, 300, special_tokens=(END, PARAGRAPH, CHAPTER))
    sizes = {"width": 14, "heads": 2, "layers": 2, "segment": 24, "memory": 10}
    model = TransformerXLLanguageModel(TransformerXLLanguageConfig(tokenizer.get_vocab_size(), **sizes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save_language_model(tmp_path / "model", model, tokenizer)
    (tmp_path / "tale.txt").write_text("\n\n".join(STORY))
    return tmp_path / "model", tmp_path / "tale.txt", tokenizer


def scores(folder, data, **options) -> TextScores:
    return evaluate_text(LoadedLanguageModel.load(folder), data, **options)


@pytest.mark.parametrize("memory", [None, 0, 10, 70])
def test_a_changed_memory_gives_the_scores_of_a_model_built_with_it(saved, memory):
    folder, text, tokenizer = saved
    actual = scores(folder, text, memory=memory)
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


def test_memories_give_different_scores_and_the_saved_model_is_not_changed(saved):
    folder, text, _ = saved
    before = (folder / "config.json").read_text()
    losses = {scores(folder, text, memory=memory).loss for memory in (0, 10, 70)}
    assert len(losses) == 3
    assert (folder / "config.json").read_text() == before


def test_test_rows_of_a_table(saved, tmp_path):
    folder, _, tokenizer = saved
    splits = np.resize(["train", "validation", "test", "train"], len(STORY))
    table = [{"body": text, "split": str(split)} for text, split in zip(STORY, splits, strict=True)]
    actual = scores(folder, write_rows(tmp_path / "rows.csv", table), columns=("body",))
    tokens = encode_documents([row["body"] for row in table if row["split"] == "test"], tokenizer)
    assert actual.loss == evaluate_language_model(load_language_model(folder), tokens, 24).loss


@pytest.fixture
def ours(saved):
    """Folder of a model that reads blocks, a text, and the tokenizer."""
    folder, text, tokenizer = saved
    torch.manual_seed(0)
    sizes = {"width": 8, "heads": 2, "layers": 1, "branching": (4, 2), "near": 0}
    model = LanguageModel(LanguageModelConfig(tokenizer.get_vocab_size(), **sizes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save_language_model(folder, model, tokenizer)
    return folder, text, tokenizer


@pytest.mark.parametrize("context", [7, 50])
def test_blocks_of_a_given_length(ours, context):
    folder, text, tokenizer = ours
    actual = scores(folder, text, context=context)
    tokens = encode_documents(["\n\n".join(STORY)], tokenizer)
    assert actual.loss == evaluate_language_model(load_language_model(folder), tokens, context).loss
    assert (actual.context, actual.memory) == (context, 0)


def test_blocks_as_long_as_in_training(ours):
    folder, text, _ = ours
    (folder / "result.json").write_text('{"context": 33}')
    assert scores(folder, text) == replace(scores(folder, text, context=33), seconds=ANY)


def test_options_that_the_model_does_not_take(saved, ours):
    folder, text, _ = ours
    with pytest.raises(
        InvalidInput,
        match=r"^test_memory: expected a model that reads texts in segments.*, got 7 tokens for a model without a memory",
    ):
        scores(folder, text, memory=7)
    with pytest.raises(
        InvalidInput, match=r"^context: not given, and not stored in .*/model; expected a number of tokens"
    ):
        scores(folder, text)
    with pytest.raises(InvalidInput, match=r"^context: expected 1 or more tokens, got 0"):
        scores(folder, text, context=0)


def test_a_transformer_xl_has_segments(saved):
    folder, text, _ = saved
    with pytest.raises(
        InvalidInput, match=r"^context: expected no context: .* segments of 24 tokens, got 9 for a transformer-xl\. Set"
    ):
        scores(folder, text, context=9)


def test_texts_that_cannot_be_read(saved, tmp_path):
    folder, text, _ = saved
    (tmp_path / "empty.txt").write_text(" \n")
    for memory in (-1, -100):
        with pytest.raises(InvalidInput, match=f"^test_memory: expected 0 or more tokens, got {memory}"):
            scores(folder, text, memory=memory)
    with pytest.raises(InvalidInput, match=r"empty.txt: no text"):
        scores(folder, tmp_path / "empty.txt")
    with pytest.raises(InvalidInput, match=r"none.txt: no such file"):
        scores(folder, tmp_path / "none.txt")


def test_training_keeps_its_own_memory():
    model = TransformerXLLanguageModel(TransformerXLLanguageConfig(11, width=8, heads=2, layers=1, memory=3))
    set_test_memory(model, 50)
    assert (model.eval().layers.memory, model.train().layers.memory) == (50, 3)


def test_from_the_command_line(saved, capsys):
    folder, text, _ = saved

    def call(*words):
        with pytest.raises(SystemExit) as caught:
            run(["evaluate", *map(str, words)])
        return caught.value.code, *capsys.readouterr()

    code, out, err = call(folder, text, "--test-memory", "70", "--json")
    assert (code, err) == (0, "")
    actual = json.loads(out)
    assert list(actual) == list(asdict(scores(folder, text)))
    assert actual["memory"] == 70
    assert actual["loss"] == pytest.approx(scores(folder, text, memory=70).loss, rel=1e-4)
    code, out, _ = call(folder, text)
    assert "memory                10\n" in out
    assert call(folder, text, "--test-memory", "-2")[2] == (
        "test_memory: expected 0 or more tokens, got -2. 0 reads every segment on its own\n"
    )
    assert re.match(r"skip_bad: .*language model", call(folder, text, "--skip-bad")[2])
    assert "no such folder" in call(Path("nowhere"), text)[2]
