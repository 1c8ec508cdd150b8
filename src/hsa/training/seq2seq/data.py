"""Pairs of prompts and answers: two text columns of a file, or generated documents with one sentence to repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hsa.errors import InvalidInput
from hsa.nn.embedding import Modality
from hsa.signals.batch import Batch, collate
from hsa.signals.readers.rows import load_rows
from hsa.signals.readers.text import read_text, train_tokenizer
from hsa.training.data.data_set import Example
from hsa.training.data.prepare import InputSpec, columns_of
from hsa.training.data.sources import Columns, OnBad, Rows, Source, digest, digest_arrays, or_skip
from hsa.training.options import DataOptions
from hsa.tree.hierarchy import ranges

SHARES = (0.8, 0.1, 0.1)


@dataclass(frozen=True, eq=False)
class Pairs:
    """Prompts in one large batch, and the concatenated tokens of all answers, without start and end tokens."""

    prompts: Batch
    answers: np.ndarray
    offsets: np.ndarray  # of the answers [examples + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """Number of leaves of the prompt plus tokens of the answer, per example."""
        return np.diff(self.prompts.hierarchy.structure.leaf_offsets) + np.diff(self.offsets)

    @cached_property
    def digest(self) -> str:
        """Hash of the prompts, their trees and the answers."""
        values = (values.numpy() for values in self.prompts.values.values() if isinstance(values, Tensor))
        return self.prompts.hierarchy.digest + digest_arrays(self.answers, self.offsets, *values)

    def select(self, examples: np.ndarray) -> Pairs:
        """Return the examples with these indices."""
        lengths = np.diff(self.offsets)[examples]
        answers = self.answers[ranges(self.offsets[:-1][examples], lengths)]
        return Pairs(self.prompts.select(examples), answers, np.concatenate([[0], np.cumsum(lengths)]))

    def answer(self, example: int) -> list[int]:
        """Return the tokens of an answer."""
        return self.answers[self.offsets[example] : self.offsets[example + 1]].tolist()

    def shifted(self, start: int, end: int) -> tuple[Tensor, Tensor, list[int]]:
        """Return the inputs of the decoder (start + answer), its targets (answer + end), and the lengths of both."""
        first, after = self.offsets[:-1], self.offsets[1:]
        inputs, targets = np.insert(self.answers, first, start), np.insert(self.answers, after, end)
        return torch.from_numpy(inputs), torch.from_numpy(targets), (np.diff(self.offsets) + 1).tolist()


@dataclass(frozen=True, eq=False)
class PreparedPairs:
    """Data for training. The decoder's vocabulary is that of the tokenizer, followed by the start and end tokens."""

    train: Pairs
    validation: Pairs
    test: Pairs
    input_spec: InputSpec
    name: str
    skipped: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Vocabulary size of the tokenizer."""
        return self.input_spec.tokenizer.get_vocab_size()

    @property
    def modalities(self) -> dict[str, Modality]:
        """Modalities of the prompts."""
        return {"text": Modality(tokens=self.tokens)}


class MarkedSentences:
    """Documents of random words, in paragraphs. One sentence begins with "Repeat"; the answer is this sentence.

    Args:
        number: Number of documents.
        seed: Random seed.
    """

    SYLLABLES = ("ba", "de", "fi", "go")

    def __init__(self, number: int, seed: int = 0):
        self.number, self.seed = number, seed

    def documents(self) -> Iterator[tuple[str, str]]:
        """Yield documents with their answers."""
        draw = np.random.default_rng(self.seed)
        words = [a + b for a in self.SYLLABLES for b in self.SYLLABLES]
        for _ in range(self.number):
            paragraphs = draw.integers(2, 4, size=2)
            sentences = [
                [words[i] for i in draw.integers(len(words), size=draw.integers(3, 7))] for _ in range(paragraphs.sum())
            ]
            marked = int(draw.integers(len(sentences)))
            written = [
                f"Repeat {' '.join(s)}." if i == marked else f"{' '.join(s).capitalize()}."
                for i, s in enumerate(sentences)
            ]
            parts = np.split(np.array(written, dtype=object), np.cumsum(paragraphs)[:-1])
            yield "\n\n".join(" ".join(part) for part in parts), written[marked]

    def texts(self) -> Iterator[str]:
        for text, answer in self.documents():
            yield from (text, answer)

    def examples(self, tokenizer: Any, on_bad: OnBad) -> Iterator[Example]:
        for i, (text, answer) in enumerate(self.documents()):
            yield Example(read_text(text, tokenizer), answer, f"document {i}")

    def fingerprint(self) -> str:
        return digest(["marked sentences", str(self.number), str(self.seed)])


def prepare_pairs(
    data: Path | None,
    options: DataOptions,
    *,
    seed: int = 0,
    small: bool = False,
    max_answer: int = 256,
    say: Callable[[str], None] = lambda message: None,
) -> PreparedPairs:
    """Read prompts and answers, train a tokenizer on both, and split the data.

    Args:
        data: File of rows with the columns `options.text` (the prompt) and `options.label` (the answer); None for
            generated documents with one sentence to repeat.
        options: Options of the data.
        seed: Random seed of the split and of generated documents.
        small: Whether to generate fewer documents.
        max_answer: Maximum number of tokens per answer; the rest is cut off.
        say: Callback for progress messages.
    """
    sources = {"train": _source(data, options, seed, small)}
    for name, path in (("validation", options.validation), ("test", options.test)):
        if path is not None:
            sources[name] = _source(path, options, seed, small)
    skipped: list[str] = []

    def on_bad(error: InvalidInput) -> None:
        if not options.skip_bad:
            raise or_skip(error)
        skipped.append(str(error))

    say("training a tokenizer")
    source = sources["train"]
    answers = (str(x) for x in source.rows.column(options.label or "")) if isinstance(source, Rows) else ()
    tokenizer = train_tokenizer([*source.texts(), *answers], options.vocabulary)
    columns = columns_of(options) if data is not None else Columns(text=("text",), label="answer")
    spec = InputSpec("rows", columns, options.max_tokens, options.max_family, tokenizer)
    say("reading")
    sets = {name: _pairs(spec.examples(part, on_bad), tokenizer, max_answer) for name, part in sources.items()}
    missing = [name for name in ("validation", "test") if name not in sets]
    order = np.random.default_rng(seed).permutation(len(sets["train"]))
    held = max(1, round(SHARES[1] * len(order)))
    cuts = np.split(order, [len(order) - held * k for k in range(len(missing), 0, -1)])
    if min(map(len, cuts)) < 1:
        raise InvalidInput("data", got=len(order), expected="enough examples for training, validation and test")
    whole = sets["train"]
    sets |= {name: whole.select(cut) for name, cut in zip(["train", *missing], cuts, strict=True)}
    name = "marked sentences" if data is None else data.name
    return PreparedPairs(sets["train"], sets["validation"], sets["test"], spec, name, tuple(skipped))


def _source(data: Path | None, options: DataOptions, seed: int, small: bool) -> Source:
    if data is None:
        options.refuse("generated documents")
        return MarkedSentences(1_000 if small else 10_000, seed)
    if len(options.text) != 1 or options.label is None or options.number or options.image:
        label = () if options.label is None else (options.label,)
        named = {"text": options.text, "label": label, "number": options.number, "image": options.image}
        raise InvalidInput(
            str(data),
            got=", ".join(f"--{name} {','.join(columns)}" for name, columns in named.items() if columns) or "neither",
            expected="a column of prompts and a column of answers",
            fix="Name them with --text PROMPT --label ANSWER",
        )
    rows = load_rows(data, delimiter=options.delimiter, encoding=options.encoding)
    return Rows(rows, columns_of(options))


def _pairs(examples: Iterator[Example], tokenizer: Any, max_answer: int) -> Pairs:
    pairs = list(examples)
    if not pairs:
        raise InvalidInput("data", problem="empty", expected="at least one example")
    encoded = tokenizer.encode_batch([str(example.target) for example in pairs], add_special_tokens=False)
    answers = [e.ids[:max_answer] for e in encoded]
    offsets = np.concatenate([[0], np.cumsum([len(a) for a in answers])])
    return Pairs(collate([e.signal for e in pairs]), np.array([i for a in answers for i in a], np.int64), offsets)
