"""Pre-trained word vectors: readers of GloVe, word2vec and fastText files, and a matching tokenizer and embedding."""

from __future__ import annotations

import gzip
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from os import PathLike
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hsa.errors import InvalidInput, MissingExtra
from hsa.files import check_unpacked

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNKNOWN = "<unk>"
_CHUNK = 1 << 20  # bytes of a binary file read at a time
_LONGEST_WORD = 1 << 12  # bytes; binary data without a space for longer than this are not word vectors
_LONGEST_LINE = 1 << 20  # bytes; so that a compressed file cannot fill the memory with one line
_LARGEST_DIM = 1 << 16

_File = IO[bytes] | gzip.GzipFile
_Entry = tuple[int, bytes, Any]
"""Number of the line or word in the file, from 1; the word; the raw vector."""


@dataclass(frozen=True, eq=False)
class WordVectors:
    """Words with their vectors.

    Attributes:
        words: Distinct words in the order of the file, which in published files is that of their frequency.
        vectors: Vectors, float32, `[words, dim]`.
        skipped: Number of malformed entries that were left out.
    """

    words: tuple[str, ...]
    vectors: NDArray[np.float32]
    skipped: int = 0


def load_word_vectors(
    path: str | PathLike[str],
    *,
    words: Iterable[str] | None = None,
    most: int | None = None,
    on_bad: Literal["raise", "skip"] = "raise",
) -> WordVectors:
    """Read a file of word vectors as a stream: only the words that are kept take memory (an .npz is read whole).

    The suffix determines the format. An .npz has the arrays `words` and `vectors`; a .bin is in word2vec's binary format;
    other files are text with a word and its numbers per line, as GloVe writes them, optionally after a first line
    "count dim", as word2vec and fastText write it. Each may be compressed as .gz, or be the only member of a .zip. If a
    word occurs twice, its first vector is used.

    Args:
        path: File to read.
        words: Words to keep; all by default. Vectors of other words are not parsed or checked.
        most: Maximum number of words to keep, from the start of the file.
        on_bad: Whether to raise an error for a malformed entry, such as the words with spaces in glove.840B, or to leave
            it out ("skip").

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "tiny.txt")
    ...     _ = path.write_text("the 0.5 -1\\ncat 2 0.25\\nsat 1 1\\n")
    ...     load_word_vectors(path, words={"cat", "dog"})
    WordVectors(words=('cat',), vectors=array([[2.  , 0.25]], dtype=float32), skipped=0)

    Raises:
        InvalidInput: The file is missing or damaged, an entry is malformed (the message names the line), there are fewer
            words than announced, or no word is kept.
    """
    if most is not None and most < 1:
        raise InvalidInput("most", got=most, expected="1 or more")
    if isinstance(words, str):
        raise InvalidInput("words", got="one string", expected="a list of strings", fix="Wrap it: [word]")
    wanted = None if words is None else set(words)
    limit = min((n for n in (most, None if wanted is None else len(wanted)) if n is not None), default=None)
    kept: dict[str, None] = {}
    numbers = bytearray()
    skipped, dim = 0, 0
    with _opened(Path(path)) as (file, suffix):
        stream = {".npz": _npz, ".bin": _binary}.get(suffix, _text)(file, str(path))
        dim = stream.dim
        for number, raw, vector in stream.entries if limit != 0 else ():
            where = f"{path}: {stream.unit} {number}"
            try:
                word = _word(raw, where)
                if word in kept or (wanted is not None and word not in wanted):
                    continue
                numbers += _finite(stream.vector(vector, where), where).tobytes()
            except InvalidInput:
                if on_bad == "raise":
                    raise
                skipped += 1
                continue
            kept[word] = None
            if len(kept) == limit:
                break
    if not kept:
        problem = "no words in the file" if wanted is None else "none of the requested words is in the file"
        raise InvalidInput(str(path), problem=problem, expected="at least one word")
    return WordVectors(tuple(kept), np.frombuffer(numbers, np.float32).reshape(len(kept), dim), skipped)


def word_tokenizer(words: Iterable[str]) -> Tokenizer:
    """Return a word tokenizer: id 0 is "<unk>", followed by these words in their order.

    Texts are lower-cased and split at spaces and punctuation, so words with capitals or punctuation never occur.

    >>> word_tokenizer(["the", "cat"]).encode("The cat purrs").ids
    [1, 2, 0]

    Raises:
        InvalidInput: A word occurs twice.
        MissingExtra: `tokenizers` is not installed.
    """
    try:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    except ImportError:
        raise MissingExtra("tokenizers", "text", "splitting text into words") from None
    listed = [UNKNOWN, *(word for word in words if word != UNKNOWN)]
    vocabulary = {word: i for i, word in enumerate(listed)}
    if len(vocabulary) < len(listed):
        twice = next(word for i, word in enumerate(listed) if vocabulary[word] != i)
        raise InvalidInput("words", got=f"{twice!r} twice", expected="distinct words")
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def vectors_for(tokenizer: Tokenizer, word_vectors: WordVectors) -> Tensor:
    """Return the weights of an embedding, `[ids, dim]`: the vector of each token, or the mean vector if it has none.

    >>> known = WordVectors(("the", "cat"), np.array([[1, 0], [0, 1]], np.float32))
    >>> vectors_for(word_tokenizer(known.words), known).tolist()
    [[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]]

    Raises:
        InvalidInput: No token has a vector.
    """
    vocabulary = tokenizer.get_vocab()
    row = {word: i for i, word in enumerate(word_vectors.words)}
    known = [(i, row[token]) for token, i in vocabulary.items() if token in row]
    if not known:
        raise InvalidInput(
            "word_vectors",
            problem="no token of the tokenizer has a vector",
            expected="vectors of its tokens",
            fix="Create the tokenizer from the words: word_tokenizer(word_vectors.words)",
        )
    mean = word_vectors.vectors.mean(0, dtype=np.float64).astype(np.float32)
    table = np.tile(mean, (max(vocabulary.values()) + 1, 1))
    ids, rows = np.array(known).T
    table[ids] = word_vectors.vectors[rows]
    return torch.from_numpy(table)


@dataclass(frozen=True)
class _Stream:
    """Entries of a file, and the function that parses a raw vector."""

    unit: str  # of the entry numbers: "line" or "word"
    dim: int
    entries: Iterator[_Entry]
    vector: Callable[[Any, str], NDArray[np.float32]]


@contextmanager
def _opened(path: Path) -> Iterator[tuple[_File, str]]:
    """Open a file, decompressed, and yield it with the suffix of its content; convert errors while reading."""
    try:
        suffix = path.suffix.lower()
        if suffix == ".gz":
            with gzip.open(path) as unpacked:
                yield unpacked, PurePath(path.stem).suffix.lower()
        elif suffix == ".zip":
            with zipfile.ZipFile(path) as archive, archive.open(member := _only_member(archive, path)) as file:
                yield file, PurePath(member).suffix.lower()
        else:
            with path.open("rb") as file:
                yield file, suffix
    except FileNotFoundError:
        raise InvalidInput(str(path), problem="no such file", expected="word vectors") from None
    except IsADirectoryError:
        raise InvalidInput(str(path), got="a folder", expected="a file of word vectors") from None
    except (OSError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile) as error:  # RuntimeError: a password
        raise InvalidInput(str(path), got=f"a file that cannot be read ({error})", expected="word vectors") from None


def _only_member(archive: zipfile.ZipFile, path: Path) -> str:
    members = [name for name in archive.namelist() if not name.endswith("/")]
    if len(members) != 1:
        raise InvalidInput(
            str(path),
            got=f"{len(members)} files: {', '.join(members[:8])}",
            expected="an archive of one file",
            fix="Unpack it and pass one of the files",
        )
    return members[0]


def _header(line: bytes) -> tuple[int, int] | None:
    """Parse the first line as "count dim"; return None if it is something else."""
    fields = line.split()
    is_header = len(fields) == 2 and all(field.isdigit() and len(field) < 16 for field in fields)
    return (int(fields[0]), int(fields[1])) if is_header else None


def _check_dim(dim: int, line: bytes, where: str, expected: str, fix: str | None = None) -> None:
    if not 1 <= dim <= _LARGEST_DIM:
        got = "an empty file" if not line else f"{dim:,} numbers per word" if dim > 0 else repr(line[:40])
        raise InvalidInput(where, got=got, expected=expected, fix=fix)


def _lines(file: _File, name: str) -> Iterator[bytes]:
    for number, line in enumerate(iter(partial(file.readline, _LONGEST_LINE + 1), b""), 1):
        if len(line) > _LONGEST_LINE:
            raise InvalidInput(
                f"{name}: line {number}", got="a longer line", expected=f"at most {_LONGEST_LINE:,} bytes"
            )
        yield line


def _text(file: _File, name: str) -> _Stream:
    lines = _lines(file, name)
    first = next(lines, b"")
    header = _header(first)
    dim = len(first.split()) - 1 if header is None else header[1]
    _check_dim(dim, first, f"{name}: line 1", 'a word and its numbers, or a first line "count dim"')

    def entries() -> Iterator[_Entry]:
        count = 0
        for number, line in enumerate(lines if header else chain([first], lines), 2 if header else 1):
            if parts := line.split(None, 1):
                count += 1
                yield number, parts[0], b"".join(parts[1:])
        if header is not None:
            _check_count(count, header[0], f"{name}: line 1")

    def vector(rest: bytes, where: str) -> NDArray[np.float32]:
        fields = rest.split()
        try:
            values = np.array([float(field) for field in fields], np.float64)
        except ValueError:
            wrong = next(field for field in fields if not _is_number(field))
            got = f"{wrong[:40].decode(errors='replace')!r} after the word"
            fix = "Words must not contain spaces" if len(fields) > dim else None
            raise InvalidInput(where, got=got, expected=f"{dim} numbers", fix=fix) from None
        if len(values) != dim:
            raise InvalidInput(where, got=f"{len(values)} numbers", expected=f"{dim}, as in line 1")
        with np.errstate(over="ignore"):  # numbers too large for float32 become infinite, which is checked later
            return values.astype(np.float32)

    return _Stream("line", dim, entries(), vector)


def _is_number(field: bytes) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def _binary(file: _File, name: str) -> _Stream:
    first = file.readline(100)
    count, dim = _header(first) or (0, 0)
    fix = "For fastText, use the .vec file: its .bin contains a whole model"
    _check_dim(dim, first, f"{name}: line 1", 'the line "count dim" of a word2vec file', fix)

    def entries() -> Iterator[_Entry]:
        held, at = b"", 0
        for number in range(1, count + 1):
            while (space := held.find(b" ", at)) < 0 or len(held) - space <= 4 * dim:
                more = file.read(_CHUNK) if space >= 0 or len(held) - at < _LONGEST_WORD else b""
                if not more:
                    _check_count(number - 1, count, f"{name}: line 1")
                held, at = held[at:] + more, 0
            end = space + 1 + 4 * dim
            yield number, held[at:space].lstrip(b"\n"), held[space + 1 : end]
            at = end

    return _Stream("word", dim, entries(), lambda data, where: np.frombuffer(data, "<f4"))


def _npz(file: _File, name: str) -> _Stream:
    try:
        with zipfile.ZipFile(file) as archive:
            check_unpacked(sum(member.file_size for member in archive.infolist()), name)
        with np.load(file, allow_pickle=False) as arrays:
            words, vectors = arrays["words"], arrays["vectors"]
    except InvalidInput:
        raise
    except (KeyError, ValueError, MemoryError, zipfile.BadZipFile) as error:  # MemoryError: shapes that are not true
        raise InvalidInput(
            name, got=f"other content ({error})", expected="the arrays `words` and `vectors`, without Python objects"
        ) from None
    if words.dtype.kind not in "US" or vectors.dtype.kind != "f" or words.ndim != 1 or vectors.ndim != 2:
        got = f"words {words.dtype}{list(words.shape)}, vectors {vectors.dtype}{list(vectors.shape)}"
        raise InvalidInput(name, got=got, expected="strings [words] and floats [words, dim]")
    if len(words) != len(vectors):
        raise InvalidInput(name, got=f"{len(words)} words and {len(vectors)} vectors", expected="one vector per word")
    coded = (word.encode() if isinstance(word, str) else word for word in words.tolist())
    entries = ((number, word, row) for number, (word, row) in enumerate(zip(coded, vectors, strict=True), 1))
    return _Stream("word", vectors.shape[1], entries, lambda row, where: row.astype(np.float32))


def _check_count(count: int, announced: int, where: str) -> None:
    if count != announced:
        raise InvalidInput(where, got=count, expected=f"{announced} words", fix="Is the file complete?")


def _word(raw: bytes, where: str) -> str:
    try:
        word = raw.decode()
    except UnicodeDecodeError:
        raise InvalidInput(where, got=f"the word {raw[:40]!r}", expected="text in UTF-8") from None
    if not word or " " in word:
        raise InvalidInput(where, got=f"the word {word!r}", expected="a word without spaces")
    return word


def _finite(vector: NDArray[np.float32], where: str) -> NDArray[np.float32]:
    if not np.isfinite(vector).all():
        wrong = vector[~np.isfinite(vector)][0]
        raise InvalidInput(where, got=f"the number {wrong}", expected="finite numbers")
    return vector
