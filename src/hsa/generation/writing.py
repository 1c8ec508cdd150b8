"""Text from a language model, piece by piece, as it is made."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from hsa.errors import InvalidInput
from hsa.generation.pieces import Pieces
from hsa.generation.sampling import Sampling
from hsa.models.language_model import check_logits
from hsa.signals.readers.text import normalize_newlines
from hsa.signals.readers.tokens import encodable

END = "<|end|>"
Reason = Literal["running", "tokens", "end", "stop", "max_length"]


class Writer(Protocol):
    """A language model, as far as writing needs it: one of `hsa.models.language_models`, or a pre-trained one."""

    @property
    def config(self) -> Any:
        """With `vocabulary` and `max_length`."""

    @property
    def device(self) -> torch.device: ...

    def new_cache(self, batch: int = 1) -> Any: ...

    def read(self, tokens: Tensor, lengths: Sequence[int], cache: Any) -> Tensor: ...

    def step(self, tokens: Tensor, cache: Any) -> Tensor: ...


class Writing:
    """An iterator of pieces of text; what it has come to can be read at any time.

    Attributes:
        ids: of the tokens made so far.
        prompt: the ids of the prompt.
        cache: what the model remembers.
        reason: why it ended: "tokens" (as many as were asked for), "end" (of the document), "stop" (a stop string),
            "max_length" (of the model); "running" until then.
        seconds: spent on the tokens made so far; `prompt_seconds` on the prompt.
    """

    def __init__(
        self,
        model: Writer,
        tokenizer: Any,
        prompt: str,
        *,
        tokens: int = 200,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        ends: Collection[int] | None = None,
        special_tokens: bool = False,
    ):
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise InvalidInput("tokens", given=tokens, expected="1 or more")
        if not isinstance(prompt, str) or not prompt:
            raise InvalidInput(
                "prompt", given="an empty text", expected="a character or more for the model to go on from"
            )
        size = tokenizer.get_vocab_size()
        if size != model.config.vocabulary:
            raise InvalidInput(
                "tokenizer",
                given=f"{size:,} tokens",
                expected=f"{model.config.vocabulary:,}, as the model was made for",
            )
        self.model, self.tokenizer, self.tokens = model, tokenizer, tokens
        self.ends = {tokenizer.token_to_id(END)} if ends is None else set(ends)
        self.sampling = sampling or Sampling()
        text = encodable(normalize_newlines(prompt))
        self.prompt: list[int] = tokenizer.encode(text, add_special_tokens=special_tokens).ids
        most = model.config.max_length
        if most is not None and len(self.prompt) > most:
            raise InvalidInput(
                "prompt",
                given=f"{len(self.prompt):,} tokens",
                expected=f"at most {most:,}, the max_length of the model",
                fix="shorten the prompt",
            )
        self.ids: list[int] = []
        self.cache = model.new_cache(1)
        self.reason: Reason = "running"
        self.seconds = self.prompt_seconds = 0.0
        self._pieces = Pieces(tokenizer, stop)
        self._run = self._write()

    def __iter__(self) -> Writing:
        return self

    def __next__(self) -> str:
        return next(self._run)

    def _write(self) -> Generator[str]:
        device = self.model.device
        draws = self.sampling.generator(device)
        began = time.monotonic()
        logits = self._ask(torch.tensor(self.prompt, device=device))
        self.prompt_seconds = time.monotonic() - began
        while True:
            began = time.monotonic()
            token = self.sampling.draw(logits, draws)
            self.ids.append(int(token))
            text = "" if self.ids[-1] in self.ends else self._pieces.add(self.ids[-1])
            self.reason = self._why_end()
            if self.reason == "running":
                logits = self._ask(token)
            self.seconds += time.monotonic() - began
            if text:
                yield text
            if self.reason != "running":
                break
        if rest := self._pieces.end():
            yield rest

    def _why_end(self) -> Reason:
        if self.ids[-1] in self.ends:
            return "end"
        if self._pieces.stopped:
            return "stop"
        if len(self.ids) == self.tokens:
            return "tokens"
        full = len(self.prompt) + len(self.ids) > (self.model.config.max_length or len(self.prompt) + len(self.ids))
        return "max_length" if full else "running"

    @torch.no_grad()  # in inference mode the cache could not use what attention has pooled
    def _ask(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits after these tokens: first of the whole prompt, then of one token at a time."""
        first = not any(self.cache.lengths)
        logits = self.model.read(tokens, [len(tokens)], self.cache) if first else self.model.step(tokens, self.cache)
        check_logits(logits, f"at step {len(self.ids)} (token {sum(self.cache.lengths):,} of the text)")
        return logits


def generate(
    model: Writer,
    tokenizer: Any,
    prompt: str,
    *,
    tokens: int = 200,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    ends: Collection[int] | None = None,
    special_tokens: bool = False,
) -> Writing:
    """Go on with a text: an iterator of pieces of it, whole characters each.

    Args:
        model: in `eval` mode.
        tokenizer: a byte-level `tokenizers.Tokenizer`, that of the model.
        prompt: what to go on from; it is not repeated.
        tokens: to make, at most. The end of a document ends it too.
        sampling: how tokens are drawn.
        stop: strings that end the text; they are left out.
        ends: tokens that end a document; `<|end|>` by default.
        special_tokens: put those before and after the prompt that the tokenizer puts there.

    Raises:
        InvalidInput: an empty or overlong prompt, a tokenizer of another model; while it runs: logits that are no numbers.

    >>> from hsa.models.language_model import LanguageModel, LanguageModelConfig
    >>> from hsa.signals.readers.tokens import train_tokenizer
    >>> tokenizer = train_tokenizer(["a cat"], 260)
    >>> config = LanguageModelConfig(tokenizer.get_vocab_size(), width=8, heads=2, layers=1)
    >>> writing = generate(LanguageModel(config).eval(), tokenizer, "a c", tokens=5)
    >>> text = "".join(writing)
    >>> len(writing.ids), writing.reason
    (5, 'tokens')
    """
    return Writing(
        model, tokenizer, prompt, tokens=tokens, sampling=sampling, stop=stop, ends=ends, special_tokens=special_tokens
    )
