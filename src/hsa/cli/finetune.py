"""`hsa finetune`: fine-tune a pre-trained encoder as a classifier of the user's texts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from hsa.cli.convert import SettingOptions, check_counts
from hsa.cli.progress import Bars
from hsa.huggingface.fidelity.options import FinetuneOptions


@dataclass(frozen=True)
class TrainingTexts:
    """Where the texts are.

    Args:
        text: Column of the text; two make a pair. Common names are recognised.
        label: Column of labels; "label" unless given.
        split: Value of the column "split" in the rows to use; train, where there is such a column.
        join: Join several columns to one text, not a pair.
        limit: Most texts, drawn at random; all, unless given.
    """

    text: tuple[str, ...] = ()
    label: str | None = None
    split: str | None = None
    join: bool = False
    limit: int | None = None


def finetune(
    model: str,
    data: Path,
    /,
    *,
    out: Path,
    convert: bool = False,
    fresh: bool = False,
    cpu: bool = False,
    read: Annotated[TrainingTexts, Parameter(name="*", group="Data")] = TrainingTexts(),  # noqa: B008
    training: Annotated[FinetuneOptions, Parameter(name="*", group="Training")] = FinetuneOptions(),  # noqa: B008
    settings: Annotated[SettingOptions, Parameter(name="*", group="Settings, with --convert")] = SettingOptions(),  # noqa: B008
) -> None:
    """Fine-tune a pre-trained encoder on labelled texts, before converting it or briefly after.

    Resumes from the last epoch when it is started again with the same options.

    Args:
        model: A folder or a name on the hub: an encoder, a classifier, or a converted one (its attention stays converted).
        data: A .csv, .tsv, .json, .jsonl or .parquet file of texts and labels.
        out: Folder for the model.
        convert: Convert the model before training, as the settings say.
        fresh: Start from new weights, not from those of the model.
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

    console = Console()
    bars = Bars(console)
    check_counts(limit=read.limit)
    split = read.split or ("train" if "split" in _columns(data) else None)
    examples = load_examples(data, text=read.text, label=read.label, split=split, join=read.join).sample(read.limit)
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
    with bars.running() as watch:

        def step(done: int, total: int, loss: float) -> None:
            last[0] = loss
            watch("fine-tuning", done, total)

        train(network, tokenizer, examples, training, folder=out, watch=step)
    save_finetuned(out, network, tokenizer)
    console.print(Text(f"last loss {last[0]:.3f}\nmodel     {out}\n\nnext: hsa convert {out} FILE"), soft_wrap=True)


def _columns(data: Path) -> tuple[str, ...]:
    from hsa.signals.readers.rows import load_rows

    return load_rows(data).columns
