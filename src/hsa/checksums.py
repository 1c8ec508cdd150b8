"""Checksums detect files that are damaged, cut short or of another model.

`SHA256SUMS` lists files that belong together, in the format of `sha256sum -c`. A checkpoint stands alone: it ends with
its own checksum, so that one rename replaces both.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from hsa.errors import InvalidInput

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
_MARK = b"\nhsa sha256 "
_ENDING = len(_MARK) + 64 + 1  # mark, hexadecimal digest, line end
_CHUNK = 2**20


def digest_of(path: Path, size: int | None = None) -> str:
    """Return the SHA-256 of the first `size` bytes of a file; of all bytes by default."""
    digest = hashlib.sha256()
    left = path.stat().st_size if size is None else size
    with path.open("rb") as file:
        while left > 0 and (some := file.read(min(left, _CHUNK))):
            digest.update(some)
            left -= len(some)
    return digest.hexdigest()


def append_checksum(path: Path) -> None:
    """Append the checksum of a file to it; `torch.load` and `zipfile` ignore bytes after the end of an archive."""
    digest = digest_of(path)
    with path.open("ab") as file:
        file.write(_MARK + digest.encode() + b"\n")


def check_appended(path: Path, expected: str, fix: str) -> None:
    """Raise an error unless a file ends with the checksum of its content; `expected` describes it in the error."""
    size = path.stat().st_size - _ENDING
    with path.open("rb") as file:
        file.seek(max(0, size))
        ending = file.read()
    if size < 0 or not ending.startswith(_MARK):
        got = "a damaged file (it does not end with a checksum: cut short, or of another version of hsa)"
    elif ending != _MARK + digest_of(path, size).encode() + b"\n":
        got = "a damaged file (its checksum does not match its content)"
    else:
        return
    raise InvalidInput(str(path), got=got, expected=expected, fix=fix)


def format_sums(sums: dict[str, str]) -> str:
    """Return the content of `SHA256SUMS` for digests by file name."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def read_sums(folder: Path) -> dict[str, str]:
    """Return the digests in the `SHA256SUMS` of a folder, by file name.

    Raises:
        InvalidInput: The file is missing or damaged.
    """
    path, fix = folder / SUMS, "Copy the whole folder, or save the model again with this version of hsa"
    expected = "the checksums of the files beside it"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise InvalidInput(str(path), problem="no such file", expected=expected, fix=fix) from None
    except (OSError, ValueError) as error:
        raise InvalidInput(str(path), got=f"a file that cannot be read ({error})", expected=expected, fix=fix) from None
    matches = [_LINE.fullmatch(line) for line in lines]
    if not all(matches):
        raise InvalidInput(str(path), got="a damaged file", expected=expected, fix=fix)
    return {match[2]: match[1] for match in matches if match}


def check_listed(path: Path, expected: str) -> None:
    """Raise an error unless `SHA256SUMS` lists a file with the checksum of its content.

    Args:
        path: Existing file.
        expected: Description of the file, for the error.
    """
    listed = read_sums(path.parent).get(path.name)
    if listed is None or listed != digest_of(path):
        reason = "does not list it" if listed is None else "has another checksum for it"
        raise InvalidInput(
            str(path),
            got=f"a damaged file, or one of another model ({SUMS} {reason})",
            expected=expected,
            fix="Copy the whole folder again, or save the model again",
        )
