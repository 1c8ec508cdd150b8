"""Plain text → paragraphs → sentences → tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hsa.errors import InvalidInput, MissingExtra
from hsa.signals.domains import Sequence
from hsa.signals.signal import Signal

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The languages for which sentencex has rules of its own; for others it takes those of a related one or of English, and
# does not say so. The package has no such list.
_CODES = "am ar bg bn ca da de el en es fi fr gu hi hy it ja kk kn ml mr my nl pa pl pt ru sk ta te uk"
LANGUAGES = frozenset(_CODES.split())

# All sentences in, the tokens of each out.
_Split = Callable[[list[str]], list[list[Any]]]

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
    if not isinstance(text, str):
        raise InvalidInput(where, given=type(text).__name__, expected="a string")
    split = _tokenizing(tokenizer)
    paragraphs = [_sentences(paragraph, language) for paragraph in _paragraphs(text)]
    tokens = split([sentence for paragraph in paragraphs for sentence in paragraph])
    families = iter(_families(tokens))
    members = []
    for paragraph in paragraphs:
        sentences = [family for _ in paragraph if (family := next(families)) is not None]
        if sentences:
            members.append(Signal(Sequence(len(sentences)), sentences))
    if not members:
        raise InvalidInput(where, given="a text without tokens", expected="at least one word")
    return Signal(Sequence(len(members)), members)


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
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        given = {FileNotFoundError: "no such file", IsADirectoryError: "a directory"}.get(type(error))
        raise InvalidInput(str(path), given=given or error.strerror or error, expected="a readable text file") from None
    return decode_text(data, encoding=encoding, where=str(path))


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


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, special_tokens: Iterable[str] = ()) -> Tokenizer:
    """A byte-level BPE tokenizer made from these texts: every text can be encoded, and decoding gives it back.

    Args:
        vocab_size: at most so many tokens, 256 of them the bytes.

    >>> tokenizer = train_tokenizer(["the cat and the hat"], 260)
    >>> tokenizer.decode(tokenizer.encode("the cät").ids)
    'the cät'
    """
    special = list(special_tokens)
    if isinstance(texts, str):
        raise InvalidInput("texts", given="one string", expected="a list of strings", fix="wrap it: [text]")
    if vocab_size < 256 + len(special):
        raise InvalidInput(
            "vocab_size", given=vocab_size, expected=f"{256 + len(special)} or more: 256 bytes and the special tokens"
        )
    library = _import_tokenizers()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _paragraphs(text: str) -> list[str]:
    """Stripped, not empty, each on one line, so that a text gives the same tokens wherever its lines were wrapped."""
    parts = _BLANK_LINES.split(text.replace("\r\n", "\n").replace("\r", "\n"))
    return [_LINE_END.sub(" ", stripped) for part in parts if (stripped := part.strip())]


def _sentences(paragraph: str, language: str) -> list[str]:
    try:
        from sentencex import segment  # type: ignore[import-untyped]
    except ImportError:
        raise MissingExtra("sentencex", "text", "splitting text into sentences") from None
    return [stripped for sentence in segment(language, paragraph) if (stripped := sentence.strip())]


def _families(sentences: list[list[Any]]) -> list[Signal | None]:
    """A simple signal per sentence, None for one without tokens."""
    if all(isinstance(tokens[0], str) for tokens in sentences if tokens):
        return [Signal.of(tokens, "text") if tokens else None for tokens in sentences]
    # One conversion and many views: a tensor made per sentence costs more than all the rest.
    ids = torch.from_numpy(np.fromiter((i for tokens in sentences for i in tokens), np.int64))
    bounds = pairwise(accumulate((len(tokens) for tokens in sentences), initial=0))
    return [Signal.of(ids[begin:end], "text") if begin < end else None for begin, end in bounds]


def _import_tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise MissingExtra("tokenizers", "text", "splitting text into tokens") from None
    return tokenizers


def _tokenizing(tokenizer: Any) -> _Split:
    if tokenizer is None:
        pre_tokenizer = _import_tokenizers().pre_tokenizers.BertPreTokenizer()
        return lambda sentences: [[word for word, _ in pre_tokenizer.pre_tokenize_str(s)] for s in sentences]
    if isinstance(tokenizer, (str, PathLike)):
        tokenizer = _load_tokenizer(tokenizer)
    if hasattr(tokenizer, "encode_batch_fast"):
        return lambda sentences: [
            encoding.ids for encoding in _whole(tokenizer).encode_batch_fast(sentences, add_special_tokens=False)
        ]
    if callable(getattr(tokenizer, "encode", None)):
        return lambda sentences: [list(tokenizer.encode(s, add_special_tokens=False)) for s in sentences]
    raise InvalidInput(
        "tokenizer",
        given=f"a {type(tokenizer).__name__}",
        expected="a tokenizers.Tokenizer, the path of a tokenizer.json, or an object with encode()",
    )


def _whole(tokenizer: Any) -> Any:
    """The tokenizer without padding and truncation, which a tokenizer.json may ask for; the given one stays."""
    if tokenizer.padding is None and tokenizer.truncation is None:
        return tokenizer
    copy = type(tokenizer).from_str(tokenizer.to_str())
    copy.no_padding()
    copy.no_truncation()
    return copy


def _load_tokenizer(path: str | PathLike[str]) -> Any:
    library = _import_tokenizers()
    if not Path(path).is_file():
        raise InvalidInput(str(path), given="no such file", expected="a tokenizer.json")
    try:
        return library.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception for every fault in the file
        raise InvalidInput(
            str(path), given=f"a file that does not load ({error})", expected="a tokenizer.json"
        ) from None
