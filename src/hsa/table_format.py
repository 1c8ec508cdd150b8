"""Format of CSV and TSV files, as options of all commands that read tables. Importing this module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from hsa.errors import InvalidInput


@dataclass(frozen=True)
class TableFormat:
    """Format of tables, as in `hsa.signals.load_rows`.

    Args:
        delimiter: Character between the fields of a .csv or .tsv file, such as ";" or tab. By default the first rows decide.
        encoding: Encoding of text files, such as cp1252 or utf-16.
    """

    delimiter: str | None = None
    encoding: str = "utf-8"

    def refuse(self, data: str, *options: str) -> None:
        """Raise an error if one of these options (both by default) is set; `data` names what is read instead of a table."""
        for name in options or ("delimiter", "encoding"):
            if getattr(self, name) != getattr(TableFormat, name):
                raise InvalidInput(
                    name, got=f"{getattr(self, name)!r} for {data}", expected="no value", fix="Leave it out"
                )
