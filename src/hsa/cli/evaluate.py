"""`hsa evaluate`: test a saved model on new data."""

from __future__ import annotations

import json as json_format
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hsa.cli.help import HelpPage
from hsa.errors import InvalidInput

if TYPE_CHECKING:
    from hsa.training.inference import LoadedClassifier
    from hsa.training.language_model.inference import LoadedLanguageModel

HELP = HelpPage(
    examples={
        "hsa evaluate runs/reviews/hierarchical new.csv": "a classifier or regressor",
        "hsa evaluate runs/books/multiscale new.txt": "a language model",
    },
)


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
    """Test a model of `hsa train` on new data: labelled examples, or a text.

    Args:
        model: Folder of a run, such as runs/reviews, or of one of its models, such as runs/reviews/flat.
        data: A file with the columns that the model was trained on, or a folder per class; for a language model a text, a
            folder of texts or a table.
        context: For language models: tokens per block, instead of the number in training; not for transformer-xl, which
            reads segments.
        test_memory: For transformer-xl: tokens of earlier segments to remember, instead of the number in training; 0 to
            read every segment on its own.
        text: For language models: columns of a table that hold text.
        skip_bad: Skip rows and files that cannot be read, and count them.
        json: Print the numbers as JSON, for scripts.
    """
    from rich.console import Console

    from hsa.training.inference import LoadedClassifier
    from hsa.training.language_model.inference import LoadedLanguageModel
    from hsa.training.load import load

    loaded = load(model)
    if isinstance(loaded, LoadedLanguageModel):
        numbers = _language_model(loaded, data, context, test_memory, text, skip_bad)
    elif isinstance(loaded, LoadedClassifier):
        if context is not None:
            raise InvalidInput(
                "context",
                got=context,
                expected="no value for a classifier or regressor",
                fix="Leave it out",
            )
        numbers = _classifier(loaded, data, test_memory, text, skip_bad)
    else:
        raise InvalidInput(
            str(loaded.folder),
            got="an encoder–decoder",
            expected="a classifier, a regression model or a language model",
            fix="Its scores are in the report of its run; hsa predict answers new prompts",
        )
    if json:
        print(json_format.dumps(numbers, indent=2))
        return
    console = Console(highlight=False)
    for name, value in numbers.items():
        console.print(
            f"{name.replace('_', ' '):<22}{value:,.4f}" if isinstance(value, float) else f"{name:<22}{value:,}"
        )


def _classifier(
    loaded: LoadedClassifier, data: Path, memory: int | None, text: tuple[str, ...], skip_bad: bool
) -> dict[str, int | float]:
    from hsa.models.memory import set_test_memory

    skipped: list[InvalidInput] = []
    if text:
        raise InvalidInput(
            "text",
            got=", ".join(text),
            expected="no value for a classifier or regressor",
            fix="Leave it out: the model knows its columns",
        )
    if memory is not None:
        set_test_memory(loaded.model, memory)
    test = loaded.data_set(data, collect_errors(skipped, skip_bad))
    evaluation = loaded.evaluate(test)
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
    loaded: LoadedLanguageModel,
    data: Path,
    context: int | None,
    memory: int | None,
    text: tuple[str, ...],
    skip_bad: bool,
) -> dict[str, int | float]:
    import torch

    from hsa.cli.runs import split_words
    from hsa.training.language_model.inference import evaluate_text

    if skip_bad:
        raise InvalidInput("skip_bad", got=True, expected="no value for a language model", fix="Leave it out")
    loaded.to("cuda" if torch.cuda.is_available() else "cpu")
    return asdict(evaluate_text(loaded, data, columns=split_words(text), context=context, memory=memory))


def collect_errors(skipped: list[InvalidInput], allowed: bool) -> Callable[[InvalidInput], None]:
    """Return a function that adds the error of a bad row to `skipped` if `allowed`, else raises it."""
    from hsa.training.data.sources import or_skip

    def on_bad(error: InvalidInput) -> None:
        if not allowed:
            raise or_skip(error)
        skipped.append(error)

    return on_bad
