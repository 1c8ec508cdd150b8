"""`hsa train --task seq2seq`: train encoder–decoders on prompts and answers, and compare their answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hsa.cli.progress import TrainingBar, print_paths, print_results, refuse_several_processes, skipped_line
from hsa.training.old_run import remove_run
from hsa.training.recipe import Recipe

if TYPE_CHECKING:
    from rich.console import Console


def run_seq2seq(
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool,
    overwrite: bool,
    quick: bool,
    cpu: bool,
    fsdp: bool,
    console: Console,
) -> None:
    """Read the data, train every model of the recipe, and write and print the report."""
    import torch
    from rich.text import Text

    from hsa.training.experiment import check_entmax
    from hsa.training.failures import NoResult, complain
    from hsa.training.seq2seq.data import prepare_pairs
    from hsa.training.seq2seq.loop import check_seq2seq_models
    from hsa.training.seq2seq.report import compare_seq2seq, example_lines, seq2seq_table, write_seq2seq_report

    check_seq2seq_models(recipe.models)
    check_entmax(recipe.models, recipe.model)
    refuse_several_processes("seq2seq", fsdp)

    def say(message: str) -> None:
        console.print(Text(f"{message} …", style="dim"))

    data = prepare_pairs(
        recipe.data,
        recipe.read,
        seed=recipe.training.seed,
        small=quick,
        max_answer=recipe.seq2seq.max_answer,
        say=say,
    )
    leaves, tokens = len(data.train.prompts.values["text"]), len(data.train.answers)
    console.print(
        Text(
            f"{data.name}: {len(data.train):,} to train, {len(data.validation):,} to validate, {len(data.test):,} to test; "
            f"{leaves / len(data.train):,.0f} leaves per prompt, {tokens / len(data.train):,.0f} tokens per answer"
        )
    )
    if data.skipped:
        console.print(Text(skipped_line(data.skipped), style="yellow"))
    console.print(Text(f"results go to {folder}", style="dim"))
    if overwrite:
        remove_run(folder)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() and not cpu else None
    failed: dict[str, NoResult] = {}
    results = compare_seq2seq(
        recipe,
        data,
        folder,
        resume=resume,
        device=device or "cpu",
        watch=lambda name: TrainingBar(name, "tokens right", console),
        on_failure=failed.__setitem__,
    )
    if results:
        write_seq2seq_report(folder, recipe, data, results, failed)
        print_results(console, seq2seq_table(results, failed), example_lines(results[0]), soft_wrap=True)
        print_paths(console, folder / results[0].model, folder / "report.md")
    complain(failed)
