"""Preparation of training data: a tokenizer, three data sets, and the description that a model is built from."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from hsa.checksums import check_listed
from hsa.errors import HsaWarning, InvalidInput
from hsa.files import cache_folder, read_json, write_json, write_sealed
from hsa.models.classifier import Task
from hsa.models.saved import TOKENIZER
from hsa.nn.embedding import Modality
from hsa.plain_values import from_plain
from hsa.running import claimed
from hsa.signals import Leaf, Signal
from hsa.signals.batch import Batch
from hsa.signals.domains import Graph, Grid, Sequence, Table
from hsa.signals.readers.image import read_image
from hsa.signals.readers.rows import ROW_SUFFIXES, load_rows
from hsa.signals.readers.rows import Rows as LoadedRows
from hsa.signals.readers.tokens import load_tokenizer
from hsa.signals.windows import in_windows
from hsa.table_format import TableFormat
from hsa.training.data.data_set import DataSet, Example, build, split_at_random
from hsa.training.data.sources import (
    Columns,
    Folders,
    ImageReader,
    NamedSource,
    News,
    Rows,
    Source,
    StandardLibrary,
    digest,
    or_skip,
    stamp,
)
from hsa.training.options import DataOptions

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from hsa.training.recipe import Recipe

SPEC = "input_spec.json"
_KINDS = {Sequence: "sequence", Grid: "grid", Graph: "graph", Table: "table"}


@dataclass(frozen=True, eq=False)
class InputSpec:
    """Description of how data become signals, saved with a model so that it can read new data.

    Attributes:
        kind: Kind of the source; "generated" for data that a task generates.
        columns: Roles of the columns of rows.
        max_tokens: Maximum number of leaves per example; 0 for no limit.
        max_family: Maximum number of members per family; 0 for no limit.
        tokenizer: Tokenizer of the texts; None without texts.
        encoder, image_encoder: Frozen encoders whose vectors are the leaves: a folder or a hub name.
        transform: Function that replaces the token ids of a batch by the vectors of the text encoder.
    """

    kind: Literal["rows", "folders", "python", "news", "generated"]
    columns: Columns
    max_tokens: int
    max_family: int
    tokenizer: Any = None
    encoder: str | None = None
    image_encoder: str | None = None
    transform: Callable[[Batch], Batch] | None = None

    def source(self, data: Path | LoadedRows, *, labelled: bool) -> Source:
        """Open new data of the same kind."""
        if self.kind not in ("rows", "folders"):
            problem = f"the model was trained on data of the kind {self.kind!r}"
            raise InvalidInput(str(data), problem=problem, expected="a model trained on rows or on a folder per class")
        columns = self.columns if labelled else replace(self.columns, label=None)
        if isinstance(data, LoadedRows):
            return Rows(data, columns, self.image_reader())
        return open_source(data, columns, self.image_reader())

    def image_reader(self) -> ImageReader:
        """Return the function that reads images."""
        return _image_reader(self.image_encoder, lambda message: None)

    def examples(self, source: Source, on_bad: Callable[[InvalidInput], None]) -> Iterator[Example]:
        """Yield the examples of a source, cut to `max_tokens` leaves and split into families of `max_family`."""
        return self.cut(source.examples(self.tokenizer, on_bad), on_bad)

    def cut(self, examples: Iterable[Example], on_bad: Callable[[InvalidInput], None]) -> Iterator[Example]:
        """Yield the examples with at most `max_tokens` leaves and with sequences in windows of `max_family`."""
        for example in examples:
            signal: Signal | Leaf | None = example.signal
            if self.max_tokens and isinstance(signal, Signal) and signal.num_leaves > self.max_tokens:
                signal = signal.first(self.max_tokens)
            if signal is None:
                problem, expected = "a grid that cannot be cut", f"at most max_tokens = {self.max_tokens} leaves"
                on_bad(InvalidInput(example.where, problem=problem, expected=expected))
                continue
            yield replace(example, signal=in_windows(signal, self.max_family) if self.max_family else signal)


@dataclass(frozen=True, eq=False)
class PreparedData:
    """Data sets and everything else that training needs."""

    train: DataSet
    validation: DataSet
    test: DataSet
    input_spec: InputSpec
    modalities: Mapping[str, Modality]
    kinds: tuple[str, ...]
    keys: tuple[str, ...]
    task: Task
    vectors: Tensor | None = None  # word vectors of the token embedding
    skipped: tuple[str, ...] = ()  # one message per skipped row or file
    name: str = "data"


def _sources(
    data: Path | None, options: DataOptions, small: bool, encoder: Any, image_reader: ImageReader
) -> dict[str, NamedSource]:
    """Return the sources of "train", and of "validation" and "test" if they have their own data."""
    if data is None:
        options.refuse("the Python standard library")
        return {"train": StandardLibrary(most=60, packages=6) if small else StandardLibrary()}
    if data.is_dir() and News.is_at(data):
        options.refuse("a folder")
        bad: Any = "skip" if options.skip_bad else "raise"
        splits: tuple[tuple[str, Any], ...] = (("train", "train"), ("validation", "dev"), ("test", "test"))
        return {name: News(data, split, encoder, image_reader, bad) for name, split in splits}
    paths = {"train": data, "validation": options.validation, "test": options.test}
    columns = columns_of(options)
    return {name: open_source(path, columns, image_reader, options) for name, path in paths.items() if path is not None}


def read_texts(data: Path | None, options: DataOptions, small: bool) -> dict[str, str]:
    """Return the whole text of every example by its name, as in `DataSet.names`; without text, an empty one."""
    sources = _sources(data, options, small, None, read_image)
    return {name: text for source in sources.values() for name, text in source.named_texts()}


def columns_of(options: DataOptions) -> Columns:
    """Return the roles of the columns."""
    numeric = options.task == "regression"
    return Columns(options.text, options.number, options.image, options.label, numeric, options.language)


def open_source(
    data: Path,
    columns: Columns,
    image_reader: ImageReader = read_image,
    table: TableFormat = TableFormat(),  # noqa: B008
) -> NamedSource:
    """Open a file of rows, or a folder with one subfolder per class."""
    if data.is_dir():
        table.refuse("a folder")
        return Folders(data, columns.language, image_reader)
    if not data.exists():
        expected = "a file of rows, or a folder per class"
        raise InvalidInput(str(data), problem="no such file or folder", expected=expected)
    if data.suffix.lower() in ROW_SUFFIXES:
        return Rows(load_rows(data, delimiter=table.delimiter, encoding=table.encoding), columns, image_reader)
    raise InvalidInput(
        str(data),
        got=f"a {data.suffix} file" if data.suffix else "a file without a suffix",
        expected=f"one of {', '.join(ROW_SUFFIXES)}, a recipe (.yaml), or a folder per class",
    )


def prepare(
    data: Path | None,
    options: DataOptions,
    *,
    seed: int = 0,
    small: bool = False,
    tokenizer: Any = None,
    say: Callable[[str], None] = lambda message: None,
) -> PreparedData:
    """Read the data, train a tokenizer on the texts, and split the data. The data sets are cached.

    Args:
        data: File of rows, folder with one subfolder per class, or None for the Python standard library.
        options: Options of the data.
        seed: Random seed of the split.
        small: Whether to use only a part of the standard library, for a quick run.
        tokenizer: Tokenizer to use instead of a new one, for pre-trained models.
        say: Callback for progress messages.
    """
    task: Task = "regression" if options.task == "regression" else "classification"
    if options.task != task:
        raise InvalidInput(
            "task",
            got=options.task,
            expected="classification or regression",
            fix="Other tasks prepare their own data",
        )
    own_tokenizer = tokenizer
    if own_tokenizer is not None:
        _check_only_tokenizer(options)
    skipped: list[str] = []

    def on_bad(error: InvalidInput) -> None:
        if not options.skip_bad:
            raise or_skip(error)
        skipped.append(str(error))

    encoder = _text_encoder(options.encoder, say)
    image_reader = _image_reader(options.image_encoder, say)
    others = _sources(data, options, small, encoder, image_reader)
    source = others.pop("train")
    _check_task(data, source, options)
    kind: Any = {Rows: "rows", Folders: "folders", StandardLibrary: "python", News: "news"}[type(source)]
    if own_tokenizer is None:
        tokenizer, vectors = _tokenizer(source, options, encoder, say)
    else:
        vectors = None
    spec = InputSpec(
        kind,
        columns_of(options),
        options.max_tokens,
        options.max_family,
        tokenizer,
        options.encoder,
        options.image_encoder,
        None if encoder is None else encoder.token_vectors,
    )
    key = json.dumps(
        [
            version("hsa"),  # versions may read data differently
            source.fingerprint(),
            *(s.fingerprint() for s in others.values()),
            None if options.word_vectors is None else stamp(options.word_vectors),
            {name: value for name, value in asdict(options).items() if name != "skip_bad"},
            seed,
            None if own_tokenizer is None else own_tokenizer.to_str(),
        ],
        default=str,
    )
    folder = cache_folder() / digest([key])
    sets = {} if skipped or options.skip_bad else _load_cached(folder)
    if not sets:
        say("reading")
        whole = build(spec.examples(source, on_bad), task)
        for name, other in others.items():
            sets[name] = build(spec.examples(other, on_bad), task, whole.classes or None)
        missing = [name for name in ("validation", "test") if name not in sets]
        parts = split_at_random(whole, (1 - 0.1 * len(missing), *(0.1 for _ in missing)), seed)
        sets = dict(zip(["train", *missing], parts, strict=True)) | sets
        if not skipped:
            write_cache(folder, partial(_save_sets, sets))
    _check(sets, options)
    if own_tokenizer is not None and "text" not in sets["train"].batch.values:
        raise InvalidInput(
            "tokenizer", problem="a pre-trained model was chosen for data without text", expected="texts"
        )
    kinds, keys = _domains(sets.values())
    return PreparedData(
        train=sets["train"],
        validation=sets["validation"],
        test=sets["test"],
        input_spec=spec,
        modalities=_modalities(sets["train"], tokenizer, vectors, encoder),
        kinds=kinds,
        keys=keys,
        task=task,
        vectors=vectors,
        skipped=tuple(skipped),
        name="Python standard library" if data is None else data.name,
    )


def prepare_recipe(recipe: Recipe, small: bool, say: Callable[[str], None]) -> PreparedData:
    """Prepare the data of a recipe, with the tokenizer of its pre-trained model if there is one."""
    from hsa.models.registry import required_tokenizer

    tokenizer = required_tokenizer(recipe.models, recipe.extra, say)
    return prepare(recipe.data, recipe.read, seed=recipe.training.seed, small=small, tokenizer=tokenizer, say=say)


def _check_only_tokenizer(options: DataOptions) -> None:
    for name in ("encoder", "word_vectors"):
        if getattr(options, name) is not None:
            raise InvalidInput(
                name,
                got=f"{getattr(options, name)}, with a model that has a tokenizer of its own",
                expected="one of the two, because both define the tokens",
                fix=f"Leave out --{name.replace('_', '-')}, or the pre-trained encoder of the model",
            )


def _check_task(data: Path | None, source: Source, options: DataOptions) -> None:
    """Raise an error if the target is unknown: rows need a label, and only rows can have numbers to predict."""
    if isinstance(source, Rows):
        if options.label is None:
            raise InvalidInput(
                str(data),
                problem="no column to predict is given",
                expected=f"one of {', '.join(map(repr, source.rows.columns))}",
                fix="Name it with --label",
            )
    elif options.task == "regression":
        problem = "regression needs numbers to predict"
        raise InvalidInput("task", problem=problem, expected="a file of rows, with --label for the column of numbers")


def write_cache(folder: Path, write: Callable[[Path], object]) -> bool:
    """Write files to a folder of the cache; warn and return False if that is not possible.

    Args:
        folder: Folder of the files.
        write: Function that writes them to the temporary folder that it is called with.
    """
    try:
        with claimed(folder):
            write_sealed(folder, write)
    except InvalidInput as error:
        reason = error.problem or f"expected {error.expected}, got {error.got}"
        message = f"prepared data are not cached: {error.where}: {reason}. Set HSA_CACHE to a writable folder"
        warnings.warn(message, HsaWarning, stacklevel=2)
        return False
    return True


def is_cached(folder: Path, names: Iterable[str]) -> bool:
    """Return whether a folder of the cache has all the named files, undamaged."""
    try:
        for name in names:
            check_listed(folder / name, "cached data")
    except (InvalidInput, OSError):
        return False
    return True


def _save_sets(sets: Mapping[str, DataSet], folder: Path) -> None:
    for name, part in sets.items():
        part.save(folder / f"{name}.safetensors")


def _load_cached(folder: Path) -> dict[str, DataSet]:
    files = {name: f"{name}.safetensors" for name in ("train", "validation", "test")}
    if not is_cached(folder, files.values()):
        return {}
    try:
        return {name: DataSet.load(folder / file) for name, file in files.items()}
    except InvalidInput:  # from another version: read the data again
        return {}


def _text_encoder(path: str | None, say: Callable[[str], None]) -> Any:
    if path is None:
        return None
    from hsa.huggingface.encoders import TextEncoder

    say(f"loading {path}")
    return TextEncoder(path)


def _image_reader(path: str | None, say: Callable[[str], None]) -> ImageReader:
    if path is None:
        return read_image
    from hsa.huggingface.encoders import ImageEncoder

    say(f"loading {path}")
    return ImageEncoder(path).read_image


def _tokenizer(
    source: Source, options: DataOptions, encoder: Any, say: Callable[[str], None]
) -> tuple[Any, Tensor | None]:
    """Return the tokenizer of the texts, and the word vectors of its tokens if there are any."""
    if encoder is not None:
        return encoder.tokenizer, None
    if options.word_vectors is not None:
        from hsa.training.data.word_vectors import load_word_vectors, vectors_for, word_tokenizer

        say(f"loading {options.word_vectors}")
        vectors = load_word_vectors(options.word_vectors, words=_words(source.texts()))
        tokenizer = word_tokenizer(vectors.words)
        return tokenizer, vectors_for(tokenizer, vectors)
    from hsa.signals.readers.text import train_tokenizer

    texts = list(source.texts())
    if not texts:
        return None, None
    say("training a tokenizer")
    return train_tokenizer(texts, options.vocabulary), None


def _words(texts: Iterable[str]) -> set[str]:
    from tokenizers.pre_tokenizers import BertPreTokenizer

    split = BertPreTokenizer().pre_tokenize_str
    return {word for text in texts for word, _ in split(text.lower())}


def _modalities(
    train: DataSet, tokenizer: Tokenizer | None, vectors: Tensor | None, encoder: Any
) -> dict[str, Modality]:
    modalities: dict[str, Modality] = {}
    for name, values in train.batch.values.items():
        if not isinstance(values, Tensor):
            raise InvalidInput(
                f"modality {name!r}", got="leaves of several shapes or types", expected="one shape and type for all"
            )
        if name == "text" and encoder is not None:
            modalities[name] = Modality(numbers=encoder.width)
        elif name == "text" and vectors is not None:
            modalities[name] = Modality(tokens=len(vectors), width=vectors.shape[1], frozen=True)
        elif name == "text" and tokenizer is not None:
            modalities[name] = Modality(tokens=tokenizer.get_vocab_size())
        else:
            wide = values.to(torch.float64)  # sums of large numbers overflow float32
            spread = float(wide.std()) if wide.numel() > 1 else 1.0
            modalities[name] = Modality(
                numbers=max(1, values[0].numel()), center=float(wide.mean()), scale=spread or 1.0
            )
    return modalities


def _domains(sets: Iterable[DataSet]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the kinds of domains that occur, and the keys of tables."""
    kinds: dict[str, None] = {}
    keys: dict[str, None] = {}
    for part in sets:
        for domain in part.batch.distinct_domains:
            if type(domain) in _KINDS:
                kinds[_KINDS[type(domain)]] = None
            if isinstance(domain, Table):
                keys.update(dict.fromkeys(domain.keys))
    return tuple(kinds), tuple(keys)


def _check(sets: dict[str, DataSet], options: DataOptions) -> None:
    train = sets["train"]
    if options.task == "classification" and len(train):
        _check_classes(train, options)
    for name, part in sets.items():
        if len(part) == 0:
            raise InvalidInput(
                "data",
                problem=f"no examples for {name}",
                expected="at least one",
                fix=f"Pass more data, or a separate file with --{name}" if name != "train" else "Pass more data",
            )
        unknown = [modality for modality in part.batch.values if modality not in train.batch.values]
        if unknown:
            raise InvalidInput(
                f"data for {name}",
                got=unknown[0],
                expected=f"the modalities of the training data ({', '.join(train.batch.values)})",
                fix="Add such examples to the training data, or leave them out",
            )


def _check_classes(train: DataSet, options: DataOptions) -> None:
    present = train.targets.unique().tolist()
    if len(present) < 2:
        raise InvalidInput(
            "classes" if options.label is None else f"column {options.label!r}",
            got=f"one class in the training data, {train.classes[present[0]]!r}",
            expected="two or more",
            fix="Is --label the right column?" if options.label else "Put the files of each class into a folder",
        )
    if len(train.classes) > max(20, len(train) // 2):
        raise InvalidInput(
            "classes" if options.label is None else f"column {options.label!r}",
            got=f"{len(train.classes)} classes for {len(train)} examples",
            expected="several examples of each class",
            fix="To predict a number, pass --task regression; otherwise, choose another --label",
        )


def save_input_spec(folder: Path, spec: InputSpec) -> None:
    """Write `input_spec.json`, and `tokenizer.json` if there is a tokenizer, beside a saved model."""
    content = {name: getattr(spec, name) for name in ("kind", "max_tokens", "max_family", "encoder", "image_encoder")}

    def write(temporary: Path) -> None:
        write_json(temporary / SPEC, {**content, "columns": asdict(spec.columns)})
        if spec.encoder is None and spec.tokenizer is not None:
            spec.tokenizer.save(str(temporary / TOKENIZER))

    write_sealed(folder, write)


def load_input_spec(folder: Path) -> InputSpec:
    """Load what `save_input_spec` wrote.

    Raises:
        InvalidInput: A file is missing, damaged, or of another model or version; the message names it.
    """
    path, expected = folder / SPEC, "the input spec of a model, written by hsa train"
    content = read_json(path, expected)
    spec = from_plain(InputSpec, content, str(path))
    check_listed(path, expected)
    if (encoder := _text_encoder(spec.encoder, lambda message: None)) is not None:
        return replace(spec, tokenizer=encoder.tokenizer, transform=encoder.token_vectors)
    return replace(spec, tokenizer=load_model_tokenizer(folder)) if (folder / TOKENIZER).is_file() else spec


def load_model_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer that was saved with a model."""
    tokenizer = load_tokenizer(folder / TOKENIZER)
    check_listed(folder / TOKENIZER, "the tokenizer of the model")
    return tokenizer
