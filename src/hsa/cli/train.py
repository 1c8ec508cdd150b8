"""`hsa train`: a model and its baselines on the user's data, and an honest table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from hsa.baselines.options import DocumentOptions
from hsa.cli.progress import TrainingBar, say_results, say_where
from hsa.cli.runs import completed, no_time_limit, read_data, run_folder, words
from hsa.models.options import ModelOptions
from hsa.research.match3.options import Match3Options
from hsa.training.options import DataOptions, LanguageOptions, Seq2SeqOptions, TrainingOptions
from hsa.training.recipe import Recipe

if TYPE_CHECKING:
    from rich.console import Console

    from hsa.training.data.prepare import PreparedData
    from hsa.training.experiment import Result
    from hsa.training.failures import NoResult


def train(
    data: Path | None = None,
    /,
    *,
    out: Path | None = None,
    models: tuple[str, ...] = Recipe.models,
    resume: bool = False,
    quick: bool = False,
    cpu: bool = False,
    fsdp: bool = False,
    read: Annotated[DataOptions, Parameter(name="*", group="Data")] = DataOptions(),  # noqa: B008
    model: Annotated[ModelOptions, Parameter(name="*", group="Model")] = ModelOptions(),  # noqa: B008
    training: Annotated[TrainingOptions, Parameter(name="*", group="Training")] = TrainingOptions(),  # noqa: B008
    language: Annotated[LanguageOptions, Parameter(name="*", group="Language model")] = LanguageOptions(),  # noqa: B008
    seq2seq: Annotated[Seq2SeqOptions, Parameter(name="*", group="Encoder–decoder")] = Seq2SeqOptions(),  # noqa: B008
    match3: Annotated[Match3Options, Parameter(name="*", group="Match3")] = Match3Options(),  # noqa: B008
    documents: Annotated[DocumentOptions, Parameter(name="*", group="Document models")] = DocumentOptions(),  # noqa: B008
) -> None:
    """Train a classifier, regressor or language model that uses the structure of your data, and see whether it helped.

    Trains the hierarchical encoder and baselines with as many parameters (softmax attention over all leaves; no attention),
    tests them on held-out data, and writes the models, a report and pictures to a folder.

    Without DATA: which package of the Python standard library does a class or function come from? The examples
    come from the Python installation; nothing is downloaded.

    With --task lm: a language model of texts, beside one with flat attention; `hsa generate` writes with it. DATA is a text,
    a folder of texts, or a table with --text columns; without DATA, the docstrings of the Python standard library.

    With --task seq2seq: an encoder–decoder that writes the --label column from the --text column. Without DATA: generated
    documents with one sentence to repeat.

    With --task match3: generated numbers, to find those that make three that match: three-way against pairwise attention.

    Several processes: `accelerate launch -m hsa.cli.main train …` or `torchrun --nproc-per-node 2 -m hsa.cli.main train …`

    Args:
        data: A .csv, .tsv, .json, .jsonl or .parquet file, a folder per class, or a recipe (.yaml). Flags override a recipe.
        out: Folder for the results; runs/NAME by default.
        models: What to train: hierarchical, multiscale, clustered, bottom-up, flat, trilinear,
            hierarchical-trilinear, deepsets, han, hat, transformer-xl; multiscale, clustered, flat, transformer-xl for the
            task lm; hierarchical, multiscale, clustered, flat (the encoder) for seq2seq. The first model is the reference;
            the others are matched to its size.
            NAME+FUSION is a classifier with its heads fused in that way: hierarchical+talking.
        resume: Continue the run in the same folder where it stopped.
        quick: Few examples, at most 4 epochs and a width of 64: a look at how it works, in half a minute.
        cpu: Do not use a GPU.
        fsdp: Shard the model over processes (FSDP2).
    """
    from rich.console import Console

    extra = {"match3": match3, "documents": documents}
    recipe = completed(Recipe(data, words(models), read, model, training, language, seq2seq, extra), quick)
    console = Console(stderr=False)
    if recipe.read.task in ("lm", "seq2seq"):
        no_time_limit(recipe)
    if recipe.read.task == "lm":
        from hsa.cli.train_lm import run_lm

        run_lm(recipe, run_folder(recipe, out, resume), resume=resume, cpu=cpu, fsdp=fsdp, console=console)
        return
    if recipe.read.task == "seq2seq":
        from hsa.cli.train_seq2seq import run_seq2seq

        folder = run_folder(recipe, out, resume)
        run_seq2seq(recipe, folder, resume=resume, quick=quick, cpu=cpu, fsdp=fsdp, console=console)
        return
    _run(recipe, out, resume=resume, quick=quick, cpu=cpu, fsdp=fsdp, console=console)


def _run(
    recipe: Recipe, out: Path | None, *, resume: bool, quick: bool, cpu: bool, fsdp: bool, console: Console
) -> None:
    from hsa.training.accelerator import make_accelerator
    from hsa.training.experiment import check_models, train_models
    from hsa.training.failures import complain

    check_models(recipe.models)  # before the data are read
    accelerator = make_accelerator(recipe.training, fsdp=fsdp, cpu=cpu)
    main = accelerator.is_main_process
    folder = run_folder(recipe, out, resume)
    prepared = read_data(recipe, accelerator, folder, small=quick, console=console)
    score = "accuracy" if prepared.train.classes else "R²"
    failed: dict[str, NoResult] = {}
    results = train_models(
        recipe.models,
        recipe.model,
        prepared,
        recipe.training,
        folder,
        accelerator,
        extra=recipe.extra,
        resume=resume,
        watch=(lambda name: TrainingBar(name, score, console)) if main else None,
        on_failure=failed.__setitem__,
    )
    if main and results:
        _report(console, recipe, prepared, results, failed, folder)
    complain(failed)


def _report(
    console: Console,
    recipe: Recipe,
    prepared: PreparedData,
    results: list[Result],
    failed: dict[str, NoResult],
    folder: Path,
) -> None:
    from hsa.training.report import report_lines, result_table, write_report

    pictures = write_report(folder, recipe, prepared, results, failed)
    say_results(console, result_table(results, failed), report_lines(prepared, results))
    model = folder / results[0].model
    generated = prepared.input_spec.kind == "generated"
    following = "" if generated else f"hsa predict {model} {_more_of(recipe, prepared)}"
    say_where(console, model, folder / "report.md", pictures, following)


def _more_of(recipe: Recipe, prepared: PreparedData) -> str:
    """What the model could read next."""
    return {"python": "FILE.py", "news": "FILE"}.get(prepared.input_spec.kind, str(recipe.data))
