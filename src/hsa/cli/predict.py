"""`hsa predict`: print the predictions of a saved model for new data."""

from __future__ import annotations

import json as json_format
import sys
from dataclasses import asdict
from pathlib import Path

from hsa.cli.evaluate import collect_errors
from hsa.cli.help import HelpPage
from hsa.cli.progress import skipped_line
from hsa.errors import InvalidInput

HELP = HelpPage(
    examples={
        "hsa predict runs/reviews/hierarchical new.csv": "a line per row",
        "hsa predict runs/reviews/hierarchical new.csv --json": "for scripts",
    },
)


def predict(model: Path, data: Path, /, *, skip_bad: bool = False, json: bool = False) -> None:
    """Predict the class, number or answer of every row of a file, or of files.

    Args:
        model: Folder of a run, such as runs/reviews, or of one of its models, such as runs/reviews/flat.
        data: A file with the columns that the model reads; for a model that was trained on folders or on the standard
            library, a file or a folder of files.
        skip_bad: Skip rows and files that cannot be read, and count them.
        json: Print a JSON object per line, for scripts.
    """
    from hsa.training.load import load

    skipped: list[InvalidInput] = []
    for prediction in load(model).predictions(data, on_bad=collect_errors(skipped, skip_bad)):
        if json:
            print(json_format.dumps(asdict(prediction), ensure_ascii=False))
        elif prediction.probability is None and isinstance(prediction.label, str):
            print(f"{prediction.label:<40}  {prediction.where}")
        elif prediction.probability is None:
            print(f"{prediction.label:<14.6g}  {prediction.where}")
        else:
            print(f"{prediction.label:<24}  {prediction.probability:.2f}  {prediction.where}")
    if skipped:
        print(skipped_line(skipped), file=sys.stderr)
