"""`hsa predict`: what a saved model says about new data."""

from __future__ import annotations

import json as json_format
import sys
from dataclasses import asdict
from pathlib import Path

from hsa.cli.evaluate import skipping
from hsa.errors import InvalidInput


def predict(model: Path, data: Path, /, *, skip_bad: bool = False, json: bool = False) -> None:
    """Predict the class (or number, or answer) of every row of a file, or of files.

    Args:
        model: The folder of the model, such as runs/reviews/hierarchical.
        data: Rows with the columns the model reads; or, for a model trained on folders or on the standard library, a file
            or a folder of files.
        skip_bad: Leave out rows and files that cannot be read, and count them.
        json: One JSON object per line, for scripts.
    """
    from hsa.training.inference import Saved
    from hsa.training.seq2seq.inference import SavedSeq2Seq, is_seq2seq

    skipped: list[InvalidInput] = []
    saved = SavedSeq2Seq.load(model) if is_seq2seq(model) else Saved.load(model)
    for prediction in saved.predict(data, skipping(skipped, skip_bad)):
        if json:
            print(json_format.dumps(asdict(prediction), ensure_ascii=False))
        elif prediction.probability is None and isinstance(prediction.label, str):
            print(f"{prediction.label:<40}  {prediction.where}")
        elif prediction.probability is None:
            print(f"{prediction.label:<14.6g}  {prediction.where}")
        else:
            print(f"{prediction.label:<24}  {prediction.probability:.2f}  {prediction.where}")
    if skipped:
        print(f"left out: {len(skipped)}, the first: {skipped[0]}", file=sys.stderr)
