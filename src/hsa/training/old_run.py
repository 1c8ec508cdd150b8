"""Earlier runs in a folder: how to recognise them, and how to remove them without touching other files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hsa.checksums import SUMS, read_sums
from hsa.errors import InvalidInput

RUNS = ("*/checkpoint.pt", "*/result.json", "*/*/*/checkpoint.pt", "*/*/*/ended.json")
"""Files in the folder of each run of `hsa train` and `hsa compare`, whether it finished or not."""
_OF_A_MODEL = ("checkpoint.pt", "ended.json", "result.json", SUMS)
_REPORT = "report.md"
_OF_ALL = ("results.json", "references.json", "comparison.json", "first.json", _REPORT)


def remove_run(folder: Path) -> None:
    """Remove the files that `hsa train` or `hsa compare` wrote to a folder, and the folders that are empty then.

    Those are its reports, the pictures that `report.md` shows, and in the folders of models the checkpoints and the files
    that `SHA256SUMS` lists. All other files stay, and links to folders are not followed.
    """
    models = {path.parent for pattern in RUNS for path in folder.glob(pattern)}
    for model in sorted(models):
        between = [parent for parent in (model, *model.parents) if folder in parent.parents]
        if not any(parent.is_symlink() for parent in between):
            _remove(model, [*_listed(model), *_OF_A_MODEL])
            with suppress(OSError):  # not empty
                for parent in between:
                    parent.rmdir()
    if models:  # else the folder is of something else
        _remove(folder, [*_pictures(folder), *_OF_ALL])


def _listed(model: Path) -> list[str]:
    try:
        return list(read_sums(model))
    except InvalidInput:  # the model is not finished, or damaged
        return []


def _pictures(folder: Path) -> Iterator[str]:
    with suppress(OSError, UnicodeDecodeError):
        yield from re.findall(r"^!\[\w+\]\((\w+\.png)\)$", (folder / _REPORT).read_text(encoding="utf-8"), re.MULTILINE)


def _remove(folder: Path, names: list[str]) -> None:
    for name in names:
        if Path(name).name == name:  # not a path to another folder
            (folder / name).unlink(missing_ok=True)
