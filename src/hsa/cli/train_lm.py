"""`hsa train --task lm`: language models of a text, and a table of how well they predict it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hsa.cli.progress import TrainingBar, one_process, say_results, say_where
from hsa.errors import InvalidInput
from hsa.training.recipe import Recipe

if TYPE_CHECKING:
    from rich.console import Console

    from hsa.training.failures import NoResult
    from hsa.training.language_model.data import LmData
    from hsa.training.language_model.experiment import LmResult


def run_lm(recipe: Recipe, folder: Path, *, resume: bool, cpu: bool, fsdp: bool, console: Console) -> None:
    from rich.text import Text

    from hsa.training.failures import complain
    from hsa.training.language_model.data import prepare_text
    from hsa.training.language_model.experiment import check_lm_models, compare_language_models

    check_lm_models(recipe.models)
    if recipe.model.entmax is not None:
        raise InvalidInput(
            "entmax",
            given=f"{recipe.model.entmax} with the task lm",
            expected="classification, regression or seq2seq (its encoder): decoders attend by softmax",
        )
    one_process("lm", fsdp)

    def say(message: str) -> None:
        console.print(Text(f"{message} …", style="dim"))

    read = recipe.read
    data = prepare_text(recipe.data, text=read.text, vocabulary=read.vocabulary, seed=recipe.training.seed, say=say)
    sizes = ", ".join(f"{len(getattr(data, part)):,} to {verb}" for part, verb in _VERBS.items())
    console.print(Text(f"{data.name}: {data.characters / 1e6:,.1f} M characters; tokens: {sizes}"))
    console.print(Text(f"results go to {folder}", style="dim"))
    failed: dict[str, NoResult] = {}
    results = compare_language_models(
        recipe.models,
        recipe.model,
        data,
        recipe.training,
        recipe.language,
        folder,
        extra=recipe.extra,
        resume=resume,
        device="cpu" if cpu else None,
        watch=lambda name: TrainingBar(name, None, console),
        on_failure=failed.__setitem__,
    )
    if results:
        _report(console, recipe, data, results, failed, folder)
    complain(failed)


_VERBS = {"train": "train", "validation": "validate", "test": "test"}


def _report(
    console: Console,
    recipe: Recipe,
    data: LmData,
    results: list[LmResult],
    failed: dict[str, NoResult],
    folder: Path,
) -> None:
    from hsa.training.language_model.report import lm_lines, lm_table, write_lm_report

    pictures = write_lm_report(folder, recipe, data, results, failed)
    say_results(console, lm_table(results, failed), lm_lines(results))
    model = folder / results[0].model
    say_where(console, model, folder / "report.md", pictures, f'hsa generate {model} --prompt "The"')
