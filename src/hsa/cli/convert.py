"""`hsa convert`: convert a pre-trained model to attention over trees, and report the change in quality and cost."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from cyclopts import Parameter

from hsa.cli.help import HelpPage
from hsa.cli.progress import Bars, format_time, print_paths
from hsa.cli.runs import NAMED
from hsa.errors import HsaWarning, InvalidInput
from hsa.huggingface.settings import Kind, LayerSettings, Tree
from hsa.table_format import TableFormat

if TYPE_CHECKING:
    from rich.console import Console

    from hsa.huggingface.fidelity.estimate import Estimate
    from hsa.huggingface.fidelity.examples import Examples
    from hsa.huggingface.fidelity.judge import Judge
    from hsa.huggingface.fidelity.pieces import Pieces
    from hsa.huggingface.fidelity.report import Report


@dataclass(frozen=True)
class TextOptions(TableFormat):
    """The texts to evaluate on.

    Args:
        text: Column of the text; two columns make a pair. By default a column with a common name, such as "text".
        label: Column of the labels, or of the similarity of a pair.
        split: Value of the column "split" in the rows to use; by default "validation", else "test", if there is such a
            column.
        join: Join several columns into one text, rather than a pair.
        limit: Maximum number of texts, drawn at random; by default 1,000. For --task lm, of pieces from different texts; by
            default 16.
        max_tokens: Length in tokens at which texts are cut, or of the pieces for --task lm. By default the model's limit, at
            most 4,096.
    """

    text: tuple[str, ...] = ()
    label: str | None = None
    split: str | None = None
    join: bool = False
    limit: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class SettingOptions:
    """Settings of converted layers, as of hsa.huggingface.convert. Without any, a converted model keeps its own.

    Args:
        only_layers: Numbers of the layers to convert, from 0; negative numbers count from the end. All by default.
        kind: Kind of attention: clustered (multiscale over clustered keys), multiscale (over a tree) or hierarchical (the
            paper's, over a tree).
        tree: Tree for multiscale and hierarchical: windows of consecutive tokens, or the sentences of the text; windows by
            default.
        branching: Members per family, from the leaves up; the last factor repeats, except for hierarchical. 8 2 by default.
            In language models: keys per group, groups per node and nodes per chunk, 8 8 4 by default.
        near: For multiscale: number of neighbouring families on each side that are attended to exactly.
        threshold: Share of a query's attention from which a group of keys is attended to exactly. Smaller is closer to the
            original and slower. 1/256 by default for language models; for encoders it replaces --top-k if it is given.
        top_k: Number of groups of keys that each query attends to exactly: the best ones; 8 by default. More is closer to
            the original and slower. Language models select by --threshold instead, unless it is given.
        pooled_bias: Number that is added to the logits of pooled nodes.
        sinks: Number of first tokens that are always attended to exactly, or "special" for the special tokens.
        tile: Number of neighbouring queries that share a selection; by default 1, a leaf family for multiscale, or 64 in
            language models.
        exact_until: Number of tokens up to which language models, and encoders with a threshold, attend exactly: the first
            tokens of a text in language models, shorter texts in encoders. 2,048 by default.
    """

    only_layers: tuple[int, ...] = ()
    kind: Kind = LayerSettings.kind
    tree: Tree | None = LayerSettings.tree  # type: ignore[assignment]  # no function here
    branching: tuple[int, ...] | None = LayerSettings.branching
    near: int = LayerSettings.near
    threshold: float | None = LayerSettings.threshold  # type: ignore[assignment]  # one for all heads
    top_k: int | None = LayerSettings.top_k
    pooled_bias: float = LayerSettings.pooled_bias  # type: ignore[assignment]  # one for all heads
    sinks: str = str(LayerSettings.sinks)
    tile: int | None = LayerSettings.tile
    exact_until: int | None = LayerSettings.exact_until

    def values(self) -> dict[str, Any]:
        """Return the settings as keywords of `hsa.huggingface.convert`."""
        values = {name: value for name, value in vars(self).items() if name != "only_layers"}
        return {**values, "sinks": int(self.sinks) if self.sinks.isdecimal() else self.sinks}


T = TypeVar("T")
_SETTINGS = "Converted layers"

HELP = HelpPage(
    examples={
        "hsa convert tuned test.csv": "default settings",
        'hsa convert tuned test.csv --budget "accuracy -0.5"': "search settings",
        'hsa convert gpt2 a.csv --task lm --budget "perplexity 1%"': "a language model",
    },
    common=(
        *("task", "text", "label", "limit", "max_tokens"),
        *("kind", "threshold", "top_k", "only_layers", "budget"),
        *("out", "dry_run", "json", "cpu"),
    ),
    topics={
        "Run": (),
        "Data": ("text", "label", "split", "join", "limit", "max_tokens"),
        "Search (--budget)": ("budget", "calibration", "calibrate_on", "every_layer"),
        _SETTINGS: (),
        "Report": ("lengths", "json"),
    },
)


def convert(
    model: str,
    data: Path,
    /,
    *,
    task: Literal["classification", "embedding", "lm"] = "classification",
    budget: str | None = None,
    calibration: Path | None = None,
    calibrate_on: int | None = None,
    every_layer: bool = False,
    out: Path | None = None,
    lengths: tuple[int, ...] = (),
    cpu: bool = False,
    dry_run: bool = False,
    json: bool = False,
    read: Annotated[TextOptions, Parameter(name="*", group="Data")] = TextOptions(),  # noqa: B008
    settings: Annotated[SettingOptions, Parameter(name="*", group=_SETTINGS)] = SettingOptions(),  # noqa: B008
) -> None:
    """Convert a pre-trained transformer, and report its quality, time and memory.

    Replaces softmax attention by attention over trees. Runs the original and the converted model on your data and compares
    their outputs, counts operations, measures time and memory at several lengths, and saves the converted model with a
    report and pictures.

    With --budget it searches the settings of each layer. Budgets are "ops 4x" (a quarter of the operations),
    "accuracy -0.5" (at most half a point lost), "kept 98%" (of the predictions), "cosine 0.985" (between embeddings) and
    "perplexity +0.5%".

    Load the converted model with transformers, then call `hsa.huggingface.convert(model)` to switch to the attention that
    its config describes.

    Args:
        model: A folder or a name on the hub: a classifier, an encoder (--task embedding) or a language model (--task lm).
        data: A .csv, .tsv, .json, .jsonl or .parquet file of texts.
        task: Outputs to compare: classes (classification), embeddings (embedding), or the perplexity of a language model
            (lm).
        budget: Budget of quality or operations, such as "accuracy -0.5" or "ops 4x", to search settings for. Replaces the
            settings of layers.
        calibration: File of texts to search on; by default some of DATA, which are then left out of the report.
        calibrate_on: Maximum number of texts to search on, at most half of DATA; by default 128. For --task lm, of pieces;
            by default 4.
        every_layer: Convert every layer, with --budget; by default the search may keep layers exact.
        out: Folder for the results; runs/convert-NAME by default. A search reuses the measurements in this folder.
        lengths: Lengths in tokens to measure time and memory at; several up to the longest input by default.
        cpu: Do not use a GPU.
        dry_run: Only estimate time and memory, from one batch of the texts; write nothing.
        json: Print the report as JSON, for scripts.
    """
    from rich.console import Console

    from hsa.huggingface.fidelity.calibrate import CALIBRATION_FILE
    from hsa.huggingface.fidelity.parts import PARTS_FILE
    from hsa.huggingface.fidelity.report import write_report
    from hsa.huggingface.loading import save_model
    from hsa.huggingface.text_input import TextInput
    from hsa.running import Interrupted, claimed, sigterm_as_interrupt

    console = Console(stderr=json)
    folder = out or Path("runs") / f"convert-{Path(model).name}"
    bars = Bars(console)
    with claimed(folder), sigterm_as_interrupt():
        try:
            run, drawn = _prepare(
                model,
                data,
                task,
                budget,
                calibration,
                calibrate_on,
                every_layer,
                folder,
                lengths,
                cpu,
                read,
                settings,
                bars,
            )
            if dry_run:
                _show_estimate(console, run.in_memory(run.estimate, drawn), drawn, json)
                return
            report = run.in_memory(run.measure, drawn)
            if task == "classification":
                own = {name: getattr(read, name) for name in ("text", "label", "join", "max_tokens")}
                TextInput.of(run.model).changed(**own).save_in(run.model)
            save_model(folder / "model", run.model, run.tokenizer)
            pictures = write_report(folder, report)
        except KeyboardInterrupt:
            kept = any((folder / name).exists() for name in (CALIBRATION_FILE, PARTS_FILE))
            advice = f"; the same command goes on from what is in {folder}" if kept else " before anything was measured"
            raise Interrupted(f"stopped{advice}") from None
        (folder / PARTS_FILE).unlink(missing_ok=True)
    if json:
        print((folder / "report.json").read_text(encoding="utf-8"), end="")
        return
    _show(console, report, folder, pictures)


def _prepare(
    name: str,
    data: Path,
    task: str,
    budget: str | None,
    calibration: Path | None,
    calibrate_on: int | None,
    every_layer: bool,
    folder: Path,
    lengths: tuple[int, ...],
    cpu: bool,
    read: TextOptions,
    options: SettingOptions,
    bars: Bars,
) -> tuple[_Run, _Drawn]:
    import torch

    from hsa.huggingface.fidelity.calibrate import METRICS, Budget
    from hsa.huggingface.loading import load_for_task, most_tokens

    check_counts(limit=read.limit, max_tokens=read.max_tokens, calibrate_on=calibrate_on)
    if budget is not None:  # before anything is loaded
        Budget.parse(budget).check(METRICS[task])
        named = sorted(NAMED.get() & set(vars(options)) - {"exact_until"})
        if named:
            raise InvalidInput(
                f"--{named[0].replace('_', '-')}",
                got="a setting together with --budget",
                expected="one of them",
                fix="--budget searches layers and settings itself",
            )
    device = "cuda" if torch.cuda.is_available() and not cpu else "cpu"
    examples, held = _load_texts(data, calibration if budget is not None else None, read)
    bars.say(f"loading {name}")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model, tokenizer = load_for_task(name, task, device=device, dtype=dtype)
    most = most_tokens(model, tokenizer)
    longest = _length(read.max_tokens, most)
    too_long = next((length for length in lengths if not 1 <= length <= most), None)
    if too_long is not None:
        raise InvalidInput("lengths", got=too_long, expected=f"1 to {most:,}, the limit of the model")
    if budget is not None and task == "lm":
        _check_longer_than_exact(longest, options)
    drawn = _Drawn.of(examples, held, task, tokenizer, longest, budget, calibrate_on, read.limit)
    if drawn.note:
        bars.say(drawn.note)
    short = Path(name).name if Path(name).is_dir() else name
    settings = _settings(model, tokenizer, options) if budget is None else None
    _say_crossover(model, settings, options, longest, bars)
    run = _Run(
        short,
        task,
        model,
        tokenizer,
        longest,
        lengths,
        settings,
        budget,
        every_layer,
        options.exact_until,
        folder,
        bars,
    )
    return run, drawn


def _say_crossover(
    model: Any, settings: dict[int, LayerSettings] | None, options: SettingOptions, longest: int, bars: Bars
) -> None:
    """Print from which length on converted attention is faster on this machine."""
    from rich.text import Text

    from hsa.huggingface.fidelity.crossover import measure_crossover

    bars.say("measuring from which length on converted attention is faster")
    typical = (
        LayerSettings(exact_until=options.exact_until) if settings is None else next(iter(settings.values()), None)
    )
    crossover = None if typical is None else measure_crossover(model, typical)
    if crossover is not None:
        bars.console.print(Text(f"{crossover}; texts are cut at {longest:,} tokens"), soft_wrap=True)


def _load_texts(data: Path, calibration: Path | None, read: TextOptions) -> tuple[Examples, Examples | None]:
    """Return the texts of the data, and those of the file to search on if there is one."""
    from hsa.huggingface.fidelity.examples import SPLITS, load_examples

    shared: dict[str, Any] = {name: getattr(read, name) for name in ("text", "label", "join", "delimiter", "encoding")}
    examples = load_examples(data, **shared, split=read.split)
    if calibration is None:
        return examples, None
    return examples, load_examples(calibration, **shared, usual=("train", *SPLITS))


def _check_longer_than_exact(longest: int, options: SettingOptions) -> None:
    """Check that pieces are so long that converted decoders do not attend exactly to all of them."""
    exact = LayerSettings(exact_until=options.exact_until).exact_length(causal=True)
    if longest <= exact:
        raise InvalidInput(
            "max_tokens",
            got=longest,
            expected=f"more than {exact:,} with --budget, as the first {exact:,} tokens of a text attend exactly",
            fix="Pass smaller --exact-until for short texts",
        )


def _length(wanted: int | None, most: int) -> int:
    """Return the length at which texts are cut. Warn if it is not the one that the user wants."""
    if wanted is not None and wanted > most:
        warnings.warn(
            f"--max-tokens {wanted}: the model reads at most {most:,} tokens, so texts are cut there. Models with rotary "
            "positions read more if these are scaled, for example with YaRN: rope_parameters in config.json",
            HsaWarning,
            stacklevel=2,
        )
    return min(wanted or 4096, most)


@dataclass(frozen=True)
class _Drawn:
    """Texts, or pieces of texts for a language model, to report on, and to search on with a budget."""

    report: Examples | Pieces
    search: Examples | Pieces | None = None
    note: str = ""

    @classmethod
    def of(
        cls,
        examples: Examples,
        held: Examples | None,
        task: str,
        tokenizer: Any,
        longest: int,
        budget: str | None,
        calibrate_on: int | None,
        limit: int | None,
    ) -> _Drawn:
        if task != "lm":
            searched = calibrate_on or 128
            if budget is None:
                return cls(examples.sample(limit or 1000))
            if held is None:
                held = examples.sample(min(searched, len(examples) // 2), seed=1)
                examples = _without(examples, held)
            return cls(examples.sample(limit or 1000), held.sample(searched))
        from hsa.huggingface.fidelity.pieces import cut_pieces, split_pieces

        reported, searched = limit or 16, calibrate_on or 4
        if budget is None:
            pieces = cut_pieces(examples, tokenizer, longest, reported)
            return cls(pieces, None, f"reporting on {pieces}")
        if held is None:
            search, report = split_pieces(examples, tokenizer, longest, searched, reported)
        else:
            search = cut_pieces(held, tokenizer, longest, searched)
            report = cut_pieces(examples, tokenizer, longest, reported)
        return cls(report, search, f"searching on {search}, reporting on {report}")


@dataclass(frozen=True)
class _Run:
    """A model and how to convert and measure it."""

    name: str
    task: str
    model: Any
    tokenizer: Any
    longest: int
    lengths: tuple[int, ...]
    settings: dict[int, LayerSettings] | None  # None to search for them
    budget: str | None
    every_layer: bool
    exact_until: int | None
    folder: Path
    bars: Bars

    def in_memory(self, work: Callable[[_Drawn, int], T], drawn: _Drawn) -> T:
        """Return the result of `work`, which is called with the texts and a number of tokens per batch that fits."""
        from hsa.training.failures import OutOfMemory, catch_oom

        device = self.model.device.type
        batch = {"cpu": 2**13, "cuda": 2**15 if self.task == "lm" else 2**17}[device]
        for batch_tokens in (batch, self.longest) if batch >= 2 * self.longest else (self.longest,):
            try:
                return catch_oom(work)(drawn, batch_tokens)
            except OutOfMemory:
                if batch_tokens > self.longest:
                    self.bars.say("out of memory; one text at a time")
        raise self.explain_oom(device)

    def _judge(self, texts: Any, batch_tokens: int) -> Judge:
        from hsa.huggingface.fidelity.judge import Judge

        return Judge(texts, self.task, self.model, self.tokenizer, longest=self.longest, batch_tokens=batch_tokens)

    def estimate(self, drawn: _Drawn, batch_tokens: int) -> Estimate:
        """Estimate time and memory of `measure` from one batch."""
        from hsa.huggingface.conversion import convert, revert, settings_of
        from hsa.huggingface.fidelity.estimate import estimate
        from hsa.huggingface.fidelity.timing import list_lengths

        settings = self.settings
        if settings is None:  # typical ones
            revert(self.model)
            settings = settings_of(convert(self.model, tokenizer=self.tokenizer, exact_until=self.exact_until))
        report = self._judge(drawn.report, batch_tokens)
        count = max(1, batch_tokens // int(report.tokens.lengths.mean()))
        self.bars.say("measuring one batch")
        return estimate(
            self.model,
            settings,
            self._judge(drawn.report.sample(count), batch_tokens),
            report,
            None if drawn.search is None else self._judge(drawn.search, batch_tokens),
            list(self.lengths) or list_lengths(self.longest),
            tokenizer=self.tokenizer,
        )

    def measure(self, drawn: _Drawn, batch_tokens: int) -> Report:
        """Search for settings if there is a budget, convert the model, and compare it with the original."""
        from hsa.huggingface.conversion import convert_as
        from hsa.huggingface.fidelity.calibrate import Budget, calibrate
        from hsa.huggingface.fidelity.parts import Parts
        from hsa.huggingface.fidelity.report import Report
        from hsa.huggingface.fidelity.timing import list_lengths

        model, tokenizer, settings, search = self.model, self.tokenizer, self.settings, None
        if settings is None:
            assert self.budget is not None
            assert drawn.search is not None
            if too_few := Budget.parse(self.budget).too_few(len(drawn.search)):
                warnings.warn(too_few, HsaWarning, stacklevel=2)
            with self.bars.running() as watch:
                search = calibrate(
                    model,
                    self._judge(drawn.search, batch_tokens),
                    self.budget,
                    every_layer=self.every_layer,
                    exact_until=self.exact_until,
                    tokenizer=tokenizer,
                    folder=self.folder,
                    watch=watch,
                )
            settings = search.settings
        judge = self._judge(drawn.report, batch_tokens)
        lengths = list(self.lengths) or list_lengths(self.longest)
        parts = Parts(self.folder, judge, convert_as(model, {}, tokenizer=tokenizer), settings)
        if len(parts):
            self.bars.say(f"continuing from the finished parts in {self.folder}")
        with self.bars.running() as watch:
            before = parts.answers(
                "original", lambda: judge.ask(model, self.bars.counter(watch, "original model", len(judge)))
            )
            convert_as(model, settings, tokenizer=tokenizer)
            after = parts.answers(
                "converted", lambda: judge.ask(model, self.bars.counter(watch, "converted model", len(judge)))
            )
            timed = parts.times(model, settings, lengths, tokenizer, partial(watch, "time at each length"))
        return Report.of(self.name, judge, settings, before, after, timed=timed, calibration=search, budget=self.budget)

    def explain_oom(self, device: str) -> Exception:
        """Return the error for texts that do not fit into memory one at a time."""
        import torch

        from hsa.cli.out_of_memory import explain
        from hsa.huggingface.conversion import convert, convert_as
        from hsa.huggingface.fidelity.next_tokens import final_states, mean_losses

        model = convert(self.model, tokenizer=self.tokenizer)
        if self.settings:
            convert_as(model, self.settings, tokenizer=self.tokenizer)

        @torch.inference_mode()
        def run(tokens: int) -> None:
            ids = torch.ones(1, tokens, dtype=torch.long, device=device)
            if self.task == "lm":
                mean_losses(model, ids, final_states(model, ids))
            else:
                model(input_ids=ids)

        smaller = "Pass smaller --max-tokens" + (" or --lengths" if self.lengths else "")
        return explain(run, self.longest, device, lambda fits: f"Pass --max-tokens {fits}", smaller)


def check_counts(**counts: int | None) -> None:
    """Check that every count is at least 1, or None."""
    for name, value in counts.items():
        if value is not None and value < 1:
            raise InvalidInput(name, got=value, expected="1 or more")


def _settings(model: Any, tokenizer: Any, options: SettingOptions) -> dict[int, LayerSettings]:
    """Convert the model and return its settings by layer: those of the command line, else those of its config."""
    from hsa.huggingface.conversion import convert, revert, settings_of

    if settings_of(model) and not NAMED.get() & set(vars(options)):
        return settings_of(convert(model, tokenizer=tokenizer))
    revert(model)
    return settings_of(convert(model, options.only_layers or None, tokenizer=tokenizer, **options.values()))


def _without(examples: Any, drawn: Any) -> Any:
    """Return the examples without the texts of `drawn`."""
    seen = set(drawn.texts)
    rest = [i for i, texts in enumerate(examples.texts) if texts not in seen]
    if not rest or not seen:
        raise InvalidInput(
            examples.name,
            got=f"{len(set(examples.texts))} different texts",
            expected="at least 2, to search on some and to test on the others",
            fix="Pass --calibration FILE to search on other texts",
        )
    return examples.part(rest)


def _show_estimate(console: Console, found: Estimate, drawn: _Drawn, json: bool) -> None:
    from rich.text import Text

    from hsa.analysis.memory import format_mib

    if json:
        print(dumps(asdict(found), indent=2))
        return
    stages = {"search": found.search, "report": found.report, "times at each length": found.times}
    memory = f"{format_mib(found.weights)} of weights"
    if found.memory is not None:
        memory += f", and about {format_mib(found.memory)} beside them"
    nouns = "pieces" if drawn.note else "texts"
    lines = [f"estimate, from one batch of {found.texts:,} of {len(drawn.report):,} {nouns}:"]
    lines += [f"  {stage:<22}about {format_time(seconds)}" for stage, seconds in stages.items() if seconds]
    for line in [*lines, f"  {'memory':<22}{memory}", "nothing was converted"]:
        console.print(Text(line), soft_wrap=True)


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
    table(HEADERS["layers"], report.layer_rows(), f"million operations per {report.unit}")
    if report.calibration is not None:
        table(
            frontier_header(report.calibration.frontier, report.budget),
            report.frontier_rows(),
            "on the texts of the search",
        )
    table(HEADERS["times"], report.time_rows(), "one sequence, forward")
    console.print()
    for remark in report.remarks():
        console.print(Text(remark, style="yellow"))
    print_paths(console, folder / "model", folder / "report.md", pictures)
