"""A saved language model on a new text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from hsa.errors import InvalidInput
from hsa.generation.loading import load_writer
from hsa.models.saved import LANGUAGE_MODEL, TRANSFORMER_XL, kind_of
from hsa.models.transformer_xl import set_test_memory
from hsa.models.transformer_xl_lm import TransformerXLLanguageModel
from hsa.training.lm_data import encode_documents, held_out_texts
from hsa.training.lm_loop import bits_per_character, evaluate_language_model, reader_of


@dataclass(frozen=True)
class TextScores:
    """How well a text is predicted, and what that cost. The loss in nats per token."""

    tokens: int
    memory: int  # tokens before a segment that every layer remembers
    loss: float
    perplexity: float
    bits_per_character: float
    attention_operations: float  # per token, all layers
    seconds: float


def is_language_model(folder: Path) -> bool:
    """Whether a folder holds a language model."""
    return kind_of(folder) in (LANGUAGE_MODEL, TRANSFORMER_XL)


def evaluate_text(
    folder: Path,
    data: Path,
    *,
    columns: tuple[str, ...] = (),
    memory: int | None = None,
    device: torch.device | str = "cpu",
) -> TextScores:
    """A Transformer-XL on a text, read as one stream. Of a table that names its test rows, these.

    Args:
        folder: of the model.
        data: a text, a folder of texts, or a table.
        columns: of a table, that hold text.
        memory: tokens that are remembered, in place of what the model was trained or saved with.

    Raises:
        InvalidInput: a model that has no memory; no text.
    """
    model, tokenizer = load_writer(folder, device)
    if memory is not None:
        set_test_memory(model, memory)
    if not isinstance(model, TransformerXLLanguageModel):
        raise InvalidInput(
            str(folder),
            given="a language model that reads blocks, of a size that only its training knows",
            expected="a classifier, a regressor or a Transformer-XL",
            fix="how good it is stands in the report of its run",
        )
    tokens = encode_documents(held_out_texts(data, columns), tokenizer)
    context = model.config.segment
    found = evaluate_language_model(model, tokens, context)
    return TextScores(
        tokens=found.tokens,
        memory=model.layers.memory,
        loss=found.loss,
        perplexity=math.exp(found.loss),
        bits_per_character=bits_per_character(found, tokens, tokenizer),
        attention_operations=reader_of(model, context).operations(tokens),
        seconds=found.seconds,
    )
