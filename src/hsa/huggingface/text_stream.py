"""Pre-trained decoders as models for the `TextStream` of `hsa.generation`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hsa.attention.cache.interface import Memory
from hsa.errors import InvalidInput
from hsa.huggingface.cache import memory_of, new_cache
from hsa.huggingface.conversion import convert
from hsa.huggingface.decoding import DecodingStep
from hsa.huggingface.loading import load_for_task, most_tokens


@dataclass(frozen=True)
class WriterConfig:
    """Size of the vocabulary, and maximum number of tokens that the model can read."""

    vocabulary: int
    max_length: int


class PretrainedCache:
    """Cache of one text, made when its prompt is read."""

    inner: Any
    step: DecodingStep | None = None

    @property
    def lengths(self) -> list[int]:
        return [self.inner.get_seq_length()]

    def memory(self) -> Memory:
        return memory_of(self.inner)


class PretrainedWriter:
    """A converted causal language model of transformers, for one text at a time.

    Args:
        model: Converted model.
        tokenizer: Its tokenizer.
        graph: Maximum number of tokens to generate by CUDA graphs, whose memory is reserved; None to decode without.
    """

    def __init__(self, model: Any, tokenizer: Any, graph: int | None = None):
        self.model, self.graph = model, graph
        self.config = WriterConfig(tokenizer.backend_tokenizer.get_vocab_size(), most_tokens(model, tokenizer))

    @property
    def device(self) -> torch.device:
        return self.model.device

    def new_cache(self, batch: int = 1) -> PretrainedCache:
        return PretrainedCache()

    def read(self, tokens: Tensor, lengths: Sequence[int], cache: PretrainedCache) -> Tensor:
        cache.inner = new_cache(self.model, None if self.graph is None else len(tokens) + self.graph)
        return self._logits(tokens[None], cache)

    def step(self, tokens: Tensor, cache: PretrainedCache) -> Tensor:
        if self.graph is None:
            return self._logits(tokens[:, None], cache)
        if cache.step is None:
            cache.step = DecodingStep(self.model, cache.inner)
        return cache.step(tokens)[:, : self.config.vocabulary].float()

    def _logits(self, ids: Tensor, cache: PretrainedCache) -> Tensor:
        """Return the logits after the last token, without those of padding rows of the embedding table."""
        out = self.model(input_ids=ids, past_key_values=cache.inner, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1, : self.config.vocabulary].float()


def load_pretrained_writer(
    name: str, device: torch.device | str = "cpu", graph: int | None = None
) -> tuple[PretrainedWriter, Any, set[int]]:
    """Load and convert a decoder. Return it, its tokenizer (a `tokenizers.Tokenizer`), and the ids that end a text.

    A model that was converted and saved gets its saved settings, any other the defaults of `convert`. For `graph`, see
    `PretrainedWriter`.

    Raises:
        InvalidInput: The model cannot be loaded, is not causal, or its tokenizer is not byte-level.
    """
    dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    model, tokenizer = load_for_task(name, "lm", dtype=dtype, device=device)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or "ByteLevel" not in str(backend.decoder):
        raise InvalidInput(
            name,
            expected="a tokenizer with byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM have",
            got="another kind of tokenizer",
            fix="In Python, call hsa.huggingface.convert(model), then model.generate",
        )
    convert(model)
    configured = model.generation_config.eos_token_id
    ends = configured if isinstance(configured, list) else [configured]
    return (
        PretrainedWriter(model, tokenizer, graph),
        backend,
        {i for i in (*ends, tokenizer.eos_token_id) if i is not None},
    )
