"""Train a model and its baselines on the same data, and say which was best, at which cost."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from hsa.analysis.metrics import confusion
from hsa.analysis.sparsity import LevelSparsity, has_entmax, measure_sparsity
from hsa.errors import InvalidInput
from hsa.files import read_json, write_json
from hsa.models.classifier import Classifier, ModelConfig, count_parameters, equal_parameters
from hsa.models.encoders import AnyEncoderConfig
from hsa.models.saved import load_model
from hsa.nn.encoder import WITH_ENTMAX, EncoderConfig
from hsa.nn.fusion_names import FusionName
from hsa.training.data.prepare import PreparedData, save_input_spec
from hsa.training.document_models import DOCUMENT_MODELS, pretrained_parameters, start_warm, usual_levels
from hsa.training.failures import OnFailure, catch_oom, results_of
from hsa.training.loop import CHECKPOINT, EpochRecord, Evaluation, Trainer, Watcher
from hsa.training.metrics import Scores
from hsa.training.options import DocumentOptions, ModelOptions, TrainingOptions
from hsa.tree.hierarchy import Hierarchy

# NodePositions in the input: kernels of multiscale attention have none in the logits.
_OWN_ROWS = {"kind": "multiscale", "position_input": True, "position_dim": 0}
MODELS: dict[str, dict[str, Any]] = {
    "hierarchical": {},
    "multiscale": _OWN_ROWS,
    "clustered": {"kind": "clustered"},
    "bottom-up": {"kind": "bottom-up"},
    "flat": {"kind": "flat"},
    # Here heads have nothing to talk about and no one key to share.
    "trilinear": {"kind": "trilinear", "position_input": True, "fusion": "concatenation"},
    "hierarchical-trilinear": {"kind": "hierarchical-trilinear", "position_input": True, "fusion": "concatenation"},
    "deepsets": {"kind": "none", "fusion": "concatenation"},
}
"""How each model of ours differs from the one the options describe. All have as many parameters."""
RESULT = "result.json"
_MEASURED = 256  # test examples whose weights are looked at, one by one


@dataclass(frozen=True)
class Result:
    """What came of one model."""

    model: str
    parameters: int
    scores: Scores
    operations: float  # of attention per example, all layers
    training_seconds: float
    test_seconds: float
    epochs: int
    history: tuple[EpochRecord, ...]
    confusion: tuple[tuple[int, ...], ...] = ()
    peak_memory: float | None = None  # MiB of training; None where the system cannot say
    sparsity: tuple[LevelSparsity, ...] = ()  # of attention by entmax, on some test examples

    @staticmethod
    def load(folder: Path) -> Result:
        data = read_json(folder / RESULT, "the result of a finished model")
        data["scores"] = Scores(**data["scores"])
        data["history"] = tuple(EpochRecord(**record) for record in data["history"])
        data["confusion"] = tuple(map(tuple, data["confusion"]))
        levels = data.get("sparsity", ())
        data["sparsity"] = tuple(LevelSparsity(**{**level, "alpha": tuple(level["alpha"])}) for level in levels)
        return Result(**data)


def changes(name: str) -> dict[str, Any]:
    """How a model differs from the one the options describe.

    >>> changes("flat+talking")
    {'kind': 'flat', 'fusion': 'talking'}
    """
    base, plus, fusion = name.partition("+")
    if plus and base in DOCUMENT_MODELS:
        raise InvalidInput("models", given=repr(name), expected=f"{base}: how its heads are fused is part of it")
    if base not in MODELS:
        raise unknown_model(name, [*MODELS, *DOCUMENT_MODELS])
    if plus and fusion not in get_args(FusionName):
        raise InvalidInput("models", given=repr(name), expected=f"{base}+ and one of {', '.join(get_args(FusionName))}")
    return {**MODELS[base], "fusion": fusion} if plus else MODELS[base]


def unknown_model(name: str, known: Sequence[str], task: str | None = None) -> InvalidInput:
    """What is wrong with a name, and which one may have been meant; `task`: where only it has just these."""
    close = difflib.get_close_matches(name, known, 1, cutoff=0.5)
    expected = f"some of {', '.join(known)}" + ("" if task is None else f", for the task {task}")
    return InvalidInput(
        "models", given=repr(name), expected=expected, fix=f"did you mean {close[0]!r}?" if close else None
    )


def check_models(names: Iterable[str]) -> None:
    for name in names:
        if name not in DOCUMENT_MODELS:
            changes(name)


def check_entmax(names: Iterable[str], model: ModelOptions) -> None:
    """Raises where α is given and none of the models has one."""
    if model.entmax is not None and not any(map(_has_entmax, names)):
        having = [name for name in MODELS if _has_entmax(name)]
        raise InvalidInput(
            "entmax",
            given=f"{model.entmax} for {', '.join(names)}",
            expected=f"one of {', '.join(having)} among the models: others attend by softmax, or not at all",
        )


def _has_entmax(name: str) -> bool:
    return name not in DOCUMENT_MODELS and changes(name).get("kind", "hierarchical") in WITH_ENTMAX


def encoder_config(
    name: str, model: ModelOptions, documents: DocumentOptions, hierarchy: Hierarchy
) -> AnyEncoderConfig:
    """The encoder of a model by its name, of the sizes that the options say, for documents with such trees.

    Raises:
        InvalidInput: the trees lack a level that it needs.
    """
    if name in DOCUMENT_MODELS:
        return DOCUMENT_MODELS[name](model, documents, hierarchy)
    sizes = {f.name: getattr(model, f.name) for f in fields(EncoderConfig) if hasattr(model, f.name)}
    if not _has_entmax(name):
        sizes["entmax"] = None
    levels = len(model.windows) + 1 if model.windows else usual_levels(hierarchy)
    return EncoderConfig(**{**sizes, "entmax_levels": levels, **changes(name)})


def model_config(
    prepared: PreparedData,
    model: ModelOptions,
    name: str,
    reference: str = "hierarchical",
    documents: DocumentOptions = DocumentOptions(),  # noqa: B008
) -> ModelConfig:
    """The configuration of a model by its name, for these data, with as many parameters as the `reference` has."""
    targets = prepared.train.targets
    regression = prepared.task == "regression"
    spread = float(targets.float().std()) if regression and len(targets) > 1 else 1.0

    def encoder(name: str) -> AnyEncoderConfig:
        return encoder_config(name, model, documents, prepared.train.batch.hierarchy)

    meant = ModelConfig(
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
        return meant
    own = encoder(name)
    if getattr(own, "warm_start", None) is not None:  # its sizes are those of what it starts from
        return replace(meant, encoder=own)
    return equal_parameters(meant, own)


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
    watcher: Watcher | None = None,
) -> Result:
    """Train, test and save one model. With `resume`, a finished one is taken as it is, an unfinished one goes on.

    Raises:
        NoResult: it diverged, or memory is full.
        Interrupted: Ctrl-C was pressed; a checkpoint is saved.
    """
    torch.manual_seed(options.seed)
    model = Classifier(config)
    if prepared.vectors is not None:
        model.encoder.embedding.set_vectors("text", prepared.vectors)
    resumes = resume and (folder / CHECKPOINT).is_file()
    if not resumes:
        start_warm(model.encoder)
    trainer = Trainer(
        model,
        prepared.train,
        prepared.validation,
        options,
        folder=folder,
        accelerator=accelerator,
        transform=prepared.reading.transform,
        pretrained=pretrained_parameters(model.encoder),
        watcher=watcher,
    )
    if resumes:
        trainer.resume()
    if resume and (folder / RESULT).is_file():
        return Result.load(folder)
    history = trainer.fit()
    found = trainer.evaluate(prepared.test)
    result = Result(
        model=name,
        parameters=count_parameters(model),
        scores=found.scores,
        operations=found.operations / len(prepared.test),
        training_seconds=sum(record.seconds for record in history),
        test_seconds=found.seconds,
        epochs=len(history),
        history=tuple(history),
        confusion=_confusion(found, prepared),
        peak_memory=trainer.progress.peak_memory,
    )
    trainer.save_model(folder, prepared.test.classes)
    if accelerator.is_main_process:
        if has_entmax(config):
            result = replace(result, sparsity=_sparsity(folder, prepared, accelerator.device))
        save_input_spec(folder, prepared.reading)
        write_json(folder / RESULT, asdict(result))
    accelerator.wait_for_everyone()
    return result


def _sparsity(folder: Path, prepared: PreparedData, device: torch.device) -> tuple[LevelSparsity, ...]:
    """Of a saved model that attends by entmax."""
    model, _ = load_model(folder, device)
    data, transform = prepared.test, prepared.reading.transform
    some = np.random.default_rng(0).permutation(len(data))[:_MEASURED]
    batches = (data.select(part).batch.to(device) for part in np.array_split(some, -(-len(some) // 16)))
    return measure_sparsity(model, batches if transform is None else map(transform, batches))


def _confusion(found: Evaluation, prepared: PreparedData) -> tuple[tuple[int, ...], ...]:
    if not prepared.test.classes:
        return ()
    table = confusion(found.predicted, prepared.test.targets.numpy(), len(prepared.test.classes))
    return tuple(tuple(row) for row in table.tolist())


def train_models(
    names: Sequence[str],
    model: ModelOptions,
    prepared: PreparedData,
    options: TrainingOptions,
    folder: Path,
    accelerator: Any,
    *,
    documents: DocumentOptions = DocumentOptions(),  # noqa: B008
    resume: bool = False,
    watch: Callable[[str], Watcher] | None = None,
    on_failure: OnFailure | None = None,
) -> list[Result]:
    """Every model in a folder of its own; the results in `results.json`. All have as many parameters as the first.

    Args:
        on_failure: is told of models without a result, and the others go on; by default that is an error.
    """
    configs = {name: model_config(prepared, model, name, names[0], documents) for name in names}

    def train(name: str) -> Result:
        watcher = watch(name) if watch else None
        config, own = configs[name], folder / name
        return train_model(name, config, prepared, options, own, accelerator, resume=resume, watcher=watcher)

    results = results_of(configs, train, on_failure)
    if accelerator.is_main_process:
        write_json(folder / "results.json", [asdict(result) for result in results])
    return results
