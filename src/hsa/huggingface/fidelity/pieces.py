"""Pieces of equal length from texts, on which language models are compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from sys import maxsize
from typing import Any

import numpy as np

from hsa.errors import InvalidInput
from hsa.huggingface.fidelity.examples import Examples

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

    def sample(self, count: int) -> Pieces:
        """Return some of the pieces: the first ones."""
        return replace(self, ids=self.ids[:count])

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
        sources = cutter.read(cutter.texts)
        ids = [piece for source in sources for piece in source.first(maxsize)]
        return cutter.pieces(ids, sources)
    return cutter.deal(cutter.spread(cutter.texts, count), count)


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
    sources = cutter.spread(
        cutter.texts, 2 * search
    )  # whatever `report` is: measurements of a search can be used again
    if len(sources) == 1:
        some = min(search, len(sources[0].first(2 * search)) // 2)
        if not some:
            raise InvalidInput(
                examples.name,
                got=f"one piece of {longest:,} tokens",
                expected="at least 2, to search on some and to report on the others",
                fix="Pass smaller --max-tokens, or --calibration FILE to search on other texts",
            )
        ids = sources[0].first(some + report)
        return cutter.pieces(ids[:some], sources), cutter.pieces(ids[some:], sources)
    some = min(search, len(sources) // 2)
    held = [sources[i * len(sources) // some] for i in range(some)]
    searched = {id(text) for source in held for text in source.texts}
    others = [text for text in cutter.texts if id(text) not in searched]
    return cutter.deal(held, search), cutter.deal(cutter.spread(others, report), report)


@dataclass
class _Source:
    """A text, which is tokenized as far as it is needed, or a piece of several short texts."""

    text: str
    tokenizer: Any
    step: int
    ids: list[int] = field(default_factory=list)
    complete: bool = False
    joined: Sequence[_Source] = ()

    @property
    def texts(self) -> Sequence[_Source]:
        return self.joined or [self]

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
        texts = sum(len(source.texts) for source in sources)
        return Pieces(self.name, [self.begin + piece for piece in ids], texts)

    def deal(self, sources: list[_Source], count: int) -> Pieces:
        """Take the first piece of each source, then the second of each, and so on."""
        dealt: list[list[int]] = []
        for turn in range(count):
            more = [source.first(turn + 1)[turn:] for source in sources]
            dealt += chain.from_iterable(more)
            if len(dealt) >= count or not any(more):
                break
        return self.pieces(dealt[:count], sources[:count])

    def spread(self, texts: Sequence[_Source], wanted: int) -> list[_Source]:
        """Return up to `wanted` sources, from all parts of the texts if there are enough."""
        blocks = np.array_split(np.arange(len(texts)), min(wanted, len(texts)))
        spread = [source for block in blocks for source in islice(self._read(texts[i] for i in block), 1)]
        return spread if len(spread) == wanted else max(spread, self.read(texts, wanted), key=len)

    def read(self, texts: Sequence[_Source], most: int | None = None) -> list[_Source]:
        """Return the sources in the order of the texts."""
        sources = list(islice(self._read(texts), most))
        if not sources:
            raise InvalidInput(
                self.name,
                expected=f"at least {self.step:,} tokens, for one piece",
                got=f"{sum(len(text.ids) for text in texts):,} tokens",
                fix="Pass smaller --max-tokens",
            )
        return sources

    def _read(self, texts: Iterable[_Source]) -> Iterator[_Source]:
        ids: list[int] = []
        short: list[_Source] = []
        for text in texts:
            if text.first(1):
                yield text
                continue
            ids += [*self.between, *text.ids] if ids else text.ids
            short.append(text)
            if len(ids) >= self.step:
                yield _Source("", None, self.step, ids[: self.step], complete=True, joined=short)
                ids, short = [], []


def tokenize_plain(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text without special tokens."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
