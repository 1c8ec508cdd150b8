"""A saved model on new data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hsa.batch import collate
from hsa.errors import InvalidInput
from hsa.models.classifier import HierarchicalClassifier
from hsa.models.saved import load_model
from hsa.signals.readers.files import SUFFIXES, read_file
from hsa.training.data_set import DataSet, Example, build
from hsa.training.loop import Evaluation, Trainer, make_accelerator
from hsa.training.options import TrainingOptions
from hsa.training.prepare import ROW_SUFFIXES, Reading, load_reading
from hsa.training.sources import ImageReader

OnBad = Callable[[InvalidInput], None]


@dataclass(frozen=True)
class Prediction:
    """What a model says about one example."""

    where: str
    label: str | float
    probability: float | None  # of the class; None for numbers
    runner_up: str | None = None


@dataclass(frozen=True, eq=False)
class Saved:
    """A model with its classes and its way of reading data."""

    model: HierarchicalClassifier
    classes: tuple[str, ...]
    reading: Reading
    transform: Any = None

    @staticmethod
    def load(folder: Path, device: torch.device | str = "cpu") -> Saved:
        """From the folder of a model that `hsa train` wrote."""
        if not folder.is_dir():
            raise InvalidInput(str(folder), given="no such folder", expected="a model, as hsa train writes it")
        model, classes = load_model(folder, device)
        reading = load_reading(folder)
        transform = None
        if reading.encoder is not None:
            from hsa.huggingface.encoders import TextEncoder

            transform = TextEncoder(reading.encoder).token_vectors
        return Saved(model, classes, reading, transform)

    def data_set(self, path: Path, on_bad: OnBad) -> DataSet:
        """Labelled data of the kind the model was trained on."""
        source = self.reading.source(path, labelled=True)
        return build(self.reading.examples(source, on_bad), self.model.config.task, self.classes or None)

    def evaluate(self, data: DataSet) -> Evaluation:
        """Scores on labelled data."""
        options = TrainingOptions()
        accelerator = make_accelerator(options, cpu=next(self.model.parameters()).device.type == "cpu")
        return Trainer(self.model, data, data, options, accelerator=accelerator, transform=self.transform).evaluate(
            data
        )

    @torch.no_grad()
    def predict(self, path: Path, on_bad: OnBad, batch: int = 32) -> Iterator[Prediction]:
        """One prediction per row of a file of rows, or per file."""
        waiting: list[Example] = []
        for example in self._unlabelled(path, on_bad):
            waiting.append(example)
            if len(waiting) == batch:
                yield from self._say(waiting)
                waiting = []
        if waiting:
            yield from self._say(waiting)

    def _unlabelled(self, path: Path, on_bad: OnBad) -> Iterator[Example]:
        reading = self.reading
        if reading.kind == "rows":
            if path.suffix.lower() not in ROW_SUFFIXES:
                raise InvalidInput(str(path), given="a file without rows", expected=f"one of {', '.join(ROW_SUFFIXES)}")
            yield from reading.examples(reading.source(path, labelled=False), on_bad)
            return
        if not path.exists():
            raise InvalidInput(str(path), given="no such file or folder", expected="a file, or a folder of files")
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
        yield from reading.examples(_Files(files, reading.columns.language, reading.image_reader()), on_bad)

    def _say(self, examples: list[Example]) -> Iterator[Prediction]:
        batch = collate([example.signal for example in examples], self.model.config.modalities)
        batch = batch.to(next(self.model.parameters()).device)
        out = self.model(batch if self.transform is None else self.transform(batch)).float().cpu()
        if not self.classes:
            for example, number in zip(examples, out.tolist(), strict=True):
                yield Prediction(example.where, number, None)
            return
        chances = out.softmax(-1).numpy()
        for example, row in zip(examples, chances, strict=True):
            best, second = np.argsort(-row)[:2].tolist()
            yield Prediction(example.where, self.classes[best], float(row[best]), self.classes[second])


@dataclass(frozen=True)
class _Files:
    """Files without labels as a source."""

    files: list[Path]
    language: str
    image_reader: ImageReader

    def texts(self) -> Iterator[str]:
        return iter(())

    def examples(self, tokenizer: Any, on_bad: OnBad) -> Iterator[Example]:
        for file in self.files:
            try:
                signal = read_file(file, tokenizer, self.language, image_reader=self.image_reader)
                yield Example(signal, "", str(file))
            except InvalidInput as error:
                on_bad(error)

    def fingerprint(self) -> str:
        return ""
