"""Language models with flat and multiscale attention, and Transformer-XL.

    python -m benchmarks.language_models TEXT FOLDER

TEXT is data for `hsa train --task lm`, such as a table of books. Models of equal size see the same number of tokens. Results
are kept in FOLDER as JSON, and finished models are not trained again. The table and the curves go to benchmarks/results/.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.measure import RESULTS, write_table
from hsa.baselines.transformer_xl.language_model import TransformerXLLanguageConfig, TransformerXLLanguageModel
from hsa.models.causal_language_model import CausalLanguageModel
from hsa.models.classifier import count_parameters
from hsa.models.language_model import LanguageModelConfig
from hsa.training.language_model.data import LmData, prepare_text
from hsa.training.language_model.experiment import as_large_as
from hsa.training.language_model.loop import evaluate_language_model, train_language_model
from hsa.training.language_model.plots import plot_by_position, plot_losses
from hsa.training.options import LanguageOptions, TrainingOptions

VOCABULARY, BATCH = 16384, 65536
SIZES: Any = {"vocabulary": VOCABULARY, "width": 384, "heads": 6, "layers": 6}


@dataclass(frozen=True)
class Phase:
    """A part of training: `tokens` million tokens in blocks of `context`, with a schedule of the learning rate."""

    tokens: float
    context: int
    schedule: Any = "cosine"


FLAT = LanguageModelConfig(**SIZES, attention="flat")
NEAR_7 = LanguageModelConfig(**SIZES, attention="multiscale", branching=(32, 4), near=7)
NEAR_15 = replace(NEAR_7, near=15)
XL = as_large_as(FLAT, TransformerXLLanguageConfig(**SIZES, segment=512, memory=512))
XL_MEMORIES = (512, 1536, 3584, 15872)
"""Sizes of the memory of Transformer-XL in the tests, in tokens."""
WHOLE = (Phase(60, 2048),)
RUNS: Mapping[str, tuple[Any, tuple[Phase, ...]]] = {
    "flat": (FLAT, WHOLE),
    "multiscale near 7": (NEAR_7, WHOLE),
    "multiscale near 15": (NEAR_15, WHOLE),
    "multiscale near 7, 16,384": (NEAR_7, (Phase(60, 16384),)),
    "multiscale near 15, 16,384": (NEAR_15, (Phase(60, 16384),)),
    "flat, late fall": (FLAT, (Phase(45, 2048, "constant"), Phase(15, 2048))),
    "multiscale near 7, then 16,384": (NEAR_7, (Phase(45, 2048, "constant"), Phase(15, 16384))),
    "multiscale near 7, half 16,384": (NEAR_7, (Phase(30, 2048, "constant"), Phase(30, 16384))),
    "Transformer-XL, late fall": (XL, (Phase(45, 512, "constant"), Phase(15, 512))),
}


PLOTTED = (
    "flat",
    "multiscale near 7",
    "flat, late fall",
    "multiscale near 7, then 16,384",
    "Transformer-XL, late fall",
)


def train(config: Any, phases: tuple[Phase, ...], data: LmData) -> dict[str, Any]:
    """Train one model through its phases, each starting from the previous weights, and test it."""
    weights, history, seen, seconds = None, [], 0, 0.0
    for number, phase in enumerate(phases):
        options = TrainingOptions(
            learning_rate=1e-3,
            schedule=phase.schedule,
            warmup=0.0 if number else 0.05,
            weight_decay=0.1,
            batch_size=BATCH // phase.context,
            batch_tokens=BATCH,
            mixed_precision="bf16",
            seed=number,
        )
        language = LanguageOptions(context=phase.context, steps=int(phase.tokens * 1e6) // BATCH)
        trained = train_language_model(config, data.train, data.validation, options, language, start=weights)
        weights = trained.model.state_dict()
        history += [[seen + r.tokens, r.loss, r.validation_loss] for r in trained.history]
        seen, seconds = seen + trained.tokens, seconds + trained.seconds
    tests = {}
    for reads, (model, context) in _readings(trained.model, phases).items():
        tested = evaluate_language_model(model, data.test, context, batch_tokens=BATCH, mixed_precision="bf16")
        bins = tested.by_position.reshape(64, -1).mean(1)
        tests[reads] = {"loss": tested.loss, "context": context, "by_position": bins.tolist()}
    return {
        "parameters": count_parameters(trained.model),
        "tokens": seen,
        "seconds": seconds,
        "history": history,
        "tests": tests,
    }


def _readings(model: CausalLanguageModel, phases: tuple[Phase, ...]) -> dict[str, tuple[CausalLanguageModel, int]]:
    """Return the tests of a trained model: name → model and tokens of a block."""
    config = model.config
    if isinstance(config, LanguageModelConfig):
        contexts = sorted({2048, *(phase.context for phase in phases)})
        return {f"{context:,}": (model, context) for context in contexts}
    readings: dict[str, tuple[CausalLanguageModel, int]] = {}
    for memory in XL_MEMORIES:
        longer = TransformerXLLanguageModel(replace(config, test_memory=memory)).to(model.device)
        longer.load_state_dict(model.state_dict())
        readings[f"{config.segment:,} and {memory:,} before"] = longer, config.segment
    return readings


def report(results: Mapping[str, dict[str, Any]]) -> None:
    rows = []
    for name, result in results.items():
        learned = ", then ".join(
            f"{phase.tokens:g} M in blocks of {phase.context:,} ({phase.schedule})" for phase in RUNS[name][1]
        )
        for reads, test in result["tests"].items():
            rows.append([name.split(",")[0], learned, reads, math.exp(test["loss"])])
    write_table(
        "language_models",
        "Language models on books",
        [("", ["attention of every layer", "million tokens seen, learning rate", "reads", "test perplexity"], rows)],
        _notes(results),
        command="python -m benchmarks.language_models TEXT FOLDER",
    )
    results = {name: results[name] for name in PLOTTED}
    histories = {
        name: [SimpleNamespace(tokens=t, loss=a, validation_loss=b) for t, a, b in result["history"]]
        for name, result in results.items()
    }
    plot_losses(RESULTS / "language_models.png", histories)
    curves = {}
    for name, result in results.items():
        if isinstance(RUNS[name][0], TransformerXLLanguageConfig):  # its memory continues from block to block
            continue
        test = list(result["tests"].values())[-1]
        width = test["context"] / len(test["by_position"])
        curves[name] = [((i + 0.5) * width, loss) for i, loss in enumerate(test["by_position"])]
    plot_by_position(RESULTS / "language_models_by_position.png", curves)


def _notes(results: Mapping[str, dict[str, Any]]) -> str:
    parameters = next(iter(results.values()))["parameters"]
    sizes = f"{SIZES['layers']} layers, width {SIZES['width']}, {SIZES['heads']} heads, vocabulary {VOCABULARY:,}"
    return (
        f"{sizes}, rotary positions (Transformer-XL: its own), {parameters / 1e6:.1f} M parameters (multiscale "
        f"models have one more bias per head). AdamW, highest learning rate 1e-3, {BATCH:,} tokens per step, "
        "bfloat16, one seed. Multiscale: families of 32, then of 4; a token's own family and the 7 or 15 before it "
        "are exact. Perplexity is per token of the test text, cut into blocks of the given length; Transformer-XL "
        "reads it as one stream.\n\n![Losses](language_models.png) ![Loss by "
        "position](language_models_by_position.png)"
    )


def main(text: Path, folder: Path) -> None:
    data = prepare_text(text, vocabulary=VOCABULARY, say=print)
    results = {}
    for name, (config, phases) in RUNS.items():
        path = folder / f"{name.replace(', ', '_').replace(' ', '_').replace(',', '')}.json"
        if not path.is_file():
            print(name, flush=True)
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(train(config, phases, data)))
        results[name] = json.loads(path.read_text())
    report(results)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
