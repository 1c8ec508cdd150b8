"""`model_folder`: the one rule for which model a folder stands for."""

from __future__ import annotations

from pathlib import Path

from hsa.errors import InvalidInput
from hsa.files import read_json
from hsa.models.saved import CONFIG, RESULTS, WEIGHTS, kind_of

EXPECTED = "a model or a run that hsa train wrote"
_CHECKPOINT = "checkpoint.pt"
_LISTED = 5
_DEEPEST = 3  # hsa compare keeps its models in MODEL/RATE/SEED


def model_folder(folder: Path) -> Path:
    """Return the folder of the model that a folder stands for.

    A folder with a configuration is a model. A run of `hsa train` stands for its first model, the reference; any other
    folder for the only model in it.

    Raises:
        InvalidInput: If there is no model, or several and no run that orders them; the message says what the folder is.
    """
    if not folder.is_dir():
        raise _not_a_folder(folder)
    if (folder / CONFIG).is_file():
        return folder
    if (folder / RESULTS).is_file():
        return _first_of_run(folder)
    models = _models_inside(folder)
    if not models:
        raise _no_model(folder)
    if len(models) > 1:
        more = f" and {len(models) - _LISTED} more" if len(models) > _LISTED else ""
        raise InvalidInput(
            str(folder),
            got=f"a folder of {len(models)} models",
            expected=f"one of {', '.join(map(str, models[:_LISTED]))}{more}",
        )
    return models[0]


def _first_of_run(folder: Path) -> Path:
    results = read_json(folder / RESULTS, "the results of a run of hsa train")
    if results == []:
        raise InvalidInput(str(folder), problem="no model of this run was finished", expected=EXPECTED)
    try:
        return folder / results[0]["model"]
    except (KeyError, TypeError):
        raise InvalidInput(
            str(folder / RESULTS), got="other content", expected="the results of a run of hsa train"
        ) from None


def _models_inside(folder: Path) -> list[Path]:
    """Return the folders of models at the smallest depth that has any."""
    for depth in range(1, _DEEPEST + 1):
        pattern = "/".join(["*"] * depth)
        inside = sorted(path.parent for path in folder.glob(f"{pattern}/{CONFIG}") if path.parent.name[0] != ".")
        if models := [path for path in inside if kind_of(path) is not None]:
            return models
    return []


def _not_a_folder(path: Path) -> InvalidInput:
    if not path.exists():
        return InvalidInput(str(path), problem="no such folder", expected=EXPECTED)
    fix = f"Pass its folder, {path.parent}" if path.name in (CONFIG, WEIGHTS, RESULTS) else None
    return InvalidInput(str(path), got="a file", expected=f"the folder of {EXPECTED}", fix=fix)


def _no_model(folder: Path) -> InvalidInput:
    names = sorted(path.name for path in folder.iterdir())
    if (folder / _CHECKPOINT).is_file() or any(folder.glob(f"*/{_CHECKPOINT}")):
        got, fix = "unfinished training (a checkpoint and no model)", "Finish it with: hsa train --resume"
        return InvalidInput(str(folder), got=got, expected=EXPECTED, fix=fix)
    listed = f"{', '.join(names[:_LISTED])}{', …' if len(names) > _LISTED else ''}"
    got = f"a folder without {CONFIG}, with {listed}" if names else "an empty folder"
    return InvalidInput(str(folder), got=got, expected=EXPECTED)
