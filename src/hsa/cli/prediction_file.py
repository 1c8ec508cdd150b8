"""Files of predictions: the columns of the data, with the prediction and the probability of every class."""

from __future__ import annotations

import csv
import io
import json as json_format
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsa.errors import InvalidInput

if TYPE_CHECKING:
    from hsa.signals.readers import Rows
    from hsa.training.loaded_model import Prediction

_LISTED = 10  # classes in the summary


def check_out(out: Path, json: bool) -> None:
    """Refuse another suffix, an existing file, and --json, before a model is loaded."""
    if out.suffix.lower() not in (".csv", ".jsonl"):
        raise InvalidInput("out", got=str(out), expected="a file that ends in .csv or .jsonl")
    if out.exists():
        raise InvalidInput(
            str(out), got="a file that exists", expected="a new file", fix="Delete it, or pass another --out"
        )
    if json:
        raise InvalidInput(
            "json", got="--json together with --out", expected="one of them", fix="--out FILE.jsonl writes JSON, too"
        )


def write_predictions(out: Path, inputs: str | Rows | Path, predictions: list[Prediction]) -> str:
    """Write the inputs with their predictions, and return a summary."""
    from hsa.files import write_text

    if not predictions:
        raise InvalidInput(str(out), problem="no predictions to write", expected="at least one row that can be read")
    records = list(_records(inputs, predictions))
    write_text(out, _csv(records) if out.suffix.lower() == ".csv" else _json_lines(records))
    lines = [f"{len(predictions):,} {'prediction' if len(predictions) == 1 else 'predictions'} in {out}"]
    if predictions[0].probabilities:
        counts = Counter(str(prediction.label) for prediction in predictions).most_common()
        lines += [f"{name}: {count:,}" for name, count in counts[:_LISTED]]
        lines += [f"… {len(counts) - _LISTED:,} more classes"] if len(counts) > _LISTED else []
    return "\n".join(lines)


def _records(inputs: str | Rows | Path, predictions: list[Prediction]) -> Iterator[dict[str, Any]]:
    """Yield the columns of each input with its prediction and probabilities."""
    from hsa.signals.readers import Rows

    if isinstance(inputs, Rows):
        index = {inputs.where(i): i for i in range(len(inputs))}
        left_out = [name for name in inputs.columns if any(map(_has_bytes, inputs.column(name)))]
        if left_out:
            print(f"left out, because they hold bytes: {', '.join(left_out)}", file=sys.stderr)
    for prediction in predictions:
        added = {"predicted": prediction.label}
        added |= {f"probability_{name}": value for name, value in prediction.probabilities.items()}
        if not isinstance(inputs, Rows):
            yield {"text": inputs} | added if isinstance(inputs, str) else {"file": prediction.where} | added
            continue
        row = {n: value for n, value in inputs.row(index[prediction.where]).items() if n not in left_out}
        taken = [name for name in added if name in row]
        if taken:
            raise InvalidInput(
                inputs.file, got=f"the column {taken[0]!r}", expected="another name", fix="Rename it: --out adds it"
            )
        yield row | added


def _has_bytes(value: Any) -> bool:
    return isinstance(value, bytes) or (isinstance(value, dict) and any(isinstance(v, bytes) for v in value.values()))


def _csv(records: list[dict[str, Any]]) -> str:
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(records[0])
    for record in records:
        writer.writerow([_cell(value) for value in record.values()])
    return file.getvalue()


def _cell(value: Any) -> Any:
    return json_format.dumps(value, ensure_ascii=False, default=str) if isinstance(value, (list, dict)) else value


def _json_lines(records: list[dict[str, Any]]) -> str:
    return "".join(json_format.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records)
