"""Split texts into families of tokens: words, or ids of a tokenizer; train and load tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hsa.errors import InvalidInput, MissingExtra
from hsa.signals.signal import Signal

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Maps texts to the tokens of each.
_Split = Callable[[list[str]], list[list[Any]]]


def token_families(texts: list[str], tokenizer: Any) -> list[Signal | None]:
    """Return a family of tokens per text, None for a text without tokens. The tokenizer is called once.

    Raises:
        InvalidInput: For an object that is not a tokenizer.
        MissingExtra: If `tokenizers` is not installed.

    >>> token_families(["It rained.", " "], None)
    [Signal(Sequence(3), 3 leaves, 1 family, depth 1, text), None]
    """
    tokens = _splitting(tokenizer)([encodable(text) for text in texts])
    if all(isinstance(of_text[0], str) for of_text in tokens if of_text):
        return [Signal.of(of_text, "text") if of_text else None for of_text in tokens]
    # One conversion and many views: a tensor per text would cost more than everything else.
    ids = torch.from_numpy(np.fromiter((i for of_text in tokens for i in of_text), np.int64))
    bounds = pairwise(accumulate((len(of_text) for of_text in tokens), initial=0))
    return [Signal.of(ids[begin:end], "text") if begin < end else None for begin, end in bounds]


def encodable(text: str) -> str:
    """Return the text with a question mark for each half of a surrogate pair, which JSON can hold and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def load_tokenizer(tokenizer: Any) -> Any:
    """Load the tokenizer of a tokenizer.json; return an object that is not a path unchanged.

    Raises:
        InvalidInput: For a file that is missing or holds no tokenizer; the message names it.
        MissingExtra: If `tokenizers` is not installed.

    >>> load_tokenizer("tokenizer.json")
    Traceback (most recent call last):
    hsa.errors.InvalidInput: tokenizer.json: no such file; expected a tokenizer.json
    """
    if not isinstance(tokenizer, (str, PathLike)):
        return tokenizer
    library = _import_tokenizers()
    if not Path(tokenizer).is_file():
        raise InvalidInput(str(tokenizer), problem="no such file", expected="a tokenizer.json")
    try:
        return library.Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the package raises plain Exception for any fault in the file
        raise InvalidInput(
            str(tokenizer), got=f"a file that does not load ({error})", expected="a tokenizer.json"
        ) from None


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, special_tokens: Iterable[str] = ()) -> Tokenizer:
    """Train a byte-level BPE tokenizer: every text can be encoded, and decoding restores it.

    Args:
        texts: Texts to train on.
        vocab_size: Maximum number of tokens, including the 256 bytes.
        special_tokens: Tokens that are never split.

    >>> tokenizer = train_tokenizer(["the cat and the hat"], 260)
    >>> tokenizer.decode(tokenizer.encode("the cät").ids)
    'the cät'
    """
    special = list(special_tokens)
    if isinstance(texts, str):
        raise InvalidInput("texts", got="one string", expected="a list of strings", fix="Wrap it: [text]")
    if vocab_size < 256 + len(special):
        raise InvalidInput(
            "vocab_size", got=vocab_size, expected=f"{256 + len(special)} or more: 256 bytes and the special tokens"
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


def _import_tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise MissingExtra("tokenizers", "text", "splitting text into tokens") from None
    return tokenizers


def _splitting(tokenizer: Any) -> _Split:
    if tokenizer is None:
        pre_tokenizer = _import_tokenizers().pre_tokenizers.BertPreTokenizer()
        return lambda texts: [[word for word, _ in pre_tokenizer.pre_tokenize_str(text)] for text in texts]
    tokenizer = load_tokenizer(tokenizer)
    if hasattr(tokenizer, "encode_batch_fast"):
        return lambda texts: [
            encoding.ids for encoding in _whole(tokenizer).encode_batch_fast(texts, add_special_tokens=False)
        ]
    if callable(getattr(tokenizer, "encode", None)):
        return lambda texts: [list(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    raise InvalidInput(
        "tokenizer",
        got=f"a value of type {type(tokenizer).__name__}",
        expected="a tokenizers.Tokenizer, the path of a tokenizer.json, or an object with encode()",
    )


def _whole(tokenizer: Any) -> Any:
    """Return the tokenizer without padding and truncation: a copy, if its tokenizer.json has any."""
    if tokenizer.padding is None and tokenizer.truncation is None:
        return tokenizer
    copy = type(tokenizer).from_str(tokenizer.to_str())
    copy.no_padding()
    copy.no_truncation()
    return copy
