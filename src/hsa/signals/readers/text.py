"""Plain text → paragraphs → sentences → tokens."""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path
from typing import Any

from hsa.errors import InvalidInput, MissingExtra
from hsa.signals.readers.outline import grow
from hsa.signals.readers.tokens import encodable, train_tokenizer
from hsa.signals.signal import Signal

__all__ = ["LANGUAGES", "decode_text", "load_text", "read_text", "read_text_file", "train_tokenizer"]

# The languages for which sentencex has rules of its own; for others it takes those of a related one or of English, and
# does not say so. The package has no such list.
_CODES = "am ar bg bn ca da de el en es fi fr gu hi hy it ja kk kn ml mr my nl pa pl pt ru sk ta te uk"
LANGUAGES = frozenset(_CODES.split())

_BLANK_LINES = re.compile(r"\n\s*\n")
_LINE_END = re.compile(r"\s*\n\s*")


def read_text(text: str, tokenizer: Any = None, language: str = "en", *, where: str = "text") -> Signal:
    """A text as a signal of depth 3: paragraphs at blank lines, sentences by `sentencex`, tokens.

    Args:
        tokenizer: makes token ids of a sentence, without special tokens: a `tokenizers.Tokenizer`, the path of a
            tokenizer.json, or an object with Hugging Face's `encode(text, add_special_tokens=False)`. Without one the
            leaves are words and punctuation marks, as strings.
        language: a code such as "en" or "de", for the sentence splitter. Those it has no rules for (see `LANGUAGES`)
            are split as a related language, or as English.
        where: the name of the text in error messages.

    Sentences are tokenized one by one, stripped of the space around them.

    >>> print(read_text("It rained. Dr. Ito stayed in.\\n\\nThe cat did not.").show())
    Sequence(2) · 14 leaves · text
    ├─ [0] Sequence(2) · 9 leaves · text
    │  ├─ [0] Sequence(3) · 3 leaves · text · 'It' 'rained' '.'
    │  └─ [1] Sequence(6) · 6 leaves · text · 'Dr' '.' 'Ito' 'stayed' 'in' '.'
    └─ [1] Sequence(1) · 5 leaves · text
       └─ [0] Sequence(5) · 5 leaves · text · 'The' 'cat' 'did' 'not' '.'

    Raises:
        InvalidInput: nothing to read in the text; an object that is no tokenizer.
        MissingExtra: `sentencex` or `tokenizers` is not installed.
    """
    return grow(paragraphs(text, language, where=where), tokenizer, where=where)


def read_text_file(
    path: str | PathLike[str], tokenizer: Any = None, language: str = "en", *, encoding: str = "utf-8"
) -> Signal:
    """`read_text` of a file.

    Raises:
        InvalidInput: naming the file, when it is not there, is not text in this encoding, or holds no words.
    """
    return read_text(load_text(path, encoding=encoding), tokenizer, language, where=str(path))


def load_text(path: str | PathLike[str], *, encoding: str = "utf-8") -> str:
    """The text of a file; a byte order mark at its start is left out. Raises as `read_text_file` does."""
    return decode_text(load_bytes(path), encoding=encoding, where=str(path))


def load_bytes(path: str | PathLike[str], *, expected: str = "a readable text file", where: str | None = None) -> bytes:
    """The bytes of a file.

    Raises:
        InvalidInput: naming the file, when it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        named: dict[type, str] = {FileNotFoundError: "no such file", IsADirectoryError: "a directory"}
        given = named.get(type(error)) or getattr(error, "strerror", None) or error
        raise InvalidInput(where or str(path), given=given, expected=expected) from None


def decode_text(data: bytes, *, encoding: str = "utf-8", where: str = "text") -> str:
    """Bytes as text; a byte order mark at their start is left out.

    Raises:
        InvalidInput: naming the text, when it is binary or is not in this encoding.
    """
    if b"\0" in data and "\0" in data.decode(encoding, errors="replace"):
        raise InvalidInput(
            where,
            given="binary data (it has NUL bytes)",
            expected=f"text in {encoding}",
            fix=f"if it is text in another encoding, convert it to {encoding}",
        )
    try:
        return data.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            where,
            given=f"the byte 0x{data[error.start]:02x} at offset {error.start:,}",
            expected=f"text in {encoding}",
            fix=f"if it is text in another encoding, convert it to {encoding}",
        ) from None


def paragraphs(text: str, language: str, *, where: str) -> list[list[str]]:
    """The sentences of each paragraph. Lines may be wrapped anywhere in a paragraph.

    >>> paragraphs("It rained.  It\\nsnowed.\\n\\nThen what?", "en", where="text")
    [['It rained.', 'It snowed.'], ['Then what?']]

    Raises:
        InvalidInput: no string.
        MissingExtra: `sentencex` is not installed.
    """
    parts = _BLANK_LINES.split(normalize_newlines(check_text(text, where)))
    return [sentences(stripped, language) for part in parts if (stripped := part.strip())]


def sentences(paragraph: str, language: str) -> list[str]:
    """The sentences of one paragraph, each on one line, so that wrapping the lines elsewhere changes no token.

    >>> sentences("It rained\\n all day. Dr. Ito stayed in.", "en")
    ['It rained all day.', 'Dr. Ito stayed in.']
    """
    try:
        from sentencex import segment  # type: ignore[import-untyped]
    except ImportError:
        raise MissingExtra("sentencex", "text", "splitting text into sentences") from None
    line = encodable(_LINE_END.sub(" ", paragraph))
    return [stripped for sentence in segment(language, line) if (stripped := sentence.strip())]


def lines(text: str) -> list[str]:
    """The lines of a text whose lines mean something, such as code; they keep their indent.

    >>> lines("if cat:\\n    feed(cat)  \\n")
    ['if cat:', '    feed(cat)', '']
    """
    return [line.rstrip() for line in normalize_newlines(text).split("\n")]


def normalize_newlines(text: str) -> str:
    """The text with one character at the end of each line, whatever system it was written on."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def check_text(text: Any, where: str) -> str:
    if not isinstance(text, str):
        raise InvalidInput(where, given=type(text).__name__, expected="a string")
    return text
