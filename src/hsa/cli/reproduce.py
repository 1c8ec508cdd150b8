"""`hsa reproduce`: run a conversion experiment that a recipe describes."""

from __future__ import annotations

from pathlib import Path

from hsa.cli.help import HelpPage
from hsa.cli.progress import print_paths
from hsa.cli.runs import choose_folder
from hsa.errors import InvalidInput

_RUNS = ("results.jsonl", "models/*/finetuning.json")
"""Files in the folder of each run."""

HELP = HelpPage(
    examples={
        "hsa reproduce recipes/convert_table3.yaml data --hub": "the paper's Table 3",
        "hsa reproduce recipes/convert_dial.yaml data --given imdb=tuned": "your model",
    },
)


def reproduce(
    recipe: Path,
    data: Path,
    /,
    *,
    model: str | None = None,
    given: tuple[str, ...] = (),
    hub: bool = False,
    tasks: tuple[str, ...] = (),
    limit: int | None = None,
    out: Path | None = None,
    resume: bool = False,
    cpu: bool = False,
) -> None:
    """Run a conversion experiment: fine-tune encoders, convert them, compare.

    The recipes convert_table3, convert_appendix_l and convert_table8 are the paper's experiments.

    Args:
        recipe: A recipe, such as recipes/convert_table3.yaml.
        data: Folder with the data files that the recipe names.
        model: Encoder to fine-tune: a folder or a name on the hub.
        given: TASK=FOLDER: a fine-tuned model to use for a task.
        hub: Use the paper's fine-tuned models, from the hub.
        tasks: Tasks of the recipe to run; all by default.
        limit: Maximum number of test texts per task.
        out: Folder for models and results; runs/NAME by default.
        resume: Continue the run in the same folder where it stopped.
        cpu: Do not use a GPU.
    """
    import torch
    from rich.console import Console
    from rich.text import Text

    from hsa.analysis.tables import print_table, terminal_table
    from hsa.huggingface.fidelity.sweep import Sweep
    from hsa.huggingface.fidelity.sweep_recipe import load_sweep
    from hsa.huggingface.fidelity.sweep_report import tabulate, write_sweep_report
    from hsa.running import claimed

    console = Console()
    wanted = load_sweep(recipe, tasks)
    models = _pairs(given)
    unknown = sorted(set(models) - set(wanted.tasks))
    if unknown:
        raise InvalidInput("--given", got=unknown[0], expected=f"one of {', '.join(wanted.tasks)}")
    folder = choose_folder(recipe.stem, out, resume, files=_RUNS)
    sweep = Sweep(
        wanted,
        model,
        data,
        folder,
        given=models,
        from_hub=hub,
        device="cuda" if torch.cuda.is_available() and not cpu else "cpu",
        limit=limit,
        say=lambda message: console.print(Text(f"{message} …", style="dim"), soft_wrap=True),
    )
    with claimed(folder):
        rows = list(sweep.run())
        if not rows:
            reasons = "; ".join(f"{name}: {why}" for name, why in sweep.skipped.items())
            raise InvalidInput(str(recipe), problem=f"no task that can run ({reasons})", expected="at least one")
        pictures = write_sweep_report(folder, wanted.title, rows, sweep.skipped)
    console.print()
    print_table(console, terminal_table(*tabulate(rows)))
    console.print()
    for name, why in sweep.skipped.items():
        console.print(Text(f"{name} was skipped: {why}", style="yellow"))
    print_paths(console, None, folder / "report.md", pictures)


def _pairs(given: tuple[str, ...]) -> dict[str, str]:
    for pair in given:
        if "=" not in pair:
            raise InvalidInput("--given", got=pair, expected="TASK=FOLDER")
    return dict(pair.split("=", 1) for pair in given)
