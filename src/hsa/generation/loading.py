"""Load a language model and its tokenizer from the folder that `hsa train --task lm` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hsa.errors import InvalidInput
from hsa.files import read_json
from hsa.models.causal_language_model import CausalLanguageModel
from hsa.models.saved import CONFIG, TOKENIZER, load_language_model
from hsa.signals.readers.tokens import load_tokenizer


def load_writer(folder: Path, device: torch.device | str = "cpu") -> tuple[CausalLanguageModel, Any]:
    """Return the model and the tokenizer of a folder, or of the first model of a run.

    Raises:
        InvalidInput: For a file that is missing, damaged or of another kind.
    """
    folder = model_folder(folder)
    return load_language_model(folder, device), load_tokenizer(folder / TOKENIZER)


def model_folder(folder: Path) -> Path:
    """Return the folder itself, or for a run the folder of its first model."""
    if not folder.is_dir():
        raise InvalidInput(
            str(folder), given="no such folder", expected="a model or a run that hsa train --task lm wrote"
        )
    if (folder / CONFIG).is_file() or not (folder / "results.json").is_file():
        return folder
    results = read_json(folder / "results.json", "the results of a run")
    try:
        return folder / results[0]["model"]
    except (IndexError, KeyError, TypeError):
        raise InvalidInput(
            str(folder / "results.json"), given="something else", expected="the results of a run of hsa train"
        ) from None


def is_transformers(folder: Path) -> bool:
    """Return whether the folder holds a transformers model: its configuration names a `model_type`."""
    if not (folder / CONFIG).is_file():
        return False
    about = read_json(folder / CONFIG, "the configuration of a model")
    return isinstance(about, dict) and "model_type" in about
