"""Prompts and answers: what is read, what is learned, and a run that goes on."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from hsa.errors import HsaWarning, InvalidInput
from hsa.models.options import ModelOptions
from hsa.training.loop import Interrupted, Silent
from hsa.training.options import DataOptions, LanguageOptions, Seq2SeqOptions, TrainingOptions
from hsa.training.seq2seq.data import MarkedSentences, Pairs, PreparedPairs, prepare_pairs
from hsa.training.seq2seq.loop import evaluate_seq2seq, seq2seq_config, seq2seq_result, train_seq2seq
from tests.tables import write_rows

READ = DataOptions(text=("question",), label="answer", task="seq2seq", vocabulary=300)
MODEL = ModelOptions(width=24, heads=2, dropout=0.0, near=0, position_width=8)
LANGUAGE = LanguageOptions(branching=(2, 2), positions="both")


def colours(number: int = 40) -> list[dict[str, str]]:
    """Return questions about the colour of a light, among irrelevant sentences, with their answers."""
    says = {"red": "Stop now.", "green": "Go on.", "yellow": "Wait."}
    return [
        {"question": f"The light is {colour}. Day {i}.", "answer": says[colour]}
        for i, colour in zip(range(number), list(says) * number, strict=False)
    ]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> PreparedPairs:
    return prepare_pairs(write_rows(tmp_path_factory.mktemp("rows") / "lights.csv", colours()), READ)


def test_marked_sentences_ask_for_one_of_theirs() -> None:
    documents = list(MarkedSentences(50, seed=3).documents())
    for text, answer in documents:
        marked = re.findall(r"Repeat [a-z ]+\.", text)
        assert marked == [answer]
        assert text.count("\n\n") >= 1
    assert documents == list(MarkedSentences(50, seed=3).documents())
    assert documents != list(MarkedSentences(50, seed=4).documents())


@pytest.fixture(scope="module")
def marked() -> PreparedPairs:
    return prepare_pairs(None, DataOptions(task="seq2seq", vocabulary=400), small=True)


def test_generated_prompts_and_answers(marked: PreparedPairs) -> None:
    assert [len(p) for p in (marked.train, marked.validation, marked.test)] == [800, 100, 100]
    known = {answer for _, answer in MarkedSentences(1_000).documents()}
    decode = marked.input_spec.tokenizer.decode
    assert all(decode(marked.test.answer(i)) in known for i in range(100))
    assert marked.train.prompts.hierarchy.depth == 3  # paragraphs, sentences, tokens


def test_pairs(marked: PreparedPairs) -> None:
    pairs = marked.test
    part = pairs.select(np.array([5, 2, 5]))
    assert len(part) == 3
    assert [part.answer(i) for i in range(3)] == [pairs.answer(i) for i in (5, 2, 5)]
    inputs, targets, lengths = part.shifted(901, 902)
    assert lengths == [len(part.answer(i)) + 1 for i in range(3)]
    for i, (before, after) in enumerate(zip(inputs.split(lengths), targets.split(lengths), strict=True)):
        assert before.tolist() == [901, *part.answer(i)]
        assert after.tolist() == [*part.answer(i), 902]
    assert isinstance(part, Pairs)


@pytest.mark.parametrize(
    ("name", "decoder", "top_k"), [("hierarchical", "flat", None), ("multiscale", "multiscale", 1)]
)
def test_training_learns_the_answers(prepared: PreparedPairs, name: str, decoder: str, top_k: int | None) -> None:
    """The answer depends on one word of the prompt; generated answers are correct in full."""
    options = TrainingOptions(epochs=24, learning_rate=1e-2, batch_size=8, patience=0)
    config = seq2seq_config(
        prepared, name, MODEL, LANGUAGE, Seq2SeqOptions(decoder_attention=decoder, cross_top_k=top_k)
    )
    model, history = train_seq2seq(config, prepared, options)
    assert history[-1].loss < 0.1 * history[0].loss
    result = seq2seq_result(name, model, history, prepared, options)
    assert (result.scores.tokens, result.scores.exact) == (1.0, 1.0)
    assert result.decoder == decoder
    prompt, true, generated = result.examples[0]
    assert "The light is" in prompt
    assert generated == true


def test_the_best_epoch_is_kept(prepared: PreparedPairs) -> None:
    options = TrainingOptions(epochs=4, learning_rate=1e-2, batch_size=8, patience=0)
    model, history = train_seq2seq(
        seq2seq_config(prepared, "hierarchical", MODEL, LANGUAGE, Seq2SeqOptions()), prepared, options
    )
    scores, answers, _ = evaluate_seq2seq(model, prepared.validation, options)
    assert scores.tokens == max(record.validation for record in history)
    right = [answer == prepared.validation.answer(i) for i, answer in enumerate(answers)]
    assert scores.exact == sum(right) / len(right)


def test_a_resumed_run_has_the_same_result(prepared: PreparedPairs, tmp_path) -> None:
    options = TrainingOptions(epochs=2, learning_rate=1e-2, batch_size=8)
    config = seq2seq_config(prepared, "hierarchical", MODEL, LANGUAGE, Seq2SeqOptions())
    whole, history = train_seq2seq(config, prepared, options)

    class Impatient(Silent):
        def step(self, done, total, loss, learning_rate) -> None:
            if done == total - 1:
                raise Interrupted("enough")

    with pytest.raises(Interrupted):
        train_seq2seq(config, prepared, options, folder=tmp_path, watcher=Impatient())
    model, again = train_seq2seq(config, prepared, options, folder=tmp_path, resume=True)
    assert [r.loss for r in again] == [r.loss for r in history]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True))
    other = seq2seq_config(prepared, "hierarchical", MODEL, LANGUAGE, Seq2SeqOptions(cross_top_k=1))
    with pytest.raises(InvalidInput, match="top_k"):
        train_seq2seq(other, prepared, options, folder=tmp_path, resume=True)


def test_more_epochs(prepared: PreparedPairs, tmp_path) -> None:
    """At a constant rate they are one run; a run without patience left is not continued."""
    options = TrainingOptions(epochs=3, learning_rate=1e-2, batch_size=8, schedule="constant", warmup=0.0, patience=0)
    config = seq2seq_config(prepared, "flat", MODEL, LANGUAGE, Seq2SeqOptions())
    whole, history = train_seq2seq(config, prepared, options)
    train_seq2seq(config, prepared, replace(options, epochs=1), folder=tmp_path)
    with pytest.warns(HsaWarning, match=r"continues to 3 epochs instead of 1\. .* \(0\.01 now\)"):
        model, again = train_seq2seq(config, prepared, options, folder=tmp_path, resume=True)
    assert [r.loss for r in again] == [r.loss for r in history]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True))
    impatient = replace(options, epochs=9, patience=1, learning_rate=1e-30)
    _, before = train_seq2seq(config, prepared, impatient, folder=tmp_path / "impatient")
    with pytest.warns(HsaWarning, match="ended before its 9 epochs because of --patience, so that more epochs do not"):
        _, after = train_seq2seq(
            config, prepared, replace(impatient, epochs=12), folder=tmp_path / "impatient", resume=True
        )
    assert after == before


def test_bad_input(tmp_path, prepared: PreparedPairs) -> None:
    path = write_rows(tmp_path / "lights.csv", colours(6))
    for wrong in ({"text": ()}, {"label": None}, {"text": ("question", "answer")}, {"number": ("answer",)}):
        options = DataOptions(**{"text": ("question",), "label": "answer", "vocabulary": 300, **wrong})
        with pytest.raises(InvalidInput, match="--text PROMPT --label ANSWER"):
            prepare_pairs(path, options)
    with pytest.raises(InvalidInput, match="colour"):
        prepare_pairs(path, DataOptions(text=("colour",), label="answer"))
    with pytest.raises(InvalidInput, match="data: expected enough examples for training, validation and test, got 2"):
        prepare_pairs(write_rows(tmp_path / "two.csv", colours(2)), READ)
    with pytest.raises(InvalidInput, match="deepsets"):
        seq2seq_config(prepared, "deepsets", MODEL, LANGUAGE, Seq2SeqOptions())
    config = seq2seq_config(prepared, "hierarchical", MODEL, LANGUAGE, Seq2SeqOptions())
    with pytest.raises(InvalidInput, match="fp16"):
        train_seq2seq(config, prepared, TrainingOptions(mixed_precision="fp16"))
    empty = write_rows(tmp_path / "empty.csv", [*colours(6), {"question": "Who?", "answer": ""}])
    with pytest.raises(InvalidInput, match="skip-bad"):
        prepare_pairs(empty, READ)
