"""`Judge`: the answers of versions of a model on a task, their scores, and their differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hsa.analysis.metrics import confusion, scores_by_class
from hsa.errors import InvalidInput
from hsa.huggingface.fidelity.examples import Examples, Tokens, number_labels, tokenize
from hsa.huggingface.fidelity.next_tokens import (
    compared_states,
    final_states,
    has_separate_head,
    mean_divergences,
    mean_losses,
)
from hsa.huggingface.fidelity.pieces import Pieces, cut_pieces
from hsa.huggingface.observe import Counted, counting

TASKS = ("classification", "embedding", "lm")
BATCH_TOKENS = 16384
"""Default number of tokens per batch."""


@dataclass(frozen=True)
class Answers:
    """Answers of a model to all examples.

    Attributes:
        task: Task of the judge.
        values: Class probabilities `[examples, classes]`, embeddings `[texts, width]`, or mean losses `[pieces, 1]`.
        counted: Operations of attention.
        divergences: For "lm", mean KL divergences of the predictions from those of the exact model, `[pieces]`.
        states: For "lm", final hidden states of some tokens of each piece, to compare predictions with.
    """

    task: str
    values: np.ndarray
    counted: Counted = field(default_factory=Counted, compare=False)
    divergences: np.ndarray | None = field(default=None, compare=False)
    states: list[Tensor] | None = field(default=None, compare=False, repr=False)


class _Part(NamedTuple):
    """Answers to the examples of a batch."""

    rows: np.ndarray
    values: np.ndarray
    divergences: np.ndarray | None = None
    states: Sequence[Tensor] = ()


class Judge:
    """Examples and a task on which versions of a model are run, scored and compared.

    Args:
        examples: Examples to run on, or for "lm" pieces of texts.
        task: "classification" (a label per text or pair), "embedding" (mean-pooled embeddings; for labelled pairs also the
            rank correlation of their similarity with the labels) or "lm" (perplexity of a causal language model).
        model: Model, whose config names the classes.
        tokenizer: Tokenizer of the model.
        longest: Maximum number of tokens per example; longer texts are cut. For "lm", examples are cut into pieces of this
            length, each from one text; texts that are shorter are joined.
        batch_tokens: Maximum number of tokens per batch.
        warm_up: Number of tokens at the start of each piece whose loss is ignored ("lm" only).

    Raises:
        InvalidInput: The examples do not fit the task.

    >>> judge = Judge(examples, "classification", model, tokenizer, longest=512)  # doctest: +SKIP
    >>> before = judge.ask(model)  # doctest: +SKIP
    >>> after = judge.ask(hsa.huggingface.convert(model), against=before)  # doctest: +SKIP
    >>> judge.compare(before, after)["kept"]  # doctest: +SKIP
    0.982
    """

    def __init__(
        self,
        examples: Examples | Pieces,
        task: str,
        model: Any,
        tokenizer: Any,
        *,
        longest: int,
        batch_tokens: int = BATCH_TOKENS,
        warm_up: int = 0,
    ):
        if task not in TASKS:
            raise InvalidInput("task", got=repr(task), expected=f"one of {', '.join(TASKS)}")
        if not len(examples):
            raise InvalidInput(examples.name, problem="no texts", expected="at least one text")
        self.task = task
        self.examples = examples
        self.batch_tokens = max(batch_tokens, longest)
        self.warm_up = warm_up
        self.labels: np.ndarray | None = None
        if task == "lm":
            if longest - 1 <= warm_up:
                raise InvalidInput(
                    "max_tokens", expected=f"more than {warm_up + 1}, to leave tokens to predict", got=longest
                )
            pieces = examples if isinstance(examples, Pieces) else cut_pieces(examples, tokenizer, longest)
            self.tokens = Tokens(pieces.ids, None, 0)
            return
        if isinstance(examples, Pieces):
            raise InvalidInput("examples", got="pieces of texts", expected=f"examples, with task {task!r}")
        if task == "classification":
            self.labels = number_labels(examples, model.config.label2id, model.config.num_labels)
            self.tokens = tokenize(examples, tokenizer, longest)
            return
        pairs = len(examples.texts[0]) == 2
        apart = Examples(examples.name, [(text,) for texts in examples.texts for text in texts])
        self.tokens = tokenize(apart, tokenizer, longest)
        if pairs and examples.labels is not None:
            self.labels = _read_similarities(examples)

    def __len__(self) -> int:
        return len(self.tokens.ids)

    @torch.inference_mode()
    def ask(self, model: Any, watch: Callable[[int], None] | None = None, *, against: Answers | None = None) -> Answers:
        """Return the answers of a model to all examples.

        Args:
            model: Model, or a converted version of it.
            watch: Function called with the number of examples of each batch.
            against: Answers of the exact model, if `distance` will be asked for. Needed for "lm" only.
        """
        device = next(model.parameters()).device
        model.eval()
        if self.task == "lm":  # the first time, this runs the model: before operations are counted
            has_separate_head(model, torch.tensor(self.tokens.ids[:1], device=device))
        parts: list[_Part] = []
        with counting() as counted:
            for rows in self.tokens.batches(self.batch_tokens):
                inputs = self.tokens.batch(rows, device)
                parts.append(self._answer(model, inputs, rows, against))
                if watch is not None:
                    watch(len(rows))
        order = np.argsort(np.concatenate([part.rows for part in parts]))
        values = np.concatenate([part.values for part in parts])[order]
        if self.task != "lm":
            return Answers(self.task, values, counted)
        if against is not None:
            return Answers(self.task, values, counted, np.concatenate([part.divergences for part in parts])[order])
        states = [row for part in parts for row in part.states]
        return Answers(self.task, values, counted, states=[states[i] for i in order])

    def _answer(self, model: Any, inputs: dict[str, Tensor], rows: np.ndarray, against: Answers | None) -> _Part:
        if self.task == "classification":
            return _Part(rows, model(**inputs).logits.float().softmax(-1).cpu().numpy())
        if self.task == "embedding":
            states = model(**inputs).last_hidden_state.float()
            mask = inputs["attention_mask"][..., None]
            return _Part(rows, F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1).cpu().numpy())
        ids = inputs["input_ids"]
        states = final_states(model, ids)
        values = mean_losses(model, ids, states, self.warm_up)[:, None].numpy()
        compared = compared_states(states, self.warm_up)
        if against is None:
            return _Part(rows, values, states=_stored(compared))
        if against.states is None:
            raise InvalidInput("against", got="answers without states", expected="those that ask(model) returned")
        before = torch.stack([against.states[row].to(states.device) for row in rows])
        return _Part(rows, values, mean_divergences(model, before, compared).numpy())

    def scores(self, answers: Answers) -> dict[str, float]:
        """Return the scores of answers by name, the main score first."""
        if self.task == "lm":
            return {"perplexity": float(np.exp(answers.values.mean()))}
        if self.task == "embedding":
            if self.labels is None:
                return {}
            left, right = answers.values[0::2], answers.values[1::2]
            return {"spearman": spearman((left * right).sum(1), self.labels)}
        assert self.labels is not None
        return score_classes(answers.values.argmax(1), self.labels, answers.values.shape[1])

    def compare(self, before: Answers, after: Answers) -> dict[str, float]:
        """Return measures of agreement between the answers before and after a conversion."""
        if self.task == "lm":
            added = after.values[:, 0] - before.values[:, 0]
            change = {"perplexity change": math.exp(added.mean()) - 1}
            if len(added) > 1:
                change["perplexity change error"] = float(added.std(ddof=1)) / math.sqrt(len(added))
            return change
        if self.task == "embedding":
            cosine = (before.values * after.values).sum(1)
            return {"cosine": float(cosine.mean()), "lowest cosine": float(cosine.min())}
        same = int((before.values.argmax(1) == after.values.argmax(1)).sum())
        low, high = wilson_interval(same, len(before.values))
        return {"kept": same / len(before.values), "kept low": low, "kept high": high}

    def distance(self, before: Answers, after: Answers) -> float:
        """Return a smooth distance for searches, 0 for equal answers: KL divergence, or 1 − cosine."""
        if self.task == "lm":
            if after is before:
                return 0.0
            if after.divergences is None:
                raise InvalidInput("after", problem="not compared", expected="answers of ask(model, against=before)")
            return float(after.divergences.mean())
        if self.task == "embedding":
            return 1 - self.compare(before, after)["cosine"]
        tiny = np.finfo(np.float32).tiny
        p, q = before.values.astype(np.float64) + tiny, after.values.astype(np.float64) + tiny
        return float((p * np.log(p / q)).sum(1).mean())


def _stored(states: Tensor) -> list[Tensor]:
    """Return a copy of the states of each piece, on the CPU if they would take over a tenth of the free GPU memory."""
    if states.is_cuda and 10 * states.nbytes > torch.cuda.mem_get_info(states.device)[0]:
        return list(states.cpu())
    return list(states.clone())


def score_classes(predicted: np.ndarray, true: np.ndarray, classes: int) -> dict[str, float]:
    """Return accuracy, Matthews' correlation, and the means of precision, recall and F1 over the classes that occur.

    >>> {k: round(v, 3) for k, v in score_classes(np.array([0, 1, 1, 1]), np.array([0, 0, 1, 1]), 2).items()}
    {'accuracy': 0.75, 'precision': 0.833, 'recall': 0.75, 'f1': 0.733, 'matthews': 0.577}
    """
    table = confusion(predicted, true, classes).astype(np.float64)
    right, guesses, labels, total = np.diag(table), table.sum(0), table.sum(1), table.sum()
    seen = (guesses + labels) > 0
    precision, recall, f1 = (values[seen] for values in scores_by_class(table))
    spread = (total**2 - (guesses**2).sum()) * (total**2 - (labels**2).sum())
    matthews = (right.sum() * total - guesses @ labels) / math.sqrt(spread) if spread > 0 else 0.0
    return {
        "accuracy": float(right.sum() / total),
        "precision": float(precision.mean()),
        "recall": float(recall.mean()),
        "f1": float(f1.mean()),
        "matthews": float(matthews),
    }


def wilson_interval(successes: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Return the confidence interval of a proportion (Wilson's score interval, 95% by default).

    >>> [round(x, 3) for x in wilson_interval(98, 100)]
    [0.93, 0.994]
    """
    share = successes / total
    centre = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    half = z / (1 + z**2 / total) * math.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Return the rank correlation. Equal values share their mean rank; if all values of one side are equal, return 0.

    >>> round(spearman(np.array([1.0, 2.0, 3.0]), np.array([10.0, 40.0, 20.0])), 3)
    0.5
    """
    ranks = _ranks(a), _ranks(b)
    return float(np.corrcoef(*ranks)[0, 1]) if all(np.ptp(r) > 0 for r in ranks) else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def _read_similarities(examples: Examples) -> np.ndarray:
    assert examples.labels is not None
    try:
        return np.array([float(label) for label in examples.labels])
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"{examples.name}: label", problem=str(error), expected="a number for the similarity of two texts"
        ) from None
