"""Read plain text: paragraphs → sentences → tokens."""

from __future__ import annotations

import codecs
import re
from os import PathLike
from pathlib import Path
from typing import Any

from hsa.errors import InvalidInput, MissingExtra
from hsa.signals.readers.outline import build_signal
from hsa.signals.readers.tokens import encodable, train_tokenizer
from hsa.signals.signal import Signal

__all__ = ["LANGUAGES", "decode_text", "load_text", "read_text", "read_text_file", "train_tokenizer"]

# Languages for which sentencex has its own rules, a list that the package does not offer. It splits other languages by the
# rules of a related language or of English, without a warning.
_CODES = "am ar bg bn ca da de el en es fi fr gu hi hy it ja kk kn ml mr my nl pa pl pt ru sk ta te uk"
LANGUAGES = frozenset(_CODES.split())

# Python decodes these to text, too, but they encode names and literals: some take quadratic time, some run into warnings.
_NOT_FOR_FILES = frozenset({"idna", "punycode", "undefined", "unicode-escape", "raw-unicode-escape"})

# Plain spaces for all others, such as no-break spaces: sentencex 1.0 panics if one of several bytes precedes a full stop.
_PLAIN_SPACES = {code: " " for code in range(0x80, 0x3001) if chr(code).isspace()}

_BYTE_ORDER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

_BLANK_LINES = re.compile(r"\n\s*\n")


def read_text(text: str, tokenizer: Any = None, language: str = "en", *, where: str = "text") -> Signal:
    """Read a text as a signal of depth 3: paragraphs → sentences → tokens.

    Blank lines separate paragraphs; `sentencex` splits sentences, which are tokenized one by one without the space around
    them.

    Args:
        text: Text to read.
        tokenizer: Tokenizer of sentences, used without special tokens: a `tokenizers.Tokenizer`, the path of a
            tokenizer.json, or an object with Hugging Face's `encode(text, add_special_tokens=False)`. By default the
            leaves are words and punctuation marks, as strings.
        language: Code such as "en" or "de", for the sentence splitter. Languages without rules (see `LANGUAGES`) are
            split as a related language, or as English.
        where: Name of the text in error messages.

    Raises:
        InvalidInput: For a text without words, or an object that is not a tokenizer.
        MissingExtra: If `sentencex` or `tokenizers` is not installed.

    >>> print(read_text("It rained. Dr. Ito stayed in.\\n\\nThe cat did not.").show())
    Sequence(2) · 14 leaves · text
    ├─ [0] Sequence(2) · 9 leaves · text
    │  ├─ [0] Sequence(3) · 3 leaves · text · 'It' 'rained' '.'
    │  └─ [1] Sequence(6) · 6 leaves · text · 'Dr' '.' 'Ito' 'stayed' 'in' '.'
    └─ [1] Sequence(1) · 5 leaves · text
       └─ [0] Sequence(5) · 5 leaves · text · 'The' 'cat' 'did' 'not' '.'
    """
    return build_signal(paragraphs(text, language, where=where), tokenizer, where=where)


def read_text_file(
    path: str | PathLike[str], tokenizer: Any = None, language: str = "en", *, encoding: str = "utf-8"
) -> Signal:
    """Read a text file as `read_text` does.

    Raises:
        InvalidInput: For a file that is missing, is not text in this encoding, or has no words; the message names it.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile(suffix=".txt") as file:
    ...     _ = file.write(b"It rains. Stay in.") + file.seek(0)
    ...     read_text_file(file.name).num_leaves
    6
    """
    return read_text(load_text(path, encoding=encoding), tokenizer, language, where=str(path))


def load_text(path: str | PathLike[str], *, encoding: str = "utf-8") -> str:
    """Load the text of a file, without a byte order mark. Raises as `read_text_file` does."""
    return decode_text(load_bytes(path), encoding=encoding, where=str(path))


def load_bytes(path: str | PathLike[str], *, expected: str = "a readable text file", where: str | None = None) -> bytes:
    """Load the bytes of a file.

    Raises:
        InvalidInput: For a file that cannot be read; the message names it.
    """
    try:
        return Path(path).read_bytes()
    except IsADirectoryError:
        raise InvalidInput(where or str(path), got="a folder", expected=expected) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        missing = isinstance(error, FileNotFoundError)
        problem = "no such file" if missing else f"cannot be read ({getattr(error, 'strerror', None) or error})"
        raise InvalidInput(where or str(path), problem=problem, expected=expected) from None


def decode_text(data: bytes, *, encoding: str = "utf-8", where: str = "text") -> str:
    """Decode bytes, without a byte order mark.

    Raises:
        InvalidInput: For binary data, another encoding, or an encoding that does not decode text.
    """
    binary = InvalidInput(
        where,
        got="binary data (it has NUL bytes)",
        expected=f"text in {encoding}",
        fix=f"If it is text in another encoding, convert it to {encoding}",
    )
    try:
        text = decode_as(data, encoding)
    except UnicodeDecodeError as error:
        if b"\0" in data and "\0" in data.decode(encoding, errors="replace"):
            raise binary from None
        raise binary.moved(where, got=f"the byte 0x{data[error.start]:02x} at offset {error.start:,}") from None
    except (LookupError, ValueError) as error:
        raise InvalidInput(
            where,
            problem=f"the encoding {encoding!r} is not one of text files ({error})",
            expected="an encoding such as utf-8",
            fix="Convert the file to utf-8",
        ) from None
    if "\0" in text:
        raise binary
    return text.removeprefix("\ufeff")


def decode_file(data: bytes, encoding: str, where: str) -> str:
    """Decode a file whose encoding is an option of the command that reads it.

    Raises:
        InvalidInput: For another encoding; the message names the line and the option that sets the encoding.
    """
    try:
        return decode_text(data, encoding=encoding, where=where)
    except InvalidInput as error:
        raise _encoding_error(error, data, encoding) from None


def _encoding_error(error: InvalidInput, data: bytes, encoding: str) -> InvalidInput:
    """Return the error with the line that cannot be decoded, and with the option that names the encoding."""
    if error.got is None:  # no such encoding
        return error.moved("encoding", fix=None)
    if data.startswith(_BYTE_ORDER_MARKS) and not data.startswith(codecs.BOM_UTF32_LE):
        return error.moved(error.where, got="text in utf-16", fix="Pass its encoding: --encoding utf-16")
    if b"\0" in data:
        return error.moved(error.where, fix="If it is text, pass its encoding, such as --encoding utf-16-le")
    try:
        data.decode(encoding)
    except UnicodeDecodeError as bad:
        line = data.count(b"\n", 0, bad.start) + 1
        return error.moved(f"{error.where}: line {line}", fix="Pass its encoding, such as --encoding cp1252")
    return error


def decode_as(data: bytes, encoding: str) -> str:
    """Decode bytes in an encoding that a file declares.

    Raises:
        UnicodeError: For data that are not in this encoding.
        LookupError: For an unknown encoding, or one that is not for text files, such as hex.
    """
    if codecs.lookup(encoding).name in _NOT_FOR_FILES:
        raise LookupError("it is not for files")
    return data.decode(encoding)


def paragraphs(text: str, language: str, *, where: str) -> list[list[str]]:
    """Return the sentences of each paragraph; line breaks within a paragraph do not matter.

    Raises:
        InvalidInput: For an object that is not a string.
        MissingExtra: If `sentencex` is not installed.

    >>> paragraphs("It rained.  It\\nsnowed.\\n\\nThen what?", "en", where="text")
    [['It rained.', 'It snowed.'], ['Then what?']]
    """
    parts = _BLANK_LINES.split(normalize_newlines(check_text(text, where)))
    return [sentences(stripped, language) for part in parts if (stripped := part.strip())]


def sentences(paragraph: str, language: str) -> list[str]:
    """Return the sentences of one paragraph, each on one line, so that line wrapping does not change the tokens.

    >>> sentences("It rained\\n all day. Dr. Ito stayed in.", "en")
    ['It rained all day.', 'Dr. Ito stayed in.']
    """
    try:
        from sentencex import segment  # type: ignore[import-untyped]
    except ImportError:
        raise MissingExtra("sentencex", "text", "splitting text into sentences") from None
    line = " ".join(filter(None, map(str.strip, encodable(paragraph).translate(_PLAIN_SPACES).split("\n"))))
    return [stripped for sentence in segment(language, line) if (stripped := sentence.strip())]


def lines(text: str) -> list[str]:
    """Return the lines of a text in which lines matter, such as code; they keep their indentation.

    >>> lines("if cat:\\n    feed(cat)  \\n")
    ['if cat:', '    feed(cat)', '']
    """
    return [line.rstrip() for line in normalize_newlines(text).split("\n")]


def normalize_newlines(text: str) -> str:
    """Return the text with a single newline character at the end of each line."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def check_text(text: Any, where: str) -> str:
    """Return the text; raise if it is not a string."""
    if not isinstance(text, str):
        raise InvalidInput(where, got=f"a value of type {type(text).__name__}", expected="a string")
    return text
