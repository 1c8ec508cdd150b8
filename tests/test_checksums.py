"""Checksums find every damage to a file."""

import random

import pytest

from hsa.checksums import SUMS, append_checksum, check_appended, check_listed, read_sums
from hsa.errors import InvalidInput
from hsa.files import write_sealed

CONTENT = bytes(range(256)) * 3


def appended(path):
    path.write_bytes(CONTENT)
    append_checksum(path)
    return path.read_bytes()


def sealed(folder):
    def write(temporary):
        (temporary / "a").write_bytes(CONTENT)
        (temporary / "b").write_bytes(CONTENT[::-1])

    write_sealed(folder, write)


def test_an_intact_file_passes_and_keeps_its_content(tmp_path):
    assert appended(tmp_path / "a").startswith(CONTENT)
    check_appended(tmp_path / "a", "a file", "Delete it")
    (tmp_path / "empty").touch()
    append_checksum(tmp_path / "empty")
    check_appended(tmp_path / "empty", "a file", "Delete it")


def test_every_flipped_bit_is_found(tmp_path):
    whole, generator = appended(tmp_path / "a"), random.Random(0)
    places = {*range(len(whole) - 90, len(whole)), *generator.sample(range(len(whole)), 200)}
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << generator.randrange(8)
        (tmp_path / "a").write_bytes(damaged)
        with pytest.raises(InvalidInput, match=r"a: expected a file, got a damaged file \(.*\)\. Delete it"):
            check_appended(tmp_path / "a", "a file", "Delete it")


@pytest.mark.parametrize(
    "change", [lambda x: b"", lambda x: x[:50], lambda x: x[:-1], lambda x: x + b"\n", lambda x: x[1:]]
)
def test_files_cut_short_or_continued(change, tmp_path):
    (tmp_path / "a").write_bytes(change(appended(tmp_path / "a")))
    with pytest.raises(InvalidInput, match="got a damaged file"):
        check_appended(tmp_path / "a", "a file", "Delete it")


def test_files_that_belong_together(tmp_path):
    sealed(tmp_path)
    assert sorted(read_sums(tmp_path)) == ["a", "b"]
    for name in ("a", "b"):
        check_listed(tmp_path / name, "a file")
    (tmp_path / "a").rename(tmp_path / "c")
    (tmp_path / "b").rename(tmp_path / "a")
    (tmp_path / "c").rename(tmp_path / "b")
    for name in ("a", "b"):
        with pytest.raises(
            InvalidInput, match=rf"{name}: expected a file, got .* another model .*checksum.*Copy the whole"
        ):
            check_listed(tmp_path / name, "a file")
    (tmp_path / "other").write_bytes(CONTENT)
    with pytest.raises(InvalidInput, match="does not list it"):
        check_listed(tmp_path / "other", "a file")


@pytest.mark.parametrize("content", [None, b"\xff", b"abc  a\n", b"\0" * 99])
def test_checksums_that_are_missing_or_damaged(content, tmp_path):
    sealed(tmp_path)
    (tmp_path / SUMS).unlink()
    if content is not None:
        (tmp_path / SUMS).write_bytes(content)
    with pytest.raises(InvalidInput, match=rf"{SUMS}: .*expected the checksums"):
        check_listed(tmp_path / "a", "a file")


def test_files_can_be_added(tmp_path):
    sealed(tmp_path)
    write_sealed(tmp_path, lambda temporary: (temporary / "c").write_text("c"))
    for name in ("a", "b", "c"):
        check_listed(tmp_path / name, "a file")
    (tmp_path / SUMS).write_text("damaged")
    write_sealed(tmp_path, lambda temporary: (temporary / "d").write_text("d"))
    assert sorted(read_sums(tmp_path)) == ["d"]
