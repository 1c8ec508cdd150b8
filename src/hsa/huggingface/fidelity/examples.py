"""Texts and labels from a table, and batches of their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hsa.errors import InvalidInput
from hsa.huggingface.encoders import batch_by_length
from hsa.signals.readers.rows import Rows, load_rows

SPLITS = ("validation", "test")
"""Default splits to evaluate on: the first of these that a table has."""
_UNLABELLED = -1  # label in GLUE's test sets


@dataclass(frozen=True)
class Examples:
    """Texts or pairs of texts, with labels if there are any.

    Args:
        name: Name in reports and error messages.
        texts: One text, or two for a pair, for each example.
        labels: One class name or number per example.

    >>> len(Examples("reviews", [("A fine film.",), ("A dull film.",)], ["good", "bad"]))
    2
    """

    name: str
    texts: list[tuple[str, ...]]
    labels: list[Any] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def part(self, rows: Sequence[int] | np.ndarray) -> Examples:
        """Return the examples of these rows."""
        labels = None if self.labels is None else [self.labels[i] for i in rows]
        return replace(self, texts=[self.texts[i] for i in rows], labels=labels)

    def sample(self, count: int | None, seed: int = 0) -> Examples:
        """Return at most `count` random examples; the same ones for the same seed."""
        if count is None or count >= len(self):
            return self
        return self.part(np.sort(np.random.default_rng(seed).permutation(len(self))[:count]))


def load_examples(
    path: str | PathLike[str],
    *,
    text: Sequence[str] = (),
    label: str | None = None,
    split: str | None = None,
    join: bool = False,
    usual: Sequence[str] = SPLITS,
    delimiter: str | None = None,
    encoding: str = "utf-8",
) -> Examples:
    """Read examples from a .csv, .tsv, .json, .jsonl or .parquet file.

    Args:
        path: File with one example per row.
        text: Name of the text column, or two names for pairs. Default: columns with usual names, such as "text".
        label: Name of the label column. Default: "label", if there is one. Rows with a missing label or −1 are left out.
        split: Value of the column "split" of the rows to read. Default: the first of `usual` that occurs.
        join: Whether to join several columns to one text instead of making a pair.
        usual: Default splits.
        delimiter, encoding: As in `load_rows`.

    Raises:
        InvalidInput: The file or one of its rows does not fit; the message names it.

    >>> examples = load_examples("reviews.parquet", text=["review"], label="stars")  # doctest: +SKIP
    """
    rows = load_rows(path, delimiter=delimiter, encoding=encoding)
    in_split = rows_of_split(rows, split, usual)
    columns = tuple(text) or usual_columns(rows.columns, rows.file)
    check_number_of_columns(columns, join)
    values = [rows.column(name) for name in columns]
    for name, column in zip(columns, values, strict=True):
        bad = next((i for i in in_split if not isinstance(column[i], str) or not column[i].strip()), None)
        if bad is not None:
            raise InvalidInput(f"{rows.where(bad)}, {name}", got=repr(column[bad]), expected="a text")
    texts: list[tuple[str, ...]] = [tuple(column[i] for column in values) for i in in_split]
    if join:
        texts = [(" ".join(parts),) for parts in texts]
    if label is None and "label" in rows.columns:
        label = "label"
    if label is None:
        return Examples(Path(path).stem, texts)
    labels = rows.column(label)
    kept = [i for i, row in enumerate(in_split) if _is_label(labels[row])]
    examples = Examples(Path(path).stem, texts, [labels[row] for row in in_split])
    return examples.part(kept) if kept else replace(examples, labels=None)


def check_number_of_columns(columns: Sequence[str], join: bool) -> None:
    """Raise an error for more than two columns that are not joined."""
    if len(columns) > 2 and not join:
        raise InvalidInput(
            "text",
            expected="one column, or two for a pair",
            got=f"{len(columns)} columns",
            fix="To join them into one text, pass --join",
        )


def _is_label(value: Any) -> bool:
    return value not in (None, "", _UNLABELLED, str(_UNLABELLED)) and value == value  # NaN is an empty cell


def rows_of_split(rows: Rows, split: str | None, usual: Sequence[str] = SPLITS) -> list[int]:
    """Return the indices of the rows of a split; of the first of `usual` by default, of all if there is none of these."""
    if "split" not in rows.columns:
        if split is not None:
            raise InvalidInput(rows.file, problem="no column 'split'", expected=f"one that contains {split!r}")
        return list(range(len(rows)))
    splits = rows.column("split")
    names = set(splits)
    wanted = split or next((name for name in usual if name in names), None)
    if wanted is None:
        return list(range(len(rows)))
    if wanted not in names:
        raise InvalidInput(f"{rows.file}: split", expected=f"one of {sorted(map(str, names))}", got=repr(wanted))
    return [i for i, name in enumerate(splits) if name == wanted]


def usual_columns(columns: Iterable[str], where: str) -> tuple[str, ...]:
    """Return the columns of texts among those of a table, by their names."""
    columns = list(columns)
    usual = (("sentence1", "sentence2"), ("text",), ("sentence",), ("title", "description"))
    for names in usual:
        if all(name in columns for name in names):
            return names
    raise InvalidInput(
        where,
        problem=f"no text column among {columns}",
        expected="one with a usual name, such as 'text'",
        fix="Pass --text COLUMN",
    )


def number_labels(examples: Examples, label2id: dict[str, int], num_labels: int) -> np.ndarray:
    """Return the class number of each label.

    Raises:
        InvalidInput: There are no labels, or the model has no class for one.
    """
    if examples.labels is None:
        raise InvalidInput(
            examples.name,
            problem="no labels",
            expected="a label per row, to score the answers",
            fix="Pass --label COLUMN, and a --split that is labelled",
        )
    if num_labels < 2:
        raise InvalidInput(
            "model", expected="a classification head of 2 or more classes", got=f"a head of {num_labels}"
        )
    numbers = []
    for label in examples.labels:
        label = int(label) if isinstance(label, float) and label.is_integer() else label  # with missing ones
        number = label2id.get(str(label))
        if number is None and _is_count(label) and 0 <= int(label) < num_labels:
            number = int(label)
        if number is None:
            known = ", ".join(map(repr, list(label2id)[:8]))
            raise InvalidInput(
                f"{examples.name}: label", got=repr(label), expected=f"one of the model's classes: {known}"
            )
        numbers.append(number)
    return np.array(numbers, np.int64)


def _is_count(label: Any) -> bool:
    return isinstance(label, (int, np.integer)) or (isinstance(label, str) and label.isdecimal())


@dataclass(frozen=True)
class Tokens:
    """Token ids of examples, and batches of them."""

    ids: list[list[int]]
    types: list[list[int]] | None
    pad_id: int

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(ids) for ids in self.ids])

    def batch(self, rows: np.ndarray, device: torch.device | str) -> dict[str, Tensor]:
        """Return the model inputs for some examples, padded on the right."""
        lengths = self.lengths_of(rows)
        width = int(lengths.max())

        def padded(values: list[list[int]], filler: int) -> Tensor:
            table = np.full((len(rows), width), filler, np.int64)
            for i, row in enumerate(rows):
                table[i, : lengths[i]] = values[row]
            return torch.from_numpy(table).to(device)

        mask = torch.from_numpy(np.arange(width) < lengths[:, None]).to(device).long()
        inputs = {"input_ids": padded(self.ids, self.pad_id), "attention_mask": mask}
        if self.types is not None:
            inputs["token_type_ids"] = padded(self.types, 0)
        return inputs

    def lengths_of(self, rows: np.ndarray) -> np.ndarray:
        return np.array([len(self.ids[i]) for i in rows])

    def batches(self, budget: int) -> Iterator[np.ndarray]:
        """Yield batches of rows of similar length, longest first, with at most `budget` tokens each."""
        return batch_by_length(self.lengths, budget)


def tokenize(examples: Examples, tokenizer: Any, longest: int) -> Tokens:
    """Tokenize texts and cut them to `longest` tokens, special tokens included."""
    parts = len(examples.texts[0])
    least = tokenizer.num_special_tokens_to_add(pair=parts == 2) + parts
    if longest < least:
        raise InvalidInput(
            "max_tokens", expected=f"at least {least}, for the special tokens and one token of each text", got=longest
        )
    first = [texts[0] for texts in examples.texts]
    second = [texts[1] for texts in examples.texts] if parts == 2 else None
    encoded = tokenizer(first, second, truncation=True, max_length=longest)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    return Tokens(encoded["input_ids"], encoded.get("token_type_ids"), pad)
