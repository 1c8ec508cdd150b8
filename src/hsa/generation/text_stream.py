"""`TextStream`: the text of a language model in pieces, as they are generated."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from hsa.generation.sampling import Sampling
from hsa.generation.token_decoder import TokenDecoder
from hsa.models.language_model import check_logits

Reason = Literal["running", "tokens", "end", "stop", "max_length"]


class Writer(Protocol):
    """Protocol of models that generate text: language models of this library and converted decoders."""

    @property
    def config(self) -> Any:
        """Configuration with `vocabulary` and `max_length`."""

    @property
    def device(self) -> torch.device:
        """Device of the model."""

    def new_cache(self, batch: int = 1) -> Any:
        """Return an empty cache for a batch of texts."""

    def read(self, tokens: Tensor, lengths: Sequence[int], cache: Any) -> Tensor:
        """Read texts into a cache; return logits `[batch, vocabulary]` of the token after each text."""

    def step(self, tokens: Tensor, cache: Any) -> Tensor:
        """Append a token `[batch]` to every text; return logits `[batch, vocabulary]` of the next token."""


class TextStream:
    """Iterator over pieces of generated text. Its attributes can be read at any time. Made by `generate`.

    Attributes:
        prompt: Token ids of the prompt.
        ids: Token ids generated so far.
        cache: Cache of the model.
        reason: Reason for the end: "tokens" (`max_new_tokens` were generated), "end" (of the document), "stop" (a stop
            string), "max_length" (of the model); "running" until then.
        seconds: Time spent on the tokens generated so far.
        prompt_seconds: Time spent on the prompt.
    """

    def __init__(
        self,
        model: Writer,
        prompt: list[int],
        decoder: TokenDecoder,
        sampling: Sampling,
        max_new_tokens: int,
        ends: Collection[int],
    ):
        self.model, self.prompt, self.sampling, self.ends = model, prompt, sampling, ends
        self.max_new_tokens = max_new_tokens
        self.ids: list[int] = []
        self.cache = model.new_cache(1)
        self.reason: Reason = "running"
        self.seconds = self.prompt_seconds = 0.0
        self._decoder = decoder
        self._draws = sampling.generator(model.device)
        self._logits: Tensor | None = None  # logits of the next token; None until the prompt is read

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> str:
        if self._logits is None and self.reason == "running":
            self._begin()
        while self.reason == "running":
            assert self._logits is not None
            began = time.monotonic()
            token = self.sampling.draw(self._logits, self._draws)
            self.ids.append(int(token))
            text = "" if self.ids[-1] in self.ends else self._decoder.add(self.ids[-1])
            self.reason = self._why_end()
            if self.reason == "running":
                with torch.no_grad():  # inference tensors could not be stored in the cache
                    self._logits = self.model.step(token, self.cache)
                self._check()
            self.seconds += time.monotonic() - began
            if text:
                return text
        if rest := self._decoder.end():
            return rest
        raise StopIteration

    def _begin(self) -> None:
        """Read the prompt."""
        began = time.monotonic()
        with torch.no_grad():
            prompt = torch.tensor(self.prompt, device=self.model.device)
            self._logits = self.model.read(prompt, [len(self.prompt)], self.cache)
        self._check()
        self.prompt_seconds = time.monotonic() - began

    def _why_end(self) -> Reason:
        if self.ids[-1] in self.ends:
            return "end"
        if self._decoder.stopped:
            return "stop"
        if len(self.ids) == self.max_new_tokens:
            return "tokens"
        length, most = len(self.prompt) + len(self.ids), self.model.config.max_length
        return "running" if most is None or length <= most else "max_length"

    def _check(self) -> None:
        assert self._logits is not None
        check_logits(self._logits, f"at step {len(self.ids)} (token {sum(self.cache.lengths):,} of the text)")
