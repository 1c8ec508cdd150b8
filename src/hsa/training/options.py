"""Options of training, data and tasks, with their defaults. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from hsa.errors import InvalidInput
from hsa.registry import Registry
from hsa.table_format import TableFormat

Precision = Literal["no", "bf16", "fp16"]
Schedule = Literal["linear", "cosine", "constant"]


@dataclass(frozen=True)
class TrainingOptions:
    """Optimisation settings.

    Args:
        epochs: Maximum number of passes over the training data.
        minutes: Maximum training time in minutes, without validation; 0 for no limit. The learning rate then decays with
            the steps or with the time, whichever is further along.
        learning_rate: Peak learning rate.
        schedule: Decay of the learning rate after the warm-up: linear or cosine to zero, or constant.
        warmup: Share of all steps over which the learning rate rises.
        weight_decay: Weight decay of AdamW. Biases, norms and embeddings are not decayed.
        clip: Maximum norm of the gradients; larger ones are scaled down.
        batch_size: Maximum number of examples per step.
        batch_tokens: Maximum number of leaves per step, over all processes. A longer example is a batch of its own.
        patience: Epochs without improvement (a higher validation score, or the same at a lower loss) before training stops;
            0 to never stop early.
        seed: Random seed of the weights, the order of the data, dropout and the split.
        mixed_precision: Precision of matrix products: no (float32), bf16 or fp16.
        checkpoint_minutes: Minutes between checkpoints; one is also saved after every epoch.
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
                raise InvalidInput(name, got=getattr(self, name), expected="more than 0")
        for name in ("patience", "weight_decay", "seed", "minutes"):
            if not getattr(self, name) >= 0:
                raise InvalidInput(name, got=getattr(self, name), expected="0 or more")
        if not 0 <= self.warmup < 1:
            raise InvalidInput("warmup", got=self.warmup, expected="a share: 0 or more and less than 1")
        for name, allowed in (("schedule", Schedule), ("mixed_precision", Precision)):
            if getattr(self, name) not in get_args(allowed):
                raise InvalidInput(name, got=getattr(self, name), expected=f"one of {', '.join(get_args(allowed))}")


@dataclass(frozen=True)
class DataOptions(TableFormat):
    """Options of the data.

    Args:
        text: Columns that hold text.
        label: Column to predict.
        number: Columns that hold numbers.
        image: Columns that hold images: paths relative to the file, or the bytes.
        example: Built-in data to use without DATA: listops (values of nested expressions, which are generated) or python
            (packages of the Python standard library). `hsa train` uses listops by default, `hsa compare` python.
        task: Task: classification (the label names a class), regression (the label is a number), lm (a language model of the
            texts), seq2seq (the label is a text to generate), or match3 (a study on generated numbers: does a number match
            two others?).
        validation: File or folder for validation; a tenth of the data by default.
        test: File or folder for the test; a tenth of the data by default.
        max_tokens: Maximum number of leaves per example; the rest is cut off. 0 for no limit.
        max_family: Maximum number of members per family; longer sequences are split into windows, because the cost of a
            family grows with the square of its size. 0 for no limit.
        vocabulary: Vocabulary size of the tokenizer, which is trained on all texts of DATA before the split.
        word_vectors: File of pre-trained word vectors (GloVe, word2vec). Tokens are then words, and the vectors are frozen.
        encoder: Frozen pre-trained text encoder (T5, e5, BERT, …): a folder or a hub name. Its vectors are the leaves.
        image_encoder: Frozen pre-trained image encoder (ViT, …): a folder or a hub name. An image is then one leaf.
        language: Language of the texts, for the sentence splitter.
        skip_bad: Skip rows and files that cannot be read, and report their number, instead of stopping.
    """

    text: tuple[str, ...] = ()
    label: str | None = None
    number: tuple[str, ...] = ()
    image: tuple[str, ...] = ()
    example: str | None = None
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
    """Options of the task lm: the language model, and the blocks of text it is trained on.

    Args:
        context: Number of tokens per training block, the longest context seen in training.
        steps: Number of steps of --batch-tokens tokens each; 0 to train for --epochs.
        evaluate_every: Number of steps between validations; 0 for ten validations in total.
        tree: Boundaries of families: windows (fixed numbers of tokens) or text (also sentences, paragraphs and chapters).
        branching: Members per family of the tree, from the leaves up; the last number repeats. For clustered: keys per
            group, groups per node, nodes per chunk. 8 8 4 by default for clustered, 32 4 for multiscale.
        sinks: For multiscale: number of first tokens that every token attends to exactly.
        positions: Position encoding: rope, tree (positions in the families of the tree) or both.
        kv_heads: Number of key and value heads; the number of heads by default.
        feed_forward: Inner width of the feed-forward networks; 8/3 of the width by default.
        threshold: For clustered: share of a token's attention from which it reads a group of keys exactly; smaller is more
            exact. 1/256 by default, unless --top-k is set.
        tile: For clustered: number of consecutive tokens that open groups together. At most the keys of a chunk.
        max_length: Maximum number of tokens the model will ever read; no limit by default.
        init_from: Folder of a run on the same text to take the initial weights from, for example to continue with longer
            blocks.
    """

    context: int = 512
    steps: int = 0
    evaluate_every: int = 0
    tree: Literal["windows", "text"] = "windows"
    branching: tuple[int, ...] = ()
    sinks: int = 0
    positions: Literal["rope", "tree", "both"] = "rope"
    kv_heads: int | None = None
    feed_forward: int | None = None
    threshold: float | None = None
    tile: int = 64
    max_length: int | None = None
    init_from: Path | None = None

    def __post_init__(self) -> None:
        if self.context < 2:
            raise InvalidInput("context", got=self.context, expected="2 or more")
        for name in ("steps", "evaluate_every"):
            if getattr(self, name) < 0:
                raise InvalidInput(name, got=getattr(self, name), expected="0 or more")
        if self.max_length is not None and self.max_length < self.context:
            raise InvalidInput(
                "max_length", got=self.max_length, expected=f"{self.context} (the context in training) or more"
            )
        if self.tree not in ("windows", "text"):
            raise InvalidInput("tree", got=self.tree, expected="windows or text")


@dataclass(frozen=True)
class Seq2SeqOptions:
    """Options of the task seq2seq: the decoder that writes the answers.

    Args:
        decoder_attention: Self-attention of the answers: flat, or multiscale (over a tree with --branching).
        decoder_layers: Number of decoder layers; the number of encoder layers by default.
        cross_top_k: Number of leaf families of the prompt that a token of the answer attends to leaf by leaf; all by
            default.
        max_answer: Maximum number of tokens per answer in training; the rest is cut off.
    """

    decoder_attention: Literal["flat", "multiscale"] = "flat"
    decoder_layers: int | None = None
    cross_top_k: int | None = None
    max_answer: int = 256

    def __post_init__(self) -> None:
        if self.max_answer < 1:
            raise InvalidInput("max_answer", got=self.max_answer, expected="1 or more")


class ExtraOptions(Protocol):
    """A dataclass of options that a plug-in adds to `hsa train` and to recipes."""

    def check_models(self, names: Sequence[str]) -> None:
        """Raise an error if an option is set that none of the models uses."""


EXTRA_OPTIONS: Registry[type[Any]] = Registry("options")
"""Groups of plug-in options by name; each is an `ExtraOptions`."""
