"""Pieces of equal length from texts, on which language models are compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from sys import maxsize
from typing import Any

import numpy as np

from hsa.attention.clustered.layout import BRANCHING
from hsa.errors import InvalidInput
from hsa.huggingface.fidelity.examples import Examples

CHUNK = math.prod(BRANCHING)
"""Number of tokens of a chunk, inside which converted decoders attend exactly."""
_CHARACTERS = 8
"""Number of characters per token that nearly all texts stay below, to tokenize no more of a text than is needed."""


@dataclass(frozen=True)
class Pieces:
    """Token ids of pieces of equal length.

    Args:
        name: Name of the texts in reports and error messages.
        ids: Token ids of each piece.
        texts: Number of texts that they come from.
    """

    name: str
    ids: list[list[int]]
    texts: int

    def __len__(self) -> int:
        return len(self.ids)

    def __str__(self) -> str:
        pieces = f"{len(self)} piece{'s' * (len(self) > 1)} of {len(self.ids[0]):,} tokens"
        return f"{pieces} from {self.texts} text{'s' * (self.texts > 1)}"


def cut_pieces(examples: Examples, tokenizer: Any, longest: int, count: int | None = None) -> Pieces:
    """Cut texts into pieces of `longest` tokens. Texts that are shorter are joined with the next ones.

    Args:
        examples: Texts; one that occurs twice is read once.
        tokenizer: Tokenizer of the model. If it has a token for the beginning of a text, every piece begins with it.
        longest: Number of tokens per piece.
        count: Maximum number of pieces, from as many texts as possible, spread over all. Default: all pieces.

    Raises:
        InvalidInput: All texts together have fewer tokens than one piece.
    """
    cutter = _Cutter(examples, tokenizer, longest)
    if count is None:
        sources = cutter.sources()
        ids = [piece for source in sources for piece in source.first(maxsize)]
        return cutter.pieces(ids, sources)
    return cutter.deal(cutter.spread_sources(count), count)


def split_pieces(examples: Examples, tokenizer: Any, longest: int, search: int, report: int) -> tuple[Pieces, Pieces]:
    """Cut pieces to search on and pieces to report on, from different texts, or from two parts of a single text.

    Args:
        examples: Texts, as for `cut_pieces`.
        tokenizer: Tokenizer, as for `cut_pieces`.
        longest: Number of tokens per piece.
        search: Maximum number of pieces to search on.
        report: Maximum number of pieces to report on.

    Raises:
        InvalidInput: There are fewer than two pieces.
    """
    cutter = _Cutter(examples, tokenizer, longest)
    sources = cutter.spread_sources(search + report)
    if len(sources) == 1:
        ids = sources[0].first(search + report)
        if len(ids) < 2:
            raise InvalidInput(
                examples.name,
                got=f"one piece of {longest:,} tokens",
                expected="at least 2, to search on some and to report on the others",
                fix="Pass smaller --max-tokens, or --calibration FILE to search on other texts",
            )
        some = min(search, len(ids) // 2)
        return cutter.pieces(ids[:some], sources), cutter.pieces(ids[some : some + report], sources)
    some = min(search, len(sources) // 2)
    drawn = {i * len(sources) // some for i in range(some)}
    held, rest = ([s for i, s in enumerate(sources) if (i in drawn) is wanted] for wanted in (True, False))
    return cutter.deal(held, search), cutter.deal(rest, report)


@dataclass
class _Source:
    """A text, which is tokenized as far as it is needed, or a piece of several short texts."""

    text: str
    tokenizer: Any
    step: int
    ids: list[int] = field(default_factory=list)
    complete: bool = False
    texts: int = 1

    def first(self, count: int) -> list[list[int]]:
        """Return the first pieces, at most `count`."""
        if not self.complete and len(self.ids) < count * self.step:
            characters = _CHARACTERS * self.step * max(count, 2 * len(self.ids) // self.step)
            ids = tokenize_plain(self.tokenizer, self.text[:characters])
            if characters < len(self.text) and len(ids) <= count * self.step:  # long tokens
                characters, ids = len(self.text), tokenize_plain(self.tokenizer, self.text)
            self.complete = characters >= len(self.text)
            self.ids = ids if self.complete else ids[:-1]  # the last token may be cut
        whole = min(count, len(self.ids) // self.step)
        return [self.ids[i * self.step : (i + 1) * self.step] for i in range(whole)]


class _Cutter:
    def __init__(self, examples: Examples, tokenizer: Any, longest: int):
        self.name = examples.name
        self.begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        self.step = longest - len(self.begin)
        self.between = tokenize_plain(tokenizer, "\n\n")
        texts = dict.fromkeys("\n\n".join(parts) for parts in examples.texts)
        self.texts = [_Source(text, tokenizer, self.step) for text in texts]

    def pieces(self, ids: Sequence[list[int]], sources: Sequence[_Source]) -> Pieces:
        return Pieces(self.name, [self.begin + piece for piece in ids], sum(source.texts for source in sources))

    def deal(self, sources: list[_Source], count: int) -> Pieces:
        """Take the first piece of each source, then the second of each, and so on."""
        dealt: list[list[int]] = []
        for turn in range(count):
            more = [source.first(turn + 1)[turn:] for source in sources]
            dealt += chain.from_iterable(more)
            if len(dealt) >= count or not any(more):
                break
        return self.pieces(dealt[:count], sources[:count])

    def spread_sources(self, wanted: int) -> list[_Source]:
        """Return up to `wanted` sources, from all parts of the data if there are enough."""
        blocks = np.array_split(np.arange(len(self.texts)), min(wanted, len(self.texts)))
        spread = list(chain.from_iterable(islice(self._read(block.tolist()), 1) for block in blocks))
        return spread if len(spread) == wanted else max(spread, self.sources(wanted), key=len)

    def sources(self, most: int | None = None) -> list[_Source]:
        """Return the sources in the order of the texts."""
        sources = list(islice(self._read(range(len(self.texts))), most))
        if not sources:
            raise InvalidInput(
                self.name,
                expected=f"at least {self.step:,} tokens, for one piece",
                got=f"{sum(len(text.ids) for text in self.texts):,} tokens",
                fix="Pass smaller --max-tokens",
            )
        return sources

    def _read(self, numbers: Iterable[int]) -> Iterator[_Source]:
        joined: list[int] = []
        texts = 0
        for text in (self.texts[number] for number in numbers):
            if text.first(1):
                yield text
                continue
            joined += [*self.between, *text.ids] if joined else text.ids
            texts += 1
            if len(joined) >= self.step:
                yield _Source("", None, self.step, joined[: self.step], complete=True, texts=texts)
                joined, texts = [], 0


def tokenize_plain(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text without special tokens."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
