"""A saved model on new data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hsa.errors import InvalidInput
from hsa.models.classifier import Classifier
from hsa.models.saved import CONFIG, load_model
from hsa.signals import Signal
from hsa.signals.batch import collate
from hsa.signals.readers.files import SUFFIXES
from hsa.training.accelerator import make_accelerator
from hsa.training.data.data_set import DataSet, Example, build
from hsa.training.data.prepare import ROW_SUFFIXES, InputSpec, load_input_spec
from hsa.training.data.sources import Files
from hsa.training.loop import Evaluation, Trainer
from hsa.training.options import TrainingOptions

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

    model: Classifier
    classes: tuple[str, ...]
    input_spec: InputSpec

    @staticmethod
    def load(folder: Path, device: torch.device | str = "cpu") -> Saved:
        """From the folder of a model that `hsa train` wrote."""
        if not folder.is_dir():
            raise InvalidInput(str(folder), given="no such folder", expected="a model, as hsa train writes it")
        inside = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
        if inside and not (folder / CONFIG).exists():
            raise InvalidInput(
                str(folder), given="a folder of models", expected=f"one of {', '.join(map(str, inside))}"
            )
        model, classes = load_model(folder, device)
        spec = load_input_spec(folder)
        if spec.kind == "generated":
            raise InvalidInput(
                str(folder),
                given="a model of generated data",
                expected="a model that reads data",
                fix="its scores are in the report of its run, beside this folder",
            )
        _check_tokenizer(folder, model, spec)
        return Saved(model, classes, spec)

    def data_set(self, path: Path, on_bad: OnBad) -> DataSet:
        """Labelled data of the kind the model was trained on."""
        source = self.input_spec.source(path, labelled=True)
        examples = self._readable(self.input_spec.examples(source, on_bad), on_bad)
        return build(examples, self.model.config.task, self.classes or None)

    def _readable(self, examples: Iterable[Example], on_bad: OnBad) -> Iterator[Example]:
        """Those whose leaves are of kinds that the model was trained on."""
        known = tuple(self.model.config.modalities)
        for example in examples:
            signal = example.signal
            modalities = signal.modalities if isinstance(signal, Signal) else (signal.modality,)
            unknown = [name for name in modalities if name not in known]
            if unknown:
                given, expected = (
                    f"leaves of modality {unknown[0]!r}",
                    f"what the model was trained on: {', '.join(known)}",
                )
                on_bad(InvalidInput(example.where, given=given, expected=expected))
            else:
                yield example

    def evaluate(self, data: DataSet) -> Evaluation:
        """Scores on labelled data."""
        options = TrainingOptions()
        accelerator = make_accelerator(options, cpu=next(self.model.parameters()).device.type == "cpu")
        transform = self.input_spec.transform
        return Trainer(self.model, data, data, options, accelerator=accelerator, transform=transform).evaluate(data)

    @torch.no_grad()
    def predict(self, path: Path, on_bad: OnBad, batch: int = 32) -> Iterator[Prediction]:
        """One prediction per row of a file of rows, or per file."""
        waiting: list[Example] = []
        for example in self._readable(self._unlabelled(path, on_bad), on_bad):
            waiting.append(example)
            if len(waiting) == batch:
                yield from self._say(waiting)
                waiting = []
        if waiting:
            yield from self._say(waiting)

    def _unlabelled(self, path: Path, on_bad: OnBad) -> Iterator[Example]:
        spec = self.input_spec
        if spec.kind == "rows":
            if path.exists() and (path.is_dir() or path.suffix.lower() not in ROW_SUFFIXES):
                given = "a folder" if path.is_dir() else f"a {path.suffix or 'nameless'} file"
                expected = f"rows, as the model was trained on: one of {', '.join(ROW_SUFFIXES)}"
                raise InvalidInput(str(path), given=given, expected=expected)
            yield from spec.examples(spec.source(path, labelled=False), on_bad)
            return
        if not path.exists():
            raise InvalidInput(str(path), given="no such file or folder", expected="a file, or a folder of files")
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
        if not files:
            raise InvalidInput(str(path), given="no files to read", expected=f"some of {', '.join(sorted(SUFFIXES))}")
        unlabelled = Files([("", file) for file in files], spec.columns.language, spec.image_reader())
        yield from spec.examples(unlabelled, on_bad)

    def _say(self, examples: list[Example]) -> Iterator[Prediction]:
        batch = collate([example.signal for example in examples], self.model.config.modalities)
        batch = batch.to(next(self.model.parameters()).device)
        transform = self.input_spec.transform
        out = self.model(batch if transform is None else transform(batch)).float().cpu()
        if not self.classes:
            for example, number in zip(examples, out.tolist(), strict=True):
                yield Prediction(example.where, number, None)
            return
        chances = out.softmax(-1).numpy()
        for example, row in zip(examples, chances, strict=True):
            best, second = np.argsort(-row)[:2].tolist()
            yield Prediction(example.where, self.classes[best], float(row[best]), self.classes[second])


def _check_tokenizer(folder: Path, model: Classifier, input_spec: InputSpec) -> None:
    """The ids of its tokens are rows of the model's table."""
    text = model.config.modalities.get("text")
    if text is None or not text.tokens:
        return
    size = 0 if input_spec.tokenizer is None else input_spec.tokenizer.get_vocab_size()
    if size != text.tokens:
        raise InvalidInput(
            str(folder / "tokenizer.json"),
            given=f"a tokenizer of {size:,} tokens" if size else "no such file",
            expected=f"the model's own, of {text.tokens:,} tokens",
            fix="copy the whole folder of a model, as hsa train wrote it",
        )
