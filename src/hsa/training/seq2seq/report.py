"""Training and comparison of encoder–decoders on the same prompts, and a report of their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from hsa.analysis.tables import TerminalTable, markdown_table, terminal_table
from hsa.files import write_json, write_text
from hsa.models.saved import save_seq2seq
from hsa.training.data.prepare import save_input_spec
from hsa.training.experiment import save_result
from hsa.training.failures import NoResult, OnFailure, catch_oom, lines_of, reported, rows_without_results
from hsa.training.loop import Watcher
from hsa.training.recipe import Recipe
from hsa.training.report import options_section
from hsa.training.seq2seq.data import PreparedPairs
from hsa.training.seq2seq.loop import Seq2SeqResult, seq2seq_config, seq2seq_result, train_seq2seq

_OPTIONAL = ("parameters", "loss")
_CAPTION = (
    "tokens: share of answer tokens predicted correctly, given the true tokens before; "
    "exact: share of generated answers that are correct in full"
)


def compare_seq2seq(
    recipe: Recipe,
    prepared: PreparedPairs,
    folder: Path,
    *,
    resume: bool = False,
    device: torch.device | str = "cpu",
    watch: Callable[[str], Watcher] | None = None,
    on_failure: OnFailure | None = None,
) -> list[Seq2SeqResult]:
    """Train, test and save every model of the recipe, each in its own folder; write `results.json`.

    Args:
        recipe: Models and options.
        prepared: Data.
        folder: Folder of the run.
        resume: Whether to continue unfinished models; finished ones are tested again.
        device: Device to train on.
        watch: Function that returns the watcher for a model.
        on_failure: Callback for a model without a result, after which the others continue; by default the error is raised.
    """
    options = recipe.training
    configs = {n: seq2seq_config(prepared, n, recipe.model, recipe.language, recipe.seq2seq) for n in recipe.models}

    @catch_oom
    def train(name: str) -> Seq2SeqResult:
        own = folder / name
        watcher = watch(name) if watch else None
        model, history = train_seq2seq(
            configs[name], prepared, options, folder=own, resume=resume, watcher=watcher, device=device
        )
        result = seq2seq_result(name, model, history, prepared, options)
        save_seq2seq(own, model)
        save_input_spec(own, prepared.input_spec)
        save_result(own, result)
        return result

    results = []
    for name in configs:
        with reported(name, on_failure):
            results.append(train(name))
    write_json(folder / "results.json", [asdict(result) for result in results])
    return results


def seq2seq_columns(
    results: Sequence[Seq2SeqResult], failed: Mapping[str, NoResult]
) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the table of results."""
    header = ["encoder", "decoder", "parameters", "loss", "tokens", "exact", "answers/s", "train s"]
    rows = [
        [
            r.model,
            r.decoder,
            f"{r.parameters:,}",
            f"{r.scores.loss:.4f}",
            f"{100 * r.scores.tokens:.2f}%",
            f"{100 * r.scores.exact:.2f}%",
            f"{r.answers_per_second:,.0f}",
            f"{r.training_seconds:.1f}",
        ]
        for r in results
    ]
    return header, rows + rows_without_results(failed, len(header))


def seq2seq_table(results: Sequence[Seq2SeqResult], failed: Mapping[str, NoResult]) -> TerminalTable:
    """Return the table of results for the terminal."""
    return terminal_table(*seq2seq_columns(results, failed), _CAPTION, _OPTIONAL)


def example_lines(result: Seq2SeqResult, width: int = 160) -> list[str]:
    """Return the example prompts, shortened, with the true and the generated answers."""
    lines = []
    for prompt, true, generated in result.examples:
        shown = prompt if len(prompt) <= width else f"{prompt[: width - 1]}…"
        lines += [f"prompt  {shown}", f"true    {true}", f"answer  {generated}", ""]
    return lines[:-1]


def write_seq2seq_report(
    folder: Path,
    recipe: Recipe,
    prepared: PreparedPairs,
    results: Sequence[Seq2SeqResult],
    failed: Mapping[str, NoResult],
) -> None:
    """Write `report.md`."""
    lines = [
        f"# Encoder–decoders on {prepared.name}",
        "",
        *markdown_table(*seq2seq_columns(results, failed)),
        "",
        f"{_CAPTION[0].upper()}{_CAPTION[1:]}.",
        *(f"\n- {line}" for line in lines_of(failed)),
    ]
    for result in results:
        lines += ["", f"## Answers of {result.model}", "", "```", *example_lines(result), "```"]
    lines += options_section(recipe.options("model", "language", "seq2seq", "training"))
    write_text(folder / "report.md", "\n".join(lines))
