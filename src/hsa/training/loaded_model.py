"""`LoadedModel`: the base class of what `hsa.load` returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from hsa.attention.checks import check_count
from hsa.errors import InvalidInput
from hsa.models.saved import with_article
from hsa.signals.signal import Signal
from hsa.training.data.data_set import Example
from hsa.training.data.prepare import InputSpec
from hsa.training.data.sources import OnBad
from hsa.training.raw_inputs import Inputs, is_single, raise_error, read_inputs

if TYPE_CHECKING:
    from hsa.generation.text_stream import TextStream


@dataclass(frozen=True)
class Prediction:
    """Prediction of a model for one example.

    Attributes:
        where: Name of the example: the row of a file, a file, or an index.
        label: Class, number or answer.
        probability: Probability of the class; None for numbers and answers.
        runner_up: Second most likely class.
        probabilities: Probability of every class; empty for numbers and answers.
    """

    where: str
    label: str | float
    probability: float | None = None
    runner_up: str | None = None
    probabilities: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of_class(where: str, classes: Sequence[str], probabilities: Sequence[float]) -> Prediction:
        """Return the prediction of the most likely class."""
        by_class = dict(zip(classes, probabilities, strict=True))
        best, second = sorted(by_class, key=lambda name: -by_class[name])[:2]
        return Prediction(where, best, by_class[best], second, by_class)


class LoadedModel:
    """A trained model together with its tokenizer and its classes. Made by `hsa.load`.

    Classifiers and regression models have `predict` and `embed`, classifiers also `predict_proba`; encoder–decoders have
    `predict`; language models have `generate` and `stream`. Any other call raises `InvalidInput`.

    Attributes:
        folder: Folder of the model.
        model: The module, in `eval` mode.
        tokenizer: Its `tokenizers.Tokenizer`; None if the model reads no text.
        classes: Names of the classes, in the order of the columns of `predict_proba`; empty for other models.
        input_spec: How the model reads data; None for models of language and of transformers.
    """

    kind: ClassVar[str]
    methods: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        tokenizer: Any,
        classes: tuple[str, ...] = (),
        input_spec: InputSpec | None = None,
    ):
        self.folder, self.tokenizer, self.classes, self.input_spec = folder, tokenizer, classes, input_spec
        self.model: Any = model

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r})"

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    def to(self, device: torch.device | str) -> Self:
        """Move the model to a device."""
        self.model.to(device)
        return self

    def predict(self, inputs: Inputs, *, batch_size: int = 32) -> Any:
        """Return the class, number or answer of every input.

        Args:
            inputs: A text, a row (a dictionary of columns), or a list of them; or a `pathlib.Path` of a file of rows, or the
                result of `hsa.signals.load_rows`. A model that was trained on a folder of files takes texts, paths of files
                and the path of a folder.
            batch_size: Number of inputs that the model reads at once.

        Returns:
            One result for one text, row or document; a list, in the order of the inputs, for a list, a file of rows or a
            folder.

        Raises:
            InvalidInput: For inputs that the model was not trained to read, such as a row without one of its columns or an
                empty text; the message names the input.
        """
        labels = [p.label for p in self.predictions(inputs, on_bad=raise_error, batch_size=batch_size)]
        return self._one_or_all(inputs, labels)

    def predictions(self, inputs: Inputs, *, on_bad: OnBad, batch_size: int = 32) -> Iterator[Prediction]:
        """Return an iterator over predictions with their probabilities; see `predict`.

        Args:
            on_bad: Function that is called with the error of each input that cannot be read: it raises, or the input is
                left out.
        """
        raise self._refusal("predict", "a classifier, a regression model or an encoder–decoder")

    def predict_proba(self, inputs: Inputs, *, batch_size: int = 32) -> Tensor:
        """Return the probabilities of the classes, `[inputs, classes]`, or `[classes]` for one input; see `predict`."""
        raise self._refusal("predict_proba", "a classifier")

    def embed(self, inputs: Inputs, *, batch_size: int = 32) -> Tensor:
        """Return a vector per input, `[inputs, width]`, or `[width]` for one input; see `predict`."""
        raise self._refusal("embed", "a classifier or a regression model of hsa train")

    def generate(
        self,
        prompt: str | Iterable[str],
        *,
        max_new_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
    ) -> Any:
        """Continue a text.

        Args:
            prompt: Text to continue, or a list of texts.
            max_new_tokens: Maximum number of tokens to generate. The end of a document ends the text too.
            temperature: 0 takes the most likely token each time; higher values vary more.
            top_k: Number of most likely tokens to draw from; 0 for all.
            top_p: Draw from the most likely tokens that together have this probability; 1 for all.
            seed: Random seed; the same seed gives the same text.
            stop: Strings that end the text; they are left out.

        Returns:
            The new text, without the prompt; a list of texts for a list of prompts.
        """
        own: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k}
        own |= {"top_p": top_p, "seed": seed, "stop": stop}
        if isinstance(prompt, str) or not isinstance(prompt, Iterable):
            return "".join(self.stream(prompt, **own))
        return ["".join(self.stream(text, **own)) for text in prompt]

    def stream(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
    ) -> TextStream:
        """Return an iterator over the text that `generate` returns, in pieces, as they are generated."""
        raise self._refusal("generate", "a language model")

    def _examples(self, inputs: Inputs, on_bad: OnBad, batch_size: int) -> Iterator[list[Example]]:
        """Yield the examples in batches."""
        batch_size = check_count("batch_size", batch_size, "1 or more", 1)
        assert self.input_spec is not None
        examples = self._readable(read_inputs(self.input_spec, inputs, on_bad), on_bad)
        while some := list(islice(examples, batch_size)):
            yield some

    def _readable(self, examples: Iterable[Example], on_bad: OnBad) -> Iterator[Example]:
        """Yield the examples whose leaves have modalities that the model was trained on."""
        known = tuple(self.model.config.modalities)
        for example in examples:
            signal = example.signal
            modalities = signal.modalities if isinstance(signal, Signal) else (signal.modality,)
            unknown = [name for name in modalities if name not in known]
            if unknown:
                got, expected = (
                    f"leaves of modality {unknown[0]!r}",
                    f"modalities of the training data: {', '.join(known)}",
                )
                on_bad(InvalidInput(example.where, got=got, expected=expected))
            else:
                yield example

    def _one_or_all(self, inputs: Inputs, results: Any) -> Any:
        return results[0] if self._is_single(inputs) else results

    def _is_single(self, inputs: Inputs) -> bool:
        assert self.input_spec is not None
        return is_single(self.input_spec, inputs)

    def _refusal(self, method: str, expected: str) -> InvalidInput:
        *most, last = self.methods
        names = f"{', '.join(most)} or {last}" if most else last
        return InvalidInput(
            method, got=f"{with_article(self.kind)}, {self.folder}", expected=expected, fix=f"Use {names}"
        )


def check_tokenizer(folder: Path, tokenizer: Any, tokens: int) -> None:
    """Raise unless the tokenizer has as many tokens as the model has vectors for.

    Args:
        folder: Folder of the model, for the error.
        tokens: Number of tokens that the model knows.
    """
    size = 0 if tokenizer is None else tokenizer.get_vocab_size()
    if size != tokens:
        raise InvalidInput(
            str(folder / "tokenizer.json"),
            got=f"a tokenizer of {size:,} tokens",
            problem=None if size else "no such file",
            expected=f"the model's own tokenizer, of {tokens:,} tokens",
            fix="Copy the whole folder of a model, as hsa train wrote it",
        )
