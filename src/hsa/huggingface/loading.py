"""Pre-trained models and their tokenizers, from a folder or the hub."""

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
    """In a folder that is here: the hub, which takes long to answer where there is no network, need not be asked."""
    parent = Path(name).parent
    return parent != Path() and parent.is_dir()


def _damaged() -> type[Exception]:
    """What is raised for weights that are cut off."""
    from safetensors import SafetensorError  # transformers needs it

    return SafetensorError


@contextmanager
def _quiet() -> Iterator[None]:
    """The library's own reports and bars are silenced."""
    logging = transformers_library().logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub = getLogger("huggingface_hub")  # tells of every attempt to reach it
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
    """A model and its tokenizer, as any other is saved."""
    with _quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def load_weights(kind: Any, name: str, dtype: torch.dtype, **options: Any) -> tuple[Any, list[str]]:
    """The model, and the names of weights that are not in the checkpoint; the pooler's are not missed."""
    model, report = kind.from_pretrained(name, dtype=dtype, output_loading_info=True, **options)
    mismatched = (key if isinstance(key, str) else key[0] for key in report["mismatched_keys"])  # with their shapes
    missing = {*report["missing_keys"], *mismatched}
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
    if task == "perplexity" and not any(is_causal(layer) for layer in attention_layers(model)):
        raise InvalidInput(
            name,
            given=f"{type(model).__name__}, whose tokens see later ones",
            expected="a causal language model",
            fix="for an encoder, pass --task classify or embed",
        )
    if task == "classify":
        _name_padding(model, tokenizer)
    return model.eval().to(device), tokenizer


def _name_padding(model: Any, tokenizer: Any) -> None:
    """Classifiers made from language models look for the last token that is no padding, which many have no token for."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if getattr(model.config, "pad_token_id", None) is None:
        model.config.pad_token_id = tokenizer.pad_token_id


def load_for_training(name: str, classes: list[str], *, fresh: bool = False) -> tuple[Any, Any]:
    """A classifier to be trained: the encoder's weights and a new head, or all of it new, and its tokenizer."""
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
    inside = sorted(key for key in missing if key.startswith(f"{model.base_model_prefix}."))
    if inside:
        raise InvalidInput(
            name,
            given=f"a checkpoint without {len(inside)} of the encoder's weights, such as {inside[0]}",
            expected=f"all of a {type(model.base_model).__name__}",
        )
    _name_padding(model, tokenizer)
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
