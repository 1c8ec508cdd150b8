"""Fine-tuning of pre-trained encoders as classifiers, before or after a conversion."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hsa.errors import InvalidInput
from hsa.files import load_state, save_state, write_json
from hsa.huggingface.conversion import settings_of
from hsa.huggingface.fidelity.examples import Examples, Tokens, number_labels, tokenize
from hsa.huggingface.fidelity.options import FinetuneOptions
from hsa.huggingface.layers import set_attention_dropout
from hsa.huggingface.loading import most_tokens, save_model
from hsa.plain_values import check_fields
from hsa.running import Interrupted, running

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

    Raises:
        Interrupted: Ctrl-C or SIGTERM arrived; the state is saved.
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
    data = hashlib.sha256(json.dumps([tokens.ids, labels.tolist()]).encode()).hexdigest()
    made_for = {**asdict(options), "texts": len(examples), "classes": model.config.num_labels}
    layers = {str(number): settings.to_json() for number, settings in settings_of(model).items()}
    made_for |= {"data": data, "conversion": layers}
    run = _Run(None if folder is None else folder / STATE, made_for, model, optimizer, schedule)
    with running(run.path, model) as stop:
        done = run.restore(steps)
        model.train()
        for epoch in range(done // per_epoch, options.epochs):
            if done % per_epoch == 0:
                torch.manual_seed(options.seed + epoch)
            for rows in islice(_epoch(tokens, options, epoch), done % per_epoch, None):
                inputs = tokens.batch(rows, device)
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    logits = model(**inputs).logits
                loss = F.cross_entropy(logits.float(), torch.from_numpy(labels[rows]).to(device))
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                done += 1
                stopping, step = stop(), (done - 1) % per_epoch
                if step % REPORT_EVERY == 0 or step + 1 == per_epoch or stopping:  # rarely: it waits for the GPU
                    _check_finite(loss, options)
                    if watch is not None:
                        watch(done, steps, loss.item())
                if stopping or step + 1 == per_epoch:
                    run.save(done)
                if stopping and done < steps:
                    kept = "" if folder is None else f"; the state is in {folder}, continue with --resume"
                    raise Interrupted(f"stopped after {done:,} of {steps:,} steps{kept}")
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


@dataclass(frozen=True)
class _Run:
    """State of a run: after an epoch, or after the step that a signal interrupted.

    Attributes:
        path: File of the state; None to keep none.
        made_for: Options and digest of the data, which must not change when the run is resumed.
    """

    path: Path | None
    made_for: Mapping[str, Any]
    model: Any
    optimizer: Any
    schedule: Any

    def save(self, done: int) -> None:
        """Save the state after `done` steps."""
        if self.path is None:
            return
        state = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "schedule")}
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        random = {"cpu": torch.get_rng_state(), "cuda": cuda}
        save_state(self.path, {**state, "random": random, "steps": done, "made_for": dict(self.made_for)})
        write_json(self.path.with_name(OPTIONS), self.made_for)

    def restore(self, most: int) -> int:
        """Load the state of an earlier run, if there is one, and return its number of steps, at most `most`."""
        if self.path is None or not self.path.exists():
            return 0
        expected, fix = "the state of a fine-tuning run", "Delete it to start again"
        state = load_state(self.path, expected, fix)
        check_fields(state, ("model", "optimizer", "schedule", "random", "steps", "made_for"), str(self.path))
        before, steps = state["made_for"], state["steps"]
        check_fields(before, (), f"{self.path}: made_for")
        changed = next((name for name, value in self.made_for.items() if before.get(name) != value), None)
        if changed is not None:
            here = {"data": ("these data", "other data")}.get(
                changed, (f"{changed} {self.made_for[changed]}", f"{changed} {before.get(changed)}")
            )
            raise InvalidInput(
                str(self.path.parent),
                expected=f"a run with {here[0]}",
                got=f"one with {here[1]}",
                fix="Pass the same data and options to resume it, or another folder",
            )
        try:
            for name in ("model", "optimizer", "schedule"):
                getattr(self, name).load_state_dict(state[name])
            torch.set_rng_state(state["random"]["cpu"])
            if type(steps) is not int or not 0 <= steps <= most or self.schedule.last_epoch != steps:
                raise ValueError(f"{steps} of {most} steps, and {self.schedule.last_epoch} in the schedule")
            if torch.cuda.is_available():
                torch.cuda.set_rng_state_all(state["random"]["cuda"][: torch.cuda.device_count()])
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            got = f"the state of another model ({' '.join(str(error).split())[:200]})"
            raise InvalidInput(str(self.path), got=got, expected=expected, fix=fix) from error
        return steps
