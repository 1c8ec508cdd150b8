"""Time to make a batch compared with a training step on it: does the model wait for data?"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.measure import medians, write_table
from hsa.models.classifier import Classifier, ModelConfig, equal_parameters
from hsa.nn.embedding import Modality
from hsa.nn.encoder_config import EncoderConfig
from hsa.signals import Sequence, Signal
from hsa.training.data.data_set import DataSet, Example, build

_VOCABULARY = 8192


def documents(count: int, sentences: int, seed: int = 0) -> DataSet:
    """Build random documents (paragraphs, sentences, tokens) with the sizes of real text."""
    generator = np.random.default_rng(seed)

    def sentence() -> Signal:
        length = int(np.clip(generator.lognormal(3.0, 0.6), 2, 120))
        return Signal.of(torch.from_numpy(generator.integers(0, _VOCABULARY, length)), "text")

    def document(i: int) -> Example:
        left, paragraphs = max(1, int(generator.lognormal(np.log(sentences), 0.5))), []
        while left > 0:
            size = min(left, int(generator.integers(1, 8)))
            paragraphs.append(Signal(Sequence(size), [sentence() for _ in range(size)]))
            left -= size
        return Example(Signal(Sequence(len(paragraphs)), paragraphs), str(i % 2), str(i))

    return build((document(i) for i in range(count)), "classification")


def run() -> None:
    rows = []
    for name, count, sentences, batch_size in (("reviews", 512, 12, 64), ("papers", 48, 350, 8)):
        data = documents(count, sentences)
        ours, flat = (EncoderConfig(layers=1, kind=kind, include_self=False) for kind in ("hierarchical", "flat"))
        config = ModelConfig(ours, {"text": Modality(tokens=_VOCABULARY)}, outputs=2)
        models = {
            "hierarchical": Classifier(config),
            "flat": Classifier(equal_parameters(config, flat)),
        }
        chosen = np.arange(batch_size)
        batch = data.select(chosen).batch

        def load(model: str | None) -> None:
            part = data.select(chosen).batch  # noqa: B023
            if model is not None:
                models[model].encoder.prepare(part)  # noqa: B023
            _ = part.positions

        def step(model: str) -> None:
            models[model](batch).sum().backward()  # noqa: B023

        times = medians(
            {
                "load, hierarchical": lambda: load("hierarchical"),
                "load, flat": lambda: load("flat"),
                "step, hierarchical": lambda: step("hierarchical"),
                "step, flat": lambda: step("flat"),
            }
        )
        leaves = batch.hierarchy.num_leaves
        for model in models:
            made, used = times[f"load, {model}"], times[f"step, {model}"]
            rows.append((name, f"{leaves:,}", model, made, used, f"{100 * made / used:.1f}%"))
    write_table(
        "data_pipeline",
        "Making a batch and training on it",
        [("", ("documents", "leaves per batch", "model", "ms to make", "ms to train", "share"), rows)],
        "Making a batch means selecting trees from the data set, looking up positions and building the plan of the "
        "sweeps; threads do this ahead of the step. Training means forward and backward of one layer of width 128, "
        "without the optimizer.",
    )
