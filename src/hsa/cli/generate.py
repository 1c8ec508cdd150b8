"""`hsa generate`: text from a language model, as it is made."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsa.cli.inspect import STDIN
from hsa.errors import InvalidInput

if TYPE_CHECKING:
    from hsa.generation.writing import Writer, Writing


def generate(
    model: Path,
    /,
    *,
    prompt: str | None = None,
    prompt_file: Path | None = None,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    stop: tuple[str, ...] = (),
    cpu: bool = False,
) -> None:
    """Go on with a text. What is written goes to stdout as it is made; speed and the size of the cache to stderr.

    Ctrl-C ends it; what was written stays.

    Args:
        model: A folder with a run of `hsa train --task lm` or one of its models, or with a causal model of transformers: it
            attends as `hsa convert` has saved it, or as conversion does by default.
        prompt: The text to go on from; - reads it from stdin.
        prompt_file: A file with that text.
        tokens: How many to write, at most.
        temperature: 0 takes the likeliest token each time; higher is more daring.
        top_k: Draw among so many of the likeliest tokens; 0 for all.
        top_p: Draw among the likeliest tokens that together have this probability.
        seed: The same seed writes the same text.
        stop: Texts that end it; they are not written.
        cpu: Do not use a GPU.
    """
    text = _prompt(prompt, prompt_file)
    import torch

    from hsa.generation.loading import is_transformers, load_writer
    from hsa.generation.sampling import Sampling
    from hsa.generation.writing import generate as write

    sampling = Sampling(temperature, top_k, top_p, seed)
    device = "cpu" if cpu or not torch.cuda.is_available() else "cuda"
    writer: Writer
    ends: set[int] | None = None
    pretrained = is_transformers(model)
    if pretrained:
        from hsa.huggingface.text_stream import load_pretrained_writer

        writer, tokenizer, ends = load_pretrained_writer(str(model), device)
    else:
        writer, tokenizer = load_writer(model, device)
    asked: dict[str, Any] = {"tokens": tokens, "sampling": sampling, "stop": stop}
    writing = write(writer, tokenizer, text, **asked, ends=ends, special_tokens=pretrained)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shall not end the text
    try:
        for piece in writing:
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    sys.stdout.write("\n")
    sys.stdout.flush()
    print(_summary(writing), file=sys.stderr)


def _prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise InvalidInput(
            "prompt",
            given="none" if prompt is None else "a prompt and a file",
            expected="one of --prompt and --prompt-file",
        )
    if file is not None:
        from hsa.signals.readers.text import load_text

        return load_text(file)
    if prompt != STDIN:
        return str(prompt)
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise InvalidInput("stdin", given="bytes that are no text", expected="UTF-8") from None


def _summary(writing: Writing) -> str:
    """One line: how much, how fast, what it took."""
    made = len(writing.ids)
    speed = f" at {made / writing.seconds:,.1f} tokens/s" if made and writing.seconds else ""
    why = {"running": " (interrupted)", "end": " (end of the document)", "max_length": " (max_length of the model)"}
    return (
        f"{len(writing.prompt):,} tokens read in {writing.prompt_seconds:.2f} s, {made:,} written{speed}"
        f"{why.get(writing.reason, '')}; cache: {writing.cache.memory()}"
    )
