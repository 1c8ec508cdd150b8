"""Language models on the same text, with as many parameters and tokens seen: which predicts better, at which cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hsa.errors import InvalidInput
from hsa.files import write_json
from hsa.models.classifier import count_parameters
from hsa.models.language_model import HierarchicalLanguageModel, LanguageModelConfig
from hsa.models.saved import CONFIG, TOKENIZER, load_language_model, save_language_model
from hsa.nn.attention import counting_operations
from hsa.signals.readers.tokens import load_tokenizer
from hsa.training.experiment import RESULT
from hsa.training.lm_data import LmData
from hsa.training.lm_loop import LmRecord, LmWatcher, evaluate_language_model, train_language_model
from hsa.training.options import LanguageOptions, ModelOptions, TrainingOptions, decoder_sizes

LM_MODELS: dict[str, Any] = {"hsa": "hierarchical", "flat": "flat", "found": "found"}
"""The attention of all layers of each model."""


@dataclass(frozen=True)
class LmResult:
    """What came of one model. Losses in nats per token."""

    model: str
    parameters: int
    loss: float  # on the test text
    bits_per_character: float
    by_position: tuple[tuple[float, float], ...]  # place in the block, mean loss there
    operations: float  # of attention per token of the test text, all layers
    tokens: int  # seen in training
    training_seconds: float
    test_tokens: int
    history: tuple[LmRecord, ...]

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.training_seconds, 1e-9)


def check_lm_models(names: Iterable[str]) -> None:
    for name in names:
        if name not in LM_MODELS:
            raise InvalidInput("models", given=repr(name), expected=f"some of {', '.join(LM_MODELS)}, for the task lm")


def language_model_config(
    data: LmData, model: ModelOptions, language: LanguageOptions, name: str
) -> LanguageModelConfig:
    """The configuration of one of `LM_MODELS`. They differ in a bias per head and layer, and in nothing else."""
    if model.head_dim is not None and model.head_dim * model.heads != model.width:
        raise InvalidInput("head_dim", given=model.head_dim, expected="width / heads, for language models")
    return LanguageModelConfig(
        vocabulary=data.tokenizer.get_vocab_size(),
        layers=model.layers,
        attention=LM_MODELS[name],
        **decoder_sizes(model, language),
        refine=model.refine or LanguageModelConfig.refine,
        chunk=language.chunk,
        group=language.group,
        closes=data.closes if language.structure == "text" else {},
        max_length=language.max_length,
    )


def train_one(
    name: str,
    config: LanguageModelConfig,
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
    """Train, test and save one model. With `resume`, an unfinished one goes on, and a finished one is tested again."""
    found = train_language_model(
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
        found.model,
        data.test,
        language.context,
        batch_tokens=options.batch_tokens,
        mixed_precision=options.mixed_precision,
    )
    characters = len(data.tokenizer.decode(data.test[: tested.tokens].tolist(), skip_special_tokens=False))
    result = LmResult(
        model=name,
        parameters=count_parameters(found.model),
        loss=tested.loss,
        bits_per_character=tested.loss / math.log(2) * tested.tokens / max(1, characters),
        by_position=binned(tested.by_position),
        operations=_operations(found.model, data.test, language.context),
        tokens=found.tokens,
        training_seconds=found.seconds,
        test_tokens=tested.tokens,
        history=found.history,
    )
    save_language_model(folder, found.model, data.tokenizer)
    write_json(folder / RESULT, asdict(result))
    return result


def _weights(run: Path, name: str, data: LmData) -> dict[str, torch.Tensor]:
    """Of the model of that name in a run, or of the folder of a model; learned on the same tokens."""
    folder = run / name if (run / name).is_dir() else run
    if not (folder / CONFIG).is_file():
        raise InvalidInput(
            "start", given=f"{run}, which has no model {name!r}", expected="a run with one, or its folder"
        )
    model = load_language_model(folder)
    if load_tokenizer(folder / TOKENIZER).to_str() != data.tokenizer.to_str():
        raise InvalidInput(
            "start",
            given=f"{folder}, which was trained with another tokenizer",
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
    resume: bool = False,
    device: torch.device | str | None = None,
    watch: Callable[[str], LmWatcher] | None = None,
) -> list[LmResult]:
    """Every model in a folder of its own; the results in `results.json`."""
    configs = {name: language_model_config(data, model, language, name) for name in names}
    starts = {} if language.start is None else {name: _weights(language.start, name, data) for name in names}
    results = []
    for name, config in configs.items():
        own: Any = {"start": starts.get(name), "watcher": watch(name) if watch else None}
        results.append(
            train_one(name, config, data, options, language, folder / name, resume=resume, device=device, **own)
        )
    write_json(folder / "results.json", [asdict(result) for result in results])
    return results


def binned(by_position: np.ndarray, per_octave: int = 4) -> tuple[tuple[float, float], ...]:
    """(place, mean) of the loss in bins that widen with the place: the first tokens differ most.

    >>> binned(np.array([4.0, 3.0, 2.0, 2.0, 2.0]), per_octave=1)
    ((1.0, 4.0), (2.5, 2.5), (4.5, 2.0))
    """
    size = len(by_position)
    edges = np.unique(np.ceil(2 ** (np.arange(int(np.log2(size) + 1) * per_octave + 1) / per_octave)).astype(int))
    bounds = [0, *(int(e) - 1 for e in edges if 1 < e < size), size]  # a last bin of one token would be noise
    return tuple(((a + 1 + b) / 2, float(by_position[a:b].mean())) for a, b in pairwise(bounds))


@torch.no_grad()
def _operations(model: HierarchicalLanguageModel, tokens: np.ndarray, context: int) -> float:
    """Of attention per token of a block, all layers, everything counted."""
    block = torch.from_numpy(tokens[:context].astype(np.int64)).to(model.device)
    with counting_operations() as counts:
        model.hidden(block, [len(block)])
    return sum(count.total for count in counts) / len(block)
