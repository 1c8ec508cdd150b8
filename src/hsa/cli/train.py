"""`hsa train`: train a model and its baselines on the user's data, and report whether it beats them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from hsa.baselines.options import DocumentOptions
from hsa.cli.defaults import defaults_by_task, task_defaults
from hsa.cli.help import HelpPage
from hsa.cli.progress import TrainingBar, print_paths, print_results
from hsa.cli.runs import (
    complete_recipe,
    measure_references,
    read_data,
    refuse_time_limit,
    remove_old_run,
    run_folder,
    split_words,
)
from hsa.cli.topics import DATA, DOCUMENTS, LANGUAGE, MATCH3, MODEL, SEQ2SEQ, TOPICS, TRAINING
from hsa.models.options import ModelOptions
from hsa.research.match3.options import Match3Options
from hsa.running import claimed
from hsa.table_format import TableFormat
from hsa.training.options import DataOptions, LanguageOptions, Seq2SeqOptions, TrainingOptions
from hsa.training.recipe import Recipe

if TYPE_CHECKING:
    from rich.console import Console

    from hsa.training.data.prepare import PreparedData
    from hsa.training.experiment import Result
    from hsa.training.failures import NoResult
    from hsa.training.reference import References

HELP = HelpPage(
    examples={
        "hsa train --quick": "built-in data, a minute",
        "hsa train reviews.csv --text text --label stars": "a classifier of your texts",
        "hsa train books/ --task lm": "a language model",
    },
    common=(
        *("task", "models", "text", "label", "test", "max_tokens"),
        *("width", "layers", "epochs", "learning_rate"),
        *("out", "resume", "quick", "cpu"),
    ),
    topics=TOPICS,
    defaults=task_defaults,
    epilogue=defaults_by_task,
)


def train(
    data: Path | None = None,
    /,
    *,
    out: Path | None = None,
    models: tuple[str, ...] = Recipe.models,
    resume: bool = False,
    overwrite: bool = False,
    quick: bool = False,
    cpu: bool = False,
    fsdp: bool = False,
    read: Annotated[DataOptions, Parameter(name="*", group=DATA)] = DataOptions(),  # noqa: B008
    model: Annotated[ModelOptions, Parameter(name="*", group=MODEL)] = ModelOptions(),  # noqa: B008
    training: Annotated[TrainingOptions, Parameter(name="*", group=TRAINING)] = TrainingOptions(),  # noqa: B008
    language: Annotated[LanguageOptions, Parameter(name="*", group=LANGUAGE)] = LanguageOptions(),  # noqa: B008
    seq2seq: Annotated[Seq2SeqOptions, Parameter(name="*", group=SEQ2SEQ)] = Seq2SeqOptions(),  # noqa: B008
    match3: Annotated[Match3Options, Parameter(name="*", group=MATCH3)] = Match3Options(),  # noqa: B008
    documents: Annotated[DocumentOptions, Parameter(name="*", group=DOCUMENTS)] = DocumentOptions(),  # noqa: B008
) -> None:
    """Train a classifier, regressor or language model, and compare it with baselines.

    Trains a hierarchical encoder and baselines with the same number of parameters (softmax attention over all leaves; no
    attention), tests them on held-out data, and writes the models, a report and pictures to a folder.

    Without DATA, the models learn to evaluate nested expressions such as [MAX 2 9 [MIN 4 7 ] 0 ], whose tree hierarchical
    models know. With --example python, they learn which package of the Python standard library a class or function comes
    from. Nothing is downloaded.

    --task lm trains a language model and one with flat attention; `hsa generate` continues texts with it. DATA is a text, a
    folder of texts, or a table with --text columns; without DATA, the docstrings of the Python standard library.

    --task seq2seq trains an encoder–decoder that generates the --label column from the --text column. Without DATA, it
    learns to repeat one sentence of a generated document.

    --task match3 compares three-way with pairwise attention: the model finds the numbers of a generated sequence that add
    up to 0 with two others.

    To train in several processes, run `accelerate launch -m hsa.cli.main train …` or
    `torchrun --nproc-per-node 2 -m hsa.cli.main train …`.

    Args:
        data: A .csv, .tsv, .json, .jsonl or .parquet file, a folder per class, or a recipe (.yaml). Options on the command
            line override those of a recipe.
        out: Folder for the results; runs/NAME by default.
        models: Models to train; the first is the reference, the others are matched to its size. Classifiers and regressors:
            hierarchical, multiscale, clustered, bottom-up, flat, trilinear, hierarchical-trilinear, deepsets, han, hat,
            transformer-xl; NAME+FUSION fuses the heads of NAME in another way, such as hierarchical+talking. Language
            models: multiscale, clustered, flat, transformer-xl. Encoders of seq2seq: hierarchical, multiscale, clustered,
            flat.
        resume: Continue the run in the same folder where it stopped. More --epochs than before continue a finished run too;
            the learning rate then follows the schedule of the new number.
        overwrite: Start again in the folder of an earlier run and remove what that run wrote there. Without --out, in that
            of the latest run with this name.
        quick: Use few examples, at most 4 epochs and a width of at most 64, to see how it works.
        cpu: Do not use a GPU.
        fsdp: Shard the model over processes (FSDP2).
    """
    from rich.console import Console

    extra = {"match3": match3, "documents": documents}
    recipe = complete_recipe(Recipe(data, split_words(models), read, model, training, language, seq2seq, extra), quick)
    console = Console(stderr=False)
    if recipe.read.task in ("lm", "seq2seq"):
        refuse_time_limit(recipe)
    if recipe.read.task == "lm":
        from hsa.cli.train_lm import run_lm

        with claimed(run_folder(recipe, out, resume, overwrite)) as folder:
            run_lm(recipe, folder, resume=resume, overwrite=overwrite, cpu=cpu, fsdp=fsdp, console=console)
        return
    if recipe.read.task == "seq2seq":
        from hsa.cli.train_seq2seq import run_seq2seq

        own = {"resume": resume, "overwrite": overwrite, "quick": quick, "cpu": cpu, "fsdp": fsdp}
        with claimed(run_folder(recipe, out, resume, overwrite)) as folder:
            run_seq2seq(recipe, folder, **own, console=console)
        return
    _run(recipe, out, resume=resume, overwrite=overwrite, quick=quick, cpu=cpu, fsdp=fsdp, console=console)


def _run(
    recipe: Recipe,
    out: Path | None,
    *,
    resume: bool,
    overwrite: bool,
    quick: bool,
    cpu: bool,
    fsdp: bool,
    console: Console,
) -> None:
    from hsa.training.accelerator import make_accelerator
    from hsa.training.experiment import check_models, train_models
    from hsa.training.failures import complain

    check_models(recipe.models)  # before the data are read
    accelerator = make_accelerator(recipe.training, fsdp=fsdp, cpu=cpu)
    main = accelerator.is_main_process
    failed: dict[str, NoResult] = {}
    with claimed(run_folder(recipe, out, resume, overwrite, accelerator)) as folder:
        prepared = read_data(recipe, accelerator, folder, small=quick, console=console)
        if overwrite:
            remove_old_run(folder, accelerator)
        score = "accuracy" if prepared.train.classes else "R²"
        references = measure_references(recipe, prepared, accelerator, small=quick, console=console)
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
        if references is not None and results:
            _report(console, recipe, prepared, results, failed, references, folder)
    complain(failed)


def _report(
    console: Console,
    recipe: Recipe,
    prepared: PreparedData,
    results: list[Result],
    failed: dict[str, NoResult],
    references: References,
    folder: Path,
) -> None:
    from hsa.training.report import report_lines, result_table, summary, write_report

    pictures = write_report(folder, recipe, prepared, results, failed, references)
    lines = report_lines(prepared, results, references)
    if meaning := summary(recipe, prepared, results):
        lines += ["", meaning]
    print_results(console, result_table(results, failed, references), lines)
    model = folder / results[0].model
    following: tuple[object, ...] = ("hsa", "predict", model, *_data_to_predict(recipe, prepared))
    if prepared.input_spec.kind == "generated":
        own = ("hsa", "train", "YOUR.csv", "--text", "COLUMN", "--label", "COLUMN")
        following = own if recipe.read.example else ()
    print_paths(console, model, folder / "report.md", pictures, following)


def _data_to_predict(recipe: Recipe, prepared: PreparedData) -> list[str]:
    """Return an example of data that `hsa predict` can read, as words of its command line."""
    if prepared.input_spec.kind != "rows":
        return [{"python": "FILE.py", "news": "FILE"}.get(prepared.input_spec.kind, str(recipe.data))]
    own, usual = asdict(recipe.read), TableFormat()
    named = {name: own[name] for name in ("delimiter", "encoding") if own[name] != getattr(usual, name)}
    return [str(recipe.data), *(word for name, value in named.items() for word in (f"--{name}", value))]
