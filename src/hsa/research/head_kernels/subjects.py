"""Loading of models to study, together with examples: models of hsa, and encoders of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hsa.errors import InvalidInput, inside
from hsa.huggingface.encoders import batch_by_length
from hsa.huggingface.fidelity.examples import load_examples, number_labels, tokenize
from hsa.huggingface.loading import most_tokens
from hsa.models.saved import CONFIG, TRANSFORMERS, kind_of
from hsa.research.head_kernels.heads import Answer, EncoderHeads, Heads
from hsa.research.head_kernels.huggingface import TransformerHeads, load_encoder
from hsa.research.head_kernels.learning import Targets
from hsa.research.head_kernels.options import HeadDataOptions
from hsa.research.head_kernels.pruning import Score, accuracy, cosine, r_squared
from hsa.training.data.data_set import batches_by_tokens
from hsa.training.inference import LoadedClassifier


@dataclass(frozen=True, eq=False)
class Subject:
    """A model and examples to run it on."""

    model: str
    data: str
    heads: Heads
    answer: Answer
    lengths: np.ndarray  # tokens of every example
    batches: Callable[[np.ndarray], list[np.ndarray]]  # indices of examples → batches of them
    targets: Targets | None
    score: Callable[[np.ndarray, Tensor], tuple[str, Score]]  # indices, answers of the full model → name and score


def is_ours(folder: Path) -> bool:
    """Return whether a folder was written by `hsa train`: a model, or a run with a folder per model."""
    if not folder.is_dir():
        return False
    if (folder / CONFIG).exists():
        return kind_of(folder) not in (None, TRANSFORMERS)
    return any(is_ours(path) for path in folder.iterdir() if path.is_dir())


def our_model(
    folder: Path,
    data: Path,
    read: HeadDataOptions,
    *,
    seed: int,
    device: str,
    on_bad: Callable[[InvalidInput], None],
    say: Callable[[str], None],
) -> Subject:
    """Load a model that `hsa train` saved, and data as read for its training. `on_bad` is called for every bad row."""
    say(f"loading {folder}")
    saved = LoadedClassifier.load(folder, device)
    config = saved.model.config
    if config.task == "tokens":
        raise InvalidInput(
            str(folder), got="a model with a class per leaf", expected="a model with a class or number per example"
        )
    heads = EncoderHeads(saved.model.encoder)
    say(f"reading {data}")
    examples = saved.data_set(data, on_bad)
    drawn = np.random.default_rng(seed).permutation(len(examples))[: read.limit]
    examples = examples.select(np.sort(drawn))
    _check_count(str(data), len(examples))
    numbers = examples.targets.numpy()
    targets = Targets.of_classes(numbers) if saved.classes else Targets.of_numbers(numbers)
    transform = saved.input_spec.transform
    lengths = examples.lengths

    @torch.no_grad()
    def answer(indices: np.ndarray) -> Tensor:
        batch = examples.select(indices).batch.to(device)
        out = saved.model(batch if transform is None else transform(batch)).float()
        return out if out.ndim == 2 else out[:, None]

    def batches(indices: np.ndarray) -> list[np.ndarray]:
        order = np.asarray(indices)[np.argsort(-lengths[indices], kind="stable")]
        return batches_by_tokens(lengths, 2**13, 256, order)

    def score(indices: np.ndarray, full: Tensor) -> tuple[str, Score]:
        return ("accuracy", accuracy(numbers[indices])) if saved.classes else ("R²", r_squared(numbers[indices]))

    return Subject(str(folder), data.name, heads, answer, lengths, batches, targets, score)


def pretrained_encoder(
    name: str, data: Path, read: HeadDataOptions, *, seed: int, device: str, say: Callable[[str], None]
) -> Subject:
    """Load an encoder or classifier of transformers, from a folder or by its hub name, and examples."""
    loaded = load_examples(data, text=read.text, label=read.label, split=read.split)
    if read.label is not None and loaded.labels is None:
        raise InvalidInput(f"{loaded.name}: {read.label}", problem="no labels in this column", expected="labels")
    examples = loaded.sample(read.limit, seed)
    _check_count(str(data), len(examples))
    targets = None if examples.labels is None else _targets(examples.name, examples.labels)
    say(f"loading {name}")
    classes = targets is not None and targets.classes
    model, tokenizer, task = load_encoder(name, labelled=classes, device=device)
    heads = TransformerHeads(model)
    numbers = (
        number_labels(examples, model.config.label2id, model.config.num_labels) if task == "classification" else None
    )
    tokenized = tokenize(examples, tokenizer, min(read.max_tokens, most_tokens(model, tokenizer)))
    lengths = tokenized.lengths

    @torch.no_grad()
    def answer(indices: np.ndarray) -> Tensor:
        inputs = tokenized.batch(indices, device)
        if numbers is not None:
            return model(**inputs).logits.float()
        states, mask = model(**inputs).last_hidden_state.float(), inputs["attention_mask"][..., None]
        return F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)

    def batches(indices: np.ndarray) -> list[np.ndarray]:
        return [indices[batch] for batch in batch_by_length(lengths[indices], max(2**12, int(lengths.max())))]

    def score(indices: np.ndarray, full: Tensor) -> tuple[str, Score]:
        return ("cosine", cosine(full[indices])) if numbers is None else ("accuracy", accuracy(numbers[indices]))

    short = Path(name).resolve().name if Path(name).is_dir() else name
    return Subject(short, data.name, heads, answer, lengths, batches, targets, score)


def _check_count(where: str, count: int) -> None:
    if count < 3:
        raise InvalidInput(where, got=count, expected="at least 3 examples")


def _targets(name: str, labels: list[Any]) -> Targets:
    """Return numbers as targets if labels have fractions or more than 20 distinct values, else classes."""
    try:
        numbers = [float(label) for label in labels]  # tables may hold numbers as text
    except (TypeError, ValueError):
        numbers = []
    numeric = any(not number.is_integer() for number in numbers) or len(set(numbers)) > 20
    with inside(name):
        return Targets.of_numbers(numbers) if numeric else Targets.of_classes(labels)
