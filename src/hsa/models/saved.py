"""Save and load models in folders: `config.json`, `model.safetensors` and, for a language model, `tokenizer.json`.

`SHA256SUMS` lists the checksums of these files, so that a damaged file, or one of another model, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from hsa.checksums import check_listed
from hsa.errors import InvalidInput
from hsa.files import load_tensors, read_json, save_tensors, write_json, write_sealed
from hsa.models.causal_language_model import CausalLanguageModel
from hsa.models.classifier import Classifier, ModelConfig
from hsa.models.registry import LANGUAGE_ARCHITECTURES
from hsa.models.seq2seq import Seq2Seq, Seq2SeqConfig

CONFIG, WEIGHTS, TOKENIZER, RESULTS = "config.json", "model.safetensors", "tokenizer.json", "results.json"
FORMAT = 2
"""Version of the file format. hsa 0.1 wrote files without a version."""
CLASSIFIER, LANGUAGE_MODEL, SEQ2SEQ = "classifier", "language model", "encoder–decoder"
TRANSFORMERS = "transformers model"
Folder = str | PathLike[str]
AnyModel = TypeVar("AnyModel", bound=nn.Module)
_WITH_ARTICLE = {
    CLASSIFIER: "a classifier",
    LANGUAGE_MODEL: "a language model",
    SEQ2SEQ: "an encoder–decoder",
    TRANSFORMERS: "a transformers model",
}


def with_article(kind: str) -> str:
    """Return a kind of model with its indefinite article."""
    return _WITH_ARTICLE.get(kind, repr(kind))


def kind_of(folder: Path) -> str | None:
    """Return the kind of model in a folder, as its configuration states it; None if it states none."""
    if not (folder / CONFIG).is_file():
        return None
    about = read_json(folder / CONFIG, "the configuration of a model of hsa")
    if not isinstance(about, dict):
        return None
    kind = TRANSFORMERS if "model_type" in about else about.get("model")
    return kind if isinstance(kind, str) else None


def is_transformers(folder: Path) -> bool:
    """Return whether the folder holds a transformers model: its configuration names a `model_type`."""
    return kind_of(folder) == TRANSFORMERS


def save_model(folder: Folder, model: Classifier, classes: Sequence[str] = ()) -> None:
    """Save a classifier or a regression model; existing files are replaced only by complete ones.

    Args:
        folder: Folder to write to; created if it does not exist.
        model: Model to save.
        classes: Names of the outputs.

    >>> import tempfile
    >>> from hsa.nn import EncoderConfig, Modality
    >>> model = Classifier(ModelConfig(EncoderConfig(width=8), {"text": Modality(tokens=10)}, outputs=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(folder, model, ("no", "yes"))
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['SHA256SUMS', 'config.json', 'model.safetensors']
    """
    _save(folder, CLASSIFIER, model, {"classes": list(classes), **model.config.to_dict()})


def load_model(folder: Folder, device: torch.device | str = "cpu") -> tuple[Classifier, tuple[str, ...]]:
    """Load a classifier or a regression model without its tokenizer; `hsa.load` loads both.

    Args:
        folder: Folder that `save_model` or `hsa train` wrote.
        device: Device to load the model to.

    Returns:
        The model in `eval` mode, and the names of its classes.

    Raises:
        InvalidInput: If a file is missing, damaged or of another model; the message names it.

    >>> import tempfile
    >>> from hsa.nn import EncoderConfig, Modality
    >>> model = Classifier(ModelConfig(EncoderConfig(width=8), {"text": Modality(tokens=10)}, outputs=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(folder, model, ("no", "yes"))
    ...     load_model(folder)[1]
    ('no', 'yes')
    """
    classes: tuple[str, ...] = ()

    def make(config: dict[str, Any]) -> Classifier:
        nonlocal classes
        classes = tuple(config.pop("classes"))
        return Classifier(ModelConfig.from_dict(config))

    return _load(folder, device, CLASSIFIER, "hsa train", make), classes


def save_language_model(folder: Folder, model: CausalLanguageModel, tokenizer: Any = None) -> None:
    """Save a language model and its tokenizer.

    Args:
        folder: Folder to write to; created if it does not exist.
        model: Model to save.
        tokenizer: Its `tokenizers.Tokenizer`, which `hsa.load` needs.

    >>> import tempfile
    >>> from hsa.models import LanguageModel, LanguageModelConfig
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_language_model(folder, LanguageModel(LanguageModelConfig(11, width=8, heads=2, layers=1)))
    """
    _save(folder, LANGUAGE_MODEL, model, model.config.to_dict(), tokenizer)


def load_language_model(folder: Folder, device: torch.device | str = "cpu") -> CausalLanguageModel:
    """Load a language model, in `eval` mode and without its tokenizer; `hsa.load` loads both.

    Args:
        folder: Folder that `save_language_model` or `hsa train --task lm` wrote.
        device: Device to load the model to.

    Raises:
        InvalidInput: If a file is missing, damaged or of another model; the message names it.

    >>> import tempfile
    >>> from hsa.models import LanguageModel, LanguageModelConfig
    >>> model = LanguageModel(LanguageModelConfig(11, width=8, heads=2, layers=1, closes={3: 2}))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_language_model(folder, model)
    ...     load_language_model(folder).config == model.config
    True
    """

    def make(config: dict[str, Any]) -> CausalLanguageModel:
        architecture = LANGUAGE_ARCHITECTURES.get(config["architecture"])
        return architecture.module(architecture.config.from_dict(config))

    return _load(folder, device, LANGUAGE_MODEL, "hsa train --task lm", make)


def save_seq2seq(folder: Folder, model: Seq2Seq) -> None:
    """Save an encoder–decoder.

    Args:
        folder: Folder to write to; created if it does not exist.
        model: Model to save.

    >>> import tempfile
    >>> from hsa.models import LanguageModelConfig
    >>> from hsa.nn import EncoderConfig, Modality
    >>> decoder = LanguageModelConfig(12, width=8, heads=2, layers=1)
    >>> model = Seq2Seq(Seq2SeqConfig(EncoderConfig(width=8), decoder, {"text": Modality(tokens=10)}))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_seq2seq(folder, model)
    ...     load_seq2seq(folder).config == model.config
    True
    """
    _save(folder, SEQ2SEQ, model, model.config.to_dict())


def load_seq2seq(folder: Folder, device: torch.device | str = "cpu") -> Seq2Seq:
    """Load an encoder–decoder, in `eval` mode and without its tokenizer; `hsa.load` loads both.

    Args:
        folder: Folder that `save_seq2seq` or `hsa train --task seq2seq` wrote.
        device: Device to load the model to.

    Raises:
        InvalidInput: If a file is missing, damaged or of another model; the message names it.

    >>> load_seq2seq("nowhere")
    Traceback (most recent call last):
    hsa.errors.InvalidInput: nowhere/config.json: no such file; expected the configuration of an encoder–decoder of hsa
    """
    return _load(
        folder, device, SEQ2SEQ, "hsa train --task seq2seq", lambda config: Seq2Seq(Seq2SeqConfig.from_dict(config))
    )


def _save(folder: Folder, kind: str, model: nn.Module, config: dict[str, Any], tokenizer: Any = None) -> None:
    def write(temporary: Path) -> None:
        save_tensors(temporary / WEIGHTS, model.state_dict())
        if tokenizer is not None:
            tokenizer.save(str(temporary / TOKENIZER))
        write_json(temporary / CONFIG, {"format": FORMAT, "model": kind, **config})

    write_sealed(Path(folder), write)


def _load(
    folder: Folder,
    device: torch.device | str,
    kind: str,
    command: str,
    make: Callable[[dict[str, Any]], AnyModel],
) -> AnyModel:
    """Load a model of one kind; `make` builds it from its configuration."""
    folder = Path(folder)
    expected = f"the configuration of {with_article(kind)} of hsa"
    about = read_json(folder / CONFIG, expected)
    fix = f"Train one with: {command}"
    if not isinstance(about, dict) or not isinstance(about.get("model"), str):
        got = "that of a transformers model" if is_transformers(folder) else "something else"
        raise InvalidInput(str(folder / CONFIG), got=got, expected=expected, fix=fix)
    if about.get("format") != FORMAT:
        older = "format" not in about
        raise InvalidInput(
            str(folder / CONFIG),
            got="a model that hsa 0.1 saved" if older else f"format {about['format']!r}",
            expected=f"format {FORMAT}, which this version of hsa reads and writes",
            fix="Train it again, or load it with hsa 0.1" if older else "Load it with the version of hsa that saved it",
        )
    if about["model"] != kind:
        raise InvalidInput(
            str(folder / CONFIG), got=f"that of {with_article(about['model'])}", expected=expected, fix=fix
        )
    check_listed(folder / CONFIG, expected)
    try:
        model = make({name: value for name, value in about.items() if name not in ("format", "model")})
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidInput(
            str(folder / CONFIG),
            got=f"one from which no model can be built ({type(error).__name__}: {error})",
            expected="a configuration that this version of hsa wrote",
        ) from error
    expected = f"the weights of {with_article(kind)} of hsa"
    weights, _ = load_tensors(folder / WEIGHTS, expected)
    check_listed(folder / WEIGHTS, expected)
    check_fits(str(folder / WEIGHTS), weights, model.state_dict())
    model.load_state_dict(weights)
    return model.to(device).eval()


def check_fits(where: str, weights: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Check that weights have the names and shapes that a model wants; the error names the first tensor that does not fit.

    Args:
        where: Name of the file, for the error.
        weights: Tensors of the file, by name.
        wanted: Tensors of the model, by name.
    """
    other = "They belong to another model: use the options it was trained with, or another folder"
    for name, tensor in wanted.items():
        if not isinstance(weights, dict) or not isinstance(weights.get(name), torch.Tensor):
            raise InvalidInput(where, got=f"weights without {name!r}", expected="those of this model", fix=other)
        if weights[name].shape != tensor.shape:
            raise InvalidInput(
                where,
                got=f"{name!r} of shape {tuple(weights[name].shape)}",
                expected=f"shape {tuple(tensor.shape)}",
                fix=other,
            )
    extra = sorted(set(weights) - set(wanted))
    if extra:
        raise InvalidInput(where, got=f"weights with {extra[0]!r}", expected="those of this model", fix=other)
