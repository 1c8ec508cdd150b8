"""`hsa convert`: convert a pre-trained model to attention over trees, and report what that keeps and saves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from hsa.cli.progress import Bars
from hsa.cli.runs import NAMED
from hsa.errors import InvalidInput
from hsa.huggingface.settings import Kind, LayerSettings, Tree

if TYPE_CHECKING:
    from rich.console import Console

    from hsa.huggingface.fidelity.judge import Judge
    from hsa.huggingface.fidelity.report import Report


@dataclass(frozen=True)
class TextOptions:
    """Where the texts are.

    Args:
        text: Column of the text; two make a pair. Common names are recognised.
        label: Column of labels, or of the similarity of a pair.
        split: Value of the column "split" in the rows to use; validation, else test, where there is such a column.
        join: Join several columns to one text, not a pair.
        limit: Most texts, drawn at random.
        max_tokens: Longest input in tokens; longer texts are cut. By default as long as the model takes, at most 4,096.
    """

    text: tuple[str, ...] = ()
    label: str | None = None
    split: str | None = None
    join: bool = False
    limit: int | None = 1000
    max_tokens: int | None = None


@dataclass(frozen=True)
class SettingOptions:
    """Settings of converted layers, as of hsa.huggingface.convert. Without any, a converted model keeps its own.

    Args:
        only_layers: Numbers of the layers to convert, from 0, negative from the end; all, unless given.
        kind: Multiscale attention over clustered keys or over a tree, or the paper's operator over a tree.
        tree: Windows of consecutive tokens (default) or the sentences of the text; for multiscale and hierarchical.
        branching: Members per family, from the leaves up; the last factor repeats, except for the paper's operator.
        near: Neighbouring families that are exact (multiscale only).
        top_k: Groups that are exact, the best for each query: the fidelity dial.
        pooled_bias: Number added to the logits of pooled nodes.
        sinks: Number of first tokens that are always exact, or "special".
        tile: Neighbouring queries that share a selection.
        chunk: Tokens whose keys are clustered together; 256 in causal models, else all, unless given.
    """

    only_layers: tuple[int, ...] = ()
    kind: Kind = LayerSettings.kind
    tree: Tree | None = LayerSettings.tree  # type: ignore[assignment]  # no function here
    branching: tuple[int, ...] = LayerSettings.branching
    near: int = LayerSettings.near
    top_k: int = LayerSettings.top_k
    pooled_bias: float = LayerSettings.pooled_bias  # type: ignore[assignment]  # one for all heads
    sinks: str = str(LayerSettings.sinks)
    tile: int | None = LayerSettings.tile
    chunk: int | None = LayerSettings.chunk

    def values(self) -> dict[str, Any]:
        """Return them as `hsa.huggingface.convert` takes them."""
        given = {name: value for name, value in vars(self).items() if name != "only_layers"}
        return {**given, "sinks": int(self.sinks) if self.sinks.isdecimal() else self.sinks}


def convert(
    model: str,
    data: Path,
    /,
    *,
    task: Literal["classification", "embedding", "lm"] = "classification",
    budget: str | None = None,
    calibration: Path | None = None,
    calibrate_on: int = 128,
    every_layer: bool = False,
    out: Path | None = None,
    lengths: tuple[int, ...] = (),
    cpu: bool = False,
    json: bool = False,
    read: Annotated[TextOptions, Parameter(name="*", group="Data")] = TextOptions(),  # noqa: B008
    settings: Annotated[SettingOptions, Parameter(name="*", group="Settings")] = SettingOptions(),  # noqa: B008
) -> None:
    """Convert a pre-trained transformer to attention over trees, and report what that keeps and saves.

    Runs the original and the converted model on your data and compares their answers, counts operations, measures time and
    memory at several lengths, and saves the converted model with a report and pictures. With --budget it searches settings
    layer by layer: "ops 4x", "accuracy -0.5", "kept 98%", "cosine 0.985", "perplexity +1%".

    Load the result like any model; then `hsa.huggingface.convert(model)` turns its attention on, as its config says.

    Args:
        model: A folder or a name on the hub: a classifier, an encoder (--task embedding), a language model (--task lm).
        data: A .csv, .tsv, .json, .jsonl or .parquet file of texts.
        task: Answers to compare: classes, embeddings, or the perplexity of a language model.
        budget: Limit for a search of layers and settings, which are then not given.
        calibration: A file of texts to search on; else some of the data, which the report leaves out.
        calibrate_on: Most texts to search on; at most half of the data.
        every_layer: With a budget: leave no layer exact.
        out: Folder for the results; runs/convert-NAME by default. Measurements that are there are used again.
        lengths: Tokens to measure time and memory at; up to the longest, unless given.
        cpu: Do not use a GPU.
        json: Print the report as JSON, for scripts.
    """
    from rich.console import Console

    from hsa.huggingface.fidelity.report import write_report
    from hsa.huggingface.loading import save_model

    console = Console(stderr=json)
    folder = out or Path("runs") / f"convert-{Path(model).name}"
    bars = Bars(console)
    report, converted, tokenizer = _convert(
        model, data, task, budget, calibration, calibrate_on, every_layer, folder, lengths, cpu, read, settings, bars
    )
    save_model(folder / "model", converted, tokenizer)
    pictures = write_report(folder, report)
    if json:
        print((folder / "report.json").read_text(encoding="utf-8"), end="")
        return
    _show(console, report, folder, pictures)


def _convert(
    name: str,
    data: Path,
    task: str,
    budget: str | None,
    calibration: Path | None,
    calibrate_on: int,
    every_layer: bool,
    folder: Path,
    lengths: tuple[int, ...],
    cpu: bool,
    read: TextOptions,
    options: SettingOptions,
    bars: Bars,
) -> tuple[Report, Any, Any]:
    import torch

    from hsa.huggingface.conversion import convert_as
    from hsa.huggingface.fidelity.calibrate import Budget, calibrate
    from hsa.huggingface.fidelity.examples import SPLITS, load_examples
    from hsa.huggingface.fidelity.judge import Judge
    from hsa.huggingface.fidelity.report import Report
    from hsa.huggingface.fidelity.timing import list_lengths, time_model
    from hsa.huggingface.loading import load_for_task, most_tokens

    check_counts(limit=read.limit, max_tokens=read.max_tokens, calibrate_on=calibrate_on)
    if budget is not None:
        Budget.parse(budget)  # before anything is loaded
        given = sorted(NAMED.get() & set(vars(options)))
        if given:
            raise InvalidInput(
                f"--{given[0].replace('_', '-')}",
                given="a setting, with --budget",
                expected="one or the other",
                fix="a budget searches layers and settings itself",
            )
    device = "cuda" if torch.cuda.is_available() and not cpu else "cpu"
    texts = {"text": read.text, "label": read.label, "join": read.join}
    examples = load_examples(data, split=read.split, **texts)  # type: ignore[arg-type]
    bars.say(f"loading {name}")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model, tokenizer = load_for_task(name, task, device=device, dtype=dtype)
    most = most_tokens(model, tokenizer)
    longest = min(read.max_tokens or 4096, most)
    too_long = next((length for length in lengths if not 1 <= length <= most), None)
    if too_long is not None:
        raise InvalidInput("lengths", given=too_long, expected=f"1 to {most:,}, the most that the model takes")
    budget_tokens = 2**17 if device == "cuda" else 2**13

    def judge_of(some: Any) -> Judge:
        return Judge(some, task, model, tokenizer, longest=longest, batch_tokens=budget_tokens)

    search = None
    if budget is not None:
        if calibration is not None:
            held = load_examples(calibration, usual=("train", *SPLITS), **texts)  # type: ignore[arg-type]
        else:
            held = examples.sample(min(calibrate_on, len(examples) // 2), seed=1)
            examples = _without(examples, held)
        with bars.running() as watch:
            search = calibrate(
                model,
                judge_of(held.sample(calibrate_on)),
                budget,
                every_layer=every_layer,
                tokenizer=tokenizer,
                folder=folder,
                watch=watch,
            )
        settings = search.settings
    else:
        settings = _settings(model, tokenizer, options)
    judge = judge_of(examples.sample(read.limit))
    convert_as(model, {}, tokenizer=tokenizer)
    with bars.running() as watch:
        before = judge.ask(model, bars.counter(watch, "original", len(judge)))
        convert_as(model, settings, tokenizer=tokenizer)
        after = judge.ask(model, bars.counter(watch, "converted", len(judge)))
        timed_lengths = list(lengths) or list_lengths(longest)
        timed = time_model(
            model,
            settings,
            timed_lengths,
            tokenizer=tokenizer,
            watch=lambda length: watch("time at each length", timed_lengths.index(length) + 1, len(timed_lengths)),
        )
    short = Path(name).name if Path(name).is_dir() else name
    report = Report.of(short, judge, settings, before, after, timed=timed, calibration=search, budget=budget)
    return report, model, tokenizer


def check_counts(**given: int | None) -> None:
    for name, value in given.items():
        if value is not None and value < 1:
            raise InvalidInput(name, given=value, expected="1 or more")


def _settings(model: Any, tokenizer: Any, options: SettingOptions) -> dict[int, LayerSettings]:
    """Return the settings of the command line; without any, those of a model that was converted before."""
    from hsa.huggingface.conversion import convert, revert, settings_of

    if settings_of(model) and not NAMED.get() & set(vars(options)):
        return settings_of(convert(model, tokenizer=tokenizer))
    revert(model)
    return settings_of(convert(model, options.only_layers or None, tokenizer=tokenizer, **options.values()))


def _without(examples: Any, drawn: Any) -> Any:
    """Return the texts that the search has not seen."""
    seen = set(drawn.texts)
    rest = [i for i, texts in enumerate(examples.texts) if texts not in seen]
    if not rest or not seen:
        raise InvalidInput(
            examples.name,
            given=f"{len(set(examples.texts))} different texts",
            expected="at least 2: some to search on, others to test the result",
            fix="pass --calibration FILE to search on other texts",
        )
    return examples.part(rest)


def _show(console: Console, report: Report, folder: Path, pictures: list[Path]) -> None:
    from rich.text import Text

    from hsa.analysis.tables import print_table, terminal_table
    from hsa.huggingface.fidelity.report import HEADERS, frontier_header

    def table(header: list[str], rows: list[list[str]], caption: str | None = None) -> None:
        if rows:
            console.print()
            print_table(console, terminal_table(header, rows, caption))

    console.print(Text(f"{report.model} on {report.data}: {report.summary}"))
    table(HEADERS["scores"], report.score_rows())
    table(HEADERS["layers"], report.layer_rows(), "million operations per text")
    if report.calibration is not None:
        table(frontier_header(report.calibration.frontier), report.frontier_rows(), "on the texts searched on")
    table(HEADERS["times"], report.time_rows(), "one sequence, forward")
    console.print()
    for remark in report.remarks():
        console.print(Text(remark, style="yellow"))
    for line in (
        f"\nmodel     {folder / 'model'}",
        f"report    {folder / 'report.md'}",
        f"pictures  {', '.join(str(picture) for picture in pictures)}",
    ):
        console.print(Text(line), soft_wrap=True)
