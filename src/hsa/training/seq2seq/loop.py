"""Training of encoder–decoders on prompts and answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hsa.errors import InvalidInput
from hsa.models.classifier import count_parameters
from hsa.models.language_model import LanguageModelConfig
from hsa.models.options import ModelOptions
from hsa.models.seq2seq import Seq2Seq, Seq2SeqConfig
from hsa.nn.encoder_config import EncoderConfig
from hsa.nn.penalties import collecting_penalties
from hsa.registry import KINDS
from hsa.running import Interrupted, running
from hsa.signals.batch import Batch
from hsa.training import checkpoint
from hsa.training.data.data_set import batches_by_tokens
from hsa.training.data.loading import prefetched
from hsa.training.failures import Diverged
from hsa.training.language_model.decoder import decoder_sizes
from hsa.training.language_model.loop import precision
from hsa.training.loop import (
    CHECKPOINT,
    EpochRecord,
    Silent,
    Watcher,
    flat_options,
    learning_rate,
    parameter_groups,
)
from hsa.training.options import LanguageOptions, Seq2SeqOptions, TrainingOptions
from hsa.training.seq2seq.data import Pairs, PreparedPairs

ENCODERS = ("hierarchical", "multiscale", "clustered", "flat")
"""Kinds of attention of the encoder."""


@dataclass(frozen=True)
class Seq2SeqScores:
    """Scores of the answers.

    Attributes:
        loss: Mean of −log p over the tokens of the true answers.
        tokens: Share of these tokens that are predicted correctly, given the true tokens before.
        exact: Share of prompts whose generated answer equals the true one.
    """

    loss: float
    tokens: float
    exact: float


@dataclass(frozen=True)
class Seq2SeqResult:
    """Test scores and costs of one model."""

    model: str
    decoder: str
    parameters: int
    scores: Seq2SeqScores
    training_seconds: float
    answers_per_second: float  # generated with caches, in batches
    epochs: int
    history: tuple[EpochRecord, ...]
    examples: tuple[tuple[str, str, str], ...]  # prompt, true answer, generated answer


@dataclass
class _Progress:
    """State of a run, in plain values for the checkpoint."""

    epoch: int = 0
    losses: list[float] = field(default_factory=list)  # of the steps of this epoch
    epoch_seconds: float = 0.0
    best: float = -math.inf
    best_epoch: int = -1
    history: list[EpochRecord] = field(default_factory=list)


def check_seq2seq_models(names: Iterable[str]) -> None:
    """Raise an error for a name that is not a kind of encoder."""
    for name in names:
        if name not in ENCODERS:
            raise InvalidInput("models", got=repr(name), expected=f"one of {', '.join(ENCODERS)} for the task seq2seq")


def seq2seq_config(
    prepared: PreparedPairs, name: str, model: ModelOptions, language: LanguageOptions, options: Seq2SeqOptions
) -> Seq2SeqConfig:
    """Return the configuration of a model. The leaves of the prompt get positions, which the decoder needs."""
    check_seq2seq_models([name])
    sizes = {**asdict(model), "kind": name, "position_input": True}
    if not KINDS.get(name).takes_entmax:
        sizes["entmax"] = None
    del sizes["pooling"]
    decoder = LanguageModelConfig(
        prepared.tokens + 2,
        layers=options.decoder_layers or model.layers,
        attention=options.decoder_attention,
        **decoder_sizes(model, language),
    )
    return Seq2SeqConfig(EncoderConfig(**sizes), decoder, prepared.modalities, top_k=options.cross_top_k)


def train_seq2seq(
    config: Seq2SeqConfig,
    prepared: PreparedPairs,
    options: TrainingOptions,
    *,
    folder: Path | None = None,
    resume: bool = False,
    watcher: Watcher | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Seq2Seq, tuple[EpochRecord, ...]]:
    """Train an encoder–decoder; return it with the weights of the best epoch by validation accuracy, and the history.

    Args:
        config: Configuration of the model.
        prepared: Data.
        options: Optimisation settings.
        folder: Folder of the checkpoint; None for no checkpoints.
        resume: Whether to continue from the checkpoint in the folder, if there is one.
        watcher: Callbacks of the run.
        device: Device to train on.

    Raises:
        Interrupted: Ctrl-C or SIGTERM arrived; a checkpoint is saved.
        Diverged: The loss is not a number.
    """
    run = _Run(config, prepared, options, folder, watcher or Silent(), torch.device(device))
    return run.run(resume)


class _Run:
    def __init__(
        self,
        config: Seq2SeqConfig,
        prepared: PreparedPairs,
        options: TrainingOptions,
        folder: Path | None,
        watcher: Watcher,
        device: torch.device,
    ):
        if options.mixed_precision == "fp16":
            raise InvalidInput("mixed_precision", got="fp16", expected="no or bf16 for the task seq2seq")
        self.config, self.data, self.options, self.watcher, self.device = config, prepared, options, watcher, device
        self.path = None if folder is None else folder / CHECKPOINT
        torch.manual_seed(options.seed)
        self.model = Seq2Seq(config).to(device)
        groups = parameter_groups(self.model, options)
        self.optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.98))
        self.progress = _Progress()
        self.best_weights: dict[str, Tensor] | None = None
        self.steps = [len(self._batches(epoch)) for epoch in range(options.epochs)]

    def run(self, resume: bool) -> tuple[Seq2Seq, tuple[EpochRecord, ...]]:
        if resume and self.path is not None and self.path.is_file():
            self._restore(self.path)
        state, options = self.progress, self.options
        try:
            with running(self.path, self.model) as stop:
                while state.epoch < options.epochs and not self._has_stopped():
                    self._epoch(stop)
        finally:
            self.watcher.done()
        if self.best_weights is not None:
            self.model.load_state_dict(self.best_weights)
        return self.model.eval(), tuple(state.history)

    def _has_stopped(self) -> bool:
        return (
            bool(self.options.patience) and self.progress.epoch - 1 - self.progress.best_epoch >= self.options.patience
        )

    def _done(self) -> int:
        """Return the number of steps so far."""
        return sum(self.steps[: self.progress.epoch]) + len(self.progress.losses)

    def _epoch(self, stop: Callable[[], bool]) -> None:
        state, total, longest = self.progress, sum(self.steps), 60 * self.options.checkpoint_minutes
        done = self._done()
        self.model.train()
        batches = self._batches(state.epoch)[len(state.losses) :]
        began = saved = time.monotonic()
        with closing(prefetched(self._load, batches)) as loaded:
            for prompts, inputs, targets, lengths in loaded:
                rate = learning_rate(self.options, done, total)
                state.losses.append(self._step(prompts, inputs, targets, lengths, rate))
                done += 1
                state.epoch_seconds, began = state.epoch_seconds + time.monotonic() - began, time.monotonic()
                if not math.isfinite(state.losses[-1]):
                    raise Diverged(
                        f"the loss is no longer a number (step {done:,}, learning rate {rate:.2g}); try a lower one"
                    )
                self.watcher.step(done, total, state.losses[-1], rate)
                stopping = stop()
                if stopping or began - saved > longest:
                    self._save()
                    began = saved = time.monotonic()
                if stopping:
                    kept = "" if self.path is None else f"; the checkpoint is {self.path}, continue with --resume"
                    raise Interrupted(f"stopped after {done:,} of {total:,} steps{kept}")
        loss, right = self._validate()
        mean, rate = float(np.mean(state.losses)), learning_rate(self.options, done, total)
        record = EpochRecord(state.epoch + 1, mean, loss, right, rate, state.epoch_seconds)
        state.history.append(record)
        if right > state.best:
            state.best, state.best_epoch = right, state.epoch
            self.best_weights = {name: x.detach().cpu().clone() for name, x in self.model.state_dict().items()}
        state.epoch, state.losses, state.epoch_seconds = state.epoch + 1, [], 0.0
        self.watcher.epoch(record)
        self._save()

    def _step(self, prompts: Batch, inputs: Tensor, targets: Tensor, lengths: list[int], rate: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with precision(self.device, self.options.mixed_precision), collecting_penalties() as penalties:
            loss = self.model.loss(prompts, inputs, targets, lengths)
        (loss + sum(penalties)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def _validate(self) -> tuple[float, float]:
        scored = forced_scores(self.model, self.data.validation, self.options)
        self.model.train()
        return scored

    def _batches(self, epoch: int) -> list[np.ndarray]:
        train, options = self.data.train, self.options
        order = np.random.default_rng((options.seed, epoch)).permutation(len(train))
        return batches_by_tokens(train.sizes, options.batch_tokens, options.batch_size, order)

    def _load(self, indices: np.ndarray) -> tuple[Batch, Tensor, Tensor, list[int]]:
        loaded = _on(self.data.train.select(indices), self.config, self.device)
        self.model.encoder.prepare(loaded[0])
        return loaded

    def _save(self) -> None:
        if self.path is not None:
            progress = {
                "state": asdict(self.progress),
                "training": self._fingerprint(),
                "best_weights": self.best_weights,
            }
            checkpoint.save(self.path, checkpoint.gather(self.model, self.optimizer, progress))

    def _restore(self, path: Path) -> None:
        training = self._fingerprint()
        self.progress, saved = checkpoint.resume(path, training, _Progress, self.model, self.optimizer, ("epochs",))
        if (was := saved["training"]["epochs"]) < self.options.epochs:
            rate = learning_rate(self.options, self._done(), sum(self.steps))
            ended = "--patience" if self._has_stopped() and not self.progress.losses else None
            checkpoint.warn_longer(path.parent, was, self.options.epochs, "epochs", rate, ended)
        self.best_weights = saved.get("best_weights")

    def _fingerprint(self) -> dict[str, Any]:
        options = asdict(self.options)
        del options["checkpoint_minutes"]
        data = [self.data.train.digest, self.data.validation.digest]
        return {**dict(flat_options(self.config.to_dict())), **options, "data": data}


def _on(pairs: Pairs, config: Seq2SeqConfig, device: torch.device) -> tuple[Batch, Tensor, Tensor, list[int]]:
    inputs, targets, lengths = pairs.shifted(config.start, config.end)
    return pairs.prompts.to(device), inputs.to(device), targets.to(device), lengths


def _in_batches(pairs: Pairs, options: TrainingOptions) -> list[np.ndarray]:
    order = np.argsort(-pairs.sizes, kind="stable")
    return batches_by_tokens(pairs.sizes, options.batch_tokens, options.batch_size, order)


@torch.no_grad()
def forced_scores(model: Seq2Seq, pairs: Pairs, options: TrainingOptions) -> tuple[float, float]:
    """Return loss and token accuracy with teacher forcing: each token is predicted from the true tokens before it."""
    model.eval()
    loss, right, number = 0.0, 0, 0
    for indices in _in_batches(pairs, options):
        prompts, inputs, targets, lengths = _on(pairs.select(indices), model.config, model.device)
        logits = model(prompts, inputs, lengths).float()
        loss += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        right += int((logits.argmax(-1) == targets).sum())
        number += len(targets)
    return loss / number, right / number


@torch.no_grad()
def generated_answers(model: Seq2Seq, pairs: Pairs, options: TrainingOptions) -> list[list[int]]:
    """Return the answers that the model generates."""
    model.eval()
    answers: list[list[int]] = [[] for _ in range(len(pairs))]
    for indices in _in_batches(pairs, options):
        part = pairs.select(indices)
        generated = model.generate(part.prompts.to(model.device), max_new_tokens=int(np.diff(part.offsets).max()) + 1)
        for i, answer in zip(indices.tolist(), generated, strict=True):
            answers[i] = answer
    return answers


def evaluate_seq2seq(
    model: Seq2Seq, pairs: Pairs, options: TrainingOptions
) -> tuple[Seq2SeqScores, list[list[int]], float]:
    """Return the scores, the generated answers, and the seconds their generation took."""
    loss, right = forced_scores(model, pairs, options)
    began = time.monotonic()
    answers = generated_answers(model, pairs, options)
    seconds = time.monotonic() - began
    exact = sum(answer == pairs.answer(i) for i, answer in enumerate(answers)) / len(pairs)
    return Seq2SeqScores(loss, right, exact), answers, seconds


def seq2seq_result(
    name: str,
    model: Seq2Seq,
    history: tuple[EpochRecord, ...],
    prepared: PreparedPairs,
    options: TrainingOptions,
    shown: int = 3,
) -> Seq2SeqResult:
    """Evaluate a model on the test data and return its result, with `shown` example answers as text."""
    test, tokenizer = prepared.test, prepared.input_spec.tokenizer
    scores, answers, seconds = evaluate_seq2seq(model, test, options)
    offsets, values = test.prompts.hierarchy.structure.leaf_offsets, test.prompts.values["text"]
    examples = []
    for i in range(min(shown, len(test))):
        prompt = tokenizer.decode([int(x) for x in values[offsets[i] : offsets[i + 1]]])
        known = [token for token in answers[i] if token < prepared.tokens]
        examples.append((prompt, tokenizer.decode(test.answer(i)), tokenizer.decode(known)))
    return Seq2SeqResult(
        model=name,
        decoder=" ".join(dict.fromkeys(model.config.decoder.kinds)),
        parameters=count_parameters(model),
        scores=scores,
        training_seconds=sum(record.seconds for record in history),
        answers_per_second=len(test) / max(seconds, 1e-9),
        epochs=len(history),
        history=history,
        examples=tuple(examples),
    )
