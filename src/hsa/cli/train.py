"""`hsa train`: a model and its baselines on the user's data, and an honest table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from hsa.cli.progress import TrainingBar, say_results, say_where
from hsa.cli.runs import NAMED, completed, is_recipe, no_time_limit, quicker, read_data, run_folder, words
from hsa.training.options import (
    DataOptions,
    DocumentOptions,
    LanguageOptions,
    Match3Options,
    ModelOptions,
    Seq2SeqOptions,
    TrainingOptions,
)
from hsa.training.recipe import Recipe, overridden

if TYPE_CHECKING:
    from rich.console import Console

    from hsa.training.data.prepare import PreparedData
    from hsa.training.experiment import Result
    from hsa.training.failures import NoResult


_QUICK_SEQUENCES = 2_000


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

    Without DATA: which package of the Python standard library does a class or function come from? The examples are
    made from the Python installation, nothing is downloaded.

    With --task lm: a language model of texts, beside one with flat attention; `hsa generate` writes with it. DATA is a text,
    a folder of texts, or a table with --text columns; without DATA, what the Python standard library says about itself.

    With --task seq2seq: an encoder–decoder that writes the --label column from the --text column. Without DATA: made-up
    documents of which one sentence is to be repeated.

    With --task match3: of made-up numbers, which ones make three that match? Three-way attention against attention to pairs.

    Several processes: `accelerate launch -m hsa.cli.main train …` or `torchrun --nproc-per-node 2 -m hsa.cli.main train …`

    Args:
        data: A .csv, .tsv, .json, .jsonl or .parquet file, a folder per class, or a recipe (.yaml). Flags override a recipe.
        out: Folder for the results; runs/NAME by default.
        models: What to train: hierarchical, multiscale, clustered, bottom-up, flat, trilinear,
            hierarchical-trilinear, deepsets, han, hat, transformer-xl; multiscale, clustered, flat, transformer-xl for the
            task lm; hierarchical, multiscale, clustered, flat (the encoder) for seq2seq. The first model is the reference;
            the others are matched to its size.
            Classifiers named NAME+FUSION fuse their heads so: hierarchical+talking beside hsa.
        resume: Go on where a run in the same folder stopped.
        quick: Few examples and epochs: a look at how it works, in half a minute.
        cpu: Do not use a GPU.
        fsdp: Shard the model over processes (FSDP2).
    """
    from rich.console import Console

    recipe = _recipe(Recipe(data, words(models), read, model, training, language, seq2seq, match3, documents), quick)
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


def _recipe(given: Recipe, quick: bool) -> Recipe:
    if is_recipe(given.data) or given.read.task in ("classification", "regression"):
        given = completed(given)
    elif given.read.task == "lm":
        given = _lm_recipe(given, quick)
    elif given.read.task == "seq2seq":
        given = _seq2seq_recipe(given)
    else:
        given = _match3_recipe(given)
    if quick:
        given = quicker(given)
        few = min(given.match3.sequences, _QUICK_SEQUENCES)
        given = replace(given, match3=replace(given.match3, sequences=few))
    return given


def _lm_recipe(given: Recipe, quick: bool) -> Recipe:
    """Sizes that suit a megabyte of text and two cores."""
    default = Recipe(
        given.data,
        ("multiscale", "flat"),
        DataOptions(task="lm", vocabulary=4096),
        ModelOptions(width=128, layers=2, dropout=0.0),
        TrainingOptions(
            epochs=4,
            learning_rate=3e-3,
            schedule="cosine",
            weight_decay=0.1,
            batch_tokens=2048 if quick else 8192,
        ),
        LanguageOptions(context=256, steps=100 if quick else 0),
    )
    return overridden(default, given, NAMED.get())


def _seq2seq_recipe(given: Recipe) -> Recipe:
    """Sizes that suit short documents and two cores."""
    default = Recipe(
        given.data,
        ("hierarchical", "flat"),
        DataOptions(task="seq2seq", vocabulary=512 if given.data is None else 4096),
        ModelOptions(width=64, dropout=0.0),
        TrainingOptions(epochs=6, learning_rate=3e-3, batch_size=32, patience=0),
        LanguageOptions(branching=(4, 4), positions="both"),
    )
    return overridden(default, given, NAMED.get())


def _match3_recipe(given: Recipe) -> Recipe:
    """What learns to match three numbers in minutes on one core; recipes/match3.yaml says the same."""
    default = Recipe(
        given.data,
        ("trilinear", "flat", "deepsets"),
        DataOptions(task="match3"),
        ModelOptions(width=64, head_dim=32, dropout=0.0, position_width=0),
        TrainingOptions(epochs=10, learning_rate=2e-3, batch_size=256, patience=0),
    )
    return overridden(default, given, NAMED.get())


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
        documents=recipe.documents,
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
    made_up = prepared.reading.kind == "match3"
    following = "" if made_up else f"hsa predict {model} {_more_of(recipe, prepared)}"
    say_where(console, model, folder / "report.md", pictures, following)


def _more_of(recipe: Recipe, prepared: PreparedData) -> str:
    """What the model could read next."""
    return {"python": "FILE.py", "news": "FILE"}.get(prepared.reading.kind, str(recipe.data))
