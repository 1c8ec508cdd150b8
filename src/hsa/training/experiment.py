"""Training of a model and its baselines on the same data, with their test scores and costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from hsa.analysis.metrics import confusion
from hsa.analysis.sparsity import LevelSparsity, has_entmax, measure_sparsity
from hsa.checksums import check_listed
from hsa.errors import InvalidInput
from hsa.files import read_json, write_json, write_sealed
from hsa.models.classifier import Classifier, ModelConfig, count_parameters, equal_parameters
from hsa.models.options import ModelOptions
from hsa.models.registry import MODELS, EncoderConfigLike, Extra, configure, find_model, start_warm
from hsa.models.saved import load_model
from hsa.plain_values import from_plain
from hsa.registry import KINDS
from hsa.training.data.prepare import PreparedData, save_input_spec
from hsa.training.failures import OnFailure, catch_oom, reported
from hsa.training.loop import CHECKPOINT, EpochRecord, Evaluation, Trainer, Watcher
from hsa.training.metrics import Scores
from hsa.training.options import TrainingOptions

RESULT = "result.json"
_MEASURED = 256  # test examples whose attention weights are measured


@dataclass(frozen=True)
class Result:
    """Test scores and costs of one model."""

    model: str
    parameters: int
    scores: Scores
    operations: float  # attention operations per test example, all layers
    training_seconds: float
    test_seconds: float
    epochs: int
    history: tuple[EpochRecord, ...]
    confusion: tuple[tuple[int, ...], ...] = ()
    peak_memory: float | None = None  # MiB in training; None if unknown
    sparsity: tuple[LevelSparsity, ...] = ()  # of entmax attention, on some test examples

    @staticmethod
    def load(folder: Path) -> Result:
        """Load the result of a finished model from its folder."""
        path, expected = folder / RESULT, "the result of a finished model"
        result = from_plain(Result, read_json(path, expected), str(path))
        check_listed(path, expected)
        return result


def save_result(folder: Path, result: Any) -> None:
    """Write the result of a model, a dataclass, beside the model."""
    write_sealed(folder, lambda temporary: write_json(temporary / RESULT, asdict(result)))


def check_models(names: Iterable[str]) -> None:
    """Raise an error for a name that is not a model."""
    for name in names:
        find_model(name)


def check_entmax(names: Iterable[str], model: ModelOptions) -> None:
    """Raise an error if α is set and none of the models uses it."""
    if model.entmax is not None and not any(map(_takes_entmax, names)):
        able = [name for name in MODELS.names() if _takes_entmax(name)]
        raise InvalidInput(
            "entmax",
            got=f"{model.entmax} for {', '.join(names)}",
            expected=f"one of {', '.join(able)} among the models (the others do not use entmax)",
        )


def _takes_entmax(name: str) -> bool:
    kind = find_model(name).changes.get("kind")
    return kind is not None and KINDS.get(kind).takes_entmax


def model_config(
    prepared: PreparedData,
    model: ModelOptions,
    name: str,
    reference: str = "hierarchical",
    extra: Extra = MappingProxyType({}),
) -> ModelConfig:
    """Return the configuration of a model for these data, with the same number of parameters as the `reference`."""
    targets = prepared.train.targets
    regression = prepared.task == "regression"
    spread = float(targets.float().std()) if regression and len(targets) > 1 else 1.0

    def encoder(name: str) -> EncoderConfigLike:
        return configure(name, model, extra, prepared.train.batch.hierarchy)

    first = ModelConfig(
        encoder(reference),
        prepared.modalities,
        outputs=1 if regression else len(prepared.train.classes),
        kinds=prepared.kinds,
        keys=prepared.keys,
        task=prepared.task,
        pooling=model.pooling,
        center=float(targets.float().mean()) if regression else 0.0,
        scale=spread or 1.0,
    )
    if name == reference:
        return first
    own = encoder(name)
    return replace(first, encoder=own) if own.has_fixed_size else equal_parameters(first, own)


@catch_oom
def train_model(
    name: str,
    config: ModelConfig,
    prepared: PreparedData,
    options: TrainingOptions,
    folder: Path,
    accelerator: Any,
    *,
    resume: bool = False,
    longer: bool = False,
    watcher: Watcher | None = None,
) -> Result:
    """Train, test and save one model. With `resume`, continue an unfinished run and load the result of a finished one.

    With `longer`, the options may ask for more epochs than when the run began, and a finished run is continued.

    Raises:
        NoResult: The model diverged or ran out of memory.
        Interrupted: Ctrl-C or SIGTERM arrived; a checkpoint is saved.
    """
    torch.manual_seed(options.seed)
    model = Classifier(config)
    if prepared.vectors is not None:
        model.encoder.embedding.set_vectors("text", prepared.vectors)
    resumes = resume and (folder / CHECKPOINT).is_file()
    pretrained = start_warm(model.encoder, load=not resumes)
    trainer = Trainer(
        model,
        prepared.train,
        prepared.validation,
        options,
        folder=folder,
        accelerator=accelerator,
        transform=prepared.input_spec.transform,
        pretrained=pretrained,
        watcher=watcher,
    )
    if resumes:
        trainer.resume(longer=longer)
    if resume and (folder / RESULT).is_file() and (trainer.is_over or not resumes):
        return Result.load(folder)
    history = trainer.fit()
    evaluation = trainer.evaluate(prepared.test)
    result = Result(
        model=name,
        parameters=count_parameters(model),
        scores=evaluation.scores,
        operations=evaluation.operations / len(prepared.test),
        training_seconds=sum(record.seconds for record in history),
        test_seconds=evaluation.seconds,
        epochs=len(history),
        history=tuple(history),
        confusion=_confusion(evaluation, prepared),
        peak_memory=trainer.progress.peak_memory,
    )
    trainer.save_model(folder, prepared.test.classes)
    if accelerator.is_main_process:
        if has_entmax(config):
            result = replace(result, sparsity=_sparsity(folder, prepared, accelerator.device))
        save_input_spec(folder, prepared.input_spec)
        save_result(folder, result)
    accelerator.wait_for_everyone()
    return result


def _sparsity(folder: Path, prepared: PreparedData, device: torch.device) -> tuple[LevelSparsity, ...]:
    """Measure the sparsity of a saved model with entmax attention, on some test examples."""
    model, _ = load_model(folder, device)
    data, transform = prepared.test, prepared.input_spec.transform
    some = np.random.default_rng(0).permutation(len(data))[:_MEASURED]
    batches = (data.select(part).batch.to(device) for part in np.array_split(some, -(-len(some) // 16)))
    return measure_sparsity(model, batches if transform is None else map(transform, batches))


def _confusion(evaluation: Evaluation, prepared: PreparedData) -> tuple[tuple[int, ...], ...]:
    if not prepared.test.classes:
        return ()
    table = confusion(evaluation.predicted, prepared.test.targets.numpy(), len(prepared.test.classes))
    return tuple(tuple(row) for row in table.tolist())


def train_models(
    names: Sequence[str],
    model: ModelOptions,
    prepared: PreparedData,
    options: TrainingOptions,
    folder: Path,
    accelerator: Any,
    *,
    extra: Extra = MappingProxyType({}),
    resume: bool = False,
    watch: Callable[[str], Watcher] | None = None,
    on_failure: OnFailure | None = None,
) -> list[Result]:
    """Train the models, each in its own folder, matched to the size of the first; write `results.json`.

    Args:
        watch: Function that returns the watcher for a model.
        on_failure: Callback for a model without a result, after which the others continue; by default the error is raised.
    """
    configs = {name: model_config(prepared, model, name, names[0], extra) for name in names}

    results = []
    for name, config in configs.items():
        own: Any = {"resume": resume, "longer": True, "watcher": watch(name) if watch else None}
        with reported(name, on_failure):
            results.append(train_model(name, config, prepared, options, folder / name, accelerator, **own))
    if accelerator.is_main_process:
        write_json(folder / "results.json", [asdict(result) for result in results])
    return results
