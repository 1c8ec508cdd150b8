"""Checksums of files that a test has changed."""

from pathlib import Path

from hsa.checksums import SUMS, digest_of, format_sums


def reseal(folder: Path) -> None:
    """List the current files of a folder in its `SHA256SUMS`, as if they had been saved together."""
    sums = {path.name: digest_of(path) for path in folder.iterdir() if path.is_file() and path.name != SUMS}
    (folder / SUMS).write_text(format_sums(sums))
