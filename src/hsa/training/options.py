"""Options of training, of data and of tasks: the one place of their defaults. Importing this does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from hsa.errors import InvalidInput
from hsa.registry import Registry

Precision = Literal["no", "bf16", "fp16"]
Schedule = Literal["linear", "cosine", "constant"]


@dataclass(frozen=True)
class TrainingOptions:
    """Optimisation settings.

    Args:
        epochs: Passes over the training data, at most.
        minutes: Time to train, at most, not counting validation; 0 for no limit. The learning rate then falls with the
            larger share of steps and of time.
        learning_rate: Highest learning rate.
        schedule: How the learning rate falls after the warm-up: linear or cosine to zero, or constant.
        warmup: Share of all steps during which the learning rate rises.
        weight_decay: Weight decay of AdamW; biases, norms and embeddings have none.
        clip: Largest norm of the gradients; larger ones are clipped.
        batch_size: Examples per step, at most.
        batch_tokens: Leaves per step, at most, over all processes; a longer example is a batch of its own.
        patience: Epochs without a better validation score (or the same at a lower loss) before training stops; 0 for never.
        seed: Random seed of the weights, the order of the data, dropout and the split.
        mixed_precision: Precision of matrix products: no (float32), bf16 or fp16.
        checkpoint_minutes: Time between checkpoints; there is one after every epoch too.
    """

    epochs: int = 10
    minutes: float = 0.0
    learning_rate: float = 1e-3
    schedule: Schedule = "linear"
    warmup: float = 0.05
    weight_decay: float = 0.01
    clip: float = 1.0
    batch_size: int = 64
    batch_tokens: int = 16_384
    patience: int = 3
    seed: int = 0
    mixed_precision: Precision = "no"
    checkpoint_minutes: float = 5.0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "batch_tokens", "learning_rate", "clip", "checkpoint_minutes"):
            if not getattr(self, name) > 0:
                raise InvalidInput(name, given=getattr(self, name), expected="more than 0")
        for name in ("patience", "weight_decay", "seed", "minutes"):
            if not getattr(self, name) >= 0:
                raise InvalidInput(name, given=getattr(self, name), expected="0 or more")
        if not 0 <= self.warmup < 1:
            raise InvalidInput("warmup", given=self.warmup, expected="a share: 0 or more and less than 1")
        for name, allowed in (("schedule", Schedule), ("mixed_precision", Precision)):
            if getattr(self, name) not in get_args(allowed):
                raise InvalidInput(name, given=getattr(self, name), expected=f"one of {', '.join(get_args(allowed))}")


@dataclass(frozen=True)
class DataOptions:
    """Data and how they are read.

    Args:
        text: Columns that hold text.
        label: Column to predict.
        number: Columns that hold numbers.
        image: Columns that hold images: paths, relative to the file, or their bytes.
        task: classification (the label names a class), regression (it is a number), lm (a language model of the texts),
            seq2seq (the label is a text, to be written), or a task of a study: match3 (generated numbers,
            three of which are to match).
        validation: A file or folder for validation; without it, a tenth of the data.
        test: A file or folder for the test; without it, a tenth of the data.
        max_tokens: Leaves of an example that are read; the rest is cut off. 0 for all.
        max_family: Sequences of more members than this become windows: a family costs the square of its size. 0 for none.
        vocabulary: Size of the tokenizer that is trained on the texts of DATA, before it is split.
        word_vectors: A file of pre-trained word vectors (GloVe, word2vec); tokens are then words, and their vectors stay.
        encoder: A frozen pre-trained text encoder (T5, e5, BERT, …), a folder or a hub name; its vectors are the leaves.
        image_encoder: A frozen pre-trained image encoder (ViT, …), a folder or a hub name; an image is then one vector.
        language: Language of the texts, for the sentence splitter.
        skip_bad: Leave out rows and files that cannot be read, and count them, instead of stopping.
    """

    text: tuple[str, ...] = ()
    label: str | None = None
    number: tuple[str, ...] = ()
    image: tuple[str, ...] = ()
    task: str = "classification"
    validation: Path | None = None
    test: Path | None = None
    max_tokens: int = 512
    max_family: int = 128
    vocabulary: int = 8192
    word_vectors: Path | None = None
    encoder: str | None = None
    image_encoder: str | None = None
    language: str = "en"
    skip_bad: bool = False


@dataclass(frozen=True)
class LanguageOptions:
    """For the task lm: the language model, and the blocks of text it learns from.

    Args:
        context: Tokens of a block: how far the model can look back while it learns.
        steps: Number of steps, each of batch_tokens tokens; 0 for as many as the epochs have.
        evaluate_every: Steps between validations; 0 for ten in all.
        tree: Where families end: windows (fixed numbers of tokens) or text (sentences, paragraphs and chapters too).
        branching: Members per family of the tree, from the leaves up; the last factor repeats.
        sinks: First tokens that every token reads exactly.
        positions: rope, tree (positions in the families of the tree) or both.
        kv_heads: Heads of keys and values; as many as heads by default.
        feed_forward: Inner width of the feed-forward networks; 8/3 of the width by default.
        chunk: For clustered: tokens whose keys are clustered together.
        group: For clustered: keys per group.
        max_length: Most tokens that the model will ever read; no limit by default.
        init_from: Run on the same text whose weights the models start with, for example to train on with longer blocks.
    """

    context: int = 512
    steps: int = 0
    evaluate_every: int = 0
    tree: Literal["windows", "text"] = "windows"
    branching: tuple[int, ...] = (32, 4)
    sinks: int = 0
    positions: Literal["rope", "tree", "both"] = "rope"
    kv_heads: int | None = None
    feed_forward: int | None = None
    chunk: int = 256
    group: int = 8
    max_length: int | None = None
    init_from: Path | None = None

    def __post_init__(self) -> None:
        if self.context < 2:
            raise InvalidInput("context", given=self.context, expected="2 or more")
        for name in ("steps", "evaluate_every"):
            if getattr(self, name) < 0:
                raise InvalidInput(name, given=getattr(self, name), expected="0 or more")
        if self.max_length is not None and self.max_length < self.context:
            raise InvalidInput(
                "max_length", given=self.max_length, expected=f"{self.context} or more, the context that it learns from"
            )
        if self.tree not in ("windows", "text"):
            raise InvalidInput("tree", given=self.tree, expected="windows or text")


@dataclass(frozen=True)
class Seq2SeqOptions:
    """For the task seq2seq: the decoder of the answers.

    Args:
        decoder_attention: How answers attend to themselves: flat, or multiscale with the branching above.
        decoder_layers: Number of layers of the decoder; as many as the encoder has by default.
        cross_top_k: Leaf families of the prompt that a token of the answer reads leaf by leaf; all by default.
        max_answer: Tokens of an answer that are read; the rest is cut off.
    """

    decoder_attention: Literal["flat", "multiscale"] = "flat"
    decoder_layers: int | None = None
    cross_top_k: int | None = None
    max_answer: int = 256

    def __post_init__(self) -> None:
        if self.max_answer < 1:
            raise InvalidInput("max_answer", given=self.max_answer, expected="1 or more")


class ExtraOptions(Protocol):
    """A dataclass of options that a plug-in adds to `hsa train` and to recipes."""

    def check_models(self, names: Sequence[str]) -> None:
        """Raise where an option is given that none of the models uses."""


EXTRA_OPTIONS: Registry[type[Any]] = Registry("options")
"""Groups of options of plug-ins, by name; each is an `ExtraOptions`."""
