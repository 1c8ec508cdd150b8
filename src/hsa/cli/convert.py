"""`hsa convert`: hierarchical attention in a pre-trained model, and what that costs and saves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from hsa.cli.progress import Bars
from hsa.cli.runs import NAMED
from hsa.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console

    from hsa.huggingface.fidelity.judge import Judge
    from hsa.huggingface.fidelity.report import Report
    from hsa.huggingface.settings import LayerSettings


@dataclass(frozen=True)
class TextOptions:
    """Where the texts are.

    Args:
        text: Column of the text; two make a pair. The usual names are found by themselves.
        label: Column of labels, or of how alike a pair is.
        split: Only rows whose column "split" says so; validation, else test, where there is such a column.
        join: Several columns are one text, not a pair.
        limit: At most so many texts, drawn at random.
        length: Longest input in tokens; as long as the model takes, at most 4,096, unless given.
    """

    text: tuple[str, ...] = ()
    label: str | None = None
    split: str | None = None
    join: bool = False
    limit: int | None = 1000
    length: int | None = None


@dataclass(frozen=True)
class SettingOptions:
    """How layers attend; see hsa.huggingface.conversion. Without any of these a converted model keeps its own.

    Args:
        layers: Numbers from 0, negative from the end; all, unless given.
        operator: Every query keeps its row, or the paper's operator.
        hierarchy: Trees found from the keys of each head, fixed windows, or the text's sentences.
        branching: Members per family, from the leaves up; the last repeats (multiscale).
        near: Neighbouring families that are exact.
        top_k: More families that are exact, the best for each query: the fidelity dial.
        pooled_bias: Added to the logits of pooled nodes.
        sinks: First tokens that are always exact, or "special".
        share: Neighbouring queries that share a choice.
        chunk: Tokens that are searched for trees together; 256 in causal models, else all, unless given.
    """

    layers: tuple[int, ...] = ()
    operator: Literal["multiscale", "hierarchical"] = "multiscale"
    hierarchy: Literal["keys", "windows", "sentences"] = "keys"
    branching: tuple[int, ...] = (8, 2)
    near: int = 0
    top_k: int = 8
    pooled_bias: float = 0.0
    sinks: str = "1"
    share: int | None = None
    chunk: int | None = None

    def values(self) -> dict[str, Any]:
        """As `convert` takes them."""
        given = {name: value for name, value in vars(self).items() if name != "layers"}
        return {**given, "sinks": int(self.sinks) if self.sinks.isdecimal() else self.sinks}


def convert(
    model: str,
    /,
    *,
    data: Path,
    task: Literal["classify", "embed", "perplexity"] = "classify",
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
    """Put hierarchical attention into a pre-trained transformer; see what it keeps and what it saves.

    Runs the original and the converted model on your data and compares their answers, counts operations, measures time and
    memory at several lengths, and saves the converted model with a report and pictures. With --budget it searches settings
    layer by layer: "ops 4x", "accuracy -0.5", "kept 98%", "cosine 0.985", "perplexity +1%".

    Load the result like any model, then `hsa.huggingface.convert(model)` turns its attention on, as its config says.

    Args:
        model: A folder or a name on the hub: a classifier, an encoder (--task embed), a language model (--task perplexity).
        data: A .csv, .tsv, .json, .jsonl or .parquet file of texts.
        task: What answers are compared: classes, embeddings, or the perplexity of a language model.
        budget: What to keep to; layers and settings are then searched instead of given.
        calibration: A file of texts to search on; else some of the data, which the report leaves out.
        calibrate_on: At most so many texts to search on, and no more than half of the data.
        every_layer: With a budget: convert every layer, however little.
        out: Folder for the results; runs/convert-NAME by default. What was measured there before is used again.
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
    from hsa.huggingface.fidelity.timing import lengths_up_to, time_model
    from hsa.huggingface.loading import load_for_task, most_tokens

    _check_counts(limit=read.limit, length=read.length, calibrate_on=calibrate_on)
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
    longest = min(read.length or 4096, most)
    too_long = next((length for length in lengths if not 1 <= length <= most), None)
    if too_long is not None:
        raise InvalidInput("lengths", given=too_long, expected=f"1 to {most:,}, the most that the model takes")
    budget_tokens = 2**17 if device == "cuda" else 2**13

    def judge_of(some: Any) -> Judge:
        return Judge(some, task, model, tokenizer, longest=longest, batch_tokens=budget_tokens)

    found = None
    if budget is not None:
        if calibration is not None:
            held = load_examples(calibration, usual=("train", *SPLITS), **texts)  # type: ignore[arg-type]
        else:
            held = examples.sample(min(calibrate_on, len(examples) // 2), seed=1)
            examples = _without(examples, held)
        with bars.running() as watch:
            found = calibrate(
                model,
                judge_of(held.sample(calibrate_on)),
                budget,
                every_layer=every_layer,
                tokenizer=tokenizer,
                folder=folder,
                watch=watch,
            )
        settings = found.settings
    else:
        settings = _settings(model, tokenizer, options)
    judge = judge_of(examples.sample(read.limit))
    convert_as(model, {}, tokenizer=tokenizer)
    with bars.running() as watch:
        before = judge.ask(model, bars.counter(watch, "original", len(judge)))
        convert_as(model, settings, tokenizer=tokenizer)
        after = judge.ask(model, bars.counter(watch, "converted", len(judge)))
        places = list(lengths) or lengths_up_to(longest)
        timed = time_model(
            model,
            settings,
            places,
            tokenizer=tokenizer,
            watch=lambda length: watch("time at each length", places.index(length) + 1, len(places)),
        )
    short = Path(name).name if Path(name).is_dir() else name
    report = Report.of(short, judge, settings, before, after, timed=timed, calibration=found, budget=budget)
    return report, model, tokenizer


def _check_counts(**given: int | None) -> None:
    for name, value in given.items():
        if value is not None and value < 1:
            raise InvalidInput(name, given=value, expected="1 or more")


def _settings(model: Any, tokenizer: Any, options: SettingOptions) -> dict[int, LayerSettings]:
    """What the command line says; where that says nothing, what a model that was converted before has in its config."""
    from hsa.huggingface.conversion import convert, revert, settings_of

    if settings_of(model) and not NAMED.get() & set(vars(options)):
        return settings_of(convert(model, tokenizer=tokenizer))
    revert(model)
    return settings_of(convert(model, options.layers or None, tokenizer=tokenizer, **options.values()))


def _without(examples: Any, drawn: Any) -> Any:
    """The rest, which the search has not seen."""
    seen = set(drawn.texts)
    rest = [i for i, texts in enumerate(examples.texts) if texts not in seen]
    if not rest or not seen:
        raise InvalidInput(
            examples.name,
            given=f"{len(set(examples.texts))} different texts",
            expected="at least 2: some to search on, others to test what was found",
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
