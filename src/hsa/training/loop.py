"""Training loop for one classifier on one data set, in one process or several."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hsa.analysis.memory import PeakMemory, allocated
from hsa.errors import InvalidInput
from hsa.models.classifier import Classifier, ModelConfig
from hsa.models.saved import save_model
from hsa.nn.attention import counting_operations
from hsa.nn.learned_alpha import LearnedAlpha
from hsa.nn.penalties import collecting_penalties
from hsa.running import Interrupted, running
from hsa.signals.batch import Batch
from hsa.training import checkpoint
from hsa.training.accelerator import make_accelerator
from hsa.training.data.data_set import DataSet, batches_by_tokens
from hsa.training.data.loading import prefetched
from hsa.training.failures import Diverged
from hsa.training.metrics import Scores, class_scores, number_scores
from hsa.training.options import TrainingOptions

Transform = Callable[[Batch], Batch]
CHECKPOINT = "checkpoint.pt"
PRETRAINED_RATE = 0.1
"""Factor on the learning rate of pre-trained parameters: the rate of new ones would undo their training."""
_CHECK_EVERY = 20  # steps between checks that the loss is finite: each check waits for the device


class Watcher(Protocol):
    """Callbacks of a training run, for example of a progress bar."""

    def step(self, done: int, total: int, loss: float | None, learning_rate: float) -> None:
        """Handle the end of a step; `loss` is the mean since the last check, None between checks."""

    def epoch(self, record: EpochRecord) -> None:
        """Handle the end of an epoch."""

    def done(self) -> None:
        """Handle the end of the run."""


class Silent:
    """Watcher that ignores everything."""

    def step(self, done: int, total: int, loss: float | None, learning_rate: float) -> None: ...

    def epoch(self, record: EpochRecord) -> None: ...

    def done(self) -> None: ...


@dataclass(frozen=True)
class EpochRecord:
    """Losses and validation score of one epoch."""

    epoch: int
    loss: float
    validation_loss: float
    validation: float  # the main score
    learning_rate: float
    seconds: float  # training time, without validation


@dataclass
class Progress:
    """State of a run, in plain values for the checkpoint."""

    epoch: int = 0
    step: int = 0  # within the epoch
    epoch_steps: int = 0  # of this epoch
    loss_sum: float = 0.0
    epoch_seconds: float = 0.0
    seconds: float = 0.0  # training time of all epochs
    peak_memory: float | None = None  # MiB; None if unknown
    best: tuple[float, float] = (
        -math.inf,
        -math.inf,
    )  # score, then negative loss to break ties in small validation sets
    best_epoch: int = -1
    history: list[EpochRecord] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Predictions for a data set, their scores and their cost."""

    scores: Scores
    loss: float
    outputs: np.ndarray  # logits [examples or leaves, classes], or numbers
    seconds: float
    operations: int  # attention operations, all layers, whole data set

    @property
    def predicted(self) -> np.ndarray:
        """Predicted class indices or numbers."""
        return self.outputs if self.outputs.ndim == 1 else self.outputs.argmax(-1)


class Trainer:
    """Training loop. After `fit`, the model has the weights of the best epoch by validation.

    Args:
        model: Model to train.
        train, validation: Data sets.
        options: Optimisation settings.
        folder: Folder of the checkpoint; None for no checkpoints.
        accelerator: Result of `make_accelerator`; by default, one is made.
        transform: Function applied to every batch, such as a frozen encoder.
        pretrained: Parameters that are trained at a tenth of the learning rate.
        watcher: Callbacks of the run.
    """

    def __init__(
        self,
        model: Classifier,
        train: DataSet,
        validation: DataSet,
        options: TrainingOptions,
        *,
        folder: Path | None = None,
        accelerator: Any = None,
        transform: Transform | None = None,
        pretrained: Iterable[nn.Parameter] = (),
        watcher: Watcher | None = None,
    ):
        self.config, self.encoder = model.config, model.encoder
        self.train, self.validation, self.options = train, validation, options
        self.path = None if folder is None else folder / CHECKPOINT
        self.accelerator = accelerator or make_accelerator(options)
        self.transform, self.watcher = transform, watcher or Silent()
        groups = parameter_groups(model, options, pretrained)
        on_gpu = self.accelerator.device.type == "cuda"
        optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.98), fused=on_gpu)
        if hasattr(self.accelerator.state, "fsdp_plugin"):
            model.register_forward_hook(_touch_all_parameters)
        if self.accelerator._models:  # models of earlier trainers, which it would keep and use for clipping
            self.accelerator.free_memory()
        self._held = allocated(self.accelerator.device)  # before the model is moved there
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.progress = Progress()
        self.best_weights: dict[str, Any] | None = None
        self.steps_per_epoch = max(len(self._shuffled_batches(epoch)) for epoch in range(options.epochs))
        self._bad = torch.zeros((), dtype=torch.bool, device=self.accelerator.device)

    @property
    def total_steps(self) -> int:
        return self.steps_per_epoch * self.options.epochs

    def resume(self, *, longer: bool = False) -> None:
        """Load the checkpoint in the folder, to continue from there.

        Args:
            longer: Whether the options may ask for more epochs than when the run began. The learning rate then follows the
                schedule of the new number, and a warning says so.
        """
        if self.path is None:
            raise InvalidInput("folder", problem="not given", expected="a folder with a checkpoint to resume from")
        now = fingerprint(self.config, self.options, self.train, self.validation)
        optimizer = self.optimizer.optimizer
        growing = ("epochs",) if longer else ()
        self.progress, saved = checkpoint.resume(self.path, now, Progress, self.model, optimizer, growing)
        self.best_weights = saved.get("best_weights")
        was = saved["training"]["epochs"]
        if was < self.options.epochs and self.accelerator.is_main_process:
            early = "--minutes" if self._time_share() >= 1 else "--patience"
            ended = early if self.is_over and not self.progress.step else None
            checkpoint.warn_longer(self.path.parent, was, self.options.epochs, "epochs", self._learning_rate(), ended)

    def fit(self) -> list[EpochRecord]:
        """Train to the end, or until validation stops improving.

        Raises:
            Interrupted: Ctrl-C or SIGTERM arrived; a checkpoint is saved.
            Diverged: The loss is not a number; the last checkpoint was saved before that.
        """
        state, memory = self.progress, PeakMemory(self.accelerator.device, self._held)
        try:
            with running(self.path, self.model) as stop:
                self._warm_up()
                while state.step or not self.is_over:  # an epoch in progress is always finished and validated
                    whole = self._train_epoch(stop)
                    if (peak := memory.so_far()) is not None:  # without the memory of validation
                        state.peak_memory = max(peak, state.peak_memory or 0.0)
                    if whole:
                        self._finish_epoch()
                    self._save()
                    if any(self._agree(stop())):
                        raise Interrupted(self._interruption_message())
        finally:
            self.watcher.done()
        if self.best_weights is not None:
            checkpoint.set_weights(self.model, self.best_weights)
        return list(state.history)

    def _warm_up(self) -> None:
        """Run one throwaway step so that first-call overhead is not billed to the model."""
        state = self.progress
        batches = [] if self.is_over else self._epoch_batches(state.epoch)[state.step :]
        if not batches:
            return
        self.model.train()
        device = self.accelerator.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            loss = self._backward(*self._load(self.train, batches[0]))
        self.optimizer.zero_grad(set_to_none=True)
        float(loss)  # wait for the device

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to train."""
        state, patience = self.progress, self.options.patience
        waited = bool(patience) and state.best_epoch >= 0 and state.epoch - 1 - state.best_epoch >= patience
        return waited or state.epoch >= self.options.epochs or self._time_share() >= 1

    def _time_share(self) -> float:
        return self.progress.seconds / (60 * self.options.minutes) if self.options.minutes else 0.0

    def _steps_done(self) -> float:
        """Return the progress out of `total_steps`, by steps or by time, whichever is further along."""
        steps = self.progress.epoch * self.steps_per_epoch + self.progress.step
        return max(steps, self._time_share() * self.total_steps)

    def _train_epoch(self, stop: Callable[[], bool]) -> bool:
        """Train the rest of the epoch, or until the time is up; return False if interrupted."""
        state, longest = self.progress, 60 * self.options.checkpoint_minutes
        self.model.train()
        batches = self._epoch_batches(state.epoch)
        state.epoch_steps = len(batches)
        running: list[Tensor] = []
        began = saved = time.monotonic()
        with closing(prefetched(partial(self._load, self.train), batches[state.step :])) as loaded:
            for batch, targets, weights in loaded:
                running.append(self._step(batch, targets, weights))
                state.step += 1
                due, stopping = self._agree(time.monotonic() - saved > longest, stop())
                began = self._count_time(began)
                over = self._time_share() >= 1
                mean = None
                if len(running) == _CHECK_EVERY or due or stopping or over or state.step == state.epoch_steps:
                    mean = self._check_losses(running)
                    began = self._count_time(began)
                done = min(self.total_steps, math.floor(self._steps_done()))
                self.watcher.step(done, self.total_steps, mean, self._learning_rate())
                if over:
                    return True
                if stopping:
                    return False
                if due:
                    self._save()
                    began = saved = time.monotonic()
        return True

    def _count_time(self, began: float) -> float:
        """Add the time since `began` to the training time of all processes; return the current time."""
        now = time.monotonic()
        spent = now - began
        if self.options.minutes and self.accelerator.num_processes > 1:
            spent = float(self.accelerator.reduce(torch.tensor(spent, device=self.accelerator.device), "mean"))
        self.progress.seconds += spent
        self.progress.epoch_seconds += spent
        return now

    def _step(self, batch: Batch, targets: Tensor, weights: Tensor) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate() * group.get("rate", 1.0)
        loss = self._backward(batch, targets, weights)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.options.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.options.mixed_precision != "fp16":  # the fp16 scaler skips steps with infinite gradients itself
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # the model is sharded
            self._bad |= ~torch.as_tensor(norm, device=self._bad.device).isfinite()
        return loss

    def _backward(self, batch: Batch, targets: Tensor, weights: Tensor) -> Tensor:
        """Accumulate the gradients of a batch and return its loss."""
        with collecting_penalties() as penalties:
            losses = self._losses(self.model(batch), targets)
        loss = (losses * weights).sum()
        self.accelerator.backward(loss + sum(penalties))
        return loss.detach()

    def _check_losses(self, running: list[Tensor]) -> float:
        """Return the mean loss of the last steps over all processes; raise `Diverged` if it is not finite."""
        reduced = self.accelerator.reduce(torch.stack([*running, self._bad.to(running[0].dtype)]), "mean")
        *losses, bad = reduced.tolist()
        mean = sum(losses) / len(losses)
        if not math.isfinite(mean) or bad:
            raise Diverged(self._divergence_message())
        for loss in losses:  # one by one, so that rounding does not depend on the times of the checks
            self.progress.loss_sum += loss
        running.clear()
        return mean

    def _divergence_message(self) -> str:
        epoch, step = self.progress.epoch, self.progress.step
        rate = self._learning_rate()
        saved = self.path is not None and self.path.exists()
        fixes = "a lower learning rate" + ("" if self.options.mixed_precision == "no" else " or mixed_precision no")
        return (
            f"the loss is no longer a number (epoch {epoch + 1}, step {step}, learning rate {rate:.2g}); try {fixes}; "
            + (f"the last good checkpoint is {self.path}" if saved else "there is no earlier checkpoint")
        )

    def _interruption_message(self) -> str:
        done = self.progress.epoch * self.steps_per_epoch + self.progress.step
        where = "" if self.path is None else f"; the checkpoint is {self.path}, continue with --resume"
        return f"stopped after {done:,} of {self.total_steps:,} steps{where}"

    def _finish_epoch(self) -> None:
        state = self.progress
        evaluation = self.evaluate(self.validation)
        record = EpochRecord(
            epoch=state.epoch + 1,
            loss=state.loss_sum / state.step,
            validation_loss=evaluation.loss,
            validation=evaluation.scores.main,
            learning_rate=self._learning_rate(),
            seconds=state.epoch_seconds,
        )
        state.history.append(record)
        reached = (record.validation, -record.validation_loss)
        if reached > state.best:
            state.best, state.best_epoch = reached, state.epoch
            self.best_weights = {k: v.clone() for k, v in checkpoint.full_weights(self.model).items()}
        state.epoch, state.step, state.loss_sum, state.epoch_seconds = state.epoch + 1, 0, 0.0, 0.0
        self.watcher.epoch(record)

    def _save(self) -> None:
        if self.path is None:
            return
        training = fingerprint(self.config, self.options, self.train, self.validation)
        progress = {"state": asdict(self.progress), "training": training, "best_weights": self.best_weights}
        content = checkpoint.gather(self.model, self.optimizer.optimizer, progress)
        if self.accelerator.is_main_process:
            checkpoint.save(self.path, content)
        self.accelerator.wait_for_everyone()

    def save_model(self, folder: Path, classes: tuple[str, ...]) -> None:
        """Save the current weights, gathered from all processes."""
        weights = checkpoint.full_weights(self.model)
        if self.accelerator.is_main_process:
            whole = Classifier(self.config)
            whole.load_state_dict(weights)
            save_model(folder, whole, classes)

    @torch.no_grad()
    def evaluate(self, data: DataSet) -> Evaluation:
        """Return the predictions for a data set, their scores, and their attention operations."""
        self.model.eval()
        order = np.argsort(-data.lengths, kind="stable")  # longest first, so that running out of memory shows at once
        outputs: list[tuple[np.ndarray, np.ndarray]] = []
        operations, loss_sum = 0, 0.0
        began = time.monotonic()
        batches = batches_by_tokens(data.lengths, self.options.batch_tokens, self.options.batch_size, order)
        for chosen, (batch, targets, weights) in zip(
            batches, prefetched(partial(self._load, data), batches), strict=True
        ):
            with counting_operations() as counts:
                out = self.model(batch)
            operations += sum(c.attention for c in counts)
            loss_sum += float((self._losses(out, targets) * weights).sum()) * len(chosen)
            outputs.append((self._share(chosen), out.float().cpu().numpy()))
        gathered = self._gather([(outputs, operations, loss_sum)])
        seconds = time.monotonic() - began
        return self._scored(data, gathered, seconds)

    def _scored(self, data: DataSet, gathered: list[Any], seconds: float) -> Evaluation:
        rows = {}
        offsets = data.batch.hierarchy.structure.leaf_offsets
        for outputs, _, _ in gathered:
            for chosen, out in outputs:
                lengths = data.lengths[chosen] if data.per_leaf else np.ones(len(chosen), np.int64)
                for example, part in zip(chosen.tolist(), np.split(out, np.cumsum(lengths)[:-1]), strict=False):
                    rows[example] = part
        predicted = np.concatenate([rows[i] for i in range(len(data))])
        if data.per_leaf and len(predicted) != offsets[-1]:
            raise AssertionError("a prediction is missing")
        true = data.targets.numpy()
        scores = (
            class_scores(predicted.argmax(-1), true, predicted.shape[-1])
            if data.classes
            else number_scores(predicted, true)
        )
        operations = sum(entry[1] for entry in gathered)
        loss = sum(entry[2] for entry in gathered) / len(data) / len(gathered)
        return Evaluation(scores, loss, predicted, seconds, operations)

    def _gather(self, entries: list[Any]) -> list[Any]:
        if self.accelerator.num_processes == 1:
            return entries
        from accelerate.utils import gather_object  # type: ignore[import-untyped]

        return gather_object(entries)

    def _agree(self, *own: bool) -> list[bool]:
        """Return the flags that are set on any process: all processes must save and stop together."""
        if self.accelerator.num_processes == 1:
            return list(own)
        votes = torch.tensor(own, dtype=torch.float32, device=self.accelerator.device)
        return (self.accelerator.reduce(votes, "sum") > 0).tolist()

    def _shuffled_batches(self, epoch: int) -> list[np.ndarray]:
        """Return the examples of an epoch in random batches, the same in every process and after every resume."""
        order = np.random.default_rng((self.options.seed, epoch)).permutation(len(self.train))
        return batches_by_tokens(self.train.lengths, self.options.batch_tokens, self.options.batch_size, order)

    def _epoch_batches(self, epoch: int) -> list[np.ndarray]:
        """Return `steps_per_epoch` batches; if the shuffled batches are fewer, the largest are halved.

        An epoch that has begun keeps its number of batches, which more epochs than at its beginning could change.
        """
        batches = self._shuffled_batches(epoch)
        steps = self.progress.epoch_steps if self.progress.step else 0
        while len(batches) < (steps or self.steps_per_epoch):
            largest = max(range(len(batches)), key=lambda i: len(batches[i]))
            batches[largest : largest + 1] = np.array_split(batches[largest], 2)
        return batches

    def _share(self, chosen: np.ndarray) -> np.ndarray:
        """Return this process's part of a batch, never empty: if there are too few examples, the first is repeated."""
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        own = chosen[rank::processes]
        return own if len(own) else chosen[:1]

    def _load(self, data: DataSet, chosen: np.ndarray) -> tuple[Batch, Tensor, Tensor]:
        """Return this process's part of a batch, its targets, and weights with which the losses sum to their mean."""
        own = self._share(chosen)
        part = data.select(own)
        real = len(chosen[self.accelerator.process_index :: self.accelerator.num_processes]) > 0
        # Gradients are averaged over processes, hence the factor. A repeated example has weight 0.
        weight = self.accelerator.num_processes * float(real) / len(chosen)
        weights = torch.full((len(own),), weight)
        if data.per_leaf:
            lengths = torch.from_numpy(part.lengths)
            weights = (weights / lengths).repeat_interleave(lengths)
        device = self.accelerator.device
        batch = part.batch.to(device)
        self.encoder.prepare(batch)
        if self.transform is not None:
            batch = self.transform(batch)
        return batch, part.targets.to(device), weights.to(device)

    def _losses(self, out: Tensor, targets: Tensor) -> Tensor:
        """Return one loss per example (per leaf for the task "tokens")."""
        if self.config.task == "regression":
            return ((out.float() - targets) / self.config.scale) ** 2
        return F.cross_entropy(out.float(), targets, reduction="none")

    def _learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        return learning_rate(self.options, self._steps_done(), self.total_steps)


def learning_rate(options: TrainingOptions, done: float, total: int) -> float:
    """Return the learning rate at step `done` of `total`."""
    warm = options.warmup * max(1, total)
    if done < warm:
        return options.learning_rate * (done + 1) / (warm + 1)
    left = max(0.0, 1 - (done - warm) / max(1.0, total - warm))
    if options.schedule == "constant":
        return options.learning_rate
    return options.learning_rate * (left if options.schedule == "linear" else 0.5 - 0.5 * math.cos(math.pi * left))


def _touch_all_parameters(model: nn.Module, inputs: Any, out: Tensor) -> Tensor:
    """Add 0 · Σ parameters to the output: every rank must produce every gradient, or FSDP hangs.

    A batch without images does not use the image embedding. DDP can handle unused parameters, FSDP cannot.
    """
    if not torch.is_grad_enabled():
        return out
    return out + 0 * torch.stack([p.sum() for p in model.parameters() if p.requires_grad]).sum()


def fingerprint(config: ModelConfig, options: TrainingOptions, train: DataSet, validation: DataSet) -> dict[str, Any]:
    """Return the options and digests that must not change when a run is resumed."""
    own = asdict(options)
    del own["checkpoint_minutes"]
    return {
        **own,
        **dict(flat_options(config.to_dict())),
        "examples": len(train),
        "data": (train.digest, validation.digest),
    }


def flat_options(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested options with dotted names."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat_options(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def parameter_groups(
    model: nn.Module, options: TrainingOptions, pretrained: Iterable[nn.Parameter] = ()
) -> list[dict[str, Any]]:
    """Return the parameter groups of the optimizer.

    Biases, norms, frequencies, embeddings and α are not decayed; pre-trained parameters have a lower learning rate.
    """
    undecayed_modules = (nn.Embedding, LearnedAlpha)
    undecayed = {
        id(p) for module in model.modules() if isinstance(module, undecayed_modules) for p in module.parameters()
    }
    slow = {id(p) for p in pretrained}
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = []
    for lower in ({}, {"rate": PRETRAINED_RATE}) if slow else ({},):
        here = [p for p in trained if (id(p) in slow) == bool(lower)]
        decayed = [p for p in here if p.ndim >= 2 and id(p) not in undecayed]
        decayed_ids = {id(p) for p in decayed}
        others = [p for p in here if id(p) not in decayed_ids]
        groups.append({"params": decayed, "weight_decay": options.weight_decay, **lower})
        groups.append({"params": others, "weight_decay": 0.0, **lower})
    return groups
