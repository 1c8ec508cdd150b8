"""Finished parts of a comparison, kept in a file until the report is written, so that an interrupted one can go on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hsa.attention.flops import Flops
from hsa.files import load_state, save_state
from hsa.huggingface.fidelity.judge import Answers, Judge
from hsa.huggingface.fidelity.timing import Timed, time_model
from hsa.huggingface.observe import Counted
from hsa.huggingface.settings import LayerSettings
from hsa.plain_values import check_fields

PARTS_FILE = "unfinished.pt"
"""Name of the file of parts in the folder of a comparison."""


def fingerprint(judge: Judge, model: Any, *more: Any) -> str:
    """Return a hash of everything that measurements depend on: texts, labels, weights, and the plain values in `more`."""
    labels = None if judge.labels is None else judge.labels.tolist()
    inputs = [judge.task, judge.warm_up, judge.tokens.ids, labels, *more]
    digest = hashlib.blake2b(json.dumps(inputs).encode(), digest_size=16)
    for weight in model.parameters():  # a sample of each suffices: training changes all
        some = weight.detach().flatten()[:: max(1, weight.numel() // 64)]
        digest.update(some.float().cpu().numpy().tobytes())
    return digest.hexdigest()


class Parts:
    """Answers and times of a comparison. Each is measured once and then kept in a file.

    Args:
        folder: Folder of the file. Parts of another comparison are discarded.
        judge: Examples of the comparison.
        model: Model that is compared with its converted version.
        settings: Settings of the converted version, by layer number.

    Raises:
        InvalidInput: The file is damaged.
    """

    def __init__(self, folder: Path, judge: Judge, model: Any, settings: Mapping[int, LayerSettings]):
        self.path = folder / PARTS_FILE
        where = [str(next(model.parameters()).device), str(model.dtype)]
        layers = {str(number): layer.to_json() for number, layer in sorted(settings.items())}
        self.content: dict[str, Any] = {"made_for": fingerprint(judge, model, where, layers)}
        if self.path.exists():
            expected, fix = "the finished parts of a comparison", "Delete it to start again"
            earlier = load_state(self.path, expected, fix)
            check_fields(earlier, ("made_for",), str(self.path))
            if earlier["made_for"] == self.content["made_for"]:
                self.content = earlier

    def __len__(self) -> int:
        return len(self.content) - 1

    def answers(self, name: str, ask: Callable[[], Answers]) -> Answers:
        """Return the answers of this name; `ask` for them if they are not there."""

        def measure() -> dict[str, Any]:
            answers = ask()
            counted = answers.counted
            return {
                "task": answers.task,
                "values": torch.from_numpy(answers.values),
                "layers": {number: astuple(flops) for number, flops in counted.layers.items()},
                "exact": counted.exact,
            }

        part = self._part(name, measure)
        counted = Counted({number: Flops(*flops) for number, flops in part["layers"].items()}, part["exact"])
        return Answers(part["task"], part["values"].numpy(), counted)

    def times(
        self,
        model: Any,
        settings: dict[int, LayerSettings],
        lengths: Sequence[int],
        tokenizer: Any,
        watch: Callable[[int, int], None],
    ) -> list[Timed]:
        """Return time and memory at each length, see `time_model`; call `watch` with the lengths done and their number."""
        timed = []
        for done, length in enumerate(lengths):
            watch(done, len(lengths))
            part = self._part(f"{length} tokens", partial(_time, model, settings, length, tokenizer))
            timed.append(Timed(**part))
        watch(len(lengths), len(lengths))
        return timed

    def _part(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if name not in self.content:
            self.content[name] = measure()
            save_state(self.path, self.content)
        part: dict[str, Any] = self.content[name]
        return part


def _time(model: Any, settings: dict[int, LayerSettings], length: int, tokenizer: Any) -> dict[str, Any]:
    (timed,) = time_model(model, settings, [length], tokenizer=tokenizer)
    return asdict(timed)
