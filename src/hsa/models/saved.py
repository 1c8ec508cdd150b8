"""A model in a folder: `config.json` and `model.safetensors`; of a language model also `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from hsa.errors import InvalidInput
from hsa.files import load_tensors, read_json, save_tensors, write_json, write_then_rename
from hsa.models.causal_language_model import CausalLanguageModel
from hsa.models.classifier import Classifier, ModelConfig
from hsa.models.registry import LANGUAGE_ARCHITECTURES
from hsa.models.seq2seq import Seq2Seq, Seq2SeqConfig

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
FORMAT = 2
"""Version of what is written. hsa 0.1 wrote files without one."""
CLASSIFIER, LANGUAGE_MODEL, SEQ2SEQ = "classifier", "language model", "encoder–decoder"
AnyModel = TypeVar("AnyModel", bound=nn.Module)


def kind_of(folder: Path) -> str | None:
    """Return the kind of model in a folder, as its configuration says; None where it does not say."""
    if not (folder / CONFIG).is_file():
        return None
    about = read_json(folder / CONFIG, "the configuration of a model of hsa")
    return about.get("model") if isinstance(about, dict) else None


def save_model(folder: Path, model: Classifier, classes: Sequence[str] = ()) -> None:
    """Write a model; files that were there are replaced only by complete ones.

    Args:
        classes: the names of the outputs.
    """
    save_tensors(folder / WEIGHTS, model.state_dict())
    _write_config(folder, CLASSIFIER, {"classes": list(classes), **model.config.to_dict()})


def load_model(folder: Path, device: torch.device | str = "cpu") -> tuple[Classifier, tuple[str, ...]]:
    """The model of a folder, ready to predict, and the names of its classes.

    >>> import tempfile
    >>> from hsa.nn.embedding import Modality
    >>> from hsa.nn.encoder_config import EncoderConfig
    >>> model = Classifier(ModelConfig(EncoderConfig(width=8), {"text": Modality(tokens=10)}, outputs=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(Path(folder), model, ("no", "yes"))
    ...     load_model(Path(folder))[1]
    ('no', 'yes')

    Raises:
        InvalidInput: naming the file: it is missing, damaged, or of another model.
    """
    classes: tuple[str, ...] = ()

    def make(config: dict[str, Any]) -> Classifier:
        nonlocal classes
        classes = tuple(config.pop("classes"))
        return Classifier(ModelConfig.from_dict(config))

    return _load(folder, device, CLASSIFIER, "hsa train", make), classes


def save_language_model(folder: Path, model: CausalLanguageModel, tokenizer: Any = None) -> None:
    """Write a language model and what makes its tokens, a `tokenizers.Tokenizer`."""
    save_tensors(folder / WEIGHTS, model.state_dict())
    if tokenizer is not None:
        write_then_rename(folder / TOKENIZER, lambda beside: tokenizer.save(str(beside)))
    _write_config(folder, LANGUAGE_MODEL, model.config.to_dict())


def load_language_model(folder: Path, device: torch.device | str = "cpu") -> CausalLanguageModel:
    """The language model of a folder, ready to write.

    >>> import tempfile
    >>> from hsa.models.language_model import LanguageModel, LanguageModelConfig
    >>> model = LanguageModel(LanguageModelConfig(11, width=8, heads=2, layers=1, closes={3: 2}))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_language_model(Path(folder), model)
    ...     load_language_model(Path(folder)).config == model.config
    True

    Raises:
        InvalidInput: naming the file: it is missing, damaged, or of another model.
    """

    def make(config: dict[str, Any]) -> CausalLanguageModel:
        architecture = LANGUAGE_ARCHITECTURES.get(config["architecture"])
        return architecture.module(architecture.config.from_dict(config))

    return _load(folder, device, LANGUAGE_MODEL, "hsa train --task lm", make)


def save_seq2seq(folder: Path, model: Seq2Seq) -> None:
    """Write an encoder–decoder."""
    save_tensors(folder / WEIGHTS, model.state_dict())
    _write_config(folder, SEQ2SEQ, model.config.to_dict())


def load_seq2seq(folder: Path, device: torch.device | str = "cpu") -> Seq2Seq:
    """The encoder–decoder of a folder, ready to answer; raises as `load_language_model`."""
    return _load(
        folder, device, SEQ2SEQ, "hsa train --task seq2seq", lambda config: Seq2Seq(Seq2SeqConfig.from_dict(config))
    )


def _write_config(folder: Path, kind: str, config: dict[str, Any]) -> None:
    write_json(folder / CONFIG, {"format": FORMAT, "model": kind, **config})


def _load(
    folder: Path,
    device: torch.device | str,
    kind: str,
    command: str,
    make: Callable[[dict[str, Any]], AnyModel],
) -> AnyModel:
    """Load a model of one kind; `make` builds it from its configuration."""
    expected = f"the configuration of a {kind} of hsa"
    about = read_json(folder / CONFIG, expected)
    fix = f"train one with: {command}"
    if not isinstance(about, dict) or not isinstance(about.get("model"), str):
        raise InvalidInput(str(folder / CONFIG), given="something else", expected=expected, fix=fix)
    if about.get("format") != FORMAT:
        older = "format" not in about
        raise InvalidInput(
            str(folder / CONFIG),
            given="a model that hsa 0.1 saved" if older else f"format {about['format']!r}",
            expected=f"format {FORMAT}, which this version of hsa reads and writes",
            fix="train it again, or load it with hsa 0.1" if older else "load it with the version of hsa that saved it",
        )
    if about["model"] != kind:
        raise InvalidInput(str(folder / CONFIG), given=f"that of a {about['model']}", expected=expected, fix=fix)
    try:
        model = make({name: value for name, value in about.items() if name not in ("format", "model")})
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # InvalidInput is a ValueError
        raise InvalidInput(
            str(folder / CONFIG),
            given=f"a configuration that makes no model ({type(error).__name__}: {error})",
            expected="one that this version of hsa wrote",
        ) from error
    weights, _ = load_tensors(folder / WEIGHTS, f"the weights of a {kind} of hsa")
    check_fits(str(folder / WEIGHTS), weights, model.state_dict())
    model.load_state_dict(weights)
    return model.to(device).eval()


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
