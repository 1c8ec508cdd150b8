"""`hsa compare`: compare models on the same data at the same budget."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from hsa.baselines.options import DocumentOptions
from hsa.cli.comparison_bar import ComparisonBar
from hsa.cli.defaults import defaults_by_task
from hsa.cli.help import HelpPage
from hsa.cli.progress import print_paths, print_results
from hsa.cli.runs import NAMED, complete_recipe, measure_references, read_data, remove_old_run, run_folder, split_words
from hsa.cli.topics import DATA, DOCUMENTS, MODEL, TOPICS, TRAINING
from hsa.errors import InvalidInput
from hsa.models.options import ModelOptions
from hsa.training.options import DataOptions, TrainingOptions
from hsa.training.recipe import Recipe

if TYPE_CHECKING:
    from rich.console import Console

    from hsa.training.compare import Compared, Plan
    from hsa.training.compare_report import Comparison
    from hsa.training.data.prepare import PreparedData

TASKS = ("classification", "regression")
MODELS = ("hierarchical", "multiscale", "flat", "deepsets", "han", "hat", "transformer-xl")
RATES = ("3e-4", "1e-3", "3e-3")
_QUICK_RATES = ("3e-3", "1e-2")
_QUICK_SEEDS = 2
_QUICK_TOKENS = 128
_QUICK_LENGTHS = (256, 512, 1024, 2048)
_EPOCHS_WITHIN_MINUTES = 100


def _defaults(tokens: Sequence[str]) -> tuple[str, dict[str, Any]]:
    return "Defaults are those for your own DATA.", {"learning_rate": None}  # --rates applies instead


def _defaults_by_task() -> str:
    return defaults_by_task(TASKS, models=False)


HELP = HelpPage(
    examples={
        "hsa compare --quick": "built-in data",
        "hsa compare reviews.csv --text text --label stars": "seven models",
        "hsa compare reviews.yaml --models hat flat --minutes 9": "equal time",
    },
    common=(
        *("models", "rates", "seeds", "text", "label", "test", "max_tokens"),
        *("width", "layers", "epochs", "minutes"),
        *("out", "resume", "quick", "cpu"),
    ),
    topics=TOPICS,
    defaults=_defaults,
    epilogue=_defaults_by_task,
)


def compare(
    data: Path | None = None,
    /,
    *,
    models: tuple[str, ...] = MODELS,
    rates: tuple[str, ...] = RATES,
    seeds: int = 3,
    out: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    quick: bool = False,
    json: bool = False,
    cpu: bool = False,
    read: Annotated[DataOptions, Parameter(name="*", group=DATA)] = DataOptions(),  # noqa: B008
    model: Annotated[ModelOptions, Parameter(name="*", group=MODEL)] = ModelOptions(),  # noqa: B008
    documents: Annotated[DocumentOptions, Parameter(name="*", group=DOCUMENTS)] = DocumentOptions(),  # noqa: B008
    training: Annotated[TrainingOptions, Parameter(name="*", group=TRAINING)] = TrainingOptions(),  # noqa: B008
) -> None:
    """Compare models at an equal budget: quality, operations, time and memory.

    All models get the same number of parameters as the first, and the same number of epochs (--epochs) or the same time
    (--minutes). Each is trained with every learning rate; the rate with the best validation score is kept and trained with
    further seeds. The test data are not used to select anything.

    Without DATA, the examples are the classes and functions of the Python standard library, and the label is the package
    they come from; --example listops compares models of nested expressions.

    With --minutes, every run trains for this time, but for at most 100 epochs and with --patience 0, unless you pass
    --epochs or --patience.

    Args:
        data: A .csv, .tsv, .json, .jsonl or .parquet file, a folder per class, or a recipe (.yaml). Options on the command
            line override those of a recipe.
        models: Models to compare: any classifiers of `hsa train`.
        rates: Learning rates to try for each model. --learning-rate stands for a single one.
        seeds: Number of seeds: --seed and the following numbers.
        out: Folder for the results; runs/compare-NAME by default. Each run has a folder MODEL/RATE/SEED there.
        resume: Continue the comparison in the same folder where it stopped. You may add models, rates and seeds.
        overwrite: Start again in the folder of an earlier comparison and remove what that wrote there. Without --out, in
            that of the latest comparison with this name.
        quick: Use few examples, epochs, rates and seeds, to see how it works.
        json: Print only the results, as JSON, for scripts.
        cpu: Do not use a GPU.
    """
    from rich.console import Console

    from hsa.running import Interrupted, claimed
    from hsa.training.accelerator import make_accelerator
    from hsa.training.compare import compare_models
    from hsa.training.compare_report import JSON, Comparison

    console = Console(stderr=json)
    recipe = _recipe(Recipe(data, split_words(models), read, model, training, extra={"documents": documents}), quick)
    plan = _plan(recipe, rates, seeds, quick)  # before the data are read, so that wrong names are reported at once
    accelerator = make_accelerator(recipe.training, cpu=cpu)
    with claimed(run_folder(recipe, out, resume, overwrite, accelerator, kind="compare-")) as folder:
        try:
            prepared = read_data(recipe, accelerator, folder, small=quick, console=console)
            if overwrite:
                remove_old_run(folder, accelerator)
            references = measure_references(recipe, prepared, accelerator, small=quick, console=console)
            bar = ComparisonBar(plan, "accuracy" if prepared.test.classes else "R²", console)
            with bar if accelerator.is_main_process else nullcontext():
                observer = bar if accelerator.is_main_process else None
                compared = compare_models(plan, recipe, prepared, folder, accelerator, resume=resume, observer=observer)
                if references is None:  # not the main process
                    return
                costs = _costs(compared, prepared, folder, accelerator, bar, quick)
        except KeyboardInterrupt:
            began = any(path.is_dir() for path in folder.iterdir())
            advice = f"; continue with --out {shlex.quote(str(folder))} --resume" if began else " before the first run"
            raise Interrupted(f"stopped{advice}") from None
        comparison = Comparison(plan, recipe, prepared, compared, references, costs, _device(accelerator))
        pictures = comparison.write(folder)
    if json:
        print((folder / JSON).read_text(encoding="utf-8"), end="")
        return
    _show(console, comparison, folder, pictures)


def _recipe(options: Recipe, quick: bool) -> Recipe:
    """Return the recipe of a comparison: one of a classifier or regressor, with its limits of time and length."""
    recipe = complete_recipe(options, quick, MODELS, example="python")
    if recipe.read.task not in TASKS:
        raise InvalidInput(
            "task",
            got=recipe.read.task,
            expected=" or ".join(TASKS),
            fix=f"Run hsa train --task {recipe.read.task} --models … to compare models of that task",
        )
    if quick:
        most = min(recipe.read.max_tokens or _QUICK_TOKENS, _QUICK_TOKENS)
        recipe = replace(recipe, read=replace(recipe.read, max_tokens=most))
    training, named = recipe.training, NAMED.get()
    if training.minutes and "minutes" in named:
        training = replace(
            training,
            epochs=training.epochs if "epochs" in named else _EPOCHS_WITHIN_MINUTES,
            patience=training.patience if "patience" in named else 0,
        )
    return replace(recipe, training=training)


def _plan(recipe: Recipe, rates: tuple[str, ...], seeds: int, quick: bool) -> Plan:
    from hsa.training.compare import Plan

    named = NAMED.get()
    if quick:
        rates = rates if "rates" in named else _QUICK_RATES
        seeds = seeds if "seeds" in named else _QUICK_SEEDS
    if "learning_rate" in named:
        if "rates" in named:
            raise InvalidInput("learning_rate", got="both --learning-rate and --rates", expected="one of them")
        rates = (f"{recipe.training.learning_rate:g}",)
    if seeds < 1:
        raise InvalidInput("seeds", got=seeds, expected="1 or more")
    first = recipe.training.seed
    return Plan(recipe.models, tuple(map(_rate, split_words(rates))), tuple(range(first, first + seeds)))


def _rate(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise InvalidInput("rates", got=repr(word), expected="learning rates, such as 3e-4,1e-3") from None


def _costs(
    compared: list[Compared], prepared: PreparedData, folder: Path, accelerator: Any, bar: ComparisonBar, quick: bool
) -> list[Any]:
    from hsa.training.length_costs import LENGTHS, length_costs

    folders = {model.model: model.runs[0].folder(folder) for model in compared if model.runs}
    lengths = _QUICK_LENGTHS if quick else LENGTHS
    return length_costs(folders, prepared, accelerator, lengths=lengths, watch=bar.measuring)


def _device(accelerator: Any) -> str:
    import torch

    on_gpu = accelerator.device.type == "cuda"
    return torch.cuda.get_device_name(accelerator.device) if on_gpu else "this CPU"


def _show(console: Console, comparison: Comparison, folder: Path, pictures: list[Path]) -> None:
    print_results(console, comparison.table(), comparison.findings())
    best = comparison.finished[0].runs[0].folder(folder) if comparison.finished else None
    print_paths(console, best, folder / "report.md", pictures)
