"""`LoadedClassifier`: a saved classifier or regression model on new data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from hsa.errors import InvalidInput
from hsa.models.classifier import Classifier
from hsa.models.folders import model_folder
from hsa.models.saved import CLASSIFIER, load_model
from hsa.signals.batch import collate
from hsa.signals.readers.rows import Rows
from hsa.training.accelerator import make_accelerator
from hsa.training.data.data_set import DataSet, Example, build
from hsa.training.data.prepare import InputSpec, load_input_spec
from hsa.training.data.sources import OnBad
from hsa.training.loaded_model import LoadedModel, Prediction, check_tokenizer
from hsa.training.loop import Evaluation, Trainer
from hsa.training.options import TrainingOptions
from hsa.training.raw_inputs import Inputs, raise_error


class LoadedClassifier(LoadedModel):
    """A classifier or a regression model that reads raw texts, rows and files.

    >>> import tempfile
    >>> from hsa.models import Classifier, ModelConfig, save_model
    >>> from hsa.nn import EncoderConfig, Modality
    >>> from hsa.signals import train_tokenizer
    >>> from hsa.training.data.prepare import save_input_spec
    >>> from hsa.training.data.sources import Columns
    >>> tokenizer = train_tokenizer(["good film", "bad film"], 260)
    >>> text = Modality(tokens=tokenizer.get_vocab_size())
    >>> with tempfile.TemporaryDirectory() as folder:  # the files that hsa train writes
    ...     save_model(folder, Classifier(ModelConfig(EncoderConfig(width=8), {"text": text}, 2)), ("neg", "pos"))
    ...     save_input_spec(Path(folder), InputSpec("rows", Columns(text=("review",)), 512, 128, tokenizer))
    ...     model = LoadedClassifier.load(folder)
    >>> model.predict("good film") in model.classes
    True
    >>> model.predict_proba(["good film", "bad film", "film"]).shape, model.embed([{"review": "good film"}]).shape
    (torch.Size([3, 2]), torch.Size([1, 8]))
    """

    kind: ClassVar[str] = CLASSIFIER
    model: Classifier
    input_spec: InputSpec

    @classmethod
    def load(cls, folder: str | PathLike[str], device: torch.device | str = "cpu") -> LoadedClassifier:
        """Load the model of a folder that `hsa train` wrote, or the first model of a run.

        Raises:
            InvalidInput: For a file that is missing, damaged or of another kind of model.
        """
        folder = model_folder(Path(folder))
        model, classes = load_model(folder, device)
        spec = load_input_spec(folder)
        if spec.kind == "generated":
            raise InvalidInput(
                str(folder),
                got="a model of generated data",
                expected="a model that reads data",
                fix="Its scores are in the report of its run, beside this folder",
            )
        text = model.config.modalities.get("text")
        if text is not None and text.tokens:
            check_tokenizer(folder, spec.tokenizer, text.tokens)
        if not classes and model.config.task == "classification":
            classes = tuple(map(str, range(model.config.outputs)))
        return cls(folder, model, spec.tokenizer, classes, spec)

    @property
    def methods(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("predict", "predict_proba", "embed") if self.classes else ("predict", "embed")

    def predictions(self, inputs: Inputs, *, on_bad: OnBad, batch_size: int = 32) -> Iterator[Prediction]:
        """Yield a prediction per input."""
        for examples in self._examples(inputs, on_bad, batch_size):
            yield from self._label(examples)

    def predict_proba(self, inputs: Inputs, *, batch_size: int = 32) -> Tensor:
        """Return the probabilities of the classes.

        Args:
            inputs, batch_size: As in `predict`.

        Returns:
            `[inputs, classes]` on the CPU, or `[classes]` for one input; `classes` names the columns.

        Raises:
            InvalidInput: For a regression model, and as `predict`.
        """
        if not self.classes:
            raise InvalidInput(
                "predict_proba", got=f"a regression model, {self.folder}", expected="a classifier", fix="Use predict"
            )
        return self._stacked(self._probabilities, inputs, batch_size, len(self.classes))

    def embed(self, inputs: Inputs, *, batch_size: int = 32) -> Tensor:
        """Return document vectors: the pooled leaves of each input, which the head of the model reads.

        Args:
            inputs, batch_size: As in `predict`.

        Returns:
            `[inputs, width]` on the CPU, or `[width]` for one input.
        """
        return self._stacked(self._vectors, inputs, batch_size, self.model.config.encoder.width)

    def data_set(self, data: Path | Rows, on_bad: OnBad) -> DataSet:
        """Read labelled data of the kind that the model was trained on; `on_bad` is called for a bad row or file."""
        source = self.input_spec.source(data, labelled=True)
        examples = self._readable(self.input_spec.examples(source, on_bad), on_bad)
        return build(examples, self.model.config.task, self.classes or None)

    def evaluate(self, data: DataSet) -> Evaluation:
        """Score the model on labelled data."""
        options = TrainingOptions()
        accelerator = make_accelerator(options, cpu=self.device.type == "cpu")
        transform = self.input_spec.transform
        return Trainer(self.model, data, data, options, accelerator=accelerator, transform=transform).evaluate(data)

    def _stacked(
        self, compute: Callable[[list[Example]], Tensor], inputs: Inputs, batch_size: int, width: int
    ) -> Tensor:
        rows = [torch.empty(0, width), *map(compute, self._examples(inputs, raise_error, batch_size))]
        stacked: Tensor = self._one_or_all(inputs, torch.cat(rows))
        return stacked

    @torch.no_grad()
    def _outputs(self, examples: list[Example], function: Callable[..., Tensor]) -> Tensor:
        batch = collate([example.signal for example in examples], self.model.config.modalities).to(self.device)
        transform = self.input_spec.transform
        try:
            return function(batch if transform is None else transform(batch)).float().cpu()
        except InvalidInput as error:  # a tree of a kind that the model was not trained on
            if len(examples) == 1:
                fix = "Pass data of the kind that the model was trained on"
                raise error.moved(examples[0].where, fix=fix) from None
        return torch.cat([self._outputs([example], function) for example in examples])

    def _probabilities(self, examples: list[Example]) -> Tensor:
        return self._outputs(examples, self.model).softmax(-1)

    def _vectors(self, examples: list[Example]) -> Tensor:
        return self._outputs(examples, self.model.embed)

    def _label(self, examples: list[Example]) -> Iterator[Prediction]:
        if not self.classes:
            for example, number in zip(examples, self._outputs(examples, self.model).tolist(), strict=True):
                yield Prediction(example.where, number)
            return
        for example, row in zip(examples, self._probabilities(examples).tolist(), strict=True):
            yield Prediction.of_class(example.where, self.classes, row)
