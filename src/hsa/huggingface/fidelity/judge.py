"""`Judge`: the answers of versions of a model on a task, their scores, and their differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hsa.analysis.metrics import confusion
from hsa.errors import InvalidInput
from hsa.huggingface.fidelity.examples import Examples, Tokens, number_labels, tokenize
from hsa.huggingface.observe import Counted, counting

TASKS = ("classification", "embedding", "lm")
BATCH_TOKENS = 16384
"""Default number of tokens per batch."""
_MOST_LOGITS = 2**28  # 1 GiB in float32; a few copies exist at once


@dataclass(frozen=True)
class Answers:
    """Answers of a model to all examples.

    Attributes:
        task: Task of the judge.
        values: Class probabilities `[examples, classes]`, embeddings `[texts, width]`, or mean losses `[pieces, 1]`.
        counted: Operations of attention.
    """

    task: str
    values: np.ndarray
    counted: Counted = field(default_factory=Counted, compare=False)


class Judge:
    """Examples and a task on which versions of a model are run, scored and compared.

    Args:
        examples: Examples to run on.
        task: "classification" (a label per text or pair), "embedding" (mean-pooled embeddings; for labelled pairs also the
            rank correlation of their similarity with the labels) or "lm" (perplexity of a causal language model).
        model: Model, whose config names the classes.
        tokenizer: Tokenizer of the model.
        longest: Maximum number of tokens per example; longer texts are cut. For "lm", all texts are joined and cut into
            pieces of this length.
        batch_tokens: Maximum number of tokens per batch.
        warm_up: Number of tokens at the start of each piece whose loss is ignored ("lm" only).

    Raises:
        InvalidInput: The examples do not fit the task.

    >>> judge = Judge(examples, "classification", model, tokenizer, longest=512)  # doctest: +SKIP
    >>> before = judge.ask(model)  # doctest: +SKIP
    >>> after = judge.ask(hsa.huggingface.convert(model))  # doctest: +SKIP
    >>> judge.compare(before, after)["kept"]  # doctest: +SKIP
    0.982
    """

    def __init__(
        self,
        examples: Examples,
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
            self.tokens = _cut_stream(examples, tokenizer, longest)
            self.batch_tokens = max(longest, min(batch_tokens, _MOST_LOGITS // model.config.vocab_size))
            return
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
    def ask(self, model: Any, watch: Callable[[int], None] | None = None) -> Answers:
        """Return the answers of a model to all examples. `watch` is called with the number of examples of each batch."""
        device = next(model.parameters()).device
        model.eval()
        parts: list[np.ndarray] = []
        order: list[np.ndarray] = []
        with counting() as counted:
            for rows in self.tokens.batches(self.batch_tokens):
                inputs = self.tokens.batch(rows, device)
                parts.append(self._answer(model, inputs))
                order.append(rows)
                if watch is not None:
                    watch(len(rows))
        values = np.concatenate(parts)[np.argsort(np.concatenate(order))]
        return Answers(self.task, values, counted)

    def _answer(self, model: Any, inputs: dict[str, torch.Tensor]) -> np.ndarray:
        if self.task == "classification":
            return model(**inputs).logits.float().softmax(-1).cpu().numpy()
        if self.task == "embedding":
            states = model(**inputs).last_hidden_state.float()
            mask = inputs["attention_mask"][..., None]
            return F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1).cpu().numpy()
        ids = inputs["input_ids"]
        logits = model(**inputs).logits[:, :-1].float()
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
        return loss[:, self.warm_up :].mean(1, keepdim=True).cpu().numpy()

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
            change = float(np.exp(after.values.mean() - before.values.mean()) - 1)
            return {"perplexity change": change}
        if self.task == "embedding":
            cosine = (before.values * after.values).sum(1)
            return {"cosine": float(cosine.mean()), "lowest cosine": float(cosine.min())}
        same = int((before.values.argmax(1) == after.values.argmax(1)).sum())
        low, high = wilson_interval(same, len(before.values))
        return {"kept": same / len(before.values), "kept low": low, "kept high": high}

    def distance(self, before: Answers, after: Answers) -> float:
        """Return a smooth distance for searches, 0 for equal answers: KL divergence, 1 − cosine, or added loss."""
        if self.task == "lm":
            return float((after.values - before.values).mean())
        if self.task == "embedding":
            return 1 - self.compare(before, after)["cosine"]
        tiny = np.finfo(np.float32).tiny
        p, q = before.values.astype(np.float64) + tiny, after.values.astype(np.float64) + tiny
        return float((p * np.log(p / q)).sum(1).mean())


def score_classes(predicted: np.ndarray, true: np.ndarray, classes: int) -> dict[str, float]:
    """Return accuracy, Matthews' correlation, and the means of precision, recall and F1 over the classes that occur.

    >>> {k: round(v, 3) for k, v in score_classes(np.array([0, 1, 1, 1]), np.array([0, 0, 1, 1]), 2).items()}
    {'accuracy': 0.75, 'precision': 0.833, 'recall': 0.75, 'f1': 0.733, 'matthews': 0.577}
    """
    table = confusion(predicted, true, classes).astype(np.float64)
    right, guesses, labels, total = np.diag(table), table.sum(0), table.sum(1), table.sum()
    seen = (guesses + labels) > 0
    precision = right[seen] / np.maximum(guesses[seen], 1)
    recall = right[seen] / np.maximum(labels[seen], 1)
    f1 = 2 * right[seen] / (guesses + labels)[seen]
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


def _cut_stream(examples: Examples, tokenizer: Any, longest: int) -> Tokens:
    """Join the tokens of all texts and cut them into pieces of equal length."""
    text = "\n\n".join(part for texts in examples.texts for part in texts)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    begin = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    step = longest - len(begin)
    pieces = [begin + ids[i : i + step] for i in range(0, len(ids) - step + 1, step)]
    if not pieces:
        raise InvalidInput(
            examples.name,
            expected=f"at least {step} tokens, for one piece",
            got=f"{len(ids)} tokens",
            fix="Pass smaller --max-tokens",
        )
    return Tokens(pieces, None, 0)
