"""Pre-trained models and their tokenizers, from a folder or the hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hsa.errors import InvalidInput, MissingExtra

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
KINDS = {
    "classify": "AutoModelForSequenceClassification",
    "embed": "AutoModel",
    "perplexity": "AutoModelForCausalLM",
}
"""What a model is loaded as, for each task."""


def transformers_library(purpose: str = "a pre-trained encoder") -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingExtra("transformers", "hf", purpose) from None
    return transformers


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Says how to get a model that cannot be loaded."""
    try:
        if not Path(name).is_dir() and not _HUB_NAME.fullmatch(name):
            raise OSError("no such folder")
        with _quiet():
            yield
    except InvalidInput:
        raise
    except (OSError, ValueError) as error:
        hub = name if _HUB_NAME.fullmatch(name) and not Path(name).is_dir() else "OWNER/MODEL"
        folder = name if hub != name else f"models/{name.rpartition('/')[2]}"
        raise InvalidInput(
            name,
            given=f"no model that loads ({str(error).strip().partition(chr(10))[0]})",
            expected="a folder with config.json, weights and tokenizer or preprocessor, or a name on the hub",
            fix=f"where there is a network, run: hf download {hub} --local-dir {folder}, then give that folder",
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """The library's own reports and bars are silenced."""
    logging = transformers_library().logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def save_model(folder: Path, model: Any, tokenizer: Any) -> None:
    """A model and its tokenizer, as any other is saved."""
    with _quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def load_weights(kind: Any, name: str, dtype: torch.dtype, **options: Any) -> tuple[Any, list[str]]:
    """The model, and the names of weights that are not in the checkpoint; the pooler's are not missed."""
    model, report = kind.from_pretrained(name, dtype=dtype, output_loading_info=True, **options)
    missing = {*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])}
    return model, sorted(key for key in missing if "pooler." not in key)


def load_for_task(
    name: str, task: str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[Any, Any]:
    """A model with all its weights and its tokenizer, as a task needs it ("classify", "embed" or "perplexity").

    Raises:
        InvalidInput: nothing that loads, or a checkpoint without the weights of its head.
    """
    library = transformers_library()
    with loading(name):
        tokenizer = library.AutoTokenizer.from_pretrained(name)
        model, missing = load_weights(getattr(library, KINDS[task]), name, dtype)
    if missing:
        raise InvalidInput(
            name,
            given=f"a checkpoint without {len(missing)} of the weights, such as {missing[0]}",
            expected=f"all of a {type(model).__name__}",
            fix="fine-tune it first: hsa finetune" if task == "classify" else None,
        )
    return model.eval().to(device), tokenizer


def load_for_training(name: str, classes: list[str], *, fresh: bool = False) -> tuple[Any, Any]:
    """A classifier to be trained: the encoder's weights and a new head, or all of it new, and its tokenizer."""
    library = transformers_library()
    labels = {"id2label": dict(enumerate(classes)), "label2id": {name: i for i, name in enumerate(classes)}}
    with loading(name):
        tokenizer = library.AutoTokenizer.from_pretrained(name)
        kind = library.AutoModelForSequenceClassification
        if fresh:
            config = library.AutoConfig.from_pretrained(name, num_labels=len(classes), **labels)
            return kind.from_config(config, dtype=torch.float32), tokenizer
        model, missing = load_weights(
            kind, name, torch.float32, num_labels=len(classes), ignore_mismatched_sizes=True, **labels
        )
    inside = sorted(key for key in missing if key.startswith(f"{model.base_model_prefix}."))
    if inside:
        raise InvalidInput(
            name,
            given=f"a checkpoint without {len(inside)} of the encoder's weights, such as {inside[0]}",
            expected=f"all of a {type(model.base_model).__name__}",
        )
    return model, tokenizer


def most_tokens(model: Any, tokenizer: Any, usual: int = 512) -> int:
    """The longest input: what the table of positions holds, if there is one, and what the tokenizer knows of it."""
    tables = (m for name, m in model.named_modules() if name.endswith("position_embeddings"))
    table = next((m for m in tables if isinstance(m, torch.nn.Embedding)), None)
    if table is not None:  # RoBERTa counts from beyond the padding
        positions = table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
    else:
        positions = getattr(model.config, "max_position_embeddings", None) or usual
    return min(positions, tokenizer.model_max_length)
