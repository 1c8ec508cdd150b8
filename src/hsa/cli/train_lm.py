"""`hsa train --task lm`: train language models of a text, and compare how well they predict it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hsa.cli.progress import TrainingBar, print_paths, print_results, refuse_several_processes
from hsa.errors import InvalidInput
from hsa.training.old_run import remove_run
from hsa.training.recipe import Recipe

if TYPE_CHECKING:
    from rich.console import Console

    from hsa.training.failures import NoResult
    from hsa.training.language_model.data import LmData
    from hsa.training.language_model.experiment import LmResult


def run_lm(
    recipe: Recipe, folder: Path, *, resume: bool, overwrite: bool, cpu: bool, fsdp: bool, console: Console
) -> None:
    """Read the text, train every model of the recipe, and write and print the report."""
    from rich.text import Text

    from hsa.training.failures import complain
    from hsa.training.language_model.data import prepare_text
    from hsa.training.language_model.experiment import check_lm_models, compare_language_models

    check_lm_models(recipe.models)
    if recipe.model.entmax is not None:
        raise InvalidInput(
            "entmax",
            got=f"{recipe.model.entmax} with the task lm",
            expected="the task classification, regression or seq2seq (for its encoder): decoders use softmax",
        )
    refuse_several_processes("lm", fsdp)

    def say(message: str) -> None:
        console.print(Text(f"{message} …", style="dim"))

    read = recipe.read
    seed = recipe.training.seed
    data = prepare_text(recipe.data, text=read.text, vocabulary=read.vocabulary, seed=seed, table=read, say=say)
    parts = {"train": data.train, "validate": data.validation, "test": data.test}
    sizes = ", ".join(f"{len(tokens):,} to {verb}" for verb, tokens in parts.items())
    console.print(Text(f"{data.name}: {data.characters / 1e6:,.1f} M characters; tokens: {sizes}"))
    console.print(Text(f"results go to {folder}", style="dim"))
    if overwrite:
        _check_start(recipe.language.init_from, folder)
        remove_run(folder)
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


def _check_start(start: Path | None, folder: Path) -> None:
    """Raise an error if the initial weights are in the folder that will be overwritten."""
    if start is not None and start.resolve().is_relative_to(folder.resolve()):
        got = f"{start}, which --overwrite would remove"
        raise InvalidInput("init_from", got=got, expected="a run in another folder", fix="Pass another --out")


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
    print_results(console, lm_table(results, failed), lm_lines(results))
    model = folder / results[0].model
    print_paths(console, model, folder / "report.md", pictures, ("hsa", "generate", model, "--prompt", "The"))
