"""`LoadedSeq2Seq`: a saved encoder–decoder on new prompts."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import torch

from hsa.models.folders import model_folder
from hsa.models.saved import SEQ2SEQ, load_seq2seq
from hsa.models.seq2seq import Seq2Seq
from hsa.signals.batch import collate
from hsa.training.data.prepare import InputSpec, load_input_spec
from hsa.training.data.sources import OnBad
from hsa.training.loaded_model import LoadedModel, Prediction, check_tokenizer
from hsa.training.raw_inputs import Inputs, raise_error


class LoadedSeq2Seq(LoadedModel):
    """An encoder–decoder that reads prompts and writes answers."""

    kind: ClassVar[str] = SEQ2SEQ
    methods: ClassVar[tuple[str, ...]] = ("predict",)
    model: Seq2Seq
    input_spec: InputSpec

    @classmethod
    def load(cls, folder: str | PathLike[str], device: torch.device | str = "cpu") -> LoadedSeq2Seq:
        """Load the model of a folder that `hsa train --task seq2seq` wrote, or the first model of a run.

        Raises:
            InvalidInput: For a file that is missing, damaged or of another kind of model.
        """
        folder = model_folder(Path(folder))
        model, spec = load_seq2seq(folder, device), load_input_spec(folder)
        check_tokenizer(folder, spec.tokenizer, model.config.decoder.vocabulary - 2)  # start and end have no text
        return cls(folder, model, spec.tokenizer, (), spec)

    def predict(self, inputs: Inputs, *, batch_size: int = 32, max_new_tokens: int = 256) -> Any:
        """Return the answer to every prompt.

        Args:
            inputs: A prompt, a row (a dictionary with the column of the prompts), or a list of them; or a `pathlib.Path` of
                a file of rows.
            batch_size: Number of prompts that the model answers at once.
            max_new_tokens: Maximum number of tokens of an answer.

        Returns:
            One answer for one prompt, else a list of answers in the order of the inputs.
        """
        answers = self.predictions(inputs, on_bad=raise_error, batch_size=batch_size, max_new_tokens=max_new_tokens)
        return self._one_or_all(inputs, [answer.label for answer in answers])

    def predictions(
        self, inputs: Inputs, *, on_bad: OnBad, batch_size: int = 32, max_new_tokens: int = 256
    ) -> Iterator[Prediction]:
        """Yield an answer per prompt."""
        for examples in self._examples(inputs, on_bad, batch_size):
            prompts = collate([example.signal for example in examples]).to(self.device)
            answers = self.model.generate(prompts, max_new_tokens=max_new_tokens)
            for example, answer in zip(examples, answers, strict=True):
                tokens = [token for token in answer if token != self.model.config.start]
                yield Prediction(example.where, self.tokenizer.decode(tokens))
