"""Comparison of language models on the same text, with equal numbers of parameters and of tokens seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from hsa.errors import InvalidInput
from hsa.files import write_json
from hsa.models.classifier import closest_size, count_parameters
from hsa.models.options import ModelOptions
from hsa.models.registry import LANGUAGE_ARCHITECTURES, LANGUAGE_MODELS, Extra, create_language_model
from hsa.models.saved import CONFIG, load_language_model, save_language_model
from hsa.registry import resolve
from hsa.training.data.prepare import load_model_tokenizer
from hsa.training.experiment import save_result
from hsa.training.failures import OnFailure, catch_oom, reported
from hsa.training.language_model.data import LmData
from hsa.training.language_model.loop import (
    LmRecord,
    LmWatcher,
    bits_per_character,
    evaluate_language_model,
    reader_of,
    train_language_model,
)
from hsa.training.options import LanguageOptions, TrainingOptions


@dataclass(frozen=True)
class LmResult:
    """Test scores and costs of one model. Losses are in nats per token."""

    model: str
    parameters: int
    loss: float  # on the test text
    bits_per_character: float
    by_position: tuple[tuple[float, float], ...]  # position in the block, mean loss
    operations: float  # attention operations per token of the test text, all layers
    tokens: int  # seen in training
    training_seconds: float
    test_tokens: int
    context: int  # tokens per block
    remembered_tokens: int  # tokens before a block that every layer remembers
    history: tuple[LmRecord, ...]

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.training_seconds, 1e-9)


def check_lm_models(names: Iterable[str]) -> None:
    """Raise an error for a name that is not a language model."""
    for name in names:
        LANGUAGE_MODELS.get(name)


def language_model_config(
    data: LmData,
    model: ModelOptions,
    language: LanguageOptions,
    name: str,
    extra: Extra = MappingProxyType({}),
) -> Any:
    """Return the configuration of a model by its name.

    Other architectures get feed-forward networks whose width matches the number of parameters of the multiscale model.
    """
    if model.head_dim is not None and model.head_dim * model.heads != model.width:
        raise InvalidInput("head_dim", got=model.head_dim, expected="width / heads for language models")
    entry = LANGUAGE_MODELS.get(name)
    architecture = LANGUAGE_ARCHITECTURES.get(entry.architecture)
    config = resolve(architecture.configure)(data, model, language, extra, entry.changes)
    if not architecture.matched:
        return config
    return as_large_as(language_model_config(data, model, language, "multiscale"), config)


def as_large_as(reference: Any, config: Any) -> Any:
    """Return the config with a feed-forward width that matches the number of parameters of the reference."""

    def count(config: Any) -> int:
        with torch.device("meta"):
            return count_parameters(create_language_model(config))

    inner = closest_size(lambda inner: count(replace(config, feed_forward=inner)), count(reference))
    return replace(config, feed_forward=inner)


@catch_oom
def train_one(
    name: str,
    config: Any,
    data: LmData,
    options: TrainingOptions,
    language: LanguageOptions,
    folder: Path,
    *,
    start: dict[str, torch.Tensor] | None = None,
    resume: bool = False,
    device: torch.device | str | None = None,
    watcher: LmWatcher | None = None,
) -> LmResult:
    """Train, test and save one model. With `resume`, continue an unfinished run and test a finished one again."""
    trained = train_language_model(
        config,
        data.train,
        data.validation,
        options,
        language,
        start=start,
        folder=folder,
        resume=resume,
        watcher=watcher,
        device=device,
    )
    tested = evaluate_language_model(
        trained.model,
        data.test,
        language.context,
        batch_tokens=options.batch_tokens,
        mixed_precision=options.mixed_precision,
    )
    result = LmResult(
        model=name,
        parameters=count_parameters(trained.model),
        loss=tested.loss,
        bits_per_character=bits_per_character(tested, data.test, data.tokenizer),
        by_position=binned(tested.by_position),
        operations=reader_of(trained.model, language.context).operations(data.test),
        tokens=trained.tokens,
        training_seconds=trained.seconds,
        test_tokens=tested.tokens,
        context=language.context,
        remembered_tokens=trained.model.remembered_tokens,
        history=trained.history,
    )
    save_language_model(folder, trained.model, data.tokenizer)
    save_result(folder, result)
    return result


def _weights(run: Path, name: str, data: LmData) -> dict[str, torch.Tensor]:
    """Return the weights of a model from the folder of a run, or from its own folder; check its tokenizer."""
    folder = run / name if (run / name).is_dir() else run
    if not (folder / CONFIG).is_file():
        expected = f"a run with a model {name!r}, or the folder of a model"
        raise InvalidInput("init_from", got=f"{run}, which has neither", expected=expected)
    model = load_language_model(folder)
    if load_model_tokenizer(folder).to_str() != data.tokenizer.to_str():
        raise InvalidInput(
            "init_from",
            got=f"{folder}, which was trained with another tokenizer",
            expected="a run on the same text, with the same vocabulary",
        )
    return model.state_dict()


def compare_language_models(
    names: Sequence[str],
    model: ModelOptions,
    data: LmData,
    options: TrainingOptions,
    language: LanguageOptions,
    folder: Path,
    *,
    extra: Extra = MappingProxyType({}),
    resume: bool = False,
    device: torch.device | str | None = None,
    watch: Callable[[str], LmWatcher] | None = None,
    on_failure: OnFailure | None = None,
) -> list[LmResult]:
    """Train, test and save the models, each in its own folder; write `results.json`.

    Args:
        names: Names of the models.
        model, options, language, extra: Options of the run.
        data: Texts.
        folder: Folder of the run.
        resume: Whether to continue unfinished models; finished ones are tested again.
        device: Device to train on; by default the GPU if there is one.
        watch: Function that returns the watcher for a model.
        on_failure: Callback for a model without a result, after which the others continue; by default the error is raised.
    """
    configs = {name: language_model_config(data, model, language, name, extra) for name in names}
    starts = {} if language.init_from is None else {name: _weights(language.init_from, name, data) for name in names}

    results = []
    for name, config in configs.items():
        own: Any = {"start": starts.get(name), "watcher": watch(name) if watch else None}
        own |= {"resume": resume, "device": device}
        with reported(name, on_failure):
            results.append(train_one(name, config, data, options, language, folder / name, **own))
    write_json(folder / "results.json", [asdict(result) for result in results])
    return results


def binned(by_position: np.ndarray, per_octave: int = 4) -> tuple[tuple[float, float], ...]:
    """Return (position, mean loss) in bins that widen with the position, because the loss changes most at the start.

    >>> binned(np.array([4.0, 3.0, 2.0, 2.0, 2.0]), per_octave=1)
    ((1.0, 4.0), (2.5, 2.5), (4.5, 2.0))
    """
    size = len(by_position)
    edges = np.unique(np.ceil(2 ** (np.arange(int(np.log2(size) + 1) * per_octave + 1) / per_octave)).astype(int))
    bounds = [0, *(int(e) - 1 for e in edges if 1 < e < size), size]  # a last bin of one token would be noise
    return tuple(((a + 1 + b) / 2, float(by_position[a:b].mean())) for a, b in pairwise(bounds))
