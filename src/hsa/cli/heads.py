"""`hsa heads`: measure how similar the heads of a model are, and which can be removed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from hsa.cli.help import HelpPage
from hsa.cli.progress import Bars, print_paths
from hsa.cli.runs import NAMED
from hsa.errors import InvalidInput
from hsa.research.head_kernels.options import ComparisonOptions, HeadDataOptions, PruningOptions

if TYPE_CHECKING:
    from rich.console import Console

    from hsa.research.head_kernels.report import HeadReport


HELP = HelpPage(
    examples={
        "hsa heads runs/reviews/hierarchical reviews.csv": "a model of hsa train",
        "hsa heads bert-base-cased reviews.csv --label stars": "a pre-trained encoder",
        "hsa heads tuned reviews.csv --compare similarity": "without labels",
    },
    common=(
        *("text", "label", "split", "limit", "max_tokens"),
        *("compare", "seed", "prune_on"),
        *("out", "replace", "json", "cpu"),
    ),
    topics={"Run": (), "Data": (), "Comparison": (), "Pruning": ()},
)


def heads(
    model: str,
    data: Path,
    /,
    *,
    out: Path | None = None,
    replace: bool = False,
    cpu: bool = False,
    json: bool = False,
    read: Annotated[HeadDataOptions, Parameter(name="*", group="Data")] = HeadDataOptions(),  # noqa: B008
    comparison: Annotated[ComparisonOptions, Parameter(name="*", group="Comparison")] = ComparisonOptions(),  # noqa: B008
    pruning: Annotated[PruningOptions, Parameter(name="*", group="Pruning")] = PruningOptions(),  # noqa: B008
) -> None:
    """Measure how similar the heads of a model are, and how many can be removed.

    Measures the similarity of heads (centred kernel alignment) and the effective number of distinct heads; learns weights
    of heads that fit the labels (multiple kernel learning, global and conditional on the input) and tests them on held-out
    examples; removes heads from the model, the most redundant first, the lowest weight first and in random order. Writes a
    report and pictures.

    Args:
        model: A model that `hsa train` saved, or a pre-trained encoder or classifier: a folder or a name on the hub.
        data: A .csv, .tsv, .json, .jsonl or .parquet file; for a model of hsa, with the columns of its training data.
        out: Folder for the results; runs/heads-NAME by default.
        replace: Overwrite existing results.
        cpu: Do not use a GPU.
        json: Print the report as JSON, for scripts.
    """
    import torch
    from rich.console import Console

    from hsa.cli.evaluate import collect_errors
    from hsa.research.head_kernels.report import RESULTS, write_report
    from hsa.research.head_kernels.study import study_heads
    from hsa.research.head_kernels.subjects import is_ours, our_model, pretrained_encoder

    folder = out or Path("runs") / f"heads-{Path(model).resolve().name if Path(model).is_dir() else Path(model).name}"
    if not replace and (folder / RESULTS).exists():
        raise InvalidInput(
            str(folder), got="a folder with results", expected="a new folder", fix="Pass another --out, or --replace"
        )
    console = Console(stderr=json)
    bars = Bars(console)
    shared: dict[str, Any] = {
        "seed": comparison.seed,
        "device": "cuda" if torch.cuda.is_available() and not cpu else "cpu",
        "say": bars.say,
    }
    if is_ours(Path(model)):
        _refuse_data_options()
        subject = our_model(Path(model), data, read, **shared, on_bad=collect_errors([], False))
    else:
        subject = pretrained_encoder(model, data, read, **shared)
    with bars.running() as watch:
        report = study_heads(subject, comparison, pruning, partial(bars.counter, watch))
    pictures = write_report(folder, report)
    if json:
        print((folder / RESULTS).read_text(encoding="utf-8"), end="")
        return
    _show(console, report, folder, pictures)


def _refuse_data_options() -> None:
    """Refuse options that a model of hsa ignores: it knows its columns and lengths."""
    for name in ("text", "label", "split", "max_tokens"):
        if name in NAMED.get():
            raise InvalidInput(
                f"--{name.replace('_', '-')}",
                got="an option for a pre-trained model",
                expected="no such option for a model of hsa",
                fix="Leave it out: the model reads data as in its training",
            )


def _show(console: Console, report: HeadReport, folder: Path, pictures: list[Path]) -> None:
    from rich.text import Text

    from hsa.analysis.tables import print_table, terminal_table

    def table(header: list[str], rows: list[list[str]], caption: str) -> None:
        if rows:
            console.print()
            print_table(console, terminal_table(header, rows, caption))

    console.print(Text(f"{report.model} on {report.data}: {report.summary}"))
    table(report.layer_header(), report.layer_rows(), "distinct: effective number of distinct heads")
    table(
        report.sum_header(),
        report.sum_rows(),
        "alignment with the labels; mean ± standard deviation over random halves",
    )
    table(report.curve_header(), report.curve_rows(), f"{report.score} of {report.pruned_on} examples")
    console.print()
    for line in report.words():
        console.print(Text(line))
    for remark in report.remarks():
        console.print(Text(remark, style="yellow"))
    print_paths(console, None, folder / "report.md", pictures)
