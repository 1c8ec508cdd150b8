import gzip
import io
import random
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch

from hsa.errors import InvalidInput
from hsa.signals.readers import read_text, train_tokenizer
from hsa.training.data.word_vectors import WordVectors, load_word_vectors, vectors_for, word_tokenizer

WORDS = ("the", "cat", "sät", "</s>", "on")
DIM = 7
VECTORS = np.random.default_rng(0).normal(size=(len(WORDS), DIM)).astype(np.float32)


def text(header=False, end=""):
    lines = [f"{word} {' '.join(map(str, row.tolist()))}{end}" for word, row in zip(WORDS, VECTORS, strict=True)]
    return "\n".join([f"{len(WORDS)} {DIM}"] * header + [*lines, ""]).encode()


def binary(between=b"\n"):
    parts = (word.encode() + b" " + row.tobytes() + between for word, row in zip(WORDS, VECTORS, strict=True))
    return f"{len(WORDS)} {DIM}\n".encode() + b"".join(parts)


def npz(words=WORDS, vectors=VECTORS):
    buffer = io.BytesIO()
    np.savez(buffer, words=np.asarray(words), vectors=vectors)
    return buffer.getvalue()


FORMATS = {
    "glove.txt": text(),
    "tabs.txt": text().replace(b" ", b"\t").replace(b"\n", b"\r\n"),
    "fasttext.vec": text(header=True, end=" "),
    "word2vec.txt": text(header=True),
    "word2vec.bin": binary(),
    "gensim.bin": binary(between=b""),
    "numpy.npz": npz(),
    "bytes.npz": npz(words=[word.encode() for word in WORDS]),
}


def save(path, data):
    """Save with the compression that the suffix names."""
    if path.suffix == ".gz":
        data = gzip.compress(data)
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(path.stem, data)
    else:
        path.write_bytes(data)
    return path


@pytest.mark.parametrize("compression", ["", ".gz", ".zip"])
@pytest.mark.parametrize("name", FORMATS)
def test_all_formats(tmp_path, name, compression):
    path = save(tmp_path / f"{name}{compression}", FORMATS[name])
    loaded = load_word_vectors(path)
    assert loaded.words == WORDS
    assert loaded.vectors.dtype == np.float32
    np.testing.assert_array_equal(loaded.vectors, VECTORS)
    some = load_word_vectors(str(path), words=["on", "cat", "dog"])
    assert some.words == ("cat", "on")
    np.testing.assert_array_equal(some.vectors, VECTORS[[1, 4]])
    assert load_word_vectors(path, most=3).words == WORDS[:3]
    assert load_word_vectors(path, most=1, words={"on", "sät"}).words == ("sät",)


def test_half_precision_is_converted(tmp_path):
    path = save(tmp_path / "v.npz", npz(vectors=VECTORS.astype(np.float16)))
    np.testing.assert_array_equal(load_word_vectors(path).vectors, VECTORS.astype(np.float16).astype(np.float32))


def test_duplicate_words_and_blank_lines(tmp_path):
    path = save(tmp_path / "v.vec", b"3 2\na 1 2\n\na 3 4\nb 5 6\n\n")
    assert load_word_vectors(path).words == ("a", "b")
    assert load_word_vectors(path).vectors.tolist() == [[1, 2], [5, 6]]


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def archive(**arrays):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in arrays.items():
            file.writestr(f"{name}.npy", data)
    return buffer.getvalue()


LIE = npy(VECTORS).replace(b"(5, 7), }         ", b"(5000000000000, 7)}")  # more numbers than the file has
assert npy(VECTORS) != LIE

BAD = {
    "empty.txt": (b"", "line 1: expected a word and its numbers.*, got an empty file"),
    "lonely.txt": (b"word\n", "line 1: expected a word and its numbers.*, got b'word"),
    "space.txt": (
        b"cat 1 2\nnew york 3 4\n",
        r"line 2: expected 2 numbers, got 'york' after the word\. Words must not contain spaces",
    ),
    "number.txt": (b"cat 1 2\ndog 1 two\n", "line 2: expected 2 numbers, got 'two'"),
    "short.txt": (b"cat 1 2\ndog 1\n", "line 2: expected 2, as in line 1, got 1 numbers"),
    "long.txt": (b"cat 1 2\ndog 1 2 3\n", "line 2: expected 2, as in line 1, got 3 numbers"),
    "nan.txt": (b"cat 1 2\ndog 1 nan\n", "line 2: expected finite numbers, got the number nan"),
    "huge.txt": (b"cat 1 2\ndog 1 1e99\n", "line 2: expected finite numbers, got the number inf"),
    "latin.txt": ("cat 1 2\nmü 1 2\n".encode("latin-1"), "line 2: expected text in UTF-8, got the word "),
    "cut.vec": (text(header=True).rpartition(b"\non")[0], r"line 1: expected 5 words, got 4\. Is the file complete"),
    "dim.vec": (b"2 3\ncat 1 2\ndog 1 2\n", "line 2: expected 3, as in line 1, got 2 numbers"),
    "cut.bin": (binary()[:-9], r"line 1: expected 5 words, got 4\. Is the file complete"),
    "garbage.bin": (b"9 3\n" + b"x" * 9000, "line 1: expected 9 words, got 0"),
    "model.bin": (b"\xba\x16\x4f\x2f" + bytes(50), r"For fastText, use the \.vec"),
    "nan.bin": (b"1 1\ncat " + np.float32(np.nan).tobytes(), "word 1: expected finite numbers, got the number nan"),
    "space.npz": (npz(words=["a", "b c", "d", "e", "f"]), "word 2: expected a word without spaces, got the word 'b c'"),
    "blank.npz": (npz(words=["a", "", "d", "e", "f"]), "word 2: expected a word without spaces, got the word ''"),
    "objects.npz": (npz(words=np.array(WORDS, object)), "without Python objects"),
    "unequal.npz": (npz(vectors=VECTORS[:3]), "5 words and 3 vectors"),
    "flat.npz": (npz(vectors=VECTORS[0]), r"vectors float32\[7\]"),
    "other.npz": (b"PK\x03\x04 nothing", "without Python objects, got other content"),
    "digits.vec": (b"9" * 5000 + b" 5\ncat 1 2\n", "line 2: expected 1, as in line 1, got 2 numbers"),
    "wide.bin": (
        b"9 999999999999\n" + b"x" * 9000,
        "line 1: expected the line .*, got 999,999,999,999 numbers per word",
    ),
    "wide.vec": (b"9 999999999999\n" + b"x" * 9000, "line 1: expected .*, got 999,999,999,999 numbers per word"),
    "line.txt": (b"cat 1 2\ndog 1 " + b"2" * 2_000_000, "line 2: expected at most 1,048,576 bytes, got a longer line"),
    "array.npz": (npy(VECTORS), "without Python objects, got other content"),
    "shape.npz": (archive(words=npy(np.array(WORDS)), vectors=LIE), "without Python objects, got other content"),
    "damaged.txt.gz": (None, "cannot be read"),
    "damaged.txt.zip": (None, "cannot be read"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_name_the_line(tmp_path, name):
    data, message = BAD[name]
    path = tmp_path / name
    path.write_bytes(gzip.compress(text())[:-20] if data is None else data)
    with pytest.raises(InvalidInput, match=message) as error:
        load_word_vectors(path)
    assert str(path) in str(error.value)


def test_arrays_of_other_names(tmp_path):
    np.savez(tmp_path / "v.npz", tokens=np.array(WORDS))
    with pytest.raises(InvalidInput, match="the arrays `words` and `vectors`"):
        load_word_vectors(tmp_path / "v.npz")


def test_files_that_cannot_be_opened(tmp_path):
    with pytest.raises(InvalidInput, match="no such file"):
        load_word_vectors(tmp_path / "none.txt")
    with pytest.raises(InvalidInput, match="expected a file of word vectors, got a folder"):
        load_word_vectors(tmp_path)
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.writestr("50d.txt", text())
        archive.writestr("100d.txt", text())
    with pytest.raises(
        InvalidInput, match=r"expected an archive of one file, got 2 files: 50d\.txt, 100d\.txt\. Unpack"
    ):
        load_word_vectors(tmp_path / "two.zip")


def test_bad_arguments(tmp_path):
    path = save(tmp_path / "glove.txt", text())
    with pytest.raises(InvalidInput, match=r"most: expected 1 or more, got 0"):
        load_word_vectors(path, most=0)
    with pytest.raises(InvalidInput, match=r"words: expected a list of strings, got one string"):
        load_word_vectors(path, words="cat")
    for words in ([], ["dog"]):
        with pytest.raises(
            InvalidInput, match="none of the requested words is in the file; expected at least one word"
        ):
            load_word_vectors(path, words=words)


def test_malformed_lines_can_be_skipped(tmp_path):
    path = save(tmp_path / "glove.txt", b"cat 1 2\nnew york 3 4\ndog x 4\nfly 5 6\n")
    loaded = load_word_vectors(path, on_bad="skip")
    assert (loaded.words, loaded.vectors.tolist(), loaded.skipped) == (("cat", "fly"), [[1, 2], [5, 6]], 2)
    assert load_word_vectors(path, words=["cat", "fly"]).skipped == 0  # vectors of other words are not parsed


def test_only_kept_words_take_memory(tmp_path):
    """Keep three words of a file of 6 MB."""
    generator = random.Random(0)
    row = " ".join(f"{generator.random():.5f}" for _ in range(300))
    path = save(tmp_path / "v.txt", "".join(f"w{i} {row}\n" for i in range(2500)).encode())
    tracemalloc.start()
    loaded = load_word_vectors(path, words=["w1", "w1200", "w2499"])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert loaded.words == ("w1", "w1200", "w2499")
    assert peak < path.stat().st_size / 10


def test_tokenizer_and_embedding_match():
    known = WordVectors(WORDS, VECTORS)
    tokenizer = word_tokenizer(known.words)
    signal = read_text("The cat, the dog.", tokenizer)
    table = vectors_for(tokenizer, known)
    assert table.shape == (len(WORDS) + 1, DIM)
    assert signal.members[0].members[0].values.tolist() == [1, 2, 0, 1, 0, 0]
    torch.testing.assert_close(table[0], torch.from_numpy(VECTORS.mean(0)))
    assert torch.equal(table[1:], torch.from_numpy(VECTORS))


def test_embedding_of_another_tokenizer():
    """Tokens of another tokenizer that are words have the vectors of these words."""
    tokenizer = train_tokenizer(["on on on the cat"], 300)
    table = vectors_for(tokenizer, WordVectors(WORDS, VECTORS))
    assert len(table) == tokenizer.get_vocab_size()
    assert torch.equal(table[tokenizer.token_to_id("on")], torch.from_numpy(VECTORS[4]))
    with pytest.raises(InvalidInput, match="no token of the tokenizer has a vector; expected vectors of its tokens"):
        vectors_for(tokenizer, WordVectors(("zebra",), VECTORS[:1]))


def test_a_vector_for_unknown_words_is_used():
    known = WordVectors(("cat", "<unk>"), VECTORS[:2])
    table = vectors_for(word_tokenizer(known.words), known)
    assert torch.equal(table, torch.from_numpy(VECTORS[[1, 0]]))


def test_words_must_be_distinct():
    with pytest.raises(InvalidInput, match="'cat' twice"):
        word_tokenizer(["cat", "dog", "cat"])


def test_compressed_arrays_are_bounded(tmp_path, monkeypatch):
    path = tmp_path / "v.npz"
    path.write_bytes(archive(words=npy(np.array(["a"])), vectors=npy(np.zeros((1, 5_000_000), np.float32))))
    assert path.stat().st_size < 100_000
    monkeypatch.setattr("hsa.files.MAX_UNPACKED", 10_000_000)
    with pytest.raises(InvalidInput, match=r"v.npz: expected at most 10,000,000 bytes after decompression"):
        load_word_vectors(path)


def test_a_compressed_line_without_end_takes_little_memory(tmp_path):
    path = tmp_path / "v.txt.gz"
    path.write_bytes(gzip.compress(b"a 1 2\nb " + b"1" * 50_000_000))
    tracemalloc.start()
    with pytest.raises(InvalidInput, match=r"line 2: expected at most 1,048,576 bytes"):
        load_word_vectors(path)
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()
