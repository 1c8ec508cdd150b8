"""`TextInput`: the columns and the length of the texts that a classifier reads, saved in its config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from hsa.errors import InvalidInput
from hsa.huggingface.fidelity.examples import check_number_of_columns, usual_columns
from hsa.plain_values import from_plain

_FIELD = "hsa_input"


@dataclass(frozen=True)
class TextInput:
    """Columns and length of the texts that a classifier reads.

    Attributes:
        text: Columns of the text; two make a pair. Empty for columns with common names, such as "text".
        label: Column of the labels; None for "label".
        join: Whether several columns are joined to one text instead.
        max_tokens: Maximum number of tokens per text; None for the model's limit.
    """

    text: tuple[str, ...] = ()
    label: str | None = None
    join: bool = False
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        check_number_of_columns(self.text, self.join)

    @classmethod
    def of(cls, model: Any) -> Self:
        """Return what the config of a model says; the defaults if it says nothing."""
        saved = getattr(model.config, _FIELD, None)
        return cls() if saved is None else from_plain(cls, saved, f"config.json: {_FIELD}")

    def save_in(self, model: Any) -> None:
        """Write this to the config of a model, which `save_pretrained` saves."""
        setattr(model.config, _FIELD, asdict(self))

    def changed(
        self,
        *,
        text: tuple[str, ...] = (),
        label: str | None = None,
        join: bool = False,
        max_tokens: int | None = None,
    ) -> Self:
        """Return this with other columns or another length, where these are given; `join` belongs to `text`."""
        return replace(
            self,
            text=text or self.text,
            label=label or self.label,
            join=join if text else self.join,
            max_tokens=max_tokens or self.max_tokens,
        )

    def columns(self, names: Iterable[str], where: str) -> tuple[str, ...]:
        """Return the columns of the text among the columns of a table."""
        return self.text or usual_columns(names, where)

    def read(self, value: Any, where: str) -> tuple[str, ...]:
        """Return the text, or the two texts of a pair, of a string or of a row.

        Raises:
            InvalidInput: For a string in place of a pair, a missing column, or a cell without text.
        """
        if isinstance(value, str) and (len(self.text) < 2 or self.join):
            return (_checked(value, where),)
        if not isinstance(value, Mapping):
            got = "a text" if isinstance(value, str) else f"a value of type {type(value).__name__}"
            raise InvalidInput(where, got=got, expected=self.expected)
        columns = self.columns(value, where)
        missing = [name for name in columns if name not in value]
        if missing:
            names = ", ".join(columns)
            raise InvalidInput(where, problem=f"no column {missing[0]!r}", expected=f"a row with the columns {names}")
        texts = tuple(_checked(value[name], f"{where}, column {name!r}") for name in columns)
        return (" ".join(texts),) if self.join else texts

    @property
    def expected(self) -> str:
        """Name of an input, for errors."""
        if len(self.text) > 1 and not self.join:
            return f"rows with the columns {', '.join(self.text)}"
        return f"a text, or a row with {f'the column {self.text[0]}' if len(self.text) == 1 else 'columns of text'}"


def _checked(text: Any, where: str) -> str:
    if not isinstance(text, str) or not text.strip():
        got = "an empty text" if text is None or isinstance(text, str) else repr(text)
        raise InvalidInput(where, got=got, expected="a text with at least one word")
    return text
