"""`hsa generate`: continue a text with a language model."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsa.cli.inspect import STDIN
from hsa.errors import InvalidInput

if TYPE_CHECKING:
    from hsa.generation.text_stream import TextStream, Writer


def generate(
    model: Path,
    /,
    *,
    prompt: str | None = None,
    prompt_file: Path | None = None,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    sample_top_k: int = 0,
    sample_top_p: float = 1.0,
    seed: int | None = None,
    stop: tuple[str, ...] = (),
    cpu: bool = False,
) -> None:
    """Continue a text. Text goes to stdout as it is generated; speed and cache size go to stderr at the end.

    Ctrl-C ends the text; what was printed stays.

    Args:
        model: Folder of a run of `hsa train --task lm`, of one of its models, or of a causal model of transformers, which
            attends as `hsa convert` saved it, or as conversion does by default.
        prompt: Text to continue; - reads it from stdin.
        prompt_file: File with the text to continue.
        max_new_tokens: Most tokens to generate.
        temperature: 0 takes the most likely token each time; higher values vary more.
        sample_top_k: Number of most likely tokens to draw from; 0 for all.
        sample_top_p: Draw from the most likely tokens that together have this probability.
        seed: Random seed; the same seed gives the same text.
        stop: Strings that end the text; they are not printed.
        cpu: Do not use a GPU.
    """
    text = _prompt(prompt, prompt_file)
    import torch

    from hsa.generation.generate import generate as stream_text
    from hsa.generation.loading import is_transformers, load_writer
    from hsa.generation.sampling import Sampling

    sampling = Sampling(temperature, sample_top_k, sample_top_p, seed)
    device = "cpu" if cpu or not torch.cuda.is_available() else "cuda"
    writer: Writer
    ends: set[int] | None = None
    pretrained = is_transformers(model)
    if pretrained:
        from hsa.huggingface.text_stream import load_pretrained_writer

        writer, tokenizer, ends = load_pretrained_writer(str(model), device)
    else:
        writer, tokenizer = load_writer(model, device)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": sampling, "stop": stop}
    stream = stream_text(writer, tokenizer, text, **options, ends=ends, special_tokens=pretrained)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character must not end the text
    try:
        for piece in stream:
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    sys.stdout.write("\n")
    sys.stdout.flush()
    print(_summary(stream), file=sys.stderr)


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


def _summary(stream: TextStream) -> str:
    """Return one line: tokens read and generated, speed, memory of the cache."""
    made = len(stream.ids)
    speed = f" at {made / stream.seconds:,.1f} tokens/s" if made and stream.seconds else ""
    why = {"running": " (interrupted)", "end": " (end of the document)", "max_length": " (max_length of the model)"}
    return (
        f"{len(stream.prompt):,} tokens read in {stream.prompt_seconds:.2f} s, {made:,} written{speed}"
        f"{why.get(stream.reason, '')}; cache: {stream.cache.memory()}"
    )
