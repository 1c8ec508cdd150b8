"""A model in a folder: `config.json` and `model.safetensors`; of a language model also `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from hsa.baselines.transformer_xl.language_model import TransformerXLLanguageConfig, TransformerXLLanguageModel
from hsa.errors import InvalidInput
from hsa.files import load_tensors, read_json, save_tensors, write_json, write_then_rename
from hsa.models.classifier import Classifier, ModelConfig
from hsa.models.language_model import LanguageModel, LanguageModelConfig
from hsa.models.language_models import AnyLanguageModel
from hsa.models.seq2seq import Seq2Seq, Seq2SeqConfig

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
CLASSIFIER, LANGUAGE_MODEL, TRANSFORMER_XL, SEQ2SEQ = (
    "hierarchical classifier",
    "hierarchical language model",
    "Transformer-XL language model",
    "hierarchical encoder–decoder",
)
AnyModel = TypeVar("AnyModel", bound=nn.Module)


def kind_of(folder: Path) -> str | None:
    """Which kind of model a folder holds, as its configuration says; None where it does not say."""
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
    write_json(folder / CONFIG, {"model": CLASSIFIER, "classes": list(classes), **model.config.to_dict()})


def load_model(folder: Path, device: torch.device | str = "cpu") -> tuple[Classifier, tuple[str, ...]]:
    """The model of a folder, ready to predict, and the names of its classes.

    >>> import tempfile
    >>> from hsa.nn.embedding import Modality
    >>> from hsa.nn.encoder import EncoderConfig
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

    return _load(folder, device, "model", "hsa train", {CLASSIFIER: make}), classes


def save_language_model(folder: Path, model: AnyLanguageModel, tokenizer: Any = None) -> None:
    """Write a language model and what makes its tokens, a `tokenizers.Tokenizer`."""
    save_tensors(folder / WEIGHTS, model.state_dict())
    if tokenizer is not None:
        write_then_rename(folder / TOKENIZER, lambda beside: tokenizer.save(str(beside)))
    kind = TRANSFORMER_XL if isinstance(model, TransformerXLLanguageModel) else LANGUAGE_MODEL
    write_json(folder / CONFIG, {"model": kind, **model.config.to_dict()})


def load_language_model(folder: Path, device: torch.device | str = "cpu") -> AnyLanguageModel:
    """The language model of a folder, ready to write.

    >>> import tempfile
    >>> model = LanguageModel(LanguageModelConfig(11, width=8, heads=2, layers=1, closes={3: 2}))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_language_model(Path(folder), model)
    ...     load_language_model(Path(folder)).config == model.config
    True

    Raises:
        InvalidInput: naming the file: it is missing, damaged, or of another model.
    """
    kinds: dict[str, Callable[[dict[str, Any]], AnyLanguageModel]] = {
        LANGUAGE_MODEL: lambda config: LanguageModel(LanguageModelConfig.from_dict(config)),
        TRANSFORMER_XL: lambda config: TransformerXLLanguageModel(TransformerXLLanguageConfig.from_dict(config)),
    }
    return _load(folder, device, "language model", "hsa train --task lm", kinds)


def save_seq2seq(folder: Path, model: Seq2Seq) -> None:
    """Write an encoder–decoder."""
    save_tensors(folder / WEIGHTS, model.state_dict())
    write_json(folder / CONFIG, {"model": SEQ2SEQ, **model.config.to_dict()})


def load_seq2seq(folder: Path, device: torch.device | str = "cpu") -> Seq2Seq:
    """The encoder–decoder of a folder, ready to answer; raises as `load_language_model`."""
    kinds = {SEQ2SEQ: lambda config: Seq2Seq(Seq2SeqConfig.from_dict(config))}
    return _load(folder, device, "encoder–decoder", "hsa train --task seq2seq", kinds)


def _load(
    folder: Path,
    device: torch.device | str,
    what: str,
    command: str,
    kinds: Mapping[str, Callable[[dict[str, Any]], AnyModel]],
) -> AnyModel:
    """By its kind, which the configuration names."""
    about = read_json(folder / CONFIG, f"the configuration of a {what} of hsa")
    found = about.get("model") if isinstance(about, dict) else None
    if not isinstance(found, str) or found not in kinds:
        raise InvalidInput(
            str(folder / CONFIG),
            given=f"that of a {found}" if isinstance(found, str) else "something else",
            expected=f"the configuration of a {what} of hsa",
            fix=f"train one with: {command}",
        )
    try:
        model = kinds[found]({name: value for name, value in about.items() if name != "model"})
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # InvalidInput is a ValueError
        raise InvalidInput(
            str(folder / CONFIG),
            given=f"a configuration that makes no model ({type(error).__name__}: {error})",
            expected="one that this version of hsa wrote",
        ) from error
    weights, _ = load_tensors(folder / WEIGHTS, f"the weights of a {what} of hsa")
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
