"""Train the encoder and baselines of equal size on one data set: a learning-rate sweep per model, then several seeds.

    python -m benchmarks.train_models imdb FOLDER [--jobs 8] [--models 'hierarchical;flat'] [--epochs 8]
    python -m benchmarks.train_models heads FOLDER --seeds          head fusions, on the data of imdb

FOLDER holds `NAME_train.safetensors`, `NAME_test.safetensors` and optionally `NAME_dev.safetensors` (otherwise a tenth of
the training data is for validation) as written by `DataSet.save`, and `NAME_glove.npy` for frozen word vectors. Runs share a
GPU, so their times are those of a busy machine; `--times` measures each model alone instead. `--examples` and `--leaves`
make an experiment smaller: the number of training examples (twice as many are tested) and of leaves per example.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

SEEDS = (0, 1, 2)
MEASURED: dict[str, Any] = {"width": 128, "heads": 4, "include_self": False, "near": 0}
"""Settings of all experiments unless a model overrides them; without self, as in the paper."""


@dataclass(frozen=True)
class Experiment:
    """A task: the reference encoder, and the differences of the other models from it."""

    encoder: dict[str, Any]
    models: dict[str, dict[str, Any]]
    rates: tuple[float, ...]
    epochs: int
    batch_size: int
    batch_tokens: int
    cut: dict[str, int]  # model → number of leaves that it reads; others read all
    data: str  # NAME of its files


IMDB = Experiment(
    encoder={**MEASURED, "layers": 1, "dropout": 0.2},
    models={
        "flat": {"kind": "flat"},
        "hierarchical": {"kind": "hierarchical"},
        "hierarchical, with self": {"kind": "hierarchical", "include_self": True},
        "multiscale": {"kind": "multiscale"},
        "multiscale, near 1": {"kind": "multiscale", "near": 1},
        "deepsets": {"kind": "none"},
    },
    rates=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    epochs=6,
    batch_size=64,
    batch_tokens=2**20,
    cut={},
    data="imdb",
)
HEADS = replace(
    IMDB,
    encoder={**IMDB.encoder, "heads": 8},
    models={
        f"{kind}, {fusion}": {"kind": kind, "fusion": fusion}
        for kind in ("hierarchical", "flat")
        for fusion in ("talking", "concatenation", "collaborative", "over-heads")
    },
    rates=(1e-3, 3e-3, 1e-2),
)
PEER = Experiment(
    encoder={**MEASURED, "layers": 1, "dropout": 0.2},
    models={
        "hierarchical, whole": {"kind": "hierarchical"},
        "flat, first 512": {"kind": "flat"},
        "flat, whole": {"kind": "flat"},
        "multiscale, whole": {"kind": "multiscale"},
        "deepsets, whole": {"kind": "none"},
    },
    rates=(1e-3, 3e-3, 1e-2),
    epochs=8,
    batch_size=32,
    batch_tokens=2**18,
    cut={"flat, first 512": 512},
    data="peer",
)
LISTOPS = Experiment(
    encoder={**MEASURED, "layers": 4, "dropout": 0.0},
    models={
        "flat": {"kind": "flat", "position_input": True},
        "hierarchical, windows": {"kind": "hierarchical", "windows": (16, 8, 8), "position_input": True},
        "hierarchical, expression tree": {"kind": "hierarchical"},
        "multiscale, expression tree": {"kind": "multiscale"},
        "bottom-up, expression tree": {"kind": "bottom-up", "layers": 1},
    },
    rates=(3e-4, 1e-3, 3e-3),
    epochs=6,
    batch_size=64,
    batch_tokens=2**17,
    cut={},
    data="listops",
)
EXPERIMENTS = {"imdb": IMDB, "heads": HEADS, "peer": PEER, "listops": LISTOPS}


def train_one(job: dict[str, Any]) -> dict[str, Any]:
    """Train one model with one learning rate and seed; return the scores of the epoch that was best on validation data."""
    import torch

    from hsa.models.classifier import Classifier, ModelConfig, count_parameters, equal_parameters
    from hsa.nn.embedding import Modality
    from hsa.nn.encoder_config import EncoderConfig
    from hsa.training.accelerator import make_accelerator
    from hsa.training.loop import Trainer
    from hsa.training.options import TrainingOptions

    torch.set_num_threads(1 if torch.cuda.is_available() else torch.get_num_threads())
    experiment = EXPERIMENTS[job["task"]]
    cut = job["leaves"] or experiment.cut.get(job["model"])
    train, validation, test, vectors = _data(experiment.data, job["folder"], cut)
    if job["examples"]:
        train = train.select(np.arange(min(job["examples"], len(train))))
        test = test.select(np.random.default_rng(0).permutation(len(test))[: 2 * job["examples"]])
    tokens = int(max(d.batch.values["text"].max() for d in (train, validation, test))) + 1
    text = (
        Modality(tokens=max(tokens, 2))
        if vectors is None
        else Modality(tokens=len(vectors), width=vectors.shape[1], frozen=True)
    )
    reference = ModelConfig(EncoderConfig(**experiment.encoder), {"text": text}, outputs=len(train.classes))
    config = equal_parameters(reference, replace(reference.encoder, **experiment.models[job["model"]]))
    torch.manual_seed(job["seed"])
    model = Classifier(config)
    if vectors is not None:
        model.encoder.embedding.set_vectors("text", torch.from_numpy(vectors))
    options = TrainingOptions(
        epochs=job["epochs"],
        learning_rate=job["rate"],
        batch_size=experiment.batch_size,
        batch_tokens=experiment.batch_tokens,
        seed=job["seed"],
        patience=0,
        mixed_precision=job["precision"],
    )
    trainer = Trainer(model, train, validation, options, accelerator=make_accelerator(options))
    began = time.monotonic()
    history = trainer.fit()
    tested = trainer.evaluate(test)
    return {
        **{key: job[key] for key in ("task", "model", "rate", "seed", "epochs")},
        "parameters": count_parameters(model),
        "validation": max(record.validation for record in history),
        "history": [round(record.validation, 4) for record in history],
        "loss": [round(record.loss, 4) for record in history],
        "accuracy": tested.scores.accuracy,
        "f1": tested.scores.f1,
        "operations": tested.operations / len(test),
        "seconds": sum(record.seconds for record in history),
        "wall": time.monotonic() - began,
    }


def _data(name: str, folder: str, cut: int | None) -> tuple[Any, Any, Any, Any]:
    from hsa.training.data.data_set import DataSet, split_at_random

    def load(part: str) -> DataSet:
        whole = DataSet.load(Path(folder) / f"{name}_{part}.safetensors")
        return whole if cut is None else first_leaves(whole, cut)

    train, test = load("train"), load("test")
    dev = Path(folder) / f"{name}_dev.safetensors"
    if dev.exists():
        validation = load("dev")
    else:
        train, validation = split_at_random(train, (0.9, 0.1), seed=0)
    vectors = Path(folder) / f"{name}_glove.npy"
    return train, validation, test, np.load(vectors).astype(np.float32) if vectors.exists() else None


def first_leaves(data: Any, most: int) -> Any:
    """Return the data with every text cut after `most` leaves; all families are sequences."""
    from hsa.signals import Sequence
    from hsa.signals.batch import Batch
    from hsa.tree.hierarchy import Hierarchy, Structure

    batch, s = data.batch, data.batch.hierarchy.structure
    nodes = np.flatnonzero(s.first_leaf - s.leaf_offsets[s.tree] < most)
    parent = s.parent[nodes]
    num_children = np.bincount(parent[parent >= 0], minlength=len(s.parent))[nodes]
    sizes, ids = np.unique(num_children[num_children > 0], return_inverse=True)
    kept = np.flatnonzero(np.arange(len(s.leaf_nodes)) - np.repeat(s.leaf_offsets[:-1], np.diff(s.leaf_offsets)) < most)
    cut = Batch(
        values={"text": batch.values["text"][kept]},
        leaves={"text": batch.leaves["text"][: len(kept)]},
        hierarchy=Hierarchy(Structure.from_num_children(num_children)),
        distinct_domains=tuple(Sequence(n) for n in sizes.tolist()),
        domain_ids=ids,
    )
    return replace(data, batch=cut)


def sweep(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train every rate with the first seed, then the best rate with the other seeds; yield results as they finish."""
    experiment = EXPERIMENTS[arguments.task]
    names = list(experiment.models) if arguments.models is None else arguments.models.split(";")
    shared = {
        "task": arguments.task,
        "folder": arguments.folder,
        "epochs": arguments.epochs or experiment.epochs,
        "precision": arguments.precision,
        "examples": arguments.examples,
        "leaves": arguments.leaves,
    }
    rates = experiment.rates if arguments.rates is None else tuple(float(r) for r in arguments.rates.split(","))
    # Slow models first, so that the last runs are short.
    first = [{**shared, "model": name, "rate": rate, "seed": SEEDS[0]} for name in names for rate in rates]
    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.jobs, maxtasksperchild=1) as pool:
        finished: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        waiting = []
        for result in pool.imap_unordered(train_one, first):
            yield result
            listed = finished[result["model"]]
            listed.append(result)
            if len(listed) == len(rates):
                best = max(listed, key=lambda r: r["validation"])["rate"]
                more = [{**shared, "model": result["model"], "rate": best, "seed": seed} for seed in SEEDS[1:]]
                waiting += [pool.apply_async(train_one, (job,)) for job in (more if arguments.seeds else [])]
        for pending in waiting:
            yield pending.get()


def table(results: list[dict[str, Any]]) -> str:
    """Return a table of mean ± standard deviation over seeds, at the rate that was best on validation data."""
    rows = [
        "| model | parameters | learning rate | accuracy | macro F1 | attention operations | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(r["model"] for r in results):
        own = [r for r in results if r["model"] == name]
        rate = max((r for r in own if r["seed"] == SEEDS[0]), key=lambda r: r["validation"])["rate"]
        chosen = [r for r in own if r["rate"] == rate]
        accuracy, f1 = np.array([r["accuracy"] for r in chosen]), np.array([r["f1"] for r in chosen])
        rows.append(
            f"| {name} | {chosen[0]['parameters']:,} | {rate:g} | {accuracy.mean():.4f} ± {accuracy.std():.4f} | "
            f"{f1.mean():.4f} ± {f1.std():.4f} | {chosen[0]['operations'] / 1e6:.2f} M | {len(chosen)} |"
        )
    return "\n".join(rows)


def times(arguments: argparse.Namespace) -> None:
    """Print the seconds of two epochs, with every model alone on the machine."""
    experiment = EXPERIMENTS[arguments.task]
    for name in list(experiment.models) if arguments.models is None else arguments.models.split(";"):
        job = {"task": arguments.task, "folder": arguments.folder, "model": name, "rate": 1e-3, "seed": 0, "epochs": 2}
        sizes = {name: getattr(arguments, name) for name in ("precision", "examples", "leaves")}
        result = train_one({**job, **sizes})
        print(
            json.dumps({"model": name, "seconds for 2 epochs": round(result["seconds"], 2), "wall": result["wall"]}),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=list(EXPERIMENTS))
    parser.add_argument("folder")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at a time")
    parser.add_argument("--models", help="models to train, separated by semicolons; all by default")
    parser.add_argument("--rates", help="learning rates, separated by commas")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--precision", default="no")
    parser.add_argument("--examples", type=int, help="most training examples; twice as many are tested")
    parser.add_argument("--leaves", type=int, help="most leaves per example; all by default")
    parser.add_argument("--seeds", action="store_true", help="also train the other seeds")
    parser.add_argument("--times", action="store_true", help="time each model alone instead")
    parser.add_argument("--out", default="results.jsonl")
    arguments = parser.parse_args()
    if arguments.times:
        times(arguments)
        return
    results = []
    with Path(arguments.out).open("a") as file:
        for result in sweep(arguments):
            results.append(result)
            file.write(json.dumps(result) + "\n")
            file.flush()
            print(json.dumps({k: v for k, v in result.items() if k not in ("task", "f1", "loss")}), flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
