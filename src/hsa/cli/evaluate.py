"""`hsa evaluate`: test a saved model on new data."""

from __future__ import annotations

import json as json_format
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from hsa.cli.help import HelpPage
from hsa.cli.new_data import load_for_data, open_data, refuse_options
from hsa.errors import InvalidInput
from hsa.table_format import TableFormat

if TYPE_CHECKING:
    from hsa.cli.by_class import ByClass
    from hsa.training.data.data_set import DataSet
    from hsa.training.inference import LoadedClassifier
    from hsa.training.language_model.inference import LoadedLanguageModel
    from hsa.training.loop import Evaluation
    from hsa.training.text_classifier import LabelledTexts

Numbers = dict[str, Any]
"""Scores and costs by name."""

HELP = HelpPage(
    examples={
        "hsa evaluate runs/reviews/hierarchical new.csv": "a classifier or regressor",
        "hsa evaluate tuned new.csv --text body --label stars": "a model of hsa finetune or convert",
        "hsa evaluate runs/books/multiscale new.txt": "a language model",
    },
)


def evaluate(
    model: Path,
    data: Path,
    /,
    *,
    text: tuple[str, ...] = (),
    label: str | None = None,
    split: str | None = None,
    context: int | None = None,
    test_memory: int | None = None,
    skip_bad: bool = False,
    json: bool = False,
    table: Annotated[TableFormat, Parameter(name="*")] = TableFormat(),  # noqa: B008
) -> None:
    """Test a model on new data: labelled examples, or a text.

    Args:
        model: Folder of a run, such as runs/reviews, of one of its models, such as runs/reviews/flat, or of a classifier of
            transformers that `hsa finetune` or `hsa convert` saved.
        data: A file with the columns that the model was trained on, or a folder per class; for a language model a text, a
            folder of texts or a table.
        text: Columns of a table that hold text, for a language model or a classifier of transformers. By default those of
            the latter's training.
        label: Column of the labels, for a classifier of transformers.
        split: For a classifier of transformers: value of the column "split" in the rows to use; by default "validation",
            else "test", if there is such a column.
        context: For language models: tokens per block, instead of the number in training; not for transformer-xl, which
            reads segments.
        test_memory: For transformer-xl: tokens of earlier segments to remember, instead of the number in training; 0 to
            read every segment on its own.
        skip_bad: Skip rows and files that cannot be read, and count them.
        json: Print the numbers as JSON, for scripts.
    """
    from rich.console import Console
    from rich.text import Text

    from hsa.training.inference import LoadedClassifier
    from hsa.training.language_model.inference import LoadedLanguageModel
    from hsa.training.text_classifier import LoadedTextClassifier

    loaded = load_for_data(model, text, label)
    by_class: ByClass | None = None
    if isinstance(loaded, LoadedLanguageModel):
        refuse_options("language model", label=label, split=split, skip_bad=skip_bad)
        numbers = _language_model(loaded, data, context, test_memory, text, table)
    elif isinstance(loaded, LoadedTextClassifier):
        refuse_options("classifier of transformers", context=context, test_memory=test_memory)
        skipped: list[InvalidInput] = []
        rows = open_data(loaded, data, table)
        test = loaded.data_set(rows, collect_errors(skipped, skip_bad), split)
        numbers, by_class = _scores(test, loaded.evaluate(test), len(skipped))
        numbers = {"split": test.split, **numbers} if test.split else numbers
    elif isinstance(loaded, LoadedClassifier):
        own = {"text": text, "label": label, "split": split, "context": context}
        refuse_options("classifier or regressor of hsa train", **own)
        numbers, by_class = _classifier(loaded, data, test_memory, skip_bad, table)
    else:
        raise InvalidInput(
            str(loaded.folder),
            got="an encoder–decoder",
            expected="a classifier, a regression model or a language model",
            fix="Its scores are in the report of its run; hsa predict answers new prompts",
        )
    if json:
        print(
            json_format.dumps(
                {**numbers, **({} if by_class is None else by_class.to_dict())}, indent=2, ensure_ascii=False
            )
        )
        return
    console = Console(highlight=False)
    for name, value in numbers.items():
        shown = f"{value:,.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        console.print(Text(f"{name.replace('_', ' '):<22}{shown}"))
    if by_class is not None:
        by_class.print(console)


def _classifier(
    loaded: LoadedClassifier, data: Path, memory: int | None, skip_bad: bool, table: TableFormat
) -> tuple[Numbers, ByClass | None]:
    from hsa.models.memory import set_test_memory

    if memory is not None:
        set_test_memory(loaded.model, memory)
    skipped: list[InvalidInput] = []
    test = loaded.data_set(open_data(loaded, data, table), collect_errors(skipped, skip_bad))
    return _scores(test, loaded.evaluate(test), len(skipped))


def _scores(test: DataSet | LabelledTexts, evaluation: Evaluation, skipped: int) -> tuple[Numbers, ByClass | None]:
    """Return scores and costs by name, and the scores of each class; none for numbers."""
    from hsa.cli.by_class import ByClass
    from hsa.training.text_classifier import LabelledTexts

    scores = {name: value for name, value in asdict(evaluation.scores).items() if value is not None}
    numbers: Numbers = {"examples": len(test), "skipped": skipped, **scores, "loss": evaluation.loss}
    if evaluation.operations or not isinstance(test, LabelledTexts):  # of exact transformers, none are counted
        numbers["attention_operations"] = evaluation.operations / len(test)
    numbers["seconds"] = evaluation.seconds
    if not test.classes:
        return numbers, None
    return numbers, ByClass.of(evaluation.predicted, test.targets.numpy(), test.classes)


def _language_model(
    loaded: LoadedLanguageModel,
    data: Path,
    context: int | None,
    memory: int | None,
    text: tuple[str, ...],
    table: TableFormat,
) -> Numbers:
    import torch

    from hsa.cli.runs import split_words
    from hsa.training.language_model.inference import evaluate_text

    loaded.to("cuda" if torch.cuda.is_available() else "cpu")
    scores = evaluate_text(loaded, data, columns=split_words(text), context=context, memory=memory, table=table)
    return asdict(scores)


def collect_errors(skipped: list[InvalidInput], allowed: bool) -> Callable[[InvalidInput], None]:
    """Return a function that adds the error of a bad row to `skipped` if `allowed`, else raises it."""
    from hsa.training.data.sources import or_skip

    def on_bad(error: InvalidInput) -> None:
        if not allowed:
            raise or_skip(error)
        skipped.append(error)

    return on_bad
