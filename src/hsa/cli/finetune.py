"""`hsa finetune`: fine-tune a pre-trained encoder as a text classifier."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from hsa.cli.convert import SettingOptions, check_counts
from hsa.cli.help import HelpPage
from hsa.cli.progress import Bars
from hsa.errors import InvalidInput
from hsa.huggingface.fidelity.options import FinetuneOptions
from hsa.table_format import TableFormat


@dataclass(frozen=True)
class TrainingTexts(TableFormat):
    """The rows to train on.

    Args:
        text: Column of the text; two columns make a pair. By default a column with a common name, such as "text".
        label: Column of the labels; "label" by default.
        split: Value of the column "split" in the rows to use; "train" by default, if there is such a column.
        join: Join several columns into one text, rather than a pair.
        limit: Maximum number of texts, drawn at random; all by default.
    """

    text: tuple[str, ...] = ()
    label: str | None = None
    split: str | None = None
    join: bool = False
    limit: int | None = None


_SETTINGS = "Conversion (with --convert)"

HELP = HelpPage(
    examples={
        "hsa finetune bert-base-cased train.csv --out tuned": "then convert it",
        "hsa finetune runs/convert-tuned/model train.csv --out a": "after conversion",
        "hsa finetune tuned train.csv --out b --convert": "convert, then train",
    },
    common=(
        *("out", "resume", "text", "label", "split", "limit"),
        *("epochs", "batch_size", "learning_rate", "max_tokens"),
        *("convert", "fresh", "cpu"),
    ),
    topics={"Run": (), "Data": ("text", "label", "split", "join", "limit"), "Training": (), _SETTINGS: ()},
)


def finetune(
    model: str,
    data: Path,
    /,
    *,
    out: Path,
    resume: bool = False,
    convert: bool = False,
    fresh: bool = False,
    cpu: bool = False,
    read: Annotated[TrainingTexts, Parameter(name="*", group="Data")] = TrainingTexts(),  # noqa: B008
    training: Annotated[FinetuneOptions, Parameter(name="*", group="Training")] = FinetuneOptions(),  # noqa: B008
    settings: Annotated[SettingOptions, Parameter(name="*", group=_SETTINGS)] = SettingOptions(),  # noqa: B008
) -> None:
    """Fine-tune a pre-trained encoder as a text classifier.

    Args:
        model: A folder or a name on the hub: an encoder, a classifier, or a converted model, which stays converted.
        data: A .csv, .tsv, .json, .jsonl or .parquet file of texts and labels.
        out: Folder for the model.
        resume: Continue the run in the same folder where it stopped.
        convert: Convert the model before training.
        fresh: Start from new random weights instead of the weights of the model.
        cpu: Do not use a GPU.
    """
    import torch
    from rich.console import Console
    from rich.text import Text

    from hsa.huggingface.conversion import convert as convert_layers
    from hsa.huggingface.conversion import settings_of
    from hsa.huggingface.fidelity.examples import load_examples
    from hsa.huggingface.fidelity.finetune import finetune as train
    from hsa.huggingface.fidelity.finetune import list_classes, save_finetuned
    from hsa.huggingface.loading import load_for_training
    from hsa.huggingface.text_input import TextInput
    from hsa.running import claimed
    from hsa.signals.readers.rows import load_rows

    console = Console()
    bars = Bars(console)
    check_counts(limit=read.limit)
    _check_folder(out, resume)
    table: dict[str, Any] = {"delimiter": read.delimiter, "encoding": read.encoding}
    split = read.split or ("train" if "split" in load_rows(data, **table).columns else None)
    examples = load_examples(data, text=read.text, label=read.label, split=split, join=read.join, **table)
    examples = examples.sample(read.limit)
    classes = list_classes(examples)
    bars.say(f"loading {model}")
    torch.manual_seed(training.seed)
    network, tokenizer = load_for_training(model, classes, fresh=fresh)
    network.to("cuda" if torch.cuda.is_available() and not cpu else "cpu")
    if convert:
        convert_layers(network, settings.only_layers or None, tokenizer=tokenizer, **settings.values())
    elif settings_of(network):
        convert_layers(network, tokenizer=tokenizer)
    console.print(Text(f"{examples.name}: {len(examples):,} texts, {len(classes)} classes: {', '.join(classes[:8])}"))
    last = [0.0]
    with claimed(out):
        with bars.running() as watch:

            def step(done: int, total: int, loss: float) -> None:
                last[0] = loss
                watch("fine-tuning", done, total)

            train(network, tokenizer, examples, training, folder=out, watch=step)
        TextInput(read.text, read.label, read.join, training.max_tokens).save_in(network)
        save_finetuned(out, network, tokenizer)
    following = shlex.join(["hsa", "convert", str(out), "FILE"])
    console.print(Text(f"last loss {last[0]:.3f}\nmodel     {out}\n\nnext: {following}"), soft_wrap=True)


def _check_folder(out: Path, resume: bool) -> None:
    """Refuse to overwrite a run, or to resume one that is not there."""
    from hsa.huggingface.fidelity.finetune import OPTIONS, STATE

    if resume and not (out / STATE).exists():
        raise InvalidInput(
            str(out), problem="no unfinished run", expected="a run to resume", fix="Start without --resume"
        )
    unfinished = (out / STATE).exists()
    if not resume and (unfinished or (out / OPTIONS).exists()):
        raise InvalidInput(
            str(out),
            got="a folder with an unfinished run" if unfinished else "a folder with a finished run",
            expected="a new folder",
            fix="Pass --resume to continue that run, or another --out" if unfinished else "Pass another --out",
        )
