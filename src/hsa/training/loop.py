"""The training loop: one model, one data set, on one process or several."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hsa.analysis.memory import PeakMemory, allocated
from hsa.errors import HsaError, InvalidInput
from hsa.models.classifier import Classifier, ModelConfig
from hsa.models.saved import save_model
from hsa.nn.attention import counting_operations
from hsa.nn.learned_alpha import LearnedAlpha
from hsa.nn.penalties import collecting_penalties
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
PRETRAINED_RATE = 0.1  # what is new learns at a rate that would undo what was learned before
_LOOK_EVERY = 20  # steps between looks at whether the loss is still a number: each look waits for the device


class Interrupted(HsaError):
    """The user stopped the run; a checkpoint was saved."""


class Watcher(Protocol):
    """Who is told how it goes: a progress bar, a test."""

    def step(self, done: int, total: int, loss: float | None, learning_rate: float) -> None: ...

    def epoch(self, record: EpochRecord) -> None: ...

    def done(self) -> None: ...


class Silent:
    """A watcher that says nothing."""

    def step(self, done: int, total: int, loss: float | None, learning_rate: float) -> None: ...

    def epoch(self, record: EpochRecord) -> None: ...

    def done(self) -> None: ...


@dataclass(frozen=True)
class EpochRecord:
    """One row of the history."""

    epoch: int
    loss: float
    validation_loss: float
    validation: float  # the main score
    learning_rate: float
    seconds: float  # of training, without validation


@dataclass
class Progress:
    """Where a run is. Everything in it is plain, for the checkpoint."""

    epoch: int = 0
    step: int = 0  # of the epoch
    loss_sum: float = 0.0
    epoch_seconds: float = 0.0
    seconds: float = 0.0  # of training, all epochs
    peak_memory: float | None = None  # MiB; None where the system cannot say
    best: tuple[float, float] = (-math.inf, -math.inf)  # score and negative loss: small validation sets have many ties
    best_epoch: int = -1
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Predictions for a data set, and what they cost."""

    scores: Scores
    loss: float
    outputs: np.ndarray  # logits [examples or leaves, classes], or numbers
    seconds: float
    operations: int  # of attention, all layers, the whole data set

    @property
    def predicted(self) -> np.ndarray:
        return self.outputs if self.outputs.ndim == 1 else self.outputs.argmax(-1)


class Trainer:
    """Trains a model; the best weights by validation end up in it.

    Args:
        model: to train.
        train, validation: data.
        options: how.
        folder: for the checkpoint; None for none.
        accelerator: from `make_accelerator`.
        transform: applied to every batch after it is cut from the data, such as a frozen encoder.
        pretrained: parameters that learn at a tenth of the rate of the others.
        watcher: is told how it goes.
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
            model.register_forward_hook(_by_way_of_all)
        if self.accelerator._models:  # of earlier trainers: it would keep them, and ask them about clipping
            self.accelerator.free_memory()
        self._held = allocated(self.accelerator.device)  # before the model is there
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.progress = Progress()
        self.best_weights: dict[str, Any] | None = None
        self.steps_per_epoch = max(len(self._cut(epoch)) for epoch in range(options.epochs))
        self._bad = torch.zeros((), dtype=torch.bool, device=self.accelerator.device)

    @property
    def total_steps(self) -> int:
        return self.steps_per_epoch * self.options.epochs

    def resume(self) -> None:
        """Go on from the checkpoint in the folder."""
        if self.path is None:
            raise InvalidInput("resume", given="no folder", expected="a folder with a checkpoint")
        content = checkpoint.load(self.path)
        now = fingerprint(self.config, self.options, self.train, self.validation)
        checkpoint.check_same(self.path, content["progress"]["training"], now)
        progress = checkpoint.restore(self.path, content, self.model, self.optimizer.optimizer)
        self.best_weights = progress["best_weights"]
        self.progress = Progress(**progress["state"])

    def fit(self) -> list[EpochRecord]:
        """Train to the end, or until validation no longer improves.

        Raises:
            Interrupted: Ctrl-C was pressed; a checkpoint is saved.
            Diverged: the loss is not a number; the last checkpoint is from before.
        """
        state, memory = self.progress, PeakMemory(self.accelerator.device, self._held)
        try:
            with defer_sigint() as stop:
                self._warm_up()
                while state.step or not self._is_over():  # an epoch that has begun is validated
                    whole = self._train_epoch(stop)
                    if (peak := memory.so_far()) is not None:  # before validation, which is no training
                        state.peak_memory = max(peak, state.peak_memory or 0.0)
                    if whole:
                        self._finish_epoch()
                    self._save()
                    if any(self._agree(stop())):
                        raise Interrupted(self._how_to_resume())
        finally:
            self.watcher.done()
        if self.best_weights is not None:
            checkpoint.set_weights(self.model, self.best_weights)
        return [EpochRecord(**record) for record in state.history]

    def _warm_up(self) -> None:
        """Run one throwaway step so that first-call overhead is not billed to the model."""
        state = self.progress
        batches = [] if self._is_over() else self._epoch_batches(state.epoch)[state.step :]
        if not batches:
            return
        self.model.train()
        device = self.accelerator.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            loss = self._backward(*self._load(self.train, batches[0]))
        self.optimizer.zero_grad(set_to_none=True)
        float(loss)  # waits for the device

    def _is_over(self) -> bool:
        state, patience = self.progress, self.options.patience
        waited = bool(patience) and state.best_epoch >= 0 and state.epoch - 1 - state.best_epoch >= patience
        return waited or state.epoch >= self.options.epochs or self._share_of_time() >= 1

    def _share_of_time(self) -> float:
        return self.progress.seconds / (60 * self.options.minutes) if self.options.minutes else 0.0

    def _steps_gone(self) -> float:
        """Of `total_steps`; where time runs out first, as large a share of them as of the time."""
        steps = self.progress.epoch * self.steps_per_epoch + self.progress.step
        return max(steps, self._share_of_time() * self.total_steps)

    def _train_epoch(self, stop: Callable[[], bool]) -> bool:
        """The steps of the epoch that are left, or that there is time for; False when it was asked to stop."""
        state, longest = self.progress, 60 * self.options.checkpoint_minutes
        self.model.train()
        batches = self._epoch_batches(state.epoch)[state.step :]
        running: list[Tensor] = []
        began = saved = time.monotonic()
        with closing(prefetched(partial(self._load, self.train), batches)) as loaded:
            for batch, targets, weights in loaded:
                running.append(self._step(batch, targets, weights))
                state.step += 1
                due, stopping = self._agree(time.monotonic() - saved > longest, stop())
                began = self._count_time(began)
                over = self._share_of_time() >= 1
                mean = None
                if len(running) == _LOOK_EVERY or due or stopping or over or state.step == self.steps_per_epoch:
                    mean = self._look(running)
                    began = self._count_time(began)
                done = min(self.total_steps, math.floor(self._steps_gone()))
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
        """What was spent since then counts as training; returns the time. All processes keep the same count."""
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
        if self.options.mixed_precision != "fp16":  # whose scaler skips steps with infinite gradients by itself
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of a sharded model
            self._bad |= ~torch.as_tensor(norm, device=self._bad.device).isfinite()
        return loss

    def _backward(self, batch: Batch, targets: Tensor, weights: Tensor) -> Tensor:
        """The loss; its gradients are added to those of the parameters."""
        with collecting_penalties() as penalties:
            losses = self._losses(self.model(batch), targets)
        loss = (losses * weights).sum()
        self.accelerator.backward(loss + sum(penalties))
        return loss.detach()

    def _look(self, running: list[Tensor]) -> float:
        """The mean loss of the last steps, over all processes; and whether all is well."""
        reduced = self.accelerator.reduce(torch.stack([*running, self._bad.to(running[0].dtype)]), "mean")
        *losses, bad = reduced.tolist()
        mean = sum(losses) / len(losses)
        if not math.isfinite(mean) or bad:
            raise Diverged(self._what_to_do())
        for loss in losses:  # one by one: the sum must not depend on when it was looked at
            self.progress.loss_sum += loss
        running.clear()
        return mean

    def _what_to_do(self) -> str:
        epoch, step = self.progress.epoch, self.progress.step
        rate = self._learning_rate()
        saved = self.path is not None and self.path.exists()
        fixes = "a lower learning rate" + ("" if self.options.mixed_precision == "no" else " or mixed_precision no")
        return (
            f"the loss is no longer a number (epoch {epoch + 1}, step {step}, learning rate {rate:.2g}); try {fixes}; "
            + (f"the last good checkpoint is {self.path}" if saved else "there is no checkpoint from before")
        )

    def _how_to_resume(self) -> str:
        done = self.progress.epoch * self.steps_per_epoch + self.progress.step
        where = "" if self.path is None else f"; the checkpoint is {self.path}, go on with --resume"
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
        state.history.append(asdict(record))
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
        """The weights as they are now, gathered from all processes."""
        weights = checkpoint.full_weights(self.model)
        if self.accelerator.is_main_process:
            whole = Classifier(self.config)
            whole.load_state_dict(weights)
            save_model(folder, whole, classes)

    @torch.no_grad()
    def evaluate(self, data: DataSet) -> Evaluation:
        """Predictions, scores, and the attention operations they took."""
        self.model.eval()
        order = np.argsort(-data.lengths, kind="stable")  # the longest first: memory runs out now or never
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
        """True on all processes where it is true on one: they must save and stop together."""
        if self.accelerator.num_processes == 1:
            return list(own)
        votes = torch.tensor(own, dtype=torch.float32, device=self.accelerator.device)
        return (self.accelerator.reduce(votes, "sum") > 0).tolist()

    def _cut(self, epoch: int) -> list[np.ndarray]:
        """The examples of an epoch as they fall; the same for every process, and for every start of a run."""
        order = np.random.default_rng((self.options.seed, epoch)).permutation(len(self.train))
        return batches_by_tokens(self.train.lengths, self.options.batch_tokens, self.options.batch_size, order)

    def _epoch_batches(self, epoch: int) -> list[np.ndarray]:
        """As many in every epoch: where the examples fall into fewer, the largest batches are halved."""
        batches = self._cut(epoch)
        while len(batches) < self.steps_per_epoch:
            largest = max(range(len(batches)), key=lambda i: len(batches[i]))
            batches[largest : largest + 1] = np.array_split(batches[largest], 2)
        return batches

    def _share(self, chosen: np.ndarray) -> np.ndarray:
        """This process's part of a batch, never empty: where there are too few, an example is repeated with weight 0."""
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        own = chosen[rank::processes]
        return own if len(own) else chosen[:1]

    def _load(self, data: DataSet, chosen: np.ndarray) -> tuple[Batch, Tensor, Tensor]:
        """This process's part of a batch, its targets, and weights that make the sum of all losses their mean."""
        own = self._share(chosen)
        part = data.select(own)
        real = len(chosen[self.accelerator.process_index :: self.accelerator.num_processes]) > 0
        # Gradients are averaged over processes: each loss counts as often as there are processes.
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
        """One per example (per leaf for the task "tokens")."""
        if self.config.task == "regression":
            return ((out.float() - targets) / self.config.scale) ** 2
        return F.cross_entropy(out.float(), targets, reduction="none")

    def _learning_rate(self) -> float:
        """Of the step that comes next."""
        return learning_rate(self.options, self._steps_gone(), self.total_steps)


def learning_rate(options: TrainingOptions, done: float, total: int) -> float:
    """Return the learning rate at step `done` of `total`."""
    warm = options.warmup * max(1, total)
    if done < warm:
        return options.learning_rate * (done + 1) / (warm + 1)
    left = max(0.0, 1 - (done - warm) / max(1.0, total - warm))
    if options.schedule == "constant":
        return options.learning_rate
    return options.learning_rate * (left if options.schedule == "linear" else 0.5 - 0.5 * math.cos(math.pi * left))


def _by_way_of_all(model: nn.Module, inputs: Any, out: Tensor) -> Tensor:
    """Adds nothing, by way of every parameter: processes that share one must all have a gradient for it, or wait forever.

    A batch without images does not use the weights of images. Replicas are told so, shards are not.
    """
    if not torch.is_grad_enabled():
        return out
    return out + 0 * torch.stack([p.sum() for p in model.parameters() if p.requires_grad]).sum()


def fingerprint(config: ModelConfig, options: TrainingOptions, train: DataSet, validation: DataSet) -> dict[str, Any]:
    """What must be the same when a run goes on."""
    given = asdict(options)
    del given["checkpoint_minutes"]
    return {
        **given,
        **dict(leaves_of(config.to_dict())),
        "examples": len(train),
        "data": (train.digest, validation.digest),
    }


def leaves_of(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested options by their full names."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def parameter_groups(
    model: nn.Module, options: TrainingOptions, pretrained: Iterable[nn.Parameter] = ()
) -> list[dict[str, Any]]:
    """Weight decay for matrices, not for biases, norms, frequencies, embeddings and α. A lower rate for pre-trained ones."""
    not_decayed = (nn.Embedding, LearnedAlpha)
    kept = {id(p) for module in model.modules() if isinstance(module, not_decayed) for p in module.parameters()}
    slow = {id(p) for p in pretrained}
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = []
    for lower in ({}, {"rate": PRETRAINED_RATE}) if slow else ({},):
        here = [p for p in trained if (id(p) in slow) == bool(lower)]
        decayed = [p for p in here if p.ndim >= 2 and id(p) not in kept]
        chosen = {id(p) for p in decayed}
        others = [p for p in here if id(p) not in chosen]
        groups.append({"params": decayed, "weight_decay": options.weight_decay, **lower})
        groups.append({"params": others, "weight_decay": 0.0, **lower})
    return groups


@contextmanager
def defer_sigint() -> Iterator[Callable[[], bool]]:
    """Ctrl-C ends the step in hand first; a second one ends at once."""
    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    try:
        before = signal.signal(signal.SIGINT, ask)
    except ValueError:  # not the main thread: leave signals alone
        yield lambda: False
        return
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
