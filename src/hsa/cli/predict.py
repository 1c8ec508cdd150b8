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
    for found in saved.predict(data, skipping(skipped, skip_bad)):
        if json:
            print(json_format.dumps(asdict(found), ensure_ascii=False))
        elif found.probability is None and isinstance(found.label, str):
            print(f"{found.label:<40}  {found.where}")
        elif found.probability is None:
            print(f"{found.label:<14.6g}  {found.where}")
        else:
            print(f"{found.label:<24}  {found.probability:.2f}  {found.where}")
    if skipped:
        print(f"left out: {len(skipped)}, the first: {skipped[0]}", file=sys.stderr)
