"""`hsa evaluate`: how good a saved model is on new data."""

from __future__ import annotations

import json as json_format
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from hsa.errors import InvalidInput


def evaluate(
    model: Path,
    data: Path,
    /,
    *,
    context: int | None = None,
    test_memory: int | None = None,
    text: tuple[str, ...] = (),
    skip_bad: bool = False,
    json: bool = False,
) -> None:
    """Test a model that `hsa train` saved on labelled data of the same kind, or a language model on a text.

    Args:
        model: The folder of the model, such as runs/reviews/hierarchical.
        data: Rows with the columns the model was trained on, or a folder per class; for a language model a text, a folder of
            texts or a table.
        context: For a language model: tokens of a block, in place of what it was trained with; transformer-xl has its
            segments.
        test_memory: For transformer-xl: tokens of earlier segments that are remembered, in place of what it was trained
            with; 0 reads every segment on its own.
        text: For a language model: columns of a table that hold text.
        skip_bad: Leave out rows and files that cannot be read, and count them.
        json: Print the numbers as JSON, for scripts.
    """
    from rich.console import Console

    from hsa.training.language_model.inference import is_language_model

    if is_language_model(model):
        numbers = _language_model(model, data, context, test_memory, text, skip_bad)
    else:
        if context is not None:
            raise InvalidInput("context", given=context, expected="none: examples are read whole")
        numbers = _classifier(model, data, test_memory, text, skip_bad)
    if json:
        print(json_format.dumps(numbers, indent=2))
        return
    console = Console(highlight=False)
    for name, value in numbers.items():
        console.print(
            f"{name.replace('_', ' '):<22}{value:,.4f}" if isinstance(value, float) else f"{name:<22}{value:,}"
        )


def _classifier(
    model: Path, data: Path, memory: int | None, text: tuple[str, ...], skip_bad: bool
) -> dict[str, int | float]:
    from hsa.models.memory import set_test_memory
    from hsa.training.inference import Saved

    skipped: list[InvalidInput] = []
    saved = Saved.load(model)
    if text:
        raise InvalidInput("text", given=", ".join(text), expected="none: the model knows its columns")
    if memory is not None:
        set_test_memory(saved.model, memory)
    test = saved.data_set(data, skipping(skipped, skip_bad))
    evaluation = saved.evaluate(test)
    scores = {name: value for name, value in asdict(evaluation.scores).items() if value is not None}
    return {
        "examples": len(test),
        "skipped": len(skipped),
        **scores,
        "loss": evaluation.loss,
        "attention_operations": evaluation.operations / len(test),
        "seconds": evaluation.seconds,
    }


def _language_model(
    model: Path, data: Path, context: int | None, memory: int | None, text: tuple[str, ...], skip_bad: bool
) -> dict[str, int | float]:
    import torch

    from hsa.cli.runs import words
    from hsa.training.language_model.inference import evaluate_text

    if skip_bad:
        raise InvalidInput("skip_bad", given="with a language model", expected="none: a text is read whole")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return asdict(evaluate_text(model, data, columns=words(text), context=context, memory=memory, device=device))


def skipping(skipped: list[InvalidInput], allowed: bool) -> Callable[[InvalidInput], None]:
    """What to do with a bad row: collect it where that is allowed, else raise."""

    from hsa.training.data.sources import or_skip

    def on_bad(error: InvalidInput) -> None:
        if not allowed:
            raise or_skip(error)
        skipped.append(error)

    return on_bad
