"""How a model is trained: the options of `hsa train` and of recipes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from hsa.baselines.hat.layouts import layout_pattern
from hsa.errors import InvalidInput
from hsa.nn.alpha_option import AlphaOption, check_alpha
from hsa.registry import FUSIONS

Precision = Literal["no", "bf16", "fp16"]
Schedule = Literal["linear", "cosine", "constant"]
LevelEncoder = Literal["attention", "gru"]


@dataclass(frozen=True)
class TrainingOptions:
    """How long, how fast, how careful.

    Args:
        epochs: Passes over the training data, at most.
        minutes: Time to train, at most, not counting validation; 0 for no limit. The learning rate then falls with the
            larger share of steps and of time.
        learning_rate: The highest one.
        schedule: How the learning rate falls after the warm-up: linear or cosine to zero, or constant.
        warmup: Share of all steps during which the learning rate rises.
        weight_decay: Of AdamW; not for biases, norms and embeddings.
        clip: Gradients are clipped to this norm.
        batch_size: Examples per step, at most.
        batch_tokens: Leaves per step, at most, over all processes; a longer example is a batch of its own.
        patience: Stop after so many epochs without a better validation score (or the same at a lower loss); 0 for never.
        seed: Of the weights, the order of the data, dropout and the split.
        mixed_precision: no, bf16 or fp16.
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
class ModelOptions:
    """The model; its baselines have as many parameters.

    Args:
        width: Of the leaf vectors.
        heads: Of attention.
        head_dim: Channels per head; width / heads by default.
        layers: Of the encoder; of hat in all, of han on every level.
        dropout: On embeddings and residual branches.
        fusion: How heads become one: concatenation, talking (they mix logits and weights), collaborative (one query and key
            projection for all) or over-heads (every leaf weighs its heads).
        shared_dim: For collaborative: channels of the shared queries and keys; half of all heads' by default.
        fusion_penalty: For over-heads: how strongly leaves are kept from all choosing the same head.
        entmax: For hsa and multiscale: attention that leaves out what matters little, by entmax with this α in place of
            softmax: a number from 1 (softmax) to 2 (sparsemax), or learned (for every layer, level and head).
        include_self: Leaves attend to themselves; in the paper they do not.
        near: For multiscale: neighbouring leaf families that are read leaf by leaf, on each side.
        top_k: For multiscale and found: how many more, the best ones.
        windows: Fixed windows of so many leaves, from the leaves up, in place of the data's own tree.
        position_width: Of the position features; 0 for no positions.
        position_input: Also add positions to the leaf vectors.
        pooling: Of a tree's leaves into one vector: mean, max, attention, first or last.
    """

    width: int = 128
    heads: int = 4
    head_dim: int | None = None
    layers: int = 1
    dropout: float = 0.1
    fusion: str = "concatenation"
    shared_dim: int | None = None
    fusion_penalty: float = 0.01
    entmax: AlphaOption = None
    include_self: bool = False
    near: int = 1
    top_k: int = 0
    windows: tuple[int, ...] = ()
    position_width: int = 64
    position_input: bool = False
    pooling: Literal["mean", "max", "attention", "first", "last"] = "mean"

    def __post_init__(self) -> None:
        check_alpha(self.entmax)
        FUSIONS.check(self.fusion)


@dataclass(frozen=True)
class DocumentOptions:
    """What the published document models have beside the sizes of all models.

    Args:
        level_encoder: For han: what encodes the members of a family: attention or gru.
        levels: For han: levels with weights of their own, from the leaves up; those above share the last one's. By default
            as many as half of the documents have, at most 3.
        layout: For hat: where cross-segment layers stand: interleaved, early, late, ad-hoc, a published one (I1, I2, I3,
            EC1, EC2, LC1, LC2), or a pattern such as SSC.
        segment: For hat and transformer-xl: tokens per segment.
        segment_level: For hat: 0 for fixed windows; 1: sentences are the segments, or whatever leaf families are; 2: what is
            above these.
        memory: For transformer-xl: tokens of earlier segments that are remembered.
        test_memory: For transformer-xl: the same after training; as in training by default.
        warm_start: For hat: a BERT or RoBERTa encoder to start from, a folder or a hub name. Its tokenizer reads the texts,
            its weights learn at a tenth of the learning rate.
    """

    level_encoder: LevelEncoder = "attention"
    levels: int | None = None
    layout: str = "interleaved"
    segment: int = 128
    segment_level: int = 0
    memory: int = 128
    test_memory: int | None = None
    warm_start: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("levels", 1), ("segment", 1), ("segment_level", 0), ("memory", 0), ("test_memory", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidInput(name, given=value, expected=f"{least} or more")
        layout_pattern(self.layout, layers=1)  # says what does not fit
        if self.level_encoder not in get_args(LevelEncoder):
            expected = f"one of {', '.join(get_args(LevelEncoder))}"
            raise InvalidInput("level_encoder", given=self.level_encoder, expected=expected)


@dataclass(frozen=True)
class DataOptions:
    """Which data, and how they are read.

    Args:
        text: Columns that hold text.
        label: The column to predict.
        number: Columns that hold numbers.
        image: Columns that hold images: paths, relative to the file, or their bytes.
        task: classification (the label names a class), regression (it is a number), lm (a language model of the texts),
            seq2seq (the label is a text, to be written) or match3 (made-up numbers, of which three are to match).
        validation: A file or folder for validation; without it, a tenth of the data.
        test: A file or folder for the test; without it, a tenth of the data.
        max_tokens: Leaves of an example that are read; the rest is cut off. 0 for all.
        max_family: Sequences of more members than this become windows: a family costs the square of its size. 0 for none.
        vocabulary: Size of the tokenizer that is trained on the texts of DATA, before it is split.
        word_vectors: A file of pre-trained word vectors (GloVe, word2vec); tokens are then words, and their vectors stay.
        encoder: A frozen pre-trained text encoder (T5, e5, BERT, …), a folder or a hub name; its vectors are the leaves.
        image_encoder: A frozen pre-trained image encoder (ViT, …), a folder or a hub name; an image is then one vector.
        language: Of the text, for the sentence splitter.
        skip_bad: Leave out rows and files that cannot be read, and count them, instead of stopping.
    """

    text: tuple[str, ...] = ()
    label: str | None = None
    number: tuple[str, ...] = ()
    image: tuple[str, ...] = ()
    task: Literal["classification", "regression", "lm", "seq2seq", "match3"] = "classification"
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
        steps: How many, each of batch_tokens tokens; 0 for as many as the epochs have.
        evaluate_every: Steps between looks at the validation loss; 0 for ten in all.
        structure: Where families end: windows (fixed numbers of tokens) or text (sentences, paragraphs and chapters too).
        branching: Members per family of the tree, from the leaves up; the last factor repeats.
        sinks: First tokens that every token reads exactly.
        positions: rope, places (in the families of the tree) or both.
        kv_heads: Heads of keys and values; as many as heads by default.
        feed_forward: Inner width of the feed-forward networks; 8/3 of the width by default.
        chunk: For found: tokens whose keys are put in order together.
        group: For found: keys per group.
        max_length: The most tokens that the model will ever read; no limit by default.
        start: A run on the same text to go on from, for example with longer blocks: models begin with its weights.
    """

    context: int = 512
    steps: int = 0
    evaluate_every: int = 0
    structure: Literal["windows", "text"] = "windows"
    branching: tuple[int, ...] = (32, 4)
    sinks: int = 0
    positions: Literal["rope", "places", "both"] = "rope"
    kv_heads: int | None = None
    feed_forward: int | None = None
    chunk: int = 256
    group: int = 8
    max_length: int | None = None
    start: Path | None = None

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
        if self.structure not in ("windows", "text"):
            raise InvalidInput("structure", given=self.structure, expected="windows or text")


@dataclass(frozen=True)
class Seq2SeqOptions:
    """For the task seq2seq: the decoder of the answers.

    Args:
        decoder: How answers attend to themselves: flat, or multiscale with the branching above.
        decoder_layers: Of the decoder; as many as the encoder has by default.
        cross_top_k: Leaf families of the prompt that a token of the answer reads leaf by leaf; all by default.
        max_answer: Tokens of an answer that are read; the rest is cut off.
    """

    decoder: Literal["flat", "multiscale"] = "flat"
    decoder_layers: int | None = None
    cross_top_k: int | None = None
    max_answer: int = 256

    def __post_init__(self) -> None:
        if self.max_answer < 1:
            raise InvalidInput("max_answer", given=self.max_answer, expected="1 or more")


@dataclass(frozen=True)
class Match3Options:
    """For the task match3: the sequences of numbers that are made up.

    Args:
        modulus: Numbers are counted modulo this one. About 0.65 · length² makes half of the answers a yes.
        length: Numbers of a sequence.
        shortest: Training sequences have from so many numbers up to the length: in short ones a match stands out.
        sequences: To train on; a tenth as many more to validate and to test.
    """

    modulus: int = 41
    length: int = 8
    shortest: int = 3
    sequences: int = 50_000

    def __post_init__(self) -> None:
        for name, least in (("modulus", 2), ("length", 1), ("shortest", 1), ("sequences", 10)):
            if getattr(self, name) < least:
                raise InvalidInput(name, given=getattr(self, name), expected=f"{least} or more")
        if self.shortest > self.length:
            raise InvalidInput("shortest", given=self.shortest, expected=f"at most {self.length}, the length")


def decoder_sizes(model: ModelOptions, language: LanguageOptions) -> dict[str, Any]:
    """What options say of a decoder, in the names of `LanguageModelConfig`, whatever it is for."""
    names = ("width", "heads", "dropout", "near", "fusion", "shared_dim", "fusion_penalty")
    shared = {name: getattr(model, name) for name in names}
    own = ("kv_heads", "feed_forward", "branching", "sinks", "positions")
    return {**shared, **{name: getattr(language, name) for name in own}}
