"""The training loop: one model, one data set, on one process or several."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hsa.batch import Batch
from hsa.errors import HsaError, InvalidInput, MissingExtra
from hsa.models.classifier import HierarchicalClassifier
from hsa.models.saved import save_model
from hsa.nn.attention import counting_operations
from hsa.training import checkpoint
from hsa.training.data_set import DataSet, batches_by_tokens
from hsa.training.loading import prefetched
from hsa.training.metrics import Scores, class_scores, number_scores
from hsa.training.options import TrainingOptions

Transform = Callable[[Batch], Batch]
CHECKPOINT = "checkpoint.pt"
_LOOK_EVERY = 20  # steps between looks at whether the loss is still a number: each look waits for the device


class Diverged(HsaError):
    """The loss is no longer a number."""


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
    seconds: float = 0.0
    epoch_seconds: float = 0.0
    best: float = -math.inf
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


def make_accelerator(options: TrainingOptions, *, fsdp: bool = False, cpu: bool = False) -> Any:
    """accelerate's handle on devices and processes; started by `accelerate launch` or `torchrun`, there are several."""
    try:
        from accelerate import (  # type: ignore[import-untyped]
            Accelerator,
            DistributedDataParallelKwargs,
            FullyShardedDataParallelPlugin,
        )
    except ImportError:
        raise MissingExtra("accelerate", "train", "training") from None
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True) if fsdp else None
    return Accelerator(
        mixed_precision=options.mixed_precision,
        cpu=cpu,
        fsdp_plugin=plugin,
        # A batch without images does not use the weights of images.
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )


class Trainer:
    """Trains a model; the best weights by validation end up in it.

    Args:
        model: to train.
        train, validation: data.
        options: how.
        folder: for the checkpoint; None for none.
        accelerator: from `make_accelerator`.
        transform: applied to every batch after it is cut from the data, such as a frozen encoder.
        watcher: is told how it goes.
    """

    def __init__(
        self,
        model: HierarchicalClassifier,
        train: DataSet,
        validation: DataSet,
        options: TrainingOptions,
        *,
        folder: Path | None = None,
        accelerator: Any = None,
        transform: Transform | None = None,
        watcher: Watcher | None = None,
    ):
        self.config, self.encoder = model.config, model.encoder
        self.train, self.validation, self.options = train, validation, options
        self.path = None if folder is None else folder / CHECKPOINT
        self.accelerator = accelerator or make_accelerator(options)
        self.transform, self.watcher = transform, watcher or Silent()
        optimizer = torch.optim.AdamW(_parameter_groups(model, options), lr=options.learning_rate, betas=(0.9, 0.98))
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.progress = Progress()
        self.best_weights: dict[str, Any] | None = None
        self.steps_per_epoch = len(self._epoch_batches(0))
        self._bad = torch.zeros((), dtype=torch.bool, device=self.accelerator.device)

    @property
    def total_steps(self) -> int:
        return self.steps_per_epoch * self.options.epochs

    def resume(self) -> None:
        """Go on from the checkpoint in the folder."""
        if self.path is None:
            raise InvalidInput("resume", given="no folder", expected="a folder with a checkpoint")
        content = checkpoint.load(self.path)
        progress = checkpoint.restore(self.path, content, self.model, self.optimizer.optimizer)
        if progress["training"] != self._fingerprint():
            was, now = progress["training"], self._fingerprint()
            name = next(key for key in now if was.get(key) != now[key])
            raise InvalidInput(
                str(self.path),
                given=f"a checkpoint trained with {name} = {was.get(name)}",
                expected=f"{now[name]}",
                fix="resume with the options and data of the first start; only epochs and patience may not change either",
            )
        self.best_weights = progress["best_weights"]
        self.progress = Progress(**progress["state"])

    def fit(self) -> list[EpochRecord]:
        """Train to the end, or until validation no longer improves.

        Raises:
            Interrupted: Ctrl-C was pressed; a checkpoint is saved.
            Diverged: the loss is not a number; the last checkpoint is from before.
        """
        state, options = self.progress, self.options
        try:
            with _stop_politely() as stop:
                while state.epoch < options.epochs and not self._has_stopped():
                    self._train_epoch(stop)
                    if self._agree(stop()):
                        self._save()
                        raise Interrupted(self._how_to_resume("stopped"))
                    self._finish_epoch()
                    self._save()
        finally:
            self.watcher.done()
        if self.best_weights is not None:
            checkpoint.set_weights(self.model, self.best_weights)
        return [EpochRecord(**record) for record in state.history]

    def _has_stopped(self) -> bool:
        waited = self.progress.epoch - 1 - self.progress.best_epoch
        return bool(self.options.patience) and self.progress.best_epoch >= 0 and waited >= self.options.patience

    def _train_epoch(self, stop: Callable[[], bool]) -> None:
        state = self.progress
        self.model.train()
        batches = self._epoch_batches(state.epoch)[state.step :]
        loaded = prefetched(self._load(self.train, batch, share=True) for batch in batches)
        running: list[Tensor] = []
        began = saved = time.monotonic()
        for batch, targets, weights in loaded:
            loss = self._step(batch, targets, weights)
            running.append(loss)
            state.step += 1
            done = state.epoch * self.steps_per_epoch + state.step
            now = time.monotonic()
            due = self._agree(now - saved > 60 * self.options.checkpoint_minutes)
            if len(running) == _LOOK_EVERY or due or stop() or state.step == self.steps_per_epoch:
                mean = self._look(running)
                self.watcher.step(done, self.total_steps, mean, self._learning_rate(done))
                state.epoch_seconds += now - began
                began = now
            else:
                self.watcher.step(done, self.total_steps, None, self._learning_rate(done))
            if self._agree(stop()):
                return
            if due:
                self._save()
                saved = time.monotonic()

    def _step(self, batch: Batch, targets: Tensor, weights: Tensor) -> Tensor:
        done = self.progress.epoch * self.steps_per_epoch + self.progress.step
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(done)
        losses = self._losses(self.model(batch), targets)
        loss = (losses * weights).sum()
        self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.options.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.options.mixed_precision != "fp16":  # whose scaler skips steps with infinite gradients by itself
            self._bad |= ~torch.as_tensor(norm, device=self._bad.device).isfinite()
        return loss.detach()

    def _look(self, running: list[Tensor]) -> float:
        """The mean loss of the last steps, over all processes; and whether all is well."""
        sums = self.accelerator.reduce(torch.stack(running).sum(), "mean")
        bad = self.accelerator.reduce(self._bad.float(), "sum")
        mean = float(sums) / len(running)
        if not math.isfinite(mean) or float(bad) > 0:
            raise Diverged(
                f"the loss is no longer a number (epoch {self.progress.epoch + 1}, step {self.progress.step}, learning rate "
                f"{self._learning_rate(self.progress.epoch * self.steps_per_epoch + self.progress.step):.2g}); try a lower "
                f"learning rate, or mixed_precision no. {self._last_good()}"
            )
        self.progress.loss_sum += float(sums)
        running.clear()
        return mean

    def _last_good(self) -> str:
        if self.path is None or not self.path.exists():
            return "There is no checkpoint from before."
        return f"The last good checkpoint is {self.path}."

    def _how_to_resume(self, what: str) -> str:
        where = "" if self.path is None else f"; the checkpoint is {self.path}, go on with --resume"
        return f"{what} in epoch {self.progress.epoch + 1} of {self.options.epochs}{where}"

    def _finish_epoch(self) -> None:
        state = self.progress
        found = self.evaluate(self.validation)
        record = EpochRecord(
            epoch=state.epoch + 1,
            loss=state.loss_sum / self.steps_per_epoch,
            validation_loss=found.loss,
            validation=found.scores.main,
            learning_rate=self._learning_rate((state.epoch + 1) * self.steps_per_epoch),
            seconds=state.epoch_seconds,
        )
        state.history.append(asdict(record))
        if record.validation > state.best:
            state.best, state.best_epoch = record.validation, state.epoch
            self.best_weights = {k: v.clone() for k, v in checkpoint.full_weights(self.model).items()}
        state.epoch, state.step, state.loss_sum, state.epoch_seconds = state.epoch + 1, 0, 0.0, 0.0
        state.seconds += record.seconds
        self.watcher.epoch(record)

    def _save(self) -> None:
        if self.path is None:
            return
        progress = {"state": asdict(self.progress), "training": self._fingerprint(), "best_weights": self.best_weights}
        content = checkpoint.gather(self.model, self.optimizer.optimizer, progress)
        if self.accelerator.is_main_process:
            checkpoint.save(self.path, content)
        self.accelerator.wait_for_everyone()

    def _fingerprint(self) -> dict[str, Any]:
        """What must be the same when a run goes on."""
        return {
            **asdict(self.options),
            "examples": len(self.train),
            "leaves": self.train.batch.hierarchy.num_leaves,
            "data": self.train.batch.hierarchy.digest,
        }

    def save_model(self, folder: Path, classes: tuple[str, ...]) -> None:
        """The weights as they are now, gathered from all processes."""
        weights = checkpoint.full_weights(self.model)
        if self.accelerator.is_main_process:
            whole = HierarchicalClassifier(self.config)
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
            batches, prefetched(self._load(data, batch, share=True) for batch in batches), strict=True
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
        found = np.concatenate([rows[i] for i in range(len(data))])
        if data.per_leaf and len(found) != offsets[-1]:
            raise AssertionError("a prediction is missing")
        true = data.targets.numpy()
        scores = class_scores(found.argmax(-1), true, found.shape[-1]) if data.classes else number_scores(found, true)
        operations = sum(entry[1] for entry in gathered)
        loss = sum(entry[2] for entry in gathered) / len(data) / len(gathered)
        return Evaluation(scores, loss, found, seconds, operations)

    def _gather(self, entries: list[Any]) -> list[Any]:
        if self.accelerator.num_processes == 1:
            return entries
        from accelerate.utils import gather_object  # type: ignore[import-untyped]

        return gather_object(entries)

    def _agree(self, own: bool) -> bool:
        """True on all processes where it is true on one: they must save and stop together."""
        if self.accelerator.num_processes == 1:
            return own
        return bool(self.accelerator.reduce(torch.tensor(float(own), device=self._bad.device), "sum") > 0)

    def _epoch_batches(self, epoch: int) -> list[np.ndarray]:
        """The same for every process, and for every start of a run."""
        generator = np.random.default_rng((self.options.seed, epoch))
        order = generator.permutation(len(self.train))
        return self._same_number(
            batches_by_tokens(self.train.lengths, self.options.batch_tokens, self.options.batch_size, order)
        )

    def _same_number(self, batches: list[np.ndarray]) -> list[np.ndarray]:
        """As many batches in every epoch: how the examples fall decides a few more or less."""
        expected = getattr(self, "steps_per_epoch", len(batches))
        if len(batches) > expected:
            rest = np.concatenate(batches[expected - 1 :])
            return [*batches[: expected - 1], rest]
        while len(batches) < expected:
            largest = max(range(len(batches)), key=lambda i: len(batches[i]))
            halves = np.array_split(batches[largest], 2)
            batches = [*batches[:largest], *halves, *batches[largest + 1 :]]
        return batches

    def _share(self, chosen: np.ndarray) -> np.ndarray:
        """This process's part of a batch, never empty: where there are too few, an example is repeated with weight 0."""
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        own = chosen[rank::processes]
        return own if len(own) else chosen[:1]

    def _load(self, data: DataSet, chosen: np.ndarray, share: bool) -> tuple[Batch, Tensor, Tensor]:
        """A batch on the device, its targets, and weights that make the sum of the losses the mean over all processes."""
        own = self._share(chosen) if share else chosen
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

    def _learning_rate(self, done: int) -> float:
        options, total = self.options, max(1, self.total_steps)
        warm = options.warmup * total
        if done < warm:
            return options.learning_rate * (done + 1) / (warm + 1)
        left = max(0.0, 1 - (done - warm) / max(1.0, total - warm))
        if options.schedule == "constant":
            return options.learning_rate
        return options.learning_rate * (left if options.schedule == "linear" else 0.5 - 0.5 * math.cos(math.pi * left))


def _parameter_groups(model: nn.Module, options: TrainingOptions) -> list[dict[str, Any]]:
    """Weight decay for matrices, not for biases, norms, frequencies and embeddings."""
    kept = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2 and id(p) not in kept]
    chosen = {id(p) for p in decayed}
    return [
        {"params": decayed, "weight_decay": options.weight_decay},
        {"params": [p for p in trained if id(p) not in chosen], "weight_decay": 0.0},
    ]


@contextmanager
def _stop_politely() -> Iterator[Callable[[], bool]]:
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
