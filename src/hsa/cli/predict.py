"""`hsa predict`: print or write the predictions of a saved model for new data."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from hsa.cli.evaluate import collect_errors
from hsa.cli.help import HelpPage
from hsa.cli.new_data import load_for_data, open_argument, refuse_options
from hsa.cli.prediction_file import check_out, write_predictions
from hsa.cli.progress import skipped_line
from hsa.errors import InvalidInput
from hsa.table_format import TableFormat

if TYPE_CHECKING:
    from hsa.signals.readers import Rows
    from hsa.training.loaded_model import LoadedModel, Prediction

HELP = HelpPage(
    examples={
        "hsa predict runs/reviews new.csv": "a line per row",
        "hsa predict runs/reviews new.csv --out predicted.csv": "with the columns of new.csv",
        'hsa predict runs/reviews "A fine film."': "one text",
        "hsa predict tuned new.csv --text body": "a model of hsa finetune or convert",
    },
)
_SHOWN_CLASSES = 10
_GAP = "  "


def predict(
    model: Path,
    data: str,
    /,
    *,
    out: Path | None = None,
    text: tuple[str, ...] = (),
    skip_bad: bool = False,
    json: bool = False,
    table: Annotated[TableFormat, Parameter(name="*")] = TableFormat(),  # noqa: B008
) -> None:
    """Predict the class, number or answer of a text, of every row of a table, or of files.

    Args:
        model: Folder of a run, such as runs/reviews, of one of its models, such as runs/reviews/flat, or of a classifier of
            transformers that `hsa finetune` or `hsa convert` saved.
        data: A file with the columns that the model reads; or a text: two or more words in quotes that name no file, a .txt
            file, or - for stdin. For a model that was trained on files: a file or a folder of files.
        out: File to write, .csv or .jsonl: the columns of DATA, the prediction and the probability of every class.
        text: Columns of the text, for a classifier of transformers. By default those of its training.
        skip_bad: Skip rows and files that cannot be read, and count them.
        json: Print a JSON object per line, for scripts.
    """
    if out is not None:
        check_out(out, json)
    loaded = load_for_data(model, text)
    if loaded.input_spec is not None:
        refuse_options("model of hsa train", text=text)
    inputs = open_argument(loaded, data, table)
    skipped: list[InvalidInput] = []
    if isinstance(inputs, str):
        predictions = iter([_predict_text(loaded, inputs, data)])
    else:
        predictions = loaded.predictions(inputs, on_bad=collect_errors(skipped, skip_bad))
    if out is not None:
        print(write_predictions(out, inputs, list(predictions)))
    elif json:
        for prediction in predictions:
            print(json_format.dumps(asdict(prediction), ensure_ascii=False))
    elif isinstance(inputs, str):
        _print_one(next(predictions))
    else:
        _print_several(loaded, inputs, predictions)
    if skipped:
        print(skipped_line(skipped), file=sys.stderr)


def _predict_text(loaded: LoadedModel, text: str, data: str) -> Prediction:
    """Return the prediction for a text under the name of the file that it comes from, if there is one."""
    from hsa.training.raw_inputs import raise_error

    name = "input" if data == text else data
    try:
        (prediction,) = loaded.predictions(text, on_bad=raise_error)
    except InvalidInput as error:
        raise error.moved(error.where.replace("input", name, 1)) from None
    return replace(prediction, where=name)


def _print_one(prediction: Prediction) -> None:
    """Print a number, an answer, or the most likely classes with their probabilities."""
    by_class = sorted(prediction.probabilities.items(), key=lambda entry: -entry[1])
    if not by_class:
        print(_label(prediction))
        return
    width = max(len(name) for name, _ in by_class[:_SHOWN_CLASSES])
    for name, probability in by_class[:_SHOWN_CLASSES]:
        print(f"{name:<{width}}{_GAP}{probability:.2f}")
    if len(by_class) > _SHOWN_CLASSES:
        print(f"… {len(by_class) - _SHOWN_CLASSES:,} more classes")


def _print_several(loaded: LoadedModel, inputs: Rows | Path, predictions: Iterable[Prediction]) -> None:
    """Print a line per prediction as soon as it is there: the row or file, the prediction, and the beginning of the row."""
    from rich.console import Console

    width = Console().width
    origins = _Origins(loaded, inputs)
    label_width = max(len(name) for name in ("predicted", *(loaded.classes or ["-1.23457e+06"])))
    header = [f"{origins.title:<{origins.width}}", f"{'predicted':<{label_width}}"]
    header += ["probability"] if loaded.classes else []
    for number, prediction in enumerate(predictions):
        is_answer = prediction.probability is None and isinstance(prediction.label, str)
        if not number:  # errors come first
            print(_GAP.join([*header, "" if is_answer else origins.excerpt_title]).rstrip()[:width])
        cells = [f"{origins.name(prediction):<{origins.width}}", f"{_label(prediction):<{label_width}}"]
        cells += [] if prediction.probability is None else [f"{prediction.probability:<{len('probability')}.2f}"]
        line = _GAP.join(cells)
        if is_answer:
            print(line.rstrip())  # answers stay whole
            continue
        left = max(0, width - len(line) - len(_GAP))
        excerpt = origins.excerpt(prediction)
        print(_GAP.join([line, excerpt if len(excerpt) <= left else f"{excerpt[: max(0, left - 1)]}…"]).rstrip())


class _Origins:
    """Names and contents of the examples that are predicted, for people to recognise them."""

    def __init__(self, loaded: LoadedModel, inputs: Rows | Path):
        from hsa.signals.readers import Rows

        self.rows = inputs if isinstance(inputs, Rows) else None
        self.folder = inputs if isinstance(inputs, Path) and inputs.is_dir() else None
        self.columns: tuple[str, ...] = ()
        self.title, self.width = "file", len("file")
        if self.rows is not None:
            self.title, self.width = "row", max(len("row"), len(str(len(self.rows))))
            self.index = {self.rows.where(i): i for i in range(len(self.rows))}
            self.columns = _read_columns(loaded, self.rows)
        self.excerpt_title = ", ".join(self.columns)

    def name(self, prediction: Prediction) -> str:
        """Return the number of the row, or the path of the file."""
        if self.rows is not None:
            return str(self.index[prediction.where] + 1)
        return prediction.where if self.folder is None else str(Path(prediction.where).relative_to(self.folder))

    def excerpt(self, prediction: Prediction) -> str:
        """Return what the model read in a row, on one line."""
        if self.rows is None:
            return ""
        row = self.rows.row(self.index[prediction.where])
        return " · ".join(" ".join(str(row[name]).split()) for name in self.columns if _is_plain(row[name]))


def _read_columns(loaded: LoadedModel, rows: Rows) -> tuple[str, ...]:
    from hsa.training.text_classifier import LoadedTextClassifier

    if isinstance(loaded, LoadedTextClassifier):
        return loaded.input.columns(rows.columns, rows.file)
    assert loaded.input_spec is not None
    return loaded.input_spec.columns.read


def _label(prediction: Prediction) -> str:
    return prediction.label if isinstance(prediction.label, str) else f"{prediction.label:.6g}"


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float))
