"""Perplexity of a decoder whose layers are all converted: `python -m benchmarks.converted_decoder MODEL TEXTS`.

MODEL is a folder with a causal language model, TEXTS a folder with `validation/*.txt` and `test/*.txt` of 8,192 tokens or
more each. The benchmark first tries one threshold for all layers. Then it measures how far each layer alone, converted with
each threshold, moves the predictions (KL divergence on validation texts), and combines thresholds that move them least for a
given number of operations. Perplexities are those of the test texts, from token 512 on. Nothing is trained.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import RESULTS, write_table
from hsa.huggingface import convert, counting, revert

LENGTHS = (4096, 8192)
FIRST = 512
"""First token whose prediction is measured; earlier ones are context."""
JUDGED_TEXTS = 3
"""Number of validation texts for the sensitivity of layers."""
THRESHOLDS = tuple(1 / 2**i for i in range(4, 11))
"""Settings to try: shares of a query's attention from which a group of keys is exact."""
TIMES_FEWER: Mapping[int, Sequence[float]] = {4096: (5.0, 6.1, 7.0, 8.0, 10.0), 8192: (8.0, 10.2, 12.0, 14.0, 17.0)}


class Decoder:
    """A model with its tokenized texts."""

    def __init__(self, folder: Path, texts: Path, device: str):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(device)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.ids = {split: self._tokens(tokenizer, texts / split, device) for split in ("validation", "test")}
        self.layers = self.model.config.num_hidden_layers

    @staticmethod
    def _tokens(tokenizer: Any, folder: Path, device: str) -> Tensor:
        longest = max(LENGTHS)
        rows = [tokenizer(path.read_text(), return_tensors="pt").input_ids[0] for path in sorted(folder.glob("*.txt"))]
        rows = [row[:longest] for row in rows if len(row) >= longest]
        if not rows:
            raise SystemExit(f"{folder}: no text of {longest:,} tokens")
        return torch.stack(rows).to(device)

    @torch.inference_mode()
    def hidden(self, row: Tensor) -> Tensor:
        return self.model.get_decoder()(input_ids=row[None]).last_hidden_state[0]

    def logs(self, hidden: Tensor) -> Tensor:
        return F.log_softmax(self.model.get_output_embeddings()(hidden).float(), -1)

    @torch.inference_mode()
    def losses(self, split: str) -> dict[int, float]:
        """Return the mean loss by length. Attention is causal, so one pass serves all lengths."""
        sums = dict.fromkeys(LENGTHS, 0.0)
        for row in self.ids[split]:
            hidden = self.hidden(row)
            parts = []
            for begin in range(FIRST - 1, len(row) - 1, 1024):
                logs = self.logs(hidden[begin : min(begin + 1024, len(row) - 1)])
                parts.append(-logs.gather(1, row[begin + 1 : begin + 1 + len(logs), None])[:, 0])
            loss = torch.cat(parts)
            for length in LENGTHS:
                sums[length] += float(loss[: length - FIRST].mean())
        return {length: total / len(self.ids[split]) for length, total in sums.items()}

    @torch.inference_mode()
    def exact_logs(self, every: int) -> list[Tensor]:
        """Return the predictions of the exact model at every `every`-th token of the validation texts."""
        return [self.logs(self.hidden(row)[FIRST::every]).half() for row in self.ids["validation"][:JUDGED_TEXTS]]

    @torch.inference_mode()
    def moved(self, exact: list[Tensor], every: int) -> dict[int, float]:
        """Return the KL divergence from the exact predictions, by length."""
        sums = dict.fromkeys(LENGTHS, 0.0)
        for row, wanted in zip(self.ids["validation"], exact, strict=False):
            logs = self.logs(self.hidden(row)[FIRST::every])
            each = (wanted.float().exp() * (wanted.float() - logs)).sum(-1)
            for length in LENGTHS:
                sums[length] += float(each[: (length - FIRST) // every].mean())
        return sums

    @torch.inference_mode()
    def cost(self, length: int, layers: Sequence[int] | None = None) -> float:
        """Return attention operations, with clustering and selection, relative to exact attention."""
        with counting() as counted:
            self.model.get_decoder()(input_ids=self.ids["validation"][:1, :length])
        layers = range(self.layers) if layers is None else layers
        return sum(counted.layers[i].total for i in layers) / sum(counted.exact[i] for i in layers)


def cheapest(
    moved: Sequence[Sequence[float]], cost: Sequence[float], layers: int, limit: float
) -> tuple[list[int], float]:
    """Choose a threshold for every layer that moves predictions least at a mean cost of at most `limit`.

    Every layer takes the threshold with the smallest moved + price · cost; bisection finds the price.
    """

    def at(price: float) -> list[int]:
        return [min(range(len(cost)), key=lambda w: moved[i][w] + price * cost[w]) for i in range(layers)]

    low, high = 0.0, 1e6
    for _ in range(80):
        middle = (low + high) / 2
        mean = sum(cost[w] for w in at(middle)) / layers
        low, high = (low, middle) if mean <= limit else (middle, high)
    chosen = at(high)
    return chosen, sum(cost[w] for w in chosen) / layers


def main(folder: Path, texts: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    decoder = Decoder(folder, texts, device)
    every, began = 4, time.monotonic()
    some = [0, decoder.layers // 2]  # layers hardly differ in cost, so operations are counted in two of them
    base = decoder.losses("test")
    rows, costs = [], {length: [] for length in LENGTHS}  # type: ignore[var-annotated]
    for threshold in THRESHOLDS:
        convert(decoder.model, threshold=threshold)
        losses = decoder.losses("test")
        revert(decoder.model)
        convert(decoder.model, layers=some, threshold=threshold)
        for length in LENGTHS:
            costs[length].append(decoder.cost(length, some))
            up = 100 * (math.exp(losses[length] - base[length]) - 1)
            rows.append(
                [
                    f"{length:,}",
                    f"1/{1 / threshold:.0f}",
                    1 / costs[length][-1],
                    math.exp(losses[length]),
                    f"{up:+.2f}%",
                ]
            )
        revert(decoder.model)
        print(rows[-2:], f"{time.monotonic() - began:.0f} s", flush=True)
    rows.sort(key=lambda row: (row[0], row[2]))
    exact = decoder.exact_logs(every)
    moved: dict[int, list[list[float]]] = {length: [] for length in LENGTHS}
    for layer in range(decoder.layers):
        for length in LENGTHS:
            moved[length].append([])
        for threshold in THRESHOLDS:
            convert(decoder.model, layers=[layer], threshold=threshold)
            for length, kl in decoder.moved(exact, every).items():
                moved[length][layer].append(kl)
            revert(decoder.model)
        kls = " ".join(f"{x:.1e}" for x in moved[LENGTHS[-1]][layer])
        print(f"layer {layer}: {kls}, {time.monotonic() - began:.0f} s", flush=True)
    chosen_rows, kept = [], []
    for length in LENGTHS:
        for times in TIMES_FEWER[length]:
            picked, _ = cheapest(moved[length], costs[length], decoder.layers, 1 / times)
            for number, threshold in enumerate(THRESHOLDS):
                layers = [layer for layer, w in enumerate(picked) if w == number]
                if layers:
                    convert(decoder.model, layers=layers, threshold=threshold)
            loss = decoder.losses("test")[length]
            up = 100 * (math.exp(loss - base[length]) - 1)
            row = [f"{length:,}", 1 / decoder.cost(length), math.exp(loss), f"{up:+.2f}%"]
            chosen_rows.append(row)
            kept.append({"tokens": length, "times_fewer": row[1], "increase_percent": up, "picked": picked})
            revert(decoder.model)
            print(row, picked, flush=True)
    RESULTS.mkdir(exist_ok=True)
    data = {
        "thresholds": THRESHOLDS,
        "costs": costs,
        "moved": moved,
        "chosen": kept,
        "rows": rows,
    }
    (RESULTS / "converted_decoder.json").write_text(json.dumps(data))
    exact_rows = [[f"{length:,}", math.exp(base[length])] for length in LENGTHS]
    write_table(
        "converted_decoder",
        "A converted decoder: perplexity against operations",
        [
            ("Exact", ["tokens", "perplexity"], exact_rows),
            ("A threshold per layer", ["tokens", "× fewer operations", "perplexity", "increase"], chosen_rows),
            (
                "One threshold for all layers",
                ["tokens", "threshold", "× fewer operations", "perplexity", "increase"],
                rows,
            ),
        ],
        f"{folder.name}, all {decoder.layers} layers converted without training, causal. {len(decoder.ids['test'])} "
        f"test texts, tokens {FIRST} and later. Attention operations include pooling, selection and clustering. "
        f"Thresholds per layer were chosen on {JUDGED_TEXTS} validation texts.",
        command=f"python -m benchmarks.converted_decoder {folder.name} TEXTS",
    )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
