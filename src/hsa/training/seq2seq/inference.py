"""A saved encoder–decoder on new prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from hsa.errors import InvalidInput
from hsa.models.saved import SEQ2SEQ, kind_of, load_seq2seq
from hsa.models.seq2seq import Seq2Seq
from hsa.signals.batch import collate
from hsa.training.data.prepare import InputSpec, load_input_spec
from hsa.training.data.sources import OnBad
from hsa.training.inference import Prediction


def is_seq2seq(folder: Path) -> bool:
    """Whether a folder holds an encoder–decoder."""
    return kind_of(folder) == SEQ2SEQ


@dataclass(frozen=True, eq=False)
class SavedSeq2Seq:
    """A model and its way of reading prompts."""

    model: Seq2Seq
    input_spec: InputSpec

    @staticmethod
    def load(folder: Path, device: torch.device | str = "cpu") -> SavedSeq2Seq:
        """From the folder of a model that `hsa train --task seq2seq` wrote."""
        model, spec = load_seq2seq(folder, device), load_input_spec(folder)
        size = 0 if spec.tokenizer is None else spec.tokenizer.get_vocab_size()
        if size + 2 != model.config.decoder.vocabulary:
            raise InvalidInput(
                str(folder / "tokenizer.json"),
                given=f"a tokenizer of {size:,} tokens" if size else "no such file",
                expected=f"the model's own, of {model.config.decoder.vocabulary - 2:,} tokens",
                fix="copy the whole folder of a model, as hsa train wrote it",
            )
        return SavedSeq2Seq(model, spec)

    def predict(self, path: Path, on_bad: OnBad, batch: int = 32, max_new_tokens: int = 256) -> Iterator[Prediction]:
        """The answer to every row of a table."""
        examples = self.input_spec.examples(self.input_spec.source(path, labelled=False), on_bad)
        while some := list(islice(examples, batch)):
            prompts = collate([example.signal for example in some]).to(self.model.device)
            answers = self.model.generate(prompts, max_new_tokens=max_new_tokens)
            for example, answer in zip(some, answers, strict=True):
                words = [token for token in answer if token != self.model.config.start]
                yield Prediction(example.where, self.input_spec.tokenizer.decode(words), None)
