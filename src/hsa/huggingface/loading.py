"""Load pre-trained models and their tokenizers, from a folder or the hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from typing import Any

import torch

from hsa.errors import HsaError, InvalidInput, MissingExtra
from hsa.huggingface.layers import attention_layers, is_causal

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
KINDS = {
    "classification": "AutoModelForSequenceClassification",
    "embedding": "AutoModel",
    "lm": "AutoModelForCausalLM",
}
"""Class that a model is loaded as, for each task."""


def transformers_library(purpose: str = "a pre-trained encoder") -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingExtra("transformers", "hf", purpose) from None
    return transformers


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Explain how to get a model that cannot be loaded."""
    try:
        if not Path(name).is_dir() and (not _HUB_NAME.fullmatch(name) or _looks_local(name)):
            raise OSError("no such folder")
        with _quiet():
            yield
    except HsaError:
        raise
    except (OSError, ValueError, ImportError, RuntimeError, _damaged()) as error:
        hub = name if _HUB_NAME.fullmatch(name) and not Path(name).is_dir() else "OWNER/MODEL"
        folder = name if hub != name else f"models/{name.rpartition('/')[2]}"
        raise InvalidInput(
            name,
            given=f"no model that loads ({str(error).strip().partition(chr(10))[0]})",
            expected="a folder with config.json, weights and tokenizer or preprocessor, or a name on the hub",
            fix=f"where there is a network, run: hf download {hub} --local-dir {folder}, then give that folder",
        ) from error


def _looks_local(name: str) -> bool:
    """Whether a name is a path in an existing folder, so that the hub, slow without a network, need not be asked."""
    parent = Path(name).parent
    return parent != Path() and parent.is_dir()


def _damaged() -> type[Exception]:
    """Return the error that truncated weights raise."""
    from safetensors import SafetensorError  # transformers needs it

    return SafetensorError


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the messages and progress bars of transformers."""
    logging = transformers_library().logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub = getLogger("huggingface_hub")  # logs every attempt to reach it
    hub_before = hub.level
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hub.setLevel("ERROR")
    try:
        yield
    finally:
        logging.set_verbosity(before)
        hub.setLevel(hub_before)
        if bars:
            logging.enable_progress_bar()


def save_model(folder: Path, model: Any, tokenizer: Any) -> None:
    """Save a model and its tokenizer as any other."""
    with _quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def load_weights(kind: Any, name: str, dtype: torch.dtype, **options: Any) -> tuple[Any, list[str]]:
    """Load a model; returns it and the names of weights that the checkpoint lacks, the pooler's left out."""
    model, report = kind.from_pretrained(name, dtype=dtype, output_loading_info=True, **options)
    mismatched = (key if isinstance(key, str) else key[0] for key in report["mismatched_keys"])  # with their shapes
    missing = {*report["missing_keys"], *mismatched}
    return model, sorted(key for key in missing if "pooler." not in key)


def check_complete(name: str, model: Any, missing: list[str], fix: str | None = None) -> None:
    """Refuse a checkpoint that lacks weights of a model."""
    if missing:
        raise InvalidInput(
            name,
            given=f"a checkpoint without {len(missing)} of the weights, such as {missing[0]}",
            expected=f"all of a {type(model).__name__}",
            fix=fix,
        )


def load_for_task(
    name: str, task: str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[Any, Any]:
    """Load a model with all its weights and its tokenizer for a task ("classification", "embedding" or "lm").

    Raises:
        InvalidInput: nothing that loads, or a checkpoint without the weights of its head.
    """
    library = transformers_library()
    with loading(name):
        tokenizer = library.AutoTokenizer.from_pretrained(name)
        model, missing = load_weights(getattr(library, KINDS[task]), name, dtype)
    check_complete(name, model, missing, fix="fine-tune it first: hsa finetune" if task == "classification" else None)
    if task == "lm" and not any(is_causal(layer) for layer in attention_layers(model)):
        raise InvalidInput(
            name,
            given=f"{type(model).__name__}, whose tokens see later ones",
            expected="a causal language model",
            fix="for an encoder, pass --task classification or embedding",
        )
    if task == "classification":
        _name_padding(model, tokenizer)
    return model.eval().to(device), tokenizer


def _name_padding(model: Any, tokenizer: Any) -> None:
    """Set a padding token: classifiers made from language models look for the last token that is no padding."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if getattr(model.config, "pad_token_id", None) is None:
        model.config.pad_token_id = tokenizer.pad_token_id


def load_for_training(name: str, classes: list[str], *, fresh: bool = False) -> tuple[Any, Any]:
    """Load a classifier to train, with the encoder's weights and a new head, or all of it new; and its tokenizer."""
    library = transformers_library()
    labels = {"id2label": dict(enumerate(classes)), "label2id": {name: i for i, name in enumerate(classes)}}
    with loading(name):
        tokenizer = library.AutoTokenizer.from_pretrained(name)
        kind = library.AutoModelForSequenceClassification
        if fresh:
            config = library.AutoConfig.from_pretrained(name, num_labels=len(classes), **labels)
            model = kind.from_config(config, dtype=torch.float32)
            _name_padding(model, tokenizer)
            return model, tokenizer
        model, missing = load_weights(
            kind, name, torch.float32, num_labels=len(classes), ignore_mismatched_sizes=True, **labels
        )
    check_complete(name, model.base_model, [key for key in missing if key.startswith(f"{model.base_model_prefix}.")])
    _name_padding(model, tokenizer)
    return model, tokenizer


def most_tokens(model: Any, tokenizer: Any, usual: int = 512) -> int:
    """Return the longest input that the table of positions, if there is one, and the tokenizer allow."""
    tables = (m for name, m in model.named_modules() if name.endswith("position_embeddings"))
    table = next((m for m in tables if isinstance(m, torch.nn.Embedding)), None)
    if table is not None:  # RoBERTa counts from beyond the padding
        positions = table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
    else:
        positions = getattr(model.config, "max_position_embeddings", None) or usual
    return min(positions, tokenizer.model_max_length)
