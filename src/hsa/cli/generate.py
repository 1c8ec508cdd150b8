"""`hsa generate`: continue a text with a language model."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hsa.cli.help import HelpPage
from hsa.cli.inspect import STDIN
from hsa.errors import InvalidInput

if TYPE_CHECKING:
    from hsa.generation.text_stream import TextStream


HELP = HelpPage(
    examples={
        'hsa generate runs/books --prompt "The river"': "your language model",
        "hsa generate runs/convert-gpt2/model --prompt-file a.txt": "a converted model",
    },
)


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
    graph: bool = False,
    cpu: bool = False,
) -> None:
    """Continue a text with a language model.

    The text goes to stdout as it is generated; speed and cache size go to stderr at the end. Ctrl-C ends the text.

    Args:
        model: Folder of a run of `hsa train --task lm`, of one of its models, or of a causal transformers model. The latter
            is converted with the settings that `hsa convert` saved, or with the defaults.
        prompt: Text to continue; - reads it from stdin.
        prompt_file: File with the text to continue.
        max_new_tokens: Maximum number of tokens to generate.
        temperature: Temperature of sampling; 0 always takes the most likely token.
        sample_top_k: Number of most likely tokens to sample from; 0 for all.
        sample_top_p: Total probability of the most likely tokens to sample from; 1 for all tokens.
        seed: Random seed; the same seed gives the same text. Random by default.
        stop: Strings that end the text; they are not printed.
        graph: Decode a transformers model by CUDA graphs, which takes a fraction of the time for a single text. Memory for
            --max-new-tokens is reserved at once.
        cpu: Do not use a GPU.
    """
    text = _prompt(prompt, prompt_file)
    import torch

    from hsa.generation.generate_text import generate as stream_text
    from hsa.generation.sampling import Sampling
    from hsa.models.saved import is_transformers
    from hsa.training.failures import OutOfMemory, catch_oom

    sampling = Sampling(temperature, sample_top_k, sample_top_p, seed)
    device = "cpu" if cpu or not torch.cuda.is_available() else "cuda"
    if graph:
        _check_graph(model, device, is_transformers(model))
    if is_transformers(model):
        from hsa.huggingface.text_stream import load_pretrained_writer

        writer, tokenizer, ends = load_pretrained_writer(str(model), device, max_new_tokens if graph else None)
        own: dict[str, Any] = {"ends": ends, "special_tokens": True}
        stream = stream_text(
            writer, tokenizer, text, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop, **own
        )
    else:
        from hsa.training.language_model.inference import LoadedLanguageModel

        loaded = LoadedLanguageModel.load(model, device)
        stream = loaded.stream(
            text,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=sample_top_k,
            top_p=sample_top_p,
            seed=seed,
            stop=stop,
        )
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal cannot show must not end the text
    try:
        catch_oom(_write)(stream)
    except KeyboardInterrupt:
        pass
    except OutOfMemory:
        sys.stdout.write("\n" * bool(stream.ids))
        raise _explain_oom(stream, device) from None
    sys.stdout.write("\n")
    sys.stdout.flush()
    print(_summary(stream), file=sys.stderr)


def _check_graph(model: Path, device: str, is_transformers: bool) -> None:
    """Check that the model can decode by CUDA graphs."""
    if device == "cpu":
        raise InvalidInput("--graph", got="a CPU", expected="a GPU", fix="Leave out --graph")
    if not is_transformers:
        fix = "Leave out --graph"
        raise InvalidInput("--graph", got=f"{model}, a model of hsa train", expected="a transformers model", fix=fix)


def _write(stream: TextStream) -> None:
    for piece in stream:
        sys.stdout.write(piece)
        sys.stdout.flush()


def _explain_oom(stream: TextStream, device: str) -> Exception:
    """Return the error for a text that does not fit into memory."""
    import torch

    from hsa.cli.out_of_memory import explain

    model, tokens, generated = stream.model, len(stream.prompt) + len(stream.ids), len(stream.ids)
    stream.cache = None  # its memory is needed to measure

    @torch.no_grad()
    def run(length: int) -> None:
        ids = torch.ones(length, dtype=torch.long, device=device)
        model.read(ids, [length], model.new_cache(1))

    def fix(fits: int) -> str:
        return f"Shorten the prompt to about {max(1, fits - generated):,} tokens"

    return explain(run, tokens, device, fix, "Shorten the prompt")


def _prompt(prompt: str | None, file: Path | None) -> str:
    """Return the text to continue, from the command line, a file or stdin."""
    if prompt is None and file is None:
        raise InvalidInput("prompt", problem="not given", expected="--prompt TEXT or --prompt-file FILE")
    if prompt is not None and file is not None:
        raise InvalidInput("prompt", got="both --prompt and --prompt-file", expected="one of them")
    if file is not None:
        from hsa.signals.readers.text import load_text

        return load_text(file)
    if prompt != STDIN:
        return str(prompt)
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise InvalidInput("stdin", got="bytes that are not text", expected="text in UTF-8") from None


def _summary(stream: TextStream) -> str:
    """Return one line: tokens read and generated, speed, memory of the cache."""
    count = len(stream.ids)
    speed = f" at {count / stream.seconds:,.1f} tokens/s" if count and stream.seconds else ""
    endings = {"running": " (interrupted)", "end": " (end of the document)", "max_length": " (max_length of the model)"}
    return (
        f"{len(stream.prompt):,} tokens read in {stream.prompt_seconds:.2f} s, {count:,} generated{speed}"
        f"{endings.get(stream.reason, '')}; cache: {stream.cache.memory()}"
    )
