"""`hsa evaluate`: how good a saved model is on labelled data."""

from __future__ import annotations

import json as json_format
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from hsa.errors import InvalidInput


def evaluate(model: Path, data: Path, /, *, skip_bad: bool = False, json: bool = False) -> None:
    """Test a model that `hsa train` saved on labelled data of the same kind.

    Args:
        model: The folder of the model, such as runs/reviews/hsa.
        data: Rows with the columns the model was trained on, or a folder per class.
        skip_bad: Leave out rows and files that cannot be read, and count them.
        json: Print the numbers as JSON, for scripts.
    """
    from rich.console import Console

    from hsa.training.inference import Saved

    skipped: list[InvalidInput] = []
    saved = Saved.load(model)
    test = saved.data_set(data, skipping(skipped, skip_bad))
    found = saved.evaluate(test)
    scores = {name: value for name, value in asdict(found.scores).items() if value is not None}
    numbers = {
        "examples": len(test),
        "skipped": len(skipped),
        **scores,
        "loss": found.loss,
        "attention_operations": found.operations / len(test),
        "seconds": found.seconds,
    }
    if json:
        print(json_format.dumps(numbers, indent=2))
        return
    console = Console(highlight=False)
    for name, value in numbers.items():
        console.print(
            f"{name.replace('_', ' '):<22}{value:,.4f}" if isinstance(value, float) else f"{name:<22}{value:,}"
        )


def skipping(skipped: list[InvalidInput], allowed: bool) -> Callable[[InvalidInput], None]:
    """What to do with a bad row: collect it where that is allowed, else raise."""

    from hsa.training.sources import or_skip

    def on_bad(error: InvalidInput) -> None:
        if not allowed:
            raise or_skip(error)
        skipped.append(error)

    return on_bad
