"""A model in a folder: `config.json` and `model.safetensors`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from hsa.errors import InvalidInput
from hsa.files import load_tensors, read_json, save_tensors, write_json
from hsa.models.classifier import HierarchicalClassifier, ModelConfig

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def save_model(folder: Path, model: HierarchicalClassifier, classes: Sequence[str] = ()) -> None:
    """Write a model; files that were there are replaced only by complete ones.

    Args:
        classes: the names of the outputs.
    """
    save_tensors(folder / WEIGHTS, model.state_dict())
    write_json(
        folder / CONFIG, {"model": "hierarchical classifier", "classes": list(classes), **model.config.to_dict()}
    )


def load_model(folder: Path, device: torch.device | str = "cpu") -> tuple[HierarchicalClassifier, tuple[str, ...]]:
    """The model of a folder, ready to predict, and the names of its classes.

    >>> import tempfile
    >>> from hsa.nn.embedding import Modality
    >>> from hsa.nn.encoder import EncoderConfig
    >>> model = HierarchicalClassifier(ModelConfig(EncoderConfig(width=8), {"text": Modality(tokens=10)}, outputs=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(Path(folder), model, ("no", "yes"))
    ...     load_model(Path(folder))[1]
    ('no', 'yes')

    Raises:
        InvalidInput: naming the file: it is missing, damaged, or of another model.
    """
    about = read_json(folder / CONFIG, "the configuration of a model of hsa")
    if not isinstance(about, dict) or about.pop("model", None) != "hierarchical classifier":
        raise InvalidInput(str(folder / CONFIG), given="something else", expected="the configuration of a model of hsa")
    try:
        classes = tuple(about.pop("classes"))
        model = HierarchicalClassifier(ModelConfig.from_dict(about))
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # InvalidInput is a ValueError
        raise InvalidInput(
            str(folder / CONFIG),
            given=f"a configuration that makes no model ({type(error).__name__}: {error})",
            expected="one that this version of hsa wrote",
        ) from error
    weights, _ = load_tensors(folder / WEIGHTS, "the weights of a model of hsa")
    check_fits(str(folder / WEIGHTS), weights, model.state_dict())
    model.load_state_dict(weights)
    return model.to(device).eval(), classes


def check_fits(where: str, given: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Same names, same shapes; else an error that names the first tensor that does not fit."""
    other = "they belong to another model: use the options it was trained with, or another folder"
    for name, tensor in wanted.items():
        if name not in given:
            raise InvalidInput(where, given=f"weights without {name!r}", expected="those of this model", fix=other)
        if given[name].shape != tensor.shape:
            raise InvalidInput(
                where,
                given=f"{name!r} of shape {tuple(given[name].shape)}",
                expected=f"shape {tuple(tensor.shape)}",
                fix=other,
            )
    extra = sorted(set(given) - set(wanted))
    if extra:
        raise InvalidInput(where, given=f"weights with {extra[0]!r}", expected="those of this model", fix=other)
