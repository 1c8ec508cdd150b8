"""A saved language model on a new text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from hsa.attention.checks import check_count
from hsa.errors import InvalidInput
from hsa.files import read_json
from hsa.generation.loading import load_writer
from hsa.models.causal_language_model import CausalLanguageModel
from hsa.models.memory import set_test_memory
from hsa.models.saved import LANGUAGE_MODEL, kind_of
from hsa.training.experiment import RESULT
from hsa.training.language_model.data import encode_documents, held_out_texts
from hsa.training.language_model.loop import bits_per_character, evaluate_language_model, reader_of


@dataclass(frozen=True)
class TextScores:
    """How well a text is predicted, and what that cost. The loss in nats per token."""

    tokens: int
    context: int  # tokens that are read at once: a block, or a segment
    memory: int  # tokens before it that every layer remembers
    loss: float
    perplexity: float
    bits_per_character: float
    attention_operations: float  # per token, all layers
    seconds: float


def is_language_model(folder: Path) -> bool:
    """Whether a folder holds a language model."""
    return kind_of(folder) == LANGUAGE_MODEL


def evaluate_text(
    folder: Path,
    data: Path,
    *,
    columns: tuple[str, ...] = (),
    context: int | None = None,
    memory: int | None = None,
    device: torch.device | str = "cpu",
) -> TextScores:
    """A language model on a text, read in blocks, or by a Transformer-XL as one stream.

    Of a table that names its test rows, these are read.

    Args:
        folder: of the model.
        data: a text, a folder of texts, or a table.
        columns: of a table, that hold text.
        context: tokens of a block, in place of what the model was trained with.
        memory: tokens that are remembered, in place of what the model was trained or saved with.

    Raises:
        InvalidInput: a memory for a model that has none, a context for one that has; no text.
    """
    model, tokenizer = load_writer(folder, device)
    if memory is not None:
        set_test_memory(model, memory)
    context = _context(folder, model, context)
    tokens = encode_documents(held_out_texts(data, columns), tokenizer)
    evaluation = evaluate_language_model(model, tokens, context)
    return TextScores(
        tokens=evaluation.tokens,
        context=context,
        memory=model.remembered_tokens,
        loss=evaluation.loss,
        perplexity=math.exp(evaluation.loss),
        bits_per_character=bits_per_character(evaluation, tokens, tokenizer),
        attention_operations=reader_of(model, context).operations(tokens),
        seconds=evaluation.seconds,
    )


def _context(folder: Path, model: CausalLanguageModel, given: int | None) -> int:
    """Tokens that are read at once: those of a segment, those that are asked for, or those of the run that trained it."""
    if model.fixed_context is not None:
        if given is not None:
            raise InvalidInput(
                "context",
                given=f"{given} tokens for a {model.config.architecture}",
                expected=f"none: it reads segments of {model.fixed_context}",
                fix="set how much it remembers with memory",
            )
        return model.fixed_context
    if given is not None:
        return check_count("context", given, "tokens of a block, 1 or more", minimum=1)
    known = read_json(folder / RESULT, "the result of a run") if (folder / RESULT).is_file() else {}
    if "context" not in known:
        raise InvalidInput(
            "context", given="none, and the model's folder does not say", expected="tokens of a block, such as 2048"
        )
    return int(known["context"])
