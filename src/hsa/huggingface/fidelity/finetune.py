"""Fine-tuning of pre-trained encoders as classifiers, before or after a conversion."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hsa.errors import InvalidInput
from hsa.files import read_json, write_json, write_then_rename
from hsa.huggingface.fidelity.examples import Examples, Tokens, number_labels, tokenize
from hsa.huggingface.fidelity.options import FinetuneOptions
from hsa.huggingface.layers import set_attention_dropout
from hsa.huggingface.loading import most_tokens, save_model

STATE = "finetuning.pt"
OPTIONS = "finetuning.json"
REPORT_EVERY = 20
"""Number of steps between reports of the loss."""


def list_classes(examples: Examples) -> list[str]:
    """List the distinct labels, numbers first in numerical order, then names."""
    if examples.labels is None:
        raise InvalidInput(
            examples.name, problem="no labels", expected="a label per row", fix="Pass --label COLUMN or another --split"
        )
    names = {str(label) for label in examples.labels}
    if len(names) < 2:
        raise InvalidInput(f"{examples.name}: label", expected="at least 2 classes", got=f"nothing but {names.pop()!r}")
    return sorted(names, key=lambda name: (0, int(name), "") if name.isdecimal() else (1, 0, name))


def finetune(
    model: Any,
    tokenizer: Any,
    examples: Examples,
    options: FinetuneOptions,
    *,
    folder: Path | None = None,
    watch: Callable[[int, int, float], None] | None = None,
) -> Any:
    """Train a classifier on examples, in place. On a GPU, train in bfloat16 with float32 weights.

    Args:
        model: Classifier of transformers.
        tokenizer: Tokenizer of the model.
        examples: Labelled examples.
        options: Options of training.
        folder: Folder for the state after each epoch, from which an interrupted run resumes. A state with other options is
            refused.
        watch: Function called every few steps with the steps done, the number of steps and the loss.
    """
    device = next(model.parameters()).device
    if options.attention_dropout is not None:
        set_attention_dropout(model, options.attention_dropout)
    tokens = tokenize(examples, tokenizer, min(options.max_tokens, most_tokens(model, tokenizer)))
    labels = number_labels(examples, model.config.label2id, model.config.num_labels)
    per_epoch = math.ceil(len(examples) / options.batch_size)
    steps = per_epoch * options.epochs
    optimizer = torch.optim.AdamW(
        _groups(model, options.weight_decay), lr=options.learning_rate, fused=device.type == "cuda"
    )
    warm_up = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, max(0.0, (steps - step) / max(1, steps - warm_up)))
    )
    made_for = {**asdict(options), "texts": len(examples), "classes": model.config.num_labels}
    done = _restore(folder, made_for, model, optimizer, schedule)
    for epoch in range(done, options.epochs):
        torch.manual_seed(options.seed + epoch)
        model.train()
        for step, rows in enumerate(_epoch(tokens, options, epoch)):
            inputs = tokens.batch(rows, device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = model(**inputs).logits
            loss = F.cross_entropy(logits.float(), torch.from_numpy(labels[rows]).to(device))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step % REPORT_EVERY == 0 or step + 1 == per_epoch:  # rarely, as reading the loss waits for the GPU
                _check_finite(loss, options)
                if watch is not None:
                    watch(epoch * per_epoch + step + 1, steps, loss.item())
        _keep(folder, made_for, model, optimizer, schedule, epoch + 1)
    return model.eval()


def _check_finite(loss: torch.Tensor, options: FinetuneOptions) -> None:
    if not torch.isfinite(loss):
        raise InvalidInput(
            "learning_rate",
            problem=f"the loss is not finite at {options.learning_rate}",
            expected="a smaller learning rate",
        )


def save_finetuned(folder: Path, model: Any, tokenizer: Any) -> None:
    """Save the model and tokenizer in the format of transformers, and remove the training state."""
    save_model(folder, model, tokenizer)
    (folder / STATE).unlink(missing_ok=True)


def _epoch(tokens: Tokens, options: FinetuneOptions, epoch: int) -> Iterator[np.ndarray]:
    """Yield batches in random order. Texts of similar length share a batch, to reduce padding."""
    random = np.random.default_rng([options.seed, epoch])
    order = random.permutation(len(tokens.ids))
    pool = 50 * options.batch_size
    batches: list[np.ndarray] = []
    for begin in range(0, len(order), pool):
        some = order[begin : begin + pool]
        some = some[np.argsort(tokens.lengths_of(some), kind="stable")]
        batches += [some[i : i + options.batch_size] for i in range(0, len(some), options.batch_size)]
    for index in random.permutation(len(batches)):
        yield batches[index]


def _groups(model: Any, decay: float) -> list[dict[str, Any]]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def _keep(
    folder: Path | None, made_for: Mapping[str, Any], model: Any, optimizer: Any, schedule: Any, done: int
) -> None:
    if folder is None:
        return
    state = {
        "epochs": done,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
    }
    write_json(folder / OPTIONS, made_for)
    write_then_rename(folder / STATE, lambda beside: torch.save(state, beside))


def _restore(folder: Path | None, made_for: Mapping[str, Any], model: Any, optimizer: Any, schedule: Any) -> int:
    """Load the state of an earlier run and return its number of completed epochs."""
    if folder is None or not (folder / STATE).exists():
        return 0
    before = read_json(folder / OPTIONS, "the options of an earlier run")
    changed = next((name for name, value in made_for.items() if before.get(name) != value), None)
    if changed is not None:
        raise InvalidInput(
            str(folder),
            expected=f"a run with {changed} {made_for[changed]}",
            got=f"one with {changed} {before.get(changed)}",
            fix="Pass the same data and options to resume it, or another folder",
        )
    state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    return int(state["epochs"])
