"""`LoadedTextClassifier`: a classifier of transformers, exact or converted, on new texts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hsa.attention.checks import check_count
from hsa.errors import InvalidInput
from hsa.files import read_json
from hsa.huggingface.conversion import convert, settings_of
from hsa.huggingface.fidelity.examples import Examples, number_labels, rows_of_split, tokenize
from hsa.huggingface.fidelity.judge import BATCH_TOKENS
from hsa.huggingface.loading import load_for_task, most_tokens
from hsa.huggingface.observe import counting
from hsa.huggingface.text_input import TextInput
from hsa.models.folders import model_folder
from hsa.models.saved import CONFIG, TRANSFORMERS
from hsa.signals.readers.rows import Rows, load_rows
from hsa.training.data.sources import OnBad
from hsa.training.loaded_model import LoadedModel, Prediction
from hsa.training.loop import Evaluation
from hsa.training.metrics import class_scores
from hsa.training.raw_inputs import Inputs, check_rows_file, raise_error, values_of

_CHUNK = 512
"""Number of texts that are tokenized together, and batched by length."""
_USUAL_MOST = 4096
"""Maximum number of tokens per text of models without a limit of their own, as in `hsa convert`."""


@dataclass(frozen=True, eq=False)
class LabelledTexts:
    """Texts, or pairs of texts, with the numbers of their classes."""

    texts: list[tuple[str, ...]]
    targets: Tensor
    classes: tuple[str, ...]
    split: str | None  # that the rows were chosen by

    def __len__(self) -> int:
        return len(self.texts)


class LoadedTextClassifier(LoadedModel):
    """A classifier of transformers that reads texts and rows: fine-tuned, or converted to attention over trees.

    Attributes:
        input: Columns that it reads, as its config says, or by their usual names. Set it to read others.
    """

    kind: ClassVar[str] = TRANSFORMERS
    methods: ClassVar[tuple[str, ...]] = ("predict", "predict_proba")
    input: TextInput

    @classmethod
    def load(cls, folder: str | PathLike[str], device: torch.device | str = "cpu") -> LoadedTextClassifier:
        """Load the classifier of a folder in the format of transformers, and convert it if its config says so.

        Raises:
            InvalidInput: For a model without a classification head, with a head of another kind, or damaged files.
        """
        folder = model_folder(Path(folder))
        kinds = read_json(folder / CONFIG, "the configuration of a transformers model").get("architectures") or []
        if kinds and not any(kind.endswith("ForSequenceClassification") for kind in kinds):
            raise InvalidInput(
                str(folder),
                got=f"a transformers model ({kinds[0]})",
                expected="a classifier of transformers, or a model that hsa train wrote",
                fix="Train a classifier from it with hsa finetune, or load it with from_pretrained of transformers",
            )
        model, tokenizer = load_for_task(str(folder), "classification", device=device)
        config = model.config
        if config.num_labels < 2 or config.problem_type == "multi_label_classification":
            several = config.num_labels > 1
            raise InvalidInput(
                str(folder),
                got="a model of several labels per text" if several else "a head with a single output",
                expected="a classifier with one of two or more classes per text",
            )
        if settings_of(model):
            convert(model, tokenizer=tokenizer)
        loaded = cls(folder, model, tokenizer, tuple(config.id2label[i] for i in range(config.num_labels)))
        loaded.input = TextInput.of(model)
        return loaded

    def predictions(self, inputs: Inputs, *, on_bad: OnBad, batch_size: int = 32) -> Iterator[Prediction]:
        """Yield a prediction per input."""
        for names, logits in self._answers(inputs, on_bad, batch_size):
            for where, row in zip(names, logits.softmax(-1).tolist(), strict=True):
                yield Prediction.of_class(where, self.classes, row)

    def predict_proba(self, inputs: Inputs, *, batch_size: int = 32) -> Tensor:
        """Return the probabilities of the classes, `[inputs, classes]`, or `[classes]` for one input."""
        parts = [logits.softmax(-1) for _, logits in self._answers(inputs, raise_error, batch_size)]
        stacked: Tensor = self._one_or_all(inputs, torch.cat([torch.empty(0, len(self.classes)), *parts]))
        return stacked

    def data_set(self, data: Path | Rows, on_bad: OnBad, split: str | None = None) -> LabelledTexts:
        """Read labelled rows; `on_bad` is called for a bad row.

        Args:
            data: File of rows, or its rows.
            on_bad: Function that is called with the error of each row that cannot be read.
            split: Value of the column "split" of the rows to read; by default "validation", else "test", if there is
                such a column.
        """
        rows = self._table(data)
        chosen = rows_of_split(rows, split)
        label = self.input.label or "label"
        if self.input.label is None and label not in rows.columns:
            listed = ", ".join(map(repr, rows.columns))
            raise InvalidInput(
                rows.file,
                problem="no column 'label'",
                expected=f"labels in one of {listed}",
                fix="Name it with --label",
            )
        labels = rows.column(label)
        texts: list[tuple[str, ...]] = []
        targets: list[int] = []
        for index in chosen:
            where = rows.where(index)
            try:
                text = self.input.read(rows.row(index), where)
                targets += self._number(labels[index], where)
            except InvalidInput as error:
                on_bad(error)
                continue
            texts.append(text)
        if not texts:
            raise InvalidInput(rows.file, problem="no rows", expected="at least one that can be read")
        used = None if len(chosen) == len(rows) else str(rows.row(chosen[0])["split"])
        return LabelledTexts(texts, torch.tensor(targets), self.classes, used)

    def evaluate(self, data: LabelledTexts) -> Evaluation:
        """Score the model on labelled texts. Only the operations of converted layers are counted."""
        began = time.monotonic()
        with counting() as counted:
            parts = [
                self._logits(data.texts[begin : begin + _CHUNK], 32) for begin in range(0, len(data.texts), _CHUNK)
            ]
        logits = torch.cat(parts)
        scores = class_scores(logits.argmax(-1).numpy(), data.targets.numpy(), len(self.classes))
        loss = F.cross_entropy(logits, data.targets).item()
        return Evaluation(scores, loss, logits.numpy(), time.monotonic() - began, counted.total)

    def _answers(self, inputs: Inputs, on_bad: OnBad, batch_size: int) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Yield names of inputs and their logits, some at a time."""
        batch_size = check_count("batch_size", batch_size, "1 or more", 1)
        texts = self._texts(inputs, on_bad)
        while some := list(islice(texts, _CHUNK)):
            names, read = zip(*some, strict=True)
            yield names, self._logits(list(read), batch_size)

    def _texts(self, inputs: Inputs, on_bad: OnBad) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield the name and the text of every input that can be read."""
        if isinstance(inputs, (Path, Rows)):
            inputs = self._table(inputs)
        parts = 0
        for where, value in values_of(inputs, self.input.expected):
            try:
                text = self.input.read(value, where)
                parts = parts or len(text)
                if len(text) != parts:
                    raise InvalidInput(where, got=f"{len(text)} texts", expected=f"{parts}, as in the first input")
            except InvalidInput as error:
                on_bad(error)
                continue
            yield where, text

    def _table(self, data: Path | Rows) -> Rows:
        """Return the rows of a file; raise an error that lists its columns if one is missing."""
        if isinstance(data, Path):
            check_rows_file(data)
            data = load_rows(data)
        for name in self.input.columns(data.columns, data.file):
            data.column(name)
        return data

    @torch.no_grad()
    def _logits(self, texts: list[tuple[str, ...]], batch_size: int) -> Tensor:
        longest = min(self.input.max_tokens or _USUAL_MOST, most_tokens(self.model, self.tokenizer))
        tokens = tokenize(Examples("texts", texts), self.tokenizer, longest)
        logits = torch.empty(len(texts), len(self.classes))
        for similar in tokens.batches(max(BATCH_TOKENS, longest)):
            for rows in np.split(similar, range(batch_size, len(similar), batch_size)):
                logits[torch.from_numpy(rows)] = self.model(**tokens.batch(rows, self.device)).logits.float().cpu()
        return logits

    def _number(self, label: Any, where: str) -> list[int]:
        """Return the number of the class that a label names."""
        examples = Examples(where, [("",)], [label])
        numbers: list[int] = number_labels(examples, self.model.config.label2id, len(self.classes)).tolist()
        return numbers

    def _is_single(self, inputs: Inputs) -> bool:
        return isinstance(inputs, (str, Mapping))
