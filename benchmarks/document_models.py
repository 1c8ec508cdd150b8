"""Comparison of our models with published document models on IMDB, 20 Newsgroups and PeerRead.

    python -m benchmarks.document_tables DATA TABLES            build tables of texts and labels
    python -m benchmarks.document_models pack TABLES PACKED     read, cut and split them
    python -m benchmarks.document_models run PACKED OUT [--jobs 6] [--data papers]
    python -m benchmarks.document_models time PACKED OUT [--data papers]
    python -m benchmarks.document_models write PACKED OUT

All models have equal parameters and train for equal epochs with three seeds. `run` is `hsa compare` with several models at a
time; it resumes where it stopped. Times of runs that share a machine mean nothing, so `time` trains and tests each model
alone, on part of the data. `write` makes the tables and pictures of benchmarks/results/.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import RESULTS, write_table
from hsa.analysis.frontier import on_frontier
from hsa.files import read_json, write_json
from hsa.models.classifier import Classifier
from hsa.models.options import ModelOptions
from hsa.nn.embedding import Modality
from hsa.training.accelerator import make_accelerator
from hsa.training.compare import Compared, Plan, Run, compare_models
from hsa.training.compare_plots import Point, plot_frontiers
from hsa.training.data.data_set import DataSet
from hsa.training.data.prepare import PreparedData, load_input_spec, prepare, save_input_spec
from hsa.training.experiment import RESULT, Result, model_config
from hsa.training.loop import Trainer
from hsa.training.options import DataOptions, TrainingOptions
from hsa.training.recipe import Recipe

MODELS = ("hierarchical", "multiscale", "flat", "deepsets", "han", "hat", "transformer-xl")
PLAN = Plan(MODELS, rates=(1e-3, 3e-3), seeds=(0, 1, 2))
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Task:
    """A data set and its training settings."""

    question: str
    max_tokens: int
    epochs: int
    batch_size: int
    timed: int  # number of documents that `time` trains on


TASKS = {
    "imdb": Task("IMDB: positive or negative?", 512, 3, 128, 4096),
    "news": Task("20 Newsgroups: which one?", 512, 10, 128, 4096),
    "papers": Task("PeerRead: cs.AI, cs.CL or cs.LG?", 4096, 8, 32, 512),
}


def recipe(task: Task) -> Recipe:
    training = TrainingOptions(
        epochs=task.epochs,
        batch_size=task.batch_size,
        batch_tokens=2**17,
        patience=0,
        mixed_precision="bf16" if torch.cuda.is_available() else "no",
        checkpoint_minutes=60,
    )
    model = ModelOptions(width=128, heads=4, layers=2, dropout=0.2, include_self=False, pooling="max")
    return Recipe(models=MODELS, model=model, training=training)


def pack(name: str, tables: Path, packed: Path) -> None:
    options = DataOptions(
        text=("text",),
        label="label",
        test=tables / f"{name}_test.parquet",
        word_vectors=tables / "glove.txt",
        max_tokens=TASKS[name].max_tokens,
    )
    data = prepare(tables / f"{name}_train.parquet", options, say=lambda message: print(f"{name}: {message}"))
    assert data.vectors is not None
    for split in SPLITS:
        getattr(data, split).save(packed / name / f"{split}.safetensors")
    np.save(packed / name / "vectors.npy", data.vectors.numpy().astype(np.float16))
    save_input_spec(packed / name, data.input_spec)


def load(name: str, packed: Path) -> PreparedData:
    train, validation, test = (DataSet.load(packed / name / f"{split}.safetensors") for split in SPLITS)
    vectors = torch.from_numpy(np.load(packed / name / "vectors.npy").astype(np.float32))
    text = Modality(tokens=len(vectors), width=vectors.shape[1], frozen=True)
    return PreparedData(
        train,
        validation,
        test,
        load_input_spec(packed / name),
        modalities={"text": text},
        kinds=("sequence",),
        keys=(),
        task="classification",
        vectors=vectors,
        name=name,
    )


def run_part(plan: Plan, name: str, model: str, packed: Path, out: Path) -> str:
    """Train one model with the rates and seeds of the plan; return a line for the log."""
    torch.set_num_threads(1 if torch.cuda.is_available() else torch.get_num_threads())
    settings = recipe(TASKS[name])
    accelerator = make_accelerator(settings.training)
    (compared,) = compare_models(
        plan, settings, load(name, packed), out / name, accelerator, resume=True, only=(model,)
    )
    return f"{name} {model}: {' '.join(f'{score:.4f}' for score in compared.scores)} (rate {compared.rate})"


def run_all(names: list[str], packed: Path, out: Path, jobs: int) -> None:
    run_in_rounds(run_part, PLAN, [(name, model, packed, out) for name in names for model in MODELS], jobs)


def run_in_rounds(run: Callable[..., str], plan: Plan, parts: Sequence[tuple[Any, ...]], jobs: int) -> None:
    """Run `run(plan, *part)` in processes: every rate with the first seed, then the other seeds with the best rate."""
    first = [replace(plan, rates=(rate,), seeds=plan.seeds[:1]) for rate in plan.rates]
    others = [replace(plan, seeds=(plan.seeds[0], seed)) for seed in plan.seeds[1:]]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for plans in (first, others):
            for done in as_completed([pool.submit(run, part_of, *part) for part in parts for part_of in plans]):
                print(done.result(), flush=True)


def time_model(name: str, model: str, data: PreparedData) -> dict[str, float]:
    """Measure seconds to train on 1,000 documents and milliseconds to read one, with nothing else running."""
    settings = recipe(TASKS[name])
    some = np.random.default_rng(0).permutation(len(data.train))[: TASKS[name].timed]
    part = data.train.select(some)
    test = data.test.select(np.arange(min(len(data.test), TASKS[name].timed)))
    config = model_config(data, settings.model, model, MODELS[0])
    options = replace(settings.training, epochs=6)
    accelerator = make_accelerator(options)
    trainer = Trainer(Classifier(config), part, test.select([0, 1]), options, accelerator=accelerator)
    seconds = [record.seconds for record in trainer.fit()]  # the first epochs include compilation
    trainer.evaluate(test)
    tested = trainer.evaluate(test)
    return {"train": 1e3 * min(seconds[1:]) / len(part), "test": 1e3 * tested.seconds / len(test)}


def time_all(names: list[str], packed: Path, out: Path) -> None:
    for name in names:
        data = load(name, packed)
        times = {model: time_model(name, model, data) for model in MODELS}
        write_json(out / name / "times.json", times)
        print(name, times, flush=True)


def finished(base: Path) -> list[Compared]:
    """Return the finished runs of every model."""

    def results(model: str, rates: Sequence[float], seeds: Sequence[int]) -> tuple[Run, ...]:
        runs = [Run(model, rate, seed) for rate in rates for seed in seeds]
        return tuple(
            run.finished(Result.load(run.folder(base))) for run in runs if (run.folder(base) / RESULT).is_file()
        )

    compared = []
    for model in MODELS:
        tried = results(model, PLAN.rates, PLAN.seeds[:1])
        best = max(tried, key=lambda run: run.validation)
        compared.append(Compared(model, tried, results(model, (best.rate,), PLAN.seeds)))
    return compared


def write(names: list[str], packed: Path, out: Path) -> None:
    sections = []
    for name in names:
        data = load(name, packed)
        compared = finished(out / name)
        times = read_json(out / name / "times.json", "times, from `time`")
        lengths = data.train.lengths
        heading = (
            f"{TASKS[name].question} {len(data.train):,} documents of {lengths.mean():,.0f} words on average (at most "
            f"{lengths.max():,}), {len(data.test):,} to test, {TASKS[name].epochs} epochs"
        )
        sections.append((heading, *_table(compared, times)))
        _plot(name, compared, times)
    notes = (
        "Accuracy: mean ± standard deviation over seeds, at the learning rate that was best on validation data with "
        "the first seed. F1: mean over classes. Operations: attention operations per document, all layers. Times: "
        "seconds to train on 1,000 documents (one epoch) and milliseconds to read one, with each model alone on the "
        "machine. Frontier: no other model is as accurate and faster to train. All models have two layers, a width "
        "of 128, four heads, frozen GloVe vectors (Pennington et al., 2014), a document vector that is the maximum "
        "over its leaves, and the same number of trained parameters; `hierarchical` runs without self, as in the "
        "paper."
    )
    command = "python -m benchmarks.document_models run, time, write"
    write_table("document_models", "Document models", sections, notes, command=command)


def _table(compared: list[Compared], times: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    header = ["model", "parameters", "rate", "accuracy", "seeds", "F1", "operations"]
    header += ["train s", "test ms", "MiB", "frontier"]
    best = on_frontier([(times[one.model]["train"], statistics.fmean(one.scores)) for one in compared])
    rows = []
    for one, on in zip(compared, best, strict=True):
        peak = one.peak_memory
        rows.append(
            [
                one.model,
                f"{one.results[0].parameters:,}",
                f"{one.rate:g}",
                f"{statistics.fmean(one.scores):.4f}" + (f" ± {_spread(one):.4f}" if len(one.scores) > 1 else ""),
                str(len(one.scores)),
                f"{one.mean(lambda result: float(result.scores.f1 or 0)):.4f}",
                f"{one.operations / 1e6:.1f} M",
                f"{times[one.model]['train']:.2f}",
                f"{times[one.model]['test']:.2f}",
                "–" if peak is None else f"{peak:,.0f}",
                "•" if on else "",
            ]
        )
    return header, rows


def _spread(one: Compared) -> float:
    return statistics.stdev(one.scores) if len(one.scores) > 1 else 0.0


def _plot(name: str, compared: list[Compared], times: dict[str, Any]) -> None:
    def points(cost: Any) -> list[Point]:
        return [Point(one.model, cost(one), statistics.fmean(one.scores), _spread(one)) for one in compared]

    panels = {
        "training, s per 1,000 documents": points(lambda one: times[one.model]["train"]),
        "reading, ms per document": points(lambda one: times[one.model]["test"]),
        "attention operations per document": points(lambda one: one.operations),
    }
    plot_frontiers(RESULTS / f"document_models_{name}.png", panels, "accuracy", TASKS[name].question)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pack", "run", "time", "write"))
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", default=",".join(TASKS), help="data sets, separated by commas: imdb, news, papers")
    parser.add_argument("--jobs", type=int, default=1, help="number of models to train at a time")
    arguments = parser.parse_args()
    names = arguments.data.split(",")
    if arguments.what == "pack":
        for name in names:
            pack(name, arguments.source, arguments.out)
    elif arguments.what == "run":
        run_all(names, arguments.source, arguments.out, arguments.jobs)
    elif arguments.what == "time":
        time_all(names, arguments.source, arguments.out)
    else:
        write(names, arguments.source, arguments.out)


if __name__ == "__main__":
    main()
