"""Saved language models on new texts, and memories longer than in training."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hsa.cli.main import run
from hsa.errors import InvalidInput
from hsa.models.language_model import HierarchicalLanguageModel, LanguageModelConfig
from hsa.models.saved import load_language_model, save_language_model
from hsa.models.transformer_xl import set_test_memory
from hsa.models.transformer_xl_lm import TransformerXLLanguageConfig, TransformerXLLanguageModel
from hsa.signals.readers.text import train_tokenizer
from hsa.training.lm_data import CHAPTER, END, PARAGRAPH, encode_documents
from hsa.training.lm_inference import evaluate_text, is_language_model
from hsa.training.lm_loop import evaluate_language_model
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
    found = evaluate_text(folder, text, memory=memory)
    trained = load_language_model(folder)
    wanted = TransformerXLLanguageModel(replace(trained.config, test_memory=memory)).eval()
    wanted.load_state_dict(trained.state_dict())
    tokens = encode_documents(["\n\n".join(STORY)], tokenizer)
    loss = evaluate_language_model(wanted, tokens, 24).loss
    assert found.loss == pytest.approx(loss, rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(loss))
    assert found.memory == (10 if memory is None else memory)
    assert found.tokens == (len(tokens) - 1) // 24 * 24
    characters = len(tokenizer.decode(tokens[: found.tokens].tolist(), skip_special_tokens=False))
    assert found.bits_per_character == pytest.approx(loss / math.log(2) * found.tokens / characters)
    entry = 3 * 2 * 14 + 2
    assert found.attention_operations == 2 * entry * (found.memory + 12.5)


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
    found = evaluate_text(folder, write_rows(tmp_path / "rows.csv", table), columns=("body",))
    tokens = encode_documents([row["body"] for row in table if row["split"] == "test"], tokenizer)
    assert found.loss == evaluate_language_model(load_language_model(folder), tokens, 24).loss


def test_models_without_a_memory(saved):
    folder, text, tokenizer = saved
    ours = HierarchicalLanguageModel(LanguageModelConfig(tokenizer.get_vocab_size(), width=8, heads=2, layers=1))
    save_language_model(folder, ours, tokenizer)
    with pytest.raises(
        InvalidInput, match=r"^memory: given 7 tokens for a model without a memory, expected a Transformer"
    ):
        evaluate_text(folder, text, memory=7)
    with pytest.raises(
        InvalidInput, match=r"model: given a language model that reads blocks, .* a Transformer-XL; how"
    ):
        evaluate_text(folder, text)


def test_what_cannot_be_read(saved, tmp_path):
    folder, text, _ = saved
    (tmp_path / "empty.txt").write_text(" \n")
    for memory in (-1, -100):
        with pytest.raises(InvalidInput, match=f"^memory: given {memory}, expected 0 tokens or more"):
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

    code, out, err = call(folder, text, "--memory", "70", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert list(found) == list(asdict(evaluate_text(folder, text)))
    assert found["memory"] == 70
    assert found["loss"] == pytest.approx(evaluate_text(folder, text, memory=70).loss, rel=1e-4)
    code, out, _ = call(folder, text)
    assert "memory                10\n" in out
    assert call(folder, text, "--memory", "-2")[2] == (
        "memory: given -2, expected 0 tokens or more; 0 reads every segment on its own\n"
    )
    assert "skip_bad: given with a language model" in call(folder, text, "--skip-bad")[2]
    assert "no such folder" in call(Path("nowhere"), text)[2]
