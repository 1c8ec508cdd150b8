"""`hsa reproduce`: run an experiment with conversions, as a recipe describes it."""

from __future__ import annotations

from pathlib import Path

from hsa.errors import InvalidInput


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
    cpu: bool = False,
) -> None:
    """Fine-tune an encoder on the tasks of a recipe, convert it in the ways of the recipe, and compare.

    convert_table3, convert_appendix_l and convert_table8 are the paper's experiments. Resumes when it is
    started again with the same --out.

    Args:
        recipe: A recipe, such as recipes/convert_table3.yaml.
        data: The folder with the files that the recipe names.
        model: The encoder to fine-tune: a folder, or a name on the hub.
        given: TASK=FOLDER: a model that is fine-tuned already.
        hub: Take the checkpoints that the paper used, from the hub.
        tasks: Tasks of the recipe to run; all, unless given.
        limit: Most test texts of each task.
        out: Folder for models and results; runs/NAME by default.
        cpu: Do not use a GPU.
    """
    import torch
    from rich.console import Console
    from rich.text import Text

    from hsa.analysis.tables import print_table, terminal_table
    from hsa.huggingface.fidelity.sweep import Sweep
    from hsa.huggingface.fidelity.sweep_recipe import load_sweep
    from hsa.huggingface.fidelity.sweep_report import tabulate, write_sweep_report

    console = Console()
    wanted = load_sweep(recipe, tasks)
    models = _pairs(given)
    unknown = sorted(set(models) - set(wanted.tasks))
    if unknown:
        raise InvalidInput("--given", given=unknown[0], expected=f"some of {', '.join(wanted.tasks)}")
    folder = out or Path("runs") / recipe.stem
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
    rows = list(sweep.run())
    if not rows:
        reasons = "; ".join(f"{name}: {why}" for name, why in sweep.skipped.items())
        raise InvalidInput(str(recipe), given=f"no task that can run ({reasons})", expected="at least one")
    pictures = write_sweep_report(folder, wanted.title, rows, sweep.skipped)
    console.print()
    print_table(console, terminal_table(*tabulate(rows)))
    console.print()
    for name, why in sweep.skipped.items():
        console.print(Text(f"{name} was skipped: {why}", style="yellow"))
    console.print(Text(f"report    {folder / 'report.md'}"), soft_wrap=True)
    if pictures:
        console.print(Text(f"pictures  {', '.join(map(str, pictures))}"), soft_wrap=True)


def _pairs(given: tuple[str, ...]) -> dict[str, str]:
    for pair in given:
        if "=" not in pair:
            raise InvalidInput("--given", given=pair, expected="TASK=FOLDER")
    return dict(pair.split("=", 1) for pair in given)
