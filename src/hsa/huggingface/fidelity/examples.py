"""Labelled texts from a table, and batches of their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
"""Splits to evaluate on, the first that a table has, unless one is named."""
_UNLABELLED = -1  # what GLUE's test sets have


@dataclass(frozen=True)
class Examples:
    """Texts, one or two each, and a label each if there are labels: names of classes, or numbers."""

    name: str
    texts: list[tuple[str, ...]]
    labels: list[Any] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def part(self, chosen: Sequence[int] | np.ndarray) -> Examples:
        """Select examples by index."""
        labels = None if self.labels is None else [self.labels[i] for i in chosen]
        return replace(self, texts=[self.texts[i] for i in chosen], labels=labels)

    def sample(self, count: int | None, seed: int = 0) -> Examples:
        """Draw at most `count` examples at random, always the same ones."""
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
) -> Examples:
    """Read the rows of a .csv, .tsv, .json, .jsonl or .parquet file.

    Args:
        text: one column of text, or two that make a pair; by default those among the usual names that are there.
        label: the column of labels; "label" if there is one, unless given. Rows whose label is −1 or missing are left out.
        split: only rows whose column "split" says so; the first of `usual` that is there, unless given.
        join: several columns are one text, not a pair.

    Raises:
        InvalidInput: naming the file, and the row where that helps.
    """
    rows = load_rows(path)
    chosen = _rows_of_split(rows, split, usual)
    columns = tuple(text) or _usual_columns(rows)
    if len(columns) > 2 and not join:
        raise InvalidInput(
            "text", given=f"{len(columns)} columns", expected="one, or two for a pair", fix="or join them"
        )
    values = [rows.column(name) for name in columns]
    for name, column in zip(columns, values, strict=True):
        bad = next((i for i in chosen if not isinstance(column[i], str) or not column[i].strip()), None)
        if bad is not None:
            raise InvalidInput(f"{rows.where(bad)}, {name}", given=repr(column[bad]), expected="a text")
    texts: list[tuple[str, ...]] = [tuple(column[i] for column in values) for i in chosen]
    if join:
        texts = [(" ".join(parts),) for parts in texts]
    if label is None and "label" in rows.columns:
        label = "label"
    if label is None:
        return Examples(Path(path).stem, texts)
    labels = rows.column(label)
    kept = [i for i, row in enumerate(chosen) if _is_label(labels[row])]
    examples = Examples(Path(path).stem, texts, [labels[row] for row in chosen])
    return examples.part(kept) if kept else replace(examples, labels=None)


def _is_label(value: Any) -> bool:
    return value not in (None, "", _UNLABELLED, str(_UNLABELLED)) and value == value  # NaN: a cell without a value


def _rows_of_split(rows: Rows, split: str | None, usual: Sequence[str]) -> list[int]:
    if "split" not in rows.columns:
        if split is not None:
            raise InvalidInput(rows.file, given="no column 'split'", expected=f"one that says {split!r} in some rows")
        return list(range(len(rows)))
    of_row = rows.column("split")
    there = set(of_row)
    wanted = split or next((name for name in usual if name in there), None)
    if wanted is None:
        return list(range(len(rows)))
    if wanted not in there:
        raise InvalidInput(f"{rows.file}: split", given=repr(wanted), expected=f"one of {sorted(map(str, there))}")
    return [i for i, name in enumerate(of_row) if name == wanted]


def _usual_columns(rows: Rows) -> tuple[str, ...]:
    usual = (("sentence1", "sentence2"), ("text",), ("sentence",), ("title", "description"))
    for names in usual:
        if all(name in rows.columns for name in names):
            return names
    raise InvalidInput(
        rows.file,
        given=f"columns {list(rows.columns)}",
        expected="to know which hold the text",
        fix="pass --text COLUMN",
    )


def number_labels(examples: Examples, label2id: dict[str, int], num_labels: int) -> np.ndarray:
    """Convert labels to the numbers of the model's classes.

    Raises:
        InvalidInput: no labels, or one that the model has no class for.
    """
    if examples.labels is None:
        raise InvalidInput(
            examples.name,
            given="no labels",
            expected="a label per row, to say how good answers are",
            fix="pass --label COLUMN, and a --split that is labelled",
        )
    if num_labels < 2:
        raise InvalidInput("model", given=f"a head of {num_labels} output", expected="a class each: 2 or more")
    numbers = []
    for label in examples.labels:
        label = int(label) if isinstance(label, float) and label.is_integer() else label  # beside missing ones
        number = label2id.get(str(label))
        if number is None and _is_count(label) and 0 <= int(label) < num_labels:
            number = int(label)
        if number is None:
            known = ", ".join(map(repr, list(label2id)[:8]))
            raise InvalidInput(
                f"{examples.name}: label", given=repr(label), expected=f"one of the model's classes: {known}"
            )
        numbers.append(number)
    return np.array(numbers, np.int64)


def _is_count(label: Any) -> bool:
    return isinstance(label, (int, np.integer)) or (isinstance(label, str) and label.isdecimal())


@dataclass(frozen=True)
class Tokens:
    """The token ids of examples, ready to be batched."""

    ids: list[list[int]]
    types: list[list[int]] | None
    pad_id: int

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(ids) for ids in self.ids])

    def batch(self, chosen: np.ndarray, device: torch.device | str) -> dict[str, Tensor]:
        """Pad some examples on the right, as a model takes them."""
        lengths = self.lengths_of(chosen)
        width = int(lengths.max())

        def padded(rows: list[list[int]], filler: int) -> Tensor:
            table = np.full((len(chosen), width), filler, np.int64)
            for i, row in enumerate(chosen):
                table[i, : lengths[i]] = rows[row]
            return torch.from_numpy(table).to(device)

        mask = torch.from_numpy(np.arange(width) < lengths[:, None]).to(device).long()
        inputs = {"input_ids": padded(self.ids, self.pad_id), "attention_mask": mask}
        if self.types is not None:
            inputs["token_type_ids"] = padded(self.types, 0)
        return inputs

    def lengths_of(self, chosen: np.ndarray) -> np.ndarray:
        return np.array([len(self.ids[i]) for i in chosen])

    def batches(self, budget: int) -> Iterator[np.ndarray]:
        """Batch rows of similar length, the longest first, at most `budget` tokens together."""
        return batch_by_length(self.lengths, budget)


def tokenize(examples: Examples, tokenizer: Any, longest: int) -> Tokens:
    """Tokenize texts, cut to `longest` tokens, special ones included."""
    parts = len(examples.texts[0])
    least = tokenizer.num_special_tokens_to_add(pair=parts == 2) + parts
    if longest < least:
        raise InvalidInput(
            "max_tokens", given=longest, expected=f"at least {least}: special tokens and one of each text"
        )
    first = [texts[0] for texts in examples.texts]
    second = [texts[1] for texts in examples.texts] if parts == 2 else None
    encoded = tokenizer(first, second, truncation=True, max_length=longest)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    return Tokens(encoded["input_ids"], encoded.get("token_type_ids"), pad)
