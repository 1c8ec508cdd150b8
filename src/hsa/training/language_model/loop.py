"""Training of a language model on an array of token ids, in blocks of equal length."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hsa.errors import InvalidInput
from hsa.models.causal_language_model import CausalLanguageModel
from hsa.models.registry import LANGUAGE_ARCHITECTURES, create_language_model
from hsa.models.saved import check_fits
from hsa.nn.penalties import collecting_penalties
from hsa.registry import resolve
from hsa.running import Interrupted, running
from hsa.training import checkpoint
from hsa.training.data.loading import prefetched
from hsa.training.data.sources import digest_arrays
from hsa.training.failures import Diverged
from hsa.training.language_model.reader import Reader, blocks_of
from hsa.training.loop import (
    CHECKPOINT,
    flat_options,
    learning_rate,
    parameter_groups,
)
from hsa.training.options import LanguageOptions, TrainingOptions

_CHECK_EVERY = 20  # steps between checks that the loss is finite: each check waits for the device
_VALIDATION_TOKENS = 2**18
"""Maximum number of validation tokens that are evaluated during training."""


class LmWatcher(Protocol):
    """Callbacks of a training run, for example of a progress bar."""

    def step(self, done: int, total: int, loss: float | None, learning_rate: float) -> None:
        """Handle the end of a step; `loss` is the mean since the last check, None between checks."""

    def evaluated(self, record: LmRecord) -> None:
        """Handle a validation."""

    def done(self) -> None:
        """Handle the end of the run."""


@dataclass(frozen=True)
class LmRecord:
    """Losses at one validation."""

    step: int
    tokens: int  # seen so far
    loss: float  # mean since the last record
    validation_loss: float
    learning_rate: float
    seconds: float  # training time so far, without validation


@dataclass(frozen=True, eq=False)
class LmEvaluation:
    """Loss of a language model on a text."""

    loss: float  # mean of −log p, in nats
    by_position: np.ndarray  # mean loss by position in the block [context]
    tokens: int
    seconds: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


@dataclass
class _Progress:
    """State of a run, in plain values for the checkpoint."""

    step: int = 0
    loss_sum: float = 0.0  # since the last record
    seconds: float = 0.0
    history: list[LmRecord] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class TrainedLanguageModel:
    """Trained model with its history."""

    model: CausalLanguageModel
    history: tuple[LmRecord, ...]
    seconds: float
    tokens: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


def train_language_model(
    config: Any,
    train: np.ndarray,
    validation: np.ndarray,
    options: TrainingOptions | None = None,
    language: LanguageOptions | None = None,
    *,
    start: Mapping[str, Tensor] | None = None,
    folder: Path | None = None,
    resume: bool = False,
    watcher: LmWatcher | None = None,
    device: torch.device | str | None = None,
) -> TrainedLanguageModel:
    """Train a language model from scratch, or resume from its checkpoint.

    Args:
        config: Configuration of the model; its class determines the architecture.
        train, validation: Token ids `[tokens]`.
        options: Optimisation settings; `epochs` only counts if the language options have no `steps`.
        language: Options `context`, `steps` and `evaluate_every`; the others are part of the config.
        start: Initial weights, such as those trained on shorter blocks; random by default.
        folder: Folder of the checkpoint; None for no checkpoints.
        resume: Whether to continue from the checkpoint in the folder, if there is one.
        watcher: Callbacks of the run.
        device: Device to train on; by default the GPU if there is one.

    Raises:
        Interrupted: Ctrl-C or SIGTERM arrived; a checkpoint is saved.
        Diverged: The loss is not a number.

    >>> from hsa.models.language_model import LanguageModelConfig
    >>> text = np.tile(np.arange(7), 40)
    >>> sizes = LanguageModelConfig(7, width=8, heads=2, layers=1, branching=(4, 2))
    >>> trained = train_language_model(sizes, text, text, language=LanguageOptions(context=16, steps=3), device="cpu")
    >>> len(trained.history), trained.tokens
    (3, 3072)
    """
    options, language = options or TrainingOptions(), language or LanguageOptions()
    run = _Run(config, train, validation, options, language, folder, watcher, _device(device))
    if start is not None:
        check_fits("init_from", dict(start), run.model.state_dict())
        run.model.load_state_dict(start)
    return run.run(resume)


class _Run:
    def __init__(
        self,
        config: Any,
        train: np.ndarray,
        validation: np.ndarray,
        options: TrainingOptions,
        language: LanguageOptions,
        folder: Path | None,
        watcher: LmWatcher | None,
        device: torch.device,
    ):
        if options.mixed_precision == "fp16":
            raise InvalidInput("mixed_precision", got="fp16", expected="no or bf16 for language models")
        self.options, self.language, self.device, self.watcher = options, language, device, watcher
        self.train, self.validation = train, validation
        self.path = None if folder is None else folder / CHECKPOINT
        self.batch = sequences_per_step(options, language.context)
        each = max(1, blocks_of(train, language.context) // self.batch)
        self.total = language.steps or options.epochs * each
        self.every = language.evaluate_every or max(1, self.total // 10)
        torch.manual_seed(options.seed)
        self.model = create_language_model(config).to(device)
        self.course = reader_of(self.model, language.context).course(train, self.batch, options.seed)
        groups, fused = parameter_groups(self.model, options), device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=fused)
        self.progress = _Progress()
        self._bad = torch.zeros((), dtype=torch.bool, device=device)

    def run(self, resume: bool) -> TrainedLanguageModel:
        if resume and self.path is not None and self.path.is_file():
            self._restore(self.path)
        state = self.progress
        try:
            with running(self.path, self.model) as stop:
                self._steps(stop)
        finally:
            if self.watcher is not None:
                self.watcher.done()
        tokens = self.total * self.batch * self.language.context
        return TrainedLanguageModel(self.model.eval(), tuple(state.history), state.seconds, tokens)

    def _steps(self, stop: Callable[[], bool]) -> None:
        state, longest = self.progress, 60 * self.options.checkpoint_minutes
        self.model.train()
        running: list[Tensor] = []
        began = saved = time.monotonic()
        with closing(prefetched(self.course.load, range(state.step, self.total))) as loaded:
            for batch in loaded:
                running.append(self._step(batch))
                state.step += 1
                stopping, due = stop(), time.monotonic() - saved > longest
                ends = state.step % self.every == 0 or state.step == self.total
                mean = None
                if len(running) == _CHECK_EVERY or ends or stopping or due:
                    mean = self._check_losses(running)
                    state.seconds += time.monotonic() - began
                    began = time.monotonic()
                if self.watcher is not None:
                    self.watcher.step(state.step, self.total, mean, self._rate())
                if ends:
                    self._record()
                if ends or stopping or due:
                    self._save()
                    began = saved = time.monotonic()
                if stopping and state.step < self.total:
                    raise Interrupted(self._interruption_message())

    def _step(self, batch: Any) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        with precision(self.device, self.options.mixed_precision), collecting_penalties() as penalties:
            loss = self.course.loss(batch)
        (loss + sum(penalties)).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._bad |= ~norm.isfinite()
        return loss.detach()

    def _check_losses(self, running: list[Tensor]) -> float:
        *losses, bad = torch.stack([*running, self._bad.to(running[0].dtype)]).tolist()
        mean = sum(losses) / len(losses)
        if not math.isfinite(mean) or bad:
            raise Diverged(
                f"the loss is no longer a number (step {self.progress.step:,}, learning rate {self._rate():.2g}); "
                "try a lower learning rate or a longer warm-up"
            )
        for loss in losses:  # one by one, so that rounding does not depend on the times of the checks
            self.progress.loss_sum += loss
        running.clear()
        return mean

    def _record(self) -> None:
        state = self.progress
        steps = state.step - (state.history[-1].step if state.history else 0)
        evaluation = evaluate_language_model(
            self.model,
            self.validation[: _VALIDATION_TOKENS + 1],
            self.language.context,
            batch_tokens=self.options.batch_tokens,
            mixed_precision=self.options.mixed_precision,
        )
        record = LmRecord(
            step=state.step,
            tokens=state.step * self.batch * self.language.context,
            loss=state.loss_sum / steps,
            validation_loss=evaluation.loss,
            learning_rate=self._rate(),
            seconds=state.seconds,
        )
        state.history.append(record)
        state.loss_sum = 0.0
        self.model.train()
        if self.watcher is not None:
            self.watcher.evaluated(record)

    def _rate(self) -> float:
        return learning_rate(self.options, self.progress.step, self.total)

    def _interruption_message(self) -> str:
        where = "" if self.path is None else f"; the checkpoint is {self.path}, continue with --resume"
        return f"stopped after {self.progress.step:,} of {self.total:,} steps{where}"

    def _save(self) -> None:
        if self.path is not None:
            carried = self.course.state()
            progress = {"state": asdict(self.progress), "training": self._fingerprint(), "carried": carried}
            checkpoint.save(self.path, checkpoint.gather(self.model, self.optimizer, progress))

    def _restore(self, path: Path) -> None:
        training = self._fingerprint()
        growing = ("epochs", "steps")
        self.progress, saved = checkpoint.resume(path, training, _Progress, self.model, self.optimizer, growing)
        if (was := saved["training"]["steps"]) < self.total:
            checkpoint.warn_longer(path.parent, was, self.total, "steps", self._rate())
        self.course.restore(saved.get("carried"))

    @cached_property
    def _data_digest(self) -> str:
        return digest_arrays(self.train, self.validation)

    def _fingerprint(self) -> dict[str, Any]:
        """Return the options and a digest of the data that must not change when a run is resumed."""
        options = asdict(self.options)
        del options["checkpoint_minutes"]
        config = dict(flat_options(self.model.config.to_dict()))
        return {
            **config,
            **options,
            "context": self.language.context,
            "steps": self.total,
            "data": self._data_digest,
        }


def reader_of(model: CausalLanguageModel, context: int) -> Reader:
    """Return the reader that feeds texts to a model, which depends on its architecture."""
    return resolve(LANGUAGE_ARCHITECTURES.get(model.config.architecture).reader)(model, context)


@torch.no_grad()
def evaluate_language_model(
    model: CausalLanguageModel,
    tokens: np.ndarray,
    context: int,
    *,
    batch_tokens: int = 16_384,
    mixed_precision: str = "no",
) -> LmEvaluation:
    """Return the loss on a text in consecutive blocks of `context` tokens; a shorter last block is left out.

    A text shorter than `context` is one block. A model with a memory carries it from block to block.
    """
    if len(tokens) < 2:
        raise InvalidInput("tokens", got=len(tokens), expected="2 or more, to predict one from another")
    context = min(context, len(tokens) - 1)
    number = (len(tokens) - 1) // context
    sums = torch.zeros(context, dtype=torch.float64, device=model.device)
    model.eval()
    began = time.monotonic()
    with precision(model.device, mixed_precision):
        for losses in reader_of(model, context).losses(tokens, max(1, batch_tokens // context)):
            sums += losses.double().sum(0)
    by_position = (sums / number).cpu().numpy()
    return LmEvaluation(float(by_position.mean()), by_position, number * context, time.monotonic() - began)


def bits_per_character(evaluation: LmEvaluation, tokens: np.ndarray, tokenizer: Any) -> float:
    """Return the bits per character of the evaluated part of a text, which begins with `tokens`."""
    characters = len(tokenizer.decode(tokens[: evaluation.tokens].tolist(), skip_special_tokens=False))
    return evaluation.loss / math.log(2) * evaluation.tokens / max(1, characters)


def sequences_per_step(options: TrainingOptions, context: int) -> int:
    """Return the number of blocks per step."""
    return max(1, min(options.batch_size, options.batch_tokens // context))


@contextlib.contextmanager
def precision(device: torch.device, mixed: str) -> Iterator[None]:
    """Compute matrix products in bfloat16 if `mixed` is "bf16"."""
    with torch.autocast(device.type, torch.bfloat16, enabled=mixed == "bf16"):
        yield


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return device or torch.device("cpu")
