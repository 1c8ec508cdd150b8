"""`hsa kernels`: the heads of a model as kernels: how many different ones, what weights, which can go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from hsa.cli.progress import Bars, Watch
from hsa.cli.train import NAMED
from hsa.errors import InvalidInput

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console
    from torch import Tensor

    from hsa.analysis.head_pruning import Score
    from hsa.analysis.head_report import KernelReport
    from hsa.analysis.heads import Answer, Heads
    from hsa.analysis.kernel_learning import Targets

_MOST_BYTES = 4 * 2**30  # of Gram matrices


@dataclass(frozen=True)
class ReadOptions:
    """Where the examples are.

    Args:
        text: Column of the text; two make a pair. The usual names are found by themselves.
        label: Column of labels; "label", if there is one. Numbers with a fraction, or of many kinds, are numbers to predict.
        split: Only rows whose column "split" says so; validation, else test, where there is such a column.
        limit: At most so many examples, drawn at random.
        max_tokens: Tokens of a text that are read, special ones included.
    """

    text: tuple[str, ...] = ()
    label: str | None = None
    split: str | None = None
    limit: int = 300
    max_tokens: int = 64


@dataclass(frozen=True)
class PruningOptions:
    """How heads are taken away.

    Args:
        prune_on: At most so many examples to run the model without heads on, and no more than half. 0: no pruning.
        points: Of each curve: large models lose several heads per step.
        draws: Random orders, to compare with.
    """

    prune_on: int = 100
    points: int = 9
    draws: int = 3


def kernels(
    model: str,
    /,
    *,
    data: Path,
    kernel: Literal["outputs", "similarity"] = "outputs",
    tokens: int = 400,
    splits: int = 5,
    out: Path | None = None,
    replace: bool = False,
    seed: int = 0,
    cpu: bool = False,
    json: bool = False,
    read: Annotated[ReadOptions, Parameter(name="*", group="Data")] = ReadOptions(),  # noqa: B008
    pruning: Annotated[PruningOptions, Parameter(name="*", group="Pruning")] = PruningOptions(),  # noqa: B008
) -> None:
    """Look at the heads of a model as kernels: how many different ones they are, and how many it could do without.

    Measures how alike heads are (centred kernel alignment), learns weights of their kernels that fit the labels (multiple
    kernel learning, global and conditional on the input) and tests them on held-out examples, and really takes heads away,
    the most redundant first, the lowest weight first and at random. Writes a report and pictures.

    Args:
        model: The folder of a model that `hsa train` wrote, or a pre-trained encoder or classifier: a folder or a hub name.
        data: A .csv, .tsv, .json, .jsonl or .parquet file; for a model of hsa, data such as it was trained on.
        kernel: Compare heads by their mean outputs per example, or by the similarities q·k of tokens, symmetrised.
        tokens: About how many tokens to compare similarities of.
        splits: Random halves to learn and test weights on.
        out: Folder for the results; runs/kernels-NAME by default.
        replace: Write over results that are there.
        seed: Of everything that is drawn at random.
        cpu: Do not use a GPU.
        json: Print the report as JSON, for scripts.
    """
    import torch
    from rich.console import Console

    from hsa.analysis.head_report import write_report

    least = {"limit": (read.limit, 3), "max_tokens": (read.max_tokens, 1), "tokens": (tokens, 3), "splits": (splits, 1)}
    least |= {
        "points": (pruning.points, 1),
        "draws": (pruning.draws, 1),
        "prune_on": (pruning.prune_on, 0),
        "seed": (seed, 0),
    }
    for name, (value, smallest) in least.items():
        if value < smallest:
            raise InvalidInput(name, given=value, expected=f"{smallest} or more")
    folder = out or Path("runs") / f"kernels-{Path(model).resolve().name if Path(model).is_dir() else Path(model).name}"
    if not replace and (folder / "kernels.json").exists():
        raise InvalidInput(
            str(folder), given="a folder with results", expected="a new folder", fix="pass another --out, or --replace"
        )
    console = Console(stderr=json)
    bars = Bars(console)
    device = "cuda" if torch.cuda.is_available() and not cpu else "cpu"
    ours = _is_ours(Path(model))
    subject = (
        _our_model(Path(model), data, read, seed, device, bars)
        if ours
        else _encoder(model, data, read, seed, device, bars)
    )
    report = _look(subject, kernel, tokens, splits, seed, pruning, bars)
    pictures = write_report(folder, report)
    if json:
        print((folder / "kernels.json").read_text(encoding="utf-8"), end="")
        return
    _show(console, report, folder, pictures)


@dataclass(frozen=True, eq=False)
class _Subject:
    """A model and examples to look at it with."""

    model: str
    data: str
    heads: Heads
    answer: Answer
    lengths: np.ndarray  # tokens of every example
    batches: Callable[[np.ndarray], list[np.ndarray]]  # of the examples of these numbers
    targets: Targets | None
    score: Callable[[np.ndarray, Tensor], tuple[str, Score]]  # of these examples, given the answers of the whole model


def _is_ours(folder: Path) -> bool:
    from hsa.files import read_json
    from hsa.models.saved import CONFIG

    if not folder.is_dir():
        return False
    if not (folder / CONFIG).exists():  # a run of hsa train has a folder per model
        return any(_is_ours(path) for path in sorted(folder.iterdir()) if path.is_dir())
    about = read_json(folder / CONFIG, "the configuration of a model")
    return isinstance(about, dict) and str(about.get("model", "")).startswith("hierarchical ")


def _our_model(folder: Path, data: Path, read: ReadOptions, seed: int, device: str, bars: Bars) -> _Subject:
    import numpy as np
    import torch

    from hsa.analysis.head_pruning import accuracy, r_squared
    from hsa.analysis.heads import EncoderHeads
    from hsa.analysis.kernel_learning import Targets
    from hsa.cli.evaluate import skipping
    from hsa.training.data_set import batches_by_tokens
    from hsa.training.inference import Saved

    for name in ("text", "label", "split", "max_tokens"):
        if name in NAMED.get():
            raise InvalidInput(
                f"--{name.replace('_', '-')}", given="an option, for a model of hsa", expected="none",
                fix="it reads data as it was trained to",
            )  # fmt: skip
    bars.say(f"loading {folder}")
    saved = Saved.load(folder, device)
    config = saved.model.config
    if config.task == "tokens":
        raise InvalidInput(
            str(folder), given="a model of a class per leaf", expected="one of a class or number per example"
        )
    heads = EncoderHeads(saved.model.encoder)
    bars.say(f"reading {data}")
    examples = saved.data_set(data, skipping([], False))
    drawn = np.random.default_rng(seed).permutation(len(examples))[: read.limit]
    examples = examples.select(np.sort(drawn))
    _check_count(str(data), len(examples))
    numbers = examples.targets.numpy()
    targets = Targets.of_classes(numbers) if saved.classes else Targets.of_numbers(numbers)
    transform = saved.reading.transform
    lengths = examples.lengths

    @torch.no_grad()
    def answer(chosen: np.ndarray) -> Tensor:
        batch = examples.select(chosen).batch.to(device)
        out = saved.model(batch if transform is None else transform(batch)).float()
        return out if out.ndim == 2 else out[:, None]

    def batches(chosen: np.ndarray) -> list[np.ndarray]:
        order = np.asarray(chosen)[np.argsort(-lengths[chosen], kind="stable")]
        return batches_by_tokens(lengths, 2**13, 256, order)

    def score(chosen: np.ndarray, full: Tensor) -> tuple[str, Score]:
        return ("accuracy", accuracy(numbers[chosen])) if saved.classes else ("R²", r_squared(numbers[chosen]))

    return _Subject(str(folder), data.name, heads, answer, lengths, batches, targets, score)


def _encoder(name: str, data: Path, read: ReadOptions, seed: int, device: str, bars: Bars) -> _Subject:
    import torch
    import torch.nn.functional as F

    from hsa.analysis.head_pruning import accuracy, cosine
    from hsa.fidelity.examples import class_numbers, load_examples, tokenize
    from hsa.huggingface.heads import TransformerHeads, load_encoder
    from hsa.huggingface.loading import most_tokens

    found = load_examples(data, text=read.text, label=read.label, split=read.split)
    if read.label is not None and found.labels is None:
        raise InvalidInput(f"{found.name}: {read.label}", given="a column without labels", expected="some")
    examples = found.sample(read.limit, seed)
    _check_count(str(data), len(examples))
    targets = None if examples.labels is None else _targets(examples.name, examples.labels)
    bars.say(f"loading {name}")
    classes = targets is not None and targets.classes
    model, tokenizer, task = load_encoder(name, labelled=classes, device=device)
    heads = TransformerHeads(model)
    numbers = class_numbers(examples, model.config.label2id, model.config.num_labels) if task == "classify" else None
    known = tokenize(examples, tokenizer, min(read.max_tokens, most_tokens(model, tokenizer)))
    lengths = known.lengths

    @torch.no_grad()
    def answer(chosen: np.ndarray) -> Tensor:
        inputs = known.batch(chosen, device)
        if numbers is not None:
            return model(**inputs).logits.float()
        states, mask = model(**inputs).last_hidden_state.float(), inputs["attention_mask"][..., None]
        return F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)

    def batches(chosen: np.ndarray) -> list[np.ndarray]:
        from hsa.huggingface.encoders import alike

        return [chosen[some] for some in alike(lengths[chosen], max(2**12, int(lengths.max())))]

    def score(chosen: np.ndarray, full: Tensor) -> tuple[str, Score]:
        return ("cosine", cosine(full[chosen])) if numbers is None else ("accuracy", accuracy(numbers[chosen]))

    short = Path(name).resolve().name if Path(name).is_dir() else name
    return _Subject(short, data.name, heads, answer, lengths, batches, targets, score)


def _check_count(where: str, count: int) -> None:
    if count < 3:
        raise InvalidInput(where, given=f"{count} examples", expected="at least 3, to tell kernels apart")


def _targets(name: str, labels: list[Any]) -> Targets:
    """Classes; but numbers where labels have fractions, or there are more than 20 different ones."""
    from hsa.analysis.kernel_learning import Targets
    from hsa.errors import inside

    try:
        numbers = [float(label) for label in labels]  # tables of text have numbers as text
    except (TypeError, ValueError):
        numbers = []
    numeric = any(not number.is_integer() for number in numbers) or len(set(numbers)) > 20
    with inside(name):
        return Targets.of_numbers(numbers) if numeric else Targets.of_classes(labels)


def _look(
    subject: _Subject, kernel: str, tokens: int, splits: int, seed: int, pruning: PruningOptions, bars: Bars
) -> KernelReport:
    import numpy as np
    import torch

    from hsa.analysis.head_report import KernelReport, LayerKernels
    from hsa.analysis.heads import collect
    from hsa.analysis.kernel_learning import can_halve, compare_sums, flat_mkl, scaled, target_kernel
    from hsa.analysis.kernels import alignment_matrix, effective_kernels, linear_grams, redundancy

    count, targets = len(subject.lengths), subject.targets
    total = sum(subject.heads.counts)
    if total * max(count, tokens * (kernel == "similarity")) ** 2 * 8 > _MOST_BYTES:
        most = int((_MOST_BYTES / 8 / total) ** 0.5)
        raise InvalidInput(
            "limit", given=f"{count} examples, {tokens} tokens, {total} heads", expected=f"at most {most:,}"
        )
    with bars.running() as watch:
        everything = subject.batches(np.arange(count))
        drawn = tokens if kernel == "similarity" else 0
        seen = bars.counter(watch, "heads of all examples", count)
        features = collect(subject.heads, subject.answer, everything, tokens=drawn, seed=seed, watch=seen)
        shares: list[float] | None = None
        if kernel == "similarity":
            grams, shares = features.similarity_grams()
        else:
            grams = features.output_grams()
        alignment = alignment_matrix(grams)
        redundant = redundancy(alignment)
        order = np.random.default_rng((seed, 1)).permutation(count)
        tried = np.sort(order[: min(pruning.prune_on, count // 2)])
        weights, sums, flat = None, [], None
        if targets is not None:
            rest = torch.from_numpy(np.setdiff1d(np.arange(count), tried))  # weights do not know what they are tried on
            _check_classes(targets, rest)
            outputs = linear_grams([scaled(head[rest], torch.arange(len(rest))) for head in features.outputs])
            flat = flat_mkl(outputs, target_kernel(targets.part(rest)))
            weights = flat.weights
            if can_halve(targets):
                watch("weights of kernels", 0, splits)
                done = bars.counter(watch, "weights of kernels", splits)
                own = features.weights
                sums = compare_sums(features.outputs, targets, own=own, splits=splits, seed=seed, watch=done)
        name, curves = _prune(subject, features, alignment, flat, tried, seed, pruning, bars, watch)
    layer_of = torch.tensor([layer for layer, _ in features.heads])
    layers = []
    for layer, heads in enumerate(subject.heads.counts):
        inside = (layer_of == layer).nonzero()[:, 0]
        layers.append(
            LayerKernels(
                layer,
                heads,
                effective_kernels(alignment[inside][:, inside]),
                float(redundant[inside].mean()),
                None if shares is None else float(np.mean([shares[i] for i in inside.tolist()])),
                None if weights is None else float(weights[inside].sum()),
            )
        )
    return KernelReport(
        model=subject.model,
        data=subject.data,
        examples=count,
        mean_length=float(subject.lengths.mean()),
        kernel=kernel,
        rows=grams.shape[-1],
        heads=features.heads,
        alignment=alignment.tolist(),
        redundancy=redundant.tolist(),
        effective=effective_kernels(alignment),
        layers=layers,
        weights=None if weights is None else weights.tolist(),
        sums=sums,
        sum_score="accuracy" if targets is None or targets.classes else "R²",
        score=name,
        pruned_on=len(tried),
        curves=curves,
        seed=seed,
    )


def _prune(
    subject: _Subject,
    features: Any,
    alignment: Tensor,
    flat: Any,
    tried: np.ndarray,
    seed: int,
    pruning: PruningOptions,
    bars: Bars,
    watch: Watch,
) -> tuple[str, list[Any]]:
    """What pruned models are measured by, and a curve per order."""
    import numpy as np

    from hsa.analysis.head_pruning import at_random, lowest_weight_first, most_redundant_first, pruning_curves, steps

    if not len(tried):
        return "", []
    total = len(features.heads)
    orders = {"redundancy": [most_redundant_first(alignment)]}
    if flat is not None:
        orders["MKL weight"] = [lowest_weight_first(flat.weights, flat.slack)]
    orders["chance"] = [at_random(total, seed + draw) for draw in range(pruning.draws)]
    batches = subject.batches(tried)
    name, score = subject.score(np.concatenate(batches), features.answers)
    points = len(steps(total, pruning.points)) * sum(map(len, orders.values()))
    done = bars.counter(watch, "without heads", points)
    return name, pruning_curves(
        subject.heads, features.heads, subject.answer, batches, orders, score, points=pruning.points, watch=done
    )


def _check_classes(targets: Targets, rows: Tensor) -> None:
    if len(targets.values[rows].unique(dim=0)) < 2:
        raise InvalidInput(
            "label", given="examples of one class, but for a few", expected="more of another", fix="raise --limit"
        )


def _show(console: Console, report: KernelReport, folder: Path, pictures: list[Path]) -> None:
    from rich.text import Text

    from hsa.analysis.tables import print_table, terminal_table

    def table(header: list[str], rows: list[list[str]], caption: str) -> None:
        if rows:
            console.print()
            print_table(console, terminal_table(header, rows, caption))

    console.print(Text(f"{report.model} on {report.data}: {report.summary}"))
    table(report.layer_header(), report.layer_rows(), "worth: so many different kernels")
    table(report.sum_header(), report.sum_rows(), "alignment with the labels; mean ± spread over random halves")
    table(report.curve_header(), report.curve_rows(), f"{report.score} of {report.pruned_on} examples")
    console.print()
    for line in report.words():
        console.print(Text(line))
    for remark in report.remarks():
        console.print(Text(remark, style="yellow"))
    for line in (f"\nreport    {folder / 'report.md'}", f"pictures  {', '.join(str(picture) for picture in pictures)}"):
        console.print(Text(line), soft_wrap=True)
