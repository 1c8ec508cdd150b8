"""Loading of pre-trained models and their tokenizers, from a folder or the hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from typing import Any

import torch

from hsa.analysis.memory import format_mib, free_memory
from hsa.errors import HsaError, InvalidInput, MissingExtra
from hsa.files import write_together
from hsa.huggingface.layers import attention_layers, is_causal

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
KINDS = {
    "classification": "AutoModelForSequenceClassification",
    "embedding": "AutoModel",
    "lm": "AutoModelForCausalLM",
}
"""Class of transformers for each task."""


def transformers_library(purpose: str = "a pre-trained encoder") -> Any:
    """Import transformers, or raise an error that says how to install it."""
    try:
        import transformers
    except ImportError:
        raise MissingExtra("transformers", "hf", purpose) from None
    return transformers


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Replace errors of loading a model by one that says how to get it."""
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
            problem=f"the model cannot be loaded ({str(error).strip().partition(chr(10))[0]})",
            expected="a folder with config.json, weights and tokenizer or preprocessor, or a name on the hub",
            fix=f"With a network connection, run: hf download {hub} --local-dir {folder}, then pass that folder",
        ) from error


def _looks_local(name: str) -> bool:
    """Return whether a name is a path in an existing folder: looking it up on the hub is slow without a network."""
    parent = Path(name).parent
    return parent != Path() and parent.is_dir()


def _damaged() -> type[Exception]:
    """Return the error that truncated weights raise."""
    from safetensors import SafetensorError  # a dependency of transformers

    return SafetensorError


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the messages and progress bars of transformers."""
    logging = transformers_library().logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub = getLogger("huggingface_hub")  # logs each attempt to reach the hub
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
    """Save a model and its tokenizer in the format of transformers; no file is replaced before all are complete."""

    def write(temporary: Path) -> None:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        for old in folder.glob("model*.safetensors*"):  # the weights of an earlier model may be in more or fewer files
            if not (temporary / old.name).exists():
                old.unlink()

    with _quiet():
        write_together(folder, write, last="config.json")


def load_weights(kind: Any, name: str, dtype: torch.dtype, **options: Any) -> tuple[Any, list[str]]:
    """Load a model. Return it and the names of weights that the checkpoint lacks, except for the pooler's."""
    model, report = kind.from_pretrained(name, dtype=dtype, output_loading_info=True, **options)
    mismatched = (key if isinstance(key, str) else key[0] for key in report["mismatched_keys"])  # or with shapes
    missing = {*report["missing_keys"], *mismatched}
    return model, sorted(key for key in missing if "pooler." not in key)


def check_complete(name: str, model: Any, missing: list[str], fix: str | None = None) -> None:
    """Refuse a checkpoint that lacks weights of the model."""
    if missing:
        raise InvalidInput(
            name,
            expected=f"all weights of a {type(model).__name__}",
            got=f"a checkpoint without {len(missing)} of the weights, such as {missing[0]}",
            fix=fix,
        )


def load_for_task(
    name: str, task: str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[Any, Any]:
    """Load a model with all its weights and its tokenizer for a task ("classification", "embedding" or "lm").

    Raises:
        InvalidInput: The model cannot be loaded, or its checkpoint lacks the weights of its head.
    """
    library = transformers_library()
    with loading(name):
        config = library.AutoConfig.from_pretrained(name)
        if task == "lm" and config.is_encoder_decoder:
            raise InvalidInput(
                name,
                expected="a causal language model, such as GPT-2, Llama or Qwen",
                got=f"an encoder–decoder ({config.model_type})",
                fix="In Python, convert its encoder: hsa.huggingface.convert(model.get_encoder())",
            )
        tokenizer = library.AutoTokenizer.from_pretrained(name)
        model, missing = load_weights(getattr(library, KINDS[task]), name, dtype)
    check_complete(name, model, missing, fix="Fine-tune it first: hsa finetune" if task == "classification" else None)
    if task == "lm" and not any(is_causal(layer) for layer in attention_layers(model)):
        raise InvalidInput(
            name,
            expected="a causal language model",
            got=f"{type(model).__name__}, whose tokens see later ones",
            fix="For an encoder, pass --task classification or --task embedding",
        )
    if task == "classification":
        _name_padding(model, tokenizer)
    if torch.device(device).type == "cuda":
        check_room(name, model, free_memory(device))
    return model.eval().to(device), tokenizer


def check_room(name: str, model: torch.nn.Module, free: float | None) -> None:
    """Refuse a model whose weights are larger than the free memory of a GPU, in MiB."""
    weights = sum(weight.nbytes for weight in model.parameters()) / 2**20
    if free is not None and weights > free:
        raise InvalidInput(
            name,
            got=f"weights of {format_mib(weights)}",
            expected=f"at most the {format_mib(free)} of memory that are free on the GPU",
            fix="Pass --cpu, or a smaller model",
        )


def _name_padding(model: Any, tokenizer: Any) -> None:
    """Set a padding token, which classifiers made from language models need to find the last token of a text."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if getattr(model.config, "pad_token_id", None) is None:
        model.config.pad_token_id = tokenizer.pad_token_id


def load_for_training(name: str, classes: list[str], *, fresh: bool = False) -> tuple[Any, Any]:
    """Load an encoder with a new classification head, and its tokenizer. If `fresh`, all weights are new."""
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
    """Return the number of tokens that the model's positions, if it has a limit, and its tokenizer allow."""
    tables = (m for name, m in model.named_modules() if name.endswith("position_embeddings"))
    table = next((m for m in tables if isinstance(m, torch.nn.Embedding)), None)
    if table is not None:  # RoBERTa's positions start after the padding index
        positions = table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
    else:
        positions = trained_context(model.config) or usual
        if positions > (getattr(model.config, "max_position_embeddings", None) or positions):
            return positions  # scaled afterwards, which the tokenizer does not know
    return min(positions, tokenizer.model_max_length)


def trained_context(config: Any) -> int | None:
    """Return the number of tokens that a model was trained to read, according to its config; None if it does not say.

    A factor by which rotary positions are scaled counts.
    """
    config = config.get_text_config(decoder=True)
    most = getattr(config, "max_position_embeddings", None)
    scaling = getattr(config, "rope_parameters", None) or {}
    if most is None or "factor" not in scaling:  # Gemma 3 has factors by kind of layer, which `most` includes
        return most
    return max(most, int(scaling["factor"] * scaling.get("original_max_position_embeddings", most)))
