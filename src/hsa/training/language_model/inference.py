"""`LoadedLanguageModel`: a saved language model that generates texts, and its scores on a new text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import ClassVar

import torch

from hsa.attention.checks import check_count
from hsa.errors import InvalidInput
from hsa.files import read_json
from hsa.generation.generate_text import generate
from hsa.generation.sampling import Sampling
from hsa.generation.text_stream import TextStream
from hsa.models.causal_language_model import CausalLanguageModel
from hsa.models.folders import model_folder
from hsa.models.memory import set_test_memory
from hsa.models.saved import LANGUAGE_MODEL, load_language_model
from hsa.table_format import TableFormat
from hsa.training.data.prepare import load_model_tokenizer
from hsa.training.experiment import RESULT
from hsa.training.language_model.data import encode_documents, held_out_texts
from hsa.training.language_model.loop import bits_per_character, evaluate_language_model, reader_of
from hsa.training.loaded_model import LoadedModel


class LoadedLanguageModel(LoadedModel):
    """A language model that continues texts."""

    kind: ClassVar[str] = LANGUAGE_MODEL
    methods: ClassVar[tuple[str, ...]] = ("generate", "stream")
    model: CausalLanguageModel

    @classmethod
    def load(cls, folder: str | PathLike[str], device: torch.device | str = "cpu") -> LoadedLanguageModel:
        """Load the model of a folder that `hsa train --task lm` wrote, or the first model of a run.

        Raises:
            InvalidInput: For a file that is missing, damaged or of another kind of model.
        """
        folder = model_folder(Path(folder))
        return cls(folder, load_language_model(folder, device), load_model_tokenizer(folder))

    def stream(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
    ) -> TextStream:
        """Return an iterator over the text that `generate` returns, in pieces, as they are generated."""
        sampling = Sampling(temperature, top_k, top_p, seed)
        return generate(self.model, self.tokenizer, prompt, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop)


@dataclass(frozen=True)
class TextScores:
    """Quality and cost of the predictions for a text.

    Attributes:
        tokens: Number of tokens.
        context: Number of tokens that the model reads at once: a block, or a segment.
        memory: Number of tokens before them that every layer remembers.
        loss: Mean loss in nats per token.
        perplexity: Exponential of the loss.
        bits_per_character: Loss in bits per character of the text.
        attention_operations: Operations of attention per token, all layers.
        seconds: Time of the evaluation.
    """

    tokens: int
    context: int
    memory: int
    loss: float
    perplexity: float
    bits_per_character: float
    attention_operations: float
    seconds: float


def evaluate_text(
    loaded: LoadedLanguageModel,
    data: Path,
    *,
    columns: tuple[str, ...] = (),
    context: int | None = None,
    memory: int | None = None,
    table: TableFormat = TableFormat(),  # noqa: B008
) -> TextScores:
    """Score a language model on a text, read in blocks, or by a Transformer-XL as one stream.

    Args:
        loaded: Model to score.
        data: Text file, folder of text files, or table. A table that names its test rows is read at those.
        columns: Columns of the table that hold text.
        context: Number of tokens of a block; by default, that of the training.
        memory: Number of tokens that the model remembers from now on; by default, that of the training.
        table: Format of the table; text files have its encoding too.

    Raises:
        InvalidInput: If `memory` is given for a model without a memory, or `context` for one that reads segments; if there
            is no text.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    if memory is not None:
        set_test_memory(model, memory)
    context = _context(loaded.folder, model, context)
    tokens = encode_documents(held_out_texts(data, columns, table), tokenizer)
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


def _context(folder: Path, model: CausalLanguageModel, context: int | None) -> int:
    """Return the number of tokens read at once: that of a segment, `context`, or that of the training."""
    if model.fixed_context is not None:
        if context is not None:
            raise InvalidInput(
                "context",
                got=f"{context} for a {model.config.architecture}",
                expected=f"no context: the model reads segments of {model.fixed_context} tokens",
                fix="Set its memory instead (--test-memory)",
            )
        return model.fixed_context
    if context is not None:
        return check_count("context", context, "1 or more tokens", minimum=1)
    known = read_json(folder / RESULT, "the result of a run") if (folder / RESULT).is_file() else {}
    if "context" not in known:
        raise InvalidInput(
            "context", problem=f"not given, and not stored in {folder}", expected="a number of tokens, such as 2048"
        )
    return int(known["context"])
